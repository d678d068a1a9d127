/* Columns of all ranks side by side, on every rank: out_q[t][r * n + c] = x_r[t][c] for all ranks q, r (logits of a head whose rows are
 * split).
 *
 * Arguments: struct k_gather. x [T][n] f32 here; out[q] [T][n_ranks * n] f32 on rank q. Every rank calls with the same T and n.
 * Work split: a fixed grid; each CTA copies pieces of x to every rank, then sets its flag on every peer behind a system fence, then waits
 *   for the same CTA of every peer. When the grid has ended, everything has arrived. 16-byte pieces where n allows, else 4-byte.
 * Memory: out is written by peers in call k only after this rank has read call k - 1's, for all-reduces of the step lie between.
 * Waiting: as in all_reduce.cu. Numerics: a copy. Limits: MAX_RANKS 8.
 * Links: test tests/gpu/test_comm.c.
 */
#include "comm/comm.cuh"
#include "common/launch.cuh"

namespace {
constexpr int THREADS = 256;

template <class V> __global__ void __launch_bounds__(THREADS) gather_kernel(const __grid_constant__ k_gather p) {
  constexpr int PER = sizeof(V) / sizeof(float);
  grid_trigger();
  grid_wait();
  const uint32_t epoch = load_word(&p.ranks.state->gather_calls) + 1;
  bool is_lost = load_word(&p.ranks.state->is_lost) != 0;
  const int n = p.n_cols / PER, n_ranks = p.ranks.n_ranks, rank = p.ranks.rank;
  const int64_t all = (int64_t)p.n_rows * n;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < all; i += (int64_t)gridDim.x * THREADS) {
    const int64_t t = i / n, c = i % n;
    const V v = __ldcg((const V *)p.x + i);
    for (int k = 0; k < n_ranks; k++) {
      const int r = (rank + k) % n_ranks;
      ((V *)p.out[r])[(t * n_ranks + rank) * n + c] = v;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    for (int r = 0; r < n_ranks; r++)
      if (r != rank) store_flag(p.flag[r] + rank * K_GATHER_CTAS + blockIdx.x, epoch);
    for (int r = 0; r < n_ranks; r++)
      if (r != rank && !wait_flag(p.flag[rank] + r * K_GATHER_CTAS + blockIdx.x, epoch, p.ranks, is_lost)) is_lost = true;
    if (is_lost) mark_lost(p.ranks);
  }
  finish_call(&p.ranks.state->gather_calls, &p.ranks.state->gather_done, epoch);
}

/* Runs until the abort word is set, at most max_ns: a device that hangs, for tests. */
__global__ void stall_kernel(const int32_t *abort_word, uint64_t max_ns) {
  const uint64_t start = now_ns();
  while (*(volatile const int32_t *)abort_word == 0 && now_ns() - start < max_ns) __nanosleep(1000);
}
} // namespace

extern "C" int sits_k_gather_columns(const struct k_gather *a, struct k_stream at) {
  if (a->n_rows < 1 || a->n_cols < 1 || a->ranks.n_ranks > K_MAX_RANKS) return cudaErrorInvalidValue;
  cudaStream_t stream = (cudaStream_t)at.stream;
  const int64_t n = (int64_t)a->n_rows * a->n_cols, ctas = (n + 4 * THREADS - 1) / (4 * THREADS);
  const dim3 grid(ctas < a->max_ctas && ctas < K_GATHER_CTAS ? (int)ctas : a->max_ctas < K_GATHER_CTAS ? a->max_ctas : K_GATHER_CTAS);
  return a->n_cols % 4 == 0 ? launch_kernel(gather_kernel<float4>, grid, dim3(THREADS), 0, stream, at.pdl, *a)
                            : launch_kernel(gather_kernel<float>, grid, dim3(THREADS), 0, stream, at.pdl, *a);
}

extern "C" int sits_k_stall(const int32_t *abort_word, int64_t max_ns, struct k_stream at) {
  return launch_kernel(stall_kernel, dim3(1), dim3(1), 0, (cudaStream_t)at.stream, false, abort_word, (uint64_t)max_ns);
}
