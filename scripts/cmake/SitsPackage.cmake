# cmake --install: programs, manual pages, bash completion, configuration, service unit; cpack: a .deb and a .tar.gz of the same.
#
# Pages and completion come from the programs' own option tables, written whenever they are built. For tools whose help is in parts
# (bench, eval) the page shows all of them.
include(GNUInstallDirs)

set(SITS_MAN_DIR ${CMAKE_BINARY_DIR}/man)
file(MAKE_DIRECTORY ${SITS_MAN_DIR})
set(SITS_MAN_SCRIPT ${CMAKE_SOURCE_DIR}/scripts/man_of_help)
set(SITS_SUMMARY_opt "find the fewest layers with 8-bit inputs for a loss of quality")
set(SITS_SUMMARY_compile "quantise a model into one engine file")
set(SITS_SUMMARY_bench "measure a model, a running server or a scheduling policy")
set(SITS_SUMMARY_eval "perplexity, logits and continuations of a model")
set(SITS_COMMANDS_bench engine throughput serve simulate)

set(SITS_PAGES)
function(sits_man_page tool)
  set(name sits2026-${tool})
  set(help "$<TARGET_FILE:${name}> --help")
  foreach(command ${SITS_COMMANDS_${tool}})
    string(APPEND help " && echo && $<TARGET_FILE:${name}> ${command} --help")
  endforeach()
  add_custom_command(OUTPUT ${SITS_MAN_DIR}/${name}.1
    COMMAND sh -c "{ ${help}; } | ${SITS_MAN_SCRIPT} ${name} 1 '${SITS_SUMMARY_${tool}}' ${PROJECT_VERSION} > ${SITS_MAN_DIR}/${name}.1"
    DEPENDS ${name} ${SITS_MAN_SCRIPT} VERBATIM)
  set(SITS_PAGES ${SITS_PAGES} ${SITS_MAN_DIR}/${name}.1 PARENT_SCOPE)
  install(FILES ${SITS_MAN_DIR}/${name}.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endfunction()

# Installed programs look for libraries beside themselves first (scripts/bundle); the old kind of tag, because it holds for the libraries of
# their libraries too.
foreach(program sits2026d sits2026-opt sits2026-compile sits2026-bench sits2026-eval)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
    target_link_options(${program} PRIVATE -Wl,--disable-new-dtags)
  endif()
endforeach()

foreach(tool opt compile bench eval)
  if(TARGET sits2026-${tool})
    install(TARGETS sits2026-${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    sits_man_page(${tool})
  endif()
endforeach()
if(TARGET sits2026d)
  install(TARGETS sits2026d RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  add_custom_command(OUTPUT ${SITS_MAN_DIR}/sits2026d.8 ${SITS_MAN_DIR}/sits2026d.bash
    COMMAND sh -c "$<TARGET_FILE:sits2026d> --print-man > ${SITS_MAN_DIR}/sits2026d.8"
    COMMAND sh -c "$<TARGET_FILE:sits2026d> --print-completion > ${SITS_MAN_DIR}/sits2026d.bash"
    DEPENDS sits2026d VERBATIM)
  list(APPEND SITS_PAGES ${SITS_MAN_DIR}/sits2026d.8)
  install(FILES ${SITS_MAN_DIR}/sits2026d.8 DESTINATION ${CMAKE_INSTALL_MANDIR}/man8)
  install(FILES ${SITS_MAN_DIR}/sits2026d.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME sits2026d)
  foreach(tool bench compile eval opt) # bash looks for a file of the command's name
    install(FILES ${SITS_MAN_DIR}/sits2026d.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME sits2026-${tool})
  endforeach()
endif()
add_custom_target(manuals ALL DEPENDS ${SITS_PAGES})
install(FILES configs/sits2026d.yaml DESTINATION ${CMAKE_INSTALL_SYSCONFDIR}/sits2026)
install(DIRECTORY configs/recipes configs/grafana configs/prometheus configs/kubernetes DESTINATION ${CMAKE_INSTALL_DATADIR}/sits2026)
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

# The unit names where the daemon and its configuration lie: of packages /usr and /etc, of others the prefix.
install(CODE "
  set(prefix \"\${CMAKE_INSTALL_PREFIX}\")
  if(prefix MATCHES \"_CPack_Packages\" OR prefix STREQUAL \"/usr\")
    set(bin /usr/bin)
    set(etc /etc)
  else()
    set(bin \"\${prefix}/${CMAKE_INSTALL_BINDIR}\")
    set(etc \"\${prefix}/${CMAKE_INSTALL_SYSCONFDIR}\")
  endif()
  file(READ \"${CMAKE_SOURCE_DIR}/configs/systemd/sits2026d.service\" unit)
  string(REPLACE \"/usr/bin/\" \"\${bin}/\" unit \"\${unit}\")
  string(REPLACE \"/etc/sits2026/\" \"\${etc}/sits2026/\" unit \"\${unit}\")
  file(WRITE \"\$ENV{DESTDIR}\${prefix}/lib/systemd/system/sits2026d.service\" \"\${unit}\")
")

set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON) # cpack packs what is built and builds nothing
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME sits2026)
set(CPACK_PACKAGE_VENDOR sits2026)
set(CPACK_PACKAGE_CONTACT "sits2026 <root@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "LLM inference server: one daemon that answers OpenAI's API")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_COMPRESSION_TYPE gzip)
set(SITS_DEB ${CMAKE_SOURCE_DIR}/scripts/deb)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${SITS_DEB}/conffiles;${SITS_DEB}/postinst;${SITS_DEB}/prerm)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_SOURCE_DIR}/scripts/cmake/SitsPackageDeb.cmake)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_SOURCE_DIR}/scripts/cmake/SitsPackageEtc.cmake)
set(CPACK_SITS_PROGRAMS ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
include(CPack)
