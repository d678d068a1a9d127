/* The loop. engine_step is its table of contents. Nothing here allocates. */
#include "base/clock.h"
#include "engine/engine_internal.h"

void engine_enqueue(struct sits_engine *engine, const struct sits_request *request, int32_t n_ready)
{
  const struct sits_request_params *p = &request->params;
  const struct engine_choice *lead = request->choices;
  while (!lead->is_born) lead++;
  struct alps_request entry = {.service_class = (int32_t)p->service_class, .priority = p->priority, .tenant = p->tenant,
                               .arrival_us = atomic_load(&request->times[TIME_SUBMITTED]), .n_known = p->n_prompt, .n_ready = n_ready,
                               .n_limit = p->n_prompt + p->sampling.max_tokens, .width = request->n_unfinished,
                               .wants_rows = p->sampling.n_prompt_logprobs >= 0};
  alps_enqueue(engine->alps, lead->id, &entry);
}

static void add_request(struct sits_engine *engine, struct sits_request *request)
{
  for (int32_t i = 0; i < request->n_choices; i++) {
    struct engine_choice *choice = &request->choices[i];
    choice->id = engine->free_ids[--engine->n_free_ids];
    engine->by_id[choice->id] = choice;
  }
  request->choices[0].is_born = true;
  engine_deadline_add(engine, request);
  if (!engine_handover_begin(engine, request)) engine_enqueue(engine, request, 0);
}

static void cancel_request(struct sits_engine *engine, struct sits_request *request)
{
  int32_t n_before = request->n_unfinished;
  for (int32_t i = request->n_choices - 1; i >= 0; i--) {
    struct engine_choice *choice = &request->choices[i];
    if (choice->is_done || !engine_is_cancelled(request, i)) continue;
    if (engine_is_stopped(request, i)) engine_finish(engine, choice, SITS_FINISH_STOP, SITS_OK, -1);
    else engine_finish(engine, choice, SITS_FINISH_CANCELLED, SITS_CANCELLED, -1);
  }
  if (request->n_unfinished == n_before) return; /* their ends came first */
  engine_observe(&engine->stats.cancel_steps_hist, (double)(atomic_load(&engine->n_steps_begun) - request->todo_step));
}

static void add_all(struct sits_engine *engine, struct sits_request *request)
{
  bool has_failed = atomic_load(&engine->state) == ENGINE_FAILED;
  while (request) {
    struct sits_request *next = request->next;
    request->next = NULL;
    add_request(engine, request);
    if (has_failed) engine_finish_all(engine, request, SITS_FINISH_ERROR, SITS_DEVICE);
    request = next;
  }
}

/* New requests become waiting entries; cancelled choices end. */
static void drain_inbox(struct sits_engine *engine)
{
  pthread_mutex_lock(&engine->inbox_mutex);
  struct sits_request *request = engine->inbox_first, *cancel = engine->cancel_first;
  engine->inbox_first = engine->inbox_last = engine->cancel_first = NULL;
  atomic_store(&engine->inbox_class, SITS_CLASS_COUNT);
  bool cancel_all = engine->wants_cancel_all;
  for (struct sits_request *r = cancel; r; r = r->cancel_next) {
    r->in_cancel_list = false; /* from here on a new call may link it again, so the chain is kept in cancel_todo */
    r->cancel_todo = r->cancel_next;
    r->todo_step = r->cancel_step;
  }
  pthread_mutex_unlock(&engine->inbox_mutex);
  add_all(engine, request);
  while (cancel) {
    struct sits_request *next = cancel->cancel_todo;
    cancel_request(engine, cancel);
    engine_request_unref(cancel);
    cancel = next;
  }
  for (int32_t id = 0; cancel_all && id < engine->max_entries; id++) {
    if (engine->by_id[id]) engine_finish(engine, engine->by_id[id], SITS_FINISH_CANCELLED, SITS_CANCELLED, -1);
  }
}

/* While a batch is in flight, or planned, only arrivals are taken: nothing that is in the batch may end or move. */
static void take_arrivals(struct sits_engine *engine)
{
  pthread_mutex_lock(&engine->inbox_mutex);
  struct sits_request *request = engine->inbox_first;
  engine->inbox_first = engine->inbox_last = NULL;
  atomic_store(&engine->inbox_class, SITS_CLASS_COUNT);
  pthread_mutex_unlock(&engine->inbox_mutex);
  add_all(engine, request);
}

static void expire(struct sits_engine *engine)
{
  while (engine->n_deadlines > 0 && engine->deadlines[0]->params.deadline_us <= engine->step_started_us) {
    struct sits_request *request = engine->deadlines[0];
    engine_deadline_remove(engine, request);
    engine_finish_all(engine, request, SITS_FINISH_DEADLINE, SITS_DEADLINE);
  }
}

void engine_deliver(struct sits_engine *engine)
{
  if (engine->n_news == 0) return;
  for (int32_t i = 0; i < engine->n_news; i++) engine->news[i]->has_news = false;
  if (engine->options.on_events) engine->options.on_events(engine->options.events_user, engine->news, engine->n_news);
  engine->n_news = 0;
}

/* Drop the engine's reference to what has ended; whoever waits for the last one is told. */
static void reclaim(struct sits_engine *engine)
{
  int32_t n_done = 0;
  while (engine->done) {
    struct sits_request *request = engine->done;
    engine->done = request->next;
    engine_request_unref(request);
    n_done++;
  }
  if (n_done > 0 && atomic_fetch_sub(&engine->n_requests, n_done) == n_done) {
    pthread_mutex_lock(&engine->inbox_mutex);
    pthread_cond_broadcast(&engine->idle_cond);
    pthread_mutex_unlock(&engine->inbox_mutex);
  }
#ifdef SITS_DEBUG_CHECKS
  kv_check(engine->pages);
  alps_check(engine->alps);
#endif
}

/* What the host does while the device computes: the last step's tokens go out, arrivals are queued. */
static void overlap(struct sits_engine *engine)
{
  engine_deliver(engine);
  reclaim(engine);
  take_arrivals(engine);
  engine_stats_publish(engine);
}

static void tell_step(struct sits_engine *engine, int64_t step_us)
{
  const struct alps_plan *plan = &engine->plan;
  if (!engine->options.on_step) return;
  const struct engine_step_times times = {.n_decode = plan->n_decode, .n_prompt_tokens = plan->work.n_prompt_tokens, .step_us = step_us,
                                          .predicted_us = plan->predicted_us, .batch_us = engine->compute_us,
                                          .slice_us = plan->slice_us, .sliced_us = plan->sliced_us, .once_us = plan->once_us};
  engine->options.on_step(engine->options.step_user, &times);
}

/* What the device has spent on capturing steps; it forgets that with the captured steps. */
static int64_t capture_us(const struct sits_engine *engine)
{
  struct backend_stats stats = {0};
  if (engine->options.vtable->stats) engine->options.vtable->stats(engine->options.program, &stats);
  return stats.capture_us;
}

static void forward_and_sample(struct sits_engine *engine)
{
  struct backend_result result = {0};
  const int64_t captured_us = capture_us(engine);
  int64_t started_us = clock_monotonic_us();
  if (engine->slice.end_us > started_us) started_us = engine->slice.end_us; /* until then the device has the slice */
  if (engine->is_continuous) {
    int64_t serial_us = started_us - engine->last_step_end_us - engine->plan.sliced_us - engine->slice.reported_us - engine->swapped_us;
    engine->stats.serial_us_ewma += 0.1 * ((double)serial_us - engine->stats.serial_us_ewma);
  }
  atomic_fetch_add(&engine->n_steps_begun, 1);
  enum sits_status status = engine_submit_batch(engine);
  if (status == SITS_OK) status = engine_slice_ahead(engine);
  if (status == SITS_OK && engine->options.overlap) overlap(engine);
  if (status == SITS_OK) status = engine_wait_batch(engine, &result);
  int64_t now_us = clock_monotonic_us();
  engine->compute_us = now_us > started_us ? now_us - started_us : 0; /* a slice's end is known in advance, not exactly */
  int64_t from_us = engine->is_continuous ? engine->last_step_end_us : engine->step_started_us;
  if (status == SITS_OK && engine->plan.slice.id >= 0 && engine->plan.slice_is_behind) {
    engine_slice_run_behind(engine, from_us);
    if (atomic_load(&engine->state) == ENGINE_FAILED) return;
    now_us = clock_monotonic_us();
  }
  engine->last_step_end_us = now_us;
  engine->stats.n_steps++;
  if (status != SITS_OK) {
    engine_fail(engine, status);
    return;
  }
  engine_outputs(engine, &result);
  const int64_t all_captured_us = capture_us(engine);
  const int64_t once_us = all_captured_us - (all_captured_us >= captured_us ? captured_us : 0);
  engine->plan.once_us = once_us + engine->swapped_us;
  int64_t own_us = now_us - from_us - engine->draft_us - engine->slice.reported_us; /* the planner's costs are the model's own */
  alps_report(engine->alps, &engine->plan, own_us);
  engine->stats.step_us_ewma += 0.1 * ((double)(now_us - from_us) - engine->stats.step_us_ewma);
  engine_observe(&engine->stats.iteration_tokens_hist, engine->batch.n_tokens);
  engine->plan.once_us = once_us;
  tell_step(engine, now_us - from_us);
}

/* The plan's slice; where there is nothing else in the plan, that was the step. When a request of a higher class comes meanwhile, the
 * items wait too: all is planned anew with it. */
static void run_slices(struct sits_engine *engine)
{
  int64_t from_us = engine->is_continuous ? engine->last_step_end_us : engine->step_started_us;
  while (engine->plan.slice.id >= 0) {
    bool is_urgent;
    do {
      engine_slice_run(engine, from_us);
      if (atomic_load(&engine->state) == ENGINE_FAILED) return;
      is_urgent = atomic_load(&engine->inbox_class) < engine->plan.slice_class;
      if (!is_urgent && engine->plan.slice_ended) take_arrivals(engine); /* what is left of the step may be theirs */
    } while (!is_urgent && engine->plan.slice_ended && engine_plan_more(engine, engine_slice_has_time(engine)));
    if (engine->plan.n_items > 0 && !is_urgent) return;
    engine->plan.n_items = engine->plan.n_decode = engine->plan.n_joined = 0;
    engine->plan.work = (struct alps_cost_work){0};
    if (is_urgent) alps_drop_plan(engine->alps);
    alps_report(engine->alps, &engine->plan, engine->plan.sliced_us);
    engine->slice.reported_us += engine->plan.sliced_us;
    if (!is_urgent) {
      engine->last_step_end_us = clock_monotonic_us();
      if (engine->last_step_end_us < engine->slice.end_us) engine->last_step_end_us = engine->slice.end_us;
      return;
    }
    drain_inbox(engine);
    engine_plan(engine);
  }
}

bool engine_step(struct sits_engine *engine)
{
  engine->step_started_us = clock_monotonic_us();
  if (!engine->is_continuous) engine->last_step_end_us = engine->step_started_us;
  atomic_store(&engine->heartbeat_us, engine->step_started_us);
  drain_inbox(engine);
  if (engine->placement) engine_placement_turn(engine);
  expire(engine);
  const bool has_swapped = engine_swap_run(engine);
  engine_hold_full(engine);
  engine_draft(engine);
  if (engine->draft_us > 0) drain_inbox(engine); /* a draft model took a while: who left meanwhile is not planned */
  engine_plan(engine);
  bool has_work = engine->plan.n_items > 0 || engine->plan.slice.id >= 0;
  engine->slice.reported_us = 0;
  if (engine->plan.slice.id >= 0 && !engine->plan.slice_is_behind) run_slices(engine);
  if (engine->plan.n_items > 0 && atomic_load(&engine->state) != ENGINE_FAILED) {
    engine_build(engine);
    forward_and_sample(engine);
  }
  /* With overlap the tokens of a step go out while the next one computes, which begins at once. */
  if (!has_work || !engine->options.overlap || atomic_load(&engine->state) == ENGINE_FAILED) {
    engine_deliver(engine);
    reclaim(engine);
    engine_stats_publish(engine);
  }
  engine->is_continuous = has_work;
  return has_work || has_swapped || engine->n_swapping > 0;
}
