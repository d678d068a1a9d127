/* How the input of a matrix product is rounded before it is multiplied: part of a model's precision, beside its weights' element types.
 *
 * A site is one input that one or several weights share: q, k and v; attention's output; gate and up; down; the head. Kinds:
 *   ACT_BACKEND  whatever the backend does by itself (the CPU: 8 bits with zero point in groups of 32 for quantised weights)
 *   ACT_FLOAT    not rounded
 *   ACT_INT8     groups of 32 along the channels: s = (max(x,0) - min(x,0)) / 254, a zero point, 255 levels
 *   ACT_INT4     groups of 32: s = (hi - lo) / 15 with lo = min(x,0), hi = max(x,0), z = round(-lo / s), 16 levels, over the channels
 *   that are
 *                not listed as outliers (these count as zero there); the outliers of a token in 8 bits, symmetric, one scale a token
 * rotation, whatever the kind: before it is rounded (or seen by an observer), each run of that many channels is multiplied by the
 * orthonormal Walsh-Hadamard matrix; the weights were made for that.
 * Groups lie along the channel order of the tensor, so that they are aligned with the groups of the weights.
 */
#ifndef SITS_TENSOR_ACT_FORMAT_H
#define SITS_TENSOR_ACT_FORMAT_H

#include <stdint.h>

#define ACT_GROUP 32

enum act_kind { ACT_BACKEND, ACT_FLOAT, ACT_INT8, ACT_INT4, ACT_KINDS };

struct act_format {
  enum act_kind kind;
  int32_t n_outliers;                /* ACT_INT4 only */
  const int32_t *outliers;           /* [n_outliers] channels, ascending; borrowed */
  int32_t rotation;                  /* 0: none; a power of two that divides the channels */
};

/* "backend", "float", "int8", "int4". */
const char *act_kind_name(enum act_kind kind);

#endif
