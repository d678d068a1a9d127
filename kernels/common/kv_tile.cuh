/* Where a value lies in a KV tile, and the arithmetic that puts it there: rotation, quantisation, addressing. Used by every kernel that
 * writes or reads pages one value at a time; the tensor-core kernels rely on the same order. The numbers that a page holds are those of the
 * CPU's codecs (src/backend/cpu/cpu_kv_int4.c, cpu_kv_fp4.c), only their places differ.
 *
 * int4 tile of head size D. Keys: per channel over the 32 tokens of a half page; values: per token over 32 channels; (q - zero) * scale.
 *   offset  bytes  what
 *   0       32 D   K nibbles: word (block of 16 tokens, step = d/16, lane) at block*8D + (step/4)*512 + lane*16 + (step%4)*4;
 *                  rows are tokens g, g+8 of the block (lane = 4 g + t), c0..c3 are channels 16 step + 4 t + 0..3
 *   32 D    32 D   V nibbles: the same with rows = channels 16 step + {g, g+8}, c0..c3 = tokens 2t, 2t+1, 2t+8, 2t+9
 *   64 D    2 D    K scales: half page, step/4, t, step%4, a word of channels 4t + 0..3 in the order 0, 2, 1, 3
 *   66 D    2 D    K zero points, biased by 128: the same
 *   68 D    2 D    V scales: block, t, group of 32 channels, a word of tokens 2t, 2t+8, 2t+1, 2t+9
 *   70 D    2 D    V zero points, biased by 128: the same
 * fp4 tile. Keys: the page's mean taken out, groups of 16 channels of a token; values: the same groups, no mean; e2m1 * scale (+ mean).
 *   0, 32 D        nibbles as above, but the four bits of an e2m1 number lie apart, so that masks and shifts make f16 numbers of them: in
 *                  a word's half c % 2, of the numbers n = 2 (c / 2) + second row, sign and magnitude at bits
 *                  n = 0: 15, 11:9    n = 1: 7, 3:1    n = 2: 8, 14:12    n = 3: 0, 6:4
 *   64 D    4 D    K scales: block, g, step/2, a word of {step even, odd of token g, even, odd of token g+8}
 *   68 D    4 D    V scales: block, t, step, a word of tokens 2t, 2t+8, 2t+1, 2t+9
 *   72 D    2 D    means f16: step/2, t, step%2, channels 4t + 0..3
 * Scales are unsigned 8-bit floats (cpu_kv_code.h): byte << 6 is the f16 number of a quarter of the size.
 * Other head sizes: K bytes [P][D/2] (channel 2i in the low half of byte i), V bytes [P][D/2]; int4: K scales [2][D], K zeros [2][D], V
 * scales [P][n], V zeros [P][n], n groups of 32 channels; fp4: K scales [P][n], V scales [P][n], n groups of 16, means [D].
 *
 * Open groups. Keys of the unfinished half page (int4) or page (fp4) are f16 [tokens][D] of a slot; with 64 or 128 channels in the order
 * of A fragments: block of 16 tokens, step, lane, {(g, c0 c1), (g+8, c0 c1), (g, c2 c3), (g+8, c2 c3)}.
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

/* Groups of channels that share a scale, where a token has scales of its own. */
SITS_DEV int group_channels(bool is_fp4) { return is_fp4 ? 16 : 32; }
SITS_DEV int n_groups(bool is_fp4, int head_dim) { return is_fp4 ? (head_dim + 15) >> 4 : (head_dim + 31) >> 5; }

/* Byte offsets of the parameters of a value. zeros and means: from the start of the tile too. */
SITS_DEV int int4_k_scale(int head_dim, int token, int d) {
  const int half = token >> 5;
  if (!k_kv_has_fragments(head_dim)) return K_PAGE_TOKENS * head_dim + half * head_dim + d;
  return 64 * head_dim + half * head_dim + (d >> 6) * 64 + ((d & 15) >> 2) * 16 + (d >> 4 & 3) * 4 + (d & 1) * 2 + (d >> 1 & 1);
}
SITS_DEV int k_zero_distance(int head_dim) { return 2 * head_dim; } /* from a scale to its zero point */
SITS_DEV int token_byte(int tk) { return (tk & 1) * 2 + (tk >> 3); } /* in a word of tokens 2t, 2t+8, 2t+1, 2t+9 */
SITS_DEV int v_scale(bool is_fp4, int head_dim, int token, int group) {
  const int n = n_groups(is_fp4, head_dim), tk = token & 15;
  if (!k_kv_has_fragments(head_dim)) return K_PAGE_TOKENS * head_dim + (is_fp4 ? K_PAGE_TOKENS * n : 4 * head_dim) + token * n + group;
  return 68 * head_dim + ((token >> 4) * 4 + ((tk & 7) >> 1)) * n * 4 + group * 4 + token_byte(tk);
}
SITS_DEV int v_zero_distance(int head_dim) { return K_PAGE_TOKENS * n_groups(false, head_dim); }
SITS_DEV int fp4_k_scale(int head_dim, int token, int group) {
  const int tk = token & 15;
  if (!k_kv_has_fragments(head_dim)) return K_PAGE_TOKENS * head_dim + token * n_groups(true, head_dim) + group;
  return 64 * head_dim + (token >> 4) * head_dim + (tk & 7) * (head_dim >> 3) + (group >> 1) * 4 + (tk >> 3) * 2 + (group & 1);
}
SITS_DEV int fp4_mean(int head_dim, int d) {
  if (!k_kv_has_fragments(head_dim)) return K_PAGE_TOKENS * (head_dim + 2 * n_groups(true, head_dim)) + d * 2;
  return 72 * head_dim + (d >> 5) * 64 + ((d & 15) >> 2) * 16 + (d >> 4 & 1) * 8 + (d & 3) * 2;
}

/* Index in an open group's tile. */
SITS_DEV int open_at(int head_dim, int token, int d) {
  if (!k_kv_has_fragments(head_dim)) return token * head_dim + d;
  const int tk = token & 15, lane = (tk & 7) * 4 + ((d & 15) >> 2);
  return (token >> 4) * 16 * head_dim + (d >> 4) * 256 + lane * 8 + ((d >> 1 & 1) * 2 + (tk >> 3)) * 2 + (d & 1);
}
/* The open tile of slot `slot`, in this view's layer. */
SITS_DEV __half *open_tile(const k_kv_view &kv, int slot, int layer, int head) {
  const size_t one = (size_t)k_kv_open_tokens(kv.codec) * kv.head_dim;
  return (__half *)kv.open + (((size_t)slot * kv.n_layers + layer) * kv.n_kv_heads + head) * one;
}
SITS_DEV uint8_t *page_tile(const k_kv_view &kv, int page, int layer, int head) {
  return kv.pool + (size_t)page * kv.page_bytes + (size_t)(layer * kv.n_kv_heads + head) * k_kv_tile_bytes(kv.codec, kv.head_dim);
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

SITS_DEV float half_from_bits(uint32_t bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }
/* A scale's value; the code whose value is nearest to scale >= 0, ties to even, the last beyond the range. */
SITS_DEV float scale_value(uint32_t code) { return 4.f * half_from_bits(code << 6); }
SITS_DEV uint32_t scale_code(float scale) {
  if (!(scale < 7.875f)) return 0xff;
  if (scale < 0x1p-12f) return (uint32_t)rintf(scale * 0x1p16f); /* without a leading one; 16 is the first with one */
  uint32_t bits = __float_as_uint(scale);
  bits += 0x3ffff + (bits >> 19 & 1);
  return (bits >> 19) - ((127 - 13) << 4);
}
SITS_DEV float e2m1_value(uint32_t q) { return 16384.f * half_from_bits((q & 8u) << 12 | (q & 7u) << 9); }

/* A word of four scales as f16 pairs of their quarters: bytes 0 and 2, bytes 1 and 3. */
SITS_DEV void quarter_scales(uint32_t w, uint32_t *even, uint32_t *odd) {
  *even = (w << 6) & 0x3FC03FC0u, *odd = (w >> 2) & 0x3FC03FC0u;
}
/* One value of a tile, as f32 (keys and values as stored: rotated where the codec rotates). */
SITS_DEV float load(const uint8_t *tile, int codec, int head_dim, bool is_value, int token, int d) {
  if (codec == K_KV_F16) return __half2float(((const __half *)tile)[(is_value ? K_PAGE_TOKENS * head_dim : 0) + token * head_dim + d]);
  if (codec == K_KV_INT8) {
    const float *scales = (const float *)(tile + 2 * K_PAGE_TOKENS * head_dim);
    int q = ((const int8_t *)tile)[(is_value ? K_PAGE_TOKENS * head_dim : 0) + token * head_dim + d];
    return scales[(is_value ? K_PAGE_TOKENS : 0) + token] * (float)q;
  }
  const bool is_fp4 = codec == K_KV_FP4;
  uint32_t q;
  if (k_kv_has_fragments(head_dim)) {
    const place at = is_value ? v_place(head_dim, token, d) : k_place(head_dim, token, d);
    q = extract_code(is_fp4, *(const uint32_t *)(tile + at.word_bytes), at.slot);
  } else
    q = tile[((is_value ? K_PAGE_TOKENS : 0) + token) * (head_dim >> 1) + (d >> 1)] >> (d & 1) * 4 & 15u;
  if (is_fp4) {
    const uint32_t code = tile[is_value ? v_scale(true, head_dim, token, d >> 4) : fp4_k_scale(head_dim, token, d >> 4)];
    const float mean = is_value ? 0.f : __half2float(*(const __half *)(tile + fp4_mean(head_dim, d)));
    return fmaf(e2m1_value(q), scale_value(code), mean);
  }
  const int at = is_value ? v_scale(false, head_dim, token, d >> 5) : int4_k_scale(head_dim, token, d);
  const int zero = (int)tile[at + (is_value ? v_zero_distance(head_dim) : k_zero_distance(head_dim))] - 128;
  return (float)((int)q - zero) * scale_value(tile[at]);
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

/* Head `head` (0 .. H+2G-1) of the token whose projections begin at `row` -> x[j], channel lane + 32 j. All loads are in flight
 * together. */
template <int D> SITS_DEV void fetch_head(float (&x)[D / 32], const k_projections &p, size_t row, int head, int lane) {
  const size_t at = row + head * D + lane;
  if (p.rows) {
#pragma unroll
    for (int j = 0; j < D / 32; j++) x[j] = __half2float(__ldcg((const __half *)p.rows + at + j * 32));
    return;
  }
#pragma unroll
  for (int j = 0; j < D / 32; j++) x[j] = p.bias ? p.bias[head * D + lane + j * 32] : 0.f;
#pragma unroll 4
  for (int i = 0; i < p.n_slabs; i++)
#pragma unroll
    for (int j = 0; j < D / 32; j++) x[j] += __ldcg(p.slabs + i * p.slab_stride + at + j * 32);
}

/* Hadamard transform of a head vector held by a warp: r[j] is channel lane + 32 j. */
template <int D> SITS_DEV void hadamard_lanes(float (&r)[D / 32], int lane) {
  constexpr int N = D / 32;
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

/* The same of a row of a product's fragments: r[2 j + e] is channel 8 j + 2 t + e, in the four lanes t of a row. Without the factor. */
template <int D> SITS_DEV void hadamard_row(float (&r)[D / 4], int t) {
#pragma unroll
  for (int j = 0; j < D / 8; j++) {
    const float x = r[2 * j], y = r[2 * j + 1];
    r[2 * j] = x + y, r[2 * j + 1] = x - y;
  }
#pragma unroll
  for (int d = 1; d < 4; d <<= 1)
#pragma unroll
    for (int i = 0; i < D / 4; i++) {
      const float o = __shfl_xor_sync(~0u, r[i], d);
      r[i] = t & d ? o - r[i] : r[i] + o;
    }
#pragma unroll
  for (int d = 1; d < D / 8; d <<= 1)
#pragma unroll
    for (int j = 0; j < D / 8; j++)
      if (!(j & d)) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float x = r[2 * j + e], y = r[2 * (j | d) + e];
          r[2 * j + e] = x + y, r[2 * (j | d) + e] = x - y;
        }
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
  if (hadamard) hadamard_lanes<D>(r, lane);
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

/* ---- quantisers: the CPU's, operation by operation, so that both store the same numbers ----
 * A group's values lie in LANES neighbouring lanes (a power of two), N in each: x[k] is value lane % LANES + LANES k. Sums over a group run
 * as a tree of halves, whatever LANES is. n: values of the group, the others count nothing. Codes come back in place; scale and zero point
 * in every lane of the group. */
template <int LANES, int N> SITS_DEV float group_sum(const float (&x)[N]) {
  if constexpr (N > 1) {
    float half[N / 2];
#pragma unroll
    for (int k = 0; k < N / 2; k++) half[k] = x[k] + x[k + N / 2];
    return group_sum<LANES>(half);
  } else {
    float sum = x[0];
#pragma unroll
    for (int d = LANES / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
  }
}
template <int LANES> SITS_DEV float group_max(float x) {
#pragma unroll
  for (int d = LANES / 2; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

/* Several sums at once, so that their exchanges between lanes do not wait for each other. x[c][k] as above. */
template <int LANES, int C, int N> SITS_DEV void group_sums(float (&sum)[C], const float (&x)[C][N]) {
#pragma unroll
  for (int c = 0; c < C; c++) sum[c] = group_sum<1>(x[c]);
#pragma unroll
  for (int d = LANES / 2; d > 0; d >>= 1)
#pragma unroll
    for (int c = 0; c < C; c++) sum[c] += __shfl_xor_sync(~0u, sum[c], d);
}

/* rintf of what is clamped to less than 2^22 afterwards, without the slow pipe. */
SITS_DEV float round_even(float x) { return __fadd_rn(__fadd_rn(x, 12582912.f), -12582912.f); }
/* A whole number from 0 to 15, likewise. */
SITS_DEV uint32_t small_int(float x) { return __float_as_uint(__fadd_rn(x, 8388608.f)) & 15u; }
/* 1 / b and a / b as the division rounds them, for scales b > 0: no call for what lies at the ends of the range. */
SITS_DEV float inverse_of(float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return fmaf(y, fmaf(-b, y, 1.f), y);
}
SITS_DEV float quotient(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(inverse, fmaf(-b, q, a), q);
}

/* 32 values: q of (q - zero) * scale, 0 to 15. Tries three scales and three zero points. ALL: n is known to be 32. */
template <int LANES, int N, bool ALL = false>
SITS_DEV void quantise_u4(const float (&x)[N], int n, int lane, uint32_t (&code)[N], uint32_t *scale, int *zero) {
  static_assert(LANES * N == 32, "a group");
  const int first_value = lane & (LANES - 1);
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const bool counts = ALL || first_value + LANES * k < n;
    const float v = counts ? x[k] : -INFINITY, w = counts ? x[k] : INFINITY;
    high = k ? fmaxf(high, v) : v, low = k ? fminf(low, w) : w;
  }
  high = group_max<LANES>(high), low = -group_max<LANES>(-low);
  const float size = fmaxf(-low, high), span = quotient(high - low, 15.f, 1.f / 15.f), least = quotient(size, 120.f, 1.f / 120.f);
  const uint32_t first = scale_code(fmaxf(span, least));
  float best = INFINITY, best_scale = 0.f, best_zero = 0.f;
  uint32_t best_code = first;
#pragma unroll 1
  for (int i = 0; i < 3; i++) {
    const uint32_t c = min(first + i, 255u);
    const float s = scale_value(c), y = inverse_of(s), inverse = s > 0.f ? y : 0.f,
                middle = s > 0.f ? round_even(quotient(-low, s, y)) : 0.f;
    float q[N];
#pragma unroll
    for (int k = 0; k < N; k++) q[k] = round_even(x[k] * inverse);
#pragma unroll
    for (int shift = -1; shift <= 1; shift++) {
      const float z = fminf(fmaxf(middle + (float)shift, -128.f), 127.f), least_q = -z, most_q = 15.f - z;
      float e[N];
#pragma unroll
      for (int k = 0; k < N; k++) {
        const float d = fmaf(fminf(fmaxf(q[k], least_q), most_q), s, -x[k]);
        e[k] = ALL || first_value + LANES * k < n ? d * d : 0.f;
      }
      const float error = group_sum<LANES>(e);
      if (error < best) best = error, best_code = c, best_scale = s, best_zero = z; /* the last code again changes nothing */
    }
  }
  const float inverse = best_scale > 0.f ? inverse_of(best_scale) : 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const float q = fminf(fmaxf(round_even(x[k] * inverse) + best_zero, 0.f), 15.f);
    code[k] = ALL || first_value + LANES * k < n ? small_int(q) : 0u;
  }
  *scale = best_code, *zero = (int)best_zero;
}

/* Twice the e2m1 number nearest to a >= 0: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6. */
template <bool FAST = false> SITS_DEV float e2m1_doubled(float a) {
  const auto round = [](float v) { return FAST ? round_even(v) : rintf(v); };
  const float fine = round(a * 2.f), whole = round(a) * 2.f, coarse = round(a * 0.5f) * 4.f;
  return fminf(a < 2.f ? fine : a < 4.f ? whole : coarse, 12.f);
}

/* 16 values, e2m1 * scale: tries five scales. Values from n on must be zeros. */
template <int LANES, int N> SITS_DEV void quantise_fp4(const float (&x)[N], uint32_t (&code)[N], uint32_t *scale) {
  static_assert(LANES * N == 16, "a group");
  float top = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) top = fmaxf(top, fabsf(x[k]));
  top = group_max<LANES>(top);
  float best = INFINITY, best_scale = 0.f;
  uint32_t best_code = 0;
#pragma unroll 1
  for (int i = 0; i < 5; i++) {
    const uint32_t c = scale_code(top / (6.f - 0.5f * (float)i));
    const float s = scale_value(c), inverse = s > 0.f ? 1.f / s : 0.f;
    float e[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float size = fabsf(x[k]), d = fmaf(e2m1_doubled(size * inverse) * 0.5f, s, -size);
      e[k] = d * d;
    }
    const float error = group_sum<LANES>(e);
    if (error < best) best = error, best_code = c, best_scale = s;
  }
  const float inverse = best_scale > 0.f ? 1.f / best_scale : 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int d = (int)e2m1_doubled(fabsf(x[k]) * inverse);
    code[k] = (uint32_t)(d < 4 ? d : d < 8 ? d / 2 + 2 : d / 4 + 4) | (x[k] < 0.f ? 8u : 0u);
  }
  *scale = best_code;
}

/* quantise_u4 of 32 values, all candidates at once: less to wait for, more code and registers. */
template <int LANES, int N> SITS_DEV void quantise_u4_at_once(const float (&x)[N], uint32_t (&code)[N], uint32_t *scale, int *zero) {
  constexpr int CODES = 3;
  static_assert(LANES * N == 32, "a group");
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    high = k ? fmaxf(high, x[k]) : x[k], low = k ? fminf(low, x[k]) : x[k];
  }
  high = group_max<LANES>(high), low = -group_max<LANES>(-low);
  const float size = fmaxf(-low, high), span = quotient(high - low, 15.f, 1.f / 15.f), least = quotient(size, 120.f, 1.f / 120.f);
  const uint32_t first = scale_code(fmaxf(span, least));
  float best = INFINITY, best_scale = 0.f, best_inverse = 0.f, best_zero = 0.f;
  uint32_t best_code = first;
  float s[CODES], inverse[CODES], z[CODES * 3], e[CODES * 3][N], error[CODES * 3];
#pragma unroll
  for (int i = 0; i < CODES; i++) {
    s[i] = scale_value(min(first + i, 255u));
    const float y = inverse_of(s[i]), middle = s[i] > 0.f ? round_even(quotient(-low, s[i], y)) : 0.f;
    inverse[i] = s[i] > 0.f ? y : 0.f;
#pragma unroll
    for (int shift = 0; shift < 3; shift++) {
      const int c = i * 3 + shift;
      z[c] = fminf(fmaxf(middle + (float)(shift - 1), -128.f), 127.f);
#pragma unroll
      for (int k = 0; k < N; k++) {
        const float d = fmaf(fminf(fmaxf(round_even(x[k] * inverse[i]), -z[c]), 15.f - z[c]), s[i], -x[k]);
        e[c][k] = d * d;
      }
    }
  }
  group_sums<LANES>(error, e);
#pragma unroll
  for (int c = 0; c < CODES * 3; c++)
    if (error[c] < best) /* the last code again changes nothing */
      best = error[c], best_code = min(first + c / 3, 255u), best_scale = s[c / 3], best_inverse = inverse[c / 3],
      best_zero = z[c];
#pragma unroll
  for (int k = 0; k < N; k++) {
    const float q = fminf(fmaxf(round_even(x[k] * best_inverse) + best_zero, 0.f), 15.f);
    code[k] = (uint32_t)(int)q;
  }
  *scale = best_code, *zero = (int)best_zero;
}

/* quantise_fp4, all candidates at once: a shorter chain and more registers, which kernels that append many tokens do not have. */
template <int LANES, int N> SITS_DEV void quantise_fp4_at_once(const float (&x)[N], uint32_t (&code)[N], uint32_t *scale) {
  static_assert(LANES * N == 16, "a group");
  constexpr int CODES = 5;
  float top = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) top = fmaxf(top, fabsf(x[k]));
  top = group_max<LANES>(top);
  float best = INFINITY, best_scale = 0.f;
  uint32_t best_code = 0;
  uint32_t c[CODES];
  float s[CODES], e[CODES][N], error[CODES];
#pragma unroll
  for (int i = 0; i < CODES; i++) {
    const float most = 6.f - 0.5f * (float)i;
    c[i] = scale_code(quotient(top, most, 1.f / most));
    s[i] = scale_value(c[i]);
    const float inverse = s[i] > 0.f ? inverse_of(s[i]) : 0.f;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float size = fabsf(x[k]), d = fmaf(e2m1_doubled<true>(size * inverse) * 0.5f, s[i], -size);
      e[i][k] = d * d;
    }
  }
  group_sums<LANES>(error, e);
#pragma unroll
  for (int i = 0; i < CODES; i++)
    if (error[i] < best) best = error[i], best_code = c[i], best_scale = s[i];
  const float inverse = best_scale > 0.f ? inverse_of(best_scale) : 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int d = (int)e2m1_doubled<true>(fabsf(x[k]) * inverse);
    code[k] = (uint32_t)(d < 4 ? d : d < 8 ? d / 2 + 2 : d / 4 + 4) | (x[k] < 0.f ? 8u : 0u);
  }
  *scale = best_code;
}

/* One token's value of a head, v[D] in shared memory (rotated) -> codes[D], one a byte, and its parameters in the tile. A warp; any D. */
SITS_DEV void quantise_value(bool is_fp4, uint8_t *tile, const float *v, uint8_t *codes, int head_dim, int token, int lane) {
  constexpr int N = 4;
  const int lanes = is_fp4 ? 4 : 8, channels = group_channels(is_fp4), groups = n_groups(is_fp4, head_dim);
  for (int base = 0; base < groups; base += 32 / lanes) {
    const int group = base + lane / lanes, first = group * channels, n = min(channels, head_dim - first);
    float x[N];
    uint32_t code[N], scale;
    int zero = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int i = (lane & (lanes - 1)) + lanes * k;
      x[k] = i < n ? v[first + i] : 0.f;
    }
    if (is_fp4)
      quantise_fp4<4>(x, code, &scale);
    else
      quantise_u4<8>(x, n, lane, code, &scale, &zero);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int i = (lane & (lanes - 1)) + lanes * k;
      if (i < n) codes[first + i] = (uint8_t)code[k];
    }
    if (n > 0 && (lane & (lanes - 1)) == 0) {
      uint8_t *at = tile + v_scale(is_fp4, head_dim, token, group);
      *at = (uint8_t)scale;
      if (!is_fp4) at[v_zero_distance(head_dim)] = (uint8_t)(zero + 128);
    }
  }
  __syncwarp();
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
