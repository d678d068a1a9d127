/* GPTQ (arXiv:2210.17323): rounding a row column by column, the error of each pushed into the columns that follow so that the layer's
 * output on the calibration inputs changes least. Needs H = sum of x x^T over those inputs; the same H serves every matrix of a site.
 *
 * Here: H is damped by 1 % of its mean diagonal, columns are taken in order, and a group's grid is fitted, weighted by H's diagonal, when
 * its first column is reached. Not thread-safe to build; quant_gptq_row may be called by any thread. */
#ifndef SITS_QUANT_QUANT_GPTQ_H
#define SITS_QUANT_QUANT_GPTQ_H

#include <stdbool.h>
#include <stdint.h>

#include "quant/quant_weight.h"
#include "sits2026/status.h"

/* upper: [K][K] f32, row-major, the upper Cholesky factor U of the inverse of the damped H (H^-1 = U^T U); the caller's h. */
struct quant_hessian { int64_t k; float *upper, *diagonal; };

/* h: [K][K] f32, the sum of outer products (upper triangle is enough). It becomes `upper` in place and must outlive the result; beside it
 * one matrix of doubles is needed. SITS_NOMEM; SITS_FORMAT when not positive. */
enum sits_status quant_hessian_create(float *h, int64_t k, struct quant_hessian **out, struct sits_error *err) SITS_MUST_CHECK;
void quant_hessian_destroy(struct quant_hessian *hessian);

/* row: [K], changed; grids: [K / group]; q: [K]. */
void quant_gptq_row(const struct quant_hessian *hessian, float *row, int64_t group, const struct quant_rule *rule,
                    struct quant_grid *grids, int32_t *q);

#endif
