/* out[t][h] = softmax(q K^T / sqrt(D)) V, causal (and windowed), over gathered f16 keys and values, for steps that bring many tokens.
 *
 * Arguments: struct k_attn_prefill (kernels.h). q [T][H][D] rotated; k, v [G][capacity][D] from sits_k_kv_gather, whole pages, tail zero.
 * Work split: a CTA takes 128 tokens of one sequence and one query head; 4 warps of 32 rows; keys in tiles of 64. Token tiles run from
 * the
 *   last (longest) to the first, so that the long ones do not end the grid.
 * Shared memory: q 256 D, two stages of K and V 64 D * 2 * 2 bytes each: 96 KiB at D = 128, two CTAs per SM at <= 255 registers.
 *   16-byte chunk c of row r lies at c ^ (r & 7), which makes ldmatrix and cp.async free of bank conflicts.
 * Pipeline: K and V of tile j+1 are copied (cp.async) while tile j is multiplied; one barrier before and one after each tile.
 * Numerics: f16 products, f32 sums, running maximum, base-2 exponentials; P rounded to f16. Rows beyond the sequence are computed and not
 *   stored. Tolerance 2e-3 of the norm against the f64 twin over the same f16 keys.
 * Limits: D 64 or 128. Compiled and correct on sm_80 too.
 * Cost: 4 T L D flop a head; bound by tensor cores (mma.sync, about two thirds of wgmma's rate).
 * Links: twin ref_attention (tests/gpu/gpu_ref.c), test tests/gpu/test_attention.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"
#include "common/prefill_tiles.cuh"

namespace {
constexpr int QUERIES = 128, KEYS = 64, THREADS = 128;

struct params {
  k_attn_prefill a;
  float scale;
  int n_tiles;
};

template <int D> SITS_DEV uint32_t chunk_at(uint32_t base, int row, int chunk) {
  return base + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

template <int D> SITS_DEV void load_rows(uint32_t dst, const __half *src, size_t row_elements, int n_rows, int n_valid) {
  constexpr int CHUNKS = D / 8;
  for (int i = threadIdx.x; i < n_rows * CHUNKS; i += THREADS) {
    const int r = i / CHUNKS, c = i % CHUNKS;
    cp_async16(chunk_at<D>(dst, r, c), src + (size_t)(r < n_valid ? r : 0) * row_elements + c * 8, r < n_valid);
  }
}

template <int D> struct rows32 { float o[2][D / 8][4], m[2][2], l[2][2]; };

/* S = Q K^T for 32 rows by the 32 keys from row `key0` of the tile on. */
template <int D> SITS_DEV void scores(float (&s)[2][4][4], uint32_t q, uint32_t k, int key0, int warp, int lane) {
  const int mi = lane >> 3, r = lane & 7;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][j][e] = 0.f;
#pragma unroll
  for (int kk = 0; kk < D / 16; kk++) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) ldmatrix_x4(a[i], chunk_at<D>(q, warp * 32 + i * 16 + (mi & 1) * 8 + r, kk * 2 + (mi >> 1)));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t b[4];
      ldmatrix_x4(b, chunk_at<D>(k, key0 + j * 16 + (mi >> 1) * 8 + r, kk * 2 + (mi & 1)));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma_f16(s[i][j * 2], a[i], b[0], b[1], s[i][j * 2]);
        mma_f16(s[i][j * 2 + 1], a[i], b[2], b[3], s[i][j * 2 + 1]);
      }
    }
  }
}

template <int D> SITS_DEV void accumulate(rows32<D> &st, const uint32_t (&p)[2][2][4], uint32_t v, int key0, int lane) {
  const int mi = lane >> 3, r = lane & 7;
#pragma unroll
  for (int kk = 0; kk < 2; kk++)
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, chunk_at<D>(v, key0 + kk * 16 + (mi & 1) * 8 + r, j * 2 + (mi >> 1)));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma_f16(st.o[i][j * 2], p[i][kk], b[0], b[1], st.o[i][j * 2]);
        mma_f16(st.o[i][j * 2 + 1], p[i][kk], b[2], b[3], st.o[i][j * 2 + 1]);
      }
    }
}

/* Masking, running maximum, exponentials: s becomes the f16 A operand p, of the keys from key0 of the tile on. row: this lane's first. */
template <int D> SITS_DEV void softmax_tile(rows32<D> &st, float (&s)[2][4][4], uint32_t (&p)[2][2][4], float scale, const tile_range &b,
                                            int tile, int key0, int row, bool masked, int t) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -INFINITY;
      int limit = KEYS, low = 0;
      if (masked) visible_keys(b, tile, KEYS, row + i * 16 + h * 8, &limit, &low);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float &x = s[i][j][h * 2 + e];
          if (masked) {
            int key = key0 + j * 8 + t * 2 + e;
            x = key <= limit && key >= low ? x : -INFINITY;
          }
          top = fmaxf(top, x);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float m = fmaxf(st.m[i][h], top * scale), f = exp2_fast(st.m[i][h] - m);
      float sum = 0.f;
      st.m[i][h] = m;
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float &x = s[i][j][h * 2 + e];
          x = exp2_fast(fmaf(x, scale, -m));
          sum += x;
        }
      st.l[i][h] = st.l[i][h] * f + sum;
      if (__any_sync(~0u, f != 1.f)) { /* the maximum settles after a few tiles */
#pragma unroll
        for (int j = 0; j < D / 8; j++) st.o[i][j][h * 2] *= f, st.o[i][j][h * 2 + 1] *= f;
      }
    }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
      p[i][kk][0] = pack_half2(s[i][kk * 2][0], s[i][kk * 2][1]);
      p[i][kk][1] = pack_half2(s[i][kk * 2][2], s[i][kk * 2][3]);
      p[i][kk][2] = pack_half2(s[i][kk * 2 + 1][0], s[i][kk * 2 + 1][1]);
      p[i][kk][3] = pack_half2(s[i][kk * 2 + 1][2], s[i][kk * 2 + 1][3]);
    }
}

template <int D> __global__ void __launch_bounds__(THREADS, 2) attn_prefill_kernel(const __grid_constant__ params args) {
  extern __shared__ __align__(1024) uint8_t smem[];
  grid_trigger();
  grid_wait();
  const k_attn_prefill &a = args.a;
  const k_kv_view &kv = a.kv;
  const int tile = args.n_tiles - 1 - blockIdx.x, head = blockIdx.y, seq = a.seq0 + blockIdx.z;
  const int begin = kv.seq_start[seq], n_new = kv.seq_start[seq + 1] - begin, t0 = tile * QUERIES;
  if (t0 >= n_new || (a.skip_single && n_new == 1)) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int start = kv.kv_len[seq] - n_new, n_rows = min(QUERIES, n_new - t0);
  const tile_range b = key_tiles(kv, start + t0, n_rows, KEYS, 0, 1);
  const uint32_t q_at = smem_addr(smem), kv_at = q_at + QUERIES * D * 2;
  constexpr int MATRIX = KEYS * D * 2;
  const int kv_head = head / (kv.n_heads / kv.n_kv_heads);
  const __half *v = (const __half *)a.v + ((size_t)kv_head * a.capacity + (a.offset ? a.offset[seq] : 0)) * D;
  load_rows<D>(q_at, (const __half *)a.q + ((size_t)(begin + t0) * kv.n_heads + head) * D, (size_t)kv.n_heads * D, QUERIES, n_rows);
  load_rows<D>(kv_at, keys_of_tile(a, b, 0, KEYS, seq, kv_head), D, KEYS, KEYS);
  load_rows<D>(kv_at + MATRIX, v + (size_t)b.tile(0) * KEYS * D, D, KEYS, KEYS);
  cp_async_commit();
  rows32<D> st = {};
#pragma unroll
  for (int i = 0; i < 2; i++) st.m[i][0] = st.m[i][1] = -1e30f;
  for (int j = 0; j < b.end; j++) {
    const uint32_t stage = kv_at + (j & 1) * 2 * MATRIX, other = kv_at + ((j + 1) & 1) * 2 * MATRIX;
    if (j + 1 < b.end) {
      load_rows<D>(other, keys_of_tile(a, b, j + 1, KEYS, seq, kv_head), D, KEYS, KEYS);
      load_rows<D>(other + MATRIX, v + (size_t)b.tile(j + 1) * KEYS * D, D, KEYS, KEYS);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const bool masked = tile_mask(b, j, n_rows, KEYS);
#pragma unroll
    for (int key0 = 0; key0 < KEYS; key0 += 32) { /* 32 keys at a time: 64 would not fit the registers */
      float s[2][4][4];
      uint32_t p[2][2][4];
      scores<D>(s, q_at, stage, key0, warp, lane);
      softmax_tile<D>(st, s, p, args.scale, b, j, key0, warp * 32 + g, masked, t);
      accumulate<D>(st, p, stage + MATRIX, key0, lane);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float l = st.l[i][h];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      float inv = l > 0.f ? 1.f / l : 0.f, r[D / 4];
      const int row = warp * 32 + i * 16 + h * 8 + g;
#pragma unroll
      for (int c = 0; c < D / 8; c++) r[2 * c] = st.o[i][c][h * 2], r[2 * c + 1] = st.o[i][c][h * 2 + 1];
      if (k_kv_rotates_values(kv.codec)) kv::hadamard_row<D>(r, t), inv *= rsqrtf((float)D);
      if (row >= n_rows) continue;
      uint32_t *out = (uint32_t *)((__half *)a.out + ((size_t)(begin + t0 + row) * kv.n_heads + head) * D);
#pragma unroll
      for (int c = 0; c < D / 8; c++) out[c * 4 + t] = pack_half2(r[2 * c] * inv, r[2 * c + 1] * inv);
    }
}
template <int D> constexpr int smem_bytes() { return (QUERIES + 4 * KEYS) * D * 2; }
} // namespace

extern "C" bool k_attn_prefill_takes(int32_t head_dim) { return head_dim == 64 || head_dim == 128; }

extern "C" int sits_k_attn_prefill_init(void) {
  int e = prepare_kernel(attn_prefill_kernel<64>, smem_bytes<64>());
  return e ? e : prepare_kernel(attn_prefill_kernel<128>, smem_bytes<128>());
}

extern "C" int sits_k_attn_prefill(const struct k_attn_prefill *a, struct k_stream at) {
  if (!k_attn_prefill_takes(a->kv.head_dim)) return cudaErrorInvalidValue;
  params p = {*a, 1.4426950408889634f / sqrtf((float)a->kv.head_dim), (a->max_new + QUERIES - 1) / QUERIES};
  const dim3 grid(p.n_tiles, a->kv.n_heads, a->n_seqs), block(THREADS);
  cudaStream_t stream = (cudaStream_t)at.stream;
  return a->kv.head_dim == 64 ? launch_kernel(attn_prefill_kernel<64>, grid, block, smem_bytes<64>(), stream, at.pdl, p)
                              : launch_kernel(attn_prefill_kernel<128>, grid, block, smem_bytes<128>(), stream, at.pdl, p);
}
