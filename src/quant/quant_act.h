/* Rounding activations by definition (tensor/act_format.h), one row at a time, in f32: for measuring what a format costs. Backends have
 * their own, faster ones, whose results these equal but for the last bits of sums. */
#ifndef SITS_QUANT_QUANT_ACT_H
#define SITS_QUANT_QUANT_ACT_H

#include <stdint.h>

#include "tensor/act_format.h"

/* x: [n], already rotated where the format says so; out: [n], may be x. n: a multiple of ACT_GROUP for the integer kinds. ACT_BACKEND
 * counts as ACT_FLOAT. */
void quant_act_row(const struct act_format *act, const float *x, int32_t n, float *out);

#endif
