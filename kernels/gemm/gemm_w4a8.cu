/* y[n][r] = sum_k W[r][k] x[n][k] for 17 and more tokens n; weights packed 4-bit (G128), activations 8-bit, products by wgmma with the
 * weights widened in registers as the A operand and the tokens as N, sums s32.
 *
 * Two kinds of scales:
 *   absorbed  weight scales channel[r] * m with integers m = 1..16, one activation scale per token. Weights are widened to
 *             u8 = m (q - 8) + 128, sums stay integer to the end; 128 times the sum of x comes off there.
 *   grouped   any f16 weight scale per row and 128 columns, an activation scale per token and 128 columns. Weights are widened to
 *             s8 = 16 (q - 8), two logical operations per four; after each column block the integer sums are added to f32 sums as
 *             sum * x_scale * w_scale / 16.
 *
 * Arguments: struct k_w4a8 (kernels.h). x in tiles [token tile][column block][N][128], swizzled as wgmma reads them
 *   (common/activation.cuh); grouped x scales [token tile][column block][N] f32.
 * Work split: an item is a chunk of at most 16 / KG row tiles of 16, one of n_split runs of column blocks and one token tile; a CTA per SM
 *   takes items in turn. Four warpgroups, each with 64 rows: KG = 1: 256 rows; KG = 2: 128 rows, even and odd blocks,
 *   added in shared memory. Split sums go to slabs that the next kernel adds in order.
 *   Tall chunks because activations are read once per chunk and SM: at 128 tokens and 128 rows they are twice the weights' bytes.
 * Shared memory: head 8 KiB (barriers; maxima, or token and channel scales); ring of x slots (up to 4 blocks, 16 KiB, 1,024-byte aligned),
 *   their scales; staging of the output: absorbed 32 tokens of sums, grouped N * 128 bytes of s8 or N * 256 of sums between k groups;
 *   ring of weight slots (4 blocks of every tile of the chunk; absorbed, up to 64 tokens and 256 rows: 2). A CTA with one item stages where
 *   its slots were.
 * Pipeline: one warp (absorbed, up to 64 tokens: two, half of the chunk each) loads weights (a lane per tile; before grid_wait as far as
 *   the ring goes, absorbed and up to 64 tokens a slot every 1,800 cycles; across items), one thread x. A weight slot is full when every
 *   loader has arrived and all bytes have, free once widened;
 *   an x slot is free once the products that read it are done. Absorbed, up to 64 tokens: the next block's words are loaded before the
 *   products of the present one are issued, and widened while they run. Else widening, products and scaling of a warpgroup follow each
 *   other; the other three fill the gaps.
 * Numerics: exact integers per column block (grouped) or altogether (absorbed); f32 sums in block order. Bitwise independent of the grid.
 *   K_W4A8_SWIGLU_S8 rounds to s8 with a scale per token and 128 columns.
 * Limits: sm_90a. T any. Rows a multiple of 16 are stored, others masked.
 * Cost: rows*cols*0.516 + T*cols bytes, 2*T*rows*cols operations.
 * History (gate_up of Llama-3-8B, H200), grouped: two warpgroups of 128 rows each, 25.9 us at 32 tokens, 37.6 at 128; four of 64, 23.8 and
 *   31.4. Weights by 16-byte asynchronous copies instead of bulk copies: 25.0 and 36.7. int-to-float conversion instructions instead of the
 *   magic number: 27.7 at 32. Absorbed: stores of each thread's own sums took 5 us at 64 tokens and 12 at 128. Two CTAs of 128 rows an SM:
 *   as fast at 32 tokens, slower from 64 on. Making x inside (a row a CTA, then a wait for all): slower, bench/NOTES.md. Up to 64 tokens
 *   (a layer with its norms and conversions 57.1 us at 32): words loaded a block ahead, multipliers by a magic number and a second loader
 *   56.0; slots of two blocks as well 54.7. The same at 128 tokens: 85.2 and 85.7, so not there. Neither fewer slots in
 *   flight, nor the epilogue run once beforehand, nor slots of eight blocks for two k groups helped. A slot every 1,800 cycles until x
 *   comes: 54.6 to 52.2, 63.9 to 61.8 at 64 tokens, none at 128; every 300 cycles was no different from all at once. Activations by
 *   multicast to pairs of CTAs: a layer at 128 tokens 85 to 107. Integer sums added in L2 instead of slabs: no faster at 32 tokens.
 * Links: twin ref_w4_gemm (tests/gpu/test_gemm_w4.c), test tests/gpu/test_gemm_w4.c, bench sits2026-bench kernels.
 */
#include "common/activation.cuh"
#include "common/launch.cuh"
#include "common/wgmma.cuh"
#include "kernels.h"

namespace {
constexpr int UNIT = K_W4_G128_UNIT;
constexpr int CONSUMER_WARPS = 16, CONSUMERS = 512, WARP_W = 16, WARP_X = 17, WARP_W2 = 18;
constexpr int MAX_SLOTS = 8, HEAD_BYTES = 8192, MISC_AT = 512, PASS = 32, BUDGET_BYTES = 224 * 1024, X_RING_BYTES = 64 * 1024;

/* Shapes whose consumers want more than 96 registers get two idle warps, so that the loaders' warpgroup can hand its registers over. */
__host__ __device__ constexpr bool is_wide(int n) { return n >= 32; }
constexpr int threads(int n) { return is_wide(n) ? 640 : 576; }
/* Sums of PASS tokens on their way out, [token][row], rows padded so that neither side has bank conflicts. */
__host__ __device__ constexpr int stage_stride(int kg) { return 256 / kg + 4; }
/* Few tokens: short loops, for which weights have to come faster. */
__host__ __device__ constexpr bool is_few(int n, bool grouped) { return !grouped && n <= 64; }
/* Warps that load weights: the second is one of the idle ones. */
__host__ __device__ constexpr int loaders(int n, bool grouped) { return is_few(n, grouped) ? 2 : 1; }
/* Cycles between its first slots, until activations arrive: all at once they hold up the small kernel that makes those. */
constexpr int PACE_CYCLES = 1800;
/* Column blocks of a weight slot. Two for few tokens and 256 rows, so that five slots fit instead of two. */
__host__ __device__ constexpr int w_blocks(int n, int kg, bool grouped) { return is_few(n, grouped) && kg == 1 ? 2 : 4; }
/* Column blocks of an x slot: 16 KiB, at most 4 and no more than of a weight slot; every k group finds one of its own in each. */
__host__ __device__ constexpr int x_blocks(int n, int kg, bool grouped) {
  const int b = n <= 32 ? 4 : n <= 64 ? 2 : kg;
  return b < w_blocks(n, kg, grouped) ? b : w_blocks(n, kg, grouped);
}

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

/* A warp's share of the chunk's tiles (of five at least, so that every loader has some), from `first` to before `end`, a lane per tile.
 * first_x: barrier of the first activations. */
template <int W_BLOCKS, bool PACED>
SITS_DEV void load_weights(const params &p, ring r, uint32_t first_x, uint32_t slots, int first, int end) {
  int paced = PACED ? r.n : 0, last = 0; /* slots of the first lap still to come, before x as far as is known */
  const uint64_t policy = policy_evict_first();
  const int lane = first + (threadIdx.x & 31);
  const unsigned active = __ballot_sync(~0u, lane < end);
  if (lane >= end) return;
  for (int i = blockIdx.x; i < p.n_items; i += gridDim.x) {
    const item it = item_at(p, i);
    const int tile = min(it.chunk * p.chunk_tiles + lane, p.n_row_tiles - 1);
    const uint8_t *w = p.weight + ((size_t)tile * p.n_blocks + it.block0) * UNIT;
    for (int b = 0; b < it.n; b += W_BLOCKS) {
      const int bytes = min(W_BLOCKS, it.n - b) * UNIT;
      r.wait_empty();
      if (paced > 0) {
        bool has_x = false;
        if (paced < r.n)
          while (!(has_x = bar_test(first_x, 0)) && (int)clock() - last < PACE_CYCLES) {}
        paced = has_x ? 0 : paced - 1, last = (int)clock();
      }
      if (lane == first) bar_arrive_expect(r.full + r.slot * 8, (end - first) * bytes);
      __syncwarp(active);
      bulk_load_hint(slots + (r.slot * p.chunk_tiles + lane) * (W_BLOCKS * UNIT), w + (size_t)b * UNIT, bytes, r.full + r.slot * 8, policy);
      r.next();
    }
  }
}

template <int N, int KG, bool GROUPED> SITS_DEV void load_x(const params &p, ring r, uint32_t slots, uint32_t scales) {
  constexpr int XB = x_blocks(N, KG, GROUPED);
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

/* A lane's words of a unit, and the scales of rows g and g+8. */
struct packed_words {
  uint4 v[2];
  uint32_t scales;
};
SITS_DEV uint32_t load_scales(uint32_t unit, int lane) { return lds32(unit + K_W4_NIBBLE_BYTES + (lane >> 2) * 4); }
SITS_DEV uint4 load_half(uint32_t unit, int lane, int c) { return lds128(unit + c * 512 + lane * 16); }
SITS_DEV packed_words load_words(uint32_t unit, int lane) {
  return {{load_half(unit, lane, 0), load_half(unit, lane, 1)}, load_scales(unit, lane)};
}

/* u8 = m (q - 8) + 128, m = scale / channel of rows g and g+8, rounded by adding 2^23. inv_channel: without signs. half(c): words of steps
 * 2 c and 2 c + 1. */
template <class F> SITS_DEV void widen_u8(uint32_t (&a)[16], uint32_t scales, float2 inv_channel, F half) {
  const float2 s = half2_to_float2(scales);
  const uint32_t m0 = __float_as_uint(fmaf(fabsf(s.x), inv_channel.x, 8388608.f)) & 31,
                 m1 = __float_as_uint(fmaf(fabsf(s.y), inv_channel.y, 8388608.f)) & 31;
  const uint32_t c0 = 0x80808080u - m0 * 0x08080808u, c1 = 0x80808080u - m1 * 0x08080808u;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const uint4 v = half(c);
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
  constexpr int W_BLOCKS = w_blocks(N, KG, true), XB = x_blocks(N, KG, true);
  const int tile = min(c.row_group * 4 + c.warp, p.chunk_tiles - 1); /* warps beyond the chunk repeat its last tile, unstored */
  for (int s = 0; s < n; s += W_BLOCKS) {
    const int blocks = min(W_BLOCKS, n - s);
    const uint32_t w = c.w_slots + (c.w.slot * p.chunk_tiles + tile) * (W_BLOCKS * UNIT);
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
  constexpr int XB = x_blocks(N, KG, true);
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

/* The blocks of one weight slot. WHOLE: there are W_BLOCKS of them. Where registers allow (up to 64 tokens) the next block's words are
 * loaded and widened while the products of the present one run. done: x slot whose last products are the latest issued, or -1. */
template <int N, int KG, bool WHOLE>
SITS_DEV void absorbed_slot(consumer &c, int (&d)[N / 2], uint32_t (&a)[N <= 64 ? 2 : 1][16], float2 inv, uint32_t w, int blocks,
                            int &done) {
  constexpr bool AHEAD = N <= 64;
  constexpr int W_BLOCKS = w_blocks(N, KG, false), XB = x_blocks(N, KG, false), STEPS = W_BLOCKS / KG, PER_X = XB / KG;
  packed_words words;
  if (AHEAD && (WHOLE || c.k_group < blocks)) words = load_words(w + c.k_group * UNIT, c.lane);
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    const int b = k * KG + c.k_group;
    const bool has_block = WHOLE || b < blocks, has_slot = WHOLE || k / PER_X * XB < blocks;
    if (AHEAD && has_block) widen_u8(a[AHEAD ? k & 1 : 0], words.scales, inv, [&](int h) { return words.v[h]; });
    if (!AHEAD && has_block)
      widen_u8(a[0], load_scales(w + b * UNIT, c.lane), inv, [&](int h) { return load_half(w + b * UNIT, c.lane, h); });
    if (AHEAD && k + 1 < STEPS && (WHOLE || b + KG < blocks)) words = load_words(w + (b + KG) * UNIT, c.lane);
    if (WHOLE ? k == STEPS - 1 : has_block ? b + KG >= blocks : k == 0) release(c.w.empty, c.w.slot, c.lane);
    if (k % PER_X == 0 && has_slot) c.x.wait_full();
    if (has_block) {
      multiply<WGMMA_U8, N, false>(d, a[AHEAD ? k & 1 : 0], c.x_slots + (c.x.slot * XB + b % XB) * (N * 128));
      wgmma_wait<AHEAD ? 1 : 0>();
    } else
      wgmma_wait<0>();
    if (AHEAD && k % PER_X == 0) {
      if (done >= 0) release(c.x.empty, done, c.lane);
      done = -1;
    }
    if (k % PER_X == PER_X - 1 && has_slot) {
      if (AHEAD)
        done = c.x.slot;
      else
        release(c.x.empty, c.x.slot, c.lane);
      c.x.next();
    }
  }
}

template <int N, int KG> SITS_DEV void absorbed_item(const params &p, consumer &c, int (&d)[N / 2], float2 inv, int n) {
  constexpr int W_BLOCKS = w_blocks(N, KG, false);
  const int tile = min(c.row_group * 4 + c.warp, p.chunk_tiles - 1);
  const auto slot = [&] { return c.w_slots + (c.w.slot * p.chunk_tiles + tile) * (W_BLOCKS * UNIT); };
  uint32_t a[N <= 64 ? 2 : 1][16];
  int done = -1, left = n;
  for (; left >= W_BLOCKS; left -= W_BLOCKS) {
    c.w.wait_full();
    absorbed_slot<N, KG, true>(c, d, a, inv, slot(), W_BLOCKS, done);
    c.w.next();
  }
  if (left > 0) {
    c.w.wait_full();
    absorbed_slot<N, KG, false>(c, d, a, inv, slot(), left, done);
    c.w.next();
  }
  wgmma_wait<0>();
  if (done >= 0) release(c.x.empty, done, c.lane);
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
SITS_DEV float swiglu(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }
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

/* One token of an item, sums in shared memory: values of four rows a lane, stored side by side. */
struct token_out {
  const int *sums; /* those of the second k group lie PASS tokens on */
  const float *channel; /* of the chunk's rows */
  float x_scale;
  int offset, row0, n;
};
template <int KG> SITS_DEV float4 four_values(const token_out &o, int r) {
  int4 d = *(const int4 *)(o.sums + r);
  if (KG == 2) {
    const int4 e = *(const int4 *)(o.sums + PASS * stage_stride(KG) + r);
    d.x += e.x, d.y += e.y, d.z += e.z, d.w += e.w;
  }
  const float4 s = *(const float4 *)(o.channel + r);
  return make_float4((float)(d.x + o.offset) * s.x * o.x_scale, (float)(d.y + o.offset) * s.y * o.x_scale,
                     (float)(d.z + o.offset) * s.z * o.x_scale, (float)(d.w + o.offset) * s.w * o.x_scale);
}
SITS_DEV uint2 four_halves(float a, float b, float c, float d) {
  return make_uint2((uint32_t)__half_as_ushort(saturated_half(a)) | (uint32_t)__half_as_ushort(saturated_half(b)) << 16,
                    (uint32_t)__half_as_ushort(saturated_half(c)) | (uint32_t)__half_as_ushort(saturated_half(d)) << 16);
}
template <int KG> SITS_DEV void store_rows4(const params &p, const item &it, const token_out &o, int r) {
  const float4 v = four_values<KG>(o, r);
  const size_t at = (size_t)o.n * p.ld + o.row0 + r;
  if (p.output == K_W4A8_F16)
    *(uint2 *)((__half *)p.y + at) = four_halves(v.x, v.y, v.z, v.w);
  else
    __stcg((float4 *)((float *)p.y + it.split * p.slab_stride + at), v);
}
/* Rows that do not come in aligned fours. */
template <int KG> SITS_DEV void store_row1(const params &p, const item &it, const token_out &o, int r) {
  const int d = o.sums[r] + (KG == 2 ? o.sums[PASS * stage_stride(KG) + r] : 0);
  const float v = (float)(d + o.offset) * o.channel[r] * o.x_scale;
  const size_t at = (size_t)o.n * p.ld + o.row0 + r;
  if (p.output == K_W4A8_F16)
    ((__half *)p.y)[at] = saturated_half(v);
  else
    ((float *)p.y)[it.split * p.slab_stride + at] = v;
}
template <int KG> SITS_DEV void store_token(const params &p, const item &it, const token_out &o, int lane) {
  if (p.output == K_W4A8_SWIGLU) {
    const int r = (lane >> 1) * 16 + (lane & 1) * 4;
    if (lane >= p.chunk_tiles * 2 || o.row0 + r >= p.rows) return;
    const float4 g = four_values<KG>(o, r), u = four_values<KG>(o, r + 8);
    __half *y = (__half *)p.y + (size_t)o.n * p.ld + o.row0 / 2 + lane * 4;
    *(uint2 *)y = four_halves(swiglu(g.x, u.x), swiglu(g.y, u.y), swiglu(g.z, u.z), swiglu(g.w, u.w));
    return;
  }
  const int n_rows = min(p.chunk_tiles * 16, p.rows - o.row0);
  if (((p.rows | p.ld) & 3) == 0) {
#pragma unroll 1
    for (int r = lane * 4; r < n_rows; r += 128) store_rows4<KG>(p, it, o, r);
  } else
#pragma unroll 1
    for (int r = lane; r < n_rows; r += 32) store_row1<KG>(p, it, o, r);
}

/* All sums of an item go out through shared memory, PASS tokens at a time: lines written whole, and little code. The k groups'
 * integers meet there. */
template <int N, int KG> SITS_DEV void store_absorbed(const params &p, const item &it, const consumer &c, const int (&d)[N / 2], int *stage,
                                                      token_out o, const float *x_scale, const int *offset) {
  constexpr int S = stage_stride(KG);
  const int tile = c.row_group * 4 + c.warp;
  const uint32_t mine = smem_addr(stage) + (((c.lane & 3) * 2 + c.k_group * PASS) * S + tile * 16 + (c.lane >> 2)) * 4;
#pragma unroll 1
  for (int pass = 0; pass < N / PASS; pass++) {
    if (tile < p.chunk_tiles)
#pragma unroll
      for (int q = 0; q < N / PASS; q++)
        if (q == pass)
#pragma unroll
          for (int i = 0; i < PASS / 2; i++)
            sts32(mine + (((i >> 2) * 8 + (i & 1)) * S + (i >> 1 & 1) * 8) * 4, (uint32_t)d[q * (PASS / 2) + i]);
    consumers_sync();
#pragma unroll(N == 128 && KG == 2 ? 1 : 2)
    for (int k = 0; k < PASS; k += CONSUMER_WARPS) {
      const int token = k + (threadIdx.x >> 5), column = pass * PASS + token;
      o.n = it.token_tile * N + column;
      o.sums = stage + token * S, o.x_scale = x_scale[column], o.offset = offset[column];
      if (o.n < p.n_tokens) store_token<KG>(p, it, o, c.lane);
    }
    consumers_sync(); /* before the next sums, and the next item's scales */
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
    if constexpr (KG == 2) {
      consumers_sync(); /* the staging may lie where x was */
      add_k_groups<N>(c, sum, (float *)staging);
    }
    const int tile = c.row_group * 4 + c.warp;
    if (c.k_group == 0 && tile < p.chunk_tiles) store_rows<N>(p, it, sum, (it.chunk * p.chunk_tiles + tile) * 16, c.lane);
  }
}

SITS_DEV void fetch_channels(const params &p, const item &it, float *channel) {
  const int row = it.chunk * p.chunk_tiles * 16 + threadIdx.x;
  if (threadIdx.x < 256) channel[threadIdx.x] = __ldg(p.channel + min(row, p.n_row_tiles * 16 - 1));
}

template <int N, int KG> SITS_DEV void consume_absorbed(const params &p, consumer &c, float *x_scale, int *stage) {
  int *offset = (int *)(x_scale + 128);
  float *channel = x_scale + 256;
  fetch_channels(p, item_at(p, blockIdx.x), channel);
  const int r = min(c.row_group * 4 + c.warp, p.chunk_tiles - 1) * 16 + (c.lane >> 2);
  for (int i = blockIdx.x; i < p.n_items; i += gridDim.x) {
    const item it = item_at(p, i);
    const int row0 = it.chunk * p.chunk_tiles * 16;
    if (i != blockIdx.x) fetch_channels(p, it, channel);
    consumers_sync();
    const float2 inverse = make_float2(1.f / fabsf(channel[r]), 1.f / fabsf(channel[r + 8]));
    int d[N / 2];
#pragma unroll
    for (int k = 0; k < N / 2; k++) d[k] = 0;
    c.x.wait_full();
    /* so the predecessor has ended: fetch what the epilogue wants */
    const int n = it.token_tile * N + threadIdx.x;
    const bool has_token = threadIdx.x < N && n < p.n_tokens;
    const float scale = has_token ? __ldcg(p.x_scale + n) : 0.f;
    const int sum = has_token && it.split == 0 ? -128 * __ldcg(p.x_sum + n) : 0; /* one split for all */
    absorbed_item<N, KG>(p, c, d, inverse, it.n);
    if (threadIdx.x < N) x_scale[threadIdx.x] = scale, offset[threadIdx.x] = sum;
    consumers_sync(); /* and the stage may lie where slots were */
    store_absorbed<N, KG>(p, it, c, d, stage, {NULL, channel, 0.f, 0, row0, 0}, x_scale, offset);
  }
}
#endif

template <int N, int KG, bool GROUPED> __global__ void __launch_bounds__(threads(N), 1)
    gemm_w4a8_kernel(const __grid_constant__ params p) {
#if SITS_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const uint32_t base = smem_addr(smem);
  constexpr int LOADERS = loaders(N, GROUPED), W_BLOCKS = w_blocks(N, KG, GROUPED);
  constexpr bool PACED = is_few(N, GROUPED);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31; /* so that the compiler knows it uniform */
  ring w = {base, base + 8 * MAX_SLOTS, 0, 0, p.w_slots}, x = {base + 16 * MAX_SLOTS, base + 24 * MAX_SLOTS, 0, 0, p.x_slots};
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.w_slots; i++) bar_init(w.full + i * 8, LOADERS), bar_init(w.empty + i * 8, CONSUMER_WARPS);
    for (int i = 0; i < p.x_slots; i++) bar_init(x.full + i * 8, 1), bar_init(x.empty + i * 8, CONSUMER_WARPS);
    bar_fence_init();
  }
  __syncthreads();
  if (warp >= WARP_W) {
    if constexpr (is_wide(N)) registers_give<32>();
    const int share = (p.chunk_tiles + LOADERS - 1) / LOADERS;
    if (warp == WARP_W) load_weights<W_BLOCKS, PACED>(p, w, x.full, base + p.w_at, 0, share);
    if (LOADERS == 2 && warp == WARP_W2) load_weights<W_BLOCKS, PACED>(p, w, x.full, base + p.w_at, share, p.chunk_tiles);
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
      consume_absorbed<N, KG>(p, c, misc, (int *)(smem + p.staging_at));
  }
#endif
}

/* Token tiles. */
int absorbed_tile(int n) { return n <= 32 ? 32 : n <= 64 ? 64 : n <= 96 ? 96 : 128; }
int group_tile(int n) { return n <= 16 ? 16 : n <= 32 ? 32 : 64; }

/* Estimated time of a choice in bytes an SM takes in: weights, activations from L2 at twice the rate, 1.5 us around each item, slabs
 * written, and read by one SM a row. */
long long cost_of(const struct k_w4a8 *a, const struct k_w4a8_plan *plan, int n_sm) {
  const long long n_blocks = k_blocks(a->cols);
  const long long rounds = (plan->n_items + n_sm - 1) / n_sm, blocks = (n_blocks + plan->n_split - 1) / plan->n_split;
  const long long item = blocks * (plan->chunk_tiles * UNIT + plan->tile * 64) + 50000;
  return rounds * item + (long long)plan->n_split * a->rows * a->n_tokens * 4 / n_sm;
}

void plan_items(const struct k_w4a8 *a, struct k_w4a8_plan *plan, int chunk_tiles, int n_split) {
  plan->chunk_tiles = chunk_tiles, plan->n_split = n_split;
  plan->n_chunks = (k_row_tiles(a->rows) + chunk_tiles - 1) / chunk_tiles;
  plan->n_items = plan->n_chunks * n_split * plan->token_tiles;
}

void plan_memory(const struct k_w4a8 *a, struct k_w4a8_plan *plan, int n_sm) {
  const int xb = x_blocks(plan->tile, plan->k_groups, a->is_grouped), wb = w_blocks(plan->tile, plan->k_groups, a->is_grouped);
  const int x_slot = xb * plan->tile * 128, scales = a->is_grouped ? xb * plan->tile * 4 : 0;
  const int w_slot = plan->chunk_tiles * wb * UNIT, rounds = (plan->n_items + n_sm - 1) / n_sm;
  const int blocks = (k_blocks(a->cols) + plan->n_split - 1) / plan->n_split;
  const int x_most = rounds * ((blocks + xb - 1) / xb), w_most = rounds * ((blocks + wb - 1) / wb);
  const int staging = !a->is_grouped                     ? PASS * stage_stride(plan->k_groups) * plan->k_groups * 4
                      : plan->k_groups == 2              ? plan->tile * 256
                      : a->output == K_W4A8_SWIGLU_S8 ? plan->tile * 128
                                                         : 0;
  plan->grid = plan->n_items < n_sm ? plan->n_items : n_sm;
  const int x_fit = X_RING_BYTES / x_slot < 4 ? X_RING_BYTES / x_slot : 4;
  plan->x_slots = x_most < x_fit ? x_most : x_fit;
  plan->scales_at = HEAD_BYTES + plan->x_slots * x_slot;
  plan->staging_at = (plan->scales_at + plan->x_slots * scales + 127) / 128 * 128;
  plan->w_at = plan->staging_at + staging;
  if (rounds == 1) plan->w_at = plan->staging_at, plan->staging_at = HEAD_BYTES; /* where slots were */
  plan->w_slots = (BUDGET_BYTES - plan->w_at) / w_slot;
  if (plan->w_slots > MAX_SLOTS) plan->w_slots = MAX_SLOTS;
  if (plan->w_slots > w_most) plan->w_slots = w_most;
  plan->smem_bytes = plan->w_at + plan->w_slots * w_slot;
  if (plan->smem_bytes < plan->staging_at + staging) plan->smem_bytes = plan->staging_at + staging;
}

template <int N, int KG, bool GROUPED> int launch_shape(const params &p, const struct k_w4a8_plan &plan, k_stream at) {
  return launch_kernel(gemm_w4a8_kernel<N, KG, GROUPED>, dim3(plan.grid), dim3(threads(N)), plan.smem_bytes,
                       (cudaStream_t)at.stream, at.pdl, p);
}
template <int KG> int launch_grouped(const params &p, const struct k_w4a8_plan &plan, k_stream at) {
  if (plan.tile == 16) return launch_shape<16, KG, true>(p, plan, at);
  return plan.tile == 32 ? launch_shape<32, KG, true>(p, plan, at) : launch_shape<64, KG, true>(p, plan, at);
}
template <int KG> int init_grouped() {
  int e = prepare_kernel(gemm_w4a8_kernel<16, KG, true>, BUDGET_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<32, KG, true>, BUDGET_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<64, KG, true>, BUDGET_BYTES);
  return e;
}
} // namespace

extern "C" int32_t k_w4a8_tile(int32_t n_tokens) { return absorbed_tile(n_tokens); }
extern "C" int32_t k_w4a8_group_tile(int32_t n_tokens) { return group_tile(n_tokens); }

extern "C" bool k_w4a8_plan(const struct k_w4a8 *a, int32_t n_sm, struct k_w4a8_plan *plan) {
  if (a->n_tokens < 1 || a->rows < 1 || a->cols < 1) return false;
  if (!a->is_grouped && !a->channel) return false; /* the multipliers are not integers */
  const bool is_pairs = a->output == K_W4A8_SWIGLU || a->output == K_W4A8_SWIGLU_S8;
  if (is_pairs && a->rows % 16) return false;
  if (a->output == K_W4A8_SWIGLU_S8 && (!a->is_grouped || !a->y_scale)) return false;
  plan->tile = a->is_grouped ? group_tile(a->n_tokens) : absorbed_tile(a->n_tokens);
  plan->token_tiles = (a->n_tokens + plan->tile - 1) / plan->tile;
  /* All four warpgroups on rows for SwiGLU, whose chunk must be a whole group, and where there are chunks enough for every SM. */
  plan->k_groups = is_pairs || k_row_tiles(a->rows) >= 16 * n_sm ? 1 : 2;
  if (a->output == K_W4A8_SWIGLU_S8)
    plan_items(a, plan, 16, 1);
  else {
    const int most_splits = a->output == K_W4A8_SLAB_F32 ? 8 : 1, most = 16 / plan->k_groups, n_blocks = k_blocks(a->cols);
    struct k_w4a8_plan best = *plan;
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
  return plan->w_slots > 0;
}

template <int N> static int init_absorbed() {
  int e = prepare_kernel(gemm_w4a8_kernel<N, 1, false>, BUDGET_BYTES);
  if (!e) e = prepare_kernel(gemm_w4a8_kernel<N, 2, false>, BUDGET_BYTES);
  return e;
}
template <int N> static int launch_absorbed(const params &p, const struct k_w4a8_plan &plan, k_stream at) {
  return plan.k_groups == 1 ? launch_shape<N, 1, false>(p, plan, at) : launch_shape<N, 2, false>(p, plan, at);
}

extern "C" int sits_k_w4a8_init(void) {
  int e = init_grouped<1>();
  if (!e) e = init_grouped<2>();
  if (!e) e = init_absorbed<32>();
  if (!e) e = init_absorbed<64>();
  if (!e) e = init_absorbed<96>();
  if (!e) e = init_absorbed<128>();
  return e;
}

extern "C" int sits_k_w4a8(const struct k_w4a8 *a, int32_t n_sm, struct k_stream at) {
  struct k_w4a8_plan plan;
  if (!k_w4a8_plan(a, n_sm, &plan)) return cudaErrorInvalidValue;
  params p = {};
  p.weight = (const uint8_t *)a->weight, p.channel = a->channel, p.x_scale = a->x_scale, p.x_sum = a->x_sum, p.x = (const uint8_t *)a->x;
  p.y = a->y, p.y_scale = a->y_scale, p.slab_stride = a->slab_stride, p.ld = a->ld, p.output = a->output;
  p.rows = a->rows, p.n_row_tiles = k_row_tiles(a->rows), p.n_blocks = k_blocks(a->cols), p.n_tokens = a->n_tokens;
  p.n_split = plan.n_split, p.chunk_tiles = plan.chunk_tiles, p.n_chunks = plan.n_chunks, p.n_items = plan.n_items;
  p.w_slots = plan.w_slots, p.x_slots = plan.x_slots, p.scales_at = plan.scales_at, p.w_at = plan.w_at, p.staging_at = plan.staging_at;
  if (a->is_grouped) return plan.k_groups == 1 ? launch_grouped<1>(p, plan, at) : launch_grouped<2>(p, plan, at);
  switch (plan.tile) {
  case 32: return launch_absorbed<32>(p, plan, at);
  case 64: return launch_absorbed<64>(p, plan, at);
  case 96: return launch_absorbed<96>(p, plan, at);
  default: return launch_absorbed<128>(p, plan, at);
  }
}

