/* token[r] = argmax, or a draw from softmax(logits / temperature) cut by top-k, then min-p, then top-p; without a sort.
 *
 * Arguments: struct k_sample (kernels.h). logits [R][ld] f32. Parameters per row in device memory, so one captured graph serves all
 * requests.
 * Work split: one CTA of 1,024 threads per row; the row (513 KB at V = 128,256) stays in L2 between passes. Greedy rows need one pass.
 * How: (1) maximum, argmax (lowest index wins) and the sum for the log probability. (2) top-k: the k-th largest value by radix descent on
 * the
 *   order-preserving integer of the float, 8 bits a round, counts in shared memory. (3) min-p: value >= max + T ln(min_p). (4) top-p: the
 *   same
 *   descent with probability mass instead of counts: the smallest set of largest values whose mass reaches top_p of what is left. Values
 *   equal
 *   to a threshold are all kept. (5) the draw: u times the kept mass, located by sums over index order.
 * Shared memory: 256 counters of 8 bytes, reduction scratch.
 * Numerics: mass in 64-bit fixed point (2^-32 of the largest), so every sum is exact and results do not depend on the order of atomics.
 *   NaN logits count as -inf. A row of only -inf gives token 0. A largest logit of +inf or a temperature whose inverse overflows leaves no
 *   weights to draw from: argmax, as on the CPU (engine_sample.c).
 * Cost: 1 to 11 passes over V values from L2; latency- and L2-bound.
 * Links: twin ref_sample in its test, tests/gpu/test_ops.c.
 */
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "kernels.h"

namespace {
constexpr int THREADS = 1024, WARPS = THREADS / 32;
typedef unsigned long long u64;

struct shared_state {
  u64 bins[256];
  float f[WARPS];
  int i[WARPS];
  u64 m[WARPS];
  uint32_t bucket;
  u64 rest;
};

SITS_DEV float clean(float x) { return x == x ? x : -INFINITY; }
SITS_DEV uint32_t order(float x) { /* monotone: larger float, larger integer */
  uint32_t u = __float_as_uint(x + 0.f); /* -0 as 0: equal values, equal integers */
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
SITS_DEV u64 mass_of(float x, float top, float inv_t) { return (u64)(expf((x - top) * inv_t) * 4294967296.f); }

SITS_DEV void find_max(const float *row, int n, shared_state &s, float *top, int *arg) {
  float best = -INFINITY;
  int at = 0x7FFFFFFF;
  const int n4 = (reinterpret_cast<uintptr_t>(row) & 15) == 0 ? n / 4 : 0; /* 16-byte loads where the row allows, eight in flight */
#pragma unroll 8
  for (int i = threadIdx.x; i < n4; i += THREADS) {
    const float4 v = __ldcg((const float4 *)row + i);
    const float x[4] = {clean(v.x), clean(v.y), clean(v.z), clean(v.w)};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (x[e] > best) best = x[e], at = i * 4 + e;
  }
  for (int i = n4 * 4 + threadIdx.x; i < n; i += THREADS) {
    float x = clean(__ldcg(row + i));
    if (x > best) best = x, at = i;
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    float o = __shfl_xor_sync(~0u, best, d);
    int oa = __shfl_xor_sync(~0u, at, d);
    if (o > best || (o == best && oa < at)) best = o, at = oa;
  }
  if ((threadIdx.x & 31) == 0) s.f[threadIdx.x >> 5] = best, s.i[threadIdx.x >> 5] = at;
  __syncthreads();
  best = s.f[0], at = s.i[0];
  for (int w = 1; w < WARPS; w++)
    if (s.f[w] > best || (s.f[w] == best && s.i[w] < at)) best = s.f[w], at = s.i[w];
  __syncthreads();
  *top = best, *arg = at == 0x7FFFFFFF ? 0 : at;
}

SITS_DEV u64 sum_u64(u64 v, shared_state &s) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  if ((threadIdx.x & 31) == 0) s.m[threadIdx.x >> 5] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < WARPS; w++) v += s.m[w];
  __syncthreads();
  return v;
}

/* Largest key t such that values with key >= t weigh at least `goal`; a value weighs 1 (counts) or its mass. Only keys >= floor_key
 * count. */
SITS_DEV uint32_t descend(const float *row, int n, shared_state &s, bool by_mass, u64 goal, uint32_t floor_key, float top, float inv_t) {
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float x = clean(__ldcg(row + i));
      uint32_t key = order(x);
      if (key >= floor_key && (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8)))
        atomicAdd(&s.bins[key >> shift & 255], by_mass ? mass_of(x, top, inv_t) : (u64)1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 left = goal;
      int b = 255;
      while (b > 0 && s.bins[b] < left) left -= s.bins[b--];
      s.bucket = b, s.rest = left;
    }
    __syncthreads();
    prefix |= s.bucket << shift, goal = s.rest;
    __syncthreads();
  }
  return prefix;
}

/* First index, in index order, at which the running mass of the kept values exceeds target. */
SITS_DEV int locate(const float *row, int n, shared_state &s, u64 target, uint32_t floor_key, float top, float inv_t) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, per = (n + WARPS - 1) / WARPS, begin = warp * per,
            end = min(n, begin + per);
  u64 sum = 0;
  for (int i = begin + lane; i < end; i += 32) {
    float x = clean(__ldcg(row + i));
    if (order(x) >= floor_key) sum += mass_of(x, top, inv_t);
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) s.m[warp] = sum;
  if (threadIdx.x == 0) s.bucket = n - 1;
  __syncthreads();
  u64 before = 0;
  for (int w = 0; w < warp; w++) before += s.m[w];
  if (before <= target && target < before + s.m[warp]) {
    for (int base = begin; base < end; base += 32) {
      const int i = base + lane;
      u64 m = 0;
      if (i < end) {
        float x = clean(__ldcg(row + i));
        if (order(x) >= floor_key) m = mass_of(x, top, inv_t);
      }
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        u64 o = __shfl_up_sync(~0u, m, d);
        if (lane >= d) m += o;
      }
      const uint32_t past = __ballot_sync(~0u, before + m > target);
      if (past) {
        if (lane == 0) s.bucket = base + __ffs(past) - 1;
        break;
      }
      before += __shfl_sync(~0u, m, 31);
    }
  }
  __syncthreads();
  return s.bucket;
}

__global__ void __launch_bounds__(THREADS, 1) sample_kernel(const __grid_constant__ k_sample p) {
  __shared__ shared_state s;
  grid_trigger();
  grid_wait();
  const float *row = p.logits + (size_t)blockIdx.x * p.ld;
  const int n = p.n_vocab;
  float top;
  int token;
  find_max(row, n, s, &top, &token);
  const k_sample_row want = p.rows ? p.rows[blockIdx.x] : k_sample_row{0.f, 1.f, 0.f, 0, 0.f};
  const float inv_t = 1.f / want.temperature;
  if (want.temperature > 0.f && inv_t < INFINITY && fabsf(top) < INFINITY) {
    uint32_t floor_key = order(-INFINITY) + 1;
    if (want.top_k > 0 && want.top_k < n) floor_key = max(floor_key, descend(row, n, s, false, want.top_k, floor_key, top, inv_t));
    if (want.min_p > 0.f) floor_key = max(floor_key, order(top + want.temperature * logf(want.min_p)));
    u64 kept = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
      float x = clean(__ldcg(row + i));
      if (order(x) >= floor_key) kept += mass_of(x, top, inv_t);
    }
    kept = sum_u64(kept, s);
    if (want.top_p < 1.f) {
      const u64 goal = (u64)((double)kept * want.top_p);
      floor_key = max(floor_key, descend(row, n, s, true, goal > 0 ? goal : 1, floor_key, top, inv_t));
      kept = 0;
      for (int i = threadIdx.x; i < n; i += THREADS) {
        float x = clean(__ldcg(row + i));
        if (order(x) >= floor_key) kept += mass_of(x, top, inv_t);
      }
      kept = sum_u64(kept, s);
    }
    token = locate(row, n, s, min((u64)((double)kept * want.u), kept - 1), floor_key, top, inv_t);
  }
  if (p.logprob) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += expf(clean(__ldcg(row + i)) - top);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) s.f[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.f;
    for (int w = 0; w < WARPS; w++) sum += s.f[w];
    if (threadIdx.x == 0) p.logprob[blockIdx.x] = row[token] - top - logf(sum);
  }
  if (threadIdx.x == 0) p.token[blockIdx.x] = token;
}
} // namespace

extern "C" int sits_k_sample(const struct k_sample *a, struct k_stream at) {
  return launch_kernel(sample_kernel, dim3(a->n_rows), dim3(THREADS), 0, (cudaStream_t)at.stream, at.pdl, *a);
}
