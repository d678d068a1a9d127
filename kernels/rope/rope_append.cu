/* q = rotate(norm(q)); k, v of every token of the step go to their pages in the codec's form; keys of int4 and fp4, which are quantised in
 * groups of tokens (kv_fold.cu), as f16 to `fresh`. Decode steps over int4 and fp4 pages append within attention (attention/).
 *
 * Arguments: struct k_rope_append (kernels.h).
 * Work split: grid.x takes eight tokens (up to 512 tokens: one). grid.y < G: one KV head; a token that is the first of its 16-token
 *   block in this step brings the whole block (up to 16 tokens of one sequence), because words of int4 and fp4 hold nibbles of several
 *   tokens; the others are skipped. Words of a block that the step covers in part keep their other nibbles. grid.y >= G: query heads, see
 *   rotate_queries. The KV heads come first because they take longest. Whole heads of many tokens with int4: a CTA takes the values of two
 *   or four KV heads (append_values), others query and key heads (rotate_wide).
 *   In a decode step (one token a sequence, f16 or int8, D 64 or 128) grid.y counts four KV heads at a time, and a warp takes one k or v
 *   by itself.
 * Shared memory: 8 warps * D * 4 bytes, and for nibbles 16 * D codes.
 * Numerics: rotation f32; f16 saturates; int8 scale = max|x| / 127 in f32; quantisers see kv_tile.cuh. Which of q, k and v are
 *   Hadamard-rotated is the codec's affair (kernels.h).
 * Limits: D <= 256, even for int4 and fp4.
 * Links: twin the CPU's codecs, tests tests/gpu/test_attention.c, test_kv_pages.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace {
constexpr int MAX_D = 256, WARPS = 8, THREADS = 32 * WARPS, Q_HEADS = 4, WIDE_HEADS = 8, KV_HEADS = WARPS / 2;

/* RoPE and norm for head sizes that are no multiple of 32 (tiny models): one lane strides over the vector. */
SITS_DEV void prepare_head_any(float *v, int d_head, int lane, const float *gain, float eps, const k_rope &rope, int position) {
  float r[8], sum = 0.f;
  for (int e = lane; e < d_head; e += 32) sum += v[e] * v[e];
  const float f = gain ? rsqrtf(warp_sum(sum) / (float)d_head + eps) : 1.f;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int e = lane + j * 32, half = rope.dims >> 1;
    if (e >= d_head) continue;
    float x = v[e] * f * (gain ? gain[e] : 1.f);
    r[j] = x;
    if (e < rope.dims) {
      int i = rope.interleaved ? e >> 1 : e < half ? e : e - half;
      bool first = rope.interleaved ? !(e & 1) : e < half;
      int other = rope.interleaved ? e ^ 1 : first ? e + half : e - half;
      float y = v[other] * f * (gain ? gain[other] : 1.f);
      float2 cs = kv::rope_angle(position, rope.inv_freq[i], rope.magnitude);
      r[j] = first ? x * cs.x - y * cs.y : x * cs.x + y * cs.y;
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (lane + j * 32 < d_head) v[lane + j * 32] = r[j];
  __syncwarp();
}

SITS_DEV float projection(const k_rope_append &p, size_t at, int column) {
  const k_projections &from = p.qkv;
  if (from.rows) return __half2float(__ldcg((const __half *)from.rows + at));
  float x = from.bias ? from.bias[column] : 0.f;
  for (int i = 0; i < from.n_slabs; i++) x += __ldcg(from.slabs + i * from.slab_stride + at);
  return x;
}

template <int D> struct angles { float2 a[D ? D / 32 : 1]; };

template <int D> SITS_DEV angles<D> angles_at(const k_rope_append &p, int position, int lane) {
  angles<D> r = {};
  if constexpr (D > 0) kv::head_angles<D>(p.rope, position, lane, r.a);
  return r;
}

/* This lane's values of head `head` (0 .. H+2G-1) of a token's projections. */
template <int D> SITS_DEV void fetch_head(float (&x)[D / 32], const k_rope_append &p, int token, int head, int lane) {
  kv::fetch_head<D>(x, p.qkv, (size_t)token * (p.kv.n_heads + 2 * p.kv.n_kv_heads) * D, head, lane);
}

/* The same head, rotated as the codec wants it -> v in shared memory. */
template <int D>
SITS_DEV void finish_head(float (&x)[D / 32], float *v, const k_rope_append &p, const angles<D> &turn, int head, int lane) {
  __syncwarp();
#pragma unroll
  for (int j = 0; j < D / 32; j++) v[lane + j * 32] = x[j];
  __syncwarp();
  if (head >= p.kv.n_heads + p.kv.n_kv_heads) {
    if (!k_kv_rotates_values(p.kv.codec)) return;
    kv::hadamard_lanes<D>(x, lane);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < D / 32; j++) v[lane + j * 32] = x[j];
    __syncwarp();
    return;
  }
  kv::rotate_head<D>(v, lane, head < p.kv.n_heads ? p.q_gain : p.k_gain, p.eps, p.rope, turn.a, k_kv_rotates_keys(p.kv.codec), x);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < D / 32; j++) v[lane + j * 32] = x[j];
  __syncwarp();
}

/* Both for any head size (D = 0) or a known one. */
template <int D>
SITS_DEV void load_head(float *v, const k_rope_append &p, int token, int position, const angles<D> &turn, int head, int lane) {
  if constexpr (D > 0) {
    float x[D / 32];
    fetch_head<D>(x, p, token, head, lane);
    finish_head<D>(x, v, p, turn, head, lane);
  } else {
    const int d = p.kv.head_dim;
    const size_t at = (size_t)token * (p.kv.n_heads + 2 * p.kv.n_kv_heads) * d + head * d;
    const float *gain = head < p.kv.n_heads ? p.q_gain : p.k_gain;
    __syncwarp();
    for (int e = lane; e < d; e += 32) v[e] = projection(p, at + e, head * d + e);
    __syncwarp();
    const bool is_value = head >= p.kv.n_heads + p.kv.n_kv_heads;
    if (!is_value) {
      if (d % 32 == 0)
        kv::prepare_head(v, d, lane, gain, p.eps, p.rope, position);
      else
        prepare_head_any(v, d, lane, gain, p.eps, p.rope, position);
    }
    if (is_value ? k_kv_rotates_values(p.kv.codec) : k_kv_rotates_keys(p.kv.codec)) kv::hadamard_any(v, d, lane);
    __syncwarp();
  }
}

SITS_DEV float saturate(float x) { return fminf(fmaxf(x, -65504.f), 65504.f); }

/* One token's k or v in f16 or int8. A warp. */
SITS_DEV void store_plain(const k_rope_append &p, uint8_t *tile, const float *v, int slot, bool is_value, int lane) {
  const int d = p.kv.head_dim;
  const size_t at = (size_t)(is_value ? K_PAGE_TOKENS : 0) * d + (size_t)slot * d;
  if (p.kv.codec == K_KV_F16) {
    for (int e = lane; e < d; e += 32) ((__half *)tile)[at + e] = __float2half_rn(saturate(v[e]));
    return;
  }
  float top = 0.f;
  for (int e = lane; e < d; e += 32) top = fmaxf(top, fabsf(v[e]));
  top = fminf(warp_max(top), 1e30f);
  const float inverse = top > 0.f ? 127.f / top : 0.f;
  for (int e = lane; e < d; e += 32) ((int8_t *)tile)[at + e] = (int8_t)__float2int_rn(v[e] * inverse);
  if (lane == 0) ((float *)(tile + 2 * K_PAGE_TOKENS * d))[(is_value ? K_PAGE_TOKENS : 0) + slot] = top / 127.f;
}

/* One token's value as nibbles, in plain order. A warp. codes: D bytes of its own. */
SITS_DEV void store_value(bool is_fp4, uint8_t *tile, const float *v, uint8_t *codes, int d, int slot, int lane) {
  kv::quantise_value(is_fp4, tile, v, codes, d, slot, lane);
  for (int i = lane; i < d / 2; i += 32) tile[(K_PAGE_TOKENS + slot) * (d >> 1) + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
  __syncwarp();
}

/* One token's key in f16 where sits_k_kv_fold finds it. A warp. */
SITS_DEV void store_fresh(const k_rope_append &p, const float *v, int t, int head, int lane) {
  const int d = p.kv.head_dim;
  __half *to = (__half *)p.kv.fresh + ((size_t)t * p.kv.n_kv_heads + head) * d;
  for (int e = lane; e < d; e += 32) to[e] = __float2half_rn(saturate(v[e]));
}

/* Codes [16][D] of a block's values in shared memory -> folded words of the tile, by n_threads threads. old: what this one's first word
 * held. */
SITS_DEV void store_words(bool is_fp4, uint8_t *tile, const uint8_t *codes, int d, int block, int first, int n, uint32_t old, int thread,
                          int n_threads) {
  const bool is_whole = n == 16;
  for (int i = thread; i < 2 * d; i += n_threads) { /* channels dd, dd+8, tokens 2t, 2t+1, 2t+8, 2t+9 */
    int t = i & 3, dd = (i >> 2 & 7) + (i >> 5) * 16;
    uint32_t *at = (uint32_t *)(tile + kv::v_place(d, block * 16 + 2 * t, dd).word_bytes);
    uint32_t w = is_whole ? 0 : i == thread ? old : *at;
    for (int r = 0; r < 4; r++) {
      int tk = 2 * t + (r & 1) + (r >> 1) * 8;
      if (tk < first || tk >= first + n) continue;
      for (int h = 0; h < 2; h++) w = kv::insert_code(is_fp4, w, kv::place_slot(r, h), codes[tk * d + dd + 8 * h]);
    }
    *at = w;
  }
}

/* What the first of those words holds. */
SITS_DEV uint32_t former_word(const uint8_t *tile, int d, int block, int thread) {
  const int t = thread & 3;
  return __ldcg((const uint32_t *)(tile + kv::v_place(d, block * 16 + 2 * t, (thread >> 2 & 7) + (thread >> 5) * 16).word_bytes));
}

/* Is token t the first of its 16-token block in this step? */
SITS_DEV bool begins_block(const k_rope_append &p, int t) {
  const k_kv_view &kv = p.kv;
  const int s = t < kv.n_tokens ? kv.token_seq[t] : -1;
  if (s < 0 || (p.skip_single && kv.seq_start[s + 1] - kv.seq_start[s] == 1)) return false;
  return (kv.positions[t] & 15) == 0 || t == kv.seq_start[s];
}

/* The whole 16-token block that begins with token t0 in this step. The CTA. */
template <int D>
SITS_DEV void append_block(const k_rope_append &p, float *v, uint8_t *codes, int t0, int head, int warp, int lane) {
  const k_kv_view &kv = p.kv;
  const int d = kv.head_dim;
  const int s = kv.token_seq[t0], end = kv.seq_start[s + 1], position = kv.positions[t0];
  const int n = min(end - t0, 16 - (position & 15)), slot0 = position & (K_PAGE_TOKENS - 1), block = slot0 >> 4, first = slot0 & 15;
  const int page = kv.block_table[(size_t)s * kv.table_stride + position / K_PAGE_TOKENS];
  uint8_t *tile = kv::page_tile(kv, page, kv.layer, head);
  uint32_t old = 0; /* fetched here so that it arrives while the codes are made */
  const bool has_nibbles = k_kv_has_nibbles(kv.codec), is_fp4 = kv.codec == K_KV_FP4;
  if (D > 0 && has_nibbles && n < 16 && (int)threadIdx.x < 2 * d) old = former_word(tile, d, block, threadIdx.x);
  if constexpr (D > 0) {
    constexpr int TURNS = 2 * 16 / WARPS; /* a warp's vectors: fetched together, then finished one by one */
    float x[TURNS][D / 32];
#pragma unroll
    for (int c = 0; c < TURNS; c++) {
      const int i = warp + c * WARPS;
      if (i < 2 * n) fetch_head<D>(x[c], p, t0 + i / 2, kv.n_heads + (i & 1 ? kv.n_kv_heads : 0) + head, lane);
    }
#pragma unroll
    for (int c = 0; c < TURNS; c++) {
      const int i = warp + c * WARPS, is_value = i & 1, slot = slot0 + i / 2;
      if (i >= 2 * n) break;
      finish_head<D>(x[c], v, p, angles_at<D>(p, position + i / 2, lane), kv.n_heads + (is_value ? kv.n_kv_heads : 0) + head, lane);
      if (!has_nibbles)
        store_plain(p, tile, v, slot, is_value, lane);
      else if (is_value)
        kv::quantise_value(is_fp4, tile, v, codes + (slot & 15) * D, D, slot, lane);
      else
        store_fresh(p, v, t0 + i / 2, head, lane);
    }
  } else { /* every codec stores these head sizes token by token */
    for (int i = warp; i < 2 * n; i += WARPS) {
      const bool is_value = i & 1;
      load_head<D>(v, p, t0 + (i >> 1), position + (i >> 1), angles<D>{}, kv.n_heads + (is_value ? kv.n_kv_heads : 0) + head, lane);
      if (!has_nibbles)
        store_plain(p, tile, v, slot0 + (i >> 1), is_value, lane);
      else if (is_value)
        store_value(is_fp4, tile, v, codes + warp * d, d, slot0 + (i >> 1), lane);
      else
        store_fresh(p, v, t0 + (i >> 1), head, lane);
    }
  }
  if (D == 0 || !has_nibbles) return;
  __syncthreads();
  store_words(is_fp4, tile, codes, d, block, first, n, old, threadIdx.x, THREADS);
  __syncthreads();
}

/* A vector's values as append_values holds them, two lanes a group of 32 channels, times the Walsh-Hadamard matrix: sums in the order of
 * hadamard_lanes. */
template <int D> SITS_DEV void hadamard_pairs(float (&x)[16], int lane) {
  const auto across = [&](int d) {
    const float sign = lane & d ? -1.f : 1.f;
#pragma unroll
    for (int k = 0; k < 16; k++) x[k] = fmaf(x[k], sign, __shfl_xor_sync(~0u, x[k], d));
  };
  across(1);
#pragma unroll
  for (int d = 1; d < 16; d <<= 1)
#pragma unroll
    for (int k = 0; k < 16; k++)
      if (!(k & d)) {
        const float a = x[k], b = x[k | d];
        x[k] = a + b, x[k | d] = a - b;
      }
#pragma unroll
  for (int d = 2; d < D / 16; d <<= 1) across(d);
#pragma unroll
  for (int k = 0; k < 16; k++) x[k] *= rsqrtf((float)D);
}

/* int4's values of the 16-token block that begins with token t0 in this step, of as many heads as the CTA has warps for; the keys are
 * rotate_wide's. Two lanes hold a group of 32 channels, one the even and one the odd ones, so that a warp has four or eight vectors and
 * shares what a group costs once. */
template <int D> SITS_DEV void append_values(const k_rope_append &p, uint8_t *codes, int t0, int warp, int lane) {
  constexpr int LANES = D / 16, EACH = 32 / LANES, OF_HEAD = 16 / EACH; /* lanes of a vector, vectors of a warp, warps of a head */
  const k_kv_view &kv = p.kv;
  const int s = kv.token_seq[t0], position = kv.positions[t0], head = blockIdx.y * (WARPS / OF_HEAD) + warp / OF_HEAD;
  const int n = min(kv.seq_start[s + 1] - t0, 16 - (position & 15)), slot0 = position & (K_PAGE_TOKENS - 1), block = slot0 >> 4;
  const int i = warp % OF_HEAD * EACH + lane / LANES, group = lane % LANES >> 1, thread = threadIdx.x % (32 * OF_HEAD);
  const bool is_head = head < kv.n_kv_heads;
  uint8_t *tile = kv::page_tile(kv, kv.block_table[(size_t)s * kv.table_stride + position / K_PAGE_TOKENS], kv.layer, is_head ? head : 0);
  const uint32_t old = n < 16 && is_head ? former_word(tile, D, block, thread) : 0;
  const int row = kv.n_heads + kv.n_kv_heads + head;
  uint4 words[4] = {};
  if (i < n && is_head) {
    const size_t at = ((size_t)(t0 + i) * (kv.n_heads + 2 * kv.n_kv_heads) + row) * D;
    const uint4 *from = (const uint4 *)((const __half *)p.qkv.rows + at) + group * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = __ldcg(from + k);
  }
  float x[16];
#pragma unroll
  for (int k = 0; k < 16; k++) {
    const float2 both = half2_to_float2((&words[k >> 2].x)[k & 3]);
    x[k] = lane & 1 ? both.y : both.x;
  }
  hadamard_pairs<D>(x, lane);
  uint32_t code[16], scale;
  int zero;
  kv::quantise_u4<2, 16, true>(x, 32, lane, code, &scale, &zero);
  codes += warp / OF_HEAD * 16 * D;
  if (i < n && is_head) {
    uint8_t *to = codes + ((slot0 & 15) + i) * D + group * 32 + (lane & 1);
#pragma unroll
    for (int k = 0; k < 16; k++) to[2 * k] = (uint8_t)code[k];
    const int at = kv::v_scale(false, D, slot0 + i, group);
    if (lane & 1)
      tile[at + kv::v_zero_distance(D)] = (uint8_t)(zero + 128);
    else
      tile[at] = (uint8_t)scale;
  }
  __syncthreads();
  if (is_head) store_words(false, tile, codes, D, block, slot0 & 15, n, old, thread, 32 * OF_HEAD);
  __syncthreads();
}

/* k or v of one token and head, f16 or int8, in a decode step. A warp, which shares nothing with others. */
template <int D> SITS_DEV void append_one(const k_rope_append &p, float *v, int t, int head, bool is_value, int lane) {
  const k_kv_view &kv = p.kv;
  const int position = kv.positions[t], page = kv.block_table[(size_t)kv.token_seq[t] * kv.table_stride + position / K_PAGE_TOKENS];
  const int row = kv.n_heads + (is_value ? kv.n_kv_heads : 0) + head;
  float x[D / 32];
  fetch_head<D>(x, p, t, row, lane);
  finish_head<D>(x, v, p, angles_at<D>(p, position, lane), row, lane);
  store_plain(p, kv::page_tile(kv, page, kv.layer, head), v, position & (K_PAGE_TOKENS - 1), is_value, lane);
}

/* Query heads. Few tokens (per_cta = 1): a warp per head of the CTA's token; many: a warp per token and four heads, whose loads are in
 * flight
 * together and which share the angles. What does not come from the predecessor is fetched before the wait. */
template <int D> SITS_DEV void rotate_queries(const k_rope_append &p, float *v, int part, int per_cta, int warp, int lane) {
  const k_kv_view &kv = p.kv;
  const int d = D ? D : kv.head_dim, t = per_cta == 1 ? blockIdx.x : blockIdx.x * WARPS + warp;
  const int head0 = per_cta == 1 ? part * WARPS + warp : part * Q_HEADS, n = min(per_cta == 1 ? 1 : Q_HEADS, kv.n_heads - head0);
  bool is_active = t < kv.n_tokens && n > 0;
  const int s = is_active ? kv.token_seq[t] : -1, position = is_active ? kv.positions[t] : 0;
  is_active = s >= 0 && !(p.skip_single && kv.seq_start[s + 1] - kv.seq_start[s] == 1);
  const angles<D> turn = angles_at<D>(p, position, lane);
  grid_wait();
  if (!is_active) return;
  __half *q = (__half *)p.q + ((size_t)t * kv.n_heads + head0) * d;
  if constexpr (D > 0) {
    float x[Q_HEADS][D / 32];
#pragma unroll
    for (int c = 0; c < Q_HEADS; c++)
      if (c < n) fetch_head<D>(x[c], p, t, head0 + c, lane);
#pragma unroll
    for (int c = 0; c < Q_HEADS; c++) {
      if (c >= n) break;
      finish_head<D>(x[c], v, p, turn, head0 + c, lane);
#pragma unroll
      for (int j = 0; j < D / 32; j++) q[c * D + lane + j * 32] = __float2half_rn(saturate(x[c][j]));
    }
  } else {
    for (int c = 0; c < n; c++) {
      load_head<D>(v, p, t, position, turn, head0 + c, lane);
      for (int e = lane; e < d; e += 32) q[c * d + e] = __float2half_rn(saturate(v[e]));
    }
  }
}

/* Query and key heads of many tokens, WIDE_HEADS of a token a warp: eight neighbouring channels of each half a lane, 16 bytes a load and
 * store. For whole heads whose halves turn against each other, and keys that go to `fresh` as they are (is_wide). */
template <int D> SITS_DEV void rotate_wide(const k_rope_append &p, int part, int warp, int lane) {
  constexpr int LANES = D / 16, EACH = 32 / LANES, TURNS = WIDE_HEADS / EACH;
  const k_kv_view &kv = p.kv;
  const int t = blockIdx.x * WARPS + warp, s = t < kv.n_tokens ? kv.token_seq[t] : -1, c = lane % LANES * 8;
  const int head0 = part * WIDE_HEADS + lane / LANES, n_heads = kv.n_heads + kv.n_kv_heads;
  const bool is_active = s >= 0 && !(p.skip_single && kv.seq_start[s + 1] - kv.seq_start[s] == 1);
  const int position = is_active ? kv.positions[t] : 0;
  float2 turn[8];
#pragma unroll
  for (int i = 0; i < 8; i++) turn[i] = kv::rope_angle(position, p.rope.inv_freq[c + i], p.rope.magnitude);
  grid_wait();
  if (!is_active) return;
  const __half *from = (const __half *)p.qkv.rows + (size_t)t * (n_heads + kv.n_kv_heads) * D + c;
  uint4 x[TURNS][2] = {};
#pragma unroll
  for (int k = 0; k < TURNS; k++)
    if (head0 + k * EACH < n_heads) {
      x[k][0] = __ldcg((const uint4 *)(from + (head0 + k * EACH) * D));
      x[k][1] = __ldcg((const uint4 *)(from + (head0 + k * EACH) * D + D / 2));
    }
#pragma unroll
  for (int k = 0; k < TURNS; k++) {
    const int head = head0 + k * EACH;
    const bool is_key = head >= kv.n_heads;
    const float *gain = is_key ? p.k_gain : p.q_gain;
    float f = 1.f;
    if (p.q_gain || p.k_gain) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float2 a = half2_to_float2((&x[k][i >> 2].x)[i & 3]);
        sum += a.x * a.x + a.y * a.y;
      }
#pragma unroll
      for (int d = 1; d < LANES; d <<= 1) sum += __shfl_xor_sync(~0u, sum, d);
      f = rsqrtf(sum / (float)D + p.eps);
    }
    if (head >= n_heads) continue;
    uint4 y[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float2 a = half2_to_float2((&x[k][0].x)[i]), b = half2_to_float2((&x[k][1].x)[i]);
      if (gain) {
        a.x *= f * gain[c + 2 * i], a.y *= f * gain[c + 2 * i + 1];
        b.x *= f * gain[D / 2 + c + 2 * i], b.y *= f * gain[D / 2 + c + 2 * i + 1];
      }
      const float2 u = turn[2 * i], w = turn[2 * i + 1];
      (&y[0].x)[i] = pack_half2(saturate(a.x * u.x - b.x * u.y), saturate(a.y * w.x - b.y * w.y));
      (&y[1].x)[i] = pack_half2(saturate(b.x * u.x + a.x * u.y), saturate(b.y * w.x + a.y * w.y));
    }
    __half *to = is_key ? (__half *)kv.fresh + ((size_t)t * kv.n_kv_heads + head - kv.n_heads) * D
                        : (__half *)p.q + ((size_t)t * kv.n_heads + head) * D;
    *(uint4 *)(to + c) = y[0], *(uint4 *)(to + D / 2 + c) = y[1];
  }
}

/* CTAs of the grid's y that append: of a KV head each, of several where a warp takes more than one vector, or several warps a head. */
__host__ __device__ int kv_rows_of(const k_kv_view &kv, bool is_single, bool is_wide) {
  const int each = is_single ? KV_HEADS : is_wide ? WARPS * 32 / kv.head_dim : 1;
  return (kv.n_kv_heads + each - 1) / each;
}

/* is_single: every sequence has one token in the step, and a CTA takes the k and v of KV_HEADS heads. */
template <int D, bool WIDE>
__global__ void __launch_bounds__(THREADS, 3) rope_append_kernel(const __grid_constant__ k_rope_append p, int per_cta,
                                                                            bool is_single) {
  extern __shared__ __align__(16) float shared[];
  grid_trigger();
  const k_kv_view &kv = p.kv;
  const int d = kv.head_dim, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float *v = shared + warp * d;
  const int kv_rows = kv_rows_of(kv, is_single, WIDE);
  if ((int)blockIdx.y >= kv_rows) {
    if constexpr (WIDE)
      rotate_wide<D>(p, blockIdx.y - kv_rows, warp, lane);
    else
      rotate_queries<D>(p, v, blockIdx.y - kv_rows, per_cta, warp, lane);
    return;
  }
  uint8_t *codes = (uint8_t *)(shared + WARPS * d); /* [16][D] */
  uint32_t starts = __ballot_sync(~0u, lane < per_cta && begins_block(p, blockIdx.x * per_cta + lane));
  grid_wait();
  if constexpr (D > 0 && !WIDE)
    if (is_single) {
      const int head = blockIdx.y * KV_HEADS + (warp >> 1);
      if (starts && head < kv.n_kv_heads) append_one<D>(p, v, blockIdx.x, head, warp & 1, lane);
      return;
    }
  for (; starts; starts &= starts - 1) {
    const int t0 = blockIdx.x * per_cta + __ffs(starts) - 1;
    if constexpr (WIDE)
      append_values<D>(p, (uint8_t *)shared, t0, warp, lane);
    else
      append_block<D>(p, v, codes, t0, blockIdx.y, warp, lane);
  }
}

} // namespace

extern "C" int sits_k_rope_append(const struct k_rope_append *a, struct k_stream at) {
  const int d = a->kv.head_dim;
  const bool has_nibbles = k_kv_has_nibbles(a->kv.codec);
  if (d > MAX_D || (has_nibbles && (d % 2 || a->is_single))) return cudaErrorInvalidValue;
  /* Few tokens: a CTA per token, so that nothing is done in turn; many: a warp per token, or empty CTAs would cost more than the work. */
  const bool is_single = a->is_single && (d == 64 || d == 128);
  const int per_cta = a->kv.n_tokens <= 512 || is_single ? 1 : WARPS;
  const bool is_wide = per_cta == WARPS && (d == 64 || d == 128) && a->qkv.rows != NULL && a->rope.dims == d && !a->rope.interleaved &&
                       has_nibbles && !k_kv_rotates_keys(a->kv.codec);
  const int q_each = per_cta == 1 ? WARPS : is_wide ? WIDE_HEADS : Q_HEADS, q_heads = a->kv.n_heads + (is_wide ? a->kv.n_kv_heads : 0);
  const int q_rows = (q_heads + q_each - 1) / q_each;
  /* Single: a CTA per KV head would have six of eight warps without work and the grid two rounds for one. */
  const int kv_rows = kv_rows_of(a->kv, is_single, is_wide);
  const size_t smem = is_wide ? (size_t)WARPS * 32 * 16 : (size_t)d * 4 * WARPS + (has_nibbles ? 16 * d : 0);
  return launch_kernel(d == 128  ? is_wide ? rope_append_kernel<128, true> : rope_append_kernel<128, false>
                       : d == 64 ? is_wide ? rope_append_kernel<64, true> : rope_append_kernel<64, false>
                                 : rope_append_kernel<0, false>,
                       dim3((a->kv.n_tokens + per_cta - 1) / per_cta, q_rows + kv_rows), dim3(THREADS), smem, (cudaStream_t)at.stream,
                       at.pdl, *a, per_cta, is_single);
}
