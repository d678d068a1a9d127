/* h[t][e] += sum_i slab[i][t][e];  out[r] = form(h[t] / sqrt(mean(h[t]^2) + eps) * gain), t = row_token[r] or r.
 *
 * Arguments: struct k_norm (kernels.h). E a multiple of 8, at most 16,384.
 * Work split: one CTA of 512 threads per row, which stays in registers (eight values a piece): one pass, one barrier; the largest
 * magnitude
 *   for an 8-bit scale is reduced together with the sum of squares. With row_token the same h row may be read by several CTAs, so the sum
 *   is not written back. Many rows without slabs: a quarter of the threads, each with four pieces, so that eight rows (four of the wider)
 *   are on an SM at once and not one: their loads are what hides each other's latency.
 * Numerics: f32 throughout, slabs summed in index order, so results depend on nothing but the inputs. Tolerance 1e-3 (f16 out).
 * Cost: E (8 + 4 n_slabs) bytes a row from L2; latency-bound in decode.
 * Links: twin ref_rmsnorm (tests/gpu/gpu_ref.c), test tests/gpu/test_ops.c.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
constexpr int THREADS = 512, MANY_ROWS = 256;
static_assert(K_MAX_NORM_WIDTH == 4 * 8 * THREADS, "the most pieces that a launch below has");

/* N: eight-value pieces a thread holds. */
template <int N> __global__ void __launch_bounds__(THREADS) norm_kernel(const __grid_constant__ k_norm p) {
  __shared__ float scratch[128];
  grid_trigger();
  const int r = blockIdx.x, t = p.row_token ? p.row_token[r] : r;
  vec8 x[N], gain[N];
#pragma unroll
  for (int k = 0; k < N; k++) { /* gains do not depend on earlier kernels */
    const int c = (threadIdx.x + k * THREADS) * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) gain[k].v[i] = c < p.width ? __ldg(p.gain + c + i) : 0.f;
  }
  grid_wait();
  float *h = p.h + (size_t)t * p.width, sum = 0.f, top = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = (threadIdx.x + k * THREADS) * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) x[k].v[i] = 0.f;
    if (c >= p.width) continue;
    *(float4 *)&x[k].v[0] = __ldcg((const float4 *)(h + c)), *(float4 *)&x[k].v[4] = __ldcg((const float4 *)(h + c) + 1);
#pragma unroll 1
    for (int s0 = 0; s0 < p.n_slabs; s0 += 4) { /* four slabs in flight */
      float4 a[4][2];
#pragma unroll
      for (int s = 0; s < 4; s++)
        if (s0 + s < p.n_slabs) {
          const float4 *slab = (const float4 *)(p.slabs + (s0 + s) * p.slab_stride + (size_t)t * p.width + c);
          a[s][0] = __ldcg(slab), a[s][1] = __ldcg(slab + 1);
        }
#pragma unroll
      for (int s = 0; s < 4; s++)
        if (s0 + s < p.n_slabs) {
          x[k].v[0] += a[s][0].x, x[k].v[1] += a[s][0].y, x[k].v[2] += a[s][0].z, x[k].v[3] += a[s][0].w;
          x[k].v[4] += a[s][1].x, x[k].v[5] += a[s][1].y, x[k].v[6] += a[s][1].z, x[k].v[7] += a[s][1].w;
        }
    }
    if (p.n_slabs && !p.row_token) *(float4 *)(h + c) = *(float4 *)&x[k].v[0], *(float4 *)(h + c + 4) = *(float4 *)&x[k].v[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum += x[k].v[i] * x[k].v[i];
      x[k].v[i] *= gain[k].v[i];
      top = fmaxf(top, fabsf(x[k].v[i]));
    }
  }
  const float2 all = reduce_sum_max(sum, top, scratch);
  const float factor = rsqrtf(all.x / (float)p.width + p.eps);
  store_row<N>(p.out, r, p.width, x, factor, all.y * factor, scratch + 64);
}

/* The same of many rows, without slabs, rotation and rounding: N pieces a thread of THREADS / N, or (WIDE 2) of twice as many. */
template <int N, int WIDE>
__global__ void __launch_bounds__(WIDE * THREADS / N, 2 * N / WIDE) norm_rows_kernel(const __grid_constant__ k_norm p) {
  __shared__ float scratch[128];
  grid_trigger();
  const int r = blockIdx.x, t = p.row_token ? p.row_token[r] : r;
  vec8 x[N];
  grid_wait();
  const float *h = p.h + (size_t)t * p.width;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = (threadIdx.x + k * (WIDE * THREADS / N)) * 8;
    float4 *to = (float4 *)x[k].v;
    to[0] = to[1] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (c < p.width) to[0] = __ldcg((const float4 *)(h + c)), to[1] = __ldcg((const float4 *)(h + c) + 1);
  }
  float sum = 0.f, top = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = (threadIdx.x + k * (WIDE * THREADS / N)) * 8;
    if (c >= p.width) continue;
    float gain[8];
    *(float4 *)gain = __ldg((const float4 *)(p.gain + c)), *(float4 *)(gain + 4) = __ldg((const float4 *)(p.gain + c) + 1);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum += x[k].v[i] * x[k].v[i];
      x[k].v[i] *= gain[i];
      top = fmaxf(top, fabsf(x[k].v[i]));
    }
  }
  const float2 all = reduce_sum_max(sum, top, scratch);
  const float factor = rsqrtf(all.x / (float)p.width + p.eps);
  store_row<N, false>(p.out, r, p.width, x, factor, all.y * factor, scratch + 64);
}
} // namespace

extern "C" int sits_k_norm(const struct k_norm *a, struct k_stream at) {
  const int pieces = (k_blocks(a->width) * K_GROUP / 8 + THREADS - 1) / THREADS;
  const dim3 grid(a->n_rows), block(THREADS);
  const size_t smem = rotation_bytes(a->out);
  if (a->width % 8 || !is_rotation(a->out, a->width)) return cudaErrorInvalidValue;
  const bool is_plain = a->n_slabs == 0 && a->out.round == K_ROUND_NONE && a->out.rotation == 0 && (uintptr_t)a->gain % 16 == 0;
  if (a->n_rows >= MANY_ROWS && is_plain && pieces <= 2) {
    const auto kernel = pieces == 1 ? norm_rows_kernel<4, 1> : norm_rows_kernel<4, 2>;
    return launch_kernel(kernel, grid, dim3((unsigned)pieces * THREADS / 4), 0, (cudaStream_t)at.stream, at.pdl, *a);
  }
  if (pieces == 1) return launch_kernel(norm_kernel<1>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, *a);
  if (pieces == 2) return launch_kernel(norm_kernel<2>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, *a);
  if (pieces <= 4) return launch_kernel(norm_kernel<4>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, *a);
  return cudaErrorInvalidValue; /* wider than K_MAX_NORM_WIDTH */
}
