/* out[t][h] = softmax(q K^T / sqrt(D)) V, causal (and windowed), by wgmma: the Hopper form of prefill_f16.cu.
 *
 * Arguments: struct k_attn_prefill (kernels.h). Which tiles of keys a query's own group makes of it: common/prefill_tiles.cuh.
 *   q [T][H][D] f16, rotated; k, v gathered with is_tiled: tiles of 128 keys of one KV head,
 *   [D/64 slabs][128 keys][64 values] with 16-byte chunk c of key r at c ^ (r & 7); keys beyond the sequence are zeros.
 * Work split: a CTA takes 128 tokens of one sequence and one query head: two warpgroups of 64 rows and one whose first thread loads;
 *   keys in tiles of 128. Where there are fewer CTAs than SMs (short chunks of long prompts), each is split over its key tiles; the parts
 *   go to a workspace and a second kernel merges them, a warp per row.
 *   Grid: heads, then tiles of queries from the last (longest) to the first, so that short ones fill the end. A warpgroup skips nothing:
 *   tiles that only the other one sees are masked.
 * Shared memory: q 256 D, two stages of K and two of V of 256 D bytes each: 160 KiB at D = 128, one CTA per SM. Registers: 240 a thread of
 *   the two warpgroups (scores, probabilities and O are 160 of them), 24 of the loader's.
 * Pipeline: the loader brings K of a tile and V of the one before by a bulk copy each. K and V have rings of their own: k_full, v_full
 *   count bytes, k_empty, v_empty the warps. Inside a warpgroup the scores of tile i and the product of tile i-1's probabilities with V are
 *   issued one after the other; the maximum of tile i is found while that product ends, then probabilities go where those lay that it read.
 *   The warpgroups take turns at issuing (named barriers 2 and 3), so that one's softmax falls into the other's products.
 * Numerics: f16 products, f32 sums, base-2 exponentials against a reference of each row that moves to its maximum when that lies 2^8 above,
 *   P rounded to f16; masked scores are -inf, a row whose tiles are all masked so far keeps reference -1e30 and sum 0. Outputs
 *   are rotated back where the codec rotates values. Tolerance 2e-3 of the norm.
 * Limits: D 64 or 128, sm_90a. Others: prefill_f16.cu.
 * Cost: 4 T L D operations a head; bound by tensor cores. H200, 32 heads over 8, D = 128: 470 TFLOP/s at 2,048 tokens, 628 at 8,192, 690
 *   at 30,720; chunks of 1,024 tokens behind 29,696: 674 (bench/results/cuda_prefill_h200.json).
 * History: scores, softmax and values in a row, two warpgroups that drift apart, one ring of K and V: 284, 427, 483. This order: 470, 628,
 *   690. Without the turns 445, 620, 693; three stages 468, 626, 690; tiles of one head after the other instead of heads inside 409, 612,
 *   689. The compiler moves arithmetic behind a wait for a product that it does not need (then nothing overlaps): hence the two waits in
 *   `rescale`, each behind a branch that depends on it. 288 threads with 224 registers each spill. A branch that each warp takes for
 *   itself is what wgmma.wait_group.aligned forbids (synccheck saw it); asked of the warpgroup (bar.red.or) it costs 5 to 6 %: 606 to 576.
 * Links: twin ref_attention, test tests/gpu/test_attention.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"
#include "common/prefill_tiles.cuh"
#include "common/wgmma.cuh"

namespace {
constexpr int QUERIES = 128, KEYS = 128, STAGES = 2, CONSUMERS = 256, THREADS = CONSUMERS + 128;

struct params {
  k_attn_prefill a;
  float scale;
  int n_tiles, n_splits;
};

template <int D> struct shape {
  static constexpr int SLABS = D / 64, SLAB = KEYS * 128, TILE = SLABS * SLAB; /* bytes of q, of a K tile, of a V tile alike */
  static constexpr int SMEM = 1024 + TILE + 2 * STAGES * TILE;
};

/* A part of a CTA's rows, in the workspace: [128][D] values (not divided by the sum), then [128] references, [128] sums. */
template <int D> constexpr int PART = QUERIES * (D + 2);

#if SITS_SM90

/* Barriers of the rings, at the beginning of shared memory. */
struct barriers {
  uint32_t k_full, k_empty, v_full, v_empty; /* [STAGES] each */
  SITS_DEV explicit barriers(uint32_t at)
      : k_full(at), k_empty(at + 8 * STAGES), v_full(at + 16 * STAGES), v_empty(at + 24 * STAGES) {}
};

/* Place in a ring: a slot, and the parity of the phase in which it is full. */
struct ring_place {
  int slot = 0;
  uint32_t parity = 0;
  SITS_DEV void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

/* The CTA's query rows -> swizzled slabs; rows beyond the sequence are zeros. All consumer threads. */
template <int D> SITS_DEV void load_queries(const k_attn_prefill &a, uint8_t *dst, int row0, int n_rows, int head) {
  constexpr int CHUNKS = D / 8;
  for (int i = threadIdx.x; i < QUERIES * CHUNKS; i += CONSUMERS) {
    const int r = i / CHUNKS, c = i % CHUNKS;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (r < n_rows) v = *(const uint4 *)((const __half *)a.q + ((size_t)(row0 + r) * a.kv.n_heads + head) * D + c * 8);
    *(uint4 *)(dst + (c >> 3) * shape<D>::SLAB + r * 128 + (((c & 7) ^ (r & 7)) << 4)) = v;
  }
}

/* Keeps the compiler from moving uses of what a product writes before the wait for it. */
template <int N> SITS_DEV void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

/* Turns at issuing products. The second warpgroup gives the first turn, and none for a tile that does not come. */
SITS_DEV void take_turn(int group) { asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(CONSUMERS) : "memory"); }
SITS_DEV void give_turn(int group, bool is_last) {
  if (group == 0 || !is_last) asm volatile("bar.arrive %0, %1;" ::"r"(3 - group), "n"(CONSUMERS) : "memory");
}

/* s = Q K^T, 64 rows by 128 keys; o += P V. Descriptors of tiles; in them addresses count 16 bytes. */
template <int D> SITS_DEV void multiply_keys(float (&s)[64], uint64_t q, uint64_t k) {
#pragma unroll
  for (int kk = 0; kk < D / 16; kk++) {
    const uint32_t at = ((kk >> 2) * shape<D>::SLAB + (kk & 3) * 32) >> 4;
    wgmma_f16<128>::mul_ss(s, q + at, k + at, kk > 0);
  }
}
template <int D> SITS_DEV void multiply_values(float (&o)[D / 2], const uint32_t (&p)[8][4], uint64_t v) {
#pragma unroll
  for (int kk = 0; kk < KEYS / 16; kk++) wgmma_f16<D>::mul_rs(o, p[kk], v + kk * (2048 >> 4));
}

SITS_DEV void mask_scores(float (&s)[64], const tile_range &b, int tile, int row, int t) {
  int limit[2], low[2];
  visible_keys(b, tile, KEYS, row, &limit[0], &low[0]), visible_keys(b, tile, KEYS, row + 8, &limit[1], &low[1]);
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int key = (i >> 2) * 8 + t * 2 + (i & 1), h = (i >> 1) & 1;
    s[i] = key <= limit[h] && key >= low[h] ? s[i] : -INFINITY;
  }
}

/* A row's reference m moves only where a score lies 2^8 above it, so that most tiles need no exchange between lanes; probabilities stay
 * below 2^8. f: what O and the sums so far are multiplied by. */
SITS_DEV void move_reference(const float (&s)[64], float (&m)[2], float (&f)[2], float scale) {
  constexpr float MOST = 8.f;
  float top[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float part[4];
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const float pair = fmaxf(s[j * 4 + h * 2], s[j * 4 + h * 2 + 1]);
      part[j & 3] = j < 4 ? pair : fmaxf(part[j & 3], pair);
    }
    top[h] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])) * scale;
  }
  f[0] = f[1] = 1.f;
  if (!__any_sync(~0u, top[0] > m[0] + MOST || top[1] > m[1] + MOST)) return;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float next = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    next = fmaxf(m[h], fmaxf(next, __shfl_xor_sync(~0u, next, 2)));
    f[h] = exp2_fast(m[h] - next);
    m[h] = next;
  }
}

/* Scores -> probabilities, the A operand of their product with V. */
SITS_DEV void make_probabilities(const float (&s)[64], uint32_t (&p)[8][4], const float (&m)[2], float (&l)[2], const float (&f)[2],
                                 float scale) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int h = i & 1;
    const float a = exp2_fast(fmaf(s[2 * i], scale, -m[h])), b = exp2_fast(fmaf(s[2 * i + 1], scale, -m[h]));
    sum[h] += a, sum[h] += b;
    p[i >> 2][i & 3] = pack_half2(a, b);
  }
  l[0] = l[0] * f[0] + sum[0], l[1] = l[1] * f[1] + sum[1];
}

/* Wait for O and rescale it. Two waits whose texts differ, so that they are not made one and moved before the softmax. The first branch
 * asks what is always true (a factor is not negative), so that all four warps come to one wait, as wgmma.wait_group.aligned wants. */
template <int D> SITS_DEV void rescale(float (&o)[D / 2], const float (&f)[2]) {
  if (__any_sync(~0u, f[0] + f[1] >= 0.f)) {
    wgmma_wait<0>();
    pin(o);
    if (!__any_sync(~0u, f[0] != 1.f || f[1] != 1.f)) return;
#pragma unroll
    for (int j = 0; j < D / 2; j++) o[j] *= f[(j >> 1) & 1];
  } else {
    asm volatile("wgmma.wait_group.sync.aligned 0; // never: a sum that is no number" ::: "memory");
    pin(o);
  }
}

/* The tiles of one warpgroup: row is the thread's first of 128; o, m, l are its outputs. */
template <int D> SITS_DEV void walk(const params &args, const tile_range &b, uint32_t q, uint32_t ring, const barriers &bars, int row,
                                    float (&o)[D / 2], float (&m)[2], float (&l)[2]) {
  constexpr uint32_t STEP = shape<D>::TILE >> 4;
  const int lane = threadIdx.x & 31, t = lane & 3, group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const uint64_t my_q = wgmma_tile(q + group * 64 * 128), k = wgmma_tile(ring);
  const uint64_t v = wgmma_tile_mn(ring + STAGES * shape<D>::TILE, shape<D>::SLAB);
  ring_place at_k, at_v;
  float s[64], f[2];
  uint32_t p[8][4];
  if (group == 1) give_turn(group, false);
  bar_wait(bars.k_full, 0);
  take_turn(group);
  wgmma_fence();
  multiply_keys<D>(s, my_q, k);
  wgmma_commit();
  give_turn(group, b.begin + 1 == b.end);
  wgmma_wait<0>();
  pin(s);
  if (lane == 0) bar_arrive(bars.k_empty);
  at_k.next();
  if (tile_mask(b, b.begin, QUERIES, KEYS)) mask_scores(s, b, b.begin, row, t);
  move_reference(s, m, f, args.scale);
  make_probabilities(s, p, m, l, f, args.scale);
#pragma unroll 1
  for (int i = b.begin + 1; i < b.end; i++) {
    bar_wait(bars.k_full + at_k.slot * 8, at_k.parity);
    take_turn(group);
    wgmma_fence();
    multiply_keys<D>(s, my_q, k + at_k.slot * STEP);
    wgmma_commit();
    bar_wait(bars.v_full + at_v.slot * 8, at_v.parity);
    multiply_values<D>(o, p, v + at_v.slot * STEP);
    wgmma_commit();
    give_turn(group, i + 1 == b.end);
    wgmma_wait<1>();
    pin(s);
    if (lane == 0) bar_arrive(bars.k_empty + at_k.slot * 8);
    at_k.next();
    if (tile_mask(b, i, QUERIES, KEYS)) mask_scores(s, b, i, row, t);
    move_reference(s, m, f, args.scale);
    rescale<D>(o, f);
    if (lane == 0) bar_arrive(bars.v_empty + at_v.slot * 8);
    at_v.next();
    make_probabilities(s, p, m, l, f, args.scale);
  }
  bar_wait(bars.v_full + at_v.slot * 8, at_v.parity);
  wgmma_fence();
  multiply_values<D>(o, p, v + at_v.slot * STEP);
  wgmma_commit();
  wgmma_wait<0>();
  pin(o);
}

/* part: NULL, or where the rows go instead of out. */
template <int D> SITS_DEV void attend(const params &args, const tile_range &b, uint32_t q, uint32_t ring, const barriers &bars,
                                      __half *out, float *part) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, row = warp * 16 + g; /* 0..127 */
  float o[D / 2], m[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;
  if (b.begin < b.end) walk<D>(args, b, q, ring, bars, row, o, m, l);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float sum = l[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float inv = sum > 0.f ? 1.f / sum : 0.f, turn = 1.f, r[D / 4];
#pragma unroll
    for (int j = 0; j < D / 8; j++) r[2 * j] = o[j * 4 + h * 2], r[2 * j + 1] = o[j * 4 + h * 2 + 1];
    if (k_kv_rotates_values(args.a.kv.codec)) kv::hadamard_row<D>(r, t), turn = rsqrtf((float)D);
    inv *= turn;
    if (row + h * 8 >= b.n_rows) continue;
    if (part != NULL) {
      float *values = part + (row + h * 8) * D;
#pragma unroll
      for (int j = 0; j < D / 8; j++) *(float2 *)(values + j * 8 + t * 2) = make_float2(r[2 * j] * turn, r[2 * j + 1] * turn);
      if (t == 0) part[QUERIES * D + row + h * 8] = m[h], part[QUERIES * (D + 1) + row + h * 8] = sum;
      continue;
    }
    uint32_t *to = (uint32_t *)(out + (size_t)(row + h * 8) * args.a.kv.n_heads * D);
#pragma unroll
    for (int j = 0; j < D / 8; j++) to[j * 4 + t] = pack_half2(r[2 * j] * inv, r[2 * j + 1] * inv);
  }
}

/* The loader's one thread: K of each tile, then V of the one before, in the order in which they are used. */
template <int D> SITS_DEV void load_tiles(const params &args, const tile_range &b, uint32_t ring, const barriers &bars, int seq,
                                          int kv_head) {
  constexpr int TILE = shape<D>::TILE;
  const k_attn_prefill &a = args.a;
  const __half *v = (const __half *)a.v + ((size_t)kv_head * a.capacity + (a.offset ? a.offset[seq] : 0)) * D;
  ring_place at_k, at_v;
  for (int i = b.begin; i <= b.end; i++) {
    if (i < b.end) {
      bar_wait(bars.k_empty + at_k.slot * 8, at_k.parity ^ 1);
      bar_arrive_expect(bars.k_full + at_k.slot * 8, TILE);
      bulk_load(ring + at_k.slot * TILE, keys_of_tile(a, b, i, KEYS, seq, kv_head), TILE, bars.k_full + at_k.slot * 8);
      at_k.next();
    }
    if (i > b.begin) {
      bar_wait(bars.v_empty + at_v.slot * 8, at_v.parity ^ 1);
      bar_arrive_expect(bars.v_full + at_v.slot * 8, TILE);
      bulk_load(ring + (STAGES + at_v.slot) * TILE, v + (size_t)b.tile(i - 1) * KEYS * D, TILE, bars.v_full + at_v.slot * 8);
      at_v.next();
    }
  }
}
#endif

template <int D> __global__ void __launch_bounds__(THREADS, 1) attn_prefill_sm90_kernel(const __grid_constant__ params args) {
#if SITS_SM90
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_attn_prefill &a = args.a;
  const k_kv_view &kv = a.kv;
  const int tile = args.n_tiles - 1 - (int)blockIdx.y / args.n_splits, split = (int)blockIdx.y % args.n_splits;
  const int head = blockIdx.x, seq = a.seq0 + blockIdx.z;
  const int begin = kv.seq_start[seq], n_new = kv.seq_start[seq + 1] - begin, t0 = tile * QUERIES;
  if (t0 >= n_new || (a.skip_single && n_new == 1)) {
    grid_wait();
    return;
  }
  const tile_range b = key_tiles(kv, kv.kv_len[seq] - n_new + t0, min(QUERIES, n_new - t0), KEYS, split, args.n_splits);
  const uint32_t q = smem_addr(smem) + 1024, ring = q + shape<D>::TILE;
  const barriers bars(smem_addr(smem));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      bar_init(bars.k_full + i * 8, 1), bar_init(bars.k_empty + i * 8, CONSUMERS / 32);
      bar_init(bars.v_full + i * 8, 1), bar_init(bars.v_empty + i * 8, CONSUMERS / 32);
    }
    bar_fence_init();
  }
  __syncthreads();
  grid_wait();
  if (threadIdx.x >= CONSUMERS) {
    registers_give<24>();
    if (threadIdx.x == CONSUMERS) load_tiles<D>(args, b, ring, bars, seq, head / (kv.n_heads / kv.n_kv_heads));
    return;
  }
  registers_take<240>();
  load_queries<D>(a, smem + 1024, begin + t0, b.n_rows, head);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the tensor cores read what ordinary stores wrote */
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  const size_t cta = ((size_t)blockIdx.z * kv.n_heads + head) * gridDim.y + blockIdx.y;
  attend<D>(args, b, q, ring, bars, (__half *)a.out + ((size_t)(begin + t0) * kv.n_heads + head) * D,
            args.n_splits > 1 ? a.workspace + cta * PART<D> : NULL);
#endif
}

/* Rows of the parts -> out. A warp per row; grid: sixteenths of a tile of queries, heads, sequences. */
template <int D> __global__ void __launch_bounds__(256) attn_prefill_merge_kernel(const __grid_constant__ params args) {
  grid_trigger();
  const k_attn_prefill &a = args.a;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, seq = a.seq0 + blockIdx.z;
  const int tile = args.n_tiles - 1 - (int)blockIdx.x / 16, row = (int)blockIdx.x % 16 * 8 + warp;
  const int begin = a.kv.seq_start[seq], n_new = a.kv.seq_start[seq + 1] - begin, t = tile * QUERIES + row;
  grid_wait();
  if (t >= n_new || (a.skip_single && n_new == 1)) return;
  const size_t cta = ((size_t)blockIdx.z * gridDim.y + head) * args.n_tiles * args.n_splits + (size_t)(blockIdx.x / 16) * args.n_splits;
  const float *part = a.workspace + cta * PART<D>;
  float top = -1e30f, sum = 0.f, v[D / 32] = {};
  for (int i = 0; i < args.n_splits; i++) top = fmaxf(top, __ldcg(part + i * PART<D> + QUERIES * D + row));
  for (int i = 0; i < args.n_splits; i++) {
    const float *p = part + i * PART<D>, f = exp2_fast(__ldcg(p + QUERIES * D + row) - top);
    sum += f * __ldcg(p + QUERIES * (D + 1) + row);
#pragma unroll
    for (int j = 0; j < D / 32; j++) v[j] += f * __ldcg(p + row * D + lane + j * 32);
  }
  const float inv = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
  for (int j = 0; j < D / 32; j++)
    ((__half *)a.out)[((size_t)(begin + t) * a.kv.n_heads + head) * D + lane + j * 32] = __float2half_rn(v[j] * inv);
}

constexpr int MOST_SPLITS = 16, LEAST_TILES = 2; /* of keys, for one part */
} // namespace

extern "C" size_t k_attn_prefill_workspace_bytes(int32_t n_sm, int32_t head_dim) {
  return (size_t)n_sm * QUERIES * (head_dim + 2) * sizeof(float);
}

/* As many as fit the device at one CTA an SM; one where they would be shorter than the merge is worth. */
extern "C" int32_t k_attn_prefill_splits(int32_t n_sm, int32_t n_ctas, int32_t max_keys) {
  const int32_t key_tiles = (max_keys + KEYS - 1) / KEYS, by_device = n_sm / (n_ctas > 0 ? n_ctas : 1), by_keys = key_tiles / LEAST_TILES;
  const int32_t n = by_device < by_keys ? by_device : by_keys;
  return n < 1 ? 1 : n > MOST_SPLITS ? MOST_SPLITS : n;
}

extern "C" int sits_k_attn_prefill_sm90_init(void) {
  int e = prepare_kernel(attn_prefill_sm90_kernel<64>, shape<64>::SMEM);
  return e ? e : prepare_kernel(attn_prefill_sm90_kernel<128>, shape<128>::SMEM);
}

template <int D> static int launch_prefill(const k_attn_prefill &a, int32_t n_sm, k_stream at) {
  params p = {a, 1.4426950408889634f / sqrtf((float)D), (a.max_new + QUERIES - 1) / QUERIES, 1};
  if (a.workspace != NULL) p.n_splits = k_attn_prefill_splits(n_sm, p.n_tiles * a.kv.n_heads * a.n_seqs, a.max_keys);
  const dim3 grid(a.kv.n_heads, p.n_tiles * p.n_splits, a.n_seqs), rows(p.n_tiles * 16, a.kv.n_heads, a.n_seqs);
  cudaStream_t stream = (cudaStream_t)at.stream;
  const int e = launch_kernel(attn_prefill_sm90_kernel<D>, grid, dim3(THREADS), shape<D>::SMEM, stream, at.pdl, p);
  return e || p.n_splits == 1 ? e : launch_kernel(attn_prefill_merge_kernel<D>, rows, dim3(256), 0, stream, at.pdl, p);
}

extern "C" int sits_k_attn_prefill_sm90(const struct k_attn_prefill *a, int32_t n_sm, struct k_stream at) {
  if (!k_attn_prefill_takes(a->kv.head_dim)) return cudaErrorInvalidValue;
  return a->kv.head_dim == 64 ? launch_prefill<64>(*a, n_sm, at) : launch_prefill<128>(*a, n_sm, at);
}
