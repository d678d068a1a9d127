/* Device and pinned memory of a backend, each block with its owner so that a half-built object is freed by one call; and the one place
 * where
 * CUDA errors are looked at. Entry points: cuda_memory_alloc, cuda_pinned_alloc, cuda_memory_free_owner, cuda_check. */
#include "backend/cuda/cuda_internal.h"

#include <stdlib.h>

#include "base/log.h"

enum sits_status cuda_check(struct backend *backend, int error, const char *what, const char *file, int line)
{
  if (backend->is_failed) return SITS_DEVICE;
  if (error == cudaSuccess) return SITS_OK;
  backend->is_failed = true;
  log_error("cuda", "device failed: %s (%s) in %s at %s:%d", cudaGetErrorString((cudaError_t)error), cudaGetErrorName((cudaError_t)error),
            what, file, line);
  return SITS_DEVICE;
}

/* Fault injection for tests: allocation number SITS_CUDA_FAIL_ALLOC (from 1) is refused. */
static bool is_fault_due(void)
{
  static long n_calls;
  const char *text = getenv("SITS_CUDA_FAIL_ALLOC");
  return text != NULL && ++n_calls == strtol(text, NULL, 10);
}

static void *alloc_block(struct backend *backend, const void *owner, size_t bytes, bool is_pinned)
{
  void *data = NULL;
  if (backend->is_failed || backend->n_blocks == CUDA_MAX_BLOCKS || is_fault_due()) return NULL;
  if (bytes == 0) bytes = 16;
  const cudaError_t e = is_pinned ? cudaHostAlloc(&data, bytes, cudaHostAllocDefault) : cudaMalloc(&data, bytes);
  if (e != cudaSuccess) {
    (void)cudaGetLastError(); /* out of memory is not sticky */
    return NULL;
  }
  if (!is_pinned && CUDA_CALL(backend, cudaMemsetAsync(data, 0, bytes, backend->stream)) != SITS_OK) {
    cudaFree(data);
    return NULL;
  }
  backend->blocks[backend->n_blocks++] = (struct cuda_block){data, bytes, is_pinned, owner};
  return data;
}

void *cuda_memory_alloc(struct backend *backend, const void *owner, size_t bytes) { return alloc_block(backend, owner, bytes, false); }
void *cuda_pinned_alloc(struct backend *backend, const void *owner, size_t bytes) { return alloc_block(backend, owner, bytes, true); }

void cuda_memory_free_owner(struct backend *backend, const void *owner)
{
  int32_t kept = 0;
  for (int32_t i = 0; i < backend->n_blocks; i++) {
    const struct cuda_block *block = &backend->blocks[i];
    if (block->owner != owner)
      backend->blocks[kept++] = *block;
    else if (block->is_pinned)
      (void)cudaFreeHost(block->data);
    else
      (void)cudaFree(block->data);
  }
  backend->n_blocks = kept;
}

uint64_t cuda_memory_of(const struct backend *backend, const void *owner)
{
  uint64_t sum = 0;
  for (int32_t i = 0; i < backend->n_blocks; i++)
    if (backend->blocks[i].owner == owner && !backend->blocks[i].is_pinned) sum += backend->blocks[i].bytes;
  return sum;
}
