/* Number formats of the quantised KV codecs.
 *
 * Scales are unsigned 8-bit floats, e5m3: a half-precision number's exponent and first three mantissa bits (e4m3 would spend a bit on a
 * sign that scales do not have, and end at 2^-9, too coarse for small values). Steps are 6 to 12 %, so codecs choose among neighbours by
 * squared error. 4-bit integers are unsigned with an integer zero point; e2m1 is sign, two exponent bits, one mantissa bit. */
#ifndef SITS_BACKEND_CPU_CPU_KV_CODE_H
#define SITS_BACKEND_CPU_CPU_KV_CODE_H

#include <stdint.h>

#define CPU_KV_MAX_GROUP 32          /* elements that share a scale */

extern float cpu_kv_scale_table[256];
void cpu_kv_code_init(void);         /* fills the table; idempotent, call before any codec is used */

static inline float cpu_kv_scale(uint8_t code) { return cpu_kv_scale_table[code]; }

/* The code whose value is nearest to scale >= 0 (beyond the range: the last; below: 0). */
uint8_t cpu_kv_scale_code(float scale);

/* Quantise n <= 32 values to (q - zero) * scale, q in 0..15: the better of two scales by squared error. codes: [n]. */
void cpu_kv_quantize_u4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale, int8_t *zero);

/* Quantise n <= 32 values to e2m1 * scale: the best of max/6, max/5 and max/4 by squared error. codes: [n]. */
void cpu_kv_quantize_fp4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale);

#endif
