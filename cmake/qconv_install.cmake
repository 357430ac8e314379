# What others build with (docs/library.md): libqconv, libqconv_cuda, their headers, pkg-config file
# and CMake package; and beside them the program, its page and completions.
# cpack -G DEB makes one package of all of it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Headers that need no others: each is some of the tree, one after the other, without the includes
# of it. It begins with `first`.
function(qconv_header name first)
  set(text "/* From ${ARGN}. */\n${first}")
  string(REPLACE ";" ", " text "${text}")
  foreach(part ${ARGN})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${part})
    file(READ ${CMAKE_SOURCE_DIR}/${part} part_text)
    string(REGEX REPLACE "#include \"[^\n]*\n" "" part_text "${part_text}")
    string(APPEND text "\n${part_text}")
  endforeach()
  file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/include/qconv/${name} CONTENT "${text}")
  set(qconv_headers ${qconv_headers} ${CMAKE_BINARY_DIR}/include/qconv/${name} PARENT_SCOPE)
endfunction()
set(qconv_headers)
qconv_header(device_reader.h "" base/status.h base/dtype.h formats/device_reader.h)
qconv_header(qconv.h "#include <qconv/device_reader.h>\n" base/interrupt.h convert/library/library.h
  convert/library/values.h quant/quant_weights.h quant/weight_slice.h quant/cpu_matmul.h)

# What runs on GPUs; installed where there are kernels.
qconv_header(gpu_load.h "#include <qconv/device_reader.h>\n" convert/gpu/gpu_load.h)
qconv_header(qconv_cuda.h "#include <qconv/qconv.h>\n#include <qconv/gpu_load.h>\n"
  kernels/cuda_device.h kernels/cuda_dequantize.h kernels/matmul.h kernels/matmul_experts.h)
if(NOT TARGET qconv_kernels)
  list(FILTER qconv_headers EXCLUDE REGEX "/(gpu_load|qconv_cuda)[.]h$")
endif()

# A fuzzing build has no program to install, and counters would count device_reader.c twice.
if(QCONV_FUZZ OR QCONV_COVERAGE)
  return()
endif()

# cmake/NAME.map.in names the functions for others; the linker takes them, and what they need, from
# the static libraries. Before 1.0 every minor version may change the interface.
function(qconv_shared target name source)
  set(map ${CMAKE_BINARY_DIR}/${name}.map)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/${name}.map.in ${map} @ONLY)
  file(STRINGS ${map} symbols REGEX "^ +qc_[a-z0-9_]+;")
  list(TRANSFORM symbols REPLACE "^ +(.*);" "LINKER:--undefined=\\1")
  string(REGEX REPLACE "^lib" "" name ${name})
  add_library(${target} SHARED ${source})
  target_compile_definitions(${target} PRIVATE QCONV_VERSION="${PROJECT_VERSION}")
  target_link_options(${target} PRIVATE ${symbols} LINKER:--version-script=${map})
  target_link_libraries(${target} PRIVATE qconv_flags ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} EXPORT_NAME ${name}
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR} LINK_DEPENDS ${map} INSTALL_RPATH "$ORIGIN")
  target_include_directories(${target}
    INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  if(NOT QCONV_SANITIZE)
    target_link_options(${target} PRIVATE LINKER:--no-undefined)
  endif()
endfunction()
qconv_shared(qconv_library libqconv ${CMAKE_SOURCE_DIR}/convert/library/library.c
  qconv_values qconv_formats qconv_quant qconv_base)
set(qconv_libraries qconv_library)
# docs/decisions/0024-two-libraries.md
if(TARGET qconv_kernels)
  qconv_shared(qconv_cuda libqconv_cuda ${CMAKE_SOURCE_DIR}/convert/gpu/gpu_load.c
    qconv_library qconv_kernels)
  list(APPEND qconv_libraries qconv_cuda)
endif()

# The manual page and the completions, in pages/: what `qconv help --json` says. Without a Python, and where
# the program is for another kind of machine, qconv is built and installed without them.
set(qconv_pages)
find_package(Python3 3.9 COMPONENTS Interpreter QUIET)
if(Python3_Interpreter_FOUND AND NOT CMAKE_CROSSCOMPILING)
  foreach(name qconv.1 qconv.bash qconv.zsh qconv.fish)
    list(APPEND qconv_pages ${CMAKE_BINARY_DIR}/pages/${name})
  endforeach()
  add_custom_command(OUTPUT ${qconv_pages}
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_SOURCE_DIR}/cmake/make_pages.py $<TARGET_FILE:qconv>
      ${CMAKE_BINARY_DIR}/pages
    DEPENDS qconv ${CMAKE_SOURCE_DIR}/cmake/make_pages.py VERBATIM)
  add_custom_target(qconv_pages ALL DEPENDS ${qconv_pages})
else()
  message(STATUS "No manual page and no completions: making them takes Python 3.9")
endif()

# Installs them below the folder, where there are any.
function(qconv_install_pages man data)
  if(NOT TARGET qconv_pages)
    return()
  endif()
  set(pages ${CMAKE_BINARY_DIR}/pages)
  install(FILES ${pages}/qconv.1 DESTINATION ${man}/man1)
  install(FILES ${pages}/qconv.bash RENAME qconv DESTINATION ${data}/bash-completion/completions)
  install(FILES ${pages}/qconv.zsh RENAME _qconv DESTINATION ${data}/zsh/vendor-completions)
  install(FILES ${pages}/qconv.fish DESTINATION ${data}/fish/vendor_completions.d)
endfunction()

# The Python wheel (pyproject.toml) has the program and the libraries inside its package, each as one
# file, because a wheel holds no links.
if(SKBUILD)
  install(TARGETS qconv RUNTIME DESTINATION qconv/bin)
  foreach(library ${qconv_libraries})
    set_property(TARGET ${library} PROPERTY VERSION)
    set_property(TARGET ${library} PROPERTY SOVERSION)
    install(TARGETS ${library} LIBRARY DESTINATION qconv/lib)
  endforeach()
  qconv_install_pages(${SKBUILD_DATA_DIR}/share/man ${SKBUILD_DATA_DIR}/share)
  return()
endif()

# The same for programs that link statically. Names that are no part of the interface are seen in it.
add_library(qconv_archive STATIC ${CMAKE_SOURCE_DIR}/convert/library/library.c
  $<TARGET_OBJECTS:qconv_values> $<TARGET_OBJECTS:qconv_formats> $<TARGET_OBJECTS:qconv_quant>
  $<TARGET_OBJECTS:qconv_base>)
target_compile_definitions(qconv_archive PRIVATE QCONV_VERSION="${PROJECT_VERSION}")
target_link_libraries(qconv_archive PRIVATE qconv_flags)
set_target_properties(qconv_archive PROPERTIES OUTPUT_NAME qconv
  ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})

set(qconv_package ${CMAKE_INSTALL_LIBDIR}/cmake/qconv)
install(TARGETS ${qconv_libraries} EXPORT qconv_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS qconv_archive ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS qconv RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${qconv_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/qconv)
install(EXPORT qconv_targets NAMESPACE qconv:: DESTINATION ${qconv_package})
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/qconv_config.cmake.in
  ${CMAKE_BINARY_DIR}/qconvConfig.cmake INSTALL_DESTINATION ${qconv_package})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/qconvConfigVersion.cmake
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/qconvConfig.cmake ${CMAKE_BINARY_DIR}/qconvConfigVersion.cmake
  DESTINATION ${qconv_package})

# By the place of the file itself, so that what is installed may be moved.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(qconv_pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(qconv_pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
  set(qconv_pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH qconv_pc_up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" qconv_pc_up "${qconv_pc_up}")
  set(qconv_pc_prefix "\${pcfiledir}/${qconv_pc_up}")
  set(qconv_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(qconv_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(${CMAKE_SOURCE_DIR}/cmake/qconv.pc.in ${CMAKE_BINARY_DIR}/qconv.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/qconv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET qconv_cuda)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/qconv_cuda.pc.in ${CMAKE_BINARY_DIR}/qconv_cuda.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/qconv_cuda.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

qconv_install_pages(${CMAKE_INSTALL_MANDIR} ${CMAKE_INSTALL_DATADIR})
install(FILES LICENSE RENAME copyright DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Messages, help and the README name pages as docs/NAME.md.
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs FILES_MATCHING PATTERN "*.md"
  PATTERN examples EXCLUDE)

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME qconv)
set(CPACK_PACKAGE_VENDOR "The qconv developers")
set(CPACK_PACKAGE_CONTACT "The qconv developers")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)     # the libraries by name and version
# eval and calibration load OpenBLAS while they run, so no program links to it.
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS libopenblas0)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON) # and ldconfig
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
