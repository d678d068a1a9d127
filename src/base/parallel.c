/* See parallel.h. */
#include "base/parallel.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"

struct loop {
  parallel_body body;
  void *context;
  int64_t n, grain;
  _Atomic int64_t next;
  _Atomic int32_t n_workers;         /* numbers given out */
};

static void *work(void *argument)
{
  struct loop *loop = argument;
  const int32_t worker = atomic_fetch_add(&loop->n_workers, 1);
  for (;;) {
    const int64_t first = atomic_fetch_add(&loop->next, loop->grain);
    if (first >= loop->n) return NULL;
    loop->body(loop->context, worker, first, loop->n - first < loop->grain ? loop->n : first + loop->grain);
  }
}

void parallel_for(int32_t n_threads, int64_t n, int64_t grain, parallel_body body, void *context)
{
  struct loop loop = {.body = body, .context = context, .n = n, .grain = grain};
  const int64_t n_runs = (n + grain - 1) / grain;
  int32_t n_helpers = (int32_t)(n_runs < n_threads ? n_runs : n_threads) - 1, n_started = 0;
  pthread_t *helpers = n_helpers > 0 ? mem_calloc((size_t)n_helpers, sizeof *helpers) : NULL;
  if (!helpers) n_helpers = 0;
  while (n_started < n_helpers && pthread_create(&helpers[n_started], NULL, work, &loop) == 0) n_started++;
  work(&loop);
  for (int32_t i = 0; i < n_started; i++) pthread_join(helpers[i], NULL);
  mem_free(helpers);
}
