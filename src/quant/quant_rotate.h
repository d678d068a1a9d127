/* Orthonormal rotations for weights: Hadamard matrices with random signs (QuaRot, arXiv:2404.00456), which spread outliers over all
 * channels.
 *
 * Q = H diag(s). H is of order n where one is known: the Kronecker product of a Walsh-Hadamard matrix and one of Paley's two constructions
 * (q + 1 for primes q = 3 mod 4, 2 (q + 1) for primes q = 1 mod 4), so 576 = 36 x 16, 1536 = 12 x 128, 14336 = 28 x 512. Where none is,
 * runs of the largest power of two that divides n. s is all +1 for seed 0, else drawn by a seeded generator. Immutable once made: any
 * thread may apply. */
#ifndef SITS_QUANT_QUANT_ROTATE_H
#define SITS_QUANT_QUANT_ROTATE_H

#include <stdbool.h>
#include <stdint.h>

#include "sits2026/status.h"

struct quant_rotation {
  int32_t n;                         /* order of Q */
  int32_t odd, walsh;                /* of the Paley factor (1: none), of the Walsh-Hadamard factor; their product is n, or divides it */
  int8_t *paley;                     /* [odd][odd] +-1; NULL when odd is 1 */
  float *signs;                      /* [n] */
};

enum sits_status quant_rotation_create(int32_t n, uint64_t seed, struct quant_rotation **out, struct sits_error *err) SITS_MUST_CHECK;
void quant_rotation_destroy(struct quant_rotation *rotation); /* NULL is fine */

/* x <- Q x for each run of n among n_values (a multiple of n). work: [n], the caller's. */
void quant_rotate(const struct quant_rotation *rotation, float *x, int64_t n_values, float *work);

#endif
