/* Element codecs: any dtype of the UTD table to float32, bit for bit as the `gguf` Python package does, and the half conversions. */
#ifndef SITS_TENSOR_DEQUANT_H
#define SITS_TENSOR_DEQUANT_H

#include <stdint.h>

#include "sits2026/utd.h"

float half_to_float(uint16_t half);
uint16_t float_to_half(float value);          /* round to nearest even; overflow gives infinity */
float bf16_to_float(uint16_t value);
uint16_t float_to_bf16(float value);          /* round to nearest even */

/* Expand n elements (a multiple of the block size) that start at `data`. out: [n] f32. dtype: any float or Q* type, or I8. */
void dequant_row(enum sits_dtype dtype, const void *data, int64_t n, float *out);

/* Row `row` of a row-major 2-D tensor, whatever its type, groups and scales. out: [dims[1]]. Scales are F16 or F32, groups along axis 1. */
void dequant_tensor_row(const struct sits_utd *utd, int64_t row, float *out);

#endif
