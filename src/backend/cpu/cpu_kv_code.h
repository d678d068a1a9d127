/* Number formats of the quantised KV codecs.
 *
 * Scales are unsigned 8-bit floats, e4m4: (1 + m/16) 2^(e-13), and m/16 2^-12 for e = 0, so 1.5e-5 to 7.75 in steps of 3 to 6 %. (e4m3
 * spends a bit on a sign that scales do not have, and steps of 6 to 12 % cost 5 % more squared error on real keys.) 4-bit integers are
 * unsigned with an integer zero point; e2m1 is sign, two exponent bits, one mantissa bit. Quantisers try neighbouring scales and zero
 * points and keep the smallest squared error; on SmolLM2's keys that is 3 % below plain rounding with f16 scale and minimum. */
#ifndef SITS_BACKEND_CPU_CPU_KV_CODE_H
#define SITS_BACKEND_CPU_CPU_KV_CODE_H

#include <stdint.h>

extern float cpu_kv_scale_table[256];
void cpu_kv_code_init(void);         /* fills the table; idempotent, call before any codec is used */

static inline float cpu_kv_scale(uint8_t code) { return cpu_kv_scale_table[code]; }

/* The code whose value is nearest to scale >= 0 (beyond the range: the last; below: 0). */
uint8_t cpu_kv_scale_code(float scale);

#endif
