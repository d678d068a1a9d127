/* out[s][h] = softmax(q . K / sqrt(D)) V for one new token per sequence over int4 or fp4 pages. A sequence's tokens are 0 .. kv_len-1,
 * the last one being the new token. Fused form (q = NULL): rotation of q and k, quantisation of v and append of both included; else q is
 * rotated already and the token appended (sits_k_rope_append). Few sequences that are not long: decode_few.cu; what both share:
 * decode_pages.cuh.
 *
 * Arguments: struct k_attn_decode (kernels.h). qkv by the previous kernel; pages by earlier steps; cut by decode_cut.cu, at the start of
 *   the step.
 * Work split: a CTA is a pair of warps, eight of them an SM; each warp takes 32 of a page's 64 tokens. The unit is one page of one KV
 *   head (D = 128: 9,216 bytes, one bulk copy); the pages of a (sequence, head) are a segment. A CTA walks over a run of units that its
 *   record in `cut` names (decode_split.cuh).
 * Shared memory: barriers and what is kept out of registers 512, ring of two tiles (18 KiB at D = 128), queries 2 KiB, merge buffer
 *   8 * (D+4) * 4 (4.1 KiB), new token 512, its value 4 D, addresses of tiles 512: 27 KiB, so eight CTAs an SM, at 128 registers.
 * Pipeline: a pair's first warp looks up 32 addresses of tiles at a time, a lane each; whichever warp leaves a stage last has it filled
 *   again. The first copies start before the grid dependency opens (pages of earlier steps do not depend on it; not fused, a sequence's
 *   last page waits for the append); int4, fused, a pair's first one only, the second when the queries have been made. The own group's
 *   keys come by a copy into the merge buffer, which is free while pages are read, where they fit (int4 from two pairs a CTA on, fp4 from
 *   four); int4 with one pair: into the stage that no further page needs, if the run ends with the segment. Fused, the new token never
 *   travels through global memory here: the warp that owns its block patches the tile and the fragments of its key, and stores the same
 *   words to page and slot. Nobody but that warp waits for its value.
 * Numerics: decode_pages.cuh; parts are merged in CTA order by the last to arrive, so results do not depend on timing. Tolerance against
 *   the f64 twin 2e-3 of the norm.
 * Limits: D 64 or 128, H/G <= 8, S <= 1024, sm_90; anything else goes to attn_any.
 * Cost: 72 D (int4) or 74 D (fp4) bytes per page and head, 64 D or 128 D for the open slot; bound by device memory and the length of a
 *   warp's instruction chain.
 * History: a separate merge kernel cost 3 us a layer. Keys in groups of 32 channels of a token needed no slot and no products for zero
 *   points, and cost 5 % of perplexity. Three CTAs of four warps and a loader: a third of the warps' time went into what happens once a
 *   segment (barriers of four warps, fences of the device by all threads), a fifth of the page loop into waiting for tiles. Eight warps and
 *   a loader a CTA: nine warps, twice, leave 96 registers (a quarter of the SM holds five of them), which spills: 68 us for 52. The cut
 *   made by each CTA from the lengths, and code for it in four places: 54 us at 64 x 2,048 for 49. Stages filled again by the
 *   first warp when it finds them left: 47.9 us for 46.2. The own group's keys from global memory, though sent for into the L2: 46.4 us for
 *   44.4, 29.4 for 26.7 at 64 x 1,024. The value quantised before a barrier of all warps: 3,000 cycles a segment. Both of a pair's tiles
 *   before the queries, whose projections then come late: a layer of 32, 64, 128 tokens 71 to 69.6, 92.6 to 91.3, 139.3 to 137.0 us
 *   without (fp4, 64 x 2,048, alone: 57.2 us without for 53.3, so it keeps them).
 * Links: twin ref_attention (tests/gpu/test_attention.c), test tests/gpu/test_attention.c, bench sits2026-bench kernels.
 */
#include "attention/decode_split.cuh"

namespace {

using namespace decode;

/* PAIRS: of warps a CTA, 1, 2, 4 or 8; STAGES and TABLE: a pair's. */
constexpr int STAGES = 2, BLOCKS = 2, TABLE = 64, SM_BYTES = 228 * 1024;

struct params {
  k_attn_decode a;
  float score_scale;
  int gqa; /* heads of a KV head's group */
};

template <int D, bool FP4, int PAIRS> struct map {
  static constexpr int RING = 512, QUERIES = RING + PAIRS * STAGES * TILE<D, FP4>, SUMS = QUERIES + QUERY_BYTES<D>,
                       NEW = SUMS + PAIRS * 8 * ROW<D> * 4, VALUE = NEW + 512, POINTERS = VALUE + D * 4,
                       BYTES = POINTERS + PAIRS * TABLE * 8;
  static constexpr bool HOLDS_OPEN = OPEN<D, FP4> <= NEW - SUMS; /* the open slot's keys lie in the merge buffer while pages are read */
  static constexpr bool RING_HOLDS = !HOLDS_OPEN && PAIRS == 1 && OPEN<D, FP4> <= TILE<D, FP4>; /* or in the stage that no page needs */
  static_assert((BYTES + 1024) * (PAIRS_PER_SM / PAIRS) <= SM_BYTES, "each CTA costs 1 KiB more");
};

#if SITS_SM90

/* Fused: queries of the group's heads -> query; where has_new, k of the new token -> nt. scratch: D floats a warp. The next item is fetched
 * before this one is worked on. True: the warp is the one that makes v, which lies in x then. */
template <int D, bool FP4, int PAIRS>
SITS_DEV bool prepare_segment(const params &p, const segment &g, const float2 (&angle)[D / 32], __half *query, float *scratch,
                              new_token *nt, bool has_new, float (&x)[D / 32]) {
  const k_attn_decode &a = p.a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = p.gqa, n = gqa + (has_new ? 2 : 0);
  float next[D / 32] = {};
  if (warp >= n) return false;
  fetch_item<D>(x, a, g.row, g.head, gqa, warp, lane);
  int i = warp;
#pragma unroll 1
  for (; i < min(n, gqa + 1); i += 2 * PAIRS) {
    if (i + 2 * PAIRS < n) fetch_item<D>(next, a, g.row, g.head, gqa, i + 2 * PAIRS, lane);
    prepare_rotated<D, FP4>(x, a, gqa, i, scratch + warp * D, angle, query, nt, lane);
#pragma unroll
    for (int j = 0; j < D / 32; j++) x[j] = next[j];
  }
  return has_new && i == gqa + 1;
}

/* Not fused: the queries of a segment from global memory -> query. */
template <int D> SITS_DEV void place_queries(const params &p, const segment &g, __half *query) {
  const int gqa = p.gqa;
  const __half *from = (const __half *)p.a.q + ((size_t)g.row * p.a.kv.n_heads + g.head * gqa) * D;
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    const int head = (i & 31) >> 2, ch = (i >> 5) * 32 + (i & 3) * 4;
    if (head >= gqa) continue;
    const uint2 lo = __ldcg((const uint2 *)(from + head * D + ch)), hi = __ldcg((const uint2 *)(from + head * D + ch + 16));
    *(uint4 *)(query + i * 8) = make_uint4(lo.x, lo.y, hi.x, hi.y);
  }
}

/* The own group's keys on their way to the L2; where they lie. A warp. */
template <int D, bool FP4> SITS_DEV void expect_own_keys(const k_kv_view &kv, const segment &g, __half **pointer, int lane) {
  __half *open = open_of(kv, g);
  if (lane == 0) *pointer = open;
  for (int i = lane; i < OPEN<D, FP4> / 128; i += 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(open + i * 64));
}

/* The new token's key -> its slot. A warp. */
template <int D, bool FP4> SITS_DEV void store_key(__half *open, const new_token *nt, int token, int lane) {
#pragma unroll
  for (int w = 0; w < D / 64; w++) {
    const int d = 2 * (lane + w * 32);
    *(uint32_t *)(open + kv::open_at(D, token % OPEN_TOKENS<FP4>, d)) = *(const uint32_t *)(nt->k + d);
  }
}

/* Fragments of the own group's keys, in global or in shared memory; nt, if any, brings the key of the token
 * that is row new_row of the warp's blocks. */
template <int D, bool IS_SHARED, bool MAY_BE> struct own_keys {
  static constexpr bool ARE_FAR = !IS_SHARED && !MAY_BE;
  const __half *at; /* this lane's, of the warp's first block */
  uint32_t shared;  /* the same; MAY_BE: 0 where they are in global memory */
  const new_token *nt;
  int new_row;
  SITS_DEV uint4 fetch(int step, int block) const {
    return IS_SHARED || (MAY_BE && shared != 0) ? lds128(shared + (block * 16 * D + step * 256) * 2)
                                                : __ldcg((const uint4 *)(at + block * 16 * D + step * 256));
  }
  SITS_DEV void patch(uint4 &v, int step, int block) const {
    const int lane = threadIdx.x & 31;
    if (!nt || new_row >> 4 != block || (new_row & 7) != lane >> 2) return;
    const uint2 k = *(const uint2 *)(nt->k + step * 16 + 4 * (lane & 3));
    if (new_row & 8)
      v.y = k.x, v.w = k.y;
    else
      v.x = k.x, v.z = k.y;
  }
  SITS_DEV uint4 patched(uint4 v, int step, int block) const {
    patch(v, step, block);
    return v;
  }
};
/* None are needed. */
struct no_keys {
  static constexpr bool ARE_FAR = false;
  SITS_DEV uint4 fetch(int, int) const { return uint4(); }
  SITS_DEV uint4 patched(uint4 v, int, int) const { return v; }
};

/* The blocks of an open slot that hold tokens, on their way into shared memory; one lane. */
template <int D, bool FP4> SITS_DEV void bring_own_keys(uint32_t to, const __half *open, int len, uint32_t bar) {
  const int bytes = ((len - 1) % OPEN_TOKENS<FP4> / 16 + 1) * 16 * D * 2;
  bar_arrive_expect(bar, bytes);
  bulk_load(to, open, bytes, bar);
}

/* Copies of a pair's tiles: units first, first + PAIRS, ... of its CTA's run. Its first warp looks them up. */
struct loader {
  uint32_t full, ring;
  size_t *pointers; /* [TABLE] of the tiles, the lowest bit: the segment's last */
  int first, end;
};
template <int PAIRS> SITS_DEV void look_up(const loader &l, const k_kv_view &kv, segment g, int i, int lane) { /* i .. i + 31, from g on */
  const int u = l.first + (i + lane) * PAIRS;
  if (u < l.end) {
    while (u >= g.first_unit + g.n_units) next_segment(kv, g);
    l.pointers[(i + lane) % TABLE] = (size_t)tile_of(kv, g, u) | (u == g.first_unit + g.n_units - 1);
  }
  __syncwarp();
}
template <int T> SITS_DEV void bring(const loader &l, int i) { /* one lane */
  const int stage = i % STAGES;
  bar_arrive_expect(l.full + stage * 8, T);
  bulk_load(l.ring + stage * T, (const void *)(l.pointers[i % TABLE] & ~(size_t)1), T, l.full + stage * 8);
}
/* A warp has read its part of a stage; one lane. True: it is the second of its pair, and may have the stage filled again. */
SITS_DEV bool leave(uint32_t counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(counter) : "memory");
  return before & 1;
}

#endif

template <int D, bool FUSED, bool FP4, int PAIRS> __global__ void __launch_bounds__(64 * PAIRS, PAIRS_PER_SM / PAIRS)
    attn_decode_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = map<D, FP4, PAIRS>;
  constexpr int T = TILE<D, FP4>;
  /* A pair's tiles on their way before queries are made, which more would hold up; fp4, bound by its pages, wants them all. */
  constexpr int EARLY = FUSED && !FP4 ? 1 : STAGES;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &view = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = warp >> 1, half = warp & 1, block0 = half * BLOCKS;
  const uint32_t base = smem_addr(smem), full = base + pair * 32, left = full + 8 * STAGES, ring = base + C::RING + pair * (STAGES * T);
  const uint32_t open_full = base + 304, queries = base + 312, value = base + 320;
  int *flag = (int *)(smem + 256);
  volatile int *parity = (volatile int *)(smem + 336); /* of a segment's barriers; of those that only its last part waits for */
  segment *shared_segment = (segment *)(smem + 264); /* kept out of registers in the page loop, like the next */
  share *shared_share = (share *)(smem + 352);
  __half **open_pointer = (__half **)(smem + 328);
  float *sums = (float *)(smem + C::SUMS);
  __half *query = (__half *)(smem + C::QUERIES);
  new_token *nt = (new_token *)(smem + C::NEW);
  const share mine = read_share(p.a, blockIdx.x); /* a step input, as lengths and tables are */
  if (lane == 0 && half == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(full + i * 8, 1), sts32(left + i * 4, 0);
    if (warp == 0) parity[0] = parity[1] = 0, bar_init(open_full, 1), bar_init(queries, 2 * PAIRS), bar_init(value, 1);
    bar_fence_init();
  }
  __syncthreads();
  const int begin = mine.begin, end = mine.end, first = begin + pair;
  if (begin == end) {
    grid_wait();
    return;
  }
  if (threadIdx.x == 0) *shared_share = mine;
  segment g = first_segment(view, mine);
  const loader l = {full, ring, (size_t *)(smem + C::POINTERS) + pair * TABLE, first, end};
  int brought = 0;
  if (half == 0) {
    look_up<PAIRS>(l, view, g, 0, lane);
    for (; brought < EARLY && first + brought * PAIRS < end && (FUSED || !(l.pointers[brought] & 1)); brought++)
      if (lane == 0) bring<T>(l, brought);
    look_up<PAIRS>(l, view, g, 32, lane);
  } else if (warp == 1 && g.first_unit + g.n_units <= end)
    expect_own_keys<D, FP4>(view, g, open_pointer, lane);
  for (int i = threadIdx.x; i < 4 * D; i += 64 * PAIRS) ((uint32_t *)query)[i] = 0; /* rows of heads the group does not have */
  float2 angle[D / 32];
  if (FUSED) kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
  __syncthreads();
  grid_wait();
  if (!FUSED && half == 0)
    for (; brought < STAGES && first + brought * PAIRS < end; brought++)
      if (lane == 0) bring<T>(l, brought);
  for (int u = begin; u < end;) {
    const int last_unit = g.first_unit + g.n_units - 1, stop = min(end, last_unit + 1);
    if (warp == 1 && u > begin && last_unit < end) expect_own_keys<D, FP4>(view, g, open_pointer, lane);
    if (threadIdx.x == 0) *shared_segment = g;
    if (FUSED) {
      float x[D / 32];
      const bool makes_v = prepare_segment<D, FP4, PAIRS>(p, g, angle, query, sums, nt, last_unit < end, x);
      if (C::HOLDS_OPEN) asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* behind it, a copy may take the scratch's place */
      __syncwarp();
      if (lane == 0) bar_arrive(queries);
      if (makes_v) { /* the others need not wait for it */
        prepare_value<D, FP4>(x, (float *)(smem + C::VALUE), nt, lane);
        if (lane == 0) bar_arrive(value);
      }
      if (lane == 0 && half == 0 && u == begin)
        for (int k = EARLY; k < STAGES && first + k * PAIRS < end; k++) bring<T>(l, k);
      bar_wait(queries, parity[0]);
    } else {
      place_queries<D>(p, g, query);
      if (C::HOLDS_OPEN) asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the same of the segment before and its sums */
      __syncthreads();
    }
    const bool has_open = C::HOLDS_OPEN && last_unit < end;
    if (has_open && threadIdx.x == 32) bring_own_keys<D, FP4>(base + C::SUMS, *open_pointer, g.len, open_full);
    const volatile segment *vs = shared_segment;
    if (C::RING_HOLDS && end - begin == 1 && last_unit < end && threadIdx.x == 32)
      bring_own_keys<D, FP4>(ring + T, *open_pointer, g.len, full + 8);
    state<D> st = {};
    st.m0 = st.m1 = -1e30f;
    int i = (u - begin - pair + PAIRS - 1) / PAIRS; /* of the pair's units, the one at hand */
    const int token0 = (vs->first_page + first + i * PAIRS - vs->first_unit) * K_PAGE_TOKENS;
    int lo = vs->lo - token0, len = vs->len - token0; /* in the page at hand */
    for (; first + i * PAIRS < stop; i++, lo -= PAIRS * K_PAGE_TOKENS, len -= PAIRS * K_PAGE_TOKENS) {
      const int unit = first + i * PAIRS, stage = i % STAGES;
      const uint32_t tile = ring + stage * T;
      if (half == 0 && i > 0 && i % 32 == 0) look_up<PAIRS>(l, view, *shared_segment, i + 32, lane);
      bar_wait(full + stage * 8, i / STAGES & 1);
      const bool is_last = unit == vs->first_unit + vs->n_units - 1, has_new = FUSED && is_last && (len - 1) >> 5 == half;
      const int own = is_last ? (len - 1) / OPEN_TOKENS<FP4> * OPEN_TOKENS<FP4> : K_PAGE_TOKENS;
      if (has_new) {
        store_key<D, FP4>(*open_pointer, nt, len - 1, lane);
        bar_wait(value, parity[1]);
        patch_value<D, FP4>(tile, (uint8_t *)(l.pointers[i % TABLE] & ~(size_t)1), nt, len - 1, lane);
      }
      if (!is_last && lo <= 0)
        attend_page<D, FP4, BLOCKS, true>(st, smem_addr(query), tile, block0, lane, lo, len, own, p.score_scale,
                                          no_keys(), [] {});
      else {
        if (C::HOLDS_OPEN && is_last) bar_wait(open_full, parity[1]);
        const int at = (block0 * 16 - own) * D + lane * 8; /* in the open slot */
        uint32_t shared = C::HOLDS_OPEN ? base + (uint32_t)(C::SUMS + at * 2) : 0;
        if (C::RING_HOLDS && is_last && unit == end - 1 && (i == 0 || vs->n_units > 1) && block0 * 16 >= own) {
          bar_wait(full + (i + 1) % STAGES * 8, (i + 1) / STAGES & 1);
          shared = ring + (i + 1) % STAGES * T + at * 2;
        }
        const own_keys<D, C::HOLDS_OPEN, C::RING_HOLDS> keys = {C::HOLDS_OPEN ? NULL : *open_pointer + at, shared, has_new ? nt : NULL,
                                                                (len - 1) & 31};
        attend_page<D, FP4, BLOCKS, false>(st, smem_addr(query), tile, block0, lane, lo, len, own, p.score_scale, keys, [] {});
      }
      __syncwarp();
      if (lane == 0 && leave(left + stage * 4)) {
        if (unit + STAGES * PAIRS < end)
          bring<T>(l, i + STAGES);
        else if (C::RING_HOLDS && unit == end - 2 && vs->first_unit + vs->n_units == end)
          bring_own_keys<D, FP4>(tile, *open_pointer, vs->len, full + stage * 8);
      }
    }
    if (has_open) __syncthreads(); /* its keys are read */
    /* up to four heads of each warp side by side, else the second warp of a pair adds to what the first one left */
    const int rows = p.gqa <= 4 ? 4 : 8;
    if (rows == 4 || half == 1) spill_state<D, FP4, false>(st, sums + (rows == 4 ? warp * 4 : pair * 8) * ROW<D>, rows, lane);
    __syncthreads();
    if (rows == 8) {
      if (half == 0) spill_state<D, FP4, true>(st, sums + pair * 8 * ROW<D>, 8, lane);
      __syncthreads();
    }
    flush_segment<D, 2 * PAIRS, PAIRS>(p.a, p.gqa, *shared_segment, *shared_share, sums, rows, flag, u == begin, [] { __syncthreads(); });
    u = stop;
    if (u == end) break;
    if (threadIdx.x == 0) parity[0] ^= 1, parity[1] ^= last_unit < end;
    next_segment(view, g = *shared_segment);
    if (FUSED) kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
    __syncthreads();
  }
#endif
}

template <int D, bool FUSED, bool FP4, int PAIRS> int launch_pairs(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const params p = {a, score_scale<FP4>(D), a.kv.n_heads / a.kv.n_kv_heads};
  return launch_kernel(attn_decode_kernel<D, FUSED, FP4, PAIRS>, dim3(n_sm * PAIRS_PER_SM / PAIRS), dim3(64 * PAIRS),
                       map<D, FP4, PAIRS>::BYTES, (cudaStream_t)at.stream, at.pdl, p);
}

template <int D, bool FUSED, bool FP4> int launch_decode(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const int pairs = pairs_of(n_sm, a.kv.n_seqs, a.kv.n_kv_heads);
  if (pairs == 8) return launch_pairs<D, FUSED, FP4, 8>(a, n_sm, at);
  if (pairs == 4) return launch_pairs<D, FUSED, FP4, 4>(a, n_sm, at);
  return pairs == 2 ? launch_pairs<D, FUSED, FP4, 2>(a, n_sm, at) : launch_pairs<D, FUSED, FP4, 1>(a, n_sm, at);
}

template <int D, bool FUSED, bool FP4> int prepare_pairs(void) {
  int e = prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 1>, map<D, FP4, 1>::BYTES);
  if (!e) e = prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 2>, map<D, FP4, 2>::BYTES);
  if (!e) e = prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 4>, map<D, FP4, 4>::BYTES);
  return e ? e : prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 8>, map<D, FP4, 8>::BYTES);
}

template <int D, bool FP4> int prepare_decode(void) {
  const int e = prepare_pairs<D, true, FP4>();
  return e ? e : prepare_pairs<D, false, FP4>();
}

template <int D, bool FP4> int launch_head_size(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  return a.q ? launch_decode<D, false, FP4>(a, n_sm, at) : launch_decode<D, true, FP4>(a, n_sm, at);
}

} // namespace

extern "C" bool k_attn_decode_takes(enum k_kv_codec codec, int32_t head_dim, int32_t n_heads, int32_t n_kv_heads) {
  return k_kv_has_nibbles(codec) && k_kv_has_fragments(head_dim) && n_heads % n_kv_heads == 0 && n_heads / n_kv_heads <= K_MAX_GQA;
}

extern "C" size_t k_attn_decode_workspace_bytes(int32_t n_sm, int32_t head_dim) {
  return (size_t)n_sm * PAIRS_PER_SM * 2 * 8 * (head_dim + 4) * sizeof(float);
}

extern "C" int sits_k_attn_decode_init(void) {
  int e = sits_k_attn_cut_init();
  if (!e) e = prepare_decode<64, false>();
  if (!e) e = prepare_decode<64, true>();
  if (!e) e = prepare_decode<128, false>();
  return e ? e : prepare_decode<128, true>();
}

extern "C" int sits_k_attn_decode(const struct k_attn_decode *a, int32_t n_sm, struct k_stream at) {
  const k_kv_view &v = a->kv;
  const bool is_fp4 = v.codec == K_KV_FP4;
  if (!k_attn_decode_takes(v.codec, v.head_dim, v.n_heads, v.n_kv_heads) || v.n_seqs < 1 || v.n_seqs > K_MAX_DECODE_SEQS || !a->cut)
    return cudaErrorInvalidValue;
  if (v.head_dim == 64) return is_fp4 ? launch_head_size<64, true>(*a, n_sm, at) : launch_head_size<64, false>(*a, n_sm, at);
  return is_fp4 ? launch_head_size<128, true>(*a, n_sm, at) : launch_head_size<128, false>(*a, n_sm, at);
}
