/* h[t][e] += sum_i slab[i][t][e];  out[r] = form(h[t] / sqrt(mean(h[t]^2) + eps) * gain), t = row_token[r] or r.
 *
 * Arguments: struct k_norm (kernels.h). E a multiple of 8.
 * Work split: one CTA of 256 threads per row, eight values a thread and step; the row stays in shared memory as f32 between passes.
 * Shared memory: 4 E + 128 bytes. With row_token the same h row may be read by several CTAs, so the sum is not written back.
 * Numerics: f32 throughout, slabs summed in index order, so results depend on nothing but the inputs. Tolerance 1e-3 (f16 out).
 * Cost: E (8 + 4 n_slabs) bytes a row from L2; latency-bound in decode.
 * Links: twin ref_rmsnorm (tests/gpu/gpu_ref.c), test tests/gpu/test_ops.c.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
__global__ void __launch_bounds__(256) norm_kernel(const __grid_constant__ k_norm p) {
  extern __shared__ __align__(16) float row_values[];
  __shared__ float scratch[8];
  grid_trigger();
  grid_wait();
  const int r = blockIdx.x, t = p.row_token ? p.row_token[r] : r;
  float *h = p.h + (size_t)t * p.width;
  float sum = 0.f;
  for (int c = threadIdx.x * 4; c < p.width; c += blockDim.x * 4) {
    float4 v = __ldcg((const float4 *)(h + c));
    for (int i = 0; i < p.n_slabs; i++) {
      float4 s = __ldcg((const float4 *)(p.slabs + i * p.slab_stride + (size_t)t * p.width + c));
      v.x += s.x, v.y += s.y, v.z += s.z, v.w += s.w;
    }
    if (p.n_slabs && !p.row_token) *(float4 *)(h + c) = v;
    *(float4 *)(row_values + c) = v;
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float factor = rsqrtf(block_reduce(sum, scratch, false) / (float)p.width + p.eps);
  store_activation(p.out, r, p.width, scratch, [&](int c) {
    vec8 x;
#pragma unroll
    for (int i = 0; i < 8; i++) x.v[i] = row_values[c + i] * factor * p.gain[c + i];
    return x;
  });
}
} // namespace

extern "C" int sits_k_norm(const struct k_norm *a, struct k_stream at) {
  if (a->width % 8) return cudaErrorInvalidValue;
  static bool is_ready = false;
  if (!is_ready) {
    int e = prepare_kernel(norm_kernel, 200 * 1024);
    if (e) return e;
    is_ready = true;
  }
  return launch_kernel(norm_kernel, dim3(a->n_rows), dim3(256), (size_t)a->width * 4, (cudaStream_t)at.stream, at.pdl, *a);
}
