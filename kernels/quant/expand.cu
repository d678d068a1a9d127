/* out[r][c] = the 4-bit weight as e4m3 (without its channel scale) or as f16, row-major: what cuBLASLt multiplies when a step has many
 * tokens.
 *
 * Arguments: struct k_expand (kernels.h). Columns beyond `cols` come out as zeros (their scales are zero).
 * Work split: a warp per packed unit of 16 rows x 128 columns, four units a CTA; a lane holds eight words = two rows x 4 columns each.
 * e4m3: q - 8 times the group multiplier (a power of two: exact; 3, 5, ...: rounded where the product needs more than 4 bits), by f16
 *   arithmetic; four lanes that share a row exchange words so that each stores 32 contiguous bytes.
 * f16: scale * (q - 8) or scale * q + minimum in f32, rounded once; four lanes store 32 contiguous bytes.
 * Numerics: exact, or one rounding. Cost: reads 0.516 or 0.625 bytes a weight, writes 1 or 2; bound by device memory.
 * Links: test tests/gpu/test_gemm_w4.c.
 */
#include <cuda_fp8.h>

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "kernels.h"

namespace {
SITS_DEV uint32_t to_e4m3x2(uint32_t half2_bits) {
  __half2_raw h;
  h.x = (unsigned short)(half2_bits & 0xFFFF), h.y = (unsigned short)(half2_bits >> 16);
  return __nv_cvt_halfraw2_to_fp8x2(h, __NV_SATFINITE, __NV_E4M3);
}
SITS_DEV uint32_t hfma2_u32(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

/* Four columns of one row: folded pairs (0, 2) and (1, 3) with offset, times m. */
SITS_DEV uint32_t four_e4m3(uint32_t even, uint32_t odd, uint32_t m2, uint32_t minus_offset_m2) {
  uint32_t e = to_e4m3x2(hfma2_u32(even, m2, minus_offset_m2)), o = to_e4m3x2(hfma2_u32(odd, m2, minus_offset_m2));
  return __byte_perm(e, o, 0x5140); /* e0 o0 e1 o1 */
}

/* Lane t of four holds w[2 i + j] = columns 16 (2 i + j) + 4 t; afterwards r[j][.] = the 16 bytes of columns 32 t + 16 j. */
SITS_DEV void exchange_rows(const uint32_t (&w)[8], uint32_t (&r)[2][4], int t) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const int to = t ^ x;
      uint32_t v = to == 0 ? w[j] : to == 1 ? w[2 + j] : to == 2 ? w[4 + j] : w[6 + j];
      v = __shfl_xor_sync(~0u, v, x);
#pragma unroll
      for (int y = 0; y < 4; y++)
        if (to == y) r[j][y] = v;
    }
}

__global__ void __launch_bounds__(128) expand_e4m3_kernel(const __grid_constant__ k_expand p, int n_units, int n_blocks) {
  grid_trigger();
  grid_wait(); /* the workspace may still be read by the GEMM before */
  const int u = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (u >= n_units) return;
  const int row = u / n_blocks * 16, block = u % n_blocks;
  const uint8_t *unit = (const uint8_t *)p.weight + (size_t)u * K_W4_G128_UNIT;
  const uint4 v0 = *(const uint4 *)(unit + lane * 16), v1 = *(const uint4 *)(unit + 512 + lane * 16);
  const uint32_t w[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
  const float2 s = half2_to_float2(*(const uint32_t *)(unit + K_W4_NIBBLE_BYTES + g * 4));
  const float m0 = s.x / p.channel[row + g], m1 = s.y / p.channel[row + g + 8];
  const uint32_t a0 = pack_half2(m0, m0), b0 = pack_half2(-24.f * m0, -24.f * m0), a1 = pack_half2(m1, m1),
                 b1 = pack_half2(-264.f * m1, -264.f * m1);
  uint32_t x0[8], x1[8], r[2][4];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t a[4];
    fold_nibbles(w[i], a);
    x0[i] = four_e4m3(a[0], a[2], a0, b0);
    x1[i] = four_e4m3(a[1], a[3], a1, b1);
  }
  const size_t ld = (size_t)n_blocks * K_GROUP;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    exchange_rows(h ? x1 : x0, r, t);
    if (row + g + 8 * h >= p.rows) continue;
    uint4 *out = (uint4 *)((uint8_t *)p.out + (row + g + 8 * h) * ld + block * K_GROUP + t * 32);
    out[0] = make_uint4(r[0][0], r[0][1], r[0][2], r[0][3]);
    out[1] = make_uint4(r[1][0], r[1][1], r[1][2], r[1][3]);
  }
}

__global__ void __launch_bounds__(128) expand_f16_kernel(const __grid_constant__ k_expand p, int n_units, int n_blocks) {
  grid_trigger();
  grid_wait();
  const int u = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (u >= n_units) return;
  const int row = u / n_blocks * 16, block = u % n_blocks;
  const bool has_min = p.format == K_W4_G32M;
  const uint8_t *unit = (const uint8_t *)p.weight + (size_t)u * (has_min ? K_W4_G32M_UNIT : K_W4_G128_UNIT);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const uint4 v = *(const uint4 *)(unit + c * 512 + lane * 16);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int step = c * 2 + (i >> 1), col = block * K_GROUP + step * 32 + (i & 1) * 16 + t * 4;
      const uint32_t hi = __funnelshift_r(w[i], w[i], 6) & 0x0F0F0F0Fu, lo = (w[i] >> 2) & 0x0F0F0F0Fu;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float2 f;
        if (has_min)
          f = half2_to_float2(*(const uint32_t *)(unit + K_W4_NIBBLE_BYTES + step * 64 + g * 8 + h * 4));
        else {
          f.x = __half2float(*(const __half *)(unit + K_W4_NIBBLE_BYTES + g * 4 + h * 2));
          f.y = -8.f * f.x;
        }
        const uint32_t q = h ? lo : hi;
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = fmaf(f.x, (float)(q >> (8 * e) & 15u), f.y);
        if (row + g + 8 * h < p.rows)
          *(uint2 *)((__half *)p.out + (size_t)(row + g + 8 * h) * n_blocks * K_GROUP + col) =
              make_uint2(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]));
      }
    }
  }
}

/* Random tiles: nibbles from a counter hash; scale of a row and block = channel * 2^(hash % 2), channel = scale * (1 .. 1.5). */
__global__ void __launch_bounds__(256) fill_w4_kernel(const __grid_constant__ k_fill_w4 p, long long n_words, int n_blocks) {
  const int unit_words = (p.format == K_W4_G128 ? K_W4_G128_UNIT : K_W4_G32M_UNIT) / 4;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n_words; i += (long long)gridDim.x * blockDim.x) {
    const long long unit = i / unit_words;
    const int o = (int)(i % unit_words), row0 = (int)(unit / n_blocks) * 16;
    uint32_t h = hash32((uint32_t)i * 2u + hash32((uint32_t)(i >> 31) + p.seed));
    if (o < K_W4_NIBBLE_BYTES / 4)
      h ^= hash32(h + (uint32_t)i);
    else if (p.format == K_W4_G128) { /* rows g and g+8 */
      const int g = o - K_W4_NIBBLE_BYTES / 4;
      __half c0 = __float2half_rn(p.scale * (1.f + (hash32(p.seed + row0 + g) & 255) / 512.f));
      __half c1 = __float2half_rn(p.scale * (1.f + (hash32(p.seed + row0 + g + 8) & 255) / 512.f));
      if (p.channel && unit % n_blocks == 0) p.channel[row0 + g] = __half2float(c0), p.channel[row0 + g + 8] = __half2float(c1);
      h = pack_half2(__half2float(c0) * (1 << (h & 1)), __half2float(c1) * (1 << (h >> 1 & 1)));
    } else {
      const float s = p.scale * (1.f + (h & 255) / 256.f);
      h = pack_half2(s, -7.5f * s);
    }
    ((uint32_t *)p.weight)[i] = h;
  }
}
__global__ void fill_f32_kernel(float *out, long long n, float value) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) out[i] = value;
}
} // namespace

extern "C" int sits_k_expand(const struct k_expand *a, struct k_stream at) {
  const int n_blocks = k_blocks(a->cols), n_units = k_row_tiles(a->rows) * n_blocks;
  const dim3 grid((n_units + 3) / 4), block(128);
  if (a->to_e4m3 && (a->format != K_W4_G128 || !a->channel)) return cudaErrorInvalidValue;
  return launch_kernel(a->to_e4m3 ? expand_e4m3_kernel : expand_f16_kernel, grid, block, 0, (cudaStream_t)at.stream, at.pdl, *a, n_units,
                       n_blocks);
}

extern "C" int sits_k_fill_w4(const struct k_fill_w4 *a, struct k_stream at) {
  const int n_blocks = k_blocks(a->cols);
  const long long n = (long long)k_row_tiles(a->rows) * n_blocks * k_w4_unit_bytes(a->format) / 4;
  return launch_kernel(fill_w4_kernel, dim3(1056), dim3(256), 0, (cudaStream_t)at.stream, false, *a, n, n_blocks);
}

extern "C" int sits_k_fill_f32(float *out, int64_t n, float value, struct k_stream at) {
  return launch_kernel(fill_f32_kernel, dim3(264), dim3(256), 0, (cudaStream_t)at.stream, false, out, (long long)n, value);
}
