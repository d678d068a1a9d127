/* The sum of a row over all ranks, added to the residual stream, normalised and put into the form that the next GEMM reads:
 *   own[t] = f16(sum_i slab[i][t]), or given as f16;  h[t] += sum over ranks r, in rank order, of own_r[t];
 *   out[t] = form(rms_norm(h[t]) * gain)
 *
 * Arguments: struct k_reduce (kernels.h). slabs [n_slabs][slab_stride] f32 or own_half [T][E] f16, written by the GEMM before;
 *   h [T][E] f32; E a multiple of 8, at most 16,384. Every rank calls with the same T, E and protocol in the same order.
 * Work split: a CTA of 512 threads per row (grid-stride over rows, at most max_ctas: all must be resident, for they wait for other
 *   devices); a thread holds eight values a piece in registers, as in norm.cu.
 * Protocols:
 *   PUSH  one shot. Rows go to every peer's memory in 16-byte stores {2 values, epoch, 2 values, epoch}: the 8-byte halves arrive whole, so
 *         data and signal are one, no fence is needed, and what a slot held before never needs clearing. Twice the bytes.
 *   BULK  rows go as plain f16; a flag follows every ROWS rows behind a system fence. For messages where bytes count.
 *   NONE  own_half is the sum over ranks already (a library's all-reduce): only the residual and norm.
 * Memory: two sets of slots in turns. A rank writes set k % 2 of a peer in its call k, after it has finished call k - 1, which needed the
 *   peer's data of call k - 1, which the peer sent after it had finished reading call k - 2. So no slot is overwritten before it is read.
 * The call number lies in device memory (struct k_ranks_state), so that a captured graph can be replayed; the last CTA advances it.
 * Waiting: every spin looks at a clock and at the host's abort word now and then; when time is up the rank is marked lost, this and all
 *   later calls run through without waiting, and the host finds the mark after the step. Results then mean nothing.
 * Numerics: shares are rounded to f16 (saturating) on every rank alike, the own one too, and summed in f32 in rank order: all ranks hold
 *   the same bits of h. Tolerance against f64: 1e-3 of the largest share.
 * Cost: on two H200 with NVLink, E = 4,096, in a graph: see bench/results/tensor_parallel_h200x2.json. A row of 8,192 columns is two pieces
 *   a thread; with waiting for them one after the other a call took 8.3 us, twice as long as for 4,096.
 * Limits: MAX_RANKS 8, slots as sized by the caller; else cudaErrorInvalidValue.
 * Links: gather.cu; test tests/gpu/test_comm.c; measured at start by src/backend/cuda/cuda_comm.c.
 */
#include "comm/comm.cuh"
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
constexpr int THREADS = 512;
constexpr int ROWS = 4;  /* of a BULK flag */
constexpr int LAG = 2;   /* flags that sending is ahead of receiving */

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

/* This rank's share of eight values. */
SITS_DEV uint4 own_share(const k_reduce &p, size_t at) {
  vec8 x;
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = 0.f;
  if (p.own_half) {
    add_half(x, __ldcg((const uint4 *)((const __half *)p.own_half + at)));
    return to_half(x); /* a library's products are not saturated */
  }
  for (int s = 0; s < p.n_slabs; s++) {
    const float4 *slab = (const float4 *)(p.slabs + s * p.slab_stride + at);
    const float4 a = __ldcg(slab), b = __ldcg(slab + 1);
    x.v[0] += a.x, x.v[1] += a.y, x.v[2] += a.z, x.v[3] += a.w, x.v[4] += b.x, x.v[5] += b.y, x.v[6] += b.z, x.v[7] += b.w;
  }
  return to_half(x);
}

/* Byte of the first 16 of eight values from column c of row t, as sent by rank `from`. */
SITS_DEV size_t push_at(const k_reduce &p, uint32_t set, int from, int t, int c) {
  return ((size_t)(set * p.ranks.n_ranks + from) * p.push_rows + t) * p.width * 4 + (size_t)c * 4;
}
SITS_DEV size_t bulk_at(const k_reduce &p, uint32_t set, int from, int t, int c) {
  return (((size_t)(set * p.ranks.n_ranks + from) * p.bulk_rows + t) * p.width + c) * 2;
}
SITS_DEV size_t flag_at(const k_reduce &p, uint32_t set, int from, int t) {
  return (size_t)(set * p.ranks.n_ranks + from) * p.bulk_rows + t;
}

/* A thread's pieces of a row: columns 8 (thread + k THREADS). Loads of all pieces are issued before the first is used. */
SITS_DEV int column(int k) { return (threadIdx.x + k * THREADS) * 8; }

template <int N> SITS_DEV void load_own(const k_reduce &p, int t, uint4 (&own)[N]) {
#pragma unroll
  for (int k = 0; k < N; k++)
    if (column(k) < p.width) own[k] = own_share(p, (size_t)t * p.width + column(k));
}
SITS_DEV void load_eight(const float *from, vec8 &x) {
  *(float4 *)&x.v[0] = __ldcg((const float4 *)from), *(float4 *)&x.v[4] = __ldcg((const float4 *)from + 1);
}

template <int N, int PROTOCOL> SITS_DEV void send_row(const k_reduce &p, int t, uint32_t epoch, const uint4 (&own)[N]) {
  for (int i = 1; i < p.ranks.n_ranks; i++) { /* each rank starts with another peer */
    const int r = (p.ranks.rank + i) % p.ranks.n_ranks;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int c = column(k);
      if (c >= p.width) continue;
      if (PROTOCOL == K_REDUCE_PUSH) {
        uint8_t *slot = (uint8_t *)p.push[r] + push_at(p, epoch & 1, p.ranks.rank, t, c);
        store_volatile(slot, make_uint4(own[k].x, epoch, own[k].y, epoch));
        store_volatile(slot + 16, make_uint4(own[k].z, epoch, own[k].w, epoch));
      } else
        store_volatile((uint8_t *)p.bulk[r] + bulk_at(p, epoch & 1, p.ranks.rank, t, c), own[k]);
    }
  }
}

/* All pieces of another rank's row; PUSH waits for them. */
template <int N, int PROTOCOL> SITS_DEV void receive(const k_reduce &p, int from, int t, uint32_t epoch, uint4 (&v)[N], bool &is_lost) {
  const uint32_t set = epoch & 1;
  if (PROTOCOL == K_REDUCE_BULK) {
#pragma unroll
    for (int k = 0; k < N; k++)
      if (column(k) < p.width) v[k] = __ldcg((const uint4 *)((const uint8_t *)p.bulk[p.ranks.rank] + bulk_at(p, set, from, t, column(k))));
    return;
  }
  spin_clock clock;
  uint4 b[N];
  for (bool is_here = false;;) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      if (column(k) >= p.width) continue;
      const uint8_t *slot = (const uint8_t *)p.push[p.ranks.rank] + push_at(p, set, from, t, column(k));
      v[k] = load_volatile(slot), b[k] = load_volatile(slot + 16);
    }
    is_here = true;
#pragma unroll
    for (int k = 0; k < N; k++)
      if (column(k) < p.width) is_here = is_here && v[k].y == epoch && v[k].w == epoch && b[k].y == epoch && b[k].w == epoch;
    if (is_here || is_lost) break;
    if (clock.is_over(p.ranks)) is_lost = true;
  }
#pragma unroll
  for (int k = 0; k < N; k++) v[k] = make_uint4(v[k].x, v[k].z, b[k].x, b[k].z);
}

/* Sum over ranks, residual, norm, next form of one row. gain: the thread's, where N is 1. */
template <int N, int PROTOCOL>
SITS_DEV void finish_row(const k_reduce &p, int t, uint32_t epoch, const uint4 (&own)[N], const vec8 &gain, float *scratch, bool &is_lost) {
  constexpr bool IS_EARLY = N == 1; /* where registers allow, loads that need no peer come before the waiting */
  float sum = 0.f, top = 0.f;
  vec8 x[N], h, g = gain;
  if (IS_EARLY && column(0) < p.width) load_eight(p.h + (size_t)t * p.width + column(0), h);
#pragma unroll
  for (int k = 0; k < N; k++)
#pragma unroll
    for (int i = 0; i < 8; i++) x[k].v[i] = 0.f;
  for (int r = 0; r < (PROTOCOL == K_REDUCE_NONE ? 1 : p.ranks.n_ranks); r++) {
    uint4 v[N];
    const bool is_own = PROTOCOL == K_REDUCE_NONE || r == p.ranks.rank;
    if (!is_own) receive<N, PROTOCOL>(p, r, t, epoch, v, is_lost);
#pragma unroll
    for (int k = 0; k < N; k++)
      if (column(k) < p.width) add_half(x[k], is_own ? own[k] : v[k]);
  }
#pragma unroll
  for (int k = 0; k < N; k++) {
    if (column(k) >= p.width) continue;
    if (!IS_EARLY) load_eight(p.h + (size_t)t * p.width + column(k), h), load_eight(p.gain + column(k), g);
#pragma unroll
    for (int i = 0; i < 8; i++) x[k].v[i] += h.v[i];
    float4 *at = (float4 *)(p.h + (size_t)t * p.width + column(k));
    at[0] = *(float4 *)&x[k].v[0], at[1] = *(float4 *)&x[k].v[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum += x[k].v[i] * x[k].v[i];
      x[k].v[i] *= g.v[i];
      top = fmaxf(top, fabsf(x[k].v[i]));
    }
  }
  if (!p.out.data) return;
  const float2 all = reduce_sum_max(sum, top, scratch);
  const float factor = rsqrtf(all.x / (float)p.width + p.eps);
  store_row<N>(p.out, t, p.width, x, factor, all.y * factor, scratch + 64);
  __syncthreads(); /* the next row writes the scratch again */
}

/* Rows of this CTA are b, b + grid, ...; flag i of BULK stands for ROWS of them. */
template <int N> SITS_DEV void run_bulk(const k_reduce &p, uint32_t epoch, const vec8 &gain, float *scratch, bool &is_lost) {
  const int mine = (p.n_tokens - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, n = (mine + ROWS - 1) / ROWS;
  uint4 own[N];
  for (int i = 0; i < n + LAG; i++) {
    if (i < n) {
      for (int j = i * ROWS; j < mine && j < (i + 1) * ROWS; j++) {
        load_own<N>(p, blockIdx.x + j * gridDim.x, own);
        send_row<N, K_REDUCE_BULK>(p, blockIdx.x + j * gridDim.x, epoch, own);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence_system();
        for (int r = 0; r < p.ranks.n_ranks; r++)
          if (r != p.ranks.rank)
            store_flag(p.bulk_flag[r] + flag_at(p, epoch & 1, p.ranks.rank, blockIdx.x + i * ROWS * gridDim.x), epoch);
      }
    }
    if (i < LAG) continue;
    const int first = (i - LAG) * ROWS;
    for (int r = threadIdx.x; r < p.ranks.n_ranks; r += THREADS) { /* a thread a peer */
      if (r == p.ranks.rank) continue;
      const uint32_t *flag = p.bulk_flag[p.ranks.rank] + flag_at(p, epoch & 1, r, blockIdx.x + first * gridDim.x);
      if (!wait_flag(flag, epoch, p.ranks, is_lost)) is_lost = true;
    }
    __syncthreads();
    for (int j = first; j < mine && j < first + ROWS; j++) {
      load_own<N>(p, blockIdx.x + j * gridDim.x, own);
      finish_row<N, K_REDUCE_BULK>(p, blockIdx.x + j * gridDim.x, epoch, own, gain, scratch, is_lost);
    }
  }
}

template <int N> SITS_DEV void run_push(const k_reduce &p, uint32_t epoch, const vec8 &gain, float *scratch, bool &is_lost) {
  uint4 own[N];
  for (int t = blockIdx.x; t < p.n_tokens; t += gridDim.x) {
    load_own<N>(p, t, own);
    send_row<N, K_REDUCE_PUSH>(p, t, epoch, own);
  }
  for (int t = blockIdx.x; t < p.n_tokens; t += gridDim.x) {
    if (p.n_tokens > (int)gridDim.x) load_own<N>(p, t, own); /* else it is the one row that was sent */
    finish_row<N, K_REDUCE_PUSH>(p, t, epoch, own, gain, scratch, is_lost);
  }
}

template <int N, int PROTOCOL> __global__ void __launch_bounds__(THREADS, 2) reduce_kernel(const __grid_constant__ k_reduce p) {
  __shared__ float scratch[128];
  grid_trigger();
  vec8 gain;
  if (N == 1 && column(0) < p.width) load_eight(p.gain + column(0), gain); /* gains do not depend on earlier kernels */
  grid_wait();
  bool is_lost = false;
  uint32_t epoch = 0;
  if (PROTOCOL != K_REDUCE_NONE) {
    epoch = load_word(&p.ranks.state->reduce_calls) + 1;
    is_lost = load_word(&p.ranks.state->is_lost) != 0;
  }
  if (PROTOCOL == K_REDUCE_BULK)
    run_bulk<N>(p, epoch, gain, scratch, is_lost);
  else if (PROTOCOL == K_REDUCE_PUSH)
    run_push<N>(p, epoch, gain, scratch, is_lost);
  else
    for (int t = blockIdx.x; t < p.n_tokens; t += gridDim.x) {
      uint4 own[N];
      load_own<N>(p, t, own);
      finish_row<N, PROTOCOL>(p, t, epoch, own, gain, scratch, is_lost);
    }
  if (PROTOCOL == K_REDUCE_NONE) return;
  if (is_lost) mark_lost(p.ranks);
  finish_call(&p.ranks.state->reduce_calls, &p.ranks.state->reduce_done, epoch);
}

template <int N> int launch(const k_reduce *a, int grid, struct k_stream at) {
  cudaStream_t stream = (cudaStream_t)at.stream;
  const dim3 g(grid), b(THREADS);
  if (a->protocol == K_REDUCE_PUSH) return launch_kernel(reduce_kernel<N, K_REDUCE_PUSH>, g, b, 0, stream, at.pdl, *a);
  if (a->protocol == K_REDUCE_BULK) return launch_kernel(reduce_kernel<N, K_REDUCE_BULK>, g, b, 0, stream, at.pdl, *a);
  return launch_kernel(reduce_kernel<N, K_REDUCE_NONE>, g, b, 0, stream, at.pdl, *a);
}

template <int N> int prepare() {
  int e = prepare_kernel(reduce_kernel<N, K_REDUCE_PUSH>, 0);
  if (!e) e = prepare_kernel(reduce_kernel<N, K_REDUCE_BULK>, 0);
  return e ? e : prepare_kernel(reduce_kernel<N, K_REDUCE_NONE>, 0);
}

/* out[t] = f16(sum of slabs): what a library's all-reduce is given. */
__global__ void __launch_bounds__(256) share_kernel(const __grid_constant__ k_reduce p, void *out, int64_t n) {
  grid_trigger();
  grid_wait();
  for (int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * 8; i < n; i += (int64_t)gridDim.x * blockDim.x * 8)
    *(uint4 *)((__half *)out + i) = own_share(p, (size_t)i);
}
} // namespace

extern "C" int sits_k_reduce_init(void) {
  int e = prepare<1>();
  if (!e) e = prepare<2>();
  return e ? e : prepare<4>();
}

extern "C" int sits_k_reduce(const struct k_reduce *a, struct k_stream at) {
  const int pieces = (k_blocks(a->width) * K_GROUP / 8 + THREADS - 1) / THREADS;
  const int grid = a->n_tokens < a->max_ctas ? a->n_tokens : a->max_ctas;
  if (a->width % 8 || grid < 1 || a->ranks.n_ranks > K_MAX_RANKS || (a->protocol == K_REDUCE_PUSH && a->n_tokens > a->push_rows) ||
      (a->protocol == K_REDUCE_BULK && a->n_tokens > a->bulk_rows))
    return cudaErrorInvalidValue;
  if (pieces == 1) return launch<1>(a, grid, at);
  if (pieces == 2) return launch<2>(a, grid, at);
  if (pieces <= 4) return launch<4>(a, grid, at);
  return cudaErrorInvalidValue; /* wider than 16,384 */
}

extern "C" int sits_k_reduce_share(const struct k_reduce *a, void *out, struct k_stream at) {
  const int64_t n = (int64_t)a->n_tokens * a->width, blocks = (n / 8 + 255) / 256;
  if (a->width % 8 || n < 1) return cudaErrorInvalidValue;
  return launch_kernel(share_kernel, dim3(blocks < 2048 ? (int)blocks : 2048), dim3(256), 0, (cudaStream_t)at.stream, at.pdl, *a,
                       out, n);
}
