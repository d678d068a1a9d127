/* Binary heap of the requests that have a deadline, earliest first, so that a step looks at the top only. */
#include "engine/engine_internal.h"

static void put(struct sits_engine *engine, int32_t at, struct sits_request *request)
{
  engine->deadlines[at] = request;
  request->deadline_at = at;
}

static void settle(struct sits_engine *engine, int32_t at, struct sits_request *request)
{
  struct sits_request **heap = engine->deadlines;
  while (at > 0 && heap[(at - 1) / 2]->params.deadline_us > request->params.deadline_us) {
    put(engine, at, heap[(at - 1) / 2]);
    at = (at - 1) / 2;
  }
  for (int32_t child; (child = 2 * at + 1) < engine->n_deadlines; at = child) {
    if (child + 1 < engine->n_deadlines && heap[child + 1]->params.deadline_us < heap[child]->params.deadline_us) child++;
    if (heap[child]->params.deadline_us >= request->params.deadline_us) break;
    put(engine, at, heap[child]);
  }
  put(engine, at, request);
}

void engine_deadline_add(struct sits_engine *engine, struct sits_request *request)
{
  if (request->params.deadline_us <= 0) return;
  int32_t at = engine->n_deadlines++;
  settle(engine, at, request);
}

void engine_deadline_remove(struct sits_engine *engine, struct sits_request *request)
{
  int32_t at = request->deadline_at;
  if (at < 0) return;
  request->deadline_at = -1;
  struct sits_request *last = engine->deadlines[--engine->n_deadlines];
  if (last != request) settle(engine, at, last);
}
