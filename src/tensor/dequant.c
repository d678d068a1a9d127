/* See dequant.h. Scalar and plain: backends have their own fast paths, and these are what they are checked against. Each block format is
 * described where it is read; products are rounded to float32 in the same order as the `gguf` package does, so results are equal bit for
 * bit (the build sets -ffp-contract=off). Entry points: dequant_row, dequant_tensor_row. */
#include "tensor/dequant.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

enum { BLOCK = 32, SUPER_BLOCK = 256 };

/* ---- halves ---- */

static float bits_to_float(uint32_t bits) { float f; memcpy(&f, &bits, sizeof f); return f; }
static uint32_t float_to_bits(float f) { uint32_t bits; memcpy(&bits, &f, sizeof bits); return bits; }

float half_to_float(uint16_t half)
{
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1F, fraction = half & 0x3FF;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
  float magnitude = (float)fraction * 0x1p-24f; /* subnormal: exact */
  return sign ? -magnitude : magnitude;
}

uint16_t float_to_half(float value)
{
  uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x1FF)); /* NaN stays NaN, made quiet */
  if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);                            /* 65520 and more round to infinity */
  if (magnitude < 0x38800000) { /* subnormal half: adding 0.5 lets the FPU round to a multiple of 2^-24 */
    float shifted = bits_to_float(magnitude) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(shifted) - 0x3F000000));
  }
  uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

float bf16_to_float(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

uint16_t float_to_bf16(float value)
{
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float load_half(const uint8_t *p)
{
  uint16_t half;
  memcpy(&half, p, sizeof half);
  return half_to_float(half);
}

static uint32_t load_u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }

/* ---- blocks of 32: element i and i + 16 share a byte ---- */

static void block_q4_0(const uint8_t *p, float *out) /* d f16, 16 bytes; d * (q - 8) */
{
  float d = load_half(p);
  for (int i = 0; i < BLOCK / 2; i++) {
    out[i] = d * (float)((p[2 + i] & 15) - 8);
    out[i + BLOCK / 2] = d * (float)((p[2 + i] >> 4) - 8);
  }
}

static void block_q4_1(const uint8_t *p, float *out) /* d f16, m f16, 16 bytes; d * q + m */
{
  float d = load_half(p), m = load_half(p + 2);
  for (int i = 0; i < BLOCK / 2; i++) {
    out[i] = d * (float)(p[4 + i] & 15) + m;
    out[i + BLOCK / 2] = d * (float)(p[4 + i] >> 4) + m;
  }
}

static void block_q5_0(const uint8_t *p, float *out) /* d f16, fifth bits u32, 16 bytes; d * (q - 16) */
{
  float d = load_half(p);
  uint32_t high = load_u32(p + 2);
  for (int i = 0; i < BLOCK / 2; i++) {
    out[i] = d * (float)((int)((p[6 + i] & 15u) | (high >> i & 1) << 4) - 16);
    out[i + BLOCK / 2] = d * (float)((int)((uint32_t)(p[6 + i] >> 4) | (high >> (i + 16) & 1) << 4) - 16);
  }
}

static void block_q5_1(const uint8_t *p, float *out) /* d f16, m f16, fifth bits u32, 16 bytes; d * q + m */
{
  float d = load_half(p), m = load_half(p + 2);
  uint32_t high = load_u32(p + 4);
  for (int i = 0; i < BLOCK / 2; i++) {
    out[i] = d * (float)((p[8 + i] & 15u) | (high >> i & 1) << 4) + m;
    out[i + BLOCK / 2] = d * (float)((uint32_t)(p[8 + i] >> 4) | (high >> (i + 16) & 1) << 4) + m;
  }
}

static void block_q8_0(const uint8_t *p, float *out) /* d f16, 32 i8; d * q */
{
  float d = load_half(p);
  for (int i = 0; i < BLOCK; i++) out[i] = d * (float)(int8_t)p[2 + i];
}

/* ---- super-blocks of 256 ---- */

/* 16 scales (low nibble) and minimums (high nibble) of 16 elements each; 64 bytes of 2 bits: byte 32h + i holds elements 128h + i,
 * + 32, + 64, + 96, lowest bits first; d, dmin f16. d * scale * q - dmin * minimum. */
static void block_q2_k(const uint8_t *p, float *out)
{
  const uint8_t *q = p + 16;
  float d = load_half(p + 80), dmin = load_half(p + 82);
  for (int i = 0; i < SUPER_BLOCK; i++) {
    uint8_t scale = p[i / 16];
    int value = q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    float dl = d * (float)(scale & 15), ml = dmin * (float)(scale >> 4);
    out[i] = dl * (float)value - ml;
  }
}

/* 32 bytes of third bits: bit b of byte i belongs to element 32b + i, a clear bit subtracts 4; 64 bytes of 2 bits as in Q2_K; 12 bytes
 * with 16 scales of 6 bits less 32 (low nibbles in bytes 0-7: the first eight in the low half; high pairs in bytes 8-11); d f16. */
static void block_q3_k(const uint8_t *p, float *out)
{
  const uint8_t *q = p + 32, *packed = p + 96;
  float d = load_half(p + 108);
  for (int i = 0; i < SUPER_BLOCK; i++) {
    int s = i / 16;
    int low = packed[s % 8] >> (s / 8 * 4) & 15, high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
    int value = (q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) - ((p[i % 32] >> (i / 32) & 1) ? 0 : 4);
    out[i] = d * (float)((low | high << 4) - 32) * (float)value;
  }
}

/* The 8 scales and 8 minimums of 6 bits that Q4_K and Q5_K pack into 12 bytes. */
static void unpack_scale_min(const uint8_t *packed, int j, int *scale, int *minimum)
{
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    *minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
  }
}

/* d, dmin f16; 12 bytes of scales; 128 bytes: byte 32g + i holds elements 64g + i (low nibble) and 64g + 32 + i. */
static void block_q4_k(const uint8_t *p, float *out)
{
  float d = load_half(p), dmin = load_half(p + 2);
  for (int j = 0; j < 8; j++) {
    int scale, minimum;
    unpack_scale_min(p + 4, j, &scale, &minimum);
    float dl = d * (float)scale, ml = dmin * (float)minimum;
    for (int i = 0; i < 32; i++) out[32 * j + i] = dl * (float)(p[16 + j / 2 * 32 + i] >> (j % 2 * 4) & 15) - ml;
  }
}

/* As Q4_K with 32 bytes of fifth bits (bit j of byte i: element 32j + i) before the nibbles. */
static void block_q5_k(const uint8_t *p, float *out)
{
  float d = load_half(p), dmin = load_half(p + 2);
  for (int j = 0; j < 8; j++) {
    int scale, minimum;
    unpack_scale_min(p + 4, j, &scale, &minimum);
    float dl = d * (float)scale, ml = dmin * (float)minimum;
    for (int i = 0; i < 32; i++) {
      int value = (p[48 + j / 2 * 32 + i] >> (j % 2 * 4) & 15) | (p[16 + i] >> j & 1) << 4;
      out[32 * j + i] = dl * (float)value - ml;
    }
  }
}

/* 128 bytes of low nibbles: byte 64h + i (i < 64) holds elements 128h + i and 128h + 64 + i; 64 bytes of high pairs: byte 32h + i holds
 * elements 128h + i, + 32, + 64, + 96; 16 scales i8; d f16. d * scale * (q - 32). */
static void block_q6_k(const uint8_t *p, float *out)
{
  const uint8_t *low = p, *high = p + 128;
  const int8_t *scales = (const int8_t *)p + 192;
  float d = load_half(p + 208);
  for (int i = 0; i < SUPER_BLOCK; i++) {
    int half = i / 128, at = i % 128;
    int value = (low[half * 64 + at % 64] >> (at / 64 * 4) & 15) | (high[half * 32 + at % 32] >> (at / 32 * 2) & 3) << 4;
    out[i] = d * (float)scales[i / 16] * (float)(value - 32);
  }
}

/* ---- rows ---- */

static void row_plain(enum sits_dtype dtype, const uint8_t *p, int64_t n, float *out)
{
  uint16_t half;
  double wide;
  switch (dtype) {
  case SITS_DTYPE_F32: memcpy(out, p, (size_t)n * sizeof *out); break;
  case SITS_DTYPE_F16: for (int64_t i = 0; i < n; i++) out[i] = load_half(p + 2 * i); break;
  case SITS_DTYPE_BF16:
    for (int64_t i = 0; i < n; i++) {
      memcpy(&half, p + 2 * i, sizeof half);
      out[i] = bf16_to_float(half);
    }
    break;
  case SITS_DTYPE_F64:
    for (int64_t i = 0; i < n; i++) {
      memcpy(&wide, p + 8 * i, sizeof wide);
      out[i] = (float)wide;
    }
    break;
  case SITS_DTYPE_I8: for (int64_t i = 0; i < n; i++) out[i] = (float)(int8_t)p[i]; break;
  default: assert(!"no codec for this type");
  }
}

typedef void block_reader(const uint8_t *block, float *out);

static block_reader *const block_readers[SITS_DTYPE_COUNT] = {
    [SITS_DTYPE_Q4_0] = block_q4_0, [SITS_DTYPE_Q4_1] = block_q4_1, [SITS_DTYPE_Q5_0] = block_q5_0, [SITS_DTYPE_Q5_1] = block_q5_1,
    [SITS_DTYPE_Q8_0] = block_q8_0, [SITS_DTYPE_Q2_K] = block_q2_k, [SITS_DTYPE_Q3_K] = block_q3_k, [SITS_DTYPE_Q4_K] = block_q4_k,
    [SITS_DTYPE_Q5_K] = block_q5_k, [SITS_DTYPE_Q6_K] = block_q6_k,
};

void dequant_row(enum sits_dtype dtype, const void *data, int64_t n, float *out)
{
  const struct sits_dtype_info *info = sits_dtype_info(dtype);
  block_reader *reader = block_readers[dtype];
  const uint8_t *p = data;
  if (!reader) {
    row_plain(dtype, p, n, out);
    return;
  }
  assert(n % info->block_elements == 0);
  for (int64_t i = 0; i < n; i += info->block_elements, p += info->block_bytes) reader(p, out + i);
}

static float side_value(const struct sits_utd *utd, const void *values, int64_t index)
{
  float wide;
  if (utd->scale_dtype == SITS_DTYPE_F16) return load_half((const uint8_t *)values + 2 * index);
  memcpy(&wide, (const uint8_t *)values + 4 * index, sizeof wide);
  return wide;
}

void dequant_tensor_row(const struct sits_utd *utd, int64_t row, float *out)
{
  int64_t n = utd->dims[1];
  const uint8_t *p = sits_utd_row(utd, row);
  if (utd->quant == SITS_QUANT_NONE) {
    dequant_row(utd->dtype, p, n, out);
    return;
  }
  const void *scales = sits_utd_row_scales(utd, row), *minimums = sits_utd_row_minimums(utd, row);
  int64_t group = utd->quant == SITS_QUANT_GROUP ? utd->group_size : n;
  int offset = utd->dtype == SITS_DTYPE_I4 && !utd->minimums ? 8 : 0;
  for (int64_t i = 0; i < n; i++) {
    int q = utd->dtype == SITS_DTYPE_I4 ? (p[i / 2] >> (i % 2 * 4) & 15) - offset : (int8_t)p[i];
    out[i] = side_value(utd, scales, i / group) * (float)q;
    if (minimums) out[i] += side_value(utd, minimums, i / group);
  }
}
