/* The Walsh-Hadamard transform, without a factor: what spreads a head's or a row's outliers over all of its values. Inline, for the CPU
 * backend compiles it once for each instruction set. */
#ifndef SITS_TENSOR_WALSH_H
#define SITS_TENSOR_WALSH_H

#include <stdint.h>

/* x[n] in place, n a power of two; divided by sqrt(n) it is its own inverse. */
static inline __attribute__((always_inline)) void walsh_transform(float *x, int32_t n)
{
  for (int32_t half = 1; half < n; half *= 2)
    for (int32_t i = 0; i < n; i += 2 * half)
      for (int32_t k = i; k < i + half; k++) {
        const float a = x[k], b = x[k + half];
        x[k] = a + b;
        x[k + half] = a - b;
      }
}

#endif
