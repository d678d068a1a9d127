/* out[s][h] = softmax(q . K / sqrt(D)) V for one new token per sequence over int4 or fp4 pages, where sequences are few: rotation of q and
 * k, quantisation of v and append of both included. More or long sequences: decode_int4.cu; what both share: decode_pages.cuh.
 *
 * Arguments: struct k_attn_decode (kernels.h), qkv by the previous kernel, pages by earlier steps; q is not read.
 * Work split: a cluster of `parts` CTAs takes a sequence and KV head, a CTA an equal run of its pages (64 tokens; D = 128: 9,216 bytes,
 *   one bulk copy). Of its eight warps a pair takes every fourth page, a warp half of it; where a part has one or two pages, four warps
 *   take one, 16 tokens each. As many parts as the device has SMs for, a power of two up to 8; that and the grid follow from the number of
 *   sequences alone, so one captured grid serves all lengths.
 * Shared memory: barriers 256, addresses of tiles 512, parts of other CTAs 8 * (D+4) * 4 (4.1 KiB at D = 128), queries 2 KiB, new token
 *   512, open slot (8 or 16 KiB), ring of eight tiles or four (72 KiB or 36), sums of the warps 8 * heads * (D+4) * 4 (16.5 KiB for four
 *   heads). At most 111 KiB and 128 registers, so that a CTA fits beside one of a GEMM of few tokens.
 * Pipeline: pages and open slot are copied before the grid dependency opens: those of earlier steps do not depend on it. Behind it a warp
 *   makes a query, one k, which it puts into the slot in shared memory, one v, which only the warp that owns the new token's block waits
 *   for, before it adds values; that patches the tile in shared memory and the page with the same words. A warp sends a head's sums to the
 *   CTA of the cluster that merges and stores it, whose barrier counts the bytes.
 * Numerics: decode_pages.cuh; parts are added in the order of their pages. Tolerance against the f64 twin 2e-3 of the norm.
 * Limits: D 64 or 128, H/G <= 8, S <= K_MAX_FEW_SEQS, sm_90.
 * Cost: 72 D (int4) or 74 D (fp4) bytes per page and head, 64 D or 128 D for the open slot; bound by latency: the chain of
 *   waiting for qkv, fetching and rotating q, one page, sums of warps, sums of parts.
 * History: parts that met in memory (a fence of the device, a counter, the last CTA merges) cost 4.7 us from the mean CTA's end to the
 *   next kernel's start; a separate merge kernel 3 us a layer. Parts read by others behind a cluster barrier, and another before anyone may
 *   leave; addresses of slot and page looked up where they are stored to, which the kernel waited for. All of the code run once before the
 *   grid dependency opens, to have it in the caches: 3 us a layer more.
 * Links: twin ref_attention (tests/gpu/test_attention.c), test tests/gpu/test_attention.c, bench sits2026-bench kernels.
 */
#include "attention/decode_pages.cuh"

namespace {

using namespace decode;

/* Eight warps; one makes k, one v, whatever else it does. */
constexpr int WARPS = 8, WARP_K = 6, WARP_V = 7, THREADS = WARPS * 32, MOST_PARTS = 8, TABLE = 64;
constexpr int MOST_PAGES = 16; /* of a part, beyond which an equal share of all CTAs is faster */
constexpr int MOST_BYTES = 111 * 1024; /* what a GEMM of few tokens leaves of an SM */

struct params {
  k_attn_decode a;
  float score_scale;
  int gqa, n_parts, rows, stage_bits; /* gqa: heads of a group; rows: made even; stages: 4 or 8 */
};

template <int D, bool FP4> struct map {
  static constexpr int POINTERS = 256, INBOX = POINTERS + TABLE * 8, QUERIES = INBOX + 8 * ROW<D> * 4, NEW = QUERIES + QUERY_BYTES<D>,
                       SLOT = NEW + 512, RING = SLOT + OPEN<D, FP4>;
  static constexpr int bytes(int rows, int stages) { return RING + stages * TILE<D, FP4> + WARPS * rows * ROW<D> * 4; }
  static_assert(bytes(8, 4) <= MOST_BYTES, "four stages always fit");
};

#if SITS_SM90
SITS_DEV uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
SITS_DEV uint32_t address_in(uint32_t rank, uint32_t address) { /* of the same place in another CTA of the cluster */
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
SITS_DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); } /* behind bar_fence_init */
SITS_DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/* Stores in another CTA of the cluster, whose barrier counts their bytes. */
SITS_DEV void send4(uint32_t to, float4 v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
               : "memory");
}
SITS_DEV void send2(uint32_t to, float x, float y, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to), "f"(x), "f"(y), "r"(bar)
               : "memory");
}

/* The new token's key -> slot in shared memory and in global memory. A warp. */
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

/* A sequence and KV head, and this CTA's pages [begin, end) of its n. */
struct share {
  int seq, row, head, len, lo, first_page, n, begin, end;
  __half *open; /* the last part's: where the open slot lies */
};

SITS_DEV share find_share(const k_kv_view &kv, int n_parts) {
  share g;
  const int at = blockIdx.x / n_parts, rank = blockIdx.x % n_parts;
  g.seq = at / kv.n_kv_heads, g.head = at % kv.n_kv_heads;
  g.n = pages_of(kv, g.seq);
  g.row = kv.seq_start[g.seq], g.len = kv.kv_len[g.seq];
  g.lo = kv.window > 0 && g.len > kv.window ? g.len - kv.window : 0;
  g.first_page = g.lo / K_PAGE_TOKENS;
  g.begin = rank * g.n / n_parts, g.end = (rank + 1) * g.n / n_parts;
  g.open = g.end == g.n ? kv::open_tile(kv, kv.open_slot[2 * g.seq + 1], kv.layer, g.head) : NULL;
  return g;
}

SITS_DEV uint8_t *tile_of(const k_kv_view &kv, const share &g, int page) {
  return kv::page_tile(kv, kv.block_table[(size_t)g.seq * kv.table_stride + g.first_page + page], kv.layer, g.head);
}

/* Barriers: a stage's tile has come, so many warps have left it (a counter), the open slot, the queries and k, v, all parts have come. */
struct bars {
  uint32_t full, left, open, queries, value, inbox;
};

/* What the first pages and the open slot hold, on its way; where the other pages lie. A warp. */
template <int D, bool FP4>
SITS_DEV void begin_loads(const params &p, const share &g, const bars &b, uint8_t *smem, int lane) {
  using C = map<D, FP4>;
  constexpr int T = TILE<D, FP4>, BLOCK = 16 * D * 2;
  size_t *pointers = (size_t *)(smem + C::POINTERS);
  if (lane == 31 && g.end == g.n) { /* the blocks that hold tokens */
    const int bytes = ((g.len - 1) % OPEN_TOKENS<FP4> / 16 + 1) * BLOCK;
    bar_arrive_expect(b.open, bytes);
    bulk_load(smem_addr(smem) + C::SLOT, g.open, bytes, b.open);
  }
#pragma unroll 1
  for (int i = lane; i < min(TABLE, g.end - g.begin); i += 32) {
    const uint8_t *tile = tile_of(p.a.kv, g, g.begin + i);
    pointers[i] = (size_t)tile;
    if (i >> p.stage_bits) continue;
    bar_arrive_expect(b.full + i * 8, T);
    bulk_load(smem_addr(smem) + C::RING + i * T, tile, T, b.full + i * 8);
  }
}

/* Where unit i's tile lies, if it is one of the first. */
template <int D, bool FP4> SITS_DEV uint8_t *pointer_to(const params &p, const share &g, uint8_t *smem, int i) {
  return i < TABLE ? ((uint8_t **)(smem + map<D, FP4>::POINTERS))[i] : tile_of(p.a.kv, g, g.begin + i);
}

/* A warp has read its part of unit i's tile; one lane. The last of them has the stage filled again. */
template <int D, bool FP4> SITS_DEV void leave(const params &p, const share &g, const bars &b, uint8_t *smem, int i, uint32_t readers) {
  constexpr int T = TILE<D, FP4>;
  const int stages = 1 << p.stage_bits, stage = i & (stages - 1), next = i + stages;
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(b.left + stage * 4) : "memory");
  if ((before & (readers - 1)) != readers - 1 || g.begin + next >= g.end) return;
  bar_arrive_expect(b.full + stage * 8, T);
  bulk_load(smem_addr(smem) + map<D, FP4>::RING + stage * T, pointer_to<D, FP4>(p, g, smem, next), T, b.full + stage * 8);
}

/* N rows of one head, `step` floats from each to the next, added in their order: values (columns 4 lane ..), maximum, sum. Rows from n on
 * count nothing. */
template <int D, int N> SITS_DEV void add_rows(const float *rows, int step, int n, int lane, float4 *v, float *m, float *l) {
  const int col = lane < D / 4 ? lane * 4 : 0;
  float4 x[N];
  float2 ml[N];
#pragma unroll
  for (int i = 0; i < N; i++) { /* all in flight together */
    const float *r = rows + min(i, n - 1) * step;
    x[i] = *(const float4 *)(r + col), ml[i] = *(const float2 *)(r + D);
  }
  *v = make_float4(0.f, 0.f, 0.f, 0.f), *m = -1e30f, *l = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) *m = fmaxf(*m, ml[i].x);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float f = i < n ? exp2_fast(ml[i].x - *m) : 0.f;
    *l += ml[i].y * f;
    add_scaled(*v, x[i], f);
  }
}

/* Queries, k and v of the new token, by all warps; afterwards the queries are there, and k in the slot. */
template <int D, bool FP4>
SITS_DEV void prepare(const params &p, const share &g, const bars &b, uint8_t *smem, float *scratch, const float2 (&angle)[D / 32]) {
  using C = map<D, FP4>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = p.gqa;
  const bool has_new = g.end == g.n, makes_k = has_new && warp == WARP_K, makes_v = has_new && warp == WARP_V;
  __half *query = (__half *)(smem + C::QUERIES);
  new_token *nt = (new_token *)(smem + C::NEW);
  float x[D / 32] = {}, other[D / 32] = {};
  if (warp < gqa) fetch_item<D>(x, p.a, g.row, g.head, gqa, warp, lane);
  if (makes_k || makes_v) fetch_item<D>(other, p.a, g.row, g.head, gqa, makes_k ? gqa : gqa + 1, lane);
#pragma unroll 1
  for (int i = warp < gqa ? warp : makes_k ? gqa : gqa + 1; i <= gqa; i = i < gqa && makes_k ? gqa : gqa + 1) {
    if (i == gqa)
#pragma unroll
      for (int j = 0; j < D / 32; j++) x[j] = other[j];
    prepare_rotated<D, FP4>(x, p.a, gqa, i, scratch, angle, query, nt, lane);
    if (i < gqa) continue;
    bar_wait(b.open, 0);
    patch_key<D, FP4>(smem_addr(smem) + C::SLOT, g.open, nt, g.len - 1, lane);
  }
  if (lane == 0) bar_arrive(b.queries);
  if (makes_v) {
    prepare_value<D, FP4>(other, scratch, nt, lane);
    if (lane == 0) bar_arrive(b.value);
  }
  bar_wait(b.queries, 0);
}

/* Fragments of the own group's keys, which lie in the slot in shared memory, the new one too. */
template <int D> struct slot_keys {
  static constexpr bool ARE_FAR = false;
  uint32_t at; /* this lane's, of the warp's first block */
  SITS_DEV uint4 fetch(int step, int block) const { return lds128(at + block * (16 * D * 2) + step * 512); }
  SITS_DEV uint4 patched(uint4 v, int, int) const { return v; }
};

/* A warp's share of the pages -> st: N blocks of every 2N-th page. One block where that lets all warps work at once. */
template <int D, bool FP4, int N>
SITS_DEV void attend_part(state<D> &st, const params &p, const share &g, const bars &b, uint8_t *smem) {
  using C = map<D, FP4>;
  constexpr int READERS = 4 / N, TEAMS = WARPS / READERS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block0 = warp % READERS * N, n = g.end - g.begin;
  const new_token *nt = (const new_token *)(smem + C::NEW);
  const uint32_t base = smem_addr(smem);
#pragma unroll 1
  for (int i = warp / READERS; i < n; i += TEAMS) {
    const int token0 = (g.first_page + g.begin + i) * K_PAGE_TOKENS, lo = g.lo - token0, len = g.len - token0; /* in the page */
    const int stage = i & ((1 << p.stage_bits) - 1);
    const uint32_t tile = base + C::RING + stage * TILE<D, FP4>;
    const bool is_last = g.begin + i == g.n - 1, patches = is_last && (len - 1) / (16 * N) * N == block0;
    const int own = is_last ? (len - 1) / OPEN_TOKENS<FP4> * OPEN_TOKENS<FP4> : K_PAGE_TOKENS;
    if (is_last) bar_wait(b.open, 0);
    bar_wait(b.full + stage * 8, i >> p.stage_bits & 1);
    const uint32_t keys = base + C::SLOT + (block0 * 16 - own) * D * 2 + lane * 16;
    attend_page<D, FP4, N, false>(
        st, base + C::QUERIES, tile, block0, lane, lo, len, own, p.score_scale,
        slot_keys<D>{keys},
        [&] {
          if (!patches) return;
          bar_wait(b.value, 0);
          patch_value<D, FP4>(tile, pointer_to<D, FP4>(p, g, smem, i), nt, len - 1, lane);
        });
    __syncwarp();
    if (lane == 0) leave<D, FP4>(p, g, b, smem, i, READERS);
  }
}

/* A head's sums of all warps -> the CTA of the cluster that has the head. A warp. */
template <int D> SITS_DEV void send_part(const params &p, const bars &b, const float *sums, const float *inbox, int h, int lane) {
  float4 v;
  float m, l;
  add_rows<D, WARPS>(sums + h * ROW<D>, p.rows * ROW<D>, WARPS, lane, &v, &m, &l);
  const uint32_t rank = cluster_rank(), owner = h % p.n_parts;
  const uint32_t to = address_in(owner, smem_addr(inbox + (h / p.n_parts * p.n_parts + rank) * ROW<D>)), bar = address_in(owner, b.inbox);
  if (lane < D / 4) send4(to + lane * 16, v, bar);
  if (lane == 0) send2(to + D * 4, m, l, bar);
}
#endif

template <int D, bool FP4> __global__ void __launch_bounds__(THREADS, 2) attn_few_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = map<D, FP4>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &view = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = p.gqa;
  const uint32_t base = smem_addr(smem);
  const bars b = {base, base + 64, base + 96, base + 104, base + 112, base + 120};
  float *sums = (float *)(smem + C::RING + (TILE<D, FP4> << p.stage_bits)), *inbox = (float *)(smem + C::INBOX);
  const int owned = (gqa + p.n_parts - 1 - (int)cluster_rank()) / p.n_parts; /* heads that this CTA merges and stores */
  if (threadIdx.x == 32) *(share *)(smem + 128) = find_share(view, p.n_parts); /* step inputs, not the predecessor's work */
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; i++) bar_init(b.full + i * 8, 1), sts32(b.left + i * 4, 0);
    bar_init(b.open, 1), bar_init(b.queries, WARPS), bar_init(b.value, 1), bar_init(b.inbox, 1);
    bar_fence_init();
    if (owned > 0) bar_arrive_expect(b.inbox, owned * p.n_parts * (D + 2) * 4);
  }
  for (int i = threadIdx.x; i < 4 * D; i += THREADS) ((uint32_t *)(smem + C::QUERIES))[i] = 0; /* rows of heads the group does not have */
  __syncthreads();
  const share &g = *(const share *)(smem + 128); /* kept out of registers in the page loop */
  if (g.n == 0) { /* the same for the whole cluster */
    grid_wait();
    return;
  }
  cluster_arrive(); /* its barriers are there */
  if (warp == WARPS - 1) begin_loads<D, FP4>(p, g, b, smem, lane);
  __syncwarp();
  float *scratch = sums + warp * p.rows * ROW<D>;
  float2 angle[D / 32];
  kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
  cluster_wait();
  grid_wait();
  prepare<D, FP4>(p, g, b, smem, scratch, angle);
  state<D> st = {};
  st.m0 = st.m1 = -1e30f;
  if (g.end - g.begin <= 2)
    attend_part<D, FP4, 1>(st, p, g, b, smem);
  else
    attend_part<D, FP4, 2>(st, p, g, b, smem);
  spill_state<D, FP4, false>(st, scratch, p.rows, lane);
  __syncthreads();
  if (warp < gqa) send_part<D>(p, b, sums, inbox, warp, lane);
  if (warp >= owned) return;
  bar_wait(b.inbox, 0);
  float4 v;
  float m, l;
  add_rows<D, MOST_PARTS>(inbox + warp * p.n_parts * ROW<D>, ROW<D>, p.n_parts, lane, &v, &m, &l);
  store_head<D>(p.a, g.row, g.head * gqa + cluster_rank() + warp * p.n_parts, v, 1.f / l, lane);
#endif
}

template <int D, bool FP4> int launch_few(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const int gqa = a.kv.n_heads / a.kv.n_kv_heads, rows = (gqa + 1) & ~1, bits = map<D, FP4>::bytes(rows, 8) <= MOST_BYTES ? 3 : 2;
  const params p = {a, score_scale<FP4>(D), gqa, k_attn_few_parts(n_sm, a.kv.n_seqs, a.kv.n_kv_heads), rows, bits};
  return launch_clusters(attn_few_kernel<D, FP4>, p.n_parts, dim3(a.kv.n_seqs * a.kv.n_kv_heads * p.n_parts), dim3(THREADS),
                         map<D, FP4>::bytes(rows, 1 << bits), (cudaStream_t)at.stream, at.pdl, p);
}

template <int D, bool FP4> int prepare_few(void) { return prepare_kernel(attn_few_kernel<D, FP4>, MOST_BYTES); }

} // namespace

extern "C" int32_t k_attn_few_parts(int32_t n_sm, int32_t n_seqs, int32_t n_kv_heads) {
  int32_t parts = MOST_PARTS;
  while (parts > 1 && n_seqs * n_kv_heads * parts > n_sm) parts /= 2;
  return parts;
}

extern "C" bool k_attn_few_suits(int32_t n_sm, int32_t n_seqs, int32_t n_kv_heads, int32_t longest) {
  const int32_t parts = k_attn_few_parts(n_sm, n_seqs, n_kv_heads);
  return n_seqs <= K_MAX_FEW_SEQS && longest <= parts * MOST_PAGES * K_PAGE_TOKENS;
}

extern "C" int sits_k_attn_few_init(void) {
  int e = prepare_few<64, false>();
  if (!e) e = prepare_few<64, true>();
  if (!e) e = prepare_few<128, false>();
  return e ? e : prepare_few<128, true>();
}

extern "C" int sits_k_attn_few(const struct k_attn_decode *a, int32_t n_sm, struct k_stream at) {
  const k_kv_view &v = a->kv;
  const bool is_fp4 = v.codec == K_KV_FP4;
  if (!k_attn_decode_takes(v.codec, v.head_dim, v.n_heads, v.n_kv_heads) || v.n_seqs < 1 || v.n_seqs > K_MAX_FEW_SEQS)
    return cudaErrorInvalidValue;
  if (v.head_dim == 64) return is_fp4 ? launch_few<64, true>(*a, n_sm, at) : launch_few<64, false>(*a, n_sm, at);
  return is_fp4 ? launch_few<128, true>(*a, n_sm, at) : launch_few<128, false>(*a, n_sm, at);
}
