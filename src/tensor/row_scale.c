/* See row_scale.h. Every finite f16 is a whole number of steps of 2^-24, its least subnormal, below 2^41 of them. So the largest number of
 * which all scales are whole multiples is their greatest common divisor. */
#include "tensor/row_scale.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define STEP_EXPONENT (-24)

/* In steps; false where that is no scale. */
static bool steps_of(const uint8_t *at, uint64_t *out)
{
  uint16_t h;
  memcpy(&h, at, sizeof h);
  const uint64_t exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31 || h > 0x8000) return false; /* -0 counts as 0 */
  *out = exponent == 0 ? fraction : (fraction | 1024) << (exponent - 1);
  return true;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
  while (b != 0) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

enum row_scale_kind row_scale_find(const void *scales, int64_t n, float *channel)
{
  const uint8_t *at = scales;
  uint64_t divisor = 0, largest = 0, steps;
  bool is_powers = true;
  for (int64_t i = 0; i < n; i++) {
    if (!steps_of(at + 2 * i, &steps)) return ROW_SCALE_FREE;
    if (steps > largest) largest = steps;
    divisor = common_divisor(steps, divisor);
    if (largest > ROW_SCALE_MOST * divisor) return ROW_SCALE_FREE; /* it only shrinks */
  }
  for (int64_t i = 0; i < n && divisor > 0; i++) {
    (void)steps_of(at + 2 * i, &steps);
    const uint64_t factor = steps / divisor;
    is_powers = is_powers && (factor & (factor - 1)) == 0;
  }
  *channel = divisor > 0 ? ldexpf((float)divisor, STEP_EXPONENT) : 1.0F;
  return is_powers ? ROW_SCALE_POWERS : ROW_SCALE_MULTIPLES;
}
