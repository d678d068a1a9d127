/* The CPU's matrix multiply: packed weights times activations, y[t][r] = sum over k of W[r][k] * x[t][k], in f32.
 *
 * Words: a weight is a packed copy of one [rows][K] tensor for one instruction-set level; a row tile is the interleave of the packing
 * (16 rows on AVX-512, 8 elsewhere); an activation (`act`) is x made ready once and shared by all weights of equal format and K:
 * 8-bit integers in groups of 32 for quantised weights, f32 for float weights. MATMUL.md explains layouts and arithmetic.
 *
 * Rules: 1. No threads and no allocation inside cpu_act_quantize, cpu_matmul and cpu_weight_row: the caller splits tokens, then, after
 * a barrier, rows over its pool. 2. A token's result depends on its own x alone, bit for bit: not on the other tokens of the batch, on
 * their number, or on the row split. For quantised weights it does not depend on the instruction-set level either. 3. Quantised weights
 * stay quantised in memory; the packed copy owns its bytes, the source tensor may be dropped. 4. A weight is read-only once packed: any
 * number of threads may use it.
 */
#ifndef SITS_BACKEND_CPU_CPU_MATMUL_H
#define SITS_BACKEND_CPU_CPU_MATMUL_H

#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/cpu_isa.h"
#include "sits2026/status.h"
#include "sits2026/utd.h"

#define CPU_ALIGN_BYTES 64                    /* of packed weights, activations and scratch */
#define CPU_MATMUL_SCRATCH_BYTES (64 << 10)   /* per thread, for cpu_matmul */

enum cpu_act_format {
  CPU_ACT_F32,                                /* float weights */
  CPU_ACT_Q8,                                 /* every quantised weight */
};

struct cpu_weight;

/* Pack a row-major 2-D weight {rows, K} of dtype F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K,
 * or I4 or I8 in the neutral layout (f16 scales per channel or per group of a multiple of 32 along K). Thread-safe.
 * SITS_UNSUPPORTED for another dtype, quantisation or layout, SITS_FORMAT for bad dims or too few bytes (naming the tensor), SITS_NOMEM. */
enum sits_status cpu_weight_create(const struct sits_utd *w, enum cpu_isa isa, struct cpu_weight **out, struct sits_error *err)
    SITS_MUST_CHECK;

/* The same in pieces, so that many weights share one region of big pages and a pool packs one big weight together:
 * cpu_weight_packed_bytes (0: not a weight that cpu_weight_create takes) says how much room the packed copy needs, rounded up to
 * CPU_ALIGN_BYTES; cpu_weight_create_in checks and describes, without packing, into `memory` (aligned, borrowed until destroy; NULL: own
 * memory); then cpu_weight_pack fills rows r0..r1 (r0 a multiple of the row tile, r1 too or the last row), from any thread. */
size_t cpu_weight_packed_bytes(const struct sits_utd *w, enum cpu_isa isa);
enum sits_status cpu_weight_create_in(const struct sits_utd *w, enum cpu_isa isa, void *memory, struct cpu_weight **out,
                                      struct sits_error *err) SITS_MUST_CHECK;
void cpu_weight_pack(struct cpu_weight *w, const struct sits_utd *source, int64_t r0, int64_t r1);
void cpu_weight_destroy(struct cpu_weight *w);                       /* NULL is fine */

/* A region for packed weights: aligned to 2 MB and advised to use huge pages. NULL on failure; free with mem_free. */
void *cpu_weight_region(size_t n_bytes);

int64_t cpu_weight_rows(const struct cpu_weight *w);
int64_t cpu_weight_k(const struct cpu_weight *w);
size_t cpu_weight_bytes(const struct cpu_weight *w);                 /* packed bytes held */
int32_t cpu_weight_row_tile(const struct cpu_weight *w);             /* granularity of row splits */
/* Row `row` as f32, exactly as dequant_row gives it. out: [K]. */
void cpu_weight_row(const struct cpu_weight *w, int64_t row, float *out);

enum cpu_act_format cpu_act_format(const struct cpu_weight *w);
size_t cpu_act_bytes(const struct cpu_weight *w, int32_t n_tokens);  /* room for the activation, a multiple of CPU_ALIGN_BYTES */
/* Make tokens t0..t1 of a batch of n_tokens ready. x: token t at x + t * ldx, K contiguous f32. act: aligned. Threads take disjoint
 * token ranges (multiples of 4 avoid sharing cache lines). A token with a value that is not finite gets NaN in all its results. */
void cpu_act_quantize(const struct cpu_weight *w, const float *x, int64_t ldx, int32_t n_tokens, int32_t t0, int32_t t1, void *act);

/* y[t * ldy + r] for all n_tokens and rows r0..r1 (r0 a multiple of the row tile, r1 too or the last row).
 * scratch: CPU_MATMUL_SCRATCH_BYTES, aligned, this thread's own. */
void cpu_matmul(const struct cpu_weight *w, const void *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                void *scratch);

#endif
