# Private targets: what the project's own executables are compiled with. Never exported, never linked by a library.

add_library(sinkstate_project_warnings INTERFACE)
target_compile_options(sinkstate_project_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion
  $<$<BOOL:${SINKSTATE_WARNINGS_AS_ERRORS}>:-Werror>
  # g++ 12 in C++20 sees overlaps in std::string's own operator+ (GCC bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)

add_library(sinkstate_project_options INTERFACE)
target_link_libraries(sinkstate_project_options INTERFACE sinkstate_project_warnings)
if(SINKSTATE_NATIVE)
  target_compile_options(sinkstate_project_options INTERFACE -march=native)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # g++ 12 warns of its own AVX-512 intrinsics.
    target_compile_options(sinkstate_project_options INTERFACE -mno-avx512f)
  endif()
endif()
