/* NCCL, found at run time: the program starts and runs without the library. The few types that are needed are declared here as the
 * library's interface fixes them (nccl.h of NCCL 2). NVLink multicast is switched off before the library is loaded. */
#ifndef SITS_BACKEND_CUDA_NCCL_H
#define SITS_BACKEND_CUDA_NCCL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct CUstream_st;
struct nccl_id { char bytes[128]; };
struct nccl_comm;

/* False: no libnccl.so.2 here, or one without these calls. Any thread; loaded once. */
bool nccl_load(void);
/* Each returns 0, or a number for nccl_error. */
int nccl_unique_id(struct nccl_id *out);
/* Returns when all ranks have called. */
int nccl_comm_init(struct nccl_comm **out, int32_t n_ranks, const struct nccl_id *id, int32_t rank);
/* Sum, in place. */
int nccl_all_reduce_f16(void *data, size_t n, struct nccl_comm *comm, struct CUstream_st *stream);
/* out [n_ranks][n] = x [n] of all ranks. */
int nccl_all_gather_f32(const void *x, void *out, size_t n, struct nccl_comm *comm, struct CUstream_st *stream);
void nccl_comm_destroy(struct nccl_comm *comm);
/* Kernels of this rank that wait for others end; any thread. Frees comm. */
void nccl_comm_abort(struct nccl_comm *comm);
const char *nccl_error(int status);

#endif
