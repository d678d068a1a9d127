/* See ref_ops.h: as plain as they can be. */
#include "ref_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "tensor/dequant.h"

void ref_rmsnorm(const double *x, const double *gain, int32_t n, double eps, double *y)
{
  double sum = 0;
  for (int32_t i = 0; i < n; i++) sum += x[i] * x[i];
  const double scale = 1 / sqrt(sum / n + eps);
  for (int32_t i = 0; i < n; i++) y[i] = x[i] * scale * gain[i];
}

void ref_rope(double *x, int32_t dims, const float *inv_freq, double magnitude, int32_t position, bool is_interleaved)
{
  for (int32_t i = 0; i < dims / 2; i++) {
    const int32_t first = is_interleaved ? 2 * i : i, second = is_interleaved ? 2 * i + 1 : i + dims / 2;
    const float angle = (float)position * inv_freq[i];
    const double c = cos(angle) * magnitude, s = sin(angle) * magnitude, a = x[first], b = x[second];
    x[first] = a * c - b * s;
    x[second] = b * c + a * s;
  }
}

void ref_expand(const struct sits_utd *utd, double *out)
{
  const int64_t n = sits_utd_elements(utd);
  float *row = mem_alloc((size_t)n * sizeof *row);
  if (row == NULL) abort();
  dequant_row(utd->dtype, utd->data, n, row);
  for (int64_t i = 0; i < n; i++) out[i] = row[i];
  mem_free(row);
}

void ref_swiglu(const double *gate, const double *up, int64_t n, double *y)
{
  for (int64_t i = 0; i < n; i++) y[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
}

void ref_attention(const double *q, const double *k, const double *v, int32_t position, int32_t n_heads, int32_t n_kv_heads,
                   int32_t head_dim, int32_t window, const bool *is_hidden, double *given, int32_t n_given, double *out)
{
  const int32_t first = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
  double *weight = mem_alloc((size_t)(position + 1) * sizeof *weight);
  if (weight == NULL) abort();
  for (int32_t h = 0; h < n_heads; h++) {
    const int32_t g = h / (n_heads / n_kv_heads);
    double max = -INFINITY, sum = 0;
    for (int32_t j = first; j <= position; j++) {
      weight[j] = 0;
      for (int32_t d = 0; d < head_dim; d++)
        weight[j] += q[(int64_t)h * head_dim + d] * k[((int64_t)j * n_kv_heads + g) * head_dim + d];
      weight[j] /= sqrt(head_dim);
      if (is_hidden != NULL && is_hidden[(int64_t)j * n_kv_heads + g]) weight[j] = -INFINITY;
      max = fmax(max, weight[j]);
    }
    for (int32_t j = first; j <= position; j++) sum += weight[j] = exp(weight[j] - max);
    for (int32_t j = first; j < n_given; j++) given[(int64_t)j * n_kv_heads + g] += weight[j] / sum * (weight[j] / sum);
    for (int32_t d = 0; d < head_dim; d++) {
      double value = 0;
      for (int32_t j = first; j <= position; j++) value += weight[j] * v[((int64_t)j * n_kv_heads + g) * head_dim + d];
      out[(int64_t)h * head_dim + d] = value / sum;
    }
  }
  mem_free(weight);
}

void ref_hadamard(double *x, int32_t n)
{
  double *y = mem_alloc((size_t)n * sizeof *y);
  if (y == NULL) abort();
  for (int32_t i = 0; i < n; i++) {
    y[i] = 0;
    for (int32_t j = 0; j < n; j++) y[i] += __builtin_popcount((unsigned)(i & j)) % 2 ? -x[j] : x[j];
    y[i] /= sqrt(n);
  }
  memcpy(x, y, (size_t)n * sizeof *x);
  mem_free(y);
}

void ref_round_share(const double *x, int32_t n, int32_t group, double *y, double *step)
{
  for (int32_t i = 0; i < n; i++) {
    const int32_t first = i / group * group;
    double top = 0;
    for (int32_t k = first; k < first + group && k < n; k++) top = fmax(top, fabs(x[k]));
    step[i] = top / 127;
    y[i] = top > 0 ? round(x[i] / step[i]) * step[i] : 0;
  }
}
