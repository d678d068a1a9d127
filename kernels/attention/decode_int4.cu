/* out[s][h] = softmax(q . K / sqrt(D)) V for one new token per sequence over int4 or fp4 pages. A sequence's tokens are 0 .. kv_len-1,
 * the last one being the new token. Fused form (q = NULL): rotation of q and k, quantisation and append of the new token's k and v
 * included; else q is rotated already and the token appended (sits_k_rope_append): better from about nine sequences on, where a CTA
 * walks several segments.
 *
 * Arguments: struct k_attn_decode (kernels.h). qkv f16 written by the previous kernel; pages by earlier steps.
 * Work split: the unit is one page of one KV head (D = 128: 9,216 bytes, one bulk copy); the pages of a (sequence, head) are a segment.
 *   Where there are fewer segments than CTAs, segments are cut into parts of at most q pages, a CTA takes one part (q as small as fits);
 *   else units in the order sequence, head, page are cut into equal runs. The cut is computed by every CTA from kv_len, so one captured
 *   grid serves all lengths. Four warps take 16 of a page's 64 tokens each, the query heads of the group fill N = 8.
 * Shared memory: barriers 256, prefix sums 8 (S+2), merge buffer 4 * 8 * (D+4) * 4 (16.9 KiB at D = 128), new token 1.5 KiB, ring of
 *   four tiles (36 KiB; not fused 45 KiB, see load_pages): three CTAs per SM at <= 128 registers.
 * Pipeline: page copies start before the grid dependency opens (pages of earlier steps do not depend on it; not fused, a sequence's last
 * page
 *   waits for the append). Fused, the new token never travels through global memory here: the warp that owns its 16-token block patches
 *   the tile in shared memory and stores the same words to the page.
 *   The loader looks up the pages of 32 units at a time, a lane each, so that no copy waits for a block table entry of its own.
 * Numerics: int4 keys and values as folded nibbles (16+q, 256+q), offsets taken off by products with constant rows; fp4 ones as f16
 *   numbers 2^-14 times as large (subnormal ones included, which tensor cores take), the factor restored in f32; K scales on the f32
 *   scores, V scales on the f16 probabilities; a running reference near the maximum in f32, base-2 exponentials; parts are merged in CTA
 *   order by the last to arrive, so
 *   results do not depend on timing. Empty and masked positions have probability exactly 0. Tolerance against the f64 twin 5e-4 of the
 *   norm.
 * Limits: D 64 or 128, H/G <= 8, S <= 1024, sm_90; anything else goes to attn_any.
 * Cost: 72 D + ... = 9,216 bytes per page and head; bound by device memory from about 20 MB a layer, by latency below.
 * History: a separate merge kernel cost 3 us a layer; 4 CTAs per SM spill.
 * Links: twin ref_attention (tests/gpu/gpu_ref.c), test tests/gpu/test_attention.c, bench sits2026-bench kernels.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace {

constexpr int WARPS = 4, WARP_LOAD = 4, WARP_K = 5, STAGES = 4, CTAS_PER_SM = 3, MAX_SEQS = 1024;
constexpr float FP4_FACTOR = 16384.f, SLACK = 6.f;
constexpr int THREADS = 160, FUSED_THREADS = 224; /* four consumer warps, the loader; fused: one more for k, one for v */

struct params {
  k_attn_decode a;
  float score_scale; /* log2(e) / sqrt(D), times FP4_FACTOR for fp4 */
};

template <int D> struct shape {
  static constexpr int TILE = K_PAGE_TOKENS * D + K_PAGE_TOKENS * (D / 32) * 4;
  static constexpr int ROW = D + 4; /* merged output, maximum, sum */
  static constexpr int MERGE = WARPS * 8 * ROW * 4;
  static constexpr int BARS = 128, QUERY = 8 * D * 2;
};
/* A stage of the ring: a tile; not fused, room for the queries and the place of a segment that begins with it. */
template <int D, bool FUSED> constexpr int STAGE = shape<D>::TILE + (FUSED ? 0 : shape<D>::QUERY + 128);

#if SITS_SM90

SITS_DEV int pages_of(const k_kv_view &kv, int s) {
  if (s >= kv.n_seqs || kv.seq_start[s + 1] - kv.seq_start[s] != 1) return 0;
  const int len = kv.kv_len[s], first = kv.window > 0 && len > kv.window ? (len - kv.window) / K_PAGE_TOKENS : 0;
  return (len + K_PAGE_TOKENS - 1) / K_PAGE_TOKENS - first;
}

/* Smallest number of pages a CTA must take so that every segment can be cut into whole parts of its own, at most `n_ctas` of them in all;
 * 0: there are more segments than CTAs. A warp; the answer is the same in all lanes. */
SITS_DEV int pages_per_part(const k_kv_view &kv, int total_units, int n_ctas) {
  const int lane = threadIdx.x & 31;
  int q = max(1, (total_units + n_ctas - 1) / n_ctas);
  for (int tries = 0; tries < 24; tries++) {
    int parts = 0, most = 0;
    for (int s = lane; s < kv.n_seqs; s += 32) {
      const int n = pages_of(kv, s);
      parts += (n + q - 1) / q, most = max(most, n);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) parts += __shfl_xor_sync(~0u, parts, d), most = max(most, __shfl_xor_sync(~0u, most, d));
    if (parts * kv.n_kv_heads <= n_ctas) return q;
    if (q >= most) return 0;
    q = min(most, q + max(1, q / 8));
  }
  return 0;
}

/* prefix[s] = units before sequence s. Sequences with more than one token in the step count none. Also what pages_per_part says, in
 * prefix[S + 1], and the parts before each sequence then, in prefix[S + 2 + s]. One warp. */
SITS_DEV void scan_units(const k_kv_view &kv, int *prefix, int n_ctas) {
  const int lane = threadIdx.x & 31;
  int carry = 0, parts_carry = 0;
  for (int pass = 0; pass < 2; pass++) {
    const int q = pass == 0 ? 0 : prefix[kv.n_seqs + 1];
    int *to = pass == 0 ? prefix : prefix + kv.n_seqs + 2, *sum = pass == 0 ? &carry : &parts_carry;
    if (pass == 1 && q == 0) break;
    for (int base = 0; base < kv.n_seqs; base += 32) {
      const int s = base + lane;
      int n = pages_of(kv, s) * (pass == 0 ? kv.n_kv_heads : 1);
      if (pass == 1) n = (n + q - 1) / q * kv.n_kv_heads;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        int o = __shfl_up_sync(~0u, n, d);
        if (lane >= d) n += o;
      }
      if (s < kv.n_seqs) to[s + 1] = *sum + n;
      *sum += __shfl_sync(~0u, n, 31);
    }
    if (lane == 0) to[0] = 0;
    if (pass == 0) {
      const int per_part = pages_per_part(kv, carry, n_ctas);
      if (lane == 0) prefix[kv.n_seqs + 1] = per_part;
      __syncwarp();
    }
  }
}

/* The units of CTA `cta`: with whole parts, one part of one segment; else its share of all units in order. Sets the parts of the first
 * segment too. False: nothing to do. */
struct share {
  int begin, end;
};

SITS_DEV bool find_share(const k_kv_view &kv, const int *prefix, int cta, int n_ctas, share *out) {
  const int q = prefix[kv.n_seqs + 1], *parts = prefix + kv.n_seqs + 2;
  if (q == 0) {
    out->begin = (int)((long long)cta * prefix[kv.n_seqs] / n_ctas), out->end = (int)((long long)(cta + 1) * prefix[kv.n_seqs] / n_ctas);
    return out->begin < out->end;
  }
  if (cta >= parts[kv.n_seqs]) return false;
  int lo = 0, hi = kv.n_seqs - 1;
  while (lo < hi) {
    int mid = (lo + hi + 1) >> 1;
    if (parts[mid] <= cta)
      lo = mid;
    else
      hi = mid - 1;
  }
  const int pages = (prefix[lo + 1] - prefix[lo]) / kv.n_kv_heads, per_segment = (pages + q - 1) / q,
            head = (cta - parts[lo]) / per_segment, part = (cta - parts[lo]) % per_segment;
  /* parts of equal size as far as it goes, the smaller ones last */
  out->begin = prefix[lo] + head * pages + (int)((long long)part * pages / per_segment);
  out->end = prefix[lo] + head * pages + (int)((long long)(part + 1) * pages / per_segment);
  return out->begin < out->end;
}

struct segment {
  int seq, row, head, first_unit, n_units, len, first_page, lo;
}; /* row of q and out; lo: first visible token */

SITS_DEV segment find_segment(const k_kv_view &kv, const int *prefix, int unit) {
  segment g;
  int lo = 0, hi = kv.n_seqs - 1; /* last s with prefix[s] <= unit */
  while (lo < hi) {
    int mid = (lo + hi + 1) >> 1;
    if (prefix[mid] <= unit)
      lo = mid;
    else
      hi = mid - 1;
  }
  g.seq = lo;
  g.row = kv.seq_start[lo];
  g.n_units = (prefix[lo + 1] - prefix[lo]) / kv.n_kv_heads;
  g.head = (unit - prefix[lo]) / g.n_units;
  g.first_unit = prefix[lo] + g.head * g.n_units;
  g.len = kv.kv_len[lo];
  g.lo = kv.window > 0 && g.len > kv.window ? g.len - kv.window : 0;
  g.first_page = g.lo / K_PAGE_TOKENS;
  return g;
}

template <int D> SITS_DEV uint8_t *tile_of(const k_kv_view &kv, const segment &g, int unit) {
  int page = kv.block_table[(size_t)g.seq * kv.table_stride + g.first_page + unit - g.first_unit];
  return kv.pool + (size_t)page * kv.page_bytes + (size_t)(kv.layer * kv.n_kv_heads + g.head) * shape<D>::TILE;
}

struct new_token {
  uint8_t k[128], v[128];
  __half k_scale[4], v_scale[4];
};

/* Patch the tile in shared memory with the new token and store the words it touched to the page. One warp. */
template <int D, bool FP4> SITS_DEV void patch_tile(uint32_t tile, uint8_t *page, const new_token *nt, int token, int lane) {
#pragma unroll
  for (int w = 0; w < D / 128 + (D < 128); w++) { /* K: D/4 words, four channels each */
    int i = lane + w * 32;
    if (i < D / 4) {
      kv::place p = kv::k_place(D, token, i * 4);
      uint32_t word = lds32(tile + p.word_bytes);
#pragma unroll
      for (int c = 0; c < 4; c++) word = kv::insert_code(FP4, word, kv::k_place(D, token, i * 4 + c).slot, nt->k[i * 4 + c]);
      sts32(tile + p.word_bytes, word);
      *(uint32_t *)(page + p.word_bytes) = word;
    }
  }
#pragma unroll
  for (int w = 0; w < D / 64; w++) { /* V: D/2 words, two channels each */
    int i = lane + w * 32, d = (i >> 3) * 16 + (i & 7);
    kv::place p = kv::v_place(D, token, d);
    uint32_t word = lds32(tile + p.word_bytes);
    word = kv::insert_code(FP4, word, p.slot, nt->v[d]);
    word = kv::insert_code(FP4, word, kv::v_place(D, token, d + 8).slot, nt->v[d + 8]);
    sts32(tile + p.word_bytes, word);
    *(uint32_t *)(page + p.word_bytes) = word;
  }
  if (lane < D / 16) {
    bool is_value = lane >= D / 32;
    int group = lane - (is_value ? D / 32 : 0), at = is_value ? kv::v_scale_offset(D, token, group) : kv::k_scale_offset(D, token, group);
    __half s = is_value ? nt->v_scale[group] : nt->k_scale[group];
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + at), "h"(__half_as_ushort(s)) : "memory");
    *(__half *)(page + at) = s;
  }
  __syncwarp();
}

/* Fused: q of the group's heads -> f16 [8][D] in shared memory by the consumers; k and v of the new token -> codes by two more warps. */
template <int D, bool FP4> SITS_DEV void prepare_segment(const params &p, const segment &g, __half *query, float *scratch, new_token *nt,
                                               const float2 (&angle)[D / 32]) {
  const k_attn_decode &a = p.a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = a.kv.n_heads / a.kv.n_kv_heads, slot = warp < WARPS ? warp : warp - 1;
  const int row = g.row;
  const __half *base = (const __half *)a.qkv + (size_t)row * (a.kv.n_heads + 2 * a.kv.n_kv_heads) * D;
  float *v = scratch + slot * D;
  for (int i = warp < WARPS ? warp : 8; i < (warp < WARPS ? gqa : 9); i += WARPS) {
    const bool is_query = warp < WARPS, is_key = warp == WARP_K;
    const __half *src = base + (is_query ? g.head * gqa + i
                                : is_key ? a.kv.n_heads + g.head
                                         : a.kv.n_heads + a.kv.n_kv_heads + g.head) *
                                   D;
#pragma unroll
    for (int j = 0; j < D / 32; j++) v[lane + j * 32] = __half2float(__ldcg(src + lane + j * 32));
    __syncwarp();
    float r[D / 32];
    if (is_query || is_key) kv::rotate_head<D>(v, lane, is_query ? a.q_gain : a.k_gain, a.eps, a.rope, angle, true, r);
    if (is_query) {
#pragma unroll
      for (int j = 0; j < D / 32; j++) query[i * D + lane + j * 32] = __float2half_rn(r[j]);
    } else {
      uint32_t code[D / 32];
      __half scale[D / 32];
      if (!is_key)
#pragma unroll
        for (int j = 0; j < D / 32; j++) r[j] = v[lane + j * 32];
      kv::quantise_nibbles<D / 32>(FP4, r, code, scale);
#pragma unroll
      for (int j = 0; j < D / 32; j++) {
        (is_key ? nt->k : nt->v)[lane + j * 32] = (uint8_t)code[j];
        if (lane == j) (is_key ? nt->k_scale : nt->v_scale)[j] = scale[j];
      }
    }
    __syncwarp();
  }
}

/* The loader: a warp that copies the tiles of units begin .. end - 1 into the ring, in order. Not fused, a tile that begins a segment
 * brings the segment's queries and place along, so that nobody waits for them (but for the run's first: its queries may not be there
 * yet). */
template <int D, bool FUSED>
SITS_DEV void load_pages(const k_attn_decode &a, const int *prefix, int begin, int end, uint8_t *ring_ptr, uint32_t full, uint32_t empty,
                         int lane) {
  using C = shape<D>;
  const k_kv_view &view = a.kv;
  const int gqa = view.n_heads / view.n_kv_heads, query_bytes = gqa * D * 2;
  int slot = 0;
  uint32_t parity = 1;
  bool is_open = false;
  for (int base = begin; base < end; base += 32) {
    const int u = base + lane, n = min(32, end - base);
    const uint8_t *tile = NULL;
    segment g = {};
    if (u < end) g = find_segment(view, prefix, u), tile = tile_of<D>(view, g, u);
    const uint32_t last = __ballot_sync(~0u, u < end && u == g.first_unit + g.n_units - 1);
    const uint32_t first = FUSED ? 0 : __ballot_sync(~0u, u < end && u == g.first_unit && u > begin);
    for (int i = 0; i < n; i++) {
      uint8_t *stage = ring_ptr + slot * STAGE<D, FUSED>;
      if (!FUSED && !is_open && (last >> i & 1)) grid_wait(), is_open = true; /* the predecessor appended to this page */
      if (lane == i) {
        const bool begins = first >> i & 1; /* the segment before it has ended in this run, so the predecessor has too */
        bar_wait(empty + slot * 8, parity);
        if (begins) *(segment *)(stage + C::TILE + C::QUERY) = g;
        bar_arrive_expect(full + slot * 8, C::TILE + (begins ? query_bytes : 0));
        bulk_load(smem_addr(stage), tile, C::TILE, full + slot * 8);
        if (begins) {
          const __half *q = (const __half *)a.q + ((size_t)g.row * view.n_heads + g.head * gqa) * D;
          bulk_load(smem_addr(stage) + C::TILE, q, query_bytes, full + slot * 8);
        }
      }
      __syncwarp(); /* in order: a lane two laps ahead would take an old phase of the barrier for its own */
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  }
  if (!is_open) grid_wait();
}

/* Everyone but the loader. */
template <bool FUSED> SITS_DEV void segment_sync() { asm volatile("bar.sync 1, %0;" ::"n"(FUSED ? 192 : 128) : "memory"); }
SITS_DEV void consumer_sync() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

/* os: the offset of rows g, -24 sum p; that of rows g+8 is 11 times as much, so it is not kept. */
template <int D> struct state { float o[D / 16][4], os[D / 32][2], m0, m1, l0, l1; };

/* Eight e2m1 numbers (kv_tile.cuh) as f16 pairs, 2^-14 times as large: sign to bit 15, magnitude to bits 11:9 of each half. */
SITS_DEV void unfold_fp4(uint32_t w, uint32_t a[4]) {
  a[0] = w & 0x8E008E00u;
  a[1] = (w << 8) & 0x8E008E00u;
  a[2] = lop_and_or(w << 7, 0x80008000u, (w >> 3) & 0x0E000E00u);
  a[3] = lop_and_or(w << 15, 0x80008000u, (w << 5) & 0x0E000E00u);
}
template <bool FP4> SITS_DEV void unfold(uint32_t w, uint32_t a[4]) {
  if (FP4)
    unfold_fp4(w, a);
  else
    fold_nibbles(w, a);
}

template <int D, bool FP4>
SITS_DEV void attend_page(state<D> &st, const uint32_t (&q)[D / 16][2], const float (&seed)[D / 32][2], uint32_t tile,
                                           int warp, int lane, int lo, int len, float scale) {
  constexpr int G32 = D / 32;
  const int g = lane >> 2, t = lane & 3;
  const uint32_t consts[4] = {0xCE00CE00u, 0xDC20DC20u, 0xCE00CE00u, 0xDC20DC20u};
  const float zero[4] = {0.f, 0.f, 0.f, 0.f};
  float sc[4] = {0.f, 0.f, 0.f, 0.f};
  uint32_t ks[G32];
  if constexpr (D == 128) {
    const uint4 v = lds128(tile + 64 * D + warp * D + g * (D / 8));
    ks[0] = v.x, ks[1] = v.y, ks[2] = v.z, ks[3] = v.w;
  } else {
    const uint2 v = lds64(tile + 64 * D + warp * D + g * (D / 8));
    ks[0] = v.x, ks[1] = v.y;
  }
#pragma unroll
  for (int i = 0; i < D / 64; i++) {
    uint4 v = lds128(tile + warp * 8 * D + i * 512 + lane * 16);
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int group = i * 2 + c;
      float part[4];
      uint32_t a[4];
      if (FP4) {
        unfold<FP4>(w[c * 2], a);
        mma_f16(part, a, q[group * 2][0], q[group * 2][1], zero);
      } else {
        const float from[4] = {seed[group][0], seed[group][1], 11.f * seed[group][0], 11.f * seed[group][1]};
        unfold<FP4>(w[c * 2], a);
        mma_f16(part, a, q[group * 2][0], q[group * 2][1], from);
      }
      unfold<FP4>(w[c * 2 + 1], a);
      mma_f16(part, a, q[group * 2 + 1][0], q[group * 2 + 1][1], part);
      float2 f = half2_to_float2(ks[group]);
      sc[0] += f.x * part[0], sc[1] += f.x * part[1], sc[2] += f.y * part[2], sc[3] += f.y * part[3];
    }
  }
  if (lo > 0 || len < K_PAGE_TOKENS) { /* the first or last page of a sequence */
    const int tok = warp * 16 + g;     /* in the page, like lo and len */
    if (tok < lo || tok >= len) sc[0] = sc[1] = -INFINITY;
    if (tok + 8 < lo || tok + 8 >= len) sc[2] = sc[3] = -INFINITY;
  }
  /* The reference m need not be the maximum, only near it: it moves when a score lies more than SLACK above, so that most pages need no
   * reduction. Probabilities stay below 2^SLACK. */
  const float above = fmaxf(fmaxf(fmaf(sc[0], scale, -st.m0), fmaf(sc[2], scale, -st.m0)),
                            fmaxf(fmaf(sc[1], scale, -st.m1), fmaf(sc[3], scale, -st.m1)));
  if (__any_sync(~0u, above > SLACK)) {
    float x0 = fmaxf(sc[0], sc[2]) * scale, x1 = fmaxf(sc[1], sc[3]) * scale;
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, d)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, d));
    const float n0 = fmaxf(st.m0, x0), n1 = fmaxf(st.m1, x1), f0 = exp2_fast(st.m0 - n0), f1 = exp2_fast(st.m1 - n1);
    st.l0 *= f0, st.l1 *= f1, st.m0 = n0, st.m1 = n1;
#pragma unroll
    for (int i = 0; i < D / 16; i++) st.o[i][0] *= f0, st.o[i][1] *= f1, st.o[i][2] *= f0, st.o[i][3] *= f1;
#pragma unroll
    for (int i = 0; i < (FP4 ? 0 : G32); i++) st.os[i][0] *= f0, st.os[i][1] *= f1;
  }
  const float p0 = exp2_fast(fmaf(sc[0], scale, -st.m0)), p1 = exp2_fast(fmaf(sc[1], scale, -st.m1)),
              p2 = exp2_fast(fmaf(sc[2], scale, -st.m0)), p3 = exp2_fast(fmaf(sc[3], scale, -st.m1));
  st.l0 += p0 + p2, st.l1 += p1 + p3;
  const uint32_t c0 = movmatrix_trans(pack_half2(p0, p1)), c1 = movmatrix_trans(pack_half2(p2, p3));
#pragma unroll
  for (int i = 0; i < D / 64; i++) {
    uint4 v = lds128(tile + 32 * D + warp * 8 * D + i * 512 + lane * 16);
    uint4 vs = lds128(tile + 68 * D + warp * D + t * (D / 4) + i * 16);
    uint32_t w[4] = {v.x, v.y, v.z, v.w}, s[4] = {vs.x, vs.y, vs.z, vs.w};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int group = i * 2 + c;
      const uint32_t e0 = hmul2_u32(c0, s[c * 2]), e1 = hmul2_u32(c1, s[c * 2 + 1]);
      uint32_t a[4];
      if (!FP4) {
        float offset[4];
        mma_f16(offset, consts, e0, e1, zero);
        st.os[group][0] += offset[0], st.os[group][1] += offset[1];
      }
      unfold<FP4>(w[c * 2], a);
      mma_f16(st.o[group * 2], a, e0, e1, st.o[group * 2]);
      unfold<FP4>(w[c * 2 + 1], a);
      mma_f16(st.o[group * 2 + 1], a, e0, e1, st.o[group * 2 + 1]);
    }
  }
}

/* Values of head h of a warp's state -> merge[warp][h][ROW]. */
template <int D, bool FP4> SITS_DEV void spill_state(const state<D> &st, float *merge, int warp, int lane) {
  constexpr int ROW = shape<D>::ROW;
  const int g = lane >> 2, t = lane & 3;
  float l0 = st.l0, l1 = st.l1;
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) l0 += __shfl_xor_sync(~0u, l0, d), l1 += __shfl_xor_sync(~0u, l1, d);
  float *r = merge + (warp * 8 + 2 * t) * ROW;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    const int group = i / 2;
    if (FP4) {
      r[i * 16 + g] = FP4_FACTOR * st.o[i][0], r[ROW + i * 16 + g] = FP4_FACTOR * st.o[i][1];
      r[i * 16 + g + 8] = FP4_FACTOR * st.o[i][2], r[ROW + i * 16 + g + 8] = FP4_FACTOR * st.o[i][3];
      continue;
    }
    r[i * 16 + g] = st.o[i][0] + st.os[group][0], r[ROW + i * 16 + g] = st.o[i][1] + st.os[group][1];
    r[i * 16 + g + 8] = st.o[i][2] + 11.f * st.os[group][0], r[ROW + i * 16 + g + 8] = st.o[i][3] + 11.f * st.os[group][1];
  }
  if (g == 0) r[D] = st.m0, r[D + 1] = l0, r[ROW + D] = st.m1, r[ROW + D + 1] = l1;
}

/* Four values of a head: columns 4 lane .. 4 lane + 3 (lanes beyond D/4 hold none). */
template <int D> SITS_DEV void store_head(const k_attn_decode &a, int row, int head, float4 v, float inv, int lane) {
  const int col = head * D + lane * 4;
  const uint32_t lo = pack_half2(v.x * inv, v.y * inv), hi = pack_half2(v.z * inv, v.w * inv);
  if (lane >= D / 4) return;
  if (a.frag_m == 0)
    *(uint2 *)((__half *)a.out + (size_t)row * (a.kv.n_heads * D) + col) = make_uint2(lo, hi);
  else { /* columns 0, 2, 1, 3 of a four lie side by side */
    *(uint2 *)((__half *)a.out + k_frag_index(a.frag_m, col, row)) = make_uint2(__byte_perm(lo, hi, 0x5410), __byte_perm(lo, hi, 0x7632));
  }
}

SITS_DEV void add_scaled(float4 &sum, float4 v, float f) { sum.x += v.x * f, sum.y += v.y * f, sum.z += v.z * f, sum.w += v.w * f; }

/* The parts of a segment, one head: maximum, sum and values. Sixteen parts are fetched at a time, all loads in flight together. */
template <int D> SITS_DEV void merge_parts(const float *first, const float *rest, int n_rest, int lane, float4 *v, float *l) {
  constexpr int ROW = shape<D>::ROW, STEP = 16 * ROW; /* floats from one CTA's first slot to the next CTA's */
  float m = lane == 0 ? __ldcg(first + D) : -1e30f;
  for (int c = lane; c < n_rest; c += 32) m = fmaxf(m, __ldcg(rest + (size_t)c * STEP + D));
  const int col = lane < D / 4 ? lane * 4 : 0;
  float4 x = __ldcg((const float4 *)(first + col));
  const float l0 = __ldcg(first + D + 1), m0 = __ldcg(first + D);
  m = warp_max(m);
  const float f0 = exp2_fast(m0 - m);
  *l = l0 * f0;
  *v = make_float4(0.f, 0.f, 0.f, 0.f);
  add_scaled(*v, x, f0);
  for (int base = 0; base < n_rest; base += 16) {
    float4 part[16];
    float2 ml[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float *r = rest + (size_t)min(base + i, n_rest - 1) * STEP;
      part[i] = __ldcg((const float4 *)(r + col));
      ml[i] = __ldcg((const float2 *)(r + D));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float f = base + i < n_rest ? exp2_fast(ml[i].x - m) : 0.f;
      *l += ml[i].y * f;
      add_scaled(*v, part[i], f);
    }
  }
}

/* Merge the four warps; then store, or hand the part over and let the last CTA of the segment merge the parts. */
template <int D>
SITS_DEV void flush_segment(const params &p, const segment &g, const int *prefix, float *merge, int *flag, int n_ctas, int first_of_run) {
  constexpr int ROW = shape<D>::ROW;
  const k_attn_decode &a = p.a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = a.kv.n_heads / a.kv.n_kv_heads, row = g.row;
  const long long all = prefix[a.kv.n_seqs], n = n_ctas;
  const int q = prefix[a.kv.n_seqs + 1];
  int cta_first, cta_last, first_slot;
  if (q > 0) {
    const int per_segment = (g.n_units + q - 1) / q;
    cta_first = prefix[a.kv.n_seqs + 2 + g.seq] + g.head * per_segment, cta_last = cta_first + per_segment - 1;
    first_slot = cta_first * 2;
  } else {
    cta_first = (int)(((g.first_unit + 1LL) * n - 1) / all), cta_last = (int)(((long long)(g.first_unit + g.n_units) * n - 1) / all);
    first_slot = cta_first * 2 + ((int)(cta_first * all / n) >= g.first_unit ? 0 : 1); /* is the segment the first of that CTA's share? */
  }
  const int slot = blockIdx.x * 2 + (first_of_run ? 0 : 1);
  float *mine = a.workspace + (size_t)slot * 8 * ROW;
  const int col = lane < D / 4 ? lane * 4 : 0;
  for (int h = warp; h < gqa; h += WARPS) {
    float m = -1e30f, l = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, merge[(w * 8 + h) * ROW + D]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float *r = merge + (w * 8 + h) * ROW;
      const float f = exp2_fast(r[D] - m);
      l += r[D + 1] * f;
      add_scaled(v, *(const float4 *)(r + col), f);
    }
    if (cta_first == cta_last)
      store_head<D>(a, row, g.head * gqa + h, v, 1.f / l, lane);
    else {
      if (lane < D / 4) *(float4 *)(mine + h * ROW + col) = v;
      if (lane == 0) *(float2 *)(mine + h * ROW + D) = make_float2(m, l);
    }
  }
  if (cta_first == cta_last) return;
  __threadfence();
  consumer_sync();
  int *counter = a.counters + g.seq * a.kv.n_kv_heads + g.head;
  if (threadIdx.x == 0) *flag = atomicAdd(counter, 1) == cta_last - cta_first;
  consumer_sync();
  if (!*flag) return;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  for (int h = warp; h < gqa; h += WARPS) {
    float4 v;
    float l;
    merge_parts<D>(a.workspace + (size_t)first_slot * 8 * ROW + h * ROW, a.workspace + (size_t)(cta_first + 1) * 16 * ROW + h * ROW,
                   cta_last - cta_first, lane, &v, &l);
    store_head<D>(a, row, g.head * gqa + h, v, 1.f / l, lane);
  }
}
#endif

template <int D, bool FUSED, bool FP4> __global__ void __launch_bounds__(FUSED ? FUSED_THREADS : THREADS, FUSED ? 2 : CTAS_PER_SM)
    attn_decode_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = shape<D>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &view = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t full = smem_addr(smem), empty = full + 8 * STAGES;
  int *flag = (int *)(smem + 64);
  segment *shared_segment = (segment *)(smem + 72); /* kept out of registers in the page loop */
  float *merge = (float *)(smem + C::BARS);
  __half *query = (__half *)((uint8_t *)merge + C::MERGE);
  new_token *nt = (new_token *)((uint8_t *)query + C::QUERY);
  uint8_t *ring_ptr = (uint8_t *)nt + 512;
  const uint32_t ring = smem_addr(ring_ptr);
  int *prefix = (int *)(ring_ptr + STAGES * STAGE<D, FUSED>);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, WARPS);
    bar_fence_init();
  }
  if (warp == WARP_LOAD) scan_units(view, prefix, gridDim.x);
  if (FUSED)
    for (int i = threadIdx.x; i < 4 * D; i += FUSED_THREADS)
      ((uint32_t *)query)[i] = 0; /* rows of heads the group does not have stay zero */
  __syncthreads();
  const int n_ctas = min((int)gridDim.x, prefix[view.n_seqs]);
  share mine;
  if ((int)blockIdx.x >= n_ctas || !find_share(view, prefix, blockIdx.x, n_ctas, &mine)) {
    grid_wait();
    return;
  }
  const int begin = mine.begin, end = mine.end;
  if (warp == WARP_LOAD) {
    load_pages<D, FUSED>(p.a, prefix, begin, end, ring_ptr, full, empty, lane);
    return;
  }
  segment g = find_segment(view, prefix, begin); /* step inputs, not the predecessor's work */
  float2 angle[D / 32];
  if (FUSED) kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
  grid_wait();
  const int gq = lane >> 2, t = lane & 3, gqa = view.n_heads / view.n_kv_heads;
  const uint32_t consts[4] = {0xCE00CE00u, 0xDC20DC20u, 0xCE00CE00u, 0xDC20DC20u};
  const float zero[4] = {0.f, 0.f, 0.f, 0.f};
  int slot = 0;
  uint32_t parity = 0;
  for (int u = begin; u < end;) {
    const int first_of_run = u == begin;
    if (!first_of_run && FUSED) {
      g = find_segment(view, prefix, u);
      kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
    }
    const uint32_t brought = ring + slot * STAGE<D, FUSED> + C::TILE; /* not fused: with the segment's first tile */
    if (!first_of_run && !FUSED) {
      bar_wait(full + slot * 8, parity);
      if (threadIdx.x == 0) g = *(const segment *)(ring_ptr + slot * STAGE<D, FUSED> + C::TILE + C::QUERY);
    }
    if (FUSED) prepare_segment<D, FP4>(p, g, query, merge, nt, angle);
    if (threadIdx.x == 0) *shared_segment = g;
    segment_sync<FUSED>();
    const volatile segment *vs = shared_segment;
    const int last_unit = vs->first_unit + vs->n_units - 1, stop = min(end, last_unit + 1);
    if (!FUSED || warp < WARPS) { /* the two warps that made the codes wait for the next segment */
      uint32_t q[D / 16][2];
      float seed[D / 32][2]; /* offsets of rows g: -24 sum q; rows g+8 have 11 times as much */
      if (FUSED) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
          uint2 v = lds64(smem_addr(query) + (gq * D + k * 16 + t * 4) * 2);
          q[k][0] = v.x, q[k][1] = v.y;
        }
      } else if (!first_of_run) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
          uint2 v = gq < gqa ? lds64(brought + (gq * D + k * 16 + t * 4) * 2) : make_uint2(0, 0);
          q[k][0] = v.x, q[k][1] = v.y;
        }
      } else {
        const __half *src = (const __half *)p.a.q + ((size_t)vs->row * view.n_heads + vs->head * gqa + gq) * D + t * 4;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
          uint2 v = gq < gqa ? __ldcg((const uint2 *)(src + k * 16)) : make_uint2(0, 0);
          q[k][0] = v.x, q[k][1] = v.y;
        }
      }
#pragma unroll
      for (int c = 0; c < (FP4 ? 0 : D / 32); c++) {
        float offset[4];
        mma_f16(offset, consts, q[c * 2][0], q[c * 2][1], zero);
        mma_f16(offset, consts, q[c * 2 + 1][0], q[c * 2 + 1][1], offset);
        seed[c][0] = offset[0], seed[c][1] = offset[1];
      }
      state<D> st = {};
      st.m0 = st.m1 = -1e30f;
      const int token0 = (vs->first_page + u - vs->first_unit) * K_PAGE_TOKENS;
      int lo = vs->lo - token0, len = vs->len - token0; /* in the page at hand */
      for (int unit = u; unit < stop; unit++, lo -= K_PAGE_TOKENS, len -= K_PAGE_TOKENS) {
        const uint32_t tile = ring + slot * STAGE<D, FUSED>;
        bar_wait(full + slot * 8, parity);
        if (FUSED && unit == last_unit && warp == (len - 1) >> 4)
          patch_tile<D, FP4>(tile, tile_of<D>(view, *shared_segment, unit), nt, len - 1, lane);
        attend_page<D, FP4>(st, q, seed, tile, warp, lane, lo, len, p.score_scale);
        __syncwarp();
        if (lane == 0) bar_arrive(empty + slot * 8);
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
      spill_state<D, FP4>(st, merge, warp, lane);
      consumer_sync();
      flush_segment<D>(p, *shared_segment, prefix, merge, flag, n_ctas, first_of_run);
    }
    u = stop;
    segment_sync<FUSED>();
  }
#endif
}

template <int D> int smem_bytes(int n_seqs, bool fused) {
  using C = shape<D>;
  return C::BARS + C::MERGE + C::QUERY + 512 + STAGES * (fused ? STAGE<D, true> : STAGE<D, false>) + (2 * n_seqs + 4) * 4;
}

} // namespace

extern "C" bool k_attn_decode_takes(enum k_kv_codec codec, int32_t head_dim, int32_t n_heads, int32_t n_kv_heads) {
  return k_kv_has_nibbles(codec) && k_kv_has_fragments(head_dim) && n_heads % n_kv_heads == 0 && n_heads / n_kv_heads <= K_MAX_GQA;
}

/* Fused steps are small: fewer CTAs leave room beside the GEMMs before and after, and fewer parts to merge. */
extern "C" int32_t k_attn_decode_grid(int32_t n_sm, int32_t n_seqs, bool is_fused) {
  return is_fused ? n_seqs <= 2 ? n_sm : 2 * n_sm : n_sm * CTAS_PER_SM;
}

extern "C" size_t k_attn_decode_workspace_bytes(int32_t n_sm, int32_t head_dim) {
  return (size_t)n_sm * CTAS_PER_SM * 2 * 8 * (head_dim + 4) * sizeof(float);
}

template <int D, bool FP4> static int prepare_decode(void) {
  int e = prepare_kernel(attn_decode_kernel<D, true, FP4>, smem_bytes<D>(MAX_SEQS, true));
  return e ? e : prepare_kernel(attn_decode_kernel<D, false, FP4>, smem_bytes<D>(MAX_SEQS, false));
}

extern "C" int sits_k_attn_decode_init(void) {
  int e = prepare_decode<64, false>();
  if (!e) e = prepare_decode<64, true>();
  if (!e) e = prepare_decode<128, false>();
  return e ? e : prepare_decode<128, true>();
}

template <int D, bool FUSED, bool FP4> static int launch_decode(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const params p = {a, 1.4426950408889634f / sqrtf((float)D) * (FP4 ? FP4_FACTOR : 1.f)};
  const dim3 grid(k_attn_decode_grid(n_sm, a.kv.n_seqs, FUSED)), block(FUSED ? FUSED_THREADS : THREADS);
  return launch_kernel(attn_decode_kernel<D, FUSED, FP4>, grid, block, smem_bytes<D>(a.kv.n_seqs, FUSED), (cudaStream_t)at.stream,
                       at.pdl, p);
}

template <int D, bool FP4> static int launch_head_size(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  return a.q ? launch_decode<D, false, FP4>(a, n_sm, at) : launch_decode<D, true, FP4>(a, n_sm, at);
}

extern "C" int sits_k_attn_decode(const struct k_attn_decode *a, int32_t n_sm, struct k_stream at) {
  const k_kv_view &v = a->kv;
  const bool is_fp4 = v.codec == K_KV_FP4;
  if (!k_attn_decode_takes(v.codec, v.head_dim, v.n_heads, v.n_kv_heads) || v.n_seqs < 1 || v.n_seqs > MAX_SEQS)
    return cudaErrorInvalidValue;
  if (v.head_dim == 64) return is_fp4 ? launch_head_size<64, true>(*a, n_sm, at) : launch_head_size<64, false>(*a, n_sm, at);
  return is_fp4 ? launch_head_size<128, true>(*a, n_sm, at) : launch_head_size<128, false>(*a, n_sm, at);
}
