/* The sum of a row over all ranks, added to the residual stream, normalised and put into the form that the next GEMM reads:
 *   own[t] = f16(sum_i slab[i][t]), or given as f16;  h[t] = (is_first ? 0 : h[t]) + sum over ranks r, in rank order, of own_r[t];
 *   out[t] = form(rms_norm(h[t]) * gain)
 *
 * Arguments: struct k_reduce (kernels.h). slabs [n_slabs][slab_stride] f32 or own_half [T][E] f16, written by the GEMM before;
 *   h [T][E] f32; E a multiple of 8, at most 16,384. Every rank calls with the same T, E and protocol in the same order.
 * Work split: PUSH and NONE: a row is held by a cluster of `split` CTAs of at most 512 threads, eight values a piece in registers; sums
 *   over the row go through distributed shared memory. BULK: a third of the clusters sends batches of up to four rows, the others
 *   receive them. Grid-stride over rows, at most max_ctas: all must be resident, for they wait for other devices.
 * Protocols:
 *   PUSH  one shot. Rows go to every peer's memory in 16-byte stores {2 values, epoch, 2 values, epoch}: the 8-byte halves arrive whole, so
 *         data and signal are one, no fence is needed, and what a slot held before never needs clearing. Twice the bytes.
 *   BULK  rows go as plain f16; a flag follows every batch behind a system fence. For messages where bytes count.
 *   BULK_S8  as BULK, a share being rounded to 8 bits with a scale for each 128 columns: half the bytes. The own share makes the same way
 *         through this device's memory, so that all ranks sum the same numbers.
 *   NONE  own_half is the sum over ranks already (a library's all-reduce): only the residual and norm.
 * Memory: two sets of slots in turns. A rank writes set k % 2 of a peer in its call k, after it has finished call k - 1, which needed the
 *   peer's data of call k - 1, which the peer sent after it had finished reading call k - 2. So no slot is overwritten before it is read.
 * The call number lies in device memory (struct k_ranks_state), so that a captured graph can be replayed; the last CTA advances it.
 * Waiting: every spin looks at a clock and at the host's abort word now and then; when time is up the rank is marked lost, this and all
 *   later calls run through without waiting, and the host finds the mark after the step. Results then mean nothing.
 * Numerics: shares are rounded to f16 (saturating) on every rank alike, the own one too, and summed in f32 in rank order: all ranks hold
 *   the same bits of h. Tolerance against f64: 1e-3 of the largest share; S8: the rounding is exact against its twin.
 * Cost: see bench/results/tensor_parallel_h200x2.json. bench/NOTES.md, "Two GPUs", says what was tried.
 * Limits: MAX_RANKS 8, slots as sized by the caller, no rotated or rounded forms; else cudaErrorInvalidValue.
 * Links: gather.cu; test tests/gpu/test_comm.c; measured at start by src/backend/cuda/cuda_comm.c.
 */
#include "comm/comm.cuh"
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
constexpr int THREADS = 512;      /* that hold a row in a CTA of PUSH, at most */
constexpr int BULK_THREADS = 256;
constexpr int ROWS = 4;           /* of a BULK batch, at most */
constexpr int FLIGHT = 2;         /* rows that a sender loads before it stores the first */
constexpr int S8_LANES = K_GROUP / 8; /* neighbouring threads that hold a run with one scale */

/* ---- rows and the threads that hold them ---- */

/* A cluster of CTAs. */
struct cluster_row {
  float2 *pairs; /* shared, [2][8]: each CTA's sums, in turns */
  uint32_t rank = 0, size = 1;
  uint32_t turn = 0;
  SITS_DEV cluster_row(float2 *shared) : pairs(shared) {
#if SITS_SM90
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); /* others' shared memory is there once all have */
#endif
  }
  SITS_DEV void wait_for_all() {
#if SITS_SM90
    if (size > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  SITS_DEV int place() const { return (int)(rank * blockDim.x + threadIdx.x); }
  SITS_DEV int count() const { return (int)(size * blockDim.x); }
  /* Everybody writes its sums to everybody. A place is written again two turns later, when all have passed the barrier between. */
  SITS_DEV float2 sum_max(float a, float b, float *scratch) {
    float2 all = reduce_sum_max(a, b, scratch);
#if SITS_SM90
    if (size == 1) return all;
    const uint32_t mine = smem_addr(pairs + turn * 8 + rank);
    if (threadIdx.x < size) {
      uint32_t at;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(mine), "r"(threadIdx.x));
      asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(all.x), "f"(all.y) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    all = make_float2(0.f, 0.f);
    for (uint32_t r = 0; r < size; r++) {
      const float2 v = pairs[turn * 8 + r];
      all.x += v.x, all.y = fmaxf(all.y, v.y);
    }
    turn ^= 1;
#endif
    return all;
  }
  SITS_DEV void sync() const { __syncthreads(); }
};

/* A thread's pieces of a row start at these columns. */
template <class ROW> SITS_DEV int column(const ROW &at, int k) { return (at.place() + k * at.count()) * 8; }

/* ---- shares ---- */

SITS_DEV uint4 to_half(const vec8 &x) {
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = fminf(fmaxf(x.v[i], -65504.f), 65504.f);
  return make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]), pack_half2(v[6], v[7]));
}
SITS_DEV void add_half(vec8 &x, uint4 h) {
  const uint32_t w[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 f = half2_to_float2(w[i]);
    x.v[2 * i] += f.x, x.v[2 * i + 1] += f.y;
  }
}

/* This rank's share of eight values. UNROLL: slabs loaded ahead. */
template <int UNROLL> SITS_DEV uint4 own_share(const k_reduce &p, size_t at) {
  vec8 x;
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = 0.f;
  if (p.own_half) {
    add_half(x, __ldcg((const uint4 *)((const __half *)p.own_half + at)));
    return to_half(x); /* a library's products are not saturated */
  }
#pragma unroll UNROLL
  for (int s = 0; s < p.n_slabs; s++) {
    const float4 *slab = (const float4 *)(p.slabs + s * p.slab_stride + at);
    const float4 a = __ldcg(slab), b = __ldcg(slab + 1);
    x.v[0] += a.x, x.v[1] += a.y, x.v[2] += a.z, x.v[3] += a.w, x.v[4] += b.x, x.v[5] += b.y, x.v[6] += b.z, x.v[7] += b.w;
  }
  return to_half(x);
}

/* Each rank starts with another peer. */
SITS_DEV int peer(const k_reduce &p, int i) {
  const int r = p.ranks.rank + i;
  return r < p.ranks.n_ranks ? r : r - p.ranks.n_ranks;
}

/* Byte of the first 16 of eight values from column c of row t, as sent by rank `from`. */
SITS_DEV size_t push_at(const k_reduce &p, uint32_t set, int from, int t, int c) {
  return ((size_t)(set * p.ranks.n_ranks + from) * p.push_rows + t) * p.width * 4 + (size_t)c * 4;
}
SITS_DEV size_t bulk_at(const k_reduce &p, uint32_t set, int from, int t, int c) {
  return (((size_t)(set * p.ranks.n_ranks + from) * p.bulk_rows + t) * p.width + c) * 2;
}
/* A flag stands for a batch of rows and one part (CTA of the cluster) of them. */
SITS_DEV uint32_t *flag_of(const k_reduce &p, int rank, uint32_t set, int from, int batch, int part, int n_parts) {
  return p.bulk_flag[rank] + (size_t)(set * p.ranks.n_ranks + from) * k_reduce_flags(p.bulk_rows) + batch * n_parts + part;
}

/* Rows of S8: codes, then a scale for each run of K_GROUP columns. */
SITS_DEV uint8_t *s8_row(const k_reduce &p, int rank, uint32_t set, int from, int t) {
  return (uint8_t *)p.bulk[rank] + bulk_at(p, set, from, t, 0);
}
SITS_DEV size_t s8_scale_at(const k_reduce &p, int c) { return (size_t)((p.width + 3) / 4 * 4) + (size_t)(c / K_GROUP) * 4; }

template <int N, int UNROLL, class ROW> SITS_DEV void load_own(const k_reduce &p, int t, const ROW &at, uint4 (&own)[N]) {
#pragma unroll
  for (int k = 0; k < N; k++)
    if (column(at, k) < p.width) own[k] = own_share<UNROLL>(p, (size_t)t * p.width + column(at, k));
}
SITS_DEV void load_eight(const float *from, vec8 &x) {
  *(float4 *)&x.v[0] = __ldcg((const float4 *)from), *(float4 *)&x.v[4] = __ldcg((const float4 *)from + 1);
}

SITS_DEV void load_gain(const k_reduce &p, int c, vec8 &x) { /* no earlier kernel wrote it */
  *(float4 *)&x.v[0] = __ldg((const float4 *)(p.gain + c)), *(float4 *)&x.v[4] = __ldg((const float4 *)(p.gain + c) + 1);
}

SITS_DEV void load_residual(const k_reduce &p, int t, int c, vec8 &x) {
  if (!p.is_first) return load_eight(p.h + (size_t)t * p.width + c, x);
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = 0.f;
}

/* ---- PUSH: sending and waiting ---- */

template <int N, class ROW> SITS_DEV void push_row(const k_reduce &p, int t, uint32_t epoch, const ROW &at, const uint4 (&own)[N]) {
  for (int i = 1; i < p.ranks.n_ranks; i++) {
    const int r = peer(p, i);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int c = column(at, k);
      if (c >= p.width) continue;
      uint8_t *slot = (uint8_t *)p.push[r] + push_at(p, epoch & 1, p.ranks.rank, t, c);
      store_volatile(slot, make_uint4(own[k].x, epoch, own[k].y, epoch));
      store_volatile(slot + 16, make_uint4(own[k].z, epoch, own[k].w, epoch));
    }
  }
}

/* All pieces of another rank's row, when they are there. Loads of all are issued before the first is looked at. */
template <int N, class ROW>
SITS_DEV void take_pushed(const k_reduce &p, int from, int t, uint32_t epoch, const ROW &at, uint4 (&v)[N], bool &is_lost) {
  const uint8_t *slots = (const uint8_t *)p.push[p.ranks.rank] + push_at(p, epoch & 1, from, t, column(at, 0));
  spin_clock clock;
  uint4 b[N];
  for (bool is_here = false;;) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      if (column(at, k) >= p.width) continue;
      const uint8_t *slot = slots + (size_t)k * at.count() * 32;
      v[k] = load_volatile(slot), b[k] = load_volatile(slot + 16);
    }
    is_here = true;
#pragma unroll
    for (int k = 0; k < N; k++)
      if (column(at, k) < p.width) is_here = is_here && v[k].y == epoch && v[k].w == epoch && b[k].y == epoch && b[k].w == epoch;
    if (is_here || is_lost) break;
    if (clock.is_over(p.ranks)) is_lost = true;
  }
#pragma unroll
  for (int k = 0; k < N; k++) v[k] = make_uint4(v[k].x, v[k].z, b[k].x, b[k].z);
}

/* ---- BULK: sending ---- */

/* Eight values as s8 with the scale of their run, which S8_LANES neighbouring threads hold; all lanes of a warp call this. */
SITS_DEV uint2 to_s8(uint4 half, bool is_there, float *scale) {
  vec8 x;
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = 0.f;
  if (is_there) add_half(x, half);
#pragma unroll
  for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x.v[i]));
#pragma unroll
  for (int d = 1; d < S8_LANES; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float inv = top > 0.f ? 127.f / top : 0.f;
  *scale = top / 127.f;
  return make_uint2(pack_s8(x.v, inv), pack_s8(x.v + 4, inv));
}

template <bool IS_S8> SITS_DEV void send_piece(const k_reduce &p, int t, uint32_t epoch, int c, uint4 own, bool is_there) {
  const uint32_t set = epoch & 1;
  if (!IS_S8) {
    for (int i = 1; i < p.ranks.n_ranks && is_there; i++) {
      const int r = peer(p, i);
      store_volatile((uint8_t *)p.bulk[r] + bulk_at(p, set, p.ranks.rank, t, c), own);
    }
    return;
  }
  float scale;
  const uint2 codes = to_s8(own, is_there, &scale);
  if (!is_there) return;
  for (int i = 0; i < p.ranks.n_ranks; i++) {
    uint8_t *row = s8_row(p, peer(p, i), set, p.ranks.rank, t);
    store_volatile(row + c, codes);
    if (c % K_GROUP == 0) store_volatile(row + s8_scale_at(p, c), scale);
  }
}

/* How a BULK grid divides a step: clusters that send, clusters that receive, rows of a batch; the same on all ranks. Each takes batches in
 * turn, a CTA its part of their rows. */
struct bulk_plan { int n_send, n_receive, rows; };

SITS_DEV int batches_of(const k_reduce &p, const bulk_plan &plan) { return (p.n_tokens + plan.rows - 1) / plan.rows; }

template <int N, bool IS_S8>
SITS_DEV void send_batches(const k_reduce &p, const bulk_plan &plan, uint32_t epoch, cluster_row &at, int unit) {
  for (int b = unit; b < batches_of(p, plan); b += plan.n_send) {
    const int first = b * plan.rows, end = min(first + plan.rows, p.n_tokens);
#pragma unroll 1
    for (int t = first; t < end; t += FLIGHT) {
      uint4 own[FLIGHT][N];
#pragma unroll
      for (int j = 0; j < FLIGHT; j++)
        if (t + j < end) load_own<N, 1>(p, t + j, at, own[j]);
#pragma unroll
      for (int j = 0; j < FLIGHT; j++)
        if (t + j < end)
#pragma unroll
          for (int k = 0; k < N; k++) send_piece<IS_S8>(p, t + j, epoch, column(at, k), own[j][k], column(at, k) < p.width);
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    __threadfence_system();
    for (int r = 0; r < p.ranks.n_ranks; r++)
      if (IS_S8 || r != p.ranks.rank) store_flag(flag_of(p, r, epoch & 1, p.ranks.rank, b, (int)at.rank, (int)at.size), epoch);
  }
}

/* ---- a row: sum over ranks, residual, norm, next form ---- */

/* x += all shares, in rank order. */
template <int N, int PROTOCOL, class ROW>
SITS_DEV void add_shares(const k_reduce &p, int t, uint32_t epoch, const ROW &at, const uint4 (&own)[N], vec8 (&x)[N], bool &is_lost) {
  for (int r = 0; r < (PROTOCOL == K_REDUCE_NONE ? 1 : p.ranks.n_ranks); r++) {
    uint4 v[N];
    const bool is_own = PROTOCOL == K_REDUCE_NONE || (PROTOCOL != K_REDUCE_BULK_S8 && r == p.ranks.rank);
    if (PROTOCOL == K_REDUCE_PUSH && !is_own) take_pushed<N>(p, r, t, epoch, at, v, is_lost);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int c = column(at, k);
      if (c >= p.width) continue;
      if (PROTOCOL == K_REDUCE_BULK_S8) {
        const uint8_t *row = s8_row(p, p.ranks.rank, epoch & 1, r, t);
        const uint2 codes = __ldcg((const uint2 *)(row + c));
        const float scale = __ldcg((const float *)(row + s8_scale_at(p, c)));
#pragma unroll
        for (int i = 0; i < 8; i++) x[k].v[i] = fmaf((float)(int8_t)((i < 4 ? codes.x : codes.y) >> (i & 3) * 8), scale, x[k].v[i]);
        continue;
      }
      if (PROTOCOL == K_REDUCE_BULK && !is_own)
        v[k] = __ldcg((const uint4 *)((const uint8_t *)p.bulk[p.ranks.rank] + bulk_at(p, epoch & 1, r, t, c)));
      add_half(x[k], is_own ? own[k] : v[k]);
    }
  }
}

/* The residual needs no peer and is loaded before the waiting. */
template <int N, class ROW> SITS_DEV void load_early(const k_reduce &p, int t, const ROW &at, vec8 (&h)[N]) {
#pragma unroll
  for (int k = 0; k < N; k++)
    if (column(at, k) < p.width) load_residual(p, t, column(at, k), h[k]);
}

/* gain: the thread's, where HAS_GAIN. */
template <int N, int PROTOCOL, bool HAS_GAIN, class ROW>
SITS_DEV void finish_row(const k_reduce &p, int t, uint32_t epoch, ROW &at, const uint4 (&own)[N], const vec8 (&h)[N], const vec8 &gain,
                         float *scratch, bool &is_lost) {
  float sum = 0.f, top = 0.f;
  vec8 x[N];
#pragma unroll
  for (int k = 0; k < N; k++)
#pragma unroll
    for (int i = 0; i < 8; i++) x[k].v[i] = 0.f;
  add_shares<N, PROTOCOL>(p, t, epoch, at, own, x, is_lost);
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = column(at, k);
    vec8 g = gain;
    if (c >= p.width) continue;
    if (!HAS_GAIN) load_gain(p, c, g);
#pragma unroll
    for (int i = 0; i < 8; i++) x[k].v[i] += h[k].v[i];
    float4 *to = (float4 *)(p.h + (size_t)t * p.width + c);
    to[0] = *(float4 *)&x[k].v[0], to[1] = *(float4 *)&x[k].v[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum += x[k].v[i] * x[k].v[i];
      x[k].v[i] *= g.v[i];
      top = fmaxf(top, fabsf(x[k].v[i]));
    }
  }
  if (!p.out.data) return;
  const float2 all = at.sum_max(sum, top, scratch);
  const float factor = rsqrtf(all.x / (float)p.width + p.eps);
  store_plain_row<N>(p.out, t, p.width, x, factor, all.y * factor, scratch + 64, at);
  __syncthreads(); /* the next row writes the scratch again */
}

template <int N, int PROTOCOL>
SITS_DEV void receive_batches(const k_reduce &p, const bulk_plan &plan, uint32_t epoch, cluster_row &at, int unit, float *scratch,
                              bool &is_lost) {
  const vec8 no_gain = {};
  for (int b = unit; b < batches_of(p, plan); b += plan.n_receive) {
    const int first = b * plan.rows, end = min(first + plan.rows, p.n_tokens), r = threadIdx.x; /* a thread a peer */
    vec8 next[N];
    load_early<N>(p, first, at, next);
    if (r < p.ranks.n_ranks && (PROTOCOL == K_REDUCE_BULK_S8 || r != p.ranks.rank)) {
      const uint32_t *flag = flag_of(p, p.ranks.rank, epoch & 1, r, b, (int)at.rank, (int)at.size);
      if (!wait_flag(flag, epoch, p.ranks, is_lost)) is_lost = true;
    }
    __syncthreads();
    for (int t = first; t < end; t++) {
      uint4 own[N];
      vec8 h[N];
#pragma unroll
      for (int k = 0; k < N; k++) h[k] = next[k];
      if (PROTOCOL == K_REDUCE_BULK) load_own<N, 1>(p, t, at, own);
      if (t + 1 < end) load_early<N>(p, t + 1, at, next);
      finish_row<N, PROTOCOL, false>(p, t, epoch, at, own, h, no_gain, scratch, is_lost);
    }
  }
}

SITS_DEV void begin_call(const k_reduce &p, uint32_t &epoch, bool &is_lost) { /* calls are numbered from 1 */
  epoch = load_word(&p.ranks.state->reduce_calls) + 1;
  is_lost = load_word(&p.ranks.state->is_lost) != 0;
}

template <int N, int PROTOCOL>
__global__ void __launch_bounds__(BULK_THREADS, N > 2 ? 1 : PROTOCOL == K_REDUCE_BULK_S8 ? 4 : 3) /* k_reduce_bulk_per_sm */
    bulk_kernel(const __grid_constant__ k_reduce p, const __grid_constant__ bulk_plan plan) {
  __shared__ float scratch[128];
  __shared__ float2 pairs[16];
  grid_trigger();
  cluster_row at(pairs);
  grid_wait();
  uint32_t epoch;
  bool is_lost;
  begin_call(p, epoch, is_lost);
  at.wait_for_all();
  const int unit = (int)(blockIdx.x / at.size);
  if (unit < plan.n_send)
    send_batches<N, PROTOCOL == K_REDUCE_BULK_S8>(p, plan, epoch, at, unit);
  else
    receive_batches<N, PROTOCOL>(p, plan, epoch, at, unit - plan.n_send, scratch, is_lost);
  if (is_lost) mark_lost(p.ranks);
  finish_call(&p.ranks.state->reduce_calls, &p.ranks.state->reduce_done, epoch);
}

template <int N, int PROTOCOL> __global__ void __launch_bounds__(THREADS, N == 1 ? 2 : 1) row_kernel(const __grid_constant__ k_reduce p) {
  __shared__ float scratch[128];
  __shared__ float2 pairs[16];
  grid_trigger();
  cluster_row at(pairs);
  vec8 gain;
  if (N == 1 && column(at, 0) < p.width) load_gain(p, column(at, 0), gain);
  grid_wait();
  uint32_t epoch = 0;
  bool is_lost = false;
  if (PROTOCOL != K_REDUCE_NONE) begin_call(p, epoch, is_lost);
  const int first = (int)(blockIdx.x / at.size), step = (int)(gridDim.x / at.size);
  uint4 own[N];
  vec8 h[N];
  if (PROTOCOL == K_REDUCE_PUSH)
    for (int t = first; t < p.n_tokens; t += step) {
      load_own<N, 4>(p, t, at, own);
      push_row<N>(p, t, epoch, at, own);
    }
  at.wait_for_all();
  for (int t = first; t < p.n_tokens; t += step) {
    load_early<N>(p, t, at, h);
    if (PROTOCOL == K_REDUCE_NONE || p.n_tokens > step) load_own<N, 4>(p, t, at, own); /* else it is the one row that was sent */
    finish_row<N, PROTOCOL, N == 1>(p, t, epoch, at, own, h, gain, scratch, is_lost);
  }
  if (PROTOCOL == K_REDUCE_NONE) return;
  if (is_lost) mark_lost(p.ranks);
  finish_call(&p.ranks.state->reduce_calls, &p.ranks.state->reduce_done, epoch);
}

/* ---- launching ---- */

int n_lanes(int width) { return k_blocks(width) * K_GROUP / 8; }

/* A third of the clusters that are resident together send; small steps go row by row. */
template <int N> int launch_bulk(const k_reduce *a, int split, struct k_stream at) {
  const int units = a->max_ctas / split, n_receive = units - units / 3;
  bulk_plan plan = {units / 3, n_receive, a->n_tokens / (n_receive > 0 ? n_receive : 1)};
  if (plan.n_send < 1) return cudaErrorInvalidValue;
  plan.rows = plan.rows < 1 ? 1 : plan.rows > ROWS ? ROWS : plan.rows;
  const int n_batches = (a->n_tokens + plan.rows - 1) / plan.rows;
  if (n_batches < plan.n_send) plan.n_send = n_batches;
  if (n_batches < plan.n_receive) plan.n_receive = n_batches;
  const dim3 grid((plan.n_send + plan.n_receive) * split), block(BULK_THREADS);
  cudaStream_t stream = (cudaStream_t)at.stream;
  return a->protocol == K_REDUCE_BULK ? launch_clusters(bulk_kernel<N, K_REDUCE_BULK>, split, grid, block, 0, stream, at.pdl, *a, plan)
                                      : launch_clusters(bulk_kernel<N, K_REDUCE_BULK_S8>, split, grid, block, 0, stream, at.pdl, *a, plan);
}

template <int N> int launch_rows(const k_reduce *a, int split, int threads, struct k_stream at) {
  const int n_rows = a->n_tokens < a->max_ctas / split ? a->n_tokens : a->max_ctas / split;
  const dim3 grid(n_rows * split), block(threads);
  cudaStream_t stream = (cudaStream_t)at.stream;
  if (n_rows < 1) return cudaErrorInvalidValue;
  return a->protocol == K_REDUCE_PUSH ? launch_clusters(row_kernel<N, K_REDUCE_PUSH>, split, grid, block, 0, stream, at.pdl, *a)
                                      : launch_clusters(row_kernel<N, K_REDUCE_NONE>, split, grid, block, 0, stream, at.pdl, *a);
}

template <int N> int prepare_rows() {
  const int e = prepare_kernel(row_kernel<N, K_REDUCE_PUSH>, 0);
  return e ? e : prepare_kernel(row_kernel<N, K_REDUCE_NONE>, 0);
}
template <int N> int prepare_bulk() {
  const int e = prepare_kernel(bulk_kernel<N, K_REDUCE_BULK>, 0);
  return e ? e : prepare_kernel(bulk_kernel<N, K_REDUCE_BULK_S8>, 0);
}

/* out[t] = f16(sum of slabs): what a library's all-reduce is given. */
__global__ void __launch_bounds__(256) share_kernel(const __grid_constant__ k_reduce p, void *out, int64_t n) {
  grid_trigger();
  grid_wait();
  for (int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * 8; i < n; i += (int64_t)gridDim.x * blockDim.x * 8)
    *(uint4 *)((__half *)out + i) = own_share<4>(p, (size_t)i);
}
} // namespace

extern "C" int sits_k_reduce_init(void) {
  int (*const all[])() = {prepare_rows<1>, prepare_rows<2>, prepare_rows<4>, prepare_bulk<1>,
                          prepare_bulk<2>, prepare_bulk<4>, prepare_bulk<8>};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (const int e = all[i]()) return e;
  return 0;
}

extern "C" int32_t k_reduce_split(int32_t width, int32_t n_tokens, int32_t n_sm) {
  int split = 1;
  while (split < 8 && n_lanes(width) > split * THREADS) split *= 2;
  return n_tokens * split <= n_sm ? split : 1;
}

extern "C" int sits_k_reduce(const struct k_reduce *a, struct k_stream at) {
  const bool is_bulk = a->protocol == K_REDUCE_BULK || a->protocol == K_REDUCE_BULK_S8;
  const int split = a->split < 1 ? 1 : a->split, lanes = n_lanes(a->width), most = is_bulk ? BULK_THREADS : THREADS;
  const int pieces = (lanes + split * most - 1) / (split * most), per_cta = (lanes + split * 32 - 1) / (split * 32) * 32;
  if (a->width % 8 || a->n_tokens < 1 || a->max_ctas < 1 || a->ranks.n_ranks > K_MAX_RANKS || split > 8 || (split & (split - 1)) ||
      a->out.round != K_ROUND_NONE || a->out.rotation > 0 || (a->protocol == K_REDUCE_PUSH && a->n_tokens > a->push_rows) ||
      (is_bulk && a->n_tokens > a->bulk_rows))
    return cudaErrorInvalidValue;
  const int threads = per_cta < most ? per_cta : most;
  if (pieces == 1) return is_bulk ? launch_bulk<1>(a, split, at) : launch_rows<1>(a, split, threads, at);
  if (pieces == 2) return is_bulk ? launch_bulk<2>(a, split, at) : launch_rows<2>(a, split, threads, at);
  if (pieces <= 4) return is_bulk ? launch_bulk<4>(a, split, at) : launch_rows<4>(a, split, threads, at);
  if (pieces <= 8 && is_bulk) return launch_bulk<8>(a, split, at);
  return cudaErrorInvalidValue; /* wider than 16,384 */
}

extern "C" int sits_k_reduce_share(const struct k_reduce *a, void *out, struct k_stream at) {
  const int64_t n = (int64_t)a->n_tokens * a->width, blocks = (n / 8 + 255) / 256;
  if (a->width % 8 || n < 1) return cudaErrorInvalidValue;
  return launch_kernel(share_kernel, dim3(blocks < 2048 ? (int)blocks : 2048), dim3(256), 0, (cudaStream_t)at.stream, at.pdl, *a,
                       out, n);
}
