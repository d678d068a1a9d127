/* Kernels of the matrix multiply for AVX2. Until its own kernels stand, this level runs the scalar ones. */
#include "backend/cpu/cpu_quant.h"

const struct cpu_matmul_ops *cpu_matmul_ops_avx2(void) { return cpu_matmul_ops_scalar(); }
