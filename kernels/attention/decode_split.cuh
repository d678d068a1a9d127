/* How decode attention over pages is cut between CTAs (decode_cut.cu), and how parts of a segment meet again (decode_int4.cu).
 *
 * The unit is one page of one KV head; the pages of a (sequence, head) are a segment. A CTA takes a run of units in the order sequence,
 * head, page. The cut follows from kv_len alone and is the same in all layers, so one kernel makes it once a step: a record for each CTA.
 * One captured grid serves all lengths.
 * Parts are merged in CTA order by the last to arrive, so results do not depend on timing.
 */
#ifndef SITS_KERNELS_DECODE_SPLIT_CUH
#define SITS_KERNELS_DECODE_SPLIT_CUH

#include "attention/decode_pages.cuh"

namespace decode {

/* Pairs of warps; eight of them fill an SM. As few and large CTAs as there are sequences and KV heads: parts of one that meet in memory
 * cost more than pairs that meet in a CTA. */
constexpr int PAIRS_PER_SM = 8;
constexpr int PIECE = 6; /* what a CTA's piece of a segment costs whatever its length, in the time of a pair's page */
static inline int pairs_of(int n_sm, int n_seqs, int n_kv_heads) {
  const int segments = n_seqs * n_kv_heads;
  return segments <= n_sm ? 8 : segments <= 2 * n_sm ? 4 : segments <= 4 * n_sm ? 2 : 1;
}

using share = k_attn_share;

#if SITS_SM90

/* A sequence and KV head: row of q and out, units first_unit .. first_unit + n_units - 1; lo: first visible token. */
struct segment {
  int seq, row, head, first_unit, n_units, len, first_page, lo;
};

SITS_DEV share read_share(const k_attn_decode &a, int cta) {
  const int4 *from = (const int4 *)(a.cut + cta);
  const int4 x = __ldcg(from), y = __ldcg(from + 1), z = __ldcg(from + 2);
  return {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w, z.x, z.y, z.z, 0};
}

SITS_DEV segment first_segment(const k_kv_view &kv, const share &mine) {
  segment g;
  g.seq = mine.seq, g.row = mine.row, g.head = mine.head, g.first_unit = mine.first_unit, g.n_units = mine.n_units, g.len = mine.len;
  g.lo = kv.window > 0 && g.len > kv.window ? g.len - kv.window : 0;
  g.first_page = g.lo / K_PAGE_TOKENS;
  return g;
}

/* The segment behind g; there is one. */
SITS_DEV void next_segment(const k_kv_view &kv, segment &g) {
  g.first_unit += g.n_units;
  if (++g.head < kv.n_kv_heads) return;
  g.head = 0;
  do g.n_units = pages_of(kv, ++g.seq);
  while (g.n_units == 0);
  g.row = kv.seq_start[g.seq], g.len = kv.kv_len[g.seq];
  g.lo = kv.window > 0 && g.len > kv.window ? g.len - kv.window : 0;
  g.first_page = g.lo / K_PAGE_TOKENS;
}

SITS_DEV uint8_t *tile_of(const k_kv_view &kv, const segment &g, int unit) {
  return kv::page_tile(kv, kv.block_table[(size_t)g.seq * kv.table_stride + g.first_page + unit - g.first_unit], kv.layer, g.head);
}
SITS_DEV __half *open_of(const k_kv_view &kv, const segment &g) {
  return kv::open_tile(kv, kv.open_slot[2 * g.seq + 1], kv.layer, g.head);
}

/* The parts of a segment, one head: maximum, sum and values. Sixteen parts are fetched at a time, all loads in flight together. */
template <int D> SITS_DEV void merge_parts(const float *first, const float *rest, int n_rest, int lane, float4 *v, float *l) {
  constexpr int STEP = 16 * ROW<D>; /* floats from one CTA's first slot to the next CTA's */
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

/* What other threads of the CTA stored before a barrier is visible to whoever sees the sum, and the other way round. */
SITS_DEV int add_acq_rel(int *counter, int by) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}

/* Sums of a CTA's warps, rows of heads [8 N / rows][rows], -> output, or the part is handed over and the last CTA of the segment merges the
 * parts. N_WARPS warps that `sync` keeps together. */
template <int D, int N_WARPS, int N, class S>
SITS_DEV void flush_segment(const k_attn_decode &a, int gqa, const segment &g, const share &mine, const float *sums, int rows, int *flag,
                            bool is_first, S sync) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool begins_here = g.first_unit >= mine.begin, ends_here = g.first_unit + g.n_units <= mine.end;
  const int cta_first = begins_here ? (int)blockIdx.x : mine.first_cta, cta_last = ends_here ? (int)blockIdx.x : mine.last_cta;
  const int first_slot = begins_here ? 2 * (int)blockIdx.x + (is_first ? 0 : 1) : mine.first_slot;
  const int slot = blockIdx.x * 2 + (is_first ? 0 : 1), col = lane < D / 4 ? lane * 4 : 0;
  float *handed = a.workspace + (size_t)slot * 8 * ROW<D>;
  for (int h = warp; h < gqa; h += N_WARPS) {
    float m = -1e30f, l = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int base = 0; base < 8 * N; base += N * rows) /* once or twice */
#pragma unroll
      for (int i = 0; i < N; i++) m = fmaxf(m, sums[(base + i * rows + h) * ROW<D> + D]);
    for (int base = 0; base < 8 * N; base += N * rows)
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float *r = sums + (base + i * rows + h) * ROW<D>;
        const float f = exp2_fast(r[D] - m);
        l += r[D + 1] * f;
        add_scaled(v, *(const float4 *)(r + col), f);
      }
    if (cta_first == cta_last)
      store_head<D>(a, g.row, g.head * gqa + h, v, 1.f / l, lane);
    else {
      if (lane < D / 4) *(float4 *)(handed + h * ROW<D> + col) = v;
      if (lane == 0) *(float2 *)(handed + h * ROW<D> + D) = make_float2(m, l);
    }
  }
  if (cta_first == cta_last) return;
  sync();
  int *counter = a.counters + g.seq * a.kv.n_kv_heads + g.head;
  if (threadIdx.x == 0) *flag = add_acq_rel(counter, 1) == cta_last - cta_first;
  sync();
  if (!*flag) return;
  if (threadIdx.x == 0) *counter = 0;
  for (int h = warp; h < gqa; h += N_WARPS) {
    float4 v;
    float l;
    merge_parts<D>(a.workspace + (size_t)first_slot * 8 * ROW<D> + h * ROW<D>,
                   a.workspace + (size_t)(cta_first + 1) * 16 * ROW<D> + h * ROW<D>, cta_last - cta_first, lane, &v, &l);
    store_head<D>(a, g.row, g.head * gqa + h, v, 1.f / l, lane);
  }
}
#endif

} // namespace decode

#endif
