/* out[t] = form(x[t]), or form(silu(gate) * up) where x holds 8 gate, 8 up, 8 gate, ... values.
 *
 * Arguments: struct k_convert (kernels.h). width a multiple of 8, at most 32,768; rows of x start 16-byte aligned.
 * Work split: one CTA of 512 threads per row, which stays in registers: one pass, one barrier. Of many rows two are on an SM at once: one
 *   is loaded while the other is stored. SwiGLU of many f16 rows to e4m3 (n_walking > 0): CTAs that walk over rows, two an SM.
 * Shared memory: of those that walk, two rows of x each, at most 112 KiB.
 * Pipeline: of those that walk, the next row is on its way by a bulk copy while one is multiplied; a slot is free when the row's maximum
 *   is known.
 * Numerics: f32; 8-bit scales are max|x| / 127 (s8) or / 448 (e4m3) per token (K_ACT_GROUP_S8: per token and 128 columns),
 *   round to nearest even. Tolerance: half a step.
 * Cost: bytes of x once from L2; latency-bound in decode.
 * Links: twin ref_quantise_row (tests/gpu/gpu_ref.c), test tests/gpu/test_ops.c.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"

namespace {
SITS_DEV vec8 eight_f16_of(const uint4 &v) {
  float2 a = half2_to_float2(v.x), b = half2_to_float2(v.y), c = half2_to_float2(v.z), d = half2_to_float2(v.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}
SITS_DEV vec8 eight_f16(const __half *p) { return eight_f16_of(__ldcg((const uint4 *)p)); }
SITS_DEV vec8 eight_f32(const float *p) {
  float4 a = __ldcg((const float4 *)p), b = __ldcg((const float4 *)p + 1);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
SITS_DEV vec8 swiglu(const vec8 &g, const vec8 &u) {
  vec8 r;
#pragma unroll
  for (int i = 0; i < 8; i++) r.v[i] = g.v[i] * inverse_fast(1.f + exp2_fast(g.v[i] * -1.4426950408889634f)) * u.v[i];
  return r;
}

constexpr int THREADS = 512, MANY_ROWS = 256;
static_assert(K_MAX_CONVERT_WIDTH == 8 * 8 * THREADS, "the most pieces that a launch below has");

template <int SOURCE> SITS_DEV vec8 fetch(const k_convert &p, size_t row, int c) {
  if (SOURCE == K_SRC_F16) return eight_f16((const __half *)p.x + row + c);
  if (SOURCE == K_SRC_F16_GATE_UP)
    return swiglu(eight_f16((const __half *)p.x + row + 2 * c), eight_f16((const __half *)p.x + row + 2 * c + 8));
  return swiglu(eight_f32((const float *)p.x + row + 2 * c), eight_f32((const float *)p.x + row + 2 * c + 8));
}

/* GRID: rotation and rounding are built in; twice, where the registers that they take would slow the others down. */
template <int SOURCE, int N, bool GRID>
__global__ void __launch_bounds__(THREADS, N == 4 && !GRID ? 2 : 1) convert_kernel(const __grid_constant__ k_convert p) {
  __shared__ float scratch[128];
  grid_trigger();
  grid_wait();
  const size_t row = (size_t)blockIdx.x * p.ld;
  vec8 x[N];
  float top = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = (threadIdx.x + k * blockDim.x) * 8;
    x[k] = c < p.width ? fetch<SOURCE>(p, row, c) : vec8{};
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x[k].v[i]));
  }
  if (p.out.scale && p.out.form != K_ACT_GROUP_S8) top = reduce_sum_max(0.f, top, scratch).y;
  store_row<N, GRID>(p.out, blockIdx.x, p.width, x, 1.f, top, scratch + 64);
}

/* ---- SwiGLU, f16 to e4m3, CTAs that walk over rows ---- */

constexpr int MOST_WALKING_BYTES = 56 * 1024; /* of a row of x: two CTAs of two rows each fill an SM */

#if SITS_SM90
/* Row `row` of x into a slot, unless there is none. One thread. */
SITS_DEV void send_for(const k_convert &p, int row, uint32_t slot, uint32_t full) {
  if (row >= p.n_rows) return;
  bar_arrive_expect(full, 4 * p.width);
  bulk_load(slot, (const __half *)p.x + (size_t)row * p.ld, 4 * p.width, full);
}
#endif

__global__ void __launch_bounds__(THREADS, 2) swiglu_rows_kernel(const __grid_constant__ k_convert p) {
#if SITS_SM90
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float scratch[2][64]; /* in turn: a row's is read until the next row's barrier */
  __shared__ uint64_t full[2];
  const int bytes = 4 * p.width, step = gridDim.x;
  const uint32_t slots = smem_addr(smem), bars = smem_addr(full);
  if (threadIdx.x == 0) {
    bar_init(bars, 1), bar_init(bars + 8, 1);
    bar_fence_init();
  }
  __syncthreads();
  grid_trigger();
  grid_wait();
  if (threadIdx.x == 0) {
    send_for(p, blockIdx.x, slots, bars);
    send_for(p, blockIdx.x + step, slots + bytes, bars + 8);
  }
  uint32_t turn = 0;
  for (int row = blockIdx.x; row < p.n_rows; row += step, turn++) {
    const uint32_t slot = turn & 1, at = slots + slot * bytes;
    vec8 x[4];
    float top = 0.f;
    bar_wait(bars + slot * 8, turn >> 1 & 1);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int c = (threadIdx.x + k * blockDim.x) * 8;
      x[k] = c < p.width ? swiglu(eight_f16_of(lds128(at + 4 * c)), eight_f16_of(lds128(at + 4 * c + 16))) : vec8{};
#pragma unroll
      for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x[k].v[i]));
    }
    top = reduce_sum_max(0.f, top, scratch[slot]).y;
    if (threadIdx.x == 0) send_for(p, row + 2 * step, at, bars + slot * 8);
    cta_row threads;
    store_plain_row<4>(p.out, row, p.width, x, 1.f, top, NULL, threads);
  }
#endif
}

/* Threads that a row of many needs: pieces of 32 columns each. */
unsigned row_threads(const k_convert &a) { return (unsigned)(k_blocks(a.width) * K_GROUP / 32 + 31) / 32 * 32; }

bool can_walk(const k_convert &a) {
  return a.n_walking > 0 && a.n_rows >= MANY_ROWS && a.source == K_SRC_F16_GATE_UP && a.out.form == K_ACT_ROW_E4M3 &&
         a.out.round == K_ROUND_NONE && a.out.rotation == 0 && 4 * a.width <= MOST_WALKING_BYTES;
}

template <int SOURCE> int launch_convert(const k_convert &a, k_stream at) {
  const int pieces = (k_blocks(a.width) * K_GROUP / 8 + THREADS - 1) / THREADS;
  const dim3 grid(a.n_rows), block(THREADS);
  const size_t smem = rotation_bytes(a.out);
  if (pieces == 1) return launch_kernel(convert_kernel<SOURCE, 1, true>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, a);
  if (pieces == 2) return launch_kernel(convert_kernel<SOURCE, 2, true>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, a);
  const bool has_grid = a.out.round != K_ROUND_NONE || a.out.rotation > 0;
  if (pieces <= 4 && a.n_rows >= MANY_ROWS && !has_grid) {
    return launch_kernel(convert_kernel<SOURCE, 4, false>, grid, dim3(row_threads(a)), 0, (cudaStream_t)at.stream, at.pdl, a);
  }
  if (pieces <= 4) return launch_kernel(convert_kernel<SOURCE, 4, true>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, a);
  if (pieces <= 8 && has_grid) return launch_kernel(convert_kernel<SOURCE, 8, true>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, a);
  if (pieces <= 8) return launch_kernel(convert_kernel<SOURCE, 8, false>, grid, block, smem, (cudaStream_t)at.stream, at.pdl, a);
  return cudaErrorInvalidValue; /* wider than K_MAX_CONVERT_WIDTH */
}

__global__ void __launch_bounds__(256) add_bias_kernel(__half *y, const float *bias, int n_tokens, int width) {
  grid_trigger();
  grid_wait();
  const long long n = (long long)n_tokens * width;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
    y[i] = __float2half_rn(__half2float(y[i]) + bias[i % width]);
}
} // namespace

extern "C" int sits_k_add_bias(void *y, const float *bias, int32_t n_tokens, int32_t width, struct k_stream at) {
  const long long n = (long long)n_tokens * width;
  const int blocks = (int)((n + 1023) / 1024);
  return launch_kernel(add_bias_kernel, dim3(blocks < 1056 ? blocks : 1056), dim3(256), 0, (cudaStream_t)at.stream, at.pdl, (__half *)y,
                       bias, n_tokens, width);
}

extern "C" int sits_k_convert_init(void) { return prepare_kernel(swiglu_rows_kernel, 2 * MOST_WALKING_BYTES); }

extern "C" int sits_k_convert(const struct k_convert *a, struct k_stream at) {
  if (a->width % 8 || a->ld % 8 || !is_rotation(a->out, a->width)) return cudaErrorInvalidValue;
  if (can_walk(*a)) {
    const dim3 grid(a->n_walking < a->n_rows ? a->n_walking : a->n_rows);
    return launch_kernel(swiglu_rows_kernel, grid, dim3(row_threads(*a)), 8 * a->width, (cudaStream_t)at.stream, at.pdl, *a);
  }
  if (a->source == K_SRC_F16) return launch_convert<K_SRC_F16>(*a, at);
  if (a->source == K_SRC_F16_GATE_UP) return launch_convert<K_SRC_F16_GATE_UP>(*a, at);
  return launch_convert<K_SRC_F32_GATE_UP>(*a, at);
}
