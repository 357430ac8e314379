# Whether, with what and for which GPUs the kernels are built. Sets QCONV_HAVE_CUDA; if it is on,
# the language CUDA is enabled, CMAKE_CUDA_ARCHITECTURES is set, and
#   QCONV_CUDA_CODE   "75-real 80-real 90-virtual", for kernels/cuda_internal.h
#   QCONV_CUDA_BUILD  "CUDA 13.0: sm_75 sm_80 compute_90", for people
# AUTO builds them for the GPUs that are here (or for CMAKE_CUDA_ARCHITECTURES), where nvcc is found
# and works, and says why not otherwise. ON builds them for all architectures, or fails.
set(QCONV_HAVE_CUDA OFF)

# The oldest with code for sm_89 and sm_90.
set(qconv_cuda_oldest 11.8)

macro(qconv_no_cuda)
  string(CONCAT qconv_cuda_why ${ARGN})
  if(QCONV_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QCONV_CUDA=ON, but ${qconv_cuda_why}")
  endif()
  message(STATUS "No CUDA kernels, the CPU only: ${qconv_cuda_why}")
  return()
endmacro()

if(NOT QCONV_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "QCONV_CUDA is AUTO, ON or OFF, not ${QCONV_CUDA}")
elseif(QCONV_CUDA STREQUAL "OFF")
  return()
elseif(QCONV_SANITIZE OR QCONV_COVERAGE OR QCONV_FUZZ)
  # nvcc's host code would be without them; the kernels run under them on the shim of the tests.
  qconv_no_cuda("sanitizers and coverage are for the host's code")
endif()

# Where CMake will look as well: CMAKE_CUDA_COMPILER, CUDACXX, the path, the usual folder.
if(CMAKE_CUDA_COMPILER)
  set(qconv_nvcc ${CMAKE_CUDA_COMPILER})
elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
  set(qconv_nvcc $ENV{CUDACXX})
else()
  find_program(QCONV_NVCC nvcc HINTS ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda/bin)
  mark_as_advanced(QCONV_NVCC)
  set(qconv_nvcc ${QCONV_NVCC})
endif()
if(NOT qconv_nvcc)
  qconv_no_cuda("there is no nvcc (set CUDACXX, or PATH)")
endif()
execute_process(COMMAND ${qconv_nvcc} --version OUTPUT_VARIABLE qconv_nvcc_says
  ERROR_VARIABLE qconv_nvcc_says RESULT_VARIABLE qconv_nvcc_rc)
if(NOT qconv_nvcc_rc EQUAL 0 OR NOT qconv_nvcc_says MATCHES "release ([0-9]+\\.[0-9]+)")
  qconv_no_cuda("${qconv_nvcc} --version does not answer as nvcc does")
endif()
set(qconv_nvcc_version ${CMAKE_MATCH_1})
if(qconv_nvcc_version VERSION_LESS qconv_cuda_oldest)
  qconv_no_cuda("${qconv_nvcc} is CUDA ${qconv_nvcc_version}, older than ${qconv_cuda_oldest}")
endif()

# For the GPUs that are here, if it is not said what for. ("native" says the same.)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
endif()
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native"
    OR (QCONV_CUDA STREQUAL "AUTO" AND "${CMAKE_CUDA_ARCHITECTURES}" STREQUAL ""))
  include(qconv_gpu_here)
  qconv_gpu_here(qconv_gpus)
  if(NOT qconv_gpus)
    qconv_no_cuda("there is no GPU here (-DQCONV_CUDA=ON builds them for all GPUs)")
  endif()
  execute_process(COMMAND ${qconv_nvcc} --list-gpu-code OUTPUT_VARIABLE qconv_nvcc_codes
    ERROR_QUIET)
  qconv_gpu_code(qconv_here "${qconv_gpus}" "${qconv_nvcc_codes}")
  if(NOT qconv_here AND NOT qconv_gpus STREQUAL "unknown")
    list(JOIN qconv_gpus ", sm_" qconv_gpus)
    qconv_no_cuda("CUDA ${qconv_nvcc_version} has no code for the GPU here, sm_${qconv_gpus}")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${qconv_here}") # all where the GPU does not tell what it is
endif()

# CMake would build for sm_52 or sm_75 alone. Machine code for what is named in docs/building.md;
# sm_70's also runs on an sm_75, and CUDA 13 has no sm_70. Blackwell is known from CUDA 12.8 on:
# sm_100's code runs on all of 10.x (B200, B300) and sm_120's on all of 12.x (RTX 50, GB10).
# The PTX is that of compute_90 and not of the newest, because no kernel asks for more than 9.0 and
# PTX runs on nothing older than itself: compute_120's would leave out 11.0 (Jetson Thor), which lies
# between the two machine codes of Blackwell.
if("${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real)
  if(qconv_nvcc_version VERSION_LESS 13)
    list(PREPEND CMAKE_CUDA_ARCHITECTURES 70-real)
  else()
    list(PREPEND CMAKE_CUDA_ARCHITECTURES 75-real)
  endif()
  if(NOT qconv_nvcc_version VERSION_LESS 12.8)
    list(APPEND CMAKE_CUDA_ARCHITECTURES 100-real 120-real)
  endif()
  list(APPEND CMAKE_CUDA_ARCHITECTURES 90-virtual)
endif()

# CUDA 11.8 takes g++ up to 11.
if(NOT CMAKE_CUDA_HOST_COMPILER AND "$ENV{CUDAHOSTCXX}" STREQUAL ""
    AND qconv_nvcc_version VERSION_LESS 12.0)
  find_program(QCONV_CUDA_HOST NAMES g++-11 g++-10 g++-9)
  mark_as_advanced(QCONV_CUDA_HOST)
  set(qconv_cuda_host ${QCONV_CUDA_HOST})
elseif(CMAKE_CUDA_HOST_COMPILER)
  set(qconv_cuda_host ${CMAKE_CUDA_HOST_COMPILER})
else()
  set(qconv_cuda_host $ENV{CUDAHOSTCXX})
endif()

# Does it work, with this host compiler and headers of its own? CMake's own check does not say why
# not.
list(GET CMAKE_CUDA_ARCHITECTURES 0 qconv_cuda_first)
string(REGEX REPLACE "[^0-9].*" "" qconv_cuda_first "${qconv_cuda_first}")
set(qconv_cuda_probe ${CMAKE_BINARY_DIR}/CMakeFiles/qconv_cuda_probe)
file(WRITE ${qconv_cuda_probe}.cu "#include <cuda_runtime.h>\n"
  "#if CUDART_VERSION / 10 != __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__\n"
  "#error headers of another CUDA are found first\n#endif\n"
  "__global__ void probe(int *p) { *p = 1; }\nvoid call(int *p) { probe<<<1, 1>>>(p); }\n")
set(qconv_cuda_probe_flags -c ${qconv_cuda_probe}.cu -o ${qconv_cuda_probe}.o)
if(qconv_cuda_first)
  list(APPEND qconv_cuda_probe_flags -arch=sm_${qconv_cuda_first})
endif()
if(qconv_cuda_host)
  list(APPEND qconv_cuda_probe_flags -ccbin ${qconv_cuda_host})
endif()
execute_process(COMMAND ${qconv_nvcc} ${qconv_cuda_probe_flags} OUTPUT_VARIABLE qconv_nvcc_says
  ERROR_VARIABLE qconv_nvcc_says RESULT_VARIABLE qconv_nvcc_rc)
if(NOT qconv_nvcc_rc EQUAL 0)
  if(qconv_nvcc_says MATCHES "headers of another CUDA")
    qconv_no_cuda("${qconv_nvcc} (CUDA ${qconv_nvcc_version}) finds the headers of another CUDA "
      "first: set CPATH to a folder that has its own alone (docs/building.md)")
  elseif(qconv_nvcc_says MATCHES "unsupported GNU version|No such file or directory"
      AND qconv_nvcc_version VERSION_LESS 12.0)
    qconv_no_cuda("CUDA ${qconv_nvcc_version} needs a C++ compiler of its time, up to g++-11: "
      "install g++-11 or name one in CUDAHOSTCXX")
  endif()
  string(REGEX REPLACE "\n.*" "" qconv_nvcc_says "${qconv_nvcc_says}")
  qconv_no_cuda("${qconv_nvcc} cannot compile an empty kernel for sm_${qconv_cuda_first}: "
    "${qconv_nvcc_says}")
endif()

# In the cache, so that configuring again, without the environment of now, means the same.
set(CMAKE_CUDA_COMPILER ${qconv_nvcc} CACHE FILEPATH "nvcc")
if(qconv_cuda_host)
  set(CMAKE_CUDA_HOST_COMPILER ${qconv_cuda_host} CACHE FILEPATH "nvcc's C++ compiler")
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
enable_language(CUDA)
find_package(CUDAToolkit ${qconv_nvcc_version} REQUIRED)

# qconv compares its GPUs with numbers.
if(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "^[0-9]+[af]?(-real|-virtual)?(;[0-9]+[af]?(-real|-virtual)?)*$")
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES=${CMAKE_CUDA_ARCHITECTURES}: expected compute "
    "capabilities as in 80-real;90-virtual, or native where the GPU is")
endif()

list(JOIN CMAKE_CUDA_ARCHITECTURES " " QCONV_CUDA_CODE)
string(REGEX REPLACE "([0-9]+[af]?)-real" "sm_\\1" QCONV_CUDA_BUILD "${QCONV_CUDA_CODE}")
string(REGEX REPLACE "([0-9]+[af]?)-virtual" "compute_\\1" QCONV_CUDA_BUILD "${QCONV_CUDA_BUILD}")
string(REGEX REPLACE "(^| )([0-9]+[af]?)" "\\1sm_\\2 compute_\\2" QCONV_CUDA_BUILD
  "${QCONV_CUDA_BUILD}")
set(QCONV_CUDA_BUILD "CUDA ${qconv_nvcc_version}: ${QCONV_CUDA_BUILD}")
set(QCONV_HAVE_CUDA ON)
message(STATUS "CUDA kernels: ${QCONV_CUDA_BUILD}")
