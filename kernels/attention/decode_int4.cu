/* out[s][h] = softmax(q . K / sqrt(D)) V for one new token per sequence over int4 or fp4 pages. A sequence's tokens are 0 .. kv_len-1,
 * the last one being the new token. Fused form (q = NULL): rotation of q and k, quantisation of v and append of both included; else q is
 * rotated already and the token appended (sits_k_rope_append). Few sequences that are not long: decode_few.cu; what both share:
 * decode_pages.cuh.
 *
 * Arguments: struct k_attn_decode (kernels.h). qkv by the previous kernel; pages by earlier steps.
 * Work split: a CTA is a pair of warps, eight of them an SM; each warp takes 32 of a page's 64 tokens. The unit is one page of one KV
 *   head (D = 128: 9,216 bytes, one bulk copy); the pages of a (sequence, head) are a segment. Where there are fewer segments than CTAs,
 *   segments are cut into parts of at most q pages, a CTA takes one part (q as small as fits); else units in the order sequence, head,
 *   page are cut into equal runs. The cut is computed by every CTA from kv_len, so one captured grid serves all lengths.
 * Shared memory: barriers 128, ring of two tiles (18 KiB at D = 128), queries 2 KiB, merge buffer 8 * (D+4) * 4 (4.1 KiB), new token 1 KiB,
 *   addresses of tiles 512, prefix sums 8 (S+2): 27 KiB, so eight CTAs an SM up to 128 sequences, at 128 registers.
 * Pipeline: warp 0 brings the tiles, and looks up 32 of their addresses at a time, a lane each; a stage is filled again when both warps
 *   have left it, which is looked at before a page's scores and waited for behind them. The first copies start before the grid dependency
 *   opens (pages of earlier steps do not depend on it; not fused, a sequence's last page waits for the append). Fused, the new token never
 *   travels through global memory here: the warp that owns its block patches the tile and the fragments of the slot's keys, and stores the
 *   same words to page and slot.
 * Numerics: decode_pages.cuh; parts are merged in CTA order by the last to arrive, so results do not depend on timing. Tolerance against
 *   the f64 twin 2e-3 of the norm.
 * Limits: D 64 or 128, H/G <= 8, S <= 1024, sm_90; anything else goes to attn_any.
 * Cost: 72 D (int4) or 74 D (fp4) bytes per page and head, 64 D or 128 D for the open slot; bound by device memory and the length of a
 *   warp's instruction chain.
 * History: a separate merge kernel cost 3 us a layer. Keys in groups of 32 channels of a token needed no slot and no products for zero
 *   points, and cost 5 % of perplexity. Three CTAs of four warps and a loader: a third of the warps' time went into what happens once a
 *   segment (barriers of four warps, fences of the device by all threads), a fifth of the page loop into waiting for tiles. Eight warps and
 *   a loader a CTA: nine warps, twice, leave 96 registers (a quarter of the SM holds five of them), which spills: 68 us for 52.
 * Links: twin ref_attention (tests/gpu/test_attention.c), test tests/gpu/test_attention.c, bench sits2026-bench kernels.
 */
#include "attention/decode_split.cuh"

namespace {

using namespace decode;

/* PAIRS: of warps a CTA, 1, 2, 4 or 8; STAGES and TABLE: a pair's. */
constexpr int PAIRS_PER_SM = 8, STAGES = 2, BLOCKS = 2, TABLE = 64, MAX_SEQS = K_MAX_DECODE_SEQS, SM_BYTES = 228 * 1024;

struct params {
  k_attn_decode a;
  float score_scale;
};

template <int D, bool FP4, int PAIRS> struct map {
  static constexpr int RING = 384, QUERIES = RING + PAIRS * STAGES * TILE<D, FP4>, SUMS = QUERIES + QUERY_BYTES<D>,
                       NEW = SUMS + PAIRS * 8 * ROW<D> * 4, POINTERS = NEW + 512, PREFIX = POINTERS + PAIRS * TABLE * 8;
  static int bytes(int n_seqs) { return PREFIX + (2 * n_seqs + 4) * 4; }
};

#if SITS_SM90

/* Fused: queries of the group's heads -> query; where has_new, k and v of the new token -> nt. scratch: D floats a warp. */
template <int D, bool FP4, int PAIRS>
SITS_DEV void prepare_segment(const params &p, const segment &g, __half *query, float *scratch, new_token *nt, bool has_new) {
  constexpr int AHEAD = PAIRS <= 2 ? 2 : 1; /* items of a warp that are fetched together */
  const k_attn_decode &a = p.a;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = a.kv.n_heads / a.kv.n_kv_heads + (has_new ? 2 : 0);
  for (int base = warp; base < n; base += 2 * PAIRS * AHEAD) {
    float x[AHEAD][D / 32];
    float2 angle[D / 32];
#pragma unroll
    for (int c = 0; c < AHEAD; c++)
      if (base + 2 * PAIRS * c < n) fetch_item<D>(x[c], a, g.row, g.head, base + 2 * PAIRS * c, lane);
    kv::head_angles<D>(a.rope, g.len - 1, lane, angle);
#pragma unroll
    for (int c = 0; c < AHEAD; c++)
      if (base + 2 * PAIRS * c < n)
        prepare_item<D, FP4>(x[c], a, base + 2 * PAIRS * c, scratch + warp * D, angle, query, nt, lane);
  }
}

/* Not fused: the queries of a segment from global memory -> query. */
template <int D> SITS_DEV void place_queries(const params &p, const segment &g, __half *query) {
  const int gqa = p.a.kv.n_heads / p.a.kv.n_kv_heads;
  const __half *from = (const __half *)p.a.q + ((size_t)g.row * p.a.kv.n_heads + g.head * gqa) * D;
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    const int head = (i & 31) >> 2, ch = (i >> 5) * 32 + (i & 3) * 4;
    if (head >= gqa) continue;
    const uint2 lo = __ldcg((const uint2 *)(from + head * D + ch)), hi = __ldcg((const uint2 *)(from + head * D + ch + 16));
    *(uint4 *)(query + i * 8) = make_uint4(lo.x, lo.y, hi.x, hi.y);
  }
}

/* The own group's keys on their way to the L2. A warp. */
template <int D, bool FP4> SITS_DEV void expect_own_keys(const __half *open, int lane) {
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

/* Fragments of the own group's keys in global memory; nt, if any, brings the key of the token that is row new_row of the warp's blocks. */
template <int D> struct own_keys {
  const __half *at; /* this lane's, of the warp's first block */
  const new_token *nt;
  int new_row;
  SITS_DEV uint4 operator()(int step, int block) const {
    const int lane = threadIdx.x & 31;
    uint4 v = __ldcg((const uint4 *)(at + block * 16 * D + step * 256));
    if (nt && new_row >> 4 == block && (new_row & 7) == lane >> 2) {
      const uint2 k = *(const uint2 *)(nt->k + step * 16 + 4 * (lane & 3));
      if (new_row & 8)
        v.y = k.x, v.w = k.y;
      else
        v.x = k.x, v.z = k.y;
    }
    return v;
  }
};

/* Copies of a pair's tiles: units first, first + PAIRS, ... of its CTA's run. Its first warp. */
struct loader {
  uint32_t full, empty, ring;
  size_t *pointers; /* [TABLE] of the tiles, the lowest bit: the segment's last */
  int first, end;
};
template <int PAIRS> SITS_DEV void look_up(const loader &l, const k_kv_view &kv, const int *prefix, int i, int lane) { /* i .. i + 31 */
  const int u = l.first + (i + lane) * PAIRS;
  if (u < l.end) {
    const segment g = find_segment(kv, prefix, u);
    l.pointers[(i + lane) % TABLE] = (size_t)tile_of(kv, g, u) | (u == g.first_unit + g.n_units - 1);
  }
  __syncwarp();
}
template <int T> SITS_DEV void bring(const loader &l, int i) { /* one lane */
  const int stage = i % STAGES;
  bar_arrive_expect(l.full + stage * 8, T);
  bulk_load(l.ring + stage * T, (const void *)(l.pointers[i % TABLE] & ~(size_t)1), T, l.full + stage * 8);
}

#endif

template <int D, bool FUSED, bool FP4, int PAIRS> __global__ void __launch_bounds__(64 * PAIRS, PAIRS_PER_SM / PAIRS)
    attn_decode_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = map<D, FP4, PAIRS>;
  constexpr int T = TILE<D, FP4>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &view = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = warp >> 1, half = warp & 1, block0 = half * BLOCKS;
  const uint32_t base = smem_addr(smem), full = base + pair * 32, empty = full + 8 * STAGES, ring = base + C::RING + pair * (STAGES * T);
  int *flag = (int *)(smem + 256), *prefix = (int *)(smem + C::PREFIX);
  segment *shared_segment = (segment *)(smem + 264); /* kept out of registers in the page loop */
  float *sums = (float *)(smem + C::SUMS);
  __half *query = (__half *)(smem + C::QUERIES);
  new_token *nt = (new_token *)(smem + C::NEW);
  if (lane == 0 && half == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, 2);
    bar_fence_init();
  }
  if (warp == 0) scan_units(view, prefix, gridDim.x);
  for (int i = threadIdx.x; i < 4 * D; i += 64 * PAIRS) ((uint32_t *)query)[i] = 0; /* rows of heads the group does not have */
  __syncthreads();
  const int n_ctas = min((int)gridDim.x, prefix[view.n_seqs]);
  share mine;
  if ((int)blockIdx.x >= n_ctas || !find_share(view, prefix, blockIdx.x, n_ctas, &mine)) {
    grid_wait();
    return;
  }
  const int begin = mine.begin, end = mine.end, first = begin + pair;
  const loader l = {full, empty, ring, (size_t *)(smem + C::POINTERS) + pair * TABLE, first, end};
  int brought = 0;
  if (half == 0) {
    look_up<PAIRS>(l, view, prefix, 0, lane), look_up<PAIRS>(l, view, prefix, 32, lane);
    for (; brought < STAGES && first + brought * PAIRS < end && (FUSED || !(l.pointers[brought] & 1)); brought++)
      if (lane == 0) bring<T>(l, brought);
  }
  if (warp == 1) {
    const segment g = find_segment(view, prefix, begin);
    if (g.first_unit + g.n_units <= end) expect_own_keys<D, FP4>(open_of(view, g), lane);
  }
  grid_wait();
  if (half == 0)
    for (; brought < STAGES && first + brought * PAIRS < end; brought++)
      if (lane == 0) bring<T>(l, brought);
  for (int u = begin; u < end;) {
    const segment g = find_segment(view, prefix, u);
    const int last_unit = g.first_unit + g.n_units - 1, stop = min(end, last_unit + 1);
    if (warp == 1 && u > begin && last_unit < end) expect_own_keys<D, FP4>(open_of(view, g), lane);
    if (FUSED)
      prepare_segment<D, FP4, PAIRS>(p, g, query, sums, nt, last_unit < end);
    else
      place_queries<D>(p, g, query);
    if (threadIdx.x == 0) *shared_segment = g;
    __syncthreads();
    const volatile segment *vs = shared_segment;
    state<D> st = {};
    st.m0 = st.m1 = -1e30f;
    int i = (u - begin - pair + PAIRS - 1) / PAIRS; /* of the pair's units, the one at hand */
    const int token0 = (vs->first_page + first + i * PAIRS - vs->first_unit) * K_PAGE_TOKENS;
    int lo = vs->lo - token0, len = vs->len - token0; /* in the page at hand */
    for (; first + i * PAIRS < stop; i++, lo -= PAIRS * K_PAGE_TOKENS, len -= PAIRS * K_PAGE_TOKENS) {
      const int unit = first + i * PAIRS, stage = i % STAGES;
      const uint32_t tile = ring + stage * T;
      bool brings = half == 0 && i > 0 && unit + PAIRS < end; /* the next tile, in place of the one before this */
      if (brings && i % 32 == 0) look_up<PAIRS>(l, view, prefix, i + 32, lane);
      auto bring_next = [&](bool waits) {
        if (!brings) return;
        const uint32_t left = empty + (stage ^ 1) * 8, parity = (i - 1) / STAGES & 1;
        if (waits)
          bar_wait(left, parity);
        else if (!bar_test(left, parity))
          return;
        if (lane == 0) bring<T>(l, i + 1);
        brings = false;
      };
      bring_next(false);
      bar_wait(full + stage * 8, i / STAGES & 1);
      const bool is_last = unit == vs->first_unit + vs->n_units - 1, has_new = FUSED && is_last && (len - 1) >> 5 == half;
      const int own = is_last ? (len - 1) / OPEN_TOKENS<FP4> * OPEN_TOKENS<FP4> : K_PAGE_TOKENS;
      if (has_new) {
        store_key<D, FP4>(open_of(view, *shared_segment), nt, len - 1, lane);
        patch_value<D, FP4>(tile, tile_of(view, *shared_segment, unit), nt, len - 1, lane);
      }
      if (!is_last && lo <= 0)
        attend_page<D, FP4, BLOCKS, true>(st, smem_addr(query), tile, block0, lane, lo, len, own, p.score_scale,
                                          [](int, int) { return uint4(); }, [&] { bring_next(true); });
      else {
        const own_keys<D> keys = {open_of(view, *shared_segment) + (block0 * 16 - own) * D + lane * 8, has_new ? nt : NULL, (len - 1) & 31};
        attend_page<D, FP4, BLOCKS, false>(st, smem_addr(query), tile, block0, lane, lo, len, own, p.score_scale, keys,
                                           [&] { bring_next(true); });
      }
      __syncwarp();
      if (lane == 0) bar_arrive(empty + stage * 8);
    }
    if (half == 1) spill_state<D, FP4, false>(st, sums, pair, lane);
    __syncthreads();
    if (half == 0) spill_state<D, FP4, true>(st, sums, pair, lane);
    __syncthreads();
    flush_segment<D, 2 * PAIRS, PAIRS>(p.a, *shared_segment, prefix, sums, flag, n_ctas, u == begin, [] { __syncthreads(); });
    u = stop;
    if (u < end) __syncthreads();
  }
#endif
}

template <int D, bool FUSED, bool FP4, int PAIRS> int launch_pairs(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const params p = {a, score_scale<FP4>(D)};
  const int bytes = map<D, FP4, PAIRS>::bytes(a.kv.n_seqs), fit = SM_BYTES / (bytes + 1024); /* each CTA costs 1 KiB more */
  return launch_kernel(attn_decode_kernel<D, FUSED, FP4, PAIRS>, dim3(n_sm * (fit * PAIRS < PAIRS_PER_SM ? fit : PAIRS_PER_SM / PAIRS)),
                       dim3(64 * PAIRS), bytes, (cudaStream_t)at.stream, at.pdl, p);
}

/* As few and large CTAs as there are sequences and KV heads: parts of one that meet in memory cost more than pairs that meet in a CTA. */
template <int D, bool FUSED, bool FP4> int launch_decode(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const int32_t segments = a.kv.n_seqs * a.kv.n_kv_heads;
  if (segments <= n_sm) return launch_pairs<D, FUSED, FP4, 8>(a, n_sm, at);
  if (segments <= 2 * n_sm) return launch_pairs<D, FUSED, FP4, 4>(a, n_sm, at);
  if (segments <= 4 * n_sm) return launch_pairs<D, FUSED, FP4, 2>(a, n_sm, at);
  return launch_pairs<D, FUSED, FP4, 1>(a, n_sm, at);
}

template <int D, bool FUSED, bool FP4> int prepare_pairs(void) {
  int e = prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 1>, map<D, FP4, 1>::bytes(MAX_SEQS));
  if (!e) e = prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 2>, map<D, FP4, 2>::bytes(MAX_SEQS));
  if (!e) e = prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 4>, map<D, FP4, 4>::bytes(MAX_SEQS));
  return e ? e : prepare_kernel(attn_decode_kernel<D, FUSED, FP4, 8>, map<D, FP4, 8>::bytes(MAX_SEQS));
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
  int e = prepare_decode<64, false>();
  if (!e) e = prepare_decode<64, true>();
  if (!e) e = prepare_decode<128, false>();
  return e ? e : prepare_decode<128, true>();
}

extern "C" int sits_k_attn_decode(const struct k_attn_decode *a, int32_t n_sm, struct k_stream at) {
  const k_kv_view &v = a->kv;
  const bool is_fp4 = v.codec == K_KV_FP4;
  if (!k_attn_decode_takes(v.codec, v.head_dim, v.n_heads, v.n_kv_heads) || v.n_seqs < 1 || v.n_seqs > MAX_SEQS)
    return cudaErrorInvalidValue;
  if (v.head_dim == 64) return is_fp4 ? launch_head_size<64, true>(*a, n_sm, at) : launch_head_size<64, false>(*a, n_sm, at);
  return is_fp4 ? launch_head_size<128, true>(*a, n_sm, at) : launch_head_size<128, false>(*a, n_sm, at);
}
