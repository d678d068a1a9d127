/* Streaming read of a buffer: the memory rate that the benches hold the other kernels against, measured in the same run.
 *
 * Arguments: src 16-byte aligned, n_bytes a multiple of 16; sink is never written in practice (it keeps the loads alive).
 * Work split: two CTAs per SM, 512 threads, eight independent 16-byte loads a thread and turn.
 * Cost: n_bytes; bound by device memory.
 */
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "kernels.h"

namespace {
__global__ void __launch_bounds__(512) read_kernel(const uint4 *src, long long n, uint32_t *sink) {
  uint32_t x = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  for (; i + 7 * stride < n; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(src + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; k++) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += stride) x ^= __ldcs(src + i).x;
  if (x == 0x12345678u) *sink = x;
}
} // namespace

extern "C" int sits_k_read(const void *src, int64_t n_bytes, uint32_t *sink, int32_t n_sm, struct k_stream at) {
  return launch_kernel(read_kernel, dim3(2 * n_sm), dim3(512), 0, (cudaStream_t)at.stream, false, (const uint4 *)src,
                       (long long)(n_bytes / 16), sink);
}
