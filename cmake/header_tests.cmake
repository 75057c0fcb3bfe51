# One generated source per header that an ordinary C++ compiler must accept: each header compiles alone, and twice.
function(sinkstate_add_header_tests target)
  set(include_dir "${PROJECT_SOURCE_DIR}/include")
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${include_dir}" "${include_dir}/sinkstate/*.hpp")
  list(FILTER headers EXCLUDE REGEX "^sinkstate/cuda/")

  set(sources "")
  foreach(header IN LISTS headers)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/header_tests/${header}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT "#include <@header@>\n#include <@header@>  // NOLINT\n" @ONLY)
    list(APPEND sources "${source}")
  endforeach()

  add_library(${target} OBJECT ${sources})
  target_link_libraries(${target} PRIVATE sinkstate::host sinkstate_project_warnings)
  target_compile_options(${target} PRIVATE -Werror -O0)
endfunction()
