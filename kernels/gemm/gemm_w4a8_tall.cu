/* y[n][r] = sum_k W[r][k] x[n][k] for 17 and more tokens n; weights packed 4-bit (G128), activations 8-bit, products by wgmma with the
 * weights widened in registers as the A operand and the tokens as N, sums s32. Beside gemm_w4a8.cu: taller tiles, any scales.
 *
 * Two kinds of scales:
 *   grouped   any f16 weight scale per row and 128 columns, an activation scale per token and 128 columns. Weights are widened to
 *             s8 = 16 (q - 8), two logical operations per four; after each column block the integer sums are added to f32 sums as
 *             sum * x_scale * w_scale / 16.
 *   absorbed  weight scales channel[r] * m with integers m = 1..16, one activation scale per token. Weights are widened to
 *             u8 = m (q - 8) + 128, sums stay integer to the end; 128 times the sum of x comes off there. Above 64 tokens, k not split.
 *
 * Arguments: struct k_w4a8 (kernels.h). x in tiles [token tile][column block][N][128], swizzled as wgmma reads them
 *   (common/activation.cuh); grouped x scales [token tile][column block][N] f32.
 * Work split: an item is a chunk of at most 16 / KG row tiles of 16, one of n_split runs of column blocks and one token tile; a CTA per SM
 *   takes items in turn. Four warpgroups, each with 64 rows: KG = 1: 256 rows; KG = 2: 128 rows, even and odd blocks,
 *   added in shared memory.
 *   Tall chunks because activations are read once per chunk and SM: at 128 tokens and 128 rows they are twice the weights' bytes.
 * Shared memory: head 8 KiB (barriers, then maxima or token scales); ring of x slots (up to 4 blocks, 16 KiB, 1,024-byte aligned), their
 *   scales; N * 128 bytes of s8 output or N * 256 of sums between k groups; ring of weight slots (4 blocks of every tile of the chunk).
 * Pipeline: one warp loads weights (a lane per tile; before grid_wait as far as the ring goes, across items), one thread x. A weight slot
 *   is free once widened, an x slot once the products that read it are done. Widening, products and scaling of a warpgroup follow each
 *   other; the other three fill the gaps.
 * Numerics: exact integers per column block (grouped) or altogether (absorbed); f32 sums in block order. Bitwise independent of the grid.
 *   K_W4A8_SWIGLU_S8 rounds to s8 with a scale per token and 128 columns.
 * Limits: sm_90a. T any. Rows a multiple of 16 are stored, others masked.
 * Cost: rows*cols*0.516 + T*cols bytes, 2*T*rows*cols operations.
 * History (gate_up of Llama-3-8B, H200): two warpgroups of 128 rows each, 25.9 us at 32 tokens, 37.6 at 128; four of 64, 23.8 and 31.4.
 *   Weights by 16-byte asynchronous copies instead of bulk copies: 25.0 and 36.7. int-to-float conversion instructions instead
 *   of the magic number:
 *   27.7 at 32.
 * Links: twin ref_w4_gemm (tests/gpu/test_gemm_w4.c), test tests/gpu/test_gemm_w4.c, bench sits2026-bench kernels.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"
#include "common/wgmma.cuh"
#include "kernels.h"

namespace {
constexpr int UNIT = K_W4_G128_UNIT, W_BLOCKS = 4, W_COPY = W_BLOCKS * UNIT;
constexpr int CONSUMER_WARPS = 16, CONSUMERS = 512, WARP_W = 16, WARP_X = 17;
constexpr int MAX_SLOTS = 8, HEAD_BYTES = 8192, MISC_AT = 512, BUDGET_BYTES = 224 * 1024, X_RING_BYTES = 64 * 1024;

/* Shapes whose consumers want more than 96 registers get two idle warps, so that the loaders' warpgroup can hand its registers over. */
__host__ __device__ constexpr bool is_wide(int n) { return n >= 64; }
constexpr int threads(int n) { return is_wide(n) ? 640 : 576; }
/* Column blocks of an x slot: 16 KiB, at most 4; every k group finds one of its own in each. */
__host__ __device__ constexpr int x_blocks(int n, int kg) { return n <= 32 ? 4 : n <= 64 ? 2 : kg; }

struct params {
  const uint8_t *weight;
  const float *channel, *x_scale;
  const int32_t *x_sum;
  const uint8_t *x;
  void *y;
  float *y_scale;
  int rows, n_row_tiles, n_blocks, n_tokens, n_split, ld, output, chunk_tiles, n_chunks, n_items, w_slots, x_slots, scales_at, w_at,
      staging_at;
  long long slab_stride;
};

#if SITS_SM90
struct item {
  int chunk, split, token_tile, block0, n; /* n column blocks from block0 */
};
SITS_DEV item item_at(const params &p, int i) {
  item it;
  it.split = i % p.n_split;
  i /= p.n_split;
  it.chunk = i % p.n_chunks, it.token_tile = i / p.n_chunks;
  it.block0 = (int)((long long)p.n_blocks * it.split / p.n_split);
  it.n = (int)((long long)p.n_blocks * (it.split + 1) / p.n_split) - it.block0;
  return it;
}

/* One side of a ring of slots, each with a full and an empty barrier. */
struct ring {
  uint32_t full, empty, parity;
  int slot, n;
  SITS_DEV void wait_full() const { bar_wait(full + slot * 8, parity); }
  SITS_DEV void wait_empty() const { bar_wait(empty + slot * 8, parity ^ 1); }
  SITS_DEV void next() {
    if (++slot == n) slot = 0, parity ^= 1;
  }
};

/* All lanes of a warp are done with a slot. */
SITS_DEV void release(uint32_t empty, int slot, int lane) {
  __syncwarp();
  if (lane == 0) bar_arrive(empty + slot * 8);
}

/* ---- loaders ---- */

SITS_DEV void load_weights(const params &p, ring r, uint32_t slots, int lane) {
  const uint64_t policy = policy_evict_first();
  const unsigned active = __ballot_sync(~0u, lane < p.chunk_tiles);
  if (lane >= p.chunk_tiles) return;
  for (int i = blockIdx.x; i < p.n_items; i += gridDim.x) {
    const item it = item_at(p, i);
    const int tile = min(it.chunk * p.chunk_tiles + lane, p.n_row_tiles - 1);
    const uint8_t *w = p.weight + ((size_t)tile * p.n_blocks + it.block0) * UNIT;
    for (int b = 0; b < it.n; b += W_BLOCKS) {
      const int bytes = min(W_BLOCKS, it.n - b) * UNIT;
      r.wait_empty();
      if (lane == 0) bar_arrive_expect(r.full + r.slot * 8, p.chunk_tiles * bytes);
      __syncwarp(active);
      bulk_load_hint(slots + (r.slot * p.chunk_tiles + lane) * W_COPY, w + (size_t)b * UNIT, bytes, r.full + r.slot * 8, policy);
      r.next();
    }
  }
}

template <int N, int KG, bool GROUPED> SITS_DEV void load_x(const params &p, ring r, uint32_t slots, uint32_t scales) {
  constexpr int XB = x_blocks(N, KG);
  for (int i = blockIdx.x; i < p.n_items; i += gridDim.x) {
    const item it = item_at(p, i);
    const size_t at = (size_t)it.token_tile * p.n_blocks + it.block0;
    for (int b = 0; b < it.n; b += XB) {
      const int n = min(XB, it.n - b);
      const uint32_t full = r.full + r.slot * 8;
      r.wait_empty();
      bar_arrive_expect(full, n * N * (128 + (GROUPED ? 4 : 0)));
      bulk_load(slots + r.slot * (XB * N * 128), p.x + (at + b) * (N * 128), n * N * 128, full);
      if (GROUPED) bulk_load(scales + r.slot * (XB * N * 4), p.x_scale + (at + b) * N, n * N * 4, full);
      r.next();
    }
  }
}

/* ---- widening 16 rows x 128 columns of one warp: eight words a lane -> 16 registers ---- */

SITS_DEV uint32_t lop_and_xor(uint32_t w, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(w), "r"(mask), "r"(bits));
  return r;
}

/* s8 = 16 (q - 8); the scales of rows g and g+8 with 1/16 in them. */
SITS_DEV float2 widen_s8(uint32_t (&a)[16], uint32_t unit, int lane) {
  const float2 s = half2_to_float2(lds32(unit + K_W4_NIBBLE_BYTES + (lane >> 2) * 4));
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const uint4 v = lds128(unit + c * 512 + lane * 16);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) { /* word i: step 2 c + i/2, half i%2 */
      uint32_t *r = a + (c * 2 + (i >> 1)) * 4 + (i & 1) * 2;
      r[0] = lop_and_xor(__funnelshift_r(w[i], w[i], 2), 0xF0F0F0F0u, 0x80808080u); /* row g */
      r[1] = lop_and_xor(w[i] << 2, 0xF0F0F0F0u, 0x80808080u);                      /* row g + 8 */
    }
  }
  return make_float2(s.x * 0.0625f, s.y * 0.0625f);
}

/* u8 = m (q - 8) + 128, m = scale / channel of rows g and g+8. */
SITS_DEV void widen_u8(uint32_t (&a)[16], uint32_t unit, int lane, float2 inv_channel) {
  const float2 s = half2_to_float2(lds32(unit + K_W4_NIBBLE_BYTES + (lane >> 2) * 4));
  const uint32_t m0 = (uint32_t)__float2int_rn(fabsf(s.x * inv_channel.x)), m1 = (uint32_t)__float2int_rn(fabsf(s.y * inv_channel.y));
  const uint32_t c0 = (128u - 8u * m0) * 0x01010101u, c1 = (128u - 8u * m1) * 0x01010101u;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const uint4 v = lds128(unit + c * 512 + lane * 16);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t *r = a + (c * 2 + (i >> 1)) * 4 + (i & 1) * 2;
      r[0] = (__funnelshift_r(w[i], w[i], 6) & 0x0F0F0F0Fu) * m0 + c0;
      r[1] = ((w[i] >> 2) & 0x0F0F0F0Fu) * m1 + c1;
    }
  }
}

/* ---- consumers ---- */

struct consumer {
  ring w, x;
  uint32_t w_slots, x_slots, x_scales;
  int lane, warp, row_group, k_group; /* warp in its warpgroup */
};

template <wgmma_weights TYPE, int N, bool FRESH> SITS_DEV void multiply(int (&d)[N / 2], const uint32_t (&a)[16], uint32_t x_addr) {
  const uint64_t x = wgmma_tile(x_addr);
  wgmma_fence();
  wgmma_s32<N>::template mul<TYPE, FRESH>(d, a, x);
#pragma unroll
  for (int k = 1; k < 4; k++) wgmma_s32<N>::template mul<TYPE, false>(d, a + k * 4, x + k * 2);
  wgmma_commit();
}

/* sum += x_scale * w_scale * d; x_scales: of columns 2t and on. An integer below 2^22 becomes a float by adding it to the bits of
 * 1.5 * 2^23 (conversion instructions run at a quarter of the rate); that number times a scale is exact because scales have 22 bits. */
template <int N> SITS_DEV void promote(float (&sum)[N / 2], const int (&d)[N / 2], float2 w_scale, uint32_t x_scales) {
  constexpr float BIAS = 12582912.f;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const uint2 v = lds64(x_scales + j * 32);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float scale = __uint_as_float(e & 1 ? v.y : v.x);
      const float value = fmaf(__int_as_float(d[j * 4 + e] + 0x4B400000), scale, -BIAS * scale);
      sum[j * 4 + e] = fmaf(value, e < 2 ? w_scale.x : w_scale.y, sum[j * 4 + e]);
    }
  }
}

/* The item's blocks of this warpgroup's k group, one after the other; what overlaps is the four warpgroups. body(unit, x slot, block in
 * it) widens, and calls leave() once the weights are in registers. */
template <int N, int KG, class F> SITS_DEV void for_blocks(const params &p, consumer &c, int n, F body) {
  constexpr int XB = x_blocks(N, KG);
  const int tile = min(c.row_group * 4 + c.warp, p.chunk_tiles - 1); /* warps beyond the chunk repeat its last tile, unstored */
  for (int s = 0; s < n; s += W_BLOCKS) {
    const int blocks = min(W_BLOCKS, n - s);
    const uint32_t w = c.w_slots + (c.w.slot * p.chunk_tiles + tile) * W_COPY;
    c.w.wait_full();
    if (c.k_group >= blocks) release(c.w.empty, c.w.slot, c.lane);
    for (int q = 0; q < blocks; q += XB) {
      c.x.wait_full();
      for (int b = q + c.k_group; b < min(q + XB, blocks); b += KG)
        body(w + b * UNIT, c.x.slot, b - q, [&] {
          if (b + KG >= blocks) release(c.w.empty, c.w.slot, c.lane);
        });
      release(c.x.empty, c.x.slot, c.lane);
      c.x.next();
    }
    c.w.next();
  }
}

template <int N, int KG> SITS_DEV void grouped_item(const params &p, consumer &c, float (&sum)[N / 2], int n) {
  constexpr int XB = x_blocks(N, KG);
  for_blocks<N, KG>(p, c, n, [&](uint32_t unit, int slot, int b, auto leave) {
    uint32_t a[16];
    int d[N / 2];
    const float2 scale = widen_s8(a, unit, c.lane);
    leave();
    multiply<WGMMA_S8, N, true>(d, a, c.x_slots + (slot * XB + b) * (N * 128));
    wgmma_wait<0>();
    promote<N>(sum, d, scale, c.x_scales + (slot * XB + b) * (N * 4) + (c.lane & 3) * 8);
  });
}

template <int N> SITS_DEV void absorbed_item(const params &p, consumer &c, int (&d)[N / 2], float2 inv, int n) {
  constexpr int XB = x_blocks(N, 1);
  for_blocks<N, 1>(p, c, n, [&](uint32_t unit, int slot, int b, auto leave) {
    uint32_t a[16];
    widen_u8(a, unit, c.lane, inv);
    leave();
    multiply<WGMMA_U8, N, false>(d, a, c.x_slots + (slot * XB + b) * (N * 128));
    wgmma_wait<0>();
  });
}

/* Two k groups of one row group: the second hands its sums to the first through shared memory, half at a time. */
template <int N> SITS_DEV void add_k_groups(const consumer &c, float (&v)[N / 2], float *exchange) {
  constexpr int HALF = N / 4;
  float *mine = exchange + c.row_group * (HALF * 128) + c.warp * 32 + c.lane;
  for (int h = 0; h < 2; h++) {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + c.row_group) : "memory");
    if (c.k_group)
#pragma unroll
      for (int i = 0; i < HALF; i++) mine[i * 128] = h ? v[HALF + i] : v[i];
    asm volatile("bar.sync %0, 256;" ::"r"(2 + c.row_group) : "memory");
    if (!c.k_group)
#pragma unroll
      for (int i = 0; i < HALF; i++)
        if (h)
          v[HALF + i] += mine[i * 128];
        else
          v[i] += mine[i * 128];
  }
}

/* ---- epilogues; v[4j], v[4j+1]: row g, columns 8j+2t, +1; v[4j+2], v[4j+3]: row g+8 ---- */

SITS_DEV void consumers_sync() { asm volatile("bar.sync 1, 512;" ::: "memory"); }
SITS_DEV float swiglu(float gate, float up) { return gate / (1.f + __expf(-gate)) * up; }
SITS_DEV __half saturated_half(float v) { return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)); }

template <int N> SITS_DEV void store_rows(const params &p, const item &it, const float (&v)[N / 2], int row0, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int n = it.token_tile * N + j * 8 + t * 2 + e, row = row0 + g;
      if (n >= p.n_tokens) continue;
      const float a = v[j * 4 + e], b = v[j * 4 + 2 + e];
      if (p.output == K_W4A8_SWIGLU) {
        if (row < p.rows) ((__half *)p.y)[(size_t)n * p.ld + row0 / 2 + g] = saturated_half(swiglu(a, b));
      } else if (p.output == K_W4A8_F16) {
        if (row < p.rows) ((__half *)p.y)[(size_t)n * p.ld + row] = saturated_half(a);
        if (row + 8 < p.rows) ((__half *)p.y)[(size_t)n * p.ld + row + 8] = saturated_half(b);
      } else {
        float *y = (float *)p.y + it.split * p.slab_stride + (size_t)n * p.ld + row;
        if (row < p.rows) y[0] = a;
        if (row + 8 < p.rows) y[8] = b;
      }
    }
}

/* The chunk's 128 products per token are one column block of the next GEMM's activations: scale, round and lay them out here. */
template <int N> SITS_DEV void store_swiglu_s8(const params &p, const item &it, float (&v)[N / 2], const consumer &c, float *maxima,
                                               uint8_t *staging) {
  const int g = c.lane >> 2, t = c.lane & 3, tile = c.row_group * 4 + c.warp, row = (it.chunk * 16 + tile) * 16;
#pragma unroll
  for (int k = 0; k < N / 4; k++) {
    const int at = (k >> 1) * 4 + (k & 1);
    v[at] = row < p.rows ? swiglu(v[at], v[at + 2]) : 0.f;
    float top = fabsf(v[at]);
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (g == 0) maxima[tile * N + (k >> 1) * 8 + t * 2 + (k & 1)] = top;
  }
  consumers_sync();
  const size_t block = (size_t)it.token_tile * p.n_chunks + it.chunk;
  float *inverse = maxima + CONSUMER_WARPS * N;
  if (threadIdx.x < N) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; w++) all = fmaxf(all, maxima[w * N + threadIdx.x]);
    p.y_scale[block * N + threadIdx.x] = short_scale(all * (1.f / 127.f));
    inverse[threadIdx.x] = all > 0.f ? 127.f / all : 0.f;
  }
  consumers_sync();
  const int column = tile * 8 + g;
#pragma unroll
  for (int k = 0; k < N / 4; k++) {
    const int n = (k >> 1) * 8 + t * 2 + (k & 1);
    const int q = __float2int_rn(fminf(fmaxf(v[(k >> 1) * 4 + (k & 1)] * inverse[n], -127.f), 127.f));
    staging[n * 128 + ((column >> 4) ^ (n & 7)) * 16 + (column & 15)] = (uint8_t)(int8_t)q;
  }
  consumers_sync();
  for (int i = threadIdx.x; i < N * 8; i += CONSUMERS) ((uint4 *)p.y)[block * (N * 8) + i] = ((const uint4 *)staging)[i];
}

/* Integer sums of absorbed weights -> values. */
template <int N> SITS_DEV void finish_absorbed(const int (&d)[N / 2], float (&v)[N / 2], float s0, float s1, const float *x_scale,
                                               const int *offset, int lane) {
#pragma unroll
  for (int k = 0; k < N / 4; k++) {
    const int n = (k >> 1) * 8 + (lane & 3) * 2 + (k & 1), at = (k >> 1) * 4 + (k & 1);
    v[at] = (float)(d[at] + offset[n]) * s0 * x_scale[n];
    v[at + 2] = (float)(d[at + 2] + offset[n]) * s1 * x_scale[n];
  }
}

template <int N, int KG> SITS_DEV void consume_grouped(const params &p, consumer &c, float *misc, uint8_t *staging) {
  for (int i = blockIdx.x; i < p.n_items; i += gridDim.x) {
    const item it = item_at(p, i);
    float sum[N / 2];
#pragma unroll
    for (int k = 0; k < N / 2; k++) sum[k] = 0.f;
    grouped_item<N, KG>(p, c, sum, it.n);
    if (p.output == K_W4A8_SWIGLU_S8) {
      if constexpr (KG == 1) store_swiglu_s8<N>(p, it, sum, c, misc, staging);
      continue;
    }
    if constexpr (KG == 2) add_k_groups<N>(c, sum, (float *)staging);
    const int tile = c.row_group * 4 + c.warp;
    if (c.k_group == 0 && tile < p.chunk_tiles) store_rows<N>(p, it, sum, (it.chunk * p.chunk_tiles + tile) * 16, c.lane);
  }
}

template <int N> SITS_DEV void consume_absorbed(const params &p, consumer &c, float *x_scale) {
  int *offset = (int *)(x_scale + 128);
  const int g = c.lane >> 2, last = p.n_row_tiles * 16 - 1, tile = c.row_group * 4 + c.warp;
  for (int i = blockIdx.x; i < p.n_items; i += gridDim.x) {
    const item it = item_at(p, i);
    const int row = (it.chunk * p.chunk_tiles + tile) * 16;
    const float s0 = __ldg(p.channel + min(row + g, last)), s1 = __ldg(p.channel + min(row + g + 8, last));
    int d[N / 2];
#pragma unroll
    for (int k = 0; k < N / 2; k++) d[k] = 0;
    c.x.wait_full(); /* so the predecessor has ended: fetch what the epilogue wants */
    if (threadIdx.x < N) {
      const int n = it.token_tile * N + threadIdx.x;
      x_scale[threadIdx.x] = n < p.n_tokens ? __ldcg(p.x_scale + n) : 0.f;
      offset[threadIdx.x] = n < p.n_tokens && it.split == 0 ? -128 * __ldcg(p.x_sum + n) : 0; /* one split for all */
    }
    absorbed_item<N>(p, c, d, make_float2(1.f / s0, 1.f / s1), it.n);
    consumers_sync();
    if (tile < p.chunk_tiles && row <= last) {
      float v[N / 2];
      finish_absorbed<N>(d, v, s0, s1, x_scale, offset, c.lane);
      store_rows<N>(p, it, v, row, c.lane);
    }
    consumers_sync(); /* before the next item's scales */
  }
}
#endif

template <int N, int KG, bool GROUPED> __global__ void __launch_bounds__(threads(N), 1)
    gemm_w4a8_tall_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const uint32_t base = smem_addr(smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  ring w = {base, base + 8 * MAX_SLOTS, 0, 0, p.w_slots}, x = {base + 16 * MAX_SLOTS, base + 24 * MAX_SLOTS, 0, 0, p.x_slots};
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.w_slots; i++) bar_init(w.full + i * 8, 1), bar_init(w.empty + i * 8, CONSUMER_WARPS);
    for (int i = 0; i < p.x_slots; i++) bar_init(x.full + i * 8, 1), bar_init(x.empty + i * 8, CONSUMER_WARPS);
    bar_fence_init();
  }
  __syncthreads();
  if (warp >= WARP_W) {
    if constexpr (is_wide(N)) registers_give<32>();
    if (warp == WARP_W) load_weights(p, w, base + p.w_at, lane);
    if (warp == WARP_X) {
      grid_wait();
      if (lane == 0) load_x<N, KG, GROUPED>(p, x, base + HEAD_BYTES, base + p.scales_at);
    }
  } else {
    if constexpr (is_wide(N)) registers_take<112>();
    consumer c = {w, x, base + p.w_at, base + HEAD_BYTES, base + p.scales_at, lane, warp & 3, (warp >> 2) / KG, (warp >> 2) % KG};
    float *misc = (float *)(smem + MISC_AT);
    if constexpr (GROUPED)
      consume_grouped<N, KG>(p, c, misc, smem + p.staging_at);
    else
      consume_absorbed<N>(p, c, misc);
  }
#endif
}

int group_tile(int n) { return n <= 16 ? 16 : n <= 32 ? 32 : 64; }

/* Estimated time of a choice in bytes an SM takes in: weights, activations from L2 at twice the rate, 1.5 us around each item, slabs
 * written and read. */
long long cost_of(const struct k_w4a8 *a, const struct k_w4a8_tall_plan *plan, int n_sm) {
  const long long n_blocks = k_blocks(a->cols);
  const long long rounds = (plan->n_items + n_sm - 1) / n_sm, blocks = (n_blocks + plan->n_split - 1) / plan->n_split;
  const long long item = blocks * (plan->chunk_tiles * UNIT + plan->tile * 64) + 50000;
  return rounds * item + (long long)plan->n_split * a->rows * a->n_tokens * 4 / n_sm;
}

void plan_items(const struct k_w4a8 *a, struct k_w4a8_tall_plan *plan, int chunk_tiles, int n_split) {
  plan->chunk_tiles = chunk_tiles, plan->n_split = n_split;
  plan->n_chunks = (k_row_tiles(a->rows) + chunk_tiles - 1) / chunk_tiles;
  plan->n_items = plan->n_chunks * n_split * plan->token_tiles;
}

void plan_memory(const struct k_w4a8 *a, struct k_w4a8_tall_plan *plan, int n_sm) {
  const int xb = x_blocks(plan->tile, plan->k_groups), x_slot = xb * plan->tile * 128, scales = a->is_grouped ? xb * plan->tile * 4 : 0;
  const int w_slot = plan->chunk_tiles * W_COPY, staging = plan->k_groups == 2 ? plan->tile * 256 : plan->tile * 128;
  const int blocks = (k_blocks(a->cols) + plan->n_split - 1) / plan->n_split, rounds = (plan->n_items + n_sm - 1) / n_sm;
  const int x_most = rounds * ((blocks + xb - 1) / xb), w_most = rounds * ((blocks + W_BLOCKS - 1) / W_BLOCKS);
  plan->grid = plan->n_items < n_sm ? plan->n_items : n_sm;
  const int x_fit = X_RING_BYTES / x_slot < 4 ? X_RING_BYTES / x_slot : 4;
  plan->x_slots = x_most < x_fit ? x_most : x_fit;
  plan->scales_at = HEAD_BYTES + plan->x_slots * x_slot;
  plan->staging_at = (plan->scales_at + plan->x_slots * scales + 127) / 128 * 128;
  plan->w_at = plan->staging_at + staging;
  plan->w_slots = (BUDGET_BYTES - plan->w_at) / w_slot;
  if (plan->w_slots > MAX_SLOTS) plan->w_slots = MAX_SLOTS;
  if (plan->w_slots > w_most) plan->w_slots = w_most;
  plan->smem_bytes = plan->w_at + plan->w_slots * w_slot;
}

template <int N, int KG, bool GROUPED> int launch_shape(const params &p, const struct k_w4a8_tall_plan &plan, k_stream at) {
  return launch_kernel(gemm_w4a8_tall_kernel<N, KG, GROUPED>, dim3(plan.grid), dim3(threads(N)), plan.smem_bytes,
                       (cudaStream_t)at.stream, at.pdl, p);
}
template <int KG> int launch_grouped(const params &p, const struct k_w4a8_tall_plan &plan, k_stream at) {
  if (plan.tile == 16) return launch_shape<16, KG, true>(p, plan, at);
  return plan.tile == 32 ? launch_shape<32, KG, true>(p, plan, at) : launch_shape<64, KG, true>(p, plan, at);
}
template <int KG> int init_grouped() {
  int e = prepare_kernel(gemm_w4a8_tall_kernel<16, KG, true>, BUDGET_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_tall_kernel<32, KG, true>, BUDGET_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_tall_kernel<64, KG, true>, BUDGET_BYTES);
  return e;
}
} // namespace

extern "C" int32_t k_w4a8_group_tile(int32_t n_tokens) { return group_tile(n_tokens); }

extern "C" bool k_w4a8_tall_plan(const struct k_w4a8 *a, int32_t n_sm, struct k_w4a8_tall_plan *plan) {
  if (a->n_tokens < 1 || a->rows < 1 || a->cols < 1) return false;
  /* Absorbed: long token tiles only, and no sums of several CTAs, which gemm_w4a8.cu makes as fast. */
  if (!a->is_grouped && (!a->channel || a->n_tokens <= 64 || a->output == K_W4A8_SLAB_F32)) return false;
  const bool is_pairs = a->output == K_W4A8_SWIGLU || a->output == K_W4A8_SWIGLU_S8;
  if (is_pairs && a->rows % 16) return false;
  if (a->output == K_W4A8_SWIGLU_S8 && (!a->is_grouped || !a->y_scale)) return false;
  plan->tile = a->is_grouped ? group_tile(a->n_tokens) : k_w4a8_tile(a->n_tokens);
  plan->token_tiles = (a->n_tokens + plan->tile - 1) / plan->tile;
  /* All four warpgroups on rows for SwiGLU, whose chunk must be a whole group, and where there are chunks enough for every SM. */
  plan->k_groups = !a->is_grouped || is_pairs || k_row_tiles(a->rows) >= 16 * n_sm ? 1 : 2;
  if (a->output == K_W4A8_SWIGLU_S8)
    plan_items(a, plan, 16, 1);
  else {
    const int most_splits = a->output == K_W4A8_SLAB_F32 ? 8 : 1, most = 16 / plan->k_groups, n_blocks = k_blocks(a->cols);
    struct k_w4a8_tall_plan best = *plan;
    long long least = -1;
    for (int tiles = most; tiles > most - 4; tiles--)
      for (int s = 1; s <= most_splits && s <= n_blocks; s++) {
        plan_items(a, plan, tiles, s);
        const long long cost = cost_of(a, plan, n_sm);
        if (least < 0 || cost < least) least = cost, best = *plan;
      }
    *plan = best;
  }
  plan_memory(a, plan, n_sm);
  return true;
}

extern "C" int sits_k_w4a8_tall_init(void) {
  int e = init_grouped<1>();
  if (!e) e = init_grouped<2>();
  if (!e) e = prepare_kernel(gemm_w4a8_tall_kernel<96, 1, false>, BUDGET_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_tall_kernel<128, 1, false>, BUDGET_BYTES);
  return e;
}

extern "C" int sits_k_w4a8_tall(const struct k_w4a8 *a, int32_t n_sm, struct k_stream at) {
  struct k_w4a8_tall_plan plan;
  if (!k_w4a8_tall_plan(a, n_sm, &plan)) return cudaErrorInvalidValue;
  params p = {};
  p.weight = (const uint8_t *)a->weight, p.channel = a->channel, p.x_scale = a->x_scale, p.x_sum = a->x_sum, p.x = (const uint8_t *)a->x;
  p.y = a->y, p.y_scale = a->y_scale, p.slab_stride = a->slab_stride, p.ld = a->ld, p.output = a->output;
  p.rows = a->rows, p.n_row_tiles = k_row_tiles(a->rows), p.n_blocks = k_blocks(a->cols), p.n_tokens = a->n_tokens;
  p.n_split = plan.n_split, p.chunk_tiles = plan.chunk_tiles, p.n_chunks = plan.n_chunks, p.n_items = plan.n_items;
  p.w_slots = plan.w_slots, p.x_slots = plan.x_slots, p.scales_at = plan.scales_at, p.w_at = plan.w_at, p.staging_at = plan.staging_at;
  if (!a->is_grouped) return plan.tile == 96 ? launch_shape<96, 1, false>(p, plan, at) : launch_shape<128, 1, false>(p, plan, at);
  return plan.k_groups == 1 ? launch_grouped<1>(p, plan, at) : launch_grouped<2>(p, plan, at);
}
