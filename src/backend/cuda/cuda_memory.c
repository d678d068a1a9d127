/* Device and pinned memory of a backend, each block with its owner so that a half-built object is freed by one call; and the one place
 * where
 * CUDA errors are looked at. Entry points: cuda_enter, cuda_memory_alloc, cuda_pinned_alloc, cuda_memory_free_owner, cuda_check. */
#include "backend/cuda/cuda_internal.h"

#include <stdlib.h>
#include <string.h>

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

void cuda_enter(const struct backend *backend)
{
  static _Thread_local int32_t current = -1;
  if (current != backend->device && cudaSetDevice(backend->device) == cudaSuccess) current = backend->device;
}

#ifdef SITS_DEBUG_CHECKS
/* Faults for tests, SITS_CUDA_FAULT in the environment, n counted from 1: "alloc:n" refuses the n-th allocation, "launch:n" makes a launch
 * of the n-th step fail, "trap:n" makes a kernel of the n-th step trap, so that the device is lost to this process. */
static bool is_fault_due(const char *kind, long count)
{
  const char *text = getenv("SITS_CUDA_FAULT");
  const size_t n = strlen(kind);
  return text != NULL && strncmp(text, kind, n) == 0 && text[n] == ':' && strtol(text + n + 1, NULL, 10) == count;
}

static bool is_alloc_refused(void)
{
  static long n_calls;
  return is_fault_due("alloc", ++n_calls);
}

enum sits_status cuda_fault_step(struct backend *backend)
{
  static long n_steps;
  const struct k_stream at = {(struct CUstream_st *)backend->stream, false};
  n_steps++;
  if (is_fault_due("launch", n_steps)) return CUDA_CALL(backend, sits_k_fault(false, at));
  return is_fault_due("trap", n_steps) ? CUDA_CALL(backend, sits_k_fault(true, at)) : SITS_OK;
}
#else
static bool is_alloc_refused(void) { return false; }
enum sits_status cuda_fault_step(struct backend *backend)
{
  (void)backend;
  return SITS_OK;
}
#endif

static void *alloc_block(struct backend *backend, const void *owner, size_t bytes, bool is_pinned)
{
  void *data = NULL;
  cuda_enter(backend);
  if (backend->is_failed || backend->n_blocks == CUDA_MAX_BLOCKS || is_alloc_refused()) return NULL;
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
