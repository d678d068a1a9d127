/* Where a value lies in a KV tile, and the arithmetic that puts it there: rotation, quantisation, addressing. Used by every kernel that
 * writes or reads pages one value at a time; the tensor-core kernels rely on the same order.
 *
 * int4 tile of head size D (nw = 16-token blocks, 4 of them; c = D/64 chunks of 512 bytes per block and matrix):
 *   offset                         bytes          what
 *   0                              32 D           K nibbles: word (block, step = d/16, lane) at block*8D + (step/4)*512 + lane*16 +
 *   (step%4)*4;
 *                                                 rows are tokens g, g+8 of the block (lane = 4 g + t), c0..c3 are channels 16 step + 4 t
 *                                                 + 0..3
 *   32 D                           32 D           V nibbles: the same with rows = channels 16 step + {g, g+8}, c0..c3 = tokens 2t, 2t+1,
 *   2t+8, 2t+9
 *   64 D                           4 D            K scales f16: block, g, group, {token g, token g+8}
 *   68 D                           4 D            V scales f16: block, t, group, {tokens 2t, 2t+1, 2t+8, 2t+9}
 * fp4 tile: the same, but the four bits of an e2m1 number lie apart, so that masks and shifts make f16 numbers of them: in a word's half
 * c % 2, of the numbers n = 2 (c / 2) + second row, sign and magnitude at bits
 *   n = 0: 15, 11:9    n = 1: 7, 3:1    n = 2: 8, 14:12    n = 3: 0, 6:4
 * Other head sizes: K bytes [P][D/2] (channel 2i in the low half of byte i), V bytes [P][D/2], K scales [P][groups], V scales.
 */
#ifndef SITS_KERNELS_KV_TILE_CUH
#define SITS_KERNELS_KV_TILE_CUH

#include "common/ptx.cuh"
#include "kernels.h"

namespace kv {

/* Byte offset of the word that holds a value, and which of its eight: 2 c + second row. */
struct place {
  int word_bytes, slot;
};

SITS_DEV int place_slot(int c, bool second_row) { return c * 2 + second_row; }
SITS_DEV int nibble_shift(int slot) { return (6 + (slot >> 1 & 1) * 16 + (slot >> 2) * 8 - (slot & 1 ? 4 : 0)) & 31; }

SITS_DEV place k_place(int head_dim, int token, int d) {
  int block = token >> 4, tk = token & 15, step = d >> 4, t = (d & 15) >> 2, lane = (tk & 7) * 4 + t;
  return {block * 8 * head_dim + (step >> 2) * 512 + lane * 16 + (step & 3) * 4, place_slot(d & 3, tk >= 8)};
}
SITS_DEV place v_place(int head_dim, int token, int d) {
  int block = token >> 4, tk = token & 15, step = d >> 4, d16 = d & 15, lane = (d16 & 7) * 4 + ((tk & 7) >> 1);
  return {32 * head_dim + block * 8 * head_dim + (step >> 2) * 512 + lane * 16 + (step & 3) * 4,
          place_slot((tk & 1) + (tk >= 8 ? 2 : 0), d16 >= 8)};
}
SITS_DEV int k_scale_offset(int head_dim, int token, int group) {
  int tk = token & 15;
  return 64 * head_dim + (token >> 4) * head_dim + (tk & 7) * (head_dim >> 3) + group * 4 + (tk >> 3) * 2;
}
SITS_DEV int v_scale_offset(int head_dim, int token, int group) {
  int tk = token & 15;
  return 68 * head_dim + (token >> 4) * head_dim + ((tk & 7) >> 1) * (head_dim >> 2) + group * 8 + (tk >> 3) * 4 + (tk & 1) * 2;
}
/* First bits of sign and magnitude of the e2m1 number in slot. */
SITS_DEV void fp4_bits(int slot, int *sign, int *magnitude) {
  const int n = (slot >> 2) * 2 + (slot & 1), half = (slot >> 1 & 1) * 16;
  *sign = half + (n == 0 ? 15 : n == 1 ? 7 : n == 2 ? 8 : 0);
  *magnitude = half + (n == 0 ? 9 : n == 1 ? 1 : n == 2 ? 12 : 4);
}
SITS_DEV uint32_t insert_code(bool is_fp4, uint32_t word, int slot, uint32_t q) {
  if (is_fp4) {
    int sign, magnitude;
    fp4_bits(slot, &sign, &magnitude);
    return (word & ~(1u << sign | 7u << magnitude)) | (q >> 3) << sign | (q & 7u) << magnitude;
  }
  const int shift = nibble_shift(slot);
  uint32_t keep = __funnelshift_l(0xFFFFFFF0u, 0xFFFFFFF0u, shift);
  return (word & keep) | __funnelshift_l(q, q, shift);
}
SITS_DEV uint32_t extract_code(bool is_fp4, uint32_t word, int slot) {
  if (is_fp4) {
    int sign, magnitude;
    fp4_bits(slot, &sign, &magnitude);
    return (word >> sign & 1u) << 3 | (word >> magnitude & 7u);
  }
  const int shift = nibble_shift(slot);
  return __funnelshift_r(word, word, shift) & 15u;
}
/* What a code of four bits stands for, without its scale. */
SITS_DEV float code_value(bool is_fp4, uint32_t q) {
  if (!is_fp4) return (float)((int)q - 8);
  return 16384.f * __half2float(__ushort_as_half((unsigned short)((q & 8u) << 12 | (q & 7u) << 9)));
}

/* One value of a tile, as f32 (keys as stored: rotated where the codec rotates). */
SITS_DEV float load(const uint8_t *tile, int codec, int head_dim, bool is_value, int token, int d) {
  if (codec == K_KV_F16) return __half2float(((const __half *)tile)[(is_value ? K_PAGE_TOKENS * head_dim : 0) + token * head_dim + d]);
  if (codec == K_KV_INT8) {
    const __half *scales = (const __half *)(tile + 2 * K_PAGE_TOKENS * head_dim);
    int q = ((const int8_t *)tile)[(is_value ? K_PAGE_TOKENS * head_dim : 0) + token * head_dim + d];
    return __half2float(scales[(is_value ? K_PAGE_TOKENS : 0) + token]) * (float)q;
  }
  const bool is_fp4 = codec == K_KV_FP4;
  if (!k_kv_has_fragments(head_dim)) {
    const int n_groups = (head_dim + 31) >> 5, row = (is_value ? K_PAGE_TOKENS : 0) + token;
    const __half scale = ((const __half *)(tile + K_PAGE_TOKENS * head_dim))[row * n_groups + (d >> 5)];
    return __half2float(scale) * code_value(is_fp4, tile[row * (head_dim >> 1) + (d >> 1)] >> (d & 1) * 4 & 15u);
  }
  place at = is_value ? v_place(head_dim, token, d) : k_place(head_dim, token, d);
  int scale_at = is_value ? v_scale_offset(head_dim, token, d >> 5) : k_scale_offset(head_dim, token, d >> 5);
  const uint32_t q = extract_code(is_fp4, *(const uint32_t *)(tile + at.word_bytes), at.slot);
  return __half2float(*(const __half *)(tile + scale_at)) * code_value(is_fp4, q);
}

/* cos and sin of position * inv_freq with a three-term reduction, good to 1e-6 up to a million radians. */
SITS_DEV float2 rope_angle(int position, float inv_freq, float magnitude) {
  float x = (float)position * inv_freq;
  float k = rintf(x * 0.15915494309189535f);
  float r = fmaf(k, -6.28125f, x);
  r = fmaf(k, -1.93500518798828125e-3f, r);
  r = fmaf(k, -3.0198823e-7f, r);
  return make_float2(__cosf(r) * magnitude, __sinf(r) * magnitude);
}

/* cos and sin for the channels lane + 32 j of a head at `position`; channels that are not rotated get (1, 0). */
template <int D> SITS_DEV void head_angles(const k_rope &rope, int position, int lane, float2 (&angle)[D / 32]) {
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    const int e = lane + j * 32, half = rope.dims >> 1;
    angle[j] = make_float2(1.f, 0.f);
    if (e < rope.dims)
      angle[j] = rope_angle(position, rope.inv_freq[rope.interleaved ? e >> 1 : e < half ? e : e - half], rope.magnitude);
  }
}

/* A warp's head vector in shared memory -> r[j], channel lane + 32 j: RMS norm with gain (or NULL), rotation, Hadamard transform if
 * wanted. */
template <int D> SITS_DEV void rotate_head(float *v, int lane, const float *gain, float eps, const k_rope &rope,
                                           const float2 (&angle)[D / 32], bool hadamard, float (&r)[D / 32]) {
  constexpr int N = D / 32;
  if (gain) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < N; j++) sum += v[lane + j * 32] * v[lane + j * 32];
    const float f = rsqrtf(warp_sum(sum) / (float)D + eps);
#pragma unroll
    for (int j = 0; j < N; j++) v[lane + j * 32] *= f * gain[lane + j * 32];
    __syncwarp();
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    const int e = lane + j * 32, half = rope.dims >> 1;
    const bool first = rope.interleaved ? !(e & 1) : e < half;
    const int other = e >= rope.dims ? e : rope.interleaved ? e ^ 1 : first ? e + half : e - half;
    r[j] = v[e] * angle[j].x + (first ? -v[other] : v[other]) * angle[j].y;
  }
  if (!hadamard) return;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1)
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float o = __shfl_xor_sync(~0u, r[j], d);
      r[j] = lane & d ? o - r[j] : r[j] + o;
    }
#pragma unroll
  for (int d = 1; d < N; d <<= 1)
#pragma unroll
    for (int j = 0; j < N; j++)
      if (!(j & d)) {
        const float x = r[j], y = r[j | d];
        r[j] = x + y, r[j | d] = x - y;
      }
#pragma unroll
  for (int j = 0; j < N; j++) r[j] *= rsqrtf((float)D);
}

/* A warp rotates one head vector held in shared memory, in place: optional RMS norm with gain, RoPE.
 * Value e is owned by lane e % 32. D a multiple of 32, at most 256. */
SITS_DEV void prepare_head(float *v, int head_dim, int lane, const float *gain, float eps, const k_rope &rope, int position) {
  const int n = head_dim >> 5;
  if (gain) {
    float sum = 0.f;
    for (int j = 0; j < n; j++) sum += v[lane + j * 32] * v[lane + j * 32];
    float f = rsqrtf(warp_sum(sum) / (float)head_dim + eps);
    for (int j = 0; j < n; j++) v[lane + j * 32] *= f * gain[lane + j * 32];
    __syncwarp();
  }
  float r[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (j >= n) break;
    int e = lane + j * 32, half = rope.dims >> 1;
    float x = v[e];
    r[j] = x;
    if (e < rope.dims) {
      int i = rope.interleaved ? e >> 1 : e < half ? e : e - half;
      bool first = rope.interleaved ? !(e & 1) : e < half;
      int other = rope.interleaved ? e ^ 1 : first ? e + half : e - half;
      float2 cs = rope_angle(position, rope.inv_freq[i], rope.magnitude);
      r[j] = first ? x * cs.x - v[other] * cs.y : x * cs.x + v[other] * cs.y;
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (j < n) v[lane + j * 32] = r[j];
  __syncwarp();
}

/* A warp quantises N groups of 32 values (group j: x[j] of every lane) to 4 bits: value ~ scale * (q - 8). The end of larger magnitude
 * sits
 * on -8; the scale is then refitted by least squares. Every lane gets the scales. The groups' reductions run side by side. */
template <int N> SITS_DEV void quantise4(const float (&x)[N], uint32_t (&code)[N], __half (&scale)[N]) {
  float top[N], low[N], s[N], xq[N], qq[N];
#pragma unroll
  for (int j = 0; j < N; j++) top[j] = x[j], low[j] = -x[j];
#pragma unroll
  for (int d = 16; d > 0; d >>= 1)
#pragma unroll
    for (int j = 0; j < N; j++)
      top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], d)), low[j] = fmaxf(low[j], __shfl_xor_sync(~0u, low[j], d));
#pragma unroll
  for (int j = 0; j < N; j++) {
    s[j] = (low[j] > top[j] ? -low[j] : top[j]) * -0.125f;
    const float inv = s[j] != 0.f ? 1.f / s[j] : 0.f, q = fminf(fmaxf(rintf(x[j] * inv), -8.f), 7.f);
    code[j] = (uint32_t)((int)q + 8);
    xq[j] = x[j] * q, qq[j] = q * q;
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1)
#pragma unroll
    for (int j = 0; j < N; j++) xq[j] += __shfl_xor_sync(~0u, xq[j], d), qq[j] += __shfl_xor_sync(~0u, qq[j], d);
#pragma unroll
  for (int j = 0; j < N; j++) scale[j] = __float2half_rn(fminf(fmaxf(qq[j] > 0.f ? xq[j] / qq[j] : s[j], -65504.f), 65504.f));
}

/* The nearest e2m1 code of x (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives; beyond 6 is 6). */
SITS_DEV uint32_t fp4_code(float x) {
  const float a = fabsf(x);
  const uint32_t q = (a > .25f) + (a > .75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5.f);
  return q | (x < 0.f && q ? 8u : 0u);
}

/* The same in e2m1: value ~ scale * e2m1. The largest magnitude sits on 6; the scale is then refitted by least squares. */
template <int N> SITS_DEV void quantise_fp4(const float (&x)[N], uint32_t (&code)[N], __half (&scale)[N]) {
  float top[N], xq[N], qq[N];
#pragma unroll
  for (int j = 0; j < N; j++) top[j] = fabsf(x[j]);
#pragma unroll
  for (int d = 16; d > 0; d >>= 1)
#pragma unroll
    for (int j = 0; j < N; j++) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], d));
#pragma unroll
  for (int j = 0; j < N; j++) {
    code[j] = fp4_code(top[j] > 0.f ? x[j] * (6.f / top[j]) : 0.f);
    const float q = code_value(true, code[j]);
    xq[j] = x[j] * q, qq[j] = q * q;
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1)
#pragma unroll
    for (int j = 0; j < N; j++) xq[j] += __shfl_xor_sync(~0u, xq[j], d), qq[j] += __shfl_xor_sync(~0u, qq[j], d);
#pragma unroll
  for (int j = 0; j < N; j++) scale[j] = __float2half_rn(qq[j] > 0.f ? fminf(xq[j] / qq[j], 65504.f) : 0.f);
}

template <int N> SITS_DEV void quantise_nibbles(bool is_fp4, const float (&x)[N], uint32_t (&code)[N], __half (&scale)[N]) {
  if (is_fp4)
    quantise_fp4<N>(x, code, scale);
  else
    quantise4<N>(x, code, scale);
}

/* Hadamard transform of a warp's head vector in shared memory, any even D up to 256: in blocks of the largest power of two that divides
 * D. */
SITS_DEV void hadamard_any(float *v, int head_dim, int lane) {
  const int block = head_dim & -head_dim;
  const float f = rsqrtf((float)block);
  for (int n = 1; n < block; n <<= 1) {
    for (int i = lane; i < head_dim / 2; i += 32) {
      const int a = (i & ~(n - 1)) * 2 + (i & (n - 1));
      const float x = v[a], y = v[a + n];
      v[a] = x + y, v[a + n] = x - y;
    }
    __syncwarp();
  }
  for (int i = lane; i < head_dim; i += 32) v[i] *= f;
  __syncwarp();
}

} // namespace kv

#endif
