# What others build with: libqconv, which reads outputs (formats/device_reader.h), its header, its
# pkg-config file and its CMake package; and beside them the program, its page and completions.
# cpack -G DEB makes one package of all of it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# One header that needs no other: what device_reader.h includes of the tree, then itself.
set(qconv_header ${CMAKE_BINARY_DIR}/include/qconv/device_reader.h)
set(qconv_header_text "/* From base/status.h, base/dtype.h and formats/device_reader.h. */\n")
foreach(part base/status.h base/dtype.h formats/device_reader.h)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${part})
  file(READ ${CMAKE_SOURCE_DIR}/${part} text)
  string(REGEX REPLACE "#include \"[^\n]*\n" "" text "${text}")
  string(APPEND qconv_header_text "\n${text}")
endforeach()
file(GENERATE OUTPUT ${qconv_header} CONTENT "${qconv_header_text}")

# And where there are kernels, what loads to a GPU.
set(qconv_headers ${qconv_header})
if(TARGET qconv_kernels)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS convert/gpu/gpu_load.h)
  file(READ ${CMAKE_SOURCE_DIR}/convert/gpu/gpu_load.h text)
  string(REPLACE "#include \"formats/device_reader.h\"" "#include <qconv/device_reader.h>" text
    "${text}")
  file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/include/qconv/gpu_load.h CONTENT "${text}")
  list(APPEND qconv_headers ${CMAKE_BINARY_DIR}/include/qconv/gpu_load.h)
endif()

# A fuzzing build has no program to install, and counters would count device_reader.c twice.
if(QCONV_FUZZ OR QCONV_COVERAGE)
  return()
endif()

# The files that have functions for others; what they need comes from the static libraries. All but
# QC_API is hidden. Before 1.0 every minor version may change the interface.
add_library(qconv_library SHARED ${CMAKE_SOURCE_DIR}/base/status.c ${CMAKE_SOURCE_DIR}/base/dtype.c
  ${CMAKE_SOURCE_DIR}/formats/device_reader.c)
target_link_libraries(qconv_library PRIVATE qconv_flags qconv_formats qconv_base)
set_target_properties(qconv_library PROPERTIES OUTPUT_NAME qconv EXPORT_NAME qconv
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
target_include_directories(qconv_library INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
if(TARGET qconv_kernels)
  target_sources(qconv_library PRIVATE ${CMAKE_SOURCE_DIR}/convert/gpu/gpu_load.c)
  target_link_libraries(qconv_library PRIVATE qconv_kernels)
endif()
target_link_options(qconv_library PRIVATE LINKER:--exclude-libs,ALL) # CUDA's runtime is in an archive
if(NOT QCONV_SANITIZE)
  target_link_options(qconv_library PRIVATE LINKER:--no-undefined)
endif()

set(qconv_package ${CMAKE_INSTALL_LIBDIR}/cmake/qconv)
install(TARGETS qconv_library EXPORT qconv_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
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

install(FILES docs/qconv.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES completions/qconv.bash RENAME qconv
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES completions/qconv.zsh RENAME _qconv
  DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
install(FILES completions/qconv.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
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
if(QCONV_HAVE_FUSE)
  string(APPEND CPACK_DEBIAN_PACKAGE_RECOMMENDS ", fuse3") # for fusermount3
endif()
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON) # and ldconfig
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
