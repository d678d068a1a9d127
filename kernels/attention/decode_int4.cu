/* out[s][h] = softmax(q . K / sqrt(D)) V for one new token per sequence over int4 or fp4 pages. A sequence's tokens are 0 .. kv_len-1,
 * the last one being the new token. Fused form (q = NULL): rotation of q and k, quantisation of v and append of both included; else q is
 * rotated already and the token appended (sits_k_rope_append): better from about nine sequences on, where a CTA walks several segments.
 *
 * Arguments: struct k_attn_decode (kernels.h). qkv f16 written by the previous kernel; pages by earlier steps.
 * Work split: the unit is one page of one KV head (D = 128: 9,216 bytes, one bulk copy); the pages of a (sequence, head) are a segment.
 *   Where there are fewer segments than CTAs, segments are cut into parts of at most q pages, a CTA takes one part (q as small as fits);
 *   else units in the order sequence, head, page are cut into equal runs. The cut is computed by every CTA from kv_len, so one captured
 *   grid serves all lengths. Fused: four warps take 16 of a page's 64 tokens each. Not fused: two teams of two warps take pages in turn, a
 *   warp 32 tokens: what is computed once per page and 32 tokens (queries times the scales of keys, zero points, means) serves two blocks,
 *   and a warp has two independent chains of products. The query heads of the group fill N = 8.
 * Own group: the newest 1 to 32 (int4) or 64 (fp4) tokens are read in f16 from the sequence's open slot, which comes with the segment's
 *   last page; warps whose tokens lie there multiply f16 keys, the others the page's.
 * Shared memory: barriers 128, prefix sums 8 (S+2), merge buffer 4 * 8 * (D+4) * 4 (16.9 KiB at D = 128), queries 2 KiB, new token 1 KiB,
 *   ring of four tiles (37 KiB), not fused two rooms for queries to come (4 KiB). The open slot (8 or 16 KiB) lies in the merge
 *   buffer, fused behind the ring: three CTAs per SM at <= 128 registers.
 * Pipeline: page copies start before the grid dependency opens (pages of earlier steps do not depend on it; not fused, a sequence's last
 *   page waits for the append). Fused, the new token never travels through global memory here: the warp that owns its 16-token block
 *   patches slot and tile in shared memory and stores the same words to both.
 *   The loader looks up the pages of 32 units at a time, a lane each, so that no copy waits for a block table entry of its own.
 * Numerics: int4: folded nibbles (16+q, 256+q) times f16(query * scale of its channel) or f16(probability * scale of its token); the
 *   offsets 16 + zero point and 256 + zero point are taken off by one more product a group, of the zero points and of ones. fp4: f16
 *   numbers 2^-14 times as large (subnormal ones included, which tensor cores take); K scales on the f32 scores, means by a product of
 *   their own, V scales on the f16 probabilities. Scales are quarters of their size everywhere, the factor comes back in f32. A running
 *   reference near the maximum in f32, base-2 exponentials; parts are merged in CTA order by the last to arrive, so results do not depend
 *   on timing. Empty and masked positions have probability exactly 0. Outputs are rotated back (Hadamard) as they are stored. Tolerance
 *   against the f64 twin 2e-3 of the norm.
 * Limits: D 64 or 128, H/G <= 8, S <= 1024, sm_90; anything else goes to attn_any.
 * Cost: 72 D (int4) or 74 D (fp4) bytes per page and head, 64 D or 128 D for the open slot; bound by the length of a warp's instruction
 *   chain, then by device memory from about 20 MB a layer, by latency below.
 * History: a separate merge kernel cost 3 us a layer; 4 CTAs per SM spill. Keys in groups of 32 channels of a token needed no slot and no
 *   products for zero points, and cost 5 % of perplexity.
 * Links: twin ref_attention (tests/gpu/test_attention.c), test tests/gpu/test_attention.c, bench sits2026-bench kernels.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace {

/* Stages: a multiple of the teams, so that each of a stage's phases is waited for by the same team, in turn. */
constexpr int WARPS = 4, WARP_LOAD = 4, WARP_K = 5, STAGES = 4, CTAS_PER_SM = 3, MAX_SEQS = K_MAX_DECODE_SEQS;
constexpr float SCALES = 4.f, FP4_SCALES = 65536.f; /* of sums with quartered scales, and with e2m1 numbers 2^-14 times as large */
constexpr float SLACK = 6.f;
constexpr int NEW_TOKEN = 1024; /* bytes for struct new_token; the second half is the value's before it is quantised */
constexpr int THREADS = 160, FUSED_THREADS = 224; /* four consumer warps, the loader; fused: one more for k, one for v */

struct params {
  k_attn_decode a;
  float score_scale; /* log2(e) / sqrt(D), times SCALES or FP4_SCALES */
};

template <int D> struct shape {
  static constexpr int ROW = D + 4; /* merged output, maximum, sum */
  static constexpr int MERGE = WARPS * 8 * ROW * 4;
  static constexpr int BARS = 128, QUERY = 8 * D * 2;
};
template <int D, bool FP4> constexpr int TILE = (FP4 ? 74 : 72) * D;
template <bool FP4> constexpr int OPEN_TOKENS = FP4 ? 64 : 32;
template <int D, bool FP4> constexpr int OPEN = OPEN_TOKENS<FP4> * D * 2;
/* Not fused, a segment that begins with a tile of the ring brings its queries and its place along: two rooms in turn. */
template <int D> constexpr int ROOM = shape<D>::QUERY + 32;
/* Blocks of 16 tokens that a warp takes of a page; warps that share a page, and teams of them. */
template <bool FUSED> constexpr int BLOCKS = FUSED ? 1 : 2;
template <bool FUSED> constexpr int TEAM = 4 / BLOCKS<FUSED>;
template <bool FUSED> constexpr int TEAMS = WARPS / TEAM<FUSED>;

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
  for (int pass = 0; pass < 2; pass++) {
    const int q = pass == 0 ? 0 : prefix[kv.n_seqs + 1];
    int *to = pass == 0 ? prefix : prefix + kv.n_seqs + 2, sum = 0;
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
      if (s < kv.n_seqs) to[s + 1] = sum + n;
      sum += __shfl_sync(~0u, n, 31);
    }
    if (lane == 0) to[0] = 0;
    if (pass == 0) {
      const int per_part = pages_per_part(kv, sum, n_ctas);
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

SITS_DEV uint8_t *tile_of(const k_kv_view &kv, const segment &g, int unit) {
  return kv::page_tile(kv, kv.block_table[(size_t)g.seq * kv.table_stride + g.first_page + unit - g.first_unit], kv.layer, g.head);
}
SITS_DEV __half *open_of(const k_kv_view &kv, const segment &g) {
  return kv::open_tile(kv, kv.open_slot[2 * g.seq + 1], kv.layer, g.head);
}

/* Everyone but the loader, at a segment's end; fused, all of them but the warp of values at its begin; the four consumers; that warp and
 * the one that patches the tile. */
template <bool FUSED> SITS_DEV void segment_sync() { asm volatile("bar.sync 1, %0;" ::"n"(FUSED ? 192 : 128) : "memory"); }
SITS_DEV void queries_sync() { asm volatile("bar.sync 3, 160;" ::: "memory"); }
SITS_DEV void consumer_sync() { asm volatile("bar.sync 2, 128;" ::: "memory"); }
template <bool WAITS> SITS_DEV void value_ready() {
  if (WAITS)
    asm volatile("bar.sync 4, 64;" ::: "memory");
  else
    asm volatile("bar.arrive 4, 64;" ::: "memory");
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

/* The new token's key -> slot in shared memory and in global memory. One warp. */
template <int D, bool FP4> SITS_DEV void patch_key(uint32_t slot, __half *open, const new_token *nt, int token, int lane) {
#pragma unroll
  for (int w = 0; w < D / 64; w++) { /* D/2 pairs of channels */
    const int d = 2 * (lane + w * 32), at = kv::open_at(D, token % OPEN_TOKENS<FP4>, d);
    const uint32_t pair = *(const uint32_t *)(nt->k + d);
    sts32(slot + at * 2, pair);
    *(uint32_t *)(open + at) = pair;
  }
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
    kv::quantise_fp4<4>(x, code, &scale);
  else
    kv::quantise_u4<8>(x, 32, lane, code, &scale, &zero);
#pragma unroll
  for (int k = 0; k < 4; k++) nt->v[first + LANES * k] = (uint8_t)code[k];
  if ((lane & (LANES - 1)) == 0) {
    nt->params[group] = (uint8_t)scale;
    if (!FP4) nt->params[8 + group] = (uint8_t)(zero + 128);
  }
}

/* Fused: q of the group's heads -> f16 in shared memory by the consumers; where this part has the new token (has_new), its k and v by two
 * more warps. Quantising v takes longest; only the warp that patches the tile waits for it (value_ready). */
template <int D, bool FP4> SITS_DEV void prepare_segment(const params &p, const segment &g, __half *query, float *scratch, new_token *nt,
                                               const float2 (&angle)[D / 32], bool has_new) {
  const k_attn_decode &a = p.a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = a.kv.n_heads / a.kv.n_kv_heads, slot = warp < WARPS ? warp : warp - 1;
  const int row = g.row;
  const __half *base = (const __half *)a.qkv + (size_t)row * (a.kv.n_heads + 2 * a.kv.n_kv_heads) * D;
  float *v = warp <= WARP_K ? scratch + slot * D : (float *)((uint8_t *)nt + NEW_TOKEN / 2); /* the consumers do not wait for the latter */
  for (int i = warp < WARPS ? warp : 8; i < (warp < WARPS ? gqa : has_new ? 9 : 0); i += WARPS) {
    const bool is_query = warp < WARPS, is_key = warp == WARP_K;
    const __half *src = base + (is_query ? g.head * gqa + i
                                : is_key ? a.kv.n_heads + g.head
                                         : a.kv.n_heads + a.kv.n_kv_heads + g.head) *
                                   D;
    float r[D / 32];
#pragma unroll
    for (int j = 0; j < D / 32; j++) v[lane + j * 32] = r[j] = __half2float(__ldcg(src + lane + j * 32));
    __syncwarp();
    if (is_query || is_key)
      kv::rotate_head<D>(v, lane, is_query ? a.q_gain : a.k_gain, a.eps, a.rope, angle, FP4, r);
    else
      kv::hadamard_lanes<D>(r, lane);
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const int ch = lane + j * 32;
      const __half x = __float2half_rn(fminf(fmaxf(r[j], -65504.f), 65504.f));
      if (is_query)
        query[query_at(i, ch)] = x;
      else if (is_key)
        nt->k[ch] = x;
    }
    __syncwarp();
    if (!is_query && !is_key) {
#pragma unroll
      for (int j = 0; j < D / 32; j++) v[lane + j * 32] = r[j];
      __syncwarp();
      quantise_new<D, FP4>(v, nt, lane);
      value_ready<false>();
    }
    __syncwarp();
  }
}

/* Not fused: the queries of a segment, rows [gqa][D] where `brought` says or in global memory -> shared memory. All consumers. */
template <int D> SITS_DEV void place_queries(const __half *global, const __half *brought, __half *query, int gqa) {
  const int i = threadIdx.x, head = (i & 31) >> 2, ch = (i >> 5) * 32 + (i & 3) * 4;
  if (i >= D) return;
  uint2 lo = make_uint2(0, 0), hi = lo;
  if (head < gqa && brought) lo = *(const uint2 *)(brought + head * D + ch), hi = *(const uint2 *)(brought + head * D + ch + 16);
  if (head < gqa && !brought)
    lo = __ldcg((const uint2 *)(global + head * D + ch)), hi = __ldcg((const uint2 *)(global + head * D + ch + 16));
  *(uint4 *)(query + i * 8) = make_uint4(lo.x, lo.y, hi.x, hi.y);
}

/* Barriers: full and empty of each stage, the open slot's arrival, the merge buffer (and the open slot's room) being free again. */
struct barriers {
  uint32_t full, empty, open_full, merge_free;
};

/* The loader: a warp that copies the tiles of units begin .. end - 1 into the ring, in order. Not fused, a tile that begins a segment
 * brings the segment's queries and place along, so that nobody waits for them (but for the run's first: its queries may not be there
 * yet). The last tile of a segment comes after the blocks of its open slot that hold tokens. */
template <int D, bool FUSED, bool FP4>
SITS_DEV void load_pages(const k_attn_decode &a, const int *prefix, int begin, int end, uint8_t *ring_ptr, uint8_t *rooms,
                         uint32_t open_room, const barriers &bars, int lane) {
  using C = shape<D>;
  constexpr int T = TILE<D, FP4>, BLOCK = 16 * D * 2;
  const k_kv_view &view = a.kv;
  const int gqa = view.n_heads / view.n_kv_heads, query_bytes = gqa * D * 2;
  bool is_open = false;
  int n_segments = 0; /* that ended before the unit at hand */
  for (int base = begin; base < end; base += 32) {
    const int u = base + lane, n = min(32, end - base);
    const uint8_t *tile = NULL;
    segment g = {};
    if (u < end) g = find_segment(view, prefix, u), tile = tile_of(view, g, u);
    const uint32_t last = __ballot_sync(~0u, u < end && u == g.first_unit + g.n_units - 1);
    const uint32_t first = FUSED ? 0 : __ballot_sync(~0u, u < end && u == g.first_unit && u > begin);
    for (int i = 0; i < n; i++) {
      const int unit = base + i - begin, slot = unit % STAGES;
      const uint32_t parity = (unit / STAGES & 1) ^ 1;
      uint8_t *stage = ring_ptr + slot * TILE<D, FP4>;
      if (!FUSED && !is_open && (last >> i & 1)) grid_wait(), is_open = true; /* the predecessor appended to this page */
      if (lane == i) {
        if (last >> i & 1) {
          const int bytes = ((g.len - 1) % OPEN_TOKENS<FP4> / 16 + 1) * BLOCK;
          bar_wait(bars.merge_free, (n_segments & 1) ^ 1);
          bar_arrive_expect(bars.open_full, bytes);
          bulk_load(open_room, open_of(view, g), bytes, bars.open_full);
        }
        /* The segment before it has ended in this run, so the predecessor has too; the one before that has left its room: merge_free. */
        const bool begins = first >> i & 1;
        uint8_t *room = rooms + (n_segments & 1) * ROOM<D>;
        bar_wait(bars.empty + slot * 8, parity);
        if (begins) *(segment *)(room + C::QUERY) = g;
        bar_arrive_expect(bars.full + slot * 8, T + (begins ? query_bytes : 0));
        bulk_load(smem_addr(stage), tile, T, bars.full + slot * 8);
        if (begins) {
          const __half *q = (const __half *)a.q + ((size_t)g.row * view.n_heads + g.head * gqa) * D;
          bulk_load(smem_addr(room), q, query_bytes, bars.full + slot * 8);
        }
      }
      n_segments += last >> i & 1;
      __syncwarp(); /* in order: a lane two laps ahead would take an old phase of the barrier for its own */
    }
  }
  if (!is_open) grid_wait();
}

/* off, int4: of each group of 32 channels, sums of probability * scale * zero point (two heads), then of probability * scale. */
template <int D> struct state { float o[D / 16][4], off[D / 32][4], m0, m1, l0, l1; };

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

SITS_DEV uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
constexpr uint32_t ONES = 0x3C003C00u;
/* Rows g of A: zero points; rows g+8: ones. */
SITS_DEV void mma_zeros(float (&d)[4], uint32_t zeros, uint32_t b0, uint32_t b1) {
  uint32_t even, odd;
  kv::zero_points(zeros, &even, &odd);
  const uint32_t a[4] = {even, ONES, odd, ONES};
  mma_f16(d, a, b0, b1, d);
}

/* Scores of N blocks of 16 tokens against f16 keys. */
template <int D, bool FP4, int N> SITS_DEV void score_open(float (&sc)[N][4], uint32_t query, uint32_t open, int lane) {
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const uint4 q = lds128(query + (i * 32 + lane) * 16);
#pragma unroll
    for (int b = 0; b < N; b++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const uint4 v = lds128(open + b * 32 * D + (i * 2 + c) * 512 + lane * 16);
        const uint32_t a[4] = {v.x, v.y, v.z, v.w};
        mma_f16(sc[b], a, c ? q.z : q.x, c ? q.w : q.y, sc[b]);
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
          fold_nibbles(word_of(w[b], h * 2 + c), a);
          mma_f16(sc[b], a, q0, q1, sc[b]);
        }
      }
    }
  }
#pragma unroll
  for (int b = 0; b < N; b++)
#pragma unroll
    for (int e = 0; e < 4; e++) sc[b][e] -= fmaf(e < 2 ? 16.f : 256.f, off[2 + (e & 1)], off[e & 1]);
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
          fold_nibbles(word_of(w, c * 2 + k), a);
          mma_f16(st.o[i * 4 + c * 2 + k], a, e0, e1, st.o[i * 4 + c * 2 + k]);
        }
      }
    }
  }
}

/* N blocks of the page from block0 on. lo, len, own: first visible token, behind the last one, first one of the own group, in the page.
 * before_values: called when the scores are there. */
template <int D, bool FP4, int N, class F>
SITS_DEV void attend_page(state<D> &st, uint32_t query, uint32_t tile, uint32_t open, int block0, int lane, int lo, int len, int own,
                          float scale, F before_values) {
  float sc[N][4] = {};
  if ((unsigned)(block0 * 16 - own) < (unsigned)OPEN_TOKENS<FP4>)
    score_open<D, FP4, N>(sc, query, open + (block0 * 16 - own) * D * 2, lane);
  else if constexpr (FP4)
    score_fp4<D, N>(sc, query, tile, block0, lane);
  else
    score_int4<D, N>(sc, query, tile, block0, lane);
  if (lo > 0 || len < K_PAGE_TOKENS) { /* the first or last page of a sequence */
#pragma unroll
    for (int b = 0; b < N; b++) {
      const int tok = (block0 + b) * 16 + (lane >> 2); /* in the page, like lo and len */
      if (tok < lo || tok >= len) sc[b][0] = sc[b][1] = -INFINITY;
      if (tok + 8 < lo || tok + 8 >= len) sc[b][2] = sc[b][3] = -INFINITY;
    }
  }
  /* The reference m need not be the maximum, only near it: it moves when a score lies more than SLACK above, so that most pages need no
   * reduction. Probabilities stay below 2^SLACK. */
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
  uint32_t c0[N], c1[N];
#pragma unroll
  for (int b = 0; b < N; b++) {
    const float p0 = exp2_fast(fmaf(sc[b][0], scale, -st.m0)), p1 = exp2_fast(fmaf(sc[b][1], scale, -st.m1)),
                p2 = exp2_fast(fmaf(sc[b][2], scale, -st.m0)), p3 = exp2_fast(fmaf(sc[b][3], scale, -st.m1));
    st.l0 += p0 + p2, st.l1 += p1 + p3;
    c0[b] = movmatrix_trans(pack_half2(p0, p1)), c1[b] = movmatrix_trans(pack_half2(p2, p3));
  }
  before_values();
#pragma unroll
  for (int b = 0; b < N; b++) add_values<D, FP4>(st, tile, block0 + b, lane, c0[b], c1[b]);
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
  for (int i = 0; i < D / 16; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float *off = st.off[i / 2];
      const float x = FP4 ? FP4_SCALES * st.o[i][e]
                          : SCALES * (st.o[i][e] - fmaf(e < 2 ? 16.f : 256.f, off[2 + (e & 1)], off[e & 1]));
      r[(e & 1) * ROW + i * 16 + g + (e >> 1) * 8] = x;
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
  constexpr int STEP = TEAMS<FUSED>, NB = BLOCKS<FUSED>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &view = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t base = smem_addr(smem);
  const barriers bars = {base, base + 8 * STAGES, base + 16 * STAGES, base + 16 * STAGES + 8};
  int *flag = (int *)(smem + 16 * STAGES + 16);
  segment *shared_segment = (segment *)(smem + 16 * STAGES + 24); /* kept out of registers in the page loop */
  float *merge = (float *)(smem + C::BARS);
  __half *query = (__half *)((uint8_t *)merge + C::MERGE);
  new_token *nt = (new_token *)((uint8_t *)query + C::QUERY);
  uint8_t *rooms = (uint8_t *)nt, *ring_ptr = FUSED ? rooms + NEW_TOKEN : rooms + 2 * ROOM<D>;
  const uint32_t ring = smem_addr(ring_ptr), open = FUSED ? ring + STAGES * TILE<D, FP4> : smem_addr(merge);
  int *prefix = (int *)(ring_ptr + STAGES * TILE<D, FP4> + (FUSED ? OPEN<D, FP4> : 0));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(bars.full + i * 8, 1), bar_init(bars.empty + i * 8, TEAM<FUSED>);
    bar_init(bars.open_full, 1), bar_init(bars.merge_free, WARPS);
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
    load_pages<D, FUSED, FP4>(p.a, prefix, begin, end, ring_ptr, rooms, open, bars, lane);
    return;
  }
  segment g = find_segment(view, prefix, begin); /* step inputs, not the predecessor's work */
  float2 angle[D / 32];
  if (FUSED) kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
  grid_wait();
  const int gqa = view.n_heads / view.n_kv_heads, team = warp / TEAM<FUSED>, block0 = warp % TEAM<FUSED> * NB;
  uint32_t segment_parity = 0; /* of the number of segments before this one */
  for (int u = begin; u < end;) {
    const int first_of_run = u == begin, slot0 = (u - begin) % STAGES;
    if (!first_of_run && FUSED) {
      g = find_segment(view, prefix, u);
      kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
    }
    int last_unit = g.first_unit + g.n_units - 1;
    if (!FUSED) { /* queries come with the segment's first tile, but for the run's first */
      const uint8_t *brought = rooms + segment_parity * ROOM<D>;
      const __half *from = (const __half *)p.a.q + ((size_t)g.row * view.n_heads + g.head * gqa) * D;
      if (!first_of_run) {
        bar_wait(bars.full + slot0 * 8, (u - begin) / STAGES & 1);
        if (threadIdx.x == 0) g = *(const segment *)(brought + C::QUERY);
      }
      place_queries<D>(from, first_of_run ? NULL : (const __half *)brought, query, gqa);
    } else
      prepare_segment<D, FP4>(p, g, query, merge, nt, angle, last_unit < end);
    if (threadIdx.x == 0) *shared_segment = g;
    if (!FUSED)
      segment_sync<FUSED>();
    else if (warp <= WARP_K)
      queries_sync();
    const volatile segment *vs = shared_segment;
    if (!FUSED) last_unit = vs->first_unit + vs->n_units - 1;
    const int stop = min(end, last_unit + 1);
    if (!FUSED || warp < WARPS) { /* the two warps that made the new token wait for the next segment */
      state<D> st = {};
      st.m0 = st.m1 = -1e30f;
      const int mine0 = u + (team + STEP - (u - begin) % STEP) % STEP; /* first unit of this team */
      const int token0 = (vs->first_page + mine0 - vs->first_unit) * K_PAGE_TOKENS;
      int lo = vs->lo - token0, len = vs->len - token0; /* in the page at hand */
      for (int unit = mine0; unit < stop; unit += STEP, lo -= STEP * K_PAGE_TOKENS, len -= STEP * K_PAGE_TOKENS) {
        const int slot = (unit - begin) % STAGES;
        const uint32_t tile = ring + slot * TILE<D, FP4>;
        int own = K_PAGE_TOKENS;
        if (unit == last_unit) own = (len - 1) / OPEN_TOKENS<FP4> * OPEN_TOKENS<FP4>, bar_wait(bars.open_full, segment_parity);
        bar_wait(bars.full + slot * 8, (unit - begin) / STAGES & 1);
        const bool patches = FUSED && unit == last_unit && warp == (len - 1) >> 4;
        if (patches) patch_key<D, FP4>(open, open_of(view, *shared_segment), nt, len - 1, lane);
        attend_page<D, FP4, NB>(st, smem_addr(query), tile, open, block0, lane, lo, len, own, p.score_scale, [&] {
          if (!FUSED || !patches) return;
          value_ready<true>();
          patch_value<D, FP4>(tile, tile_of(view, *shared_segment, unit), nt, len - 1, lane);
        });
        __syncwarp();
        if (lane == 0) bar_arrive(bars.empty + slot * 8);
      }
      if (stop == last_unit + 1 && !FUSED) consumer_sync(); /* nobody reads the open slot any more: the merge buffer lies there */
      spill_state<D, FP4>(st, merge, warp, lane);
      consumer_sync();
      flush_segment<D>(p, *shared_segment, prefix, merge, flag, n_ctas, first_of_run);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the next copy into the room follows ordinary stores */
      __syncwarp();
      if (lane == 0) bar_arrive(bars.merge_free);
    }
    segment_parity ^= 1;
    u = stop;
    segment_sync<FUSED>();
  }
#endif
}

template <int D, bool FP4> int smem_bytes(int n_seqs, bool fused) {
  using C = shape<D>;
  return C::BARS + C::MERGE + C::QUERY + (2 * n_seqs + 4) * 4 +
         STAGES * TILE<D, FP4> + (fused ? NEW_TOKEN + OPEN<D, FP4> : 2 * ROOM<D>);
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
  int e = prepare_kernel(attn_decode_kernel<D, true, FP4>, smem_bytes<D, FP4>(MAX_SEQS, true));
  return e ? e : prepare_kernel(attn_decode_kernel<D, false, FP4>, smem_bytes<D, FP4>(MAX_SEQS, false));
}

extern "C" int sits_k_attn_decode_init(void) {
  int e = prepare_decode<64, false>();
  if (!e) e = prepare_decode<64, true>();
  if (!e) e = prepare_decode<128, false>();
  return e ? e : prepare_decode<128, true>();
}

template <int D, bool FUSED, bool FP4> static int launch_decode(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const params p = {a, 1.4426950408889634f / sqrtf((float)D) * (FP4 ? FP4_SCALES : SCALES)};
  const dim3 grid(k_attn_decode_grid(n_sm, a.kv.n_seqs, FUSED)), block(FUSED ? FUSED_THREADS : THREADS);
  return launch_kernel(attn_decode_kernel<D, FUSED, FP4>, grid, block, smem_bytes<D, FP4>(a.kv.n_seqs, FUSED), (cudaStream_t)at.stream,
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
