/* out[s][h] = softmax(q . K / sqrt(D)) V for one new token per sequence over int4 or fp4 pages, where sequences are few: rotation of q and
 * k, quantisation of v and append of both included. More or long sequences: decode_int4.cu; what both share: decode_pages.cuh.
 *
 * Arguments: struct k_attn_decode (kernels.h), qkv by the previous kernel, pages by earlier steps; q is not read.
 * Work split: a cluster of `parts` CTAs takes a sequence and KV head, a CTA an equal run of its pages (64 tokens; D = 128: 9,216 bytes, one
 *   bulk copy); four warps take 16 of a page's tokens each. As many parts as the device has SMs for, a power of two up to 8 (with two
 *   CTAs an SM clusters do not all find room at once); that and the grid follow from the number of sequences alone, so one captured grid
 *   serves all lengths.
 * Shared memory: barriers 128, sums of the four warps 4 * 8 * (D+4) * 4 (16.9 KiB at D = 128), the part's 4.2 KiB, queries 2 KiB, new
 *   token 1 KiB, ring of four tiles (37 KiB), open slot (8 or 16 KiB). Two CTAs per SM, at most 128 registers.
 * Pipeline: pages and open slot are copied before the grid dependency opens: those of earlier steps do not depend on it. A warp loads, one
 *   makes k, one v; only the warp that owns the new token's block waits for the value, and patches slot and tile in shared memory and in
 *   global memory with the same words. Parts meet in distributed shared memory: each CTA merges some heads of all parts.
 * Numerics: decode_pages.cuh; parts are added in the order of their pages. Tolerance against the f64 twin 2e-3 of the norm.
 * Limits: D 64 or 128, H/G <= 8, S <= K_MAX_FEW_SEQS, sm_90.
 * Cost: 72 D (int4) or 74 D (fp4) bytes per page and head, 64 D or 128 D for the open slot; bound by latency: the chain of
 *   waiting for qkv, fetching and rotating q, one page, two cluster barriers.
 * History: parts that met in memory (a fence of the device, a counter, the last CTA merges) cost 4.7 us from the mean CTA's end to the
 *   next kernel's start; a separate merge kernel 3 us a layer.
 * Links: twin ref_attention (tests/gpu/test_attention.c), test tests/gpu/test_attention.c, bench sits2026-bench kernels.
 */
#include "attention/decode_pages.cuh"

namespace {

using namespace decode;

/* Four warps for the tokens, the loader, one warp each for k and v. */
constexpr int CONSUMERS = 4, WARP_LOAD = 4, WARP_K = 5, WARP_V = 6, THREADS = 224, STAGES = 4, MOST_PARTS = 8;
constexpr int MOST_PAGES = 16; /* of a part, beyond which an equal share of all CTAs is faster */

struct params {
  k_attn_decode a;
  float score_scale;
  int n_parts;
};

template <int D, bool FP4> struct map {
  static constexpr int BARS = 128, MERGE = CONSUMERS * 8 * ROW<D> * 4, PART = 8 * ROW<D> * 4, TOKEN = 1024;
  static constexpr int SUMS = BARS, PARTS = SUMS + MERGE, QUERIES = PARTS + PART, NEW = QUERIES + QUERY_BYTES<D>, VALUE = NEW + TOKEN / 2,
                       RING = NEW + TOKEN, SLOT = RING + STAGES * TILE<D, FP4>, BYTES = SLOT + OPEN<D, FP4>;
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
/* All threads of the cluster that have not left. */
SITS_DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
SITS_DEV float4 cluster_load4(uint32_t a) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
  return v;
}
SITS_DEV float2 cluster_load2(uint32_t a) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a));
  return v;
}

/* The four consumers; they and the warp of the key; the patching warp and the value's. */
SITS_DEV void consumer_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
SITS_DEV void queries_sync() { asm volatile("bar.sync 2, 160;" ::: "memory"); }
SITS_DEV void value_wait() { asm volatile("bar.sync 3, 64;" ::: "memory"); }
SITS_DEV void value_made() { asm volatile("bar.arrive 3, 64;" ::: "memory"); }

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
  return g;
}

SITS_DEV uint8_t *tile_of(const k_kv_view &kv, const share &g, int page) {
  return kv::page_tile(kv, kv.block_table[(size_t)g.seq * kv.table_stride + g.first_page + page], kv.layer, g.head);
}
SITS_DEV __half *open_of(const k_kv_view &kv, const share &g) { return kv::open_tile(kv, kv.open_slot[2 * g.seq + 1], kv.layer, g.head); }

/* The loader: a warp, which looks up 32 pages at a time, a lane each. */
template <int D, bool FP4>
SITS_DEV void load_pages(const k_kv_view &kv, const share &g, uint32_t ring, uint32_t slot, uint32_t full, uint32_t empty,
                         uint32_t open_full, int lane) {
  constexpr int T = TILE<D, FP4>, BLOCK = 16 * D * 2;
  if (lane == 0 && g.end == g.n && g.begin < g.end) { /* the blocks that hold tokens */
    const int bytes = ((g.len - 1) % OPEN_TOKENS<FP4> / 16 + 1) * BLOCK;
    bar_arrive_expect(open_full, bytes);
    bulk_load(slot, open_of(kv, g), bytes, open_full);
  }
  for (int base = g.begin; base < g.end; base += 32) {
    const int page = base + lane;
    const uint8_t *tile = page < g.end ? tile_of(kv, g, page) : NULL;
    for (int i = 0; i < min(32, g.end - base); i++) {
      const int unit = base + i - g.begin, stage = unit % STAGES;
      if (lane == i) {
        bar_wait(empty + stage * 8, (unit / STAGES & 1) ^ 1);
        bar_arrive_expect(full + stage * 8, T);
        bulk_load(ring + stage * T, tile, T, full + stage * 8);
      }
      __syncwarp(); /* in order: a lane two laps ahead would take an old phase of the barrier for its own */
    }
  }
}

/* Sums of the four warps -> this CTA's part. The consumers. */
template <int D> SITS_DEV void merge_warps(const float *sums, float *part, int gqa, int warp, int lane) {
  const int col = lane < D / 4 ? lane * 4 : 0;
  for (int h = warp; h < gqa; h += CONSUMERS) {
    float m = -1e30f, l = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < CONSUMERS; w++) m = fmaxf(m, sums[(w * 8 + h) * ROW<D> + D]);
#pragma unroll
    for (int w = 0; w < CONSUMERS; w++) {
      const float *r = sums + (w * 8 + h) * ROW<D>;
      const float f = exp2_fast(r[D] - m);
      l += r[D + 1] * f;
      add_scaled(v, *(const float4 *)(r + col), f);
    }
    if (lane < D / 4) *(float4 *)(part + h * ROW<D> + col) = v;
    if (lane == 0) *(float2 *)(part + h * ROW<D> + D) = make_float2(m, l);
  }
}

/* The cluster's parts -> output, each CTA some heads. The consumers. */
template <int D> SITS_DEV void merge_parts(const params &p, const share &g, const float *part, int warp, int lane) {
  const int gqa = p.a.kv.n_heads / p.a.kv.n_kv_heads, col = lane < D / 4 ? lane * 4 : 0;
  for (int h = cluster_rank() + p.n_parts * warp; h < gqa; h += p.n_parts * CONSUMERS) {
    const uint32_t mine = smem_addr(part + h * ROW<D>);
    float4 v[MOST_PARTS], sum = make_float4(0.f, 0.f, 0.f, 0.f);
    float2 ml[MOST_PARTS];
    float m = -1e30f, l = 0.f;
#pragma unroll
    for (int i = 0; i < MOST_PARTS; i++) { /* all in flight together */
      const uint32_t at = address_in(min(i, p.n_parts - 1), mine);
      v[i] = cluster_load4(at + col * 4), ml[i] = cluster_load2(at + D * 4);
    }
#pragma unroll
    for (int i = 0; i < MOST_PARTS; i++) m = fmaxf(m, ml[i].x);
#pragma unroll
    for (int i = 0; i < MOST_PARTS; i++) {
      const float f = i < p.n_parts ? exp2_fast(ml[i].x - m) : 0.f;
      l += ml[i].y * f;
      add_scaled(sum, v[i], f);
    }
    store_head<D>(p.a, g.row, g.head * gqa + h, sum, 1.f / l, lane);
  }
}
#endif

template <int D, bool FP4> __global__ void __launch_bounds__(THREADS, 2) attn_few_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = map<D, FP4>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_kv_view &view = p.a.kv;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = view.n_heads / view.n_kv_heads;
  const uint32_t base = smem_addr(smem), full = base, empty = base + 8 * STAGES, open_full = base + 16 * STAGES, slot = base + C::SLOT;
  float *sums = (float *)(smem + C::SUMS), *part = (float *)(smem + C::PARTS);
  __half *query = (__half *)(smem + C::QUERIES);
  new_token *nt = (new_token *)(smem + C::NEW);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, CONSUMERS);
    bar_init(open_full, 1);
    bar_fence_init();
  }
  for (int i = threadIdx.x; i < 4 * D; i += THREADS) ((uint32_t *)query)[i] = 0; /* rows of heads the group does not have */
  __syncthreads();
  const share g = find_share(view, p.n_parts); /* step inputs, not the predecessor's work */
  if (g.n == 0) { /* the same for the whole cluster */
    grid_wait();
    return;
  }
  const bool has_new = g.end == g.n; /* and pages: the last part is never empty */
  if (warp == WARP_LOAD) {
    load_pages<D, FP4>(view, g, base + C::RING, slot, full, empty, open_full, lane);
    grid_wait();
    return;
  }
  float2 angle[D / 32];
  kv::head_angles<D>(p.a.rope, g.len - 1, lane, angle);
  grid_wait();
  float *v = warp == WARP_V ? (float *)(smem + C::VALUE) : sums + (warp == WARP_K ? CONSUMERS : warp) * D;
  const bool asks = warp < CONSUMERS; /* else makes k or v */
  for (int i = asks ? warp : gqa + warp - WARP_K; i < (asks ? gqa : has_new ? gqa + 2 : 0); i += CONSUMERS) {
    float x[D / 32];
    fetch_item<D>(x, p.a, g.row, g.head, i, lane);
    prepare_item<D, FP4>(x, p.a, i, v, angle, query, nt, lane);
  }
  if (warp == WARP_V) {
    if (has_new) value_made();
    return;
  }
  queries_sync();
  if (warp == WARP_K) return;
  state<D> st = {};
  st.m0 = st.m1 = -1e30f;
  int lo = g.lo - (g.first_page + g.begin) * K_PAGE_TOKENS, len = g.len - (g.first_page + g.begin) * K_PAGE_TOKENS; /* in the page */
  for (int page = g.begin; page < g.end; page++, lo -= K_PAGE_TOKENS, len -= K_PAGE_TOKENS) {
    const int unit = page - g.begin, stage = unit % STAGES;
    const uint32_t tile = base + C::RING + stage * TILE<D, FP4>;
    const bool is_last = page == g.n - 1, patches = is_last && warp == (len - 1) >> 4;
    const int own = is_last ? (len - 1) / OPEN_TOKENS<FP4> * OPEN_TOKENS<FP4> : K_PAGE_TOKENS;
    if (is_last) bar_wait(open_full, 0);
    bar_wait(full + stage * 8, unit / STAGES & 1);
    if (patches) patch_key<D, FP4>(slot, open_of(view, g), nt, len - 1, lane);
    const uint32_t keys = slot + (warp * 16 - own) * D * 2 + lane * 16;
    attend_page<D, FP4, 1, false>(
        st, smem_addr(query), tile, warp, lane, lo, len, own, p.score_scale, [&](int step, int) { return lds128(keys + step * 512); },
        [&] {
          if (!patches) return;
          value_wait();
          patch_value<D, FP4>(tile, tile_of(view, g, page), nt, len - 1, lane);
        });
    __syncwarp();
    if (lane == 0) bar_arrive(empty + stage * 8);
  }
  spill_state<D, FP4, false>(st, sums, warp, lane);
  consumer_sync();
  merge_warps<D>(sums, part, gqa, warp, lane);
  cluster_sync();
  merge_parts<D>(p, g, part, warp, lane);
  cluster_sync(); /* nobody leaves while its part is read */
#endif
}

template <int D, bool FP4> int launch_few(const k_attn_decode &a, int32_t n_sm, k_stream at) {
  const params p = {a, score_scale<FP4>(D), k_attn_few_parts(n_sm, a.kv.n_seqs, a.kv.n_kv_heads)};
  return launch_clusters(attn_few_kernel<D, FP4>, p.n_parts, dim3(a.kv.n_seqs * a.kv.n_kv_heads * p.n_parts), dim3(THREADS),
                         map<D, FP4>::BYTES, (cudaStream_t)at.stream, at.pdl, p);
}

template <int D, bool FP4> int prepare_few(void) {
  return prepare_kernel(attn_few_kernel<D, FP4>, map<D, FP4>::BYTES);
}

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
