/* Writing one row of an activation in the form that the next GEMM reads (struct k_act): the CTA passes the row's values twice, once for
 * the scale and once to store. `get(c)` gives eight values from column c on. */
#ifndef SITS_KERNELS_ACTIVATION_CUH
#define SITS_KERNELS_ACTIVATION_CUH

#include <cuda_fp8.h>

#include "common/ptx.cuh"
#include "kernels.h"

struct vec8 { float v[8]; };

SITS_DEV float block_reduce(float v, float *scratch, bool is_max) {
  v = is_max ? warp_max(v) : warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  float r = scratch[0];
  for (int i = 1; i < (int)(blockDim.x >> 5); i++) r = is_max ? fmaxf(r, scratch[i]) : r + scratch[i];
  return r;
}

SITS_DEV uint32_t pack_s8(const float *v, float inv) {
  uint32_t r = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) r |= (uint32_t)(uint8_t)(int8_t)__float2int_rn(fminf(fmaxf(v[i] * inv, -127.f), 127.f)) << (8 * i);
  return r;
}
SITS_DEV uint32_t pack_e4m3(const float *v, float inv) {
  uint32_t r = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) r |= (uint32_t)__nv_cvt_float_to_fp8(v[i] * inv, __NV_SATFINITE, __NV_E4M3) << (8 * i);
  return r;
}

/* All threads of the CTA; `width` a multiple of 8 (checked by the launchers); pads up to whole blocks are written as zeros. */
template <class G> SITS_DEV void store_activation(const k_act &out, int row, int width, float *scratch, G get) {
  const int padded = (width + K_GROUP - 1) / K_GROUP * K_GROUP;
  if (out.form == K_ACT_FRAG_F16) {
    for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
      vec8 x = get(c);
#pragma unroll
      for (int i = 0; i < 8; i++) ((__half *)out.data)[k_frag_index(out.tile, c + i, row)] = __float2half_rn(fminf(fmaxf(x.v[i], -65504.f), 65504.f));
    }
    return;
  }
  if (out.form == K_ACT_ROW_F16) {
    for (int c = threadIdx.x * 8; c < padded; c += blockDim.x * 8) {
      vec8 x = c < width ? get(c) : vec8{};
      uint4 v;
#pragma unroll
      for (int i = 0; i < 8; i++) x.v[i] = fminf(fmaxf(x.v[i], -65504.f), 65504.f);
      v.x = pack_half2(x.v[0], x.v[1]), v.y = pack_half2(x.v[2], x.v[3]), v.z = pack_half2(x.v[4], x.v[5]), v.w = pack_half2(x.v[6], x.v[7]);
      *(uint4 *)((__half *)out.data + (size_t)row * padded + c) = v;
    }
    return;
  }
  float top = 0.f;
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    vec8 x = get(c);
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x.v[i]));
  }
  top = block_reduce(top, scratch, true);
  const float levels = out.form == K_ACT_TILE_S8 ? 127.f : 448.f, scale = top / levels, inv = top > 0.f ? levels / top : 0.f;
  if (threadIdx.x == 0) out.scale[row] = scale;
  for (int c = threadIdx.x * 8; c < padded; c += blockDim.x * 8) {
    vec8 x = c < width ? get(c) : vec8{};
    uint2 v;
    if (out.form == K_ACT_TILE_S8) {
      v.x = pack_s8(x.v, inv), v.y = pack_s8(x.v + 4, inv);
      const int n = row % out.tile, n_blocks = padded / K_GROUP, chunk = ((c & 127) >> 4) ^ (n & 7);
      const size_t block = (size_t)(row / out.tile) * n_blocks + (c >> 7);
      *(uint2 *)((uint8_t *)out.data + (block * out.tile + n) * 128 + chunk * 16 + (c & 8)) = v;
    } else {
      v.x = pack_e4m3(x.v, inv), v.y = pack_e4m3(x.v + 4, inv);
      *(uint2 *)((uint8_t *)out.data + (size_t)row * padded + c) = v;
    }
  }
}

#endif
