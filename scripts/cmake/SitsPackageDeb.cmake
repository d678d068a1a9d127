# Run by cpack before it packs: the .deb depends on the packages of the libraries that the programs need. CPACK_DEBIAN_PACKAGE_SHLIBDEPS
# would fail on libraries of no package (a CUDA toolkit installed by hand); those are left out here.
if(CPACK_GENERATOR STREQUAL "DEB")
  set(folder ${CPACK_TOPLEVEL_DIRECTORY}/shlibdeps)
  file(MAKE_DIRECTORY ${folder}/debian)
  file(WRITE ${folder}/debian/control "Source: sits2026\n\nPackage: sits2026\nArchitecture: any\n")
  file(GLOB programs ${CPACK_SITS_PROGRAMS}/sits2026*)
  list(TRANSFORM programs PREPEND -e OUTPUT_VARIABLE words)
  execute_process(COMMAND dpkg-shlibdeps -O --ignore-missing-info -xsits2026 ${words} WORKING_DIRECTORY ${folder}
    OUTPUT_VARIABLE out ERROR_VARIABLE err RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed OR NOT out MATCHES "^shlibs:Depends=(.+)")
    message(FATAL_ERROR "dpkg-shlibdeps: ${err}")
  endif()
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "${CMAKE_MATCH_1}")
endif()
