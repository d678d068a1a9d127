/* Choice of the table of vector primitives; see cpu_ops.h. */
#include "backend/cpu/cpu_ops.h"

#include <math.h>

const struct cpu_ops *cpu_ops_for(enum cpu_isa isa)
{
#if defined(__x86_64__)
  if (isa == CPU_AVX512) return &cpu_ops_avx512;
  if (isa == CPU_AVX2) return &cpu_ops_avx2;
#endif
  return &cpu_ops_scalar;
}

float cpu_exp_negative(float x) { return expf(x); }
