/* The compiled .proto files: a FileDescriptorSet of one file each, written by protoc and embedded by scripts/cmake/SitsProto.cmake. */
#ifndef SITS_FRONT_GRPC_RPC_DESCRIPTORS_H
#define SITS_FRONT_GRPC_RPC_DESCRIPTORS_H

#include <stddef.h>
#include <stdint.h>

struct rpc_descriptor { const char *name; const uint8_t *bytes; size_t n_bytes; };

extern const struct rpc_descriptor rpc_descriptors[];
extern const int rpc_n_descriptors;

#endif
