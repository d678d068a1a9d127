/* out[t][h] = softmax(q . K / sqrt(D)) V over fp4 pages of which sequences may have lost blocks, for steps of any kind; and what each
 * block got of its queries, as squares of attention (kv/kv_sparse.h). Also copies of blocks.
 *
 * Arguments: struct k_attn_sparse (kernels.h). Tokens are rotated, appended and folded by earlier kernels of the step.
 * Work split: the 8 columns of a product are up to 8 / (H/G) neighbouring tokens of a sequence, of one page, times the query heads of a
 *   KV head. A CTA of eight warps takes such a group of columns at a time; its warps take the blocks that are left in turns, a whole page
 *   of 64 tokens each, and put their sums together at the end. The grid is fixed (two CTAs an SM), CTAs walk over tokens and heads; an odd
 *   number of CTAs a head, so that tokens that begin a group come to all of them.
 * Shared memory: barriers, sums' factors, this group and the next 256, queries 2 KiB, a tile a warp (9,472 bytes at D = 128), where the
 *   warps' sums lie afterwards: 78 KiB, two CTAs an SM at 128 registers.
 * Pipeline: a warp's next keys are asked for once the scores of a page are there, its next values behind the page's values: copies of one
 *   half run while the other is worked on. Own keys (the page that the queries lie in) come in f16 from the slot, or from `fresh` where
 *   the page begins in the step.
 * Measuring: each page's squares beside the warp's reference, as log2, go to the workspace, eight numbers a page; when the sum of all is
 *   known they are weighed, rounded to whole units for each token and head, and added. Whole numbers: the order changes nothing.
 * Numerics: decode_pages.cuh. Tolerance of the output 2e-3 of the norm, of what is given 1e-3 and a unit for each token and head.
 * Limits: fp4, D 64 or 128, H/G <= 8, sm_90; anything else goes to attn_any.
 * Cost: 74 D bytes per block, from L2 for all but the first group of columns of a sequence.
 * Links: twin ref_attend_blocks (tests/ref/ref_sparse.h), test tests/gpu/test_sparse.c.
 */
#include "attention/decode_pages.cuh"
#include "common/kv_blocks.cuh"

namespace {

using namespace decode;

constexpr int WARPS = 8, THREADS = 32 * WARPS, CTAS_PER_SM = 2, COLUMNS = 8, BLOCKS = K_PAGE_TOKENS / 16;

struct params {
  k_attn_sparse a;
  k_attn_decode out; /* what store_head reads */
  float score_scale;
  int each;          /* tokens of a group of columns */
};

template <int D> struct map {
  static constexpr int FACTORS = WARPS * 16, GROUPS = FACTORS + COLUMNS * 4, QUERIES = 256, RING = QUERIES + QUERY_BYTES<D>,
                       BYTES = RING + WARPS * TILE<D, true>;
  static_assert(GROUPS + 2 * 36 <= QUERIES, "two groups fit");
  static_assert(WARPS * COLUMNS * ROW<D> * 4 <= WARPS * TILE<D, true>, "the sums fit the tiles' place");
};

/* CTAs of a KV head: an odd number. */
int32_t ctas_each(int32_t n_sm, int32_t n_kv_heads) {
  const int32_t n = CTAS_PER_SM * n_sm / n_kv_heads;
  return n < 1 ? 1 : (n - 1) | 1;
}

#if SITS_SM90

/* Up to `each` tokens from t0 on, of one page, times the query heads of a KV head. */
struct group {
  int seq, row0, t0, n, position, head, own, first, measured; /* own: their page; first: first page seen; entries < measured are measured */
};

/* False: token t begins no group. Step inputs only. */
SITS_DEV bool begins_group(const params &p, int t, int head, group *g) {
  const k_kv_view &kv = p.a.kv;
  const int s = kv.token_seq[t], position = kv.positions[t];
  if (s < 0) return false;
  if (position % p.each != 0 && t != kv.seq_start[s]) return false;
  g->seq = s, g->t0 = t, g->head = head, g->position = position;
  g->row0 = p.a.blocks.row0 ? p.a.blocks.row0[s] : -1;
  g->n = min(kv.seq_start[s + 1] - t, p.each - position % p.each);
  g->own = position / K_PAGE_TOKENS;
  g->first = kv.window > 0 ? max(0, position - kv.window + 1) / K_PAGE_TOKENS : 0;
  g->measured = kv::measured_end(p.a.blocks, g->row0, s, position);
  return true;
}

/* The next group from token t on, `step` tokens on at a time; n 0: there is none. A thread. */
SITS_DEV void find_group(const params &p, int t, int step, int head, group *to) {
  group g = {};
  while (t < p.a.kv.n_tokens && !begins_group(p, t, head, &g)) t += step;
  *to = g;
}

template <int D> SITS_DEV void place_queries(const params &p, const group &g, __half *query) {
  const k_kv_view &kv = p.a.kv;
  const int gqa = kv.n_heads / kv.n_kv_heads;
  for (int i = threadIdx.x; i < D; i += THREADS) {
    const int column = (i & 31) >> 2, ch = (i >> 5) * 32 + (i & 3) * 4, token = column / gqa;
    uint2 lo = make_uint2(0, 0), hi = lo;
    if (token < g.n) {
      const __half *from = (const __half *)p.a.q + ((size_t)(g.t0 + token) * kv.n_heads + g.head * gqa + column % gqa) * D + ch;
      lo = __ldcg((const uint2 *)from), hi = __ldcg((const uint2 *)(from + 16));
    }
    *(uint4 *)(query + i * 8) = make_uint4(lo.x, lo.y, hi.x, hi.y);
  }
}

/* Fragments of the own page's keys: all of them in the slot where the page began in an earlier step, else in `fresh`. */
template <int D> struct own_keys {
  static constexpr bool ARE_FAR = false;
  const __half *open, *fresh; /* this lane's; open NULL: fresh, of the page's first token */
  int last;                   /* row of fresh from there, the last there is */
  size_t row;
  SITS_DEV uint4 fetch(int step, int block) const {
    if (open) return __ldcg((const uint4 *)(open + block * 16 * D + step * 256));
    const int g = (threadIdx.x & 31) >> 2, token = block * 16 + g;
    const uint2 x = __ldcg((const uint2 *)(fresh + min(token, last) * row + step * 16));
    const uint2 y = __ldcg((const uint2 *)(fresh + min(token + 8, last) * row + step * 16));
    return make_uint4(x.x, y.x, x.y, y.y);
  }
  SITS_DEV uint4 patched(uint4 v, int, int) const { return v; }
};
template <int D> SITS_DEV own_keys<D> own_keys_of(const k_kv_view &kv, const group &g, int lane) {
  const int begin = kv.seq_start[g.seq], n_new = kv.seq_start[g.seq + 1] - begin, first_new = kv.kv_len[g.seq] - n_new;
  const int own = g.own * K_PAGE_TOKENS;
  own_keys<D> k = {NULL, NULL, 0, (size_t)kv.n_kv_heads * D};
  if (own < first_new)
    k.open = kv::open_tile(kv, kv.open_slot[2 * g.seq], kv.layer, g.head) + lane * 8;
  else {
    const int at = begin + own - first_new;
    k.fresh = (const __half *)kv.fresh + ((size_t)at * kv.n_kv_heads + g.head) * D + 4 * (lane & 3);
    k.last = begin + n_new - 1 - at;
  }
  return k;
}

/* A warp's way through what is left of a group's pages, one in WARPS: 32 entries at a time are looked up, a lane each. */
struct walk {
  int base, count; /* entry of lane 0; blocks found before it */
  uint32_t mine;   /* lanes whose blocks are this warp's, and still to come */
  const uint8_t *tile; /* this lane's entry */
};
struct page { int entry; const uint8_t *tile; }; /* entry < 0: none */

SITS_DEV page next_page(const params &p, const group &g, walk &w, int warp, int lane) {
  while (w.mine == 0) {
    w.base += 32;
    if (w.base > g.own) return {-1, NULL};
    const int entry = w.base + lane;
    w.tile = entry <= g.own ? kv::entry_tile(p.a.kv, p.a.blocks, g.row0, g.seq, entry, g.head) : NULL;
    const uint32_t left = __ballot_sync(~0u, w.tile != NULL);
    w.mine = __ballot_sync(~0u, w.tile != NULL && (w.count + __popc(left & ((1u << lane) - 1))) % WARPS == warp);
    w.count += __popc(left);
  }
  const int from = __ffs(w.mine) - 1;
  w.mine &= w.mine - 1;
  return {w.base + from, (const uint8_t *)__shfl_sync(~0u, (unsigned long long)w.tile, from)};
}

/* Parts of a tile (kv_tile.cuh) to the same places in shared memory; one lane. */
template <int D> SITS_DEV void bring_keys(uint32_t to, const uint8_t *tile, uint32_t bar) {
  bar_arrive_expect(bar, 38 * D);
  bulk_load(to, tile, 32 * D, bar);
  bulk_load(to + 64 * D, tile + 64 * D, 4 * D, bar);
  bulk_load(to + 72 * D, tile + 72 * D, 2 * D, bar);
}
template <int D> SITS_DEV void bring_values(uint32_t to, const uint8_t *tile, uint32_t bar) {
  bar_arrive_expect(bar, 36 * D);
  bulk_load(to + 32 * D, tile + 32 * D, 32 * D, bar);
  bulk_load(to + 68 * D, tile + 68 * D, 4 * D, bar);
}

/* Scores of what a column's token does not see: behind it, or before its window. */
SITS_DEV void hide(float (&sc)[BLOCKS][4], const params &p, const group &g, int entry, int lane) {
  const int gqa = p.a.kv.n_heads / p.a.kv.n_kv_heads, window = p.a.kv.window;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int position = g.position + min((2 * (lane & 3) + e) / gqa, g.n - 1) - entry * K_PAGE_TOKENS; /* in the page */
    const int lo = window > 0 ? position - window + 1 : INT_MIN;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int token = b * 16 + (lane >> 2) + 8 * r;
        if (token > position || token < lo) sc[b][2 * r + e] = -INFINITY;
      }
  }
}

/* log2 of the squares of a page's probabilities, as they are beside 1, for the eight columns. */
template <int D> SITS_DEV void note_squares(const state<D> &st, const float (&sc)[BLOCKS][4], float *to, int lane) {
  float x = 0.f, y = 0.f;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    x = fmaf(sc[b][0], sc[b][0], fmaf(sc[b][2], sc[b][2], x));
    y = fmaf(sc[b][1], sc[b][1], fmaf(sc[b][3], sc[b][3], y));
  }
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x += __shfl_xor_sync(~0u, x, d), y += __shfl_xor_sync(~0u, y, d);
  if (lane < 4) *(float2 *)(to + 2 * lane) = make_float2(__log2f(x) + 2.f * st.m0, __log2f(y) + 2.f * st.m1);
}

/* This warp's pages -> st. parity: of its two barriers. */
template <int D>
SITS_DEV void attend(state<D> &st, const params &p, const group &g, uint32_t query, uint32_t tile, uint32_t bars, uint32_t &parity,
                     float *squares, int warp, int lane) {
  walk w = {g.first - 32, 0, 0, NULL};
  page at = next_page(p, g, w, warp, lane);
  if (lane == 0 && at.entry >= 0) {
    if (at.entry < g.own) bring_keys<D>(tile, at.tile, bars);
    bring_values<D>(tile, at.tile, bars + 8);
  }
  while (at.entry >= 0) {
    const page next = next_page(p, g, w, warp, lane);
    float sc[BLOCKS][4] = {};
    if (at.entry < g.own) {
      bar_wait(bars, parity & 1);
      parity ^= 1;
#pragma unroll
      for (int half = 0; half < 2; half++) /* all at once take too many registers */
        score_fp4<D, BLOCKS / 2>(*(float(*)[BLOCKS / 2][4])sc[half * (BLOCKS / 2)], query, tile, half * (BLOCKS / 2), lane);
    } else
      score_own<D, true, BLOCKS>(sc, query, lane, own_keys_of<D>(p.a.kv, g, lane));
    __syncwarp();
    if (lane == 0 && next.entry >= 0 && next.entry < g.own) bring_keys<D>(tile, next.tile, bars);
    if (at.entry == g.own || p.a.kv.window > 0) hide(sc, p, g, at.entry, lane);
    move_reference<D, true, BLOCKS>(st, sc, p.score_scale);
    uint32_t c0[BLOCKS], c1[BLOCKS];
    weigh<D, BLOCKS>(st, sc, p.score_scale, c0, c1);
    if (at.entry < g.measured) note_squares<D>(st, sc, squares + (size_t)at.entry * COLUMNS, lane);
    bar_wait(bars + 8, parity >> 1);
    parity ^= 2;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) add_values<D, true>(st, tile, b, lane, c0[b], c1[b]);
    __syncwarp();
    if (lane == 0 && next.entry >= 0) bring_values<D>(tile, next.tile, bars + 8);
    at = next;
  }
}

/* The warps' sums of a column -> its output, and log2 of what its squares are divided by. A warp a column. */
template <int D> SITS_DEV void finish_column(const params &p, const group &g, const float *sums, float *factors, int column, int lane) {
  const int gqa = p.a.kv.n_heads / p.a.kv.n_kv_heads, token = column / gqa, col = lane < D / 4 ? lane * 4 : 0;
  float m = -1e30f, l = 0.f;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < WARPS; i++) m = fmaxf(m, sums[(i * COLUMNS + column) * ROW<D> + D]);
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    const float *r = sums + (i * COLUMNS + column) * ROW<D>;
    const float f = exp2_fast(r[D] - m);
    l += r[D + 1] * f;
    add_scaled(v, *(const float4 *)(r + col), f);
  }
  const bool is_there = token < g.n;
  if (lane == 0) factors[column] = is_there ? 2.f * (m + __log2f(l)) : INFINITY;
  if (is_there) store_head<D>(p.out, g.t0 + token, g.head * gqa + column % gqa, v, 1.f / l, lane);
}

/* What the columns gave to blocks; a thread an entry. */
SITS_DEV void give(const params &p, const group &g, const float *squares, const float *factors) {
  for (int entry = g.first + threadIdx.x; entry < g.measured; entry += THREADS) {
    if (!kv::entry_tile(p.a.kv, p.a.blocks, g.row0, g.seq, entry, g.head)) continue;
    const float4 x = __ldcg((const float4 *)(squares + (size_t)entry * COLUMNS));
    const float4 y = __ldcg((const float4 *)(squares + (size_t)entry * COLUMNS + 4));
    const float all[COLUMNS] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    uint32_t units = 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) units += __float2uint_rd(fmaf(exp2_fast(all[c] - factors[c]), K_GIVEN_ONE, 0.5f));
    if (units > 0) atomicAdd(&p.a.blocks.given[kv::block_at(p.a.kv, g.row0, entry, g.head)], (unsigned long long)units);
  }
}

#endif

template <int D> __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attn_sparse_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = map<D>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &kv = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x % kv.n_kv_heads, each = gridDim.x / kv.n_kv_heads;
  const uint32_t bars = smem_addr(smem) + warp * 16, tile = smem_addr(smem) + C::RING + warp * TILE<D, true>;
  group *groups = (group *)(smem + C::GROUPS); /* this one and the next, kept out of registers */
  float *factors = (float *)(smem + C::FACTORS), *sums = (float *)(smem + C::RING);
  float *squares = p.a.workspace + (size_t)blockIdx.x * p.a.max_entries * COLUMNS;
  uint32_t parity = 0;
  if (lane == 0) {
    bar_init(bars, 1), bar_init(bars + 8, 1);
    bar_fence_init();
  }
  if (threadIdx.x == 0) find_group(p, blockIdx.x / kv.n_kv_heads, each, head, groups);
  __syncthreads();
  grid_wait();
  for (int i = 0; groups[i].n > 0; i ^= 1) {
    const group &g = groups[i];
    place_queries<D>(p, g, (__half *)(smem + C::QUERIES));
    __syncthreads();
    state<D> st = {};
    st.m0 = st.m1 = -1e30f;
    attend<D>(st, p, g, smem_addr(smem) + C::QUERIES, tile, bars, parity, squares, warp, lane);
    __syncthreads(); /* all tiles are read */
    spill_state<D, true, false>(st, sums + warp * COLUMNS * ROW<D>, COLUMNS, lane);
    if (threadIdx.x == 0) find_group(p, g.t0 + each, each, head, &groups[i ^ 1]);
    __syncthreads();
    finish_column<D>(p, g, sums, factors, warp, lane);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the next tiles are copied to where the sums lie */
    __syncthreads();
    give(p, g, squares, factors);
  }
#endif
}

template <int D> int launch_sparse(const k_attn_sparse &a, int32_t n_sm, k_stream at) {
  const int gqa = a.kv.n_heads / a.kv.n_kv_heads;
  params p = {a, {}, score_scale<true>(D), 1};
  while (p.each * 2 * gqa <= COLUMNS) p.each *= 2;
  p.out.kv = a.kv, p.out.out = a.out, p.out.frag_m = a.frag_m;
  const int each = ctas_each(n_sm, a.kv.n_kv_heads), needed = a.kv.n_tokens;
  return launch_kernel(attn_sparse_kernel<D>, dim3(a.kv.n_kv_heads * (needed < each ? needed : each)), dim3(THREADS), map<D>::BYTES,
                       (cudaStream_t)at.stream, at.pdl, p);
}

/* A CTA a block. */
__global__ void __launch_bounds__(THREADS) kv_copy_blocks_kernel(const __grid_constant__ k_kv_copy_blocks p) {
  grid_trigger();
  grid_wait();
  const int bytes = k_kv_tile_bytes(p.kv.codec, p.kv.head_dim), *copy = p.copies[blockIdx.x];
  const uint8_t *from = kv::numbered_tile(p.kv, copy[0]);
  uint8_t *to = kv::numbered_tile(p.kv, copy[1]);
  if (bytes % 16 == 0)
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS) ((uint4 *)to)[i] = __ldcg((const uint4 *)from + i);
  else
    for (int i = threadIdx.x; i < bytes / 4; i += THREADS) ((uint32_t *)to)[i] = __ldcg((const uint32_t *)from + i);
}

} // namespace

extern "C" bool k_attn_sparse_takes(int32_t head_dim, int32_t n_heads, int32_t n_kv_heads) {
  return k_kv_has_fragments(head_dim) && n_heads % n_kv_heads == 0 && n_heads / n_kv_heads <= COLUMNS;
}

extern "C" size_t k_attn_sparse_workspace_bytes(int32_t n_sm, int32_t n_kv_heads, int32_t max_entries) {
  return (size_t)n_kv_heads * ctas_each(n_sm, n_kv_heads) * max_entries * COLUMNS * sizeof(float);
}

extern "C" int sits_k_attn_sparse_init(void) {
  const int e = prepare_kernel(attn_sparse_kernel<64>, map<64>::BYTES);
  return e ? e : prepare_kernel(attn_sparse_kernel<128>, map<128>::BYTES);
}

extern "C" int sits_k_attn_sparse(const struct k_attn_sparse *a, int32_t n_sm, struct k_stream at) {
  const k_kv_view &v = a->kv;
  if (v.codec != K_KV_FP4 || !k_attn_sparse_takes(v.head_dim, v.n_heads, v.n_kv_heads)) return cudaErrorInvalidValue;
  return v.head_dim == 64 ? launch_sparse<64>(*a, n_sm, at) : launch_sparse<128>(*a, n_sm, at);
}

extern "C" int sits_k_kv_copy_blocks(const struct k_kv_copy_blocks *a, struct k_stream at) {
  if (a->n < 1 || a->n > K_COPY_BLOCKS) return cudaErrorInvalidValue;
  return launch_kernel(kv_copy_blocks_kernel, dim3(a->n), dim3(THREADS), 0, (cudaStream_t)at.stream, at.pdl, *a);
}
