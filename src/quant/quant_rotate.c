/* See quant_rotate.h. Entry points: quant_rotation_create, quant_rotate. */
#include "quant/quant_rotate.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "tensor/walsh.h"

#define MOST_PALEY 512               /* largest order tried: its product costs order^2 / order operations a value */

static bool is_prime(int32_t q)
{
  for (int32_t d = 2; d * d <= q; d++)
    if (q % d == 0) return false;
  return q > 1;
}

/* The prime behind a Paley matrix of that order; 0: none. */
static int32_t paley_prime(int32_t order, bool *is_second)
{
  *is_second = false;
  if (order % 4 != 0) return 0;
  if ((order - 1) % 4 == 3 && is_prime(order - 1)) return order - 1;
  *is_second = true;
  return (order / 2 - 1) % 4 == 1 && is_prime(order / 2 - 1) ? order / 2 - 1 : 0;
}

/* Legendre symbol of a modulo the prime q. */
static int legendre(int32_t a, int32_t q)
{
  a = (a % q + q) % q;
  if (a == 0) return 0;
  for (int64_t r = 1; r <= q / 2; r++)
    if (r * r % q == a) return 1;
  return -1;
}

/* C: zero diagonal, first row and column +1 (first column -1 where q = 3 mod 4), then the Jacobsthal matrix. */
static int conference(int32_t i, int32_t j, int32_t q, const int8_t *symbol)
{
  if (i == j) return 0;
  if (i == 0) return 1;
  if (j == 0) return q % 4 == 3 ? -1 : 1;
  return symbol[(i - j + q) % q];
}

/* First: I + C. Second: C x [1 1; 1 -1] + I x [1 -1; -1 -1]. */
static bool fill_paley(struct quant_rotation *r, int32_t q, bool is_second)
{
  static const int8_t with[2][2] = {{1, 1}, {1, -1}}, alone[2][2] = {{1, -1}, {-1, -1}};
  int8_t *symbol = mem_calloc((size_t)q, 1);
  r->paley = mem_calloc((size_t)r->odd * (size_t)r->odd, 1);
  for (int32_t a = 0; symbol && a < q; a++) symbol[a] = (int8_t)legendre(a, q);
  for (int32_t i = 0; symbol && r->paley && i < r->odd; i++)
    for (int32_t j = 0; j < r->odd; j++) {
      int8_t *at = &r->paley[i * r->odd + j];
      if (!is_second) *at = (int8_t)(i == j ? 1 : conference(i, j, q, symbol));
      else if (i / 2 == j / 2) *at = alone[i % 2][j % 2];
      else *at = (int8_t)(conference(i / 2, j / 2, q, symbol) * with[i % 2][j % 2]);
    }
  mem_free(symbol);
  return symbol && r->paley;
}

/* n = odd * walsh with the smallest Paley order that leaves a power of two; else runs of the largest power of two. */
static bool factor(struct quant_rotation *r)
{
  int32_t rest = r->n;
  while (rest % 2 == 0) rest /= 2;
  r->odd = 1;
  r->walsh = r->n / rest;
  if (rest == 1) return true;
  for (int64_t order = rest * 4; order <= r->n && order <= MOST_PALEY && r->n % order == 0; order *= 2) {
    bool is_second;
    const int32_t q = paley_prime((int32_t)order, &is_second);
    if (q == 0) continue;
    r->odd = (int32_t)order;
    r->walsh = r->n / r->odd;
    return fill_paley(r, q, is_second);
  }
  return true;
}

enum sits_status quant_rotation_create(int32_t n, uint64_t seed, struct quant_rotation **out, struct sits_error *err)
{
  struct quant_rotation *r = mem_calloc(1, sizeof *r);
  if (!r) return sits_fail(err, SITS_NOMEM, "out of memory for a rotation");
  r->n = n;
  r->signs = mem_calloc((size_t)n, sizeof *r->signs);
  if (!r->signs || !factor(r)) {
    quant_rotation_destroy(r);
    return sits_fail(err, SITS_NOMEM, "out of memory for a rotation of %d", n);
  }
  for (int32_t i = 0; i < n; i++) r->signs[i] = seed != 0 && hash_mix(seed, (uint64_t)i) & 1 ? -1.0F : 1.0F;
  *out = r;
  return SITS_OK;
}

void quant_rotation_destroy(struct quant_rotation *rotation)
{
  if (!rotation) return;
  mem_free(rotation->paley);
  mem_free(rotation->signs);
  mem_free(rotation);
}

/* One run of n: signs, Walsh-Hadamard inside each of the odd parts, Paley across them. */
static void rotate_run(const struct quant_rotation *r, float *x, float *work)
{
  const int32_t parts = r->n / r->walsh;
  const float norm = 1.0F / sqrtf((float)r->walsh * (float)r->odd);
  for (int32_t i = 0; i < r->n; i++) x[i] *= r->signs[i];
  for (int32_t p = 0; p < parts; p++) walsh_transform(x + (int64_t)p * r->walsh, r->walsh);
  if (r->paley) {
    memset(work, 0, (size_t)r->n * sizeof *work);
    for (int32_t p = 0; p < r->odd; p++)
      for (int32_t k = 0; k < r->odd; k++) {
        const float sign = (float)r->paley[p * r->odd + k], *from = x + (int64_t)k * r->walsh;
        float *to = work + (int64_t)p * r->walsh;
        for (int32_t i = 0; i < r->walsh; i++) to[i] += sign * from[i];
      }
    memcpy(x, work, (size_t)r->n * sizeof *x);
  }
  for (int32_t i = 0; i < r->n; i++) x[i] *= norm;
}

void quant_rotate(const struct quant_rotation *rotation, float *x, int64_t n_values, float *work)
{
  for (int64_t i = 0; i < n_values; i += rotation->n) rotate_run(rotation, x + i, work);
}
