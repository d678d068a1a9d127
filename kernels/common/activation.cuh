/* Writing one row of an activation, held in the registers of a CTA, in the form that the next GEMM reads (struct k_act). */
#ifndef SITS_KERNELS_ACTIVATION_CUH
#define SITS_KERNELS_ACTIVATION_CUH

#include <cuda_fp8.h>

#include "common/ptx.cuh"
#include "kernels.h"

struct vec8 {
  float v[8];
};

/* Four values times inv, rounded to even; inv = 127 / maximum keeps them in range. */
SITS_DEV uint32_t pack_s8(const float *v, float inv) {
  uint32_t r;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(r) : "r"(__float2int_rn(v[3] * inv)), "r"(__float2int_rn(v[2] * inv)));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(__float2int_rn(v[1] * inv)), "r"(__float2int_rn(v[0] * inv)), "r"(r));
  return r;
}
SITS_DEV uint32_t pack_e4m3(const float *v, float inv) {
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * inv, v[1] * inv), __NV_SATFINITE, __NV_E4M3);
  return lo | (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(v[2] * inv, v[3] * inv), __NV_SATFINITE, __NV_E4M3) << 16;
}

/* Eight values from column c of row `row`, scale known; columns from width on are zeros. Returns the sum of the s8 codes, else 0. */
SITS_DEV int store_eight(const k_act &out, int row, int padded, int c, vec8 x, float inv) {
  if (out.form == K_ACT_FRAG_F16) {
#pragma unroll
    for (int i = 0; i < 8; i++) x.v[i] = fminf(fmaxf(x.v[i], -65504.f), 65504.f);
#pragma unroll
    for (int i = 0; i < 8; i += 4) /* four neighbouring columns lie together, in the order 0 2 1 3 (k_frag_index) */
      *(uint2 *)((__half *)out.data + k_frag_index(out.tile, c + i, row)) =
          make_uint2(pack_half2(x.v[i], x.v[i + 2]), pack_half2(x.v[i + 1], x.v[i + 3]));
  } else if (out.form == K_ACT_ROW_F16) {
    uint4 v;
#pragma unroll
    for (int i = 0; i < 8; i++) x.v[i] = fminf(fmaxf(x.v[i], -65504.f), 65504.f);
    v.x = pack_half2(x.v[0], x.v[1]), v.y = pack_half2(x.v[2], x.v[3]), v.z = pack_half2(x.v[4], x.v[5]),
    v.w = pack_half2(x.v[6], x.v[7]);
    *(uint4 *)((__half *)out.data + (size_t)row * padded + c) = v;
  } else if (out.form == K_ACT_TILE_S8 || out.form == K_ACT_GROUP_S8) {
    const int n = row % out.tile, n_blocks = padded / K_GROUP, chunk = ((c & 127) >> 4) ^ (n & 7);
    const size_t block = (size_t)(row / out.tile) * n_blocks + (c >> 7);
    const uint32_t lo = pack_s8(x.v, inv), hi = pack_s8(x.v + 4, inv);
    *(uint2 *)((uint8_t *)out.data + (block * out.tile + n) * 128 + chunk * 16 + (c & 8)) = make_uint2(lo, hi);
    return __dp4a((int)lo, 0x01010101, __dp4a((int)hi, 0x01010101, 0));
  } else
    *(uint2 *)((uint8_t *)out.data + (size_t)row * padded + c) = make_uint2(pack_e4m3(x.v, inv), pack_e4m3(x.v + 4, inv));
  return 0;
}

/* Sum of a and maximum of b over n_warps whole warps, the first of a CTA, that meet by `sync`: one barrier. scratch: 64 floats. */
template <class SYNC> SITS_DEV float2 reduce_sum_max_of(float a, float b, float *scratch, int n_warps, SYNC sync) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  a = warp_sum(a), b = warp_max(b);
  if (lane == 0) scratch[warp] = a, scratch[32 + warp] = b;
  sync();
  a = lane < n_warps ? scratch[lane] : 0.f, b = lane < n_warps ? scratch[32 + lane] : 0.f;
  return make_float2(warp_sum(a), warp_max(b));
}
/* Over the CTA (at most 32 warps). */
SITS_DEV float2 reduce_sum_max(float a, float b, float *scratch) {
  return reduce_sum_max_of(a, b, scratch, blockDim.x >> 5, [] { __syncthreads(); });
}

/* Which threads hold a row, and how they meet: those of a CTA. comm/all_reduce.cu has others. */
struct cta_row {
  SITS_DEV int place() const { return threadIdx.x; }
  SITS_DEV int count() const { return blockDim.x; }
  SITS_DEV float2 sum_max(float a, float b, float *scratch) { return reduce_sum_max(a, b, scratch); }
};

/* Bytes of dynamic shared memory that rotate_row needs: a row piece, where a run spans several warps. */
static inline size_t rotation_bytes(const k_act &out) { return out.rotation > 256 ? K_MOST_ROTATION * sizeof(float) : 0; }

static inline bool is_rotation(const k_act &out, int width) {
  const int n = out.rotation;
  return n == 0 || (n > 0 && n <= K_MOST_ROTATION && (n & (n - 1)) == 0 && width % n == 0);
}

/* A row held by 512 threads as in store_row: each run of `block` columns (eight a thread, so 4,096 at most) times the Walsh-Hadamard
 * matrix. Runs within a thread, a warp, then across warps through shared memory. */
template <int N> SITS_DEV void rotate_row(int block, vec8 (&x)[N]) {
  extern __shared__ __align__(16) float row_exchange[];
  const float f = rsqrtf((float)block);
#pragma unroll
  for (int k = 0; k < N; k++) {
#pragma unroll
    for (int n = 1; n < 8; n <<= 1)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (!(i & n) && n < block) {
          const float a = x[k].v[i], b = x[k].v[i | n];
          x[k].v[i] = a + b, x[k].v[i | n] = a - b;
        }
    for (int n = 1; n < 32 && n * 8 < block; n <<= 1)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float o = __shfl_xor_sync(~0u, x[k].v[i], n);
        x[k].v[i] = threadIdx.x & n ? o - x[k].v[i] : x[k].v[i] + o;
      }
    for (int n = 32; n * 8 < block; n <<= 1) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8; i++) row_exchange[i * blockDim.x + threadIdx.x] = x[k].v[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float o = row_exchange[i * blockDim.x + (threadIdx.x ^ n)];
        x[k].v[i] = threadIdx.x & n ? o - x[k].v[i] : x[k].v[i] + o;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[k].v[i] *= f;
  }
}

/* A row held by the CTA's threads as in store_row, rounded to the grid of each group of 32 columns (four threads), as the CPU
 * does; outliers to 8 bits with one scale. What is not finite stays so. scratch: 64 floats that nobody else uses. */
template <int N> SITS_DEV void round_row(const k_act &out, int width, vec8 (&x)[N], float *scratch) {
  const bool is_int8 = out.round == K_ROUND_INT8;
  uint32_t outlier[N];
  float most = 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = (threadIdx.x + k * blockDim.x) * 8;
    outlier[k] = out.outliers && c < width ? out.outliers[c >> 3] : 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (outlier[k] >> i & 1) most = fmaxf(most, fabsf(x[k].v[i]));
  }
  if (out.outliers) most = reduce_sum_max(0.f, most, scratch).y;
  const float side = most >= 1e-30f ? most / 127.f : 0.f;
#pragma unroll
  for (int k = 0; k < N; k++) {
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = outlier[k] >> i & 1 ? 0.f : x[k].v[i];
      lo = fminf(lo, v), hi = fmaxf(hi, v);
    }
#pragma unroll
    for (int d = 1; d < 4; d <<= 1) lo = fminf(lo, __shfl_xor_sync(~0u, lo, d)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, d));
    const float range = hi - lo, levels = is_int8 ? 254.f : 15.f;
    const float s = range >= 1e-30f ? range / levels : 0.f, inv = range >= 1e-30f ? levels / range : 0.f;
    const float z = is_int8 ? rintf((hi + lo) * 0.5f * inv) : s > 0.f ? fminf(fmaxf(rintf(-lo / s), 0.f), 15.f) : 0.f;
    const float least = is_int8 ? z - 127.f : -z, last = is_int8 ? z + 127.f : 15.f - z;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = x[k].v[i];
      if (!isfinite(v)) continue;
      if (outlier[k] >> i & 1)
        x[k].v[i] = side > 0.f ? side * fminf(fmaxf(rintf(v / side), -127.f), 127.f) : 0.f;
      else if (is_int8 || s == 0.f)
        x[k].v[i] = s * fminf(fmaxf(rintf(v * inv), least), last);
      else /* divided, as the CPU does: of a range whose ends are alike the zero point lies between two levels */
        x[k].v[i] = s * fminf(fmaxf(rintf(v / s), least), last);
    }
  }
}

/* A scale of 22 significant bits, as the GEMM that reads K_ACT_GROUP_S8 wants. */
SITS_DEV float short_scale(float x) { return __uint_as_float(__float_as_uint(x) & ~3u); }

/* Scales of K_ACT_GROUP_S8: 16 neighbouring threads hold a group's 128 columns. Returns 127 / maximum; all lanes of a warp call this. */
SITS_DEV float group_scale(const k_act &out, int row, int padded, int c, const vec8 &x) {
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x.v[i]));
#pragma unroll
  for (int d = 1; d < 16; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (c < padded && c % K_GROUP == 0)
    out.scale[((size_t)(row / out.tile) * (padded / K_GROUP) + c / K_GROUP) * out.tile + row % out.tile] =
        short_scale(top * (1.f / 127.f));
  return top > 0.f ? 127.f / top : 0.f;
}

/* A row held by the threads of `at`: the one at place t has the eight values of columns 8 (t + k * count), k < N, zeros from width on. top:
 * largest magnitude of the row times `factor` (not used for K_ACT_GROUP_S8). Fragments have no padding columns to clear. scratch: 64
 * floats that nobody else uses. Neither rotates nor rounds. */
template <int N, class ROW>
SITS_DEV void store_plain_row(const k_act &out, int row, int width, const vec8 (&x)[N], float factor, float top, float *scratch, ROW &at) {
  const int padded = (width + K_GROUP - 1) / K_GROUP * K_GROUP;
  const bool is_grouped = out.form == K_ACT_GROUP_S8;
  const float levels = out.form == K_ACT_TILE_S8 ? 127.f : 448.f;
  float inv = top > 0.f ? levels / top : 0.f;
  int sum = 0;
  if (out.scale && !is_grouped && at.place() == 0) out.scale[row] = top / levels;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int c = (at.place() + k * at.count()) * 8;
    vec8 v = x[k];
#pragma unroll
    for (int i = 0; i < 8; i++) v.v[i] *= factor;
    if (is_grouped) inv = group_scale(out, row, padded, c, v);
    if (c >= padded || (c >= width && out.form == K_ACT_FRAG_F16)) continue;
    sum += store_eight(out, row, padded, c, v, inv);
  }
  if (out.form != K_ACT_TILE_S8) return;
  const float all = at.sum_max((float)sum, 0.f, scratch).x; /* exact: below 2^24 */
  if (at.place() == 0) out.sum[row] = (int)all;
}

/* The same of a row held by the CTA. GRID: the row may be rotated and rounded. */
template <int N, bool GRID = true>
SITS_DEV void store_row(const k_act &out, int row, int width, vec8 (&x)[N], float factor, float top, float *scratch) {
  if (GRID && (out.round != K_ROUND_NONE || out.rotation > 0)) {
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
      for (int i = 0; i < 8; i++) x[k].v[i] *= factor;
    factor = 1.f;
    if (out.rotation > 0) rotate_row<N>(out.rotation, x);
    if (out.round != K_ROUND_NONE) round_row<N>(out, width, x, scratch);
  }
  cta_row at;
  store_plain_row<N>(out, row, width, x, factor, top, scratch, at);
}

#endif
