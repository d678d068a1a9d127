/* See engine_pool.h. Helpers sleep on a condition between runs; rows are claimed one by one from a counter, so a slow one delays nobody. */
#include "engine/engine_pool.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"

struct helper {
  struct engine_pool *pool;
  struct engine_sampler sampler;
  pthread_t thread;
  bool is_running;
};

struct engine_pool {
  int32_t n_helpers;
  struct helper *helpers;      /* [n_helpers] */
  pthread_mutex_t mutex;
  pthread_cond_t start, done;
  uint64_t round;              /* [mutex] */
  int32_t n_busy;              /* [mutex] helpers that have not finished this round */
  bool wants_stop;             /* [mutex] */
  int32_t n_rows;              /* set before a round starts */
  engine_row_fn row;
  void *user;
  atomic_int next;             /* [atomic] row to be claimed */
};

static void work(struct engine_pool *pool, struct engine_sampler *sampler)
{
  for (int32_t r; (r = atomic_fetch_add(&pool->next, 1)) < pool->n_rows;) pool->row(pool->user, sampler, r);
}

static void *help(void *user)
{
  struct helper *helper = user;
  struct engine_pool *pool = helper->pool;
  uint64_t seen = 0;
  pthread_setname_np(pthread_self(), "sampler");
  for (;;) {
    pthread_mutex_lock(&pool->mutex);
    while (pool->round == seen && !pool->wants_stop) pthread_cond_wait(&pool->start, &pool->mutex);
    seen = pool->round;
    bool stop = pool->wants_stop;
    pthread_mutex_unlock(&pool->mutex);
    if (stop) return NULL;
    work(pool, &helper->sampler);
    pthread_mutex_lock(&pool->mutex);
    if (--pool->n_busy == 0) pthread_cond_signal(&pool->done);
    pthread_mutex_unlock(&pool->mutex);
  }
}

enum sits_status engine_pool_create(int32_t n_threads, int32_t n_vocab, struct engine_pool **out)
{
  struct engine_pool *pool = mem_calloc(1, sizeof *pool);
  if (!pool) return SITS_NOMEM;
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->start, NULL);
  pthread_cond_init(&pool->done, NULL);
  enum sits_status status = SITS_OK;
  pool->helpers = mem_calloc((size_t)n_threads + 1, sizeof *pool->helpers);
  if (!pool->helpers) status = SITS_NOMEM;
  for (; status == SITS_OK && pool->n_helpers < n_threads; pool->n_helpers++) {
    struct helper *helper = &pool->helpers[pool->n_helpers];
    helper->pool = pool;
    status = engine_sampler_init(&helper->sampler, n_vocab);
    if (status != SITS_OK) break;
    helper->is_running = pthread_create(&helper->thread, NULL, help, helper) == 0;
    if (!helper->is_running) {
      engine_sampler_fini(&helper->sampler);
      status = SITS_NOMEM;
      break;
    }
  }
  if (status != SITS_OK) {
    engine_pool_destroy(pool);
    return status;
  }
  *out = pool;
  return SITS_OK;
}

void engine_pool_destroy(struct engine_pool *pool)
{
  if (!pool) return;
  pthread_mutex_lock(&pool->mutex);
  pool->wants_stop = true;
  pthread_cond_broadcast(&pool->start);
  pthread_mutex_unlock(&pool->mutex);
  for (int32_t i = 0; i < pool->n_helpers; i++) {
    pthread_join(pool->helpers[i].thread, NULL);
    engine_sampler_fini(&pool->helpers[i].sampler);
  }
  pthread_cond_destroy(&pool->done);
  pthread_cond_destroy(&pool->start);
  pthread_mutex_destroy(&pool->mutex);
  mem_free(pool->helpers);
  mem_free(pool);
}

bool engine_pool_has_helpers(const struct engine_pool *pool) { return pool->n_helpers > 0; }

void engine_pool_run(struct engine_pool *pool, struct engine_sampler *sampler, int32_t n_rows, engine_row_fn row, void *user)
{
  if (pool->n_helpers == 0 || n_rows <= 1) {
    for (int32_t r = 0; r < n_rows; r++) row(user, sampler, r);
    return;
  }
  pthread_mutex_lock(&pool->mutex);
  pool->n_rows = n_rows;
  pool->row = row;
  pool->user = user;
  atomic_store(&pool->next, 0);
  pool->n_busy = pool->n_helpers;
  pool->round++;
  pthread_cond_broadcast(&pool->start);
  pthread_mutex_unlock(&pool->mutex);
  work(pool, sampler);
  pthread_mutex_lock(&pool->mutex);
  while (pool->n_busy > 0) pthread_cond_wait(&pool->done, &pool->mutex);
  pthread_mutex_unlock(&pool->mutex);
}
