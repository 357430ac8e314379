# Flags every target of the project is built with, through the interface target qconv_flags.
add_library(qconv_flags INTERFACE)
target_include_directories(qconv_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_definitions(qconv_flags INTERFACE _POSIX_C_SOURCE=200809L _FILE_OFFSET_BITS=64)
# The bytes qconv writes must not depend on the compiler's taste: no contraction, no fast math.
# C++ is the kernels on the shim of the tests; CUDA has flags of its own (kernels/CMakeLists.txt).
set(qconv_c $<COMPILE_LANGUAGE:C>)
set(qconv_c_cxx $<COMPILE_LANGUAGE:C,CXX>)
target_compile_options(qconv_flags INTERFACE
  "$<${qconv_c_cxx}:-ffp-contract=off;-fvisibility=hidden;-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>"
  "$<${qconv_c_cxx}:-Wall;-Wextra;-fstack-protector-strong>"
  "$<${qconv_c}:-Wpedantic;-Wconversion;-Wsign-conversion;-Wshadow;-Wstrict-prototypes>"
  "$<${qconv_c}:-Wmissing-prototypes;-Wcast-qual;-Wcast-align;-Wvla;-Wformat=2;-Wundef>"
  "$<${qconv_c}:-Wswitch-enum;-Wdouble-promotion;-Wwrite-strings>")
if(QCONV_WERROR)
  target_compile_options(qconv_flags INTERFACE $<${qconv_c_cxx}:-Werror>)
endif()
# What a sanitizer's report and gcov name are lines: without variables a build with sanitizers takes
# two thirds of the time.
set(qconv_debug_info -g1)
if(CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(qconv_debug_info -g)
endif()
if(QCONV_SANITIZE)
  target_compile_options(qconv_flags INTERFACE -fsanitize=${QCONV_SANITIZE}
    -fno-sanitize-recover=all -fno-omit-frame-pointer ${qconv_debug_info})
  target_link_options(qconv_flags INTERFACE -fsanitize=${QCONV_SANITIZE})
elseif(CMAKE_BUILD_TYPE MATCHES "Release|RelWithDebInfo")
  target_compile_definitions(qconv_flags INTERFACE
    $<${qconv_c_cxx}:_FORTIFY_SOURCE=2>)
endif()
if(QCONV_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "QCONV_FUZZ needs clang (-DCMAKE_C_COMPILER=clang)")
  endif()
  target_compile_options(qconv_flags INTERFACE -fsanitize=fuzzer-no-link)
  target_link_options(qconv_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(QCONV_COVERAGE)
  target_link_options(qconv_flags INTERFACE --coverage)
endif()
