/* y[n][r] = x_scale[n] * channel[r] * sum_k (m[r][k/128] (q[r][k] - 8)) x8[n][k] for 17 and more tokens n; weights packed 4-bit, widened
 * in
 * registers to u8 = m (q - 8) + 128 with the group multiplier m = scale / channel = 1..16 absorbed; activations s8; products by wgmma
 * u8 x s8, sums s32; 128 times the sum of x comes off at the end.
 *
 * Arguments: struct k_w4a8 (kernels.h). x in tiles [token tile][column block][N][128], swizzled as wgmma reads them
 * (common/activation.cuh).
 * Work split: a CTA takes 128 weight rows (two warpgroups of 64), one token tile of N = 16, 32, 64, 96 or 128, and one of n_split equal
 * runs
 *   of column blocks. grid.x = row tile * n_split + split, grid.y = token tile. Split sums go to slabs that the next kernel adds in
 *   order.
 * Shared memory: barriers and token scales 2 KiB, then stages of `stage_blocks` column blocks: N * 128 bytes of x (1,024-byte aligned) +
 * 8 * 1,056 of
 * weights
 *   each. At most 113 KiB up to N = 64, so that two CTAs (of this or of the next kernel) share an SM; 220 KiB beyond.
 * Pipeline: two loader warps take turns; eight lanes each copy one 16-row tile of the stage, a ninth the activations (in the first round
 * thread 0
 *   does that, after grid_wait; weights before).
 *   A warpgroup widens the next block's registers while the wgmmas of the previous block run; one group stays in flight.
 * Numerics: exact integers; one rounding in the epilogue. Bitwise independent of n_split up to the order of n_split f32 additions.
 * Limits: sm_90a; scales must be channel * integer; T any (grid.y). rows a multiple of 16 are stored, others masked.
 * Cost: rows*cols*0.516 + T*cols bytes, 2*T*rows*cols operations; bound by memory to about 100 tokens, by tensor cores beyond.
 * History: s8 weights took one more exclusive-or a register; the integer pipe is what binds at few tokens.
 * Links: twin ref_w4_gemm (tests/gpu/gpu_ref.c), test tests/gpu/test_gemm_w4.c, bench sits2026-bench kernels.
 */
#include "common/launch.cuh"
#include "common/wgmma.cuh"
#include "kernels.h"

namespace {
constexpr int ROWS = 128, ROW_TILES = 8, WARP_LOAD = 8, LOADERS = 2, THREADS = 320, UNIT = K_W4_G128_UNIT, W_BLOCK = ROW_TILES * UNIT;
constexpr int HALF_SM_BYTES = 113 * 1024, FULL_SM_BYTES = 220 * 1024, MAX_STAGES = 16;
constexpr int HEAD_BYTES = 2048; /* barriers, then scales and offsets of the tile's tokens from 512 on */

struct params {
  const uint8_t *weight;
  const float *channel, *x_scale;
  const int32_t *x_sum;
  const uint8_t *x;
  void *y;
  int rows, n_row_tiles, n_blocks, n_tokens, n_split, ld, output, stages, stage_blocks;
  long long slab_stride;
};

#if SITS_SM90
/* 16 rows x 128 columns of one warp: eight words a lane -> 16 registers of u8 = m (q - 8) + 128. */
SITS_DEV void widen(uint32_t (&a)[16], uint32_t unit, int lane, uint32_t m0, uint32_t m1, bool is_valid) {
  const uint32_t c0 = is_valid ? (128u - 8u * m0) * 0x01010101u : 0u, c1 = is_valid ? (128u - 8u * m1) * 0x01010101u : 0u;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    uint4 v = lds128(unit + c * 512 + lane * 16);
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) { /* word i: step 2 c + i/2, half i%2 */
      uint32_t hi = __funnelshift_r(w[i], w[i], 6) & 0x0F0F0F0Fu, lo = (w[i] >> 2) & 0x0F0F0F0Fu;
      uint32_t *r = a + (c * 2 + (i >> 1)) * 4 + (i & 1) * 2;
      r[0] = hi * m0 + c0; /* row g */
      r[1] = lo * m1 + c1; /* row g + 8 */
    }
  }
}

SITS_DEV uint32_t multiplier(float scale, float inv_channel, bool is_valid) {
  return is_valid ? (uint32_t)__float2int_rn(fabsf(scale * inv_channel)) : 0u;
}

template <int N> SITS_DEV void multiply(int (&d)[N / 2], const uint32_t (&a)[16], uint32_t x_addr) {
  const uint64_t x = wgmma_tile(x_addr);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma_s32<N>::template mul<WGMMA_U8, false>(d, a + k * 4, x + k * 2);
  wgmma_commit();
}

SITS_DEV void store_pair(const params &p, int row, int n, float v, int split) {
  if (row >= p.rows || n >= p.n_tokens) return;
  const size_t at = (size_t)n * p.ld + row;
  if (p.output == K_W4A8_F16)
    ((__half *)p.y)[at] = __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f));
  else
    ((float *)p.y)[split * p.slab_stride + at] = v;
}

/* s0, s1: channel scales of rows g and g+8; x_scale, offset (-128 sum of x, once per row): of the tile's tokens, in shared memory. */
template <int N> SITS_DEV void store_tile(const params &p, const int (&d)[N / 2], const float *x_scale, const int *offset, float s0,
                                          float s1, int row0, int split, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = j * 8 + t * 2 + e, n = blockIdx.y * N + column;
      const float x = x_scale[column];
      const float v0 = (float)(d[j * 4 + e] + offset[column]) * s0 * x, v1 = (float)(d[j * 4 + 2 + e] + offset[column]) * s1 * x;
      if (p.output == K_W4A8_SWIGLU) {
        if (n < p.n_tokens && row0 + g < p.rows)
          ((__half *)p.y)[(size_t)n * p.ld + row0 / 2 + g] =
              __float2half_rn(fminf(fmaxf(v0 / (1.f + __expf(-v0)) * v1, -65504.f), 65504.f));
      } else {
        store_pair(p, row0 + g, n, v0, split);
        store_pair(p, row0 + g + 8, n, v1, split);
      }
    }
}
#endif

template <int N> __global__ void __launch_bounds__(THREADS, N <= 64 ? 2 : 1) gemm_w4a8_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const uint32_t full = smem_addr(smem), empty = full + 8 * MAX_STAGES, ring = full + HEAD_BYTES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row_tile = blockIdx.x / p.n_split, split = blockIdx.x % p.n_split;
  const int block0 = (int)((long long)p.n_blocks * split / p.n_split), block1 = (int)((long long)p.n_blocks * (split + 1) / p.n_split);
  const int x_stage = p.stage_blocks * N * 128, stage_bytes = (x_stage + p.stage_blocks * W_BLOCK + 1023) / 1024 * 1024;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, 8);
    bar_fence_init();
  }
  __syncthreads();
  const uint8_t *x = p.x + (size_t)blockIdx.y * p.n_blocks * N * 128;
  if (warp >=
      WARP_LOAD) { /* loader w brings every second stage: lanes 0-7 a 16-row tile each, lane 8 the activations after the first round */
    const uint64_t policy = policy_evict_first();
    const int which = warp - WARP_LOAD, tile = min(row_tile * ROW_TILES + (lane & 7), p.n_row_tiles - 1);
    const uint8_t *w = p.weight + (size_t)tile * p.n_blocks * UNIT;
    int slot = which;
    uint32_t parity = 1;
    if (lane > ROW_TILES) return;
    for (int k = which, b = block0 + which * p.stage_blocks; b < block1; b += LOADERS * p.stage_blocks, k += LOADERS, slot += LOADERS) {
      if (slot >= p.stages) slot -= p.stages, parity ^= 1;
      const int n = min(p.stage_blocks, block1 - b);
      bar_wait(empty + slot * 8, parity);
      if (lane == 0) bar_arrive_expect(full + slot * 8, n * (N * 128 + W_BLOCK));
      __syncwarp(0x1FF);
      if (lane < ROW_TILES)
        bulk_load_hint(ring + slot * stage_bytes + x_stage + lane * (p.stage_blocks * UNIT), w + (size_t)b * UNIT, n * UNIT,
                       full + slot * 8, policy);
      else if (k >= p.stages)
        bulk_load(ring + slot * stage_bytes, x + (size_t)b * N * 128, n * N * 128, full + slot * 8);
      __syncwarp(0x1FF);
    }
    return;
  }
  if (threadIdx.x == 0) { /* activations of the ring's first round */
    grid_wait();
    for (int k = 0, b = block0; k < p.stages && b < block1; k++, b += p.stage_blocks)
      bulk_load(ring + k * stage_bytes, x + (size_t)b * N * 128, min(p.stage_blocks, block1 - b) * N * 128, full + k * 8);
  }
  __syncwarp();
  const int g = lane >> 2, row0 = row_tile * ROWS + warp * 16;
  const int limit = p.n_row_tiles * 16;
  const int at0 = min(row0 + g, limit - 1), at1 = min(row0 + g + 8, limit - 1);
  const float inv0 = 1.f / __ldg(p.channel + at0), inv1 = 1.f / __ldg(p.channel + at1);
  int d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = 0;
  uint32_t a0[16], a1[16];
  int slot = 0, freed = -1;
  uint32_t parity = 0;
  for (int b = block0; b < block1; b += p.stage_blocks) {
    const int n = min(p.stage_blocks, block1 - b);
    bar_wait(full + slot * 8, parity);
    const uint32_t stage = ring + slot * stage_bytes, w = stage + x_stage + warp * (p.stage_blocks * UNIT);
    for (int i = 0; i < n;
         i += 2) { /* two blocks a turn: the register sets have compile-time names; a missing second block counts zero */
      const bool has_second = i + 1 < n;
      const float2 s = half2_to_float2(lds32(w + i * UNIT + K_W4_NIBBLE_BYTES + g * 4));
      widen(a0, w + i * UNIT, lane, multiplier(s.x, inv0, true), multiplier(s.y, inv1, true), true);
      multiply<N>(d, a0, stage + i * N * 128);
      wgmma_wait<1>(); /* the other set's group is done, and with it the stage before this one */
      if (i == 0 && freed >= 0 && lane == 0) bar_arrive(empty + freed * 8);
      const float2 s2 = half2_to_float2(lds32(w + (i + 1) * UNIT + K_W4_NIBBLE_BYTES + g * 4));
      widen(a1, w + (i + 1) * UNIT, lane, multiplier(s2.x, inv0, has_second), multiplier(s2.y, inv1, has_second), has_second);
      multiply<N>(d, a1, stage + (i + 1) * N * 128);
      wgmma_wait<1>();
    }
    freed = slot;
    if (++slot == p.stages) slot = 0, parity ^= 1;
  }
  float *x_scale = (float *)(smem + 512); /* behind the barriers */
  int *offset = (int *)(x_scale + 128);
  grid_wait();
  if (threadIdx.x < N) {
    const int n = blockIdx.y * N + threadIdx.x;
    x_scale[threadIdx.x] = n < p.n_tokens ? __ldcg(p.x_scale + n) : 0.f;
    offset[threadIdx.x] = n < p.n_tokens && split == 0 ? -128 * __ldcg(p.x_sum + n) : 0; /* one split takes the 128s off for all */
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  wgmma_wait<0>();
  store_tile<N>(p, d, x_scale, offset, __ldg(p.channel + at0), __ldg(p.channel + at1), row0, split, lane);
#endif
}

int token_tile(int n) { return n <= 16 ? 16 : n <= 32 ? 32 : n <= 64 ? 64 : n <= 96 ? 96 : 128; }

template <int N> int launch_tile(const params &p, const struct k_w4a8_plan &plan, k_stream at) {
  return launch_kernel(gemm_w4a8_kernel<N>, dim3(plan.grid_tiles * plan.n_split, plan.token_tiles), dim3(THREADS), plan.smem_bytes,
                       (cudaStream_t)at.stream, at.pdl, p);
}
} // namespace

extern "C" int32_t k_w4a8_tile(int32_t n_tokens) { return token_tile(n_tokens); }

extern "C" bool k_w4a8_plan(const struct k_w4a8 *a, int32_t n_sm, struct k_w4a8_plan *plan) {
  if (a->n_tokens < 1 || a->rows < 1 || !a->channel) return false; /* no channel scales: the multipliers are not integers */
  if (a->is_grouped || a->output == K_W4A8_SWIGLU_S8) return false; /* sits_k_w4a8_tall does that */
  if (a->output == K_W4A8_SWIGLU && a->rows % 16) return false;
  const int n_blocks = k_blocks(a->cols);
  plan->tile = token_tile(a->n_tokens);
  plan->token_tiles = (a->n_tokens + plan->tile - 1) / plan->tile;
  plan->grid_tiles = (a->rows + ROWS - 1) / ROWS;
  plan->stage_blocks = 2;
  const int stage = (plan->stage_blocks * (plan->tile * 128 + W_BLOCK) + 1023) / 1024 * 1024;
  plan->stages = ((plan->tile <= 64 ? HALF_SM_BYTES : FULL_SM_BYTES) - HEAD_BYTES) / stage;
  if (plan->stages > MAX_STAGES) plan->stages = MAX_STAGES;
  plan->smem_bytes = HEAD_BYTES + plan->stages * stage;
  /* Splits of k are for slabs only. The time of a split: waves * (blocks a CTA + what a CTA costs before and after its blocks). */
  plan->n_split = 1;
  if (a->output == K_W4A8_SLAB_F32) {
    const int slots = (plan->tile <= 64 ? 2 : 1) * n_sm, overhead = 6;
    int best = 0;
    for (int s = 1; s <= 8 && s <= n_blocks; s++) {
      const int ctas = plan->grid_tiles * plan->token_tiles * s,
                cost = (ctas + slots - 1) / slots * ((n_blocks + s - 1) / s + overhead) + s;
      if (s == 1 || cost < best) best = cost, plan->n_split = s;
    }
  }
  return true;
}

extern "C" int sits_k_w4a8_init(void) {
  int e = prepare_kernel(gemm_w4a8_kernel<16>, HALF_SM_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<32>, HALF_SM_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<64>, HALF_SM_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<96>, FULL_SM_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<128>, FULL_SM_BYTES);
  return e;
}

extern "C" int sits_k_w4a8(const struct k_w4a8 *a, int32_t n_sm, struct k_stream at) {
  struct k_w4a8_plan plan;
  if (!k_w4a8_plan(a, n_sm, &plan)) return cudaErrorInvalidValue;
  params p = {};
  p.weight = (const uint8_t *)a->weight, p.channel = a->channel, p.x_scale = a->x_scale, p.x_sum = a->x_sum, p.x = (const uint8_t *)a->x,
  p.y = a->y;
  p.rows = a->rows, p.n_row_tiles = k_row_tiles(a->rows), p.n_blocks = k_blocks(a->cols), p.n_tokens = a->n_tokens,
  p.n_split = plan.n_split;
  p.ld = a->ld, p.output = a->output, p.stages = plan.stages, p.stage_blocks = plan.stage_blocks, p.slab_stride = a->slab_stride;
  switch (plan.tile) {
  case 16: return launch_tile<16>(p, plan, at);
  case 32: return launch_tile<32>(p, plan, at);
  case 64: return launch_tile<64>(p, plan, at);
  case 96: return launch_tile<96>(p, plan, at);
  default: return launch_tile<128>(p, plan, at);
  }
}
