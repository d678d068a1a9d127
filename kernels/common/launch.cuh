/* Launch helpers: one kernel launch with or without a programmatic edge to the kernel before it, and attribute setting done once. */
#ifndef SITS_KERNELS_LAUNCH_CUH
#define SITS_KERNELS_LAUNCH_CUH

#include <cuda_runtime.h>

/* Launch `kernel` in clusters of `cluster` CTAs; with pdl the grid may start before its predecessor in the stream ends (the kernel calls
 * grid_wait itself). */
template <class... P, class... A> static cudaError_t launch_clusters(void (*kernel)(P...), int cluster, dim3 grid, dim3 block,
                                                                     size_t smem_bytes, cudaStream_t stream, bool pdl, A... args) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute[2];
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attribute;
  if (pdl) {
    attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attribute[config.numAttrs].val.clusterDim.x = (unsigned)cluster;
    attribute[config.numAttrs].val.clusterDim.y = 1;
    attribute[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, (P)args...);
}
template <class... P, class... A> static cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem_bytes,
                                                                   cudaStream_t stream, bool pdl, A... args) {
  return launch_clusters(kernel, 1, grid, block, smem_bytes, stream, pdl, args...);
}

/* Every kernel asks for the same shared-memory carve-out: kernels with different carve-outs cannot share an SM, and a programmatic
 * edge then silently waits. Shared memory beyond 48 KiB is allowed once per kernel and process. */
template <class K> static cudaError_t prepare_kernel(K kernel, int smem_max_bytes) {
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  if (e == cudaSuccess && smem_max_bytes > 48 * 1024)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_max_bytes);
  return e;
}

#endif
