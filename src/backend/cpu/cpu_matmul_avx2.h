/* Parts of the AVX2 level of the matrix multiply that live in other files than cpu_matmul_avx2.c. */
#ifndef SITS_BACKEND_CPU_CPU_MATMUL_AVX2_H
#define SITS_BACKEND_CPU_CPU_MATMUL_AVX2_H

#include "backend/cpu/cpu_quant.h"

/* One token of the batch into act, see cpu_quant.h; x NULL: zeros. */
void cpu_quantize_avx2(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act);

/* F32, F16 and BF16 weights. */
void cpu_matmul_float_avx2(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy);

#endif
