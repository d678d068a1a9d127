/* Naive twins of every op of backend/program.h: one obvious loop each, accumulating in double (LINEAR has ref_linear.h).
 * Every backend answers to these.
 * Letters as everywhere: T tokens, H query heads, G kv heads, D head size. Arrays are contiguous, last index fastest. */
#ifndef TESTS_REF_REF_OPS_H
#define TESTS_REF_REF_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "sits2026/utd.h"

/* y = x / sqrt(mean(x^2) + eps) * gain; [n]; y may be x. */
void ref_rmsnorm(const double *x, const double *gain, int32_t n, double eps, double *y);

/* Rotate the first dims values of one head at `position`: pairs (i, i + dims/2), or (2i, 2i + 1) when interleaved. The angle is the f32
 * product position * inv_freq, as reference implementations have it. */
void ref_rope(double *x, int32_t dims, const float *inv_freq, double magnitude, int32_t position, bool is_interleaved);

/* All elements as double. */
void ref_expand(const struct sits_utd *utd, double *out);

/* y = g / (1 + exp(-g)) * u */
void ref_swiglu(const double *gate, const double *up, int64_t n, double *y);

/* One query token of H heads at `position` over keys and values [position + 1][G][D]: softmax(q k / sqrt(D)) v for the last `window` ones
 * (0 = all) without the hidden ones. q, out: [H][D]. is_hidden: [position + 1][G] or NULL. given: [n_given][G]; the squares of what each of
 * the first n_given positions got from the query heads of a kv head are added to it. */
void ref_attention(const double *q, const double *k, const double *v, int32_t position, int32_t n_heads, int32_t n_kv_heads,
                   int32_t head_dim, int32_t window, const bool *is_hidden, double *given, int32_t n_given, double *out);

/* y = s * round(x / s) with s = max |x| / 127, for each `group` values; [n]. step: s of each value. */
void ref_round_share(const double *x, int32_t n, int32_t group, double *y, double *step);

/* x = H x / sqrt(n), H[i][j] = (-1)^popcount(i & j), n a power of two. */
void ref_hadamard(double *x, int32_t n);

#endif
