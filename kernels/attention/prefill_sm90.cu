/* out[t][h] = softmax(q K^T / sqrt(D)) V, causal (and windowed), by wgmma: the Hopper form of prefill_f16.cu.
 *
 * Arguments: struct k_attn_prefill (kernels.h). Which tiles of keys a query's own group makes of it: common/prefill_tiles.cuh.
 *   q [T][H][D] f16, rotated; k, v gathered with is_tiled: tiles of 128 keys of one KV head,
 *   [D/64 slabs][128 keys][64 values] with 16-byte chunk c of key r at c ^ (r & 7); keys beyond the sequence are zeros.
 * Work split: a CTA takes 128 tokens of one sequence and one query head: two warpgroups of 64 rows and a loader warp; keys in tiles of
 * 128.
 *   Where there are fewer CTAs than SMs (short chunks of long prompts), each is split over its key tiles; the parts go to a workspace and
 *   a second kernel merges them, a warp per row.
 *   Token tiles run from the last (longest) to the first. A warpgroup skips nothing: tiles that only the other one sees are masked.
 * Shared memory: q 256 D, two stages of K and of V of 256 D bytes each: 160 KiB at D = 128, one CTA per SM, at most 224 registers.
 * Pipeline: the loader brings K and V of a tile by one bulk copy each, full[stage] counts bytes, empty[stage] the two warpgroups. Inside
 * a
 *   warpgroup S = Q K^T, softmax and O += P V follow each other; the two warpgroups drift apart and fill each other's gaps.
 * Numerics: f16 products, f32 sums, running maximum, base-2 exponentials, P rounded to f16; masked scores are -inf, a row whose tiles are
 *   all masked so far keeps maximum -1e30 and sum 0. Outputs are rotated back where the codec rotates values. Tolerance 2e-3 of the norm.
 * Limits: D 64 or 128, sm_90a. Others: prefill_f16.cu.
 * Cost: 4 T L D operations a head; bound by tensor cores.
 * Links: twin ref_attention, test tests/gpu/test_attention.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"
#include "common/prefill_tiles.cuh"
#include "common/wgmma.cuh"

namespace {
constexpr int QUERIES = 128, KEYS = 128, STAGES = 2, THREADS = 288;

struct params {
  k_attn_prefill a;
  float scale;
  int n_tiles, n_splits;
};

template <int D> struct shape {
  static constexpr int SLABS = D / 64, SLAB = KEYS * 128, TILE = SLABS * SLAB; /* bytes of q, of a K tile, of a V tile alike */
  static constexpr int SMEM = 1024 + TILE + 2 * STAGES * TILE;
};

/* A part of a CTA's rows, in the workspace: [128][D] values (not divided by the sum), then [128] maxima, [128] sums. */
template <int D> constexpr int PART = QUERIES * (D + 2);

#if SITS_SM90

/* The CTA's query rows -> swizzled slabs; rows beyond the sequence are zeros. All consumer threads. */
template <int D> SITS_DEV void load_queries(const k_attn_prefill &a, uint8_t *dst, int row0, int n_rows, int head) {
  constexpr int CHUNKS = D / 8;
  for (int i = threadIdx.x; i < QUERIES * CHUNKS; i += 256) {
    const int r = i / CHUNKS, c = i % CHUNKS;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (r < n_rows) v = *(const uint4 *)((const __half *)a.q + ((size_t)(row0 + r) * a.kv.n_heads + head) * D + c * 8);
    *(uint4 *)(dst + (c >> 3) * shape<D>::SLAB + r * 128 + (((c & 7) ^ (r & 7)) << 4)) = v;
  }
}

/* Scores of 64 rows by 128 keys -> probabilities as the A operand of the next product; O and the sums are rescaled. */
template <int D> SITS_DEV void softmax_tile(float (&s)[64], float (&o)[D / 2], float (&m)[2], float (&l)[2], uint32_t (&p)[8][4],
                                            float scale, const int (&limit)[2], const int (&low)[2], bool masked, int t) {
  float f[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float &x = s[j * 4 + h * 2 + e];
        if (masked) {
          const int key = j * 8 + t * 2 + e;
          x = key <= limit[h] && key >= low[h] ? x : -INFINITY;
        }
        top = fmaxf(top, x);
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float next = fmaxf(m[h], top * scale);
    f[h] = exp2_fast(m[h] - next);
    m[h] = next;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float &x = s[j * 4 + h * 2 + e];
        x = exp2_fast(fmaf(x, scale, -next));
        sum += x;
      }
    l[h] = l[h] * f[h] + sum;
  }
#pragma unroll
  for (int k = 0; k < 8; k++) {
    p[k][0] = pack_half2(s[k * 8], s[k * 8 + 1]), p[k][1] = pack_half2(s[k * 8 + 2], s[k * 8 + 3]);
    p[k][2] = pack_half2(s[k * 8 + 4], s[k * 8 + 5]), p[k][3] = pack_half2(s[k * 8 + 6], s[k * 8 + 7]);
  }
  if (__any_sync(~0u, f[0] != 1.f || f[1] != 1.f)) {
#pragma unroll
    for (int j = 0; j < D / 8; j++) o[j * 4] *= f[0], o[j * 4 + 1] *= f[0], o[j * 4 + 2] *= f[1], o[j * 4 + 3] *= f[1];
  }
}

/* part: NULL, or where the rows go instead of out. */
template <int D> SITS_DEV void attend(const params &args, const tile_range &b, uint32_t q, uint32_t ring, uint32_t full, uint32_t empty,
                                      __half *out, float *part) {
  using C = shape<D>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, row = warp * 16 + g; /* 0..127 */
  const uint32_t my_q = q + (warp >> 2) * 64 * 128;
  float o[D / 2], m[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;
  int slot = 0;
  uint32_t parity = 0;
  for (int i = b.begin; i < b.end; i++) {
    const uint32_t k = ring + slot * 2 * C::TILE, v = k + C::TILE;
    float s[64];
    uint32_t p[8][4];
    bar_wait(full + slot * 8, parity);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
      const uint32_t at = (kk >> 2) * C::SLAB + (kk & 3) * 32;
      wgmma_f16<128>::mul_ss(s, wgmma_tile(my_q + at), wgmma_tile(k + at), kk > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    int limit[2] = {KEYS, KEYS}, low[2] = {0, 0};
    const bool masked = tile_mask(b, i, QUERIES, KEYS);
    if (masked) visible_keys(b, i, KEYS, row, &limit[0], &low[0]), visible_keys(b, i, KEYS, row + 8, &limit[1], &low[1]);
    softmax_tile<D>(s, o, m, l, p, args.scale, limit, low, masked, t);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < KEYS / 16; kk++) wgmma_f16<D>::mul_rs(o, p[kk], wgmma_tile_mn(v + kk * 2048, C::SLAB));
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) bar_arrive(empty + slot * 8);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
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
#endif

template <int D> __global__ void __launch_bounds__(THREADS, 1) attn_prefill_sm90_kernel(const __grid_constant__ params args) {
#if SITS_SM90
  using C = shape<D>;
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  const k_attn_prefill &a = args.a;
  const k_kv_view &kv = a.kv;
  const int tile = args.n_tiles - 1 - (int)blockIdx.x / args.n_splits, split = (int)blockIdx.x % args.n_splits;
  const int head = blockIdx.y, seq = a.seq0 + blockIdx.z;
  const int begin = kv.seq_start[seq], n_new = kv.seq_start[seq + 1] - begin, t0 = tile * QUERIES;
  if (t0 >= n_new || (a.skip_single && n_new == 1)) {
    grid_wait();
    return;
  }
  const tile_range b = key_tiles(kv, kv.kv_len[seq] - n_new + t0, min(QUERIES, n_new - t0), KEYS, split, args.n_splits);
  const uint32_t full = smem_addr(smem), empty = full + 8 * STAGES, q = full + 1024, ring = q + C::TILE;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, 8);
    bar_fence_init();
  }
  __syncthreads();
  grid_wait();
  if (threadIdx.x >= 256) { /* loader */
    if (threadIdx.x > 256) return;
    const int kv_head = head / (kv.n_heads / kv.n_kv_heads);
    const __half *v = (const __half *)a.v + ((size_t)kv_head * a.capacity + (a.offset ? a.offset[seq] : 0)) * D;
    int slot = 0;
    uint32_t parity = 1;
    for (int i = b.begin; i < b.end; i++) {
      bar_wait(empty + slot * 8, parity);
      bar_arrive_expect(full + slot * 8, 2 * C::TILE);
      bulk_load(ring + slot * 2 * C::TILE, keys_of_tile(a, b, i, KEYS, seq, kv_head), C::TILE, full + slot * 8);
      bulk_load(ring + slot * 2 * C::TILE + C::TILE, v + (size_t)b.tile(i) * KEYS * D, C::TILE, full + slot * 8);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    return;
  }
  load_queries<D>(a, smem + 1024, begin + t0, b.n_rows, head);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the tensor cores read what ordinary stores wrote */
  asm volatile("bar.sync 1, 256;" ::: "memory");
  const size_t cta = ((size_t)blockIdx.z * gridDim.y + head) * gridDim.x + blockIdx.x;
  attend<D>(args, b, q, ring, full, empty, (__half *)a.out + ((size_t)(begin + t0) * kv.n_heads + head) * D,
            args.n_splits > 1 ? a.workspace + cta * PART<D> : NULL);
#endif
}

/* Rows of the parts -> out. A warp per row, grid as above but for x: sixteenths of a tile of queries. */
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
  const dim3 grid(p.n_tiles * p.n_splits, a.kv.n_heads, a.n_seqs), rows(p.n_tiles * 16, a.kv.n_heads, a.n_seqs);
  cudaStream_t stream = (cudaStream_t)at.stream;
  const int e = launch_kernel(attn_prefill_sm90_kernel<D>, grid, dim3(THREADS), shape<D>::SMEM, stream, at.pdl, p);
  return e || p.n_splits == 1 ? e : launch_kernel(attn_prefill_merge_kernel<D>, rows, dim3(256), 0, stream, at.pdl, p);
}

extern "C" int sits_k_attn_prefill_sm90(const struct k_attn_prefill *a, int32_t n_sm, struct k_stream at) {
  if (!k_attn_prefill_takes(a->kv.head_dim)) return cudaErrorInvalidValue;
  return a->kv.head_dim == 64 ? launch_prefill<64>(*a, n_sm, at) : launch_prefill<128>(*a, n_sm, at);
}
