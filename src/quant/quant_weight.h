/* Rounding weights: from whatever a source holds to the neutral layout of the engine file (sits2026/utd.h, I4 and I8 with f16 scales).
 *
 * Grids that come along are kept bit for bit where asked: Q4_0, Q4_1 as I4; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 as I8; all in groups of 32, with
 * minimums where they have them; the same scales, minimums and integers. Others are rounded to nearest with a search for the
 * range of least squared error, or by GPTQ.
 * Theory of the report: a value rounded to a grid of step D has a squared error of D^2 / 12 on average, a matrix of m x n therefore a
 * Frobenius error of (D / sqrt(12)) sqrt(mn); with steps that differ by group, sqrt(sum of D^2 / 12 over all values).
 * Rows are dealt to spec.n_threads threads; what comes out does not depend on their number. No globals: different tensors may be rounded by
 * different threads. */
#ifndef SITS_QUANT_QUANT_WEIGHT_H
#define SITS_QUANT_QUANT_WEIGHT_H

#include <stdbool.h>
#include <stdint.h>

#include "sits2026/status.h"
#include "sits2026/utd.h"

/* What the scales of a row's groups may be: any f16; or 1..16 times one scale of the row (of the powers only 1, 2, 4, 8, 16 times). That
 * one has 7 significant bits, so that every multiple is an f16 to the bit: files hold the products, and who wants the factors divides. */
enum quant_scales { QUANT_SCALES_F16, QUANT_SCALES_MULTIPLES, QUANT_SCALES_POWERS };

struct quant_spec {
  enum sits_dtype dtype;             /* F16, I8, I4 */
  int32_t group;                     /* 0: per channel */
  bool has_minimum, keep_grid, clip;
  enum quant_scales scales;          /* of matrices that are rounded anew; not F16: I4 in groups only */
  int32_t n_threads;                 /* that rows are dealt to; 0: the caller's alone */
  const float *column_scale, *row_scale; /* [K] [rows] the source's values are multiplied by them first; NULL: by 1 */
};

struct quant_hessian;                /* quant_gptq.h */

struct quant_tensor {
  struct sits_utd utd;               /* data, scales, minimums: owned below, or the source's own where it passed unchanged */
  void *data, *scales, *minimums;    /* owned */
  bool is_kept;                      /* same values as the source, to the bit */
  double norm, error, bound;         /* Frobenius norms: of the source's values, of the difference, of the difference to expect */
};

/* source: 2-D, row-major, on the host. hessian: GPTQ with it; NULL: round to nearest. A shape that cannot be grouped by 32 becomes F16.
 * SITS_FORMAT for values that are not finite or do not fit f16 (naming the tensor), SITS_NOMEM. */
enum sits_status quant_convert(const struct sits_utd *source, const struct quant_spec *spec, const struct quant_hessian *hessian,
                               struct quant_tensor *out, struct sits_error *err) SITS_MUST_CHECK;
/* True when quant_convert would not round this matrix to a new grid of integers. */
bool quant_keeps(const struct sits_utd *source, const struct quant_spec *spec);
/* The descriptor of a row-major matrix of that type, without data; group: of its scales, 0: one a row. */
void quant_describe(const struct sits_utd *source, enum sits_dtype dtype, int32_t group, struct sits_utd *out);
void quant_tensor_fini(struct quant_tensor *tensor);

/* One group: step and minimum (0 when symmetric) as they will be stored, for n values. weight: importance of each value, NULL = equal.
 * Exposed for GPTQ and tests. */
struct quant_grid { float scale, minimum; int32_t lowest, highest; }; /* value = scale * q + minimum, lowest <= q <= highest */
struct quant_rule {                  /* how grids are fitted */
  int bits;                          /* 4, 8 */
  bool has_minimum, clip;
  enum quant_scales scales;
  float channel;                     /* the row's scale, of quant_channel; 0 with F16 */
};
struct quant_grid quant_fit(const float *x, const float *weight, int64_t n, const struct quant_rule *rule);
/* The scale of a row whose groups take multiples of it; 0 with F16. weight: [n] or NULL. */
float quant_channel(const float *row, const float *weight, int64_t n, int64_t group, const struct quant_rule *rule);
int32_t quant_round(const struct quant_grid *grid, float value);
static inline float quant_value(const struct quant_grid *grid, int32_t q) { return grid->scale * (float)q + grid->minimum; }

#endif
