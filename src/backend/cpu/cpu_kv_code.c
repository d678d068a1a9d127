/* Scales and group quantisers of the KV codecs; see cpu_kv_code.h. */
#include "backend/cpu/cpu_kv_code.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "tensor/dequant.h"

float cpu_kv_scale_table[256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void)
{
  for (int i = 0; i < 256; i++) cpu_kv_scale_table[i] = half_to_float((uint16_t)((i > 0xf7 ? 0xf7 : i) << 7)); /* beyond: infinities */
}

void cpu_kv_code_init(void) { (void)pthread_once(&table_once, fill_table); }

uint8_t cpu_kv_scale_code(float scale)
{
  if (!(scale < 61440.0f)) return 0xf7;
  if (scale < 0x1p-14f) return (uint8_t)nearbyintf(scale * 0x1p17f); /* without a leading one; 8 is the first with one */
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  bits += 0x7ffff + (bits >> 20 & 1); /* nearest, ties to even, of the 20 mantissa bits that go; may carry into the exponent */
  const uint32_t code = (bits >> 20) - ((127 - 15) << 3);
  return code > 0xf7 ? 0xf7 : (uint8_t)code;
}

static float u4_error(const float *x, int32_t n, float scale, int32_t zero, uint8_t *codes)
{
  const float inverse = scale > 0 ? 1 / scale : 0;
  float error = 0;
  for (int32_t i = 0; i < n; i++) {
    float q = nearbyintf(x[i] * inverse) + (float)zero;
    q = q < 0 ? 0 : q > 15 ? 15 : q;
    codes[i] = (uint8_t)q;
    const float e = (q - (float)zero) * scale - x[i];
    error += e * e;
  }
  return error;
}

void cpu_kv_quantize_u4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale, int8_t *zero)
{
  static const float stretch[2] = {1.0f, 1.06f};
  float lo = x[0], hi = x[0], best = INFINITY;
  for (int32_t i = 1; i < n; i++) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  const float size = fmaxf(fabsf(lo), fabsf(hi)), step = fmaxf((hi - lo) / 15, size / 120); /* the floor keeps the zero point in int8 */
  for (int k = 0; k < 2; k++) {
    uint8_t tried[CPU_KV_MAX_GROUP];
    const uint8_t code = cpu_kv_scale_code(step * stretch[k]);
    const float s = cpu_kv_scale(code);
    const float z = s > 0 ? nearbyintf(-lo / s) : 0;
    const int32_t whole = z < -128 ? -128 : z > 127 ? 127 : (int32_t)z;
    const float error = u4_error(x, n, s, whole, tried);
    if (!(error < best)) continue;
    best = error;
    *scale = code;
    *zero = (int8_t)whole;
    for (int32_t i = 0; i < n; i++) codes[i] = tried[i];
  }
}

/* Nearest e2m1 to a, ties to the even code: borders lie between 0 .5 1 1.5 2 3 4 6. */
static uint8_t e2m1_code(float a)
{
  const float size = fabsf(a);
  const uint8_t code = size <= 0.25f ? 0 : size < 0.75f ? 1 : size <= 1.25f ? 2 : size < 1.75f ? 3 : size <= 2.5f ? 4 : size < 3.5f ? 5
                       : size <= 5.0f ? 6 : 7;
  return (uint8_t)(code | (a < 0 ? 8 : 0));
}

void cpu_kv_quantize_fp4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale)
{
  static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}, tops[3] = {6, 5, 4};
  float size = 0, best = INFINITY;
  for (int32_t i = 0; i < n; i++) size = fmaxf(size, fabsf(x[i]));
  for (int k = 0; k < 3; k++) {
    uint8_t tried[CPU_KV_MAX_GROUP];
    const uint8_t code = cpu_kv_scale_code(size / tops[k]);
    const float s = cpu_kv_scale(code), inverse = s > 0 ? 1 / s : 0;
    float error = 0;
    for (int32_t i = 0; i < n; i++) {
      tried[i] = e2m1_code(x[i] * inverse);
      const float value = values[tried[i] & 7] * s, e = value - fabsf(x[i]);
      error += e * e;
    }
    if (!(error < best)) continue;
    best = error;
    *scale = code;
    for (int32_t i = 0; i < n; i++) codes[i] = tried[i];
  }
}
