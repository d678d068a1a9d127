/* See quant_gptq.h. Entry points: quant_hessian_create, quant_gptq_row. The factorisations accumulate in double: H of real activations
 * has a condition number that single precision does not survive. */
#include "quant/quant_gptq.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

#define DAMPING 0.01

/* In place: lower Cholesky factor of the symmetric a [n][n], of which the lower triangle is read. False: not positive definite. */
static bool cholesky(double *a, int64_t n)
{
  for (int64_t i = 0; i < n; i++) {
    double *ai = a + i * n;
    for (int64_t j = 0; j <= i; j++) {
      const double *aj = a + j * n;
      double sum = ai[j];
      for (int64_t k = 0; k < j; k++) sum -= ai[k] * aj[k];
      if (i != j) {
        ai[j] = sum / aj[j];
      } else {
        if (!(sum > 0)) return false;
        ai[i] = sqrt(sum);
      }
    }
  }
  return true;
}

/* In place: the inverse of a lower triangular matrix. */
static void invert_lower(double *a, int64_t n, double *column)
{
  for (int64_t j = 0; j < n; j++) {
    for (int64_t i = j; i < n; i++) {
      double sum = i == j ? 1.0 : 0.0;
      for (int64_t k = j; k < i; k++) sum -= a[i * n + k] * column[k];
      column[i] = sum / a[i * n + i];
    }
    for (int64_t i = j; i < n; i++) a[i * n + j] = column[i]; /* column j of the factor is not needed again */
  }
}

/* In place: L^-T L^-1 = (L L^T)^-1 from L^-1, lower triangles. Row i needs rows i.. of the inverse, which are still there. */
static void outer_lower(double *a, int64_t n, double *row)
{
  for (int64_t i = 0; i < n; i++) {
    memset(row, 0, (size_t)n * sizeof *row);
    for (int64_t k = i; k < n; k++) {
      const double *ak = a + k * n, v = ak[i];
      for (int64_t j = 0; j <= i; j++) row[j] += v * ak[j];
    }
    memcpy(a + i * n, row, (size_t)(i + 1) * sizeof *row);
  }
}

/* H^-1 = U^T U with U upper is what GPTQ wants: that is the transposed lower Cholesky factor of H^-1. One matrix of doubles beside h. */
static enum sits_status factor(float *h, int64_t n, struct quant_hessian *out, struct sits_error *err)
{
  double mean = 0;
  for (int64_t i = 0; i < n; i++) mean += (double)h[i * n + i] / (double)n;
  if (!(mean > 0 && isfinite(mean)))
    return sits_fail(err, SITS_FORMAT, "the calibration inputs of a site are all zero or not finite");
  double *a = mem_calloc((size_t)(n * n), sizeof *a), *row = mem_calloc((size_t)n, sizeof *row);
  enum sits_status status = a && row ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory for a Hessian of %lld", (long long)n);
  if (!status) {
    for (int64_t i = 0; i < n; i++) {
      for (int64_t j = 0; j < i; j++) a[i * n + j] = (double)h[j * n + i];
      a[i * n + i] = (double)h[i * n + i] + DAMPING * mean;
      out->diagonal[i] = (float)a[i * n + i];
    }
    bool ok = cholesky(a, n);
    if (ok) {
      invert_lower(a, n, row);
      outer_lower(a, n, row);
      ok = cholesky(a, n);
    }
    if (!ok) status = sits_fail(err, SITS_FORMAT, "a Hessian is not positive definite: too little calibration text");
    for (int64_t i = 0; i < n && !status; i++)
      for (int64_t j = 0; j < n; j++) h[i * n + j] = j < i ? 0 : (float)a[j * n + i];
  }
  mem_free(a);
  mem_free(row);
  return status;
}

enum sits_status quant_hessian_create(float *h, int64_t k, struct quant_hessian **out, struct sits_error *err)
{
  struct quant_hessian *hessian = mem_calloc(1, sizeof *hessian);
  if (!hessian) return sits_fail(err, SITS_NOMEM, "out of memory");
  hessian->k = k;
  hessian->upper = h;
  hessian->diagonal = mem_calloc((size_t)k, sizeof *hessian->diagonal);
  enum sits_status status = hessian->diagonal ? factor(h, k, hessian, err) : sits_fail(err, SITS_NOMEM, "out of memory");
  if (status) quant_hessian_destroy(hessian);
  else *out = hessian;
  return status;
}

void quant_hessian_destroy(struct quant_hessian *hessian)
{
  if (!hessian) return;
  mem_free(hessian->diagonal);
  mem_free(hessian);
}

void quant_gptq_row(const struct quant_hessian *hessian, float *row, int64_t group, const struct quant_rule *rule,
                    struct quant_grid *grids, int32_t *q)
{
  const int64_t n = hessian->k;
  for (int64_t i = 0; i < n; i++) {
    struct quant_grid *grid = &grids[i / group];
    if (i % group == 0) *grid = quant_fit(row + i, hessian->diagonal + i, group, rule);
    const float *u = hessian->upper + i * n;
    q[i] = quant_round(grid, row[i]);
    const float e = (row[i] - quant_value(grid, q[i])) / u[i];
    for (int64_t j = i + 1; j < n; j++) row[j] -= e * u[j];
  }
}
