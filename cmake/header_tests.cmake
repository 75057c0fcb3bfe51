# One generated source per header: each header compiles alone, and twice.

# sinkstate_header_test_sources(RESULT EXTENSION HEADER...)
function(sinkstate_header_test_sources result extension)
  set(sources "")
  foreach(header IN LISTS ARGN)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/header_tests/${header}.${extension}")
    file(CONFIGURE OUTPUT "${source}" CONTENT "#include <@header@>\n#include <@header@>  // NOLINT\n" @ONLY)
    list(APPEND sources "${source}")
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# The headers that an ordinary C++ compiler must accept.
function(sinkstate_add_header_tests target)
  set(include_dir "${PROJECT_SOURCE_DIR}/include")
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${include_dir}" "${include_dir}/sinkstate/*.hpp")
  list(FILTER headers EXCLUDE REGEX "^sinkstate/cuda/")
  sinkstate_header_test_sources(sources cpp ${headers})

  add_library(${target} OBJECT ${sources})
  target_link_libraries(${target} PRIVATE sinkstate::host sinkstate_project_warnings)
  target_compile_options(${target} PRIVATE -Werror -O0)
endfunction()

# And those that nvcc must: all outside host/, of which sinkstate.hpp is the door. Eigen is out of reach here.
function(sinkstate_add_cuda_header_tests target)
  set(include_dir "${PROJECT_SOURCE_DIR}/include")
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${include_dir}"
    "${include_dir}/sinkstate/*.hpp" "${include_dir}/sinkstate/*.cuh")
  list(FILTER headers EXCLUDE REGEX "^sinkstate/(host/|sinkstate\\.hpp$)")
  sinkstate_header_test_sources(sources cu ${headers})

  add_library(${target} OBJECT ${sources})
  target_link_libraries(${target} PRIVATE sinkstate::cuda)
  target_compile_options(${target} PRIVATE -Werror=all-warnings)
endfunction()
