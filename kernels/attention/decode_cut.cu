/* cut[c] = what CTA c of decode attention takes (sits_k_attn_decode): once a step, the same in all layers.
 *
 * Arguments: k_kv_view, its lengths only; grid of the attention kernel by the number of sequences and KV heads.
 * Work split: a CTA of 512 threads; a warp scans the lengths, then threads take CTAs of the attention kernel.
 *   Where it costs no more, whole parts: segments are cut into equal parts of at most q pages, a CTA takes one, q as small as fits. Else
 *   equal runs of a line on which a segment is as long as its pages and PIECE more, for what a piece costs whatever its length (queries,
 *   the own group's keys, merging); a cut within PIECE / 2 pages of a segment's ends is moved there.
 * Shared memory: prefix sums 8 (S+2), where each run begins 4 (CTAs + 1).
 * Pipeline: no early trigger: the kernel behind it starts when all records are written, so that attention may read them before its grid
 *   dependency opens.
 * Numerics: integers.
 * Limits: S <= 1024.
 * Cost: latency, a few us a step.
 * History: in the attention kernel itself, a scan in each CTA of each layer: 2 us a layer. Equal runs of pages alone: 64 sequences of 1 to
 *   2,047 tokens took three times as long as 64 of 1,024, for a CTA that met eight short ones was waited for.
 * Links: decode_split.cuh, decode_int4.cu; test tests/gpu/test_attention.c.
 */
#include "attention/decode_split.cuh"

namespace {

using namespace decode;

constexpr int THREADS = 512;

#if SITS_SM90

struct scan {
  int n_seqs, n_heads; /* KV heads */
  int piece;           /* cost of a piece beside its pages, in pages of a CTA */
  int n_ctas;
  int *units;          /* [S + 1] units before each sequence; those with more than one token in the step have none */
  int *others;         /* [S + 1] whole parts before each sequence, or sequences with units */
  SITS_DEV int pages(int s) const { return (units[s + 1] - units[s]) / n_heads; }
  SITS_DEV int line(int s) const { return units[s] + others[s] * n_heads * piece; } /* where its first segment begins on the line */
};

/* to[s] = sum of f over the sequences before s. A warp. */
template <class F> SITS_DEV void prefix_sums(int *to, int n_seqs, F f) {
  const int lane = threadIdx.x & 31;
  int sum = 0;
  for (int base = 0; base < n_seqs; base += 32) {
    int n = base + lane < n_seqs ? f(base + lane) : 0;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int o = __shfl_up_sync(~0u, n, d);
      if (lane >= d) n += o;
    }
    if (base + lane < n_seqs) to[base + lane + 1] = sum + n;
    sum += __shfl_sync(~0u, n, 31);
  }
  if (lane == 0) to[0] = 0;
  __syncwarp();
}

/* Smallest number of pages a CTA must take so that every segment can be cut into whole parts of its own, at most n_ctas of them in all;
 * 0: where the largest of these parts is longer than an equal run. A warp; the answer is the same in all lanes. others: as for runs. */
SITS_DEV int pages_per_part(const scan &x) {
  const int lane = threadIdx.x & 31, run = x.line(x.n_seqs) / x.n_ctas;
  int q = max(1, (x.units[x.n_seqs] + x.n_ctas - 1) / x.n_ctas);
  for (int tries = 0; tries < 40; tries++) {
    int parts = 0, most = 0;
    for (int s = lane; s < x.n_seqs; s += 32) {
      const int n = x.pages(s), k = (n + q - 1) / q;
      parts += k, most = max(most, k ? (n + k - 1) / k : 0);
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) parts += __shfl_xor_sync(~0u, parts, d), most = max(most, __shfl_xor_sync(~0u, most, d));
    if (most > max(1, run)) return 0;
    if (parts * x.n_heads <= x.n_ctas) return q;
    q += max(1, q / 8);
  }
  return 0;
}

/* Last i of 0 .. n - 1 with f(i) <= x; f(0) is. */
template <class F> SITS_DEV int last_at_most(int n, int x, F f) {
  int lo = 0, hi = n - 1;
  while (lo < hi) {
    const int mid = (lo + hi + 1) >> 1;
    if (f(mid) <= x)
      lo = mid;
    else
      hi = mid - 1;
  }
  return lo;
}

/* Whole parts of q pages: one part of one segment. */
SITS_DEV void find_part(const scan &x, int q, int cta, share *out) {
  const int *parts = x.others;
  if (cta >= parts[x.n_seqs]) return;
  const int s = last_at_most(x.n_seqs, cta, [&](int i) { return parts[i]; }), pages = x.pages(s), n = (pages + q - 1) / q,
            head = (cta - parts[s]) / n, part = (cta - parts[s]) % n;
  out->seq = s, out->head = head, out->n_units = pages, out->first_unit = x.units[s] + head * pages;
  /* parts of equal size as far as it goes, the smaller ones last */
  out->begin = out->first_unit + (int)((long long)part * pages / n), out->end = out->first_unit + (int)((long long)(part + 1) * pages / n);
  out->first_cta = cta - part, out->first_slot = 2 * out->first_cta, out->last_cta = out->first_cta + n - 1;
}

/* The unit at which the line is cut at x. */
SITS_DEV int unit_at(const scan &x, int at) {
  if (at >= x.line(x.n_seqs)) return x.units[x.n_seqs];
  const int s = last_at_most(x.n_seqs, at, [&](int i) { return x.line(i); }), pages = x.pages(s), length = pages + x.piece,
            head = (at - x.line(s)) / length;
  int page = max(0, (at - x.line(s)) % length - x.piece);
  if (page <= x.piece / 2)
    page = 0;
  else if (page >= pages - x.piece / 2)
    page = pages;
  return x.units[s] + head * pages + page;
}

/* The first unit of a segment and how many it has. */
SITS_DEV void find_segment(const scan &x, int unit, int *seq, int *head, int *first, int *n) {
  *seq = last_at_most(x.n_seqs, unit, [&](int i) { return x.units[i]; });
  *n = x.pages(*seq), *head = (unit - x.units[*seq]) / *n, *first = x.units[*seq] + *head * *n;
}

/* A run; begins: [n_ctas + 1] of all of them. Some are empty, none of those inside a segment. */
SITS_DEV void find_run(const scan &x, const int *begins, int cta, share *out) {
  if (begins[cta] == begins[cta + 1]) return;
  out->begin = begins[cta], out->end = begins[cta + 1];
  const auto owner = [&](int unit) { return last_at_most(x.n_ctas, unit, [&](int i) { return begins[i]; }); };
  find_segment(x, out->begin, &out->seq, &out->head, &out->first_unit, &out->n_units);
  out->first_cta = owner(out->first_unit);
  out->first_slot = out->first_cta * 2 + (begins[out->first_cta] >= out->first_unit ? 0 : 1); /* is it the first of that CTA's run? */
  int seq, head, first, n;
  find_segment(x, out->end - 1, &seq, &head, &first, &n);
  out->last_cta = owner(first + n - 1);
}

#endif

__global__ void __launch_bounds__(THREADS) attn_cut_kernel(const __grid_constant__ k_kv_view kv, share *cut, int n_ctas, int piece) {
#if SITS_SM90
  extern __shared__ int memory[];
  __shared__ int part;
  const scan x = {kv.n_seqs, kv.n_kv_heads, piece, n_ctas, memory, memory + kv.n_seqs + 1};
  int *begins = memory + 2 * (kv.n_seqs + 1);
  if (threadIdx.x < 32) {
    prefix_sums(x.units, x.n_seqs, [&](int s) { return pages_of(kv, s) * kv.n_kv_heads; });
    prefix_sums(x.others, x.n_seqs, [&](int s) { return x.pages(s) > 0; });
    const int q = pages_per_part(x);
    __syncwarp();
    if (q > 0) prefix_sums(x.others, x.n_seqs, [&](int s) { return (x.pages(s) + q - 1) / q * kv.n_kv_heads; });
    if (threadIdx.x == 0) part = q;
  }
  __syncthreads();
  const int q = part;
  const long long all = q == 0 ? x.line(x.n_seqs) : 0, runs = min((long long)n_ctas, all);
  for (int i = threadIdx.x; q == 0 && i <= n_ctas; i += THREADS)
    begins[i] = i < runs ? unit_at(x, (int)(i * all / runs)) : x.units[x.n_seqs];
  __syncthreads();
  grid_wait(); /* a step before may still read the old ones */
  for (int i = threadIdx.x; i < n_ctas; i += THREADS) {
    share mine = {};
    if (q > 0)
      find_part(x, q, i, &mine);
    else if (all > 0)
      find_run(x, begins, i, &mine);
    mine.row = kv.seq_start[mine.seq], mine.len = kv.kv_len[mine.seq];
    cut[i] = mine;
  }
  __threadfence();
#endif
}

} // namespace

extern "C" int32_t k_attn_decode_ctas(int32_t n_sm, int32_t n_seqs, int32_t n_kv_heads) {
  return n_sm * PAIRS_PER_SM / pairs_of(n_sm, n_seqs, n_kv_heads);
}

extern "C" size_t k_attn_cut_bytes(int32_t n_sm) { return (size_t)n_sm * PAIRS_PER_SM * sizeof(share); }

static int cut_memory(int n_seqs, int n_ctas) { return (2 * (n_seqs + 1) + n_ctas + 1) * 4; }

extern "C" int sits_k_attn_cut_init(void) { return prepare_kernel(attn_cut_kernel, 0); }

extern "C" int sits_k_attn_cut(const struct k_kv_view *kv, struct k_attn_share *cut, int32_t n_sm, struct k_stream at) {
  if (kv->n_seqs < 1 || kv->n_seqs > K_MAX_DECODE_SEQS) return cudaErrorInvalidValue;
  const int n_ctas = k_attn_decode_ctas(n_sm, kv->n_seqs, kv->n_kv_heads);
  return launch_kernel(attn_cut_kernel, dim3(1), dim3(THREADS), cut_memory(kv->n_seqs, n_ctas), (cudaStream_t)at.stream, at.pdl, *kv, cut,
                       n_ctas, PIECE * pairs_of(n_sm, kv->n_seqs, kv->n_kv_heads));
}
