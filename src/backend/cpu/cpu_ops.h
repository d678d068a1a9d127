/* Vector primitives of the CPU backend: everything between the matrix products, one table of functions per instruction-set level.
 *
 * Semantics are those of tests/ref (same names with ref_). All three tables come from one body, cpu_ops_body.h, compiled over
 * different vector words. Order of summation depends on shapes only, never on how many rows are handled at once: a row's result is
 * bit for bit the same whatever else is in the batch. Results differ between levels in the last bits.
 *
 * Attention works on blocks of one page and one kv head. K is stored transposed, [D][P], so that a vector holds one channel of many tokens
 * and scores need no horizontal sums; V is [P][Dv], Dv = D rounded up to CPU_V_ALIGN with zeros beyond.
 */
#ifndef SITS_BACKEND_CPU_CPU_OPS_H
#define SITS_BACKEND_CPU_CPU_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/cpu/cpu_isa.h"

#define CPU_V_ALIGN 16               /* floats: widest vector */

struct cpu_ops {
  /* y = x / sqrt(mean(x^2) + eps) * gain; [n]; y may be x. */
  void (*rmsnorm)(const float *x, const float *gain, int32_t n, float eps, float *y);
  /* Rotate the first `dims` values of x: x[i] = x[i] * cosines[i] + x[partner of i] * sines[i], both [dims], the sign of the sine being
   * negative for the first of each pair; partners are i and i + dims/2, or 2i and 2i + 1. */
  void (*rope)(float *x, const float *cosines, const float *sines, int32_t dims, bool is_interleaved);
  void (*swiglu)(const float *gate, const float *up, int32_t n, float *y); /* silu(gate) * up; y may be either */
  void (*add)(const float *a, const float *b, int32_t n, float *y);        /* y may be either */
  /* y = y * b + x * a */
  void (*scale_add)(float *y, float b, const float *x, float a, int32_t n);

  /* scores[r][j] = sum_d q[r][d] * k[d][j], j < n rounded up to CPU_V_ALIGN (at most ldk). q: [rows][ldq]; k: [D][ldk];
   * scores: [rows][lds]. next: the block that is read after this one, fetched row by row beside it; or NULL. */
  void (*qk_f16)(const float *q, int32_t ldq, int32_t rows, const uint16_t *k, int32_t ldk, int32_t head_dim, int32_t n, float *scores,
                 int32_t lds, const uint16_t *next);
  void (*qk_f32)(const float *q, int32_t ldq, int32_t rows, const float *k, int32_t ldk, int32_t head_dim, int32_t n, float *scores,
                 int32_t lds, const float *next);
  /* acc[r][c] += sum_{j < n} p[r][j] * v[j][c], c < dv, j ascending. p: [rows][ldp]; acc: [rows][dv]; next as above. */
  void (*pv_f16)(const float *p, int32_t ldp, int32_t rows, const uint16_t *v, int32_t dv, int32_t n, float *acc, const uint16_t *next);
  void (*pv_f32)(const float *p, int32_t ldp, int32_t rows, const float *v, int32_t dv, int32_t n, float *acc, const float *next);
  /* s[j] = exp(s[j] - max) for lo <= j < hi and 0 elsewhere below n; n a multiple of CPU_V_ALIGN, lo < hi. Returns the sum and *max. */
  float (*softmax)(float *s, int32_t n, int32_t lo, int32_t hi, float *max);

  /* Quantised blocks to f32 (cpu_kv_code.h has the number formats). */
  void (*expand_i8_columns)(const int8_t *x, const float *scales, int32_t rows, float *y); /* [rows][P], a scale for each of P columns */
  void (*expand_i8_row)(const int8_t *x, float scale, int32_t n, float *y);
  /* n_groups groups of 32: y = (nibble - zero) * scale; byte i of a group's 16 holds elements i and i + 16. */
  void (*expand_u4)(const uint8_t *x, const uint8_t *scales, const int8_t *zeros, int32_t n_groups, float *y);
  /* [rows][P] e2m1, scales [(rows + 15) / 16][P], y = value * scale + means[row]; byte i of a row's 32 holds columns i and i + 32. */
  void (*expand_fp4_columns)(const uint8_t *x, const uint8_t *scales, const float *means, int32_t rows, float *y);
  /* n_groups groups of 16 e2m1: byte i of a group's 8 holds elements i and i + 8. */
  void (*expand_fp4_groups)(const uint8_t *x, const uint8_t *scales, int32_t n_groups, float *y);

  /* The reverse, a group at a time: n <= 32, 16 or any values; codes: [32], [16], [n], one number a byte, zeros beyond n. */
  void (*quantize_u4)(const float *x, int32_t n, uint8_t *codes, uint8_t *scale, int8_t *zero);
  void (*quantize_fp4)(const float *x, int32_t n, uint8_t *codes, uint8_t *scale);
  float (*quantize_i8)(const float *x, int32_t n, int8_t *codes); /* returns the scale */

  void (*to_f16)(const float *x, int32_t n, uint16_t *y);  /* round to nearest even; beyond 65504 saturates */
  void (*hadamard)(float *x, int32_t n);                   /* in place, orthonormal, n a power of two */
};

extern const struct cpu_ops cpu_ops_scalar, cpu_ops_avx2, cpu_ops_avx512;

const struct cpu_ops *cpu_ops_for(enum cpu_isa isa);

/* exp(x) for x <= 0, one lane of what softmax does at every level up to rounding; used where partial results are merged. */
float cpu_exp_negative(float x);

#endif
