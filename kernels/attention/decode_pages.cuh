/* What the two kernels of decode attention over int4 and fp4 pages share (decode_few.cu, decode_int4.cu): a page's tokens against the
 * queries of a KV head's group, the new token on its way into page and slot, outputs.
 *
 * A warp takes N blocks of 16 of a page's 64 tokens; the query heads of the group fill the 8 columns of its products. Where a warp has two
 * blocks, what is computed once per page and 32 tokens (queries times the scales of keys, zero points, means) serves both, and it has two
 * independent chains of products.
 * Own group: the newest 1 to 32 (int4) or 64 (fp4) tokens are read in f16 from the sequence's open slot.
 * Numerics: int4: folded nibbles as subnormal f16 numbers, which tensor cores take (2^-18 and 2^-22 times as large), times f16(query *
 *   scale of its channel) or f16(probability * scale of its token); zero points are taken off by one more product a group, of the stored
 *   bytes and of their bias. fp4: f16 numbers 2^-14 times as large, subnormal ones included; K scales on the f32 scores, means by a
 *   product of their own, V scales on the f16 probabilities. Scales are quarters of their size everywhere, the factor comes back in f32. A
 *   running reference near the maximum in f32, base-2 exponentials. Empty and masked positions have probability exactly 0. Outputs are
 *   rotated back (Hadamard) as they are stored.
 */
#ifndef SITS_KERNELS_DECODE_PAGES_CUH
#define SITS_KERNELS_DECODE_PAGES_CUH

#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace decode {

constexpr float SCALES = 4.f, FP4_SCALES = 65536.f; /* of sums with quartered scales, and with e2m1 numbers 2^-14 times as large */
constexpr float SLACK = 6.f;

template <int D> constexpr int ROW = D + 4; /* merged output, maximum, sum */
template <int D> constexpr int QUERY_BYTES = 8 * D * 2;
template <int D, bool FP4> constexpr int TILE = (FP4 ? 74 : 72) * D;
template <bool FP4> constexpr int OPEN_TOKENS = FP4 ? 64 : 32;
template <int D, bool FP4> constexpr int OPEN = OPEN_TOKENS<FP4> * D * 2;

/* log2(e) / sqrt(D), times the factor of the scores. */
template <bool FP4> static inline float score_scale(int d) { return 1.4426950408889634f / sqrtf((float)d) * (FP4 ? FP4_SCALES : SCALES); }

/* Does attention serve this sequence, and which pages? */
#if SITS_SM90
SITS_DEV int pages_of(const k_kv_view &kv, int s) {
  if (s >= kv.n_seqs || kv.seq_start[s + 1] - kv.seq_start[s] != 1) return 0;
  const int len = kv.kv_len[s], first = kv.window > 0 && len > kv.window ? (len - kv.window) / K_PAGE_TOKENS : 0;
  return (len + K_PAGE_TOKENS - 1) / K_PAGE_TOKENS - first;
}

struct new_token {
  __half k[128];
  uint8_t v[128], params[16]; /* params: V scales, and zero points from 8 on */
};

/* Where halves of the queries lie: in the order of B fragments, two steps of 16 channels to 16 bytes of a lane. */
SITS_DEV int query_at(int head, int channel) {
  const int step = channel >> 4;
  return ((step >> 1) * 32 + head * 4 + ((channel & 15) >> 2)) * 8 + (step & 1) * 4 + (channel & 3);
}

/* The new token's value v[D] (rotated) -> codes and parameters. A warp. */
template <int D, bool FP4> SITS_DEV void quantise_new(const float *v, new_token *nt, int lane) {
  constexpr int LANES = FP4 ? 4 : 8, CHANNELS = FP4 ? 16 : 32, GROUPS = D / CHANNELS;
  const int group = lane / LANES % GROUPS, first = group * CHANNELS + (lane & (LANES - 1));
  float x[4];
  uint32_t code[4], scale;
  int zero = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) x[k] = v[first + LANES * k];
  if constexpr (FP4)
    kv::quantise_fp4_at_once<4>(x, code, &scale);
  else
    kv::quantise_u4_at_once<8>(x, code, &scale, &zero);
#pragma unroll
  for (int k = 0; k < 4; k++) nt->v[first + LANES * k] = (uint8_t)code[k];
  if ((lane & (LANES - 1)) == 0) {
    nt->params[group] = (uint8_t)scale;
    if (!FP4) nt->params[8 + group] = (uint8_t)(zero + 128);
  }
}

/* Item i of a token's projections: a query head of the group (i < gqa), its key (gqa), its value (gqa + 1). */
template <int D> SITS_DEV void fetch_item(float (&x)[D / 32], const k_attn_decode &a, int row, int head, int gqa, int i,
                         int lane) {
  const int h = a.kv.n_heads, g = a.kv.n_kv_heads;
  kv::fetch_head<D>(x, a.qkv, (size_t)row * (h + 2 * g) * D, i < gqa ? head * gqa + i : h + (i - gqa) * g + head, lane);
}

/* That item: queries -> query, rotated; the key -> nt, rotated. A warp; v: D floats of its own. */
template <int D, bool FP4> SITS_DEV void prepare_rotated(float (&x)[D / 32], const k_attn_decode &a, int gqa, int i, float *v,
                                                         const float2 (&angle)[D / 32], __half *query, new_token *nt, int lane) {
#pragma unroll
  for (int j = 0; j < D / 32; j++) v[lane + j * 32] = x[j];
  __syncwarp();
  kv::rotate_head<D>(v, lane, i < gqa ? a.q_gain : a.k_gain, a.eps, a.rope, angle, FP4, x);
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    const int ch = lane + j * 32;
    const __half y = __float2half_rn(fminf(fmaxf(x[j], -65504.f), 65504.f));
    if (i < gqa)
      query[query_at(i, ch)] = y;
    else
      nt->k[ch] = y;
  }
  __syncwarp();
}

/* The value -> nt, quantised. The same. */
template <int D, bool FP4> SITS_DEV void prepare_value(float (&x)[D / 32], float *v, new_token *nt, int lane) {
  kv::hadamard_lanes<D>(x, lane);
#pragma unroll
  for (int j = 0; j < D / 32; j++) v[lane + j * 32] = x[j];
  __syncwarp();
  quantise_new<D, FP4>(v, nt, lane);
  __syncwarp();
}

/* Its value -> tile in shared memory and page. */
template <int D, bool FP4> SITS_DEV void patch_value(uint32_t tile, uint8_t *page, const new_token *nt, int token, int lane) {
#pragma unroll
  for (int w = 0; w < D / 64; w++) { /* D/2 words, two channels each */
    int i = lane + w * 32, d = (i >> 3) * 16 + (i & 7);
    kv::place p = kv::v_place(D, token, d);
    uint32_t word = lds32(tile + p.word_bytes);
    word = kv::insert_code(FP4, word, p.slot, nt->v[d]);
    word = kv::insert_code(FP4, word, kv::v_place(D, token, d + 8).slot, nt->v[d + 8]);
    sts32(tile + p.word_bytes, word);
    *(uint32_t *)(page + p.word_bytes) = word;
  }
  if (lane < D / 16) { /* fp4: a scale each; int4: scales, then zero points */
    const bool is_zero = !FP4 && lane >= D / 32;
    const int group = is_zero ? lane - D / 32 : lane;
    const int at = kv::v_scale(FP4, D, token, group) + (is_zero ? kv::v_zero_distance(D) : 0);
    const uint8_t x = nt->params[is_zero ? 8 + group : lane];
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(tile + at), "r"((uint32_t)x) : "memory");
    page[at] = x;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the next copy into the tile's place follows these stores */
  __syncwarp();
}

/* off, int4: of each group of 32 channels, sums of probability * scale * biased zero point (two heads), then of the same with the bias
 * alone; both 2^-24 times as large. */
template <int D> struct state { float o[D / 16][4], off[D / 32][4], m0, m1, l0, l1; };

/* Eight e2m1 numbers (kv_tile.cuh) as f16 pairs, 2^-14 times as large: sign to bit 15, magnitude to bits 11:9 of each half. */
SITS_DEV void unfold_fp4(uint32_t w, uint32_t a[4]) {
  a[0] = w & 0x8E008E00u;
  a[1] = (w << 8) & 0x8E008E00u;
  a[2] = lop_and_or(w << 7, 0x80008000u, (w >> 3) & 0x0E000E00u);
  a[3] = lop_and_or(w << 15, 0x80008000u, (w << 5) & 0x0E000E00u);
}
/* Eight nibbles of a folded word as f16 numbers: row g 2^-18 times as large, row g+8 2^-22 times. */
SITS_DEV void unfold_int4(uint32_t w, uint32_t a[4]) {
  const uint32_t y = __funnelshift_r(w, w, 8);
  a[0] = w & 0x03C003C0u, a[1] = w & 0x003C003Cu, a[2] = y & 0x03C003C0u, a[3] = y & 0x003C003Cu;
}
template <bool FP4> SITS_DEV void unfold(uint32_t w, uint32_t a[4]) {
  if (FP4)
    unfold_fp4(w, a);
  else
    fold_nibbles(w, a);
}

SITS_DEV uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
/* Rows g of A: biased zero points 2^-24 times as large; rows g+8: the bias. */
SITS_DEV void mma_zeros(float (&d)[4], uint32_t zeros, uint32_t b0, uint32_t b1) {
  constexpr uint32_t BIAS = 0x00800080u;
  const uint32_t a[4] = {zeros & 0x00FF00FFu, BIAS, __byte_perm(zeros, 0, 0x4341), BIAS};
  mma_f16(d, a, b0, b1, d);
}
constexpr float ROW0 = 0x1p18f, ROW8 = 0x1p22f, ZERO = 0x1p24f; /* what takes that back, of rows g and g+8 and of off */

template <int N> SITS_DEV void mma_own(float (&sc)[N][4], const uint4 &k, int block, uint32_t q0, uint32_t q1) {
  const uint32_t a[4] = {k.x, k.y, k.z, k.w};
  mma_f16(sc[block], a, q0, q1, sc[block]);
}
/* Scores of N blocks of 16 tokens against f16 keys. Half unrolled: a warp comes here once a sequence. Where the keys are far, in global
 * memory, those of 64 channels are asked for before the first of them is touched; the compiler waited for each. */
template <int D, bool FP4, int N, class K> SITS_DEV void score_own(float (&sc)[N][4], uint32_t query, int lane, K keys) {
  constexpr int STEPS = K::ARE_FAR ? 4 : 2, OUTER = K::ARE_FAR ? STEPS : N, INNER = K::ARE_FAR ? N : STEPS; /* the order of loads */
#pragma unroll 4 / STEPS
  for (int i = 0; i < D / (16 * STEPS); i++) {
    uint4 k[OUTER][INNER];
#pragma unroll
    for (int x = 0; x < OUTER; x++)
#pragma unroll
      for (int y = 0; y < INNER; y++) {
        const int b = K::ARE_FAR ? y : x, step = i * STEPS + (K::ARE_FAR ? x : y);
        k[x][y] = K::ARE_FAR ? keys.fetch(step, b) : keys.patched(keys.fetch(step, b), step, b);
      }
    if constexpr (K::ARE_FAR)
#pragma unroll
      for (int x = 0; x < OUTER; x++)
#pragma unroll
        for (int y = 0; y < INNER; y++) keys.patch(k[x][y], i * STEPS + x, y);
#pragma unroll
    for (int h = 0; h < STEPS / 2; h++) {
      const uint4 q = lds128(query + ((i * (STEPS / 2) + h) * 32 + lane) * 16);
      if constexpr (K::ARE_FAR) {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int b = 0; b < N; b++) mma_own<N>(sc, k[h * 2 + c][b], b, c ? q.z : q.x, c ? q.w : q.y);
      } else {
#pragma unroll
        for (int b = 0; b < N; b++)
#pragma unroll
          for (int c = 0; c < 2; c++) mma_own<N>(sc, k[b][c], b, c ? q.z : q.x, c ? q.w : q.y);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < N; b++)
#pragma unroll
    for (int e = 0; e < 4; e++) sc[b][e] *= FP4 ? 1.f / FP4_SCALES : 1.f / SCALES;
}

/* int4: the blocks lie in one half page. */
template <int D, int N> SITS_DEV void score_int4(float (&sc)[N][4], uint32_t query, uint32_t tile, int block0, int lane) {
  const uint32_t params = tile + 64 * D + (block0 >> 1) * D + (lane & 3) * 16, words = tile + block0 * 8 * D + lane * 16;
  float off[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < D / 64; i++) {
    const uint4 scales = lds128(params + i * 64), zeros = lds128(params + 2 * D + i * 64);
    uint4 w[N];
#pragma unroll
    for (int b = 0; b < N; b++) w[b] = lds128(words + b * 8 * D + i * 512);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 q = lds128(query + ((i * 2 + h) * 32 + lane) * 16);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        uint32_t s0, s1, a[4];
        kv::quarter_scales(word_of(scales, h * 2 + c), &s0, &s1);
        const uint32_t q0 = hmul2_u32(c ? q.z : q.x, s0), q1 = hmul2_u32(c ? q.w : q.y, s1);
        mma_zeros(off, word_of(zeros, h * 2 + c), q0, q1);
#pragma unroll
        for (int b = 0; b < N; b++) {
          unfold_int4(word_of(w[b], h * 2 + c), a);
          mma_f16(sc[b], a, q0, q1, sc[b]);
        }
      }
    }
  }
#pragma unroll
  for (int b = 0; b < N; b++)
#pragma unroll
    for (int e = 0; e < 4; e++) sc[b][e] = fmaf(sc[b][e], e < 2 ? ROW0 : ROW8, (off[2 + (e & 1)] - off[e & 1]) * ZERO);
}

template <int D, int N> SITS_DEV void score_fp4(float (&sc)[N][4], uint32_t query, uint32_t tile, int block0, int lane) {
  const uint32_t means = tile + 72 * D + (lane & 3) * 16, words = tile + block0 * 8 * D + lane * 16;
  const uint32_t scales = tile + 64 * D + block0 * D + (lane >> 2) * (D / 8);
  const float zero[4] = {0.f, 0.f, 0.f, 0.f};
  float mean[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < D / 64; i++) {
    uint4 w[N];
    uint2 s[N];
#pragma unroll
    for (int b = 0; b < N; b++) w[b] = lds128(words + b * 8 * D + i * 512), s[b] = lds64(scales + b * D + i * 8);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 q = lds128(query + ((i * 2 + h) * 32 + lane) * 16), m = lds128(means + (i * 2 + h) * 64);
      const uint32_t m0[4] = {m.x, m.x, m.y, m.y}, m1[4] = {m.z, m.z, m.w, m.w};
      mma_f16(mean, m0, q.x, q.y, mean);
      mma_f16(mean, m1, q.z, q.w, mean);
#pragma unroll
      for (int b = 0; b < N; b++) {
        uint32_t even, odd, a[4];
        kv::quarter_scales(h ? s[b].y : s[b].x, &even, &odd);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float part[4];
          const float2 f = half2_to_float2(c ? odd : even);
          unfold_fp4(word_of(w[b], h * 2 + c), a);
          mma_f16(part, a, c ? q.z : q.x, c ? q.w : q.y, zero);
          sc[b][0] += f.x * part[0], sc[b][1] += f.x * part[1], sc[b][2] += f.y * part[2], sc[b][3] += f.y * part[3];
        }
      }
    }
  }
#pragma unroll
  for (int b = 0; b < N; b++)
#pragma unroll
    for (int e = 0; e < 4; e++) sc[b][e] = fmaf(mean[e], 1.f / FP4_SCALES, sc[b][e]);
}

/* Probabilities of a block's tokens as B operands: c0, c1. */
template <int D, bool FP4>
SITS_DEV void add_values(state<D> &st, uint32_t tile, int block, int lane, uint32_t c0, uint32_t c1) {
  constexpr int N = FP4 ? D / 16 : D / 32; /* groups */
  const uint32_t words = tile + 32 * D + block * 8 * D + lane * 16, params = tile + 68 * D + (block * 4 + (lane & 3)) * N * 4;
#pragma unroll
  for (int i = 0; i < D / 64; i++) {
    const uint4 w = lds128(words + i * 512);
    if constexpr (FP4) {
      const uint4 s = lds128(params + i * 16);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        uint32_t s0, s1, a[4];
        kv::quarter_scales(word_of(s, c), &s0, &s1);
        unfold_fp4(word_of(w, c), a);
        mma_f16(st.o[i * 4 + c], a, hmul2_u32(c0, s0), hmul2_u32(c1, s1), st.o[i * 4 + c]);
      }
    } else {
      const uint2 s = lds64(params + i * 8), z = lds64(params + 2 * D + i * 8);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        uint32_t s0, s1, a[4];
        kv::quarter_scales(c ? s.y : s.x, &s0, &s1);
        const uint32_t e0 = hmul2_u32(c0, s0), e1 = hmul2_u32(c1, s1);
        mma_zeros(st.off[i * 2 + c], c ? z.y : z.x, e0, e1);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          unfold_int4(word_of(w, c * 2 + k), a);
          mma_f16(st.o[i * 4 + c * 2 + k], a, e0, e1, st.o[i * 4 + c * 2 + k]);
        }
      }
    }
  }
}

/* The reference m need not be the maximum, only near it: it moves when a score lies more than SLACK above, so that most pages need no
 * reduction. Probabilities stay below 2^SLACK. */
template <int D, bool FP4, int N> SITS_DEV void move_reference(state<D> &st, const float (&sc)[N][4], float scale) {
  float x0 = -INFINITY, x1 = -INFINITY;
#pragma unroll
  for (int b = 0; b < N; b++) x0 = fmaxf(x0, fmaxf(sc[b][0], sc[b][2])), x1 = fmaxf(x1, fmaxf(sc[b][1], sc[b][3]));
  if (__any_sync(~0u, fmaxf(fmaf(x0, scale, -st.m0), fmaf(x1, scale, -st.m1)) > SLACK)) {
    x0 *= scale, x1 *= scale;
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, d)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, d));
    const float n0 = fmaxf(st.m0, x0), n1 = fmaxf(st.m1, x1), f0 = exp2_fast(st.m0 - n0), f1 = exp2_fast(st.m1 - n1);
    st.l0 *= f0, st.l1 *= f1, st.m0 = n0, st.m1 = n1;
#pragma unroll
    for (int i = 0; i < D / 16; i++) st.o[i][0] *= f0, st.o[i][1] *= f1, st.o[i][2] *= f0, st.o[i][3] *= f1;
#pragma unroll
    for (int i = 0; i < (FP4 ? 0 : D / 32); i++) st.off[i][0] *= f0, st.off[i][1] *= f1, st.off[i][2] *= f0, st.off[i][3] *= f1;
  }
}

/* Scores become probabilities beside the reference, and operands of the product with values: c0, c1. */
template <int D, int N>
SITS_DEV void weigh(state<D> &st, float (&sc)[N][4], float scale, uint32_t (&c0)[N], uint32_t (&c1)[N]) {
#pragma unroll
  for (int b = 0; b < N; b++) {
    sc[b][0] = exp2_fast(fmaf(sc[b][0], scale, -st.m0)), sc[b][1] = exp2_fast(fmaf(sc[b][1], scale, -st.m1));
    sc[b][2] = exp2_fast(fmaf(sc[b][2], scale, -st.m0)), sc[b][3] = exp2_fast(fmaf(sc[b][3], scale, -st.m1));
    st.l0 += sc[b][0] + sc[b][2], st.l1 += sc[b][1] + sc[b][3];
    c0[b] = movmatrix_trans(pack_half2(sc[b][0], sc[b][1])), c1[b] = movmatrix_trans(pack_half2(sc[b][2], sc[b][3]));
  }
}

/* N blocks of the page from block0 on. lo, len, own: first visible token, behind the last one, first one of the own group, in the page;
 * IS_PLAIN: every token is visible, none of the own group. own_keys: fetch(step, block), fragments of f16 keys of the own group, 16
 * channels by 16 tokens, the first block is the warp's first in the group; patch and patched, where they bring the new token's; ARE_FAR.
 * before_values: called when the scores are there. */
template <int D, bool FP4, int N, bool IS_PLAIN, class K, class F>
SITS_DEV void attend_page(state<D> &st, uint32_t query, uint32_t tile, int block0, int lane, int lo, int len, int own,
                          float scale, K own_keys, F before_values) {
  float sc[N][4] = {};
  if (!IS_PLAIN && (unsigned)(block0 * 16 - own) < (unsigned)OPEN_TOKENS<FP4>)
    score_own<D, FP4, N>(sc, query, lane, own_keys);
  else if constexpr (FP4)
    score_fp4<D, N>(sc, query, tile, block0, lane);
  else
    score_int4<D, N>(sc, query, tile, block0, lane);
  if (!IS_PLAIN && (lo > 0 || len < K_PAGE_TOKENS)) { /* the first or last page of a sequence */
#pragma unroll
    for (int b = 0; b < N; b++) {
      const int tok = (block0 + b) * 16 + (lane >> 2); /* in the page, like lo and len */
      if (tok < lo || tok >= len) sc[b][0] = sc[b][1] = -INFINITY;
      if (tok + 8 < lo || tok + 8 >= len) sc[b][2] = sc[b][3] = -INFINITY;
    }
  }
  move_reference<D, FP4, N>(st, sc, scale);
  uint32_t c0[N], c1[N];
  weigh<D, N>(st, sc, scale, c0, c1);
  before_values();
#pragma unroll
  for (int b = 0; b < N; b++) add_values<D, FP4>(st, tile, block0 + b, lane, c0[b], c1[b]);
}

/* A warp's state -> merge[rows][ROW], a row a head, rows even; ADD: to what another warp left there. */
template <int D, bool FP4, bool ADD> SITS_DEV void spill_state(state<D> &st, float *merge, int rows, int lane) {
  constexpr int ROW = decode::ROW<D>;
  const int g = lane >> 2, t = lane & 3;
  float l0 = st.l0, l1 = st.l1, mine[2] = {1.f, 1.f}, other[2] = {0.f, 0.f};
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) l0 += __shfl_xor_sync(~0u, l0, d), l1 += __shfl_xor_sync(~0u, l1, d);
  float *r = merge + 2 * t * ROW;
  if (2 * t >= rows) return;
  if (ADD) {
    const float m0 = fmaxf(r[D], st.m0), m1 = fmaxf(r[ROW + D], st.m1);
    mine[0] = exp2_fast(st.m0 - m0), mine[1] = exp2_fast(st.m1 - m1);
    other[0] = exp2_fast(r[D] - m0), other[1] = exp2_fast(r[ROW + D] - m1);
    l0 = l0 * mine[0] + r[D + 1] * other[0], l1 = l1 * mine[1] + r[ROW + D + 1] * other[1];
    st.m0 = m0, st.m1 = m1;
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < D / 16; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float *off = st.off[i / 2];
      float x = FP4 ? FP4_SCALES * st.o[i][e]
                    : fmaf(st.o[i][e], SCALES * (e < 2 ? ROW0 : ROW8), (off[2 + (e & 1)] - off[e & 1]) * (SCALES * ZERO));
      float *to = r + (e & 1) * ROW + i * 16 + g + (e >> 1) * 8;
      if (ADD) x = x * mine[e & 1] + *to * other[e & 1];
      *to = x;
    }
  if (g == 0) r[D] = st.m0, r[D + 1] = l0, r[ROW + D] = st.m1, r[ROW + D + 1] = l1;
}

/* Four values of a head, columns 4 lane .. 4 lane + 3 (lanes beyond D/4 hold none), rotated back. */
template <int D> SITS_DEV void store_head(const k_attn_decode &a, int row, int head, float4 v, float inv, int lane) {
  const int col = head * D + lane * 4;
  inv *= rsqrtf((float)D);
  float x[4] = {v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w};
  float r[4] = {x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]};
#pragma unroll
  for (int d = 1; d < D / 4; d <<= 1)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float o = __shfl_xor_sync(~0u, r[i], d);
      r[i] = lane & d ? o - r[i] : r[i] + o;
    }
  const uint32_t lo = pack_half2(r[0] * inv, r[1] * inv), hi = pack_half2(r[2] * inv, r[3] * inv);
  if (lane >= D / 4) return;
  if (a.frag_m == 0)
    *(uint2 *)((__half *)a.out + (size_t)row * (a.kv.n_heads * D) + col) = make_uint2(lo, hi);
  else { /* columns 0, 2, 1, 3 of a four lie side by side */
    *(uint2 *)((__half *)a.out + k_frag_index(a.frag_m, col, row)) = make_uint2(__byte_perm(lo, hi, 0x5410), __byte_perm(lo, hi, 0x7632));
  }
}

SITS_DEV void add_scaled(float4 &sum, float4 v, float f) { sum.x += v.x * f, sum.y += v.y * f, sum.z += v.z * f, sum.w += v.w * f; }

#endif

} // namespace decode

#endif
