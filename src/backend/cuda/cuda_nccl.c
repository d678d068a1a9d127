/* See cuda_nccl.h. */
#include "backend/cuda/cuda_nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

enum { NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_SUM = 0 };

static struct {
  int (*get_unique_id)(struct nccl_id *);
  int (*comm_init_rank)(struct nccl_comm **, int, struct nccl_id, int);
  int (*all_reduce)(const void *, void *, size_t, int, int, struct nccl_comm *, struct CUstream_st *);
  int (*all_gather)(const void *, void *, size_t, int, struct nccl_comm *, struct CUstream_st *);
  int (*comm_destroy)(struct nccl_comm *);
  int (*comm_abort)(struct nccl_comm *);
  const char *(*get_error_string)(int);
} nccl;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool is_loaded;

static void load(void)
{
  (void)setenv("NCCL_NVLS_ENABLE", "0", 1);
  void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return;
  const struct { const char *name; void *at; } calls[] = {
      {"ncclGetUniqueId", &nccl.get_unique_id}, {"ncclCommInitRank", &nccl.comm_init_rank}, {"ncclAllReduce", &nccl.all_reduce},
      {"ncclAllGather", &nccl.all_gather},      {"ncclCommDestroy", &nccl.comm_destroy},    {"ncclCommAbort", &nccl.comm_abort},
      {"ncclGetErrorString", &nccl.get_error_string}};
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    void *found = dlsym(library, calls[i].name);
    if (found == NULL) return;
    *(void **)calls[i].at = found;
  }
  is_loaded = true;
}

bool nccl_load(void)
{
  pthread_once(&once, load);
  return is_loaded;
}

int nccl_unique_id(struct nccl_id *out) { return nccl.get_unique_id(out); }

int nccl_comm_init(struct nccl_comm **out, int32_t n_ranks, const struct nccl_id *id, int32_t rank)
{
  return nccl.comm_init_rank(out, n_ranks, *id, rank);
}

int nccl_all_reduce_f16(void *data, size_t n, struct nccl_comm *comm, struct CUstream_st *stream)
{
  return nccl.all_reduce(data, data, n, NCCL_FLOAT16, NCCL_SUM, comm, stream);
}

int nccl_all_gather_f32(const void *x, void *out, size_t n, struct nccl_comm *comm, struct CUstream_st *stream)
{
  return nccl.all_gather(x, out, n, NCCL_FLOAT32, comm, stream);
}

void nccl_comm_destroy(struct nccl_comm *comm) { (void)nccl.comm_destroy(comm); }
void nccl_comm_abort(struct nccl_comm *comm) { (void)nccl.comm_abort(comm); }
const char *nccl_error(int status) { return nccl.get_error_string(status); }
