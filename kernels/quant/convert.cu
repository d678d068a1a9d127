/* out[t] = form(x[t]), or form(silu(gate) * up) where x holds 8 gate, 8 up, 8 gate, ... values.
 *
 * Arguments: struct k_convert (kernels.h). width a multiple of 8; rows of x start 16-byte aligned.
 * Work split: one CTA of 256 threads per row; two passes over x (scale, then store), the second from L1/L2.
 * Numerics: f32; 8-bit scales are max|x| / 127 (s8) or / 448 (e4m3) per token, round to nearest even. Tolerance: half a step.
 * Cost: bytes of x once from L2; latency-bound in decode.
 * Links: twin ref_quantise_row (tests/gpu/gpu_ref.c), test tests/gpu/test_ops.c.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
SITS_DEV vec8 eight_f16(const __half *p) {
  uint4 v = __ldcg((const uint4 *)p);
  float2 a = half2_to_float2(v.x), b = half2_to_float2(v.y), c = half2_to_float2(v.z), d = half2_to_float2(v.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}
SITS_DEV vec8 eight_f32(const float *p) {
  float4 a = __ldcg((const float4 *)p), b = __ldcg((const float4 *)p + 1);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
SITS_DEV vec8 swiglu(const vec8 &g, const vec8 &u) {
  vec8 r;
#pragma unroll
  for (int i = 0; i < 8; i++) r.v[i] = g.v[i] / (1.f + __expf(-g.v[i])) * u.v[i];
  return r;
}

template <int SOURCE> __global__ void __launch_bounds__(256) convert_kernel(const __grid_constant__ k_convert p) {
  __shared__ float scratch[8];
  grid_trigger();
  grid_wait();
  const size_t row = (size_t)blockIdx.x * p.ld;
  store_activation(p.out, blockIdx.x, p.width, scratch, [&](int c) {
    if (SOURCE == K_SRC_F16) return eight_f16((const __half *)p.x + row + c);
    if (SOURCE == K_SRC_F16_GATE_UP) return swiglu(eight_f16((const __half *)p.x + row + 2 * c), eight_f16((const __half *)p.x + row + 2 * c + 8));
    return swiglu(eight_f32((const float *)p.x + row + 2 * c), eight_f32((const float *)p.x + row + 2 * c + 8));
  });
}
__global__ void __launch_bounds__(256) add_bias_kernel(__half *y, const float *bias, int n_tokens, int width) {
  grid_trigger();
  grid_wait();
  const long long n = (long long)n_tokens * width;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
    y[i] = __float2half_rn(__half2float(y[i]) + bias[i % width]);
}
} // namespace

extern "C" int sits_k_add_bias(void *y, const float *bias, int32_t n_tokens, int32_t width, struct k_stream at) {
  const long long n = (long long)n_tokens * width;
  const int blocks = (int)((n + 1023) / 1024);
  return launch_kernel(add_bias_kernel, dim3(blocks < 1056 ? blocks : 1056), dim3(256), 0, (cudaStream_t)at.stream, at.pdl, (__half *)y, bias, n_tokens, width);
}

extern "C" int sits_k_convert(const struct k_convert *a, struct k_stream at) {
  if (a->width % 8 || a->ld % 8) return cudaErrorInvalidValue;
  const dim3 grid(a->n_rows), block(256);
  cudaStream_t stream = (cudaStream_t)at.stream;
  if (a->source == K_SRC_F16) return launch_kernel(convert_kernel<K_SRC_F16>, grid, block, 0, stream, at.pdl, *a);
  if (a->source == K_SRC_F16_GATE_UP) return launch_kernel(convert_kernel<K_SRC_F16_GATE_UP>, grid, block, 0, stream, at.pdl, *a);
  return launch_kernel(convert_kernel<K_SRC_F32_GATE_UP>, grid, block, 0, stream, at.pdl, *a);
}
