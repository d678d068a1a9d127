/* How decode attention over pages is cut between CTAs, and how parts of a segment meet again (decode_few.cu, decode_int4.cu).
 *
 * The unit is one page of one KV head; the pages of a (sequence, head) are a segment. Where there are fewer segments than CTAs, segments
 * are cut into parts of at most q pages and a CTA takes one part, q as small as fits; else, or where that is far above an equal share,
 * units in the order sequence, head, page are cut into equal runs. Every CTA computes the cut from kv_len, so one captured grid serves all
 * lengths.
 * Parts are merged in CTA order by the last to arrive, so results do not depend on timing.
 */
#ifndef SITS_KERNELS_DECODE_SPLIT_CUH
#define SITS_KERNELS_DECODE_SPLIT_CUH

#include "attention/decode_pages.cuh"

#if SITS_SM90

namespace decode {

/* Smallest number of pages a CTA must take so that every segment can be cut into whole parts of its own, at most `n_ctas` of them in all;
 * 0: there are more segments than CTAs, or that is far above an equal share. A warp; the answer is the same in all lanes. */
SITS_DEV int pages_per_part(const k_kv_view &kv, int total_units, int n_ctas) {
  const int lane = threadIdx.x & 31;
  const int equal = max(1, (total_units + n_ctas - 1) / n_ctas);
  int q = equal;
  for (int tries = 0; tries < 24; tries++) {
    int parts = 0, most = 0;
    for (int s = lane; s < kv.n_seqs; s += 32) {
      const int n = pages_of(kv, s);
      parts += (n + q - 1) / q, most = max(most, n);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) parts += __shfl_xor_sync(~0u, parts, d), most = max(most, __shfl_xor_sync(~0u, most, d));
    if (parts * kv.n_kv_heads <= n_ctas) return q;
    if (q >= most || q > equal + equal / 4) return 0;
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

/* Sums, rows of heads [N_SUMS][8], of a CTA's warps -> output, or the part is handed over and the last CTA of the segment merges the parts.
 * N_WARPS warps that `sync` keeps together. */
template <int D, int N_WARPS, int N_SUMS, class S>
SITS_DEV void flush_segment(const k_attn_decode &a, const segment &g, const int *prefix, const float *sums, int *flag, int n_ctas,
                            bool is_first, S sync) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, gqa = a.kv.n_heads / a.kv.n_kv_heads;
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
  const int slot = blockIdx.x * 2 + (is_first ? 0 : 1), col = lane < D / 4 ? lane * 4 : 0;
  float *mine = a.workspace + (size_t)slot * 8 * ROW<D>;
  for (int h = warp; h < gqa; h += N_WARPS) {
    float m = -1e30f, l = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < N_SUMS; i++) m = fmaxf(m, sums[(i * 8 + h) * ROW<D> + D]);
#pragma unroll
    for (int i = 0; i < N_SUMS; i++) {
      const float *r = sums + (i * 8 + h) * ROW<D>;
      const float f = exp2_fast(r[D] - m);
      l += r[D + 1] * f;
      add_scaled(v, *(const float4 *)(r + col), f);
    }
    if (cta_first == cta_last)
      store_head<D>(a, g.row, g.head * gqa + h, v, 1.f / l, lane);
    else {
      if (lane < D / 4) *(float4 *)(mine + h * ROW<D> + col) = v;
      if (lane == 0) *(float2 *)(mine + h * ROW<D> + D) = make_float2(m, l);
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
} // namespace decode

#endif
#endif
