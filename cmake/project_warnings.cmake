# Private targets: what the project's own executables are compiled with. Never exported, never linked by a library.

add_library(sinkstate_project_warnings INTERFACE)
target_compile_options(sinkstate_project_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion
  $<$<BOOL:${SINKSTATE_WARNINGS_AS_ERRORS}>:-Werror>)

add_library(sinkstate_project_options INTERFACE)
target_link_libraries(sinkstate_project_options INTERFACE sinkstate_project_warnings)
target_compile_options(sinkstate_project_options INTERFACE
  $<$<BOOL:${SINKSTATE_NATIVE}>:-march=native>)
