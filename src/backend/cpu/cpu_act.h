/* Activations other than the backend's own choice (tensor/act_format.h), on top of cpu_matmul.h.
 *
 * ACT_FLOAT with a quantised weight: rows are expanded to f32 a few tiles at a time and multiplied as float weights are, so the results
 * are those of the same weight stored as F32, bit for bit. ACT_INT4: the rounded channels make one activation in the records of
 * CPU_ACT_Q8 (16 levels fit the 8-bit integers), the outliers, everything else zero, make a second one; a product runs over both and adds
 * them. On a CPU that buys accuracy figures, not speed: instructions multiply bytes.
 * Rules: those of cpu_matmul.h. */
#ifndef SITS_BACKEND_CPU_CPU_ACT_H
#define SITS_BACKEND_CPU_CPU_ACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/cpu_matmul.h"
#include "tensor/act_format.h"

/* SITS_UNSUPPORTED, naming the weight, where the CPU cannot round the input of `w` that way. act may be NULL. */
enum sits_status cpu_act_check(const struct cpu_weight *w, const char *name, const struct act_format *act, struct sits_error *err)
    SITS_MUST_CHECK;

/* What an input of this kind becomes for that weight, and the room that n_tokens of it need. */
enum cpu_act_format cpu_act_format_as(const struct cpu_weight *w, enum act_kind kind);
size_t cpu_act_bytes_as(const struct cpu_weight *w, enum act_kind kind, int32_t n_tokens);

/* As cpu_act_quantize. is_outlier: [K], read for ACT_INT4 only; side: a second activation for its outliers. */
void cpu_act_make(const struct cpu_weight *w, enum act_kind kind, const uint8_t *is_outlier, const float *x, int64_t ldx, int32_t n_tokens,
                  int32_t t0, int32_t t1, void *act, void *side);

/* As cpu_matmul for a quantised weight and an activation in CPU_ACT_F32. expanded: cpu_expand_bytes, aligned, this thread's own. */
void cpu_matmul_expanded(const struct cpu_weight *w, const void *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                         void *expanded);
size_t cpu_expand_bytes(const struct cpu_weight *w);

/* One row tile as f32 [K][tile], each value as cpu_weight_row gives it; false when this level has no fast path for the format. */
bool cpu_expand_avx2(const struct cpu_weight *w, int64_t tile, float *out);
bool cpu_expand_avx512(const struct cpu_weight *w, int64_t tile, float *out);

#endif
