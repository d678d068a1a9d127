/* y[n][r] = norm(n) * sum_k W[r][k] x[n][k] for at most 16 tokens n; W packed 4-bit, x f16, products by mma.sync f16, sums f32.
 *
 * Arguments: struct k_w4a16 (kernels.h). Weights are the A operand (rows = outputs), tokens the N side, padded to M = 1, 8 or 16.
 * Work split: a CTA owns whole tiles of 16*MT rows, a contiguous run of tiles per CTA; its 8 consumer warps split k, one column block
 *   of 128 each in turn; three more warps: two loaders, finisher.
 *       stage (4 column blocks)   | block 0 | block 1 | block 2 | block 3 |   warps 0-3 take even stages, warps 4-7 odd ones
 *   The finisher sums the 8 partial tiles through shared memory while the consumers are already in the next tile.
 * Shared memory: barriers 1 KiB; M = 1: all of x (2 K bytes); partial tiles n_red * 8 * 16 MT * M * 4; ring of stages of
 *   MT * 4 * unit (8.4 KiB at MT = 2) + (M > 1) 4 * 256 M bytes of x. 115 or 111 KiB, half an SM, so that the next kernel's CTAs fit
 *   beside this one and fill their rings while it drains (200 KiB at M = 16). At most 88 registers for the same reason.
 * Pipeline: full[s] counts the stage's bytes, empty[s] the 4 warps that used it; the ring length is even because a warp sees every second
 *   stage only. Weights are requested before the grid dependency opens, the first two stages at once and the rest at a pace, so that they
 *   do not stand in the way of the predecessor's last loads or of x; x, norms, residuals only after grid_wait.
 * Numerics: a nibble q becomes the f16 number 16+q (row g) or 256+q (row g+8) by one mask; a second product with the constant row values
 *   -24 and -264 (G128) or -16 and -256 (G32M) takes the offsets off exactly. f32 sums; per group one multiply-add with the f16 scale.
 *   Bitwise independent of the grid; the order of the sum over k depends on M only. Error against the f64 twin about 2e-5 of the norm
 *   (the offsets cancel in f32).
 * Limits: T <= 16, sm_90 (bulk copies). Any rows and cols; cols padded with zero scales.
 * Cost: rows*cols*0.516 bytes (G128) or 0.625 (G32M); bound by device memory for T <= 8, by shared memory reads of x at 16.
 * History: split-K over CTAs through memory: 2.4-4.1 us tails, dropped. x read by all warps from global memory: 2-3.8 us under prefetch
 *   traffic instead of 0.7-1.1, dropped. Dequantisation with a multiply per weight: 11 % slower at one token, dropped. A finisher that
 *   takes one token a lane: 64 loads a tile of eight tokens instead of 16, 1,000 to 2,000 cycles at a kernel's end. Partial tiles handed
 *   over by a named barrier: gate_up at one token 17.7 us where another run had 16.8, not kept.
 * Links: twin ref_w4_gemm (tests/gpu/gpu_ref.c), test tests/gpu/test_gemm_w4.c, bench sits2026-bench kernels.
 */
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "kernels.h"

namespace {

constexpr int CONSUMERS = 8, STAGE_BLOCKS = 4, WARP_LOAD = 8, LOADERS = 2, WARP_FINISH = 10, THREADS = 352;
/* Kernels that follow each other in a step ask for 115 and 111 KiB in turn: one of each fits an SM, two of the larger kind do not, so the
 * CTAs of a kernel spread evenly over the SMs. */
constexpr int LARGE_BYTES = 115 * 1024, SMALL_BYTES = 111 * 1024, FULL_BYTES = 200 * 1024, MAX_STAGES = 24;

template <int M, int MT, int FORMAT> struct shape {
  static constexpr int NT = (M + 7) / 8;
  static constexpr int ROWS = 16 * MT;
  static constexpr int UNIT = FORMAT == K_W4_G128 ? K_W4_G128_UNIT : K_W4_G32M_UNIT;
  static constexpr int X_BLOCK = 256 * M;
  static constexpr int W_STAGE = MT * STAGE_BLOCKS * UNIT;
  static constexpr int STAGE = W_STAGE + (M > 1 ? STAGE_BLOCKS * X_BLOCK : 0);
  static constexpr int N_RED = M == 1 ? 4 : 2;
  static constexpr int RED = CONSUMERS * ROWS * M * 4;
  static constexpr int fixed_bytes(int n_blocks) { return 1024 + (M == 1 ? (n_blocks * X_BLOCK + 127) / 128 * 128 : 0) + N_RED * RED; }
};

struct params {
  const uint8_t *weight;
  const uint8_t *x;
  const float *x_ssq, *bias, *gain;
  float *ssq;
  void *y;
  __half *next;
  float x_width, eps;
  int x_n_ssq, n_blocks, n_row_tiles, n_tiles, rows, n_tokens, ld, output, stages, pace_cycles;
};

#if SITS_SM90

struct smem_map {
  uint32_t full, empty, red_full, red_empty, x_full, open, x, red, ring; /* open: the predecessor has ended */
};

template <class C> SITS_DEV smem_map map_smem(uint32_t base, int n_blocks, int m) {
  smem_map s;
  s.full = base;
  s.empty = base + 8 * MAX_STAGES;
  s.red_full = base + 16 * MAX_STAGES;
  s.red_empty = s.red_full + 32;
  s.x_full = s.red_empty + 32;
  s.open = s.x_full + 8;
  s.x = base + 1024;
  s.red = s.x + (m == 1 ? (n_blocks * C::X_BLOCK + 127) / 128 * 128 : 0);
  s.ring = s.red + C::N_RED * C::RED;
  return s;
}

/* One 128-column block of one warp: total[mt][nt] += scales * (products - offsets). All loads are issued first. */
template <int M, int MT, int FORMAT>
SITS_DEV void block_products(float total[MT][(M + 7) / 8][4], uint32_t w_addr, uint32_t x_addr, int lane) {
  using C = shape<M, MT, FORMAT>;
  constexpr int NT = C::NT, W_NEXT = STAGE_BLOCKS * C::UNIT;
  const int g = lane >> 2;
  const float zero[4] = {0.f, 0.f, 0.f, 0.f};
  const uint32_t lo = FORMAT == K_W4_G128 ? 0xCE00CE00u : 0xCC00CC00u; /* -24 or -16 */
  const uint32_t hi = FORMAT == K_W4_G128 ? 0xDC20DC20u : 0xDC00DC00u; /* -264 or -256 */
  const uint32_t offsets[4] = {lo, hi, lo, hi};
  float acc[MT][NT][4], seed[NT][4];
  uint32_t w[MT][8], b[4][NT][4], scale[MT];
#pragma unroll
  for (int i = 0; i < MT; i++) {
    if (FORMAT == K_W4_G128) scale[i] = lds32(w_addr + i * W_NEXT + K_W4_NIBBLE_BYTES + g * 4);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      uint4 v = lds128(w_addr + i * W_NEXT + c * 512 + lane * 16);
      w[i][c * 4] = v.x, w[i][c * 4 + 1] = v.y, w[i][c * 4 + 2] = v.z, w[i][c * 4 + 3] = v.w;
    }
  }
  auto load_b = [&](int s) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      uint4 v = lds128(x_addr + s * (64 * M) + n * 512);
      b[s][n][0] = v.x, b[s][n][1] = v.y, b[s][n][2] = v.z, b[s][n][3] = v.w;
    }
  };
  constexpr bool B_FIRST = MT < 3; /* three row tiles leave no registers for it */
  if (B_FIRST)
#pragma unroll
    for (int s = 0; s < 4; s++) load_b(s);
#pragma unroll
  for (int s = 0; s < 4; s++) { /* 32 columns each */
    const bool fresh = FORMAT == K_W4_G32M || s == 0;
    if (!B_FIRST) load_b(s);
#pragma unroll
    for (int q = 0; q < 2; q++) {
#pragma unroll
      for (int n = 0; n < NT; n++) mma_f16(seed[n], offsets, b[s][n][q * 2], b[s][n][q * 2 + 1], fresh && q == 0 ? zero : seed[n]);
#pragma unroll
      for (int i = 0; i < MT; i++) {
        uint32_t a[4];
        fold_nibbles(w[i][s * 2 + q], a);
#pragma unroll
        for (int n = 0; n < NT; n++) mma_f16(acc[i][n], a, b[s][n][q * 2], b[s][n][q * 2 + 1], fresh && q == 0 ? zero : acc[i][n]);
      }
    }
    if (FORMAT == K_W4_G32M) {
#pragma unroll
      for (int i = 0; i < MT; i++) {
        uint2 v = lds64(w_addr + i * W_NEXT + K_W4_NIBBLE_BYTES + s * 64 + g * 8);
        float2 f0 = half2_to_float2(v.x), f1 = half2_to_float2(v.y); /* {scale, minimum} of rows g and g+8 */
        f0.y *= -1.f / 16.f;                                         /* seed holds -16 and -256 times the sum of x */
        f1.y *= -1.f / 256.f;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float2 f = e < 2 ? f0 : f1;
            total[i][n][e] += f.x * (acc[i][n][e] + seed[n][e]) + f.y * seed[n][e];
          }
      }
    }
  }
  if (FORMAT == K_W4_G128) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
      float2 f = half2_to_float2(scale[i]);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) total[i][n][e] += (e < 2 ? f.x : f.y) * (acc[i][n][e] + seed[n][e]);
    }
  }
}

template <int M, int MT, int FORMAT> SITS_DEV void consume(const params &p, const smem_map &s, int n_local) {
  using C = shape<M, MT, FORMAT>;
  constexpr int NT = C::NT;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int set = warp >> 2, sub = warp & 3, per_tile = (p.n_blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
  const uint32_t x_lane = (M >= 8 ? g * 64 : 0) + t * 16;
  int slot = set, red = 0;
  uint32_t parity = 0, red_parity = 1;
  if (M == 1) bar_wait(s.x_full, 0);
  for (int tile = 0; tile < n_local; tile++) {
    float total[MT][NT][4] = {};
    for (int i = (set ^ (tile * per_tile)) & 1; i < per_tile; i += 2) {
      const int block = i * STAGE_BLOCKS + sub;
      bar_wait(s.full + slot * 8, parity);
      if (block < p.n_blocks) {
        const uint32_t stage = s.ring + slot * C::STAGE;
        const uint32_t x_addr = (M == 1 ? s.x + block * C::X_BLOCK : stage + C::W_STAGE + sub * C::X_BLOCK) + x_lane;
        block_products<M, MT, FORMAT>(total, stage + sub * C::UNIT, x_addr, lane);
      }
      __syncwarp();
      if (lane == 0) bar_arrive(s.empty + slot * 8);
      slot += 2;
      if (slot >= p.stages) slot -= p.stages, parity ^= 1;
    }
    bar_wait(s.red_empty + red * 8, red_parity);
    const uint32_t r = s.red + red * C::RED + warp * (C::ROWS * M * 4);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        if (M >= 8) {
          sts64_f32(r + ((i * 16 + g) * M + n * 8 + t * 2) * 4, total[i][n][0], total[i][n][1]);
          sts64_f32(r + ((i * 16 + g + 8) * M + n * 8 + t * 2) * 4, total[i][n][2], total[i][n][3]);
        } else if (t == 0) {
          sts_f32(r + (i * 16 + g) * 4, total[i][n][0]);
          sts_f32(r + (i * 16 + g + 8) * 4, total[i][n][2]);
        }
      }
    __syncwarp();
    if (lane == 0) bar_arrive(s.red_full + red * 8); /* for all lanes, whose stores __syncwarp orders before it */
    if (++red == C::N_RED) red = 0, red_parity ^= 1;
  }
}

/* 1/rms of token n = lane % M, from the partial sums the predecessor left. All loads are in flight together: this runs beside the first
 * tile's products and must not outlast them. */
template <int M> SITS_DEV float norm_factor(const params &p, int lane) {
  if (p.x_ssq == nullptr) return 1.f;
  const int n = p.x_n_ssq * M;
  float sum = 0.f;
  if (n % 128 == 0) { /* whole float4s for every lane; a lane's four tokens are the same in each */
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = lane; i < n / 4; i += 32) {
      float4 x = __ldcg((const float4 *)p.x_ssq + i);
      v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
    }
    if (M == 1)
      sum = warp_sum(v.x + v.y + v.z + v.w);
    else {
#pragma unroll
      for (int d = 16; d >= M / 4; d >>= 1) {
        v.x += __shfl_xor_sync(~0u, v.x, d), v.y += __shfl_xor_sync(~0u, v.y, d);
        v.z += __shfl_xor_sync(~0u, v.z, d), v.w += __shfl_xor_sync(~0u, v.w, d);
      }
      const int from = (lane % M) / 4, which = lane & 3;
      const float x = __shfl_sync(~0u, v.x, from), y = __shfl_sync(~0u, v.y, from), z = __shfl_sync(~0u, v.z, from),
                  w = __shfl_sync(~0u, v.w, from);
      sum = which == 0 ? x : which == 1 ? y : which == 2 ? z : w;
    }
  } else {
    for (int i = lane; i < n; i += 32) sum += __ldcg(p.x_ssq + i);
#pragma unroll
    for (int d = 16; d >= M; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
  }
  return rsqrtf(sum / p.x_width + p.eps);
}

SITS_DEV __half saturated_half(float v) { return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)); }

/* WIDE values side by side of all consumers' partial tiles, added in their order. */
template <int WIDE, int STRIDE> SITS_DEV void add_partial(float (&sum)[WIDE], uint32_t at) {
#pragma unroll
  for (int i = 0; i < WIDE; i++) sum[i] = 0.f;
#pragma unroll
  for (int k = 0; k < CONSUMERS; k++) {
    if constexpr (WIDE == 4) {
      const uint4 v = lds128(at + k * STRIDE);
      sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y), sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
    } else
      sum[0] += lds_f32(at + k * STRIDE);
  }
}

/* Outputs of a tile, which a lane takes WIDE tokens of a row at a time: rows lie side by side in memory, tokens in the partial tiles. */
template <int M, int MT, int FORMAT> SITS_DEV void finish(const params &p, const smem_map &s, int tile0, int n_local) {
  using C = shape<M, MT, FORMAT>;
  constexpr int ROWS = C::ROWS, WIDE = M >= 8 ? 4 : 1, LANES = M / WIDE, STEP = 32 / LANES; /* lanes a row, rows a turn */
  constexpr int TURNS = (ROWS + STEP - 1) / STEP, PAIR_TURNS = (ROWS / 2 + STEP - 1) / STEP, STRIDE = ROWS * M * 4;
  const int lane = threadIdx.x & 31, n0 = lane % LANES * WIDE;
  const float own = norm_factor<M>(p, lane);
  float factor[WIDE];
#pragma unroll
  for (int i = 0; i < WIDE; i++) factor[i] = __shfl_sync(~0u, own, n0 + i);
  int red = 0;
  uint32_t parity = 0;
  for (int tile = 0; tile < n_local; tile++) {
    const int row0 = (tile0 + tile) * ROWS;
    const uint32_t r = s.red + red * C::RED + n0 * 4;
    if (p.output == K_OUT_SWIGLU) {
      bar_wait(s.red_full + red * 8, parity);
#pragma unroll
      for (int z = 0; z < PAIR_TURNS; z++) {
        const int o = lane / LANES + z * STEP, r0 = (o >> 3) * 16 + (o & 7);
        if (o >= ROWS / 2 || row0 + r0 >= p.rows) continue;
        float gate[WIDE], up[WIDE];
        add_partial<WIDE, STRIDE>(gate, r + r0 * M * 4);
        add_partial<WIDE, STRIDE>(up, r + (r0 + 8) * M * 4);
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
          const float g = gate[i] * factor[i], u = up[i] * factor[i];
          if (n0 + i < p.n_tokens) p.next[k_frag_index(M, row0 / 2 + o, n0 + i)] = saturated_half(g / (1.f + __expf(-g)) * u);
        }
      }
    } else {
      /* Everything the epilogue reads is fetched before the sums are ready: a load behind a store would wait for it. */
      float h[TURNS][WIDE], gain[TURNS], square[WIDE] = {};
#pragma unroll
      for (int z = 0; z < TURNS; z++) {
        const int lr = lane / LANES + z * STEP, row = row0 + lr;
        const bool exists = row < p.rows && lr < ROWS;
        gain[z] = p.output == K_OUT_RESIDUAL && exists ? __ldg(p.gain + row) : 0.f;
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
          h[z][i] = p.bias && exists ? __ldg(p.bias + row) : 0.f;
          if (p.output == K_OUT_RESIDUAL && exists && n0 + i < p.n_tokens)
            h[z][i] += __ldcg((const float *)p.y + (size_t)(n0 + i) * p.ld + row);
        }
      }
      bar_wait(s.red_full + red * 8, parity);
#pragma unroll
      for (int z = 0; z < TURNS; z++) {
        const int lr = lane / LANES + z * STEP, row = row0 + lr;
        if (lr >= ROWS || row >= p.rows) continue;
        float sum[WIDE];
        add_partial<WIDE, STRIDE>(sum, r + lr * M * 4);
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
          const int n = n0 + i;
          const size_t at = (size_t)n * p.ld + row;
          const float y = sum[i] * factor[i] + h[z][i];
          if (n >= p.n_tokens) continue;
          if (p.output == K_OUT_F16)
            ((__half *)p.y)[at] = saturated_half(y);
          else
            ((float *)p.y)[at] = y;
          if (p.output == K_OUT_RESIDUAL) {
            p.next[k_frag_index(M, row, n)] = saturated_half(y * gain[z]);
            square[i] += y * y;
          }
        }
      }
      if (p.output == K_OUT_RESIDUAL) {
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
#pragma unroll
          for (int d = 16; d >= LANES; d >>= 1) square[i] += __shfl_xor_sync(~0u, square[i], d);
          if (lane < LANES) p.ssq[(tile0 + tile) * M + n0 + i] = square[i];
        }
      }
    }
    __syncwarp();
    if (lane == 0) bar_arrive(s.red_empty + red * 8);
    if (++red == C::N_RED) red = 0, parity ^= 1;
  }
}

/* Loader `which` brings every second stage: weights, and once the ring has gone round activations too (those of the first round come from
 * load_first_x). One thread issues a copy every 150 ns or so whatever its size; two keep the SM's share of the memory rate. */
template <int M, int MT, int FORMAT> SITS_DEV void load_stages(const params &p, const smem_map &s, int tile0, int n_local, int which) {
  using C = shape<M, MT, FORMAT>;
  const uint64_t policy = policy_evict_first();
  const int per_tile = (p.n_blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS, total = per_tile * n_local;
  int slot = which, tile = 0, i = which;
  uint32_t parity = 1;
  long long last = clock64();
  for (int n_issued = which; n_issued < total; n_issued += LOADERS, i += LOADERS, slot += LOADERS) {
    while (i >= per_tile) i -= per_tile, tile++;
    if (slot >= p.stages) slot -= p.stages, parity ^= 1;
    const int n = min(STAGE_BLOCKS, p.n_blocks - i * STAGE_BLOCKS);
    const uint32_t bar = s.full + slot * 8, stage = s.ring + slot * C::STAGE;
    if (n_issued < p.stages) {
      while (n_issued >= LOADERS && !bar_test(s.open, 0) && clock64() - last < LOADERS * p.pace_cycles) {}
      last = clock64();
    } else
      bar_wait(s.empty + slot * 8, parity);
    bar_arrive_expect(bar, n * (MT * C::UNIT + (M > 1 ? C::X_BLOCK : 0)));
#pragma unroll
    for (int j = 0; j < MT; j++) {
      const int row_tile = min((tile0 + tile) * MT + j, p.n_row_tiles - 1);
      bulk_load_hint(stage + j * (STAGE_BLOCKS * C::UNIT), p.weight + ((size_t)row_tile * p.n_blocks + i * STAGE_BLOCKS) * C::UNIT,
                     n * C::UNIT, bar, policy);
    }
    if (M > 1 && n_issued >= p.stages) bulk_load(stage + C::W_STAGE, p.x + (size_t)i * STAGE_BLOCKS * C::X_BLOCK, n * C::X_BLOCK, bar);
  }
}

/* After grid_wait, one thread: all of x (M = 1), or the activations of the ring's first round. */
template <int M, int MT, int FORMAT> SITS_DEV void load_first_x(const params &p, const smem_map &s, int n_local) {
  using C = shape<M, MT, FORMAT>;
  if (M == 1) {
    bar_arrive_expect(s.x_full, p.n_blocks * C::X_BLOCK);
    bulk_load(s.x, p.x, p.n_blocks * C::X_BLOCK, s.x_full);
    return;
  }
  const int per_tile = (p.n_blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS, total = min(p.stages, per_tile * n_local);
  for (int k = 0, i = 0; k < total; k++, i = i + 1 == per_tile ? 0 : i + 1)
    bulk_load(s.ring + k * C::STAGE + C::W_STAGE, p.x + (size_t)i * STAGE_BLOCKS * C::X_BLOCK,
              min(STAGE_BLOCKS, p.n_blocks - i * STAGE_BLOCKS) * C::X_BLOCK, s.full + k * 8);
}
#endif

template <int M, int MT, int FORMAT> __global__ void __launch_bounds__(THREADS, M == 16 ? 1 : 2)
    gemm_w4a16_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  using C = shape<M, MT, FORMAT>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const smem_map s = map_smem<C>(smem_addr(smem), p.n_blocks, M);
  const int tile0 = (int)((long long)blockIdx.x * p.n_tiles / gridDim.x);
  const int n_local = (int)((long long)(blockIdx.x + 1) * p.n_tiles / gridDim.x) - tile0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; i++) bar_init(s.full + i * 8, 1), bar_init(s.empty + i * 8, STAGE_BLOCKS);
    for (int i = 0; i < C::N_RED; i++) bar_init(s.red_full + i * 8, CONSUMERS), bar_init(s.red_empty + i * 8, 1);
    bar_init(s.x_full, 1);
    bar_init(s.open, 1);
    bar_fence_init();
  }
  __syncthreads();
  if (warp < CONSUMERS)
    consume<M, MT, FORMAT>(p, s, n_local);
  else if (warp == WARP_FINISH) {
    grid_wait();
    if (lane == 0) bar_arrive(s.open), load_first_x<M, MT, FORMAT>(p, s, n_local);
    __syncwarp();
    finish<M, MT, FORMAT>(p, s, tile0, n_local);
  } else if (lane == 0)
    load_stages<M, MT, FORMAT>(p, s, tile0, n_local, warp - WARP_LOAD);
#endif
}

template <int M, int MT, int FORMAT> int launch_shape(const params &p, const struct k_w4a16_plan &plan, k_stream at) {
  return launch_kernel(gemm_w4a16_kernel<M, MT, FORMAT>, dim3(plan.grid), dim3(THREADS), plan.smem_bytes, (cudaStream_t)at.stream, at.pdl,
                       p);
}

template <int M, int MT, int FORMAT> void plan_memory(int n_blocks, int output, struct k_w4a16_plan *plan) {
  using C = shape<M, MT, FORMAT>;
  const int budget = M == 16 ? FULL_BYTES : output == K_OUT_RESIDUAL ? SMALL_BYTES : LARGE_BYTES;
  int stages = (budget - C::fixed_bytes(n_blocks)) / C::STAGE;
  if (stages > MAX_STAGES) stages = MAX_STAGES;
  plan->stages = stages & ~1;
  plan->smem_bytes = budget == LARGE_BYTES ? budget : C::fixed_bytes(n_blocks) + plan->stages * C::STAGE;
}

} // namespace

extern "C" bool k_w4a16_plan(const struct k_w4a16 *a, int32_t n_sm, struct k_w4a16_plan *plan) {
  if (a->n_tokens < 1 || a->n_tokens > K_MAX_DECODE_TOKENS || a->rows < 1 || a->cols < 1) return false;
  if (a->output == K_OUT_SWIGLU && a->rows % 16) return false; /* gate and up rows come in eights */
  const int n_blocks = k_blocks(a->cols), row_tiles = k_row_tiles(a->rows);
  plan->m = k_w4a16_tokens(a->n_tokens);
  /* Three row tiles a CTA where two would leave the last round half empty (6,144 rows on 132 SMs); x must be resident for that. */
  const int two = (row_tiles + 1) / 2, three = (row_tiles + 2) / 3;
  const bool wide = plan->m == 1 && a->output != K_OUT_RESIDUAL && a->format == K_W4_G128 && two > n_sm && three <= n_sm;
  plan->row_tiles = wide ? 3 : 2;
  plan->grid = n_sm; /* also where there are fewer tiles: a CTA without work keeps its SM from taking two of the next kernel */
  plan->pace_cycles = 300;
  const bool g128 = a->format == K_W4_G128;
  if (wide)
    plan_memory<1, 3, K_W4_G128>(n_blocks, a->output, plan);
  else if (plan->m == 1 && g128)
    plan_memory<1, 2, K_W4_G128>(n_blocks, a->output, plan);
  else if (plan->m == 1)
    plan_memory<1, 2, K_W4_G32M>(n_blocks, a->output, plan);
  else if (plan->m == 8 && g128)
    plan_memory<8, 2, K_W4_G128>(n_blocks, a->output, plan);
  else if (plan->m == 8)
    plan_memory<8, 2, K_W4_G32M>(n_blocks, a->output, plan);
  else if (g128)
    plan_memory<16, 2, K_W4_G128>(n_blocks, a->output, plan);
  else
    plan_memory<16, 2, K_W4_G32M>(n_blocks, a->output, plan);
  return plan->stages >= 2; /* false: x of one token does not fit beside two stages (more than about 40,000 columns) */
}

extern "C" int sits_k_w4a16_init(void) {
  int e = prepare_kernel(gemm_w4a16_kernel<1, 3, K_W4_G128>, LARGE_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a16_kernel<1, 2, K_W4_G128>, LARGE_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a16_kernel<1, 2, K_W4_G32M>, LARGE_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a16_kernel<8, 2, K_W4_G128>, LARGE_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a16_kernel<8, 2, K_W4_G32M>, LARGE_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a16_kernel<16, 2, K_W4_G128>, FULL_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a16_kernel<16, 2, K_W4_G32M>, FULL_BYTES);
  return e;
}

extern "C" int sits_k_w4a16(const struct k_w4a16 *a, int32_t n_sm, struct k_stream at) {
  struct k_w4a16_plan plan;
  if (!k_w4a16_plan(a, n_sm, &plan)) return cudaErrorInvalidValue;
  params p = {};
  p.weight = (const uint8_t *)a->weight, p.x = (const uint8_t *)a->x;
  p.x_ssq = a->x_ssq, p.bias = a->bias, p.gain = a->gain, p.ssq = a->ssq, p.y = a->y, p.next = (__half *)a->next;
  p.x_width = a->x_width, p.eps = a->eps, p.x_n_ssq = a->x_n_ssq;
  p.n_blocks = k_blocks(a->cols), p.n_row_tiles = k_row_tiles(a->rows);
  p.n_tiles = (p.n_row_tiles + plan.row_tiles - 1) / plan.row_tiles;
  p.rows = a->rows, p.n_tokens = a->n_tokens, p.ld = a->ld, p.output = a->output, p.stages = plan.stages,
  p.pace_cycles = plan.pace_cycles;
  const bool g128 = a->format == K_W4_G128;
  if (plan.row_tiles == 3) return launch_shape<1, 3, K_W4_G128>(p, plan, at);
  if (plan.m == 1) return g128 ? launch_shape<1, 2, K_W4_G128>(p, plan, at) : launch_shape<1, 2, K_W4_G32M>(p, plan, at);
  if (plan.m == 8) return g128 ? launch_shape<8, 2, K_W4_G128>(p, plan, at) : launch_shape<8, 2, K_W4_G32M>(p, plan, at);
  return g128 ? launch_shape<16, 2, K_W4_G128>(p, plan, at) : launch_shape<16, 2, K_W4_G32M>(p, plan, at);
}
