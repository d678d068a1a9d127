/* h[t] = row tokens[t] of the embedding, f32; in decode also the first GEMM's input f16(h * gain) and the row's sum of squares.
 *
 * Arguments: struct k_embed (kernels.h). A token may be one that the step before drew on the device. The table is f16
 *   row-major or packed 4-bit (a tied head's own copy serves both uses). It may hold a rank's part of the vocabulary only: the rows of
 *   other ranks' tokens are zeros, for a sum over ranks to fill.
 * Work split: one CTA of 256 threads per token. Ids outside [0, V) read row 0 (the engine checks ids; this only keeps the device safe).
 * Numerics: exact for f16, scale * (q - 8) or scale * q + minimum in f32 for 4 bits.
 * Cost: one row; latency-bound.
 * Links: test tests/gpu/test_ops.c.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
SITS_DEV float packed_value(const k_embed &p, int row, int col) {
  int word, rotate;
  k_w4_place(row & 15, col & 127, &word, &rotate);
  const uint8_t *unit = (const uint8_t *)p.table + ((size_t)(row >> 4) * k_blocks(p.width) + (col >> 7)) * k_w4_unit_bytes(p.format);
  const uint32_t w = ((const uint32_t *)unit)[word];
  const float q = (float)(__funnelshift_r(w, w, rotate) & 15u);
  const __half *scales = (const __half *)(unit + K_W4_NIBBLE_BYTES);
  const int r = row & 15, g = r & 7, second = r >> 3;
  if (p.format == K_W4_G128) return __half2float(scales[g * 2 + second]) * (q - 8.f);
  const __half *s = scales + ((col & 127) >> 5) * 32 + g * 4 + second * 2;
  return __half2float(s[0]) * q + __half2float(s[1]);
}

__global__ void __launch_bounds__(256) embed_kernel(const __grid_constant__ k_embed p) {
  __shared__ float scratch[64];
  grid_trigger();
  grid_wait();
  const int t = blockIdx.x;
  int id = p.tokens[t];
  if (id < 0 && p.drawn) id = __ldcg(p.drawn - 1 - id);
  if (id < 0 || id >= p.n_vocab) id = 0;
  const int row = id - p.first;
  const bool is_here = p.n_rows == 0 || (row >= 0 && row < p.n_rows);
  float sum = 0.f;
  for (int c = threadIdx.x; c < p.width; c += blockDim.x) {
    float v = 0.f;
    if (is_here) v = p.is_packed ? packed_value(p, row, c) : __half2float(((const __half *)p.table)[(size_t)row * p.ld + c]);
    p.h[(size_t)t * p.width + c] = v;
    sum += v * v;
    if (p.frag_m) ((__half *)p.next)[k_frag_index(p.frag_m, c, t)] = __float2half_rn(v * p.gain[c]);
  }
  if (!p.frag_m) return;
  sum = reduce_sum_max(sum, 0.f, scratch).x;
  for (int i = threadIdx.x; i < p.n_ssq; i += blockDim.x) p.ssq[i * p.frag_m + t] = i == 0 ? sum : 0.f;
}
} // namespace

extern "C" int sits_k_embed(const struct k_embed *a, struct k_stream at) {
  return launch_kernel(embed_kernel, dim3(a->n_tokens), dim3(256), 0, (cudaStream_t)at.stream, at.pdl, *a);
}
