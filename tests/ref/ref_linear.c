/* See ref_linear.h. */
#include "ref_linear.h"

#include <math.h>

#include "base/mem.h"
#include "tensor/dequant.h"

void ref_linear(const struct sits_utd *w, const float *x, int64_t ldx, int32_t n_tokens, double *y, double *magnitude, int64_t ldy)
{
  const struct sits_dtype_info *info = sits_dtype_info(w->dtype);
  int64_t rows = w->dims[0], n = w->dims[1], row_bytes = n / info->block_elements * info->block_bytes;
  float *row = mem_alloc((size_t)n * sizeof *row);
  if (!row) return;
  for (int64_t r = 0; r < rows; r++) {
    dequant_row(w->dtype, (const uint8_t *)w->data + r * row_bytes, n, row);
    for (int32_t t = 0; t < n_tokens; t++) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < n; k++) {
        double term = (double)row[k] * (double)x[t * ldx + k];
        sum += term;
        size += fabs(term);
      }
      y[t * ldy + r] = sum;
      if (magnitude) magnitude[t * ldy + r] = size;
    }
  }
  mem_free(row);
}

void ref_act_q8_g32(const float *x, int64_t n, float *out)
{
  for (int64_t g = 0; g < n; g += 32) {
    float lo = 0, hi = 0, step, inverse;
    double middle;
    for (int64_t i = g; i < g + 32; i++) {
      lo = fminf(lo, x[i]);
      hi = fmaxf(hi, x[i]);
    }
    step = (hi - lo) / 254.0F;
    inverse = 254.0F / (hi - lo);
    middle = hi > lo ? nearbyint((double)((hi + lo) * 0.5F * inverse)) : 0;
    for (int64_t i = g; i < g + 32; i++) {
      double steps = hi > lo ? nearbyint((double)(x[i] * inverse)) : 0;
      out[i] = (float)(fmin(fmax(steps, middle - 127), middle + 127) * (double)step);
    }
  }
}
