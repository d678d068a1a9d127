/* See ref_kv.h. */
#include "ref_kv.h"

#include <math.h>
#include <string.h>

#include "ref_ops.h"

void ref_kv_rotate(double *x, int32_t head_dim)
{
  int32_t block = 1;
  while (head_dim % (2 * block) == 0) block *= 2;
  for (int32_t i = 0; i < head_dim; i += block) ref_hadamard(x + i, block);
}

/* e5m3 by search: every value (1 + m/8) 2^(e-15), or m/8 2^-14. */
double ref_kv_scale(double scale)
{
  double best = 0, best_error = scale;
  for (int e = 0; e <= 30; e++)
    for (int m = 0; m < 8; m++) {
      const double value = e == 0 ? ldexp(m / 8.0, -14) : ldexp(1 + m / 8.0, e - 15);
      if (fabs(value - scale) < best_error) best_error = fabs(value - scale), best = value;
    }
  return best;
}

void ref_kv_int8(double *x, int32_t n)
{
  double top = 0;
  for (int32_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
  for (int32_t i = 0; i < n; i++) x[i] = top > 0 ? nearbyint(x[i] * 127 / top) * top / 127 : 0;
}

void ref_kv_u4(double *x, int32_t n)
{
  double lo = x[0], hi = x[0], best[32] = {0}, best_error = INFINITY;
  for (int32_t i = 0; i < n; i++) lo = fmin(lo, x[i]), hi = fmax(hi, x[i]);
  const double step = fmax((hi - lo) / 15, fmax(fabs(lo), fabs(hi)) / 120);
  for (int k = 0; k < 2; k++) {
    const double s = ref_kv_scale(step * (k == 0 ? 1 : 1.06)), z = s > 0 ? fmin(127, fmax(-128, nearbyint(-lo / s))) : 0;
    double tried[32], error = 0;
    for (int32_t i = 0; i < n; i++) {
      const double q = s > 0 ? fmin(15, fmax(0, nearbyint(x[i] / s) + z)) : 0;
      tried[i] = (q - z) * s;
      error += (tried[i] - x[i]) * (tried[i] - x[i]);
    }
    if (error < best_error) best_error = error, memcpy(best, tried, sizeof best);
  }
  memcpy(x, best, (size_t)n * sizeof *x);
}

void ref_kv_fp4(double *x, int32_t n)
{
  static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  double top = 0, best[32] = {0}, best_error = INFINITY;
  for (int32_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
  for (int k = 6; k >= 4; k--) {
    const double s = ref_kv_scale(top / k);
    double tried[32], error = 0;
    for (int32_t i = 0; i < n; i++) {
      double nearest = 0;
      for (int v = 0; v < 8; v++)
        if (fabs(values[v] * s - fabs(x[i])) < fabs(nearest - fabs(x[i]))) nearest = values[v] * s;
      tried[i] = x[i] < 0 ? -nearest : nearest;
      error += (tried[i] - x[i]) * (tried[i] - x[i]);
    }
    if (error < best_error) best_error = error, memcpy(best, tried, sizeof best);
  }
  memcpy(x, best, (size_t)n * sizeof *x);
}
