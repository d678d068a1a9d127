/* Naive matrix multiply in double precision, the reference that every backend's LINEAR answers to. */
#ifndef SITS_TESTS_REF_LINEAR_H
#define SITS_TESTS_REF_LINEAR_H

#include <stdint.h>

#include "sits2026/utd.h"

/* y[t * ldy + r] = sum over k of W[r][k] * x[t * ldx + k], W dequantised to f32, products and sums in double.
 * magnitude (may be NULL, indexed like y): the sum of the terms' absolute values, for error bounds. */
void ref_linear(const struct sits_utd *w, const float *x, int64_t ldx, int32_t n_tokens, double *y, double *magnitude, int64_t ldy);

/* What x[n] (n a multiple of 32) is after a round trip through 8-bit integers in groups of 32 with a zero point:
 * lo = min(x, 0), hi = max(x, 0), step = (hi - lo) / 254, middle = the multiple of step nearest to (lo + hi) / 2,
 * and 127 steps either side. */
void ref_act_q8_g32(const float *x, int64_t n, float *out);

#endif
