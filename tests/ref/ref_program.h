/* A reference backend: runs a plain program (no fusions) one token at a time in double, over dense key/value arrays, with ref_ops alone.
 * Whatever a device does with the fused program of the same graph, its logits must be these. Slow; for small models. */
#ifndef TESTS_REF_REF_PROGRAM_H
#define TESTS_REF_REF_PROGRAM_H

#include <stdint.h>

#include "backend/program.h"

struct ref_sequence;                /* the keys and values of one sequence */

/* How a cache spoils what it stores; called for each key (is_value false) or value vector of a head before it is stored. NULL: exact. */
typedef void (*ref_store_fn)(double *x, int32_t head_dim, bool is_value);

struct ref_sequence *ref_sequence_create(const struct program *program, int32_t max_tokens, ref_store_fn store);
void ref_sequence_destroy(struct ref_sequence *sequence);

/* From now on no query of this layer and kv head sees positions first..first+n-1. */
void ref_sequence_hide(struct ref_sequence *sequence, int32_t layer, int32_t kv_head, int32_t first, int32_t n);
/* Squares of what each position was given by all queries so far that lie `nearest` pages or more behind it, summed over the query heads of
 * a kv head: [L][max_tokens][G], the sequence's own. */
void ref_sequence_measure(struct ref_sequence *sequence, int32_t nearest);
const double *ref_sequence_given(const struct ref_sequence *sequence);

/* Append `token` to the sequence and give its logits: [V]. Aborts on a fused program or when full. */
void ref_program_step(struct ref_sequence *sequence, int32_t token, double *logits);

#endif
