# sits_protos(FILE...)  the library sits_proto from .proto files below proto/: protobuf-c's code, and the compiled descriptors as the table
# rpc_descriptors (src/front/grpc/rpc_descriptors.h), which reflection serves. With EMBED set this file is the script that writes it.
if(EMBED)
  set(text "/* Written at build time from the .proto files. */\n#include \"front/grpc/rpc_descriptors.h\"\n\n")
  set(rows)
  string(REPLACE "," ";" PROTOS "${PROTOS}")
  set(n 0)
  foreach(proto ${PROTOS})
    file(READ ${FOLDER}/${proto}.desc hex HEX)
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
    string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
    string(APPEND text "static const uint8_t bytes_${n}[] = {\n${bytes}};\n\n")
    string(APPEND rows "  {\"${proto}\", bytes_${n}, sizeof bytes_${n}},\n")
    math(EXPR n "${n} + 1")
  endforeach()
  file(WRITE ${OUT} "${text}const struct rpc_descriptor rpc_descriptors[] = {\n${rows}};\nconst int rpc_n_descriptors = ${n};\n")
  return()
endif()

set(SITS_PROTO_SCRIPT ${CMAKE_CURRENT_LIST_FILE})

function(sits_protos)
  find_program(PROTOC_C protoc-c REQUIRED)
  set(root ${CMAKE_SOURCE_DIR}/proto)
  set(out ${CMAKE_BINARY_DIR}/proto)
  file(MAKE_DIRECTORY ${out})
  set(sources)
  set(descriptors)
  foreach(proto ${ARGN})
    string(REGEX REPLACE "\\.proto$" "" stem ${proto})
    get_filename_component(folder ${out}/${proto} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${out}/${stem}.pb-c.c ${out}/${stem}.pb-c.h ${out}/${proto}.desc
      COMMAND ${PROTOC_C} --c_out=${out} --descriptor_set_out=${out}/${proto}.desc -I${root} ${proto}
      DEPENDS ${root}/${proto} VERBATIM)
    list(APPEND sources ${out}/${stem}.pb-c.c)
    list(APPEND descriptors ${out}/${proto}.desc)
  endforeach()
  string(REPLACE ";" "," protos "${ARGN}")
  add_custom_command(OUTPUT ${out}/rpc_descriptors.c
    COMMAND ${CMAKE_COMMAND} -DEMBED=1 "-DPROTOS=${protos}" -DFOLDER=${out} -DOUT=${out}/rpc_descriptors.c -P ${SITS_PROTO_SCRIPT}
    DEPENDS ${descriptors} ${SITS_PROTO_SCRIPT} VERBATIM)
  add_library(sits_proto STATIC ${sources} ${out}/rpc_descriptors.c)
  set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "-w") # generated
  target_include_directories(sits_proto SYSTEM PUBLIC ${out})
  target_link_libraries(sits_proto PUBLIC PkgConfig::PROTOBUF_C)
endfunction()
