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

/* e4m4: code -> value. */
static double scale_value(int code)
{
  const int e = code / 16, m = code % 16;
  return e == 0 ? ldexp(m / 16.0, -12) : ldexp(1 + m / 16.0, e - 13);
}

static int nearest_scale(double scale)
{
  int best = 0;
  for (int code = 1; code < 256; code++)
    if (fabs(scale_value(code) - scale) < fabs(scale_value(best) - scale)) best = code;
  return best;
}

void ref_kv_int8(double *x, int32_t n)
{
  double top = 0;
  for (int32_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
  for (int32_t i = 0; i < n; i++) x[i] = top > 0 ? nearbyint(x[i] * 127 / top) * top / 127 : 0;
}

void ref_kv_u4(double *x, int32_t n, double nudge)
{
  double lo = x[0], hi = x[0], best[32] = {0}, best_error = INFINITY;
  for (int32_t i = 0; i < n; i++) lo = fmin(lo, x[i]), hi = fmax(hi, x[i]);
  const int first = nearest_scale((1 + nudge) * fmax((hi - lo) / 15, fmax(fabs(lo), fabs(hi)) / 120));
  for (int k = 0; k < 9; k++) {
    if (first + k / 3 > 255) break;
    const double s = scale_value(first + k / 3), z = s > 0 ? fmin(127, fmax(-128, nearbyint(-lo / s) + k % 3 - 1)) : 0;
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

void ref_kv_fp4(double *x, int32_t n, double nudge)
{
  static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  double top = 0, best[32] = {0}, best_error = INFINITY;
  for (int32_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
  for (int k = 12; k >= 8; k--) {
    const double s = scale_value(nearest_scale((1 + nudge) * top / (k * 0.5)));
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
