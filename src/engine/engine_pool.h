/* Rows of logits drawn by several threads: at large batches and vocabularies one thread would take longer than the step itself.
 * A draw depends on its row, its sequence and its position only, so who makes it changes nothing. Created once; no allocation later. */
#ifndef SITS_ENGINE_ENGINE_POOL_H
#define SITS_ENGINE_ENGINE_POOL_H

#include "engine/engine_sample.h"

struct engine_pool;

/* Work on row r with the thread's own sampler. Called from several threads at once, each row once. */
typedef void (*engine_row_fn)(void *user, struct engine_sampler *sampler, int32_t r);

/* n_threads helpers beside the caller; 0 gives a pool that does everything on the caller's thread. */
enum sits_status engine_pool_create(int32_t n_threads, int32_t n_vocab, struct engine_pool **out) SITS_MUST_CHECK;
void engine_pool_destroy(struct engine_pool *pool);
bool engine_pool_has_helpers(const struct engine_pool *pool);
/* Call row for 0 <= r < n_rows; returns when all are done. The caller works too, with `sampler`. */
void engine_pool_run(struct engine_pool *pool, struct engine_sampler *sampler, int32_t n_rows, engine_row_fn row, void *user);

#endif
