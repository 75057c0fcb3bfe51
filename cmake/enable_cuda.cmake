# nvcc and its toolkit, for SINKSTATE_ENABLE_CUDA.

# For the project's own executables: machine code for Hopper, and for the rest from Ampere on what the driver compiles.
# The default of an old CMake may be an architecture that a new nvcc has forgotten.
if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES "90-real;80-virtual" CACHE STRING "CUDA architectures")
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR
    "SINKSTATE_ENABLE_CUDA: wanted an nvcc that works, on the PATH, in the environment variable CUDACXX or in "
    "CMAKE_CUDA_COMPILER; found none. Without CUDA, configure with -DSINKSTATE_ENABLE_CUDA=OFF.")
endif()
enable_language(CUDA)

find_package(CUDAToolkit)
if(NOT CUDAToolkit_FOUND)
  message(FATAL_ERROR
    "SINKSTATE_ENABLE_CUDA: found ${CMAKE_CUDA_COMPILER}, but not the toolkit's headers and runtime beside it; "
    "set CUDAToolkit_ROOT.")
endif()
