# Run by cpack over the staged tree: configuration belongs to /etc, not /usr/etc.
if(CPACK_GENERATOR STREQUAL "DEB" AND EXISTS ${CPACK_TEMPORARY_DIRECTORY}/usr/etc)
  file(RENAME ${CPACK_TEMPORARY_DIRECTORY}/usr/etc ${CPACK_TEMPORARY_DIRECTORY}/etc)
endif()
