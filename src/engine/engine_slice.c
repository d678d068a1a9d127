/* A prompt's chunk read in slices: it computes on the backend's lane between the batches of the others, as long as their next tokens can
 * still come in time, and stops when a request of a higher class comes. The planner says which chunk and until when (alps_plan.slice);
 * the clock, not a prediction, ends a slice. What the chunk writes is the sequence's own pages, reserved when it begins; it is committed,
 * and the prompt's token drawn, when it is done. A chunk whose sequence ends or is pre-empted is simply given up. */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_internal.h"

enum { SLICE_TOKENS = 128, GAP_FADE = 16 };

enum sits_status engine_slice_open(struct sits_engine *engine, struct sits_error *err)
{
  const struct engine_options *o = &engine->options;
  struct engine_slice *slice = &engine->slice;
  int32_t n = o->vtable->lane_tokens > 0 ? o->vtable->lane_tokens : SLICE_TOKENS;
  if (n > o->max_num_batched_tokens) n = o->max_num_batched_tokens;
  slice->id = -1;
  atomic_init(&engine->inbox_class, SITS_CLASS_COUNT);
  if (!o->vtable->lane_open || o->policy != ALPS_BUDGET) return SITS_OK;
  enum sits_status status = o->vtable->lane_open(o->program, o->kv, n, &slice->lane, err);
  if (status != SITS_OK && status != SITS_DEVICE) { /* prompts are read all the same, in chunks beside the decodes */
    if (status != SITS_UNSUPPORTED) log_warn("engine", "no prompt is read in slices: %s", err->text);
    *err = (struct sits_error){0};
    return SITS_OK;
  }
  slice->tokens = mem_calloc((size_t)n, sizeof(int32_t));
  slice->positions = mem_calloc((size_t)n, sizeof(int32_t));
  slice->table = mem_calloc((size_t)engine->stride, sizeof(int32_t));
  if (status == SITS_OK && (!slice->tokens || !slice->positions || !slice->table)) status = SITS_NOMEM;
  slice->most_tokens = n;
  return status;
}

void engine_slice_close(struct sits_engine *engine)
{
  struct engine_slice *slice = &engine->slice;
  if (slice->lane) engine->options.vtable->program_destroy(slice->lane);
  mem_free(slice->tokens);
  mem_free(slice->positions);
  mem_free(slice->table);
}

void engine_slice_drop(struct sits_engine *engine, int32_t id)
{
  if (engine->slice.id != id || id < 0) return;
  struct engine_choice *choice = engine->by_id[id];
  engine->slice.id = -1;
  engine->options.vtable->lane_drop(engine->slice.lane);
  if (choice->slot >= 0) kv_commit(engine->pages, choice->slot, choice->tokens + choice->n_computed, 0); /* gives back what was reserved */
}

/* While a piece computes on a device that the engine overlaps with: the last step's tokens go out. */
static void progress(void *user)
{
  struct sits_engine *engine = user;
  engine_beat(engine);
  if (engine->options.overlap) engine_deliver(engine);
}

/* Take the pages of the planned chunk and start it. False: there is no room, and it is planned anew; or the device has failed. */
static bool begin(struct sits_engine *engine)
{
  const struct backend_vtable *vtable = engine->options.vtable;
  const struct alps_item *item = &engine->plan.slice;
  struct engine_slice *slice = &engine->slice;
  struct engine_choice *choice = engine->by_id[item->id];
  const int32_t from = choice->n_computed, end = from + item->n_tokens, *pages;
  int32_t n_moves = 0;
  struct kv_move move;
  if (slice->id >= 0) { /* that of a lower class */
    struct engine_choice *given_up = engine->by_id[slice->id];
    engine_slice_drop(engine, given_up->id);
    engine_tell_entry(engine, given_up);
  }
  slice->is_ahead = false;
  enum sits_status status = kv_reserve(engine->pages, choice->slot, end, &move, &n_moves);
  if (status == SITS_OK && n_moves > 0) {
    const struct kv_copy copy = {.from_page = move.from_page, .to_page = move.to_page};
    status = vtable->kv_copy_pages(engine->options.kv, &copy, 1);
  }
  int32_t n_pages = kv_pages(engine->pages, choice->slot, &pages);
  memcpy(slice->table, pages, (size_t)n_pages * sizeof *pages);
  memcpy(slice->tokens, choice->tokens + from, (size_t)item->n_tokens * sizeof *slice->tokens);
  for (int32_t i = 0; i < item->n_tokens; i++) slice->positions[i] = from + i;
  slice->seq_start[1] = item->n_tokens;
  slice->kv_len = end;
  slice->row_token = item->n_tokens - 1;
  const struct engine_row row = {.position = end - 1, .is_draw = true};
  slice->is_device = vtable->can_sample && engine_may_device_draw(choice, &row, &slice->sample);
  slice->batch = (struct backend_batch){
      .n_tokens = item->n_tokens, .n_seqs = 1, .n_rows = item->is_last && choice->request->params.sampling.max_tokens > 0,
      .tokens = slice->tokens, .positions = slice->positions, .seq_start = slice->seq_start, .kv_len = &slice->kv_len,
      .block_table = slice->table, .table_stride = engine->stride, .row_token = &slice->row_token,
      .sample = slice->is_device ? &slice->sample : NULL, .progress = progress, .progress_user = engine};
  if (status == SITS_OK) status = vtable->lane_begin(slice->lane, engine->options.kv, &slice->batch);
  slice->id = item->id;
  if (status != SITS_OK) {
    log_error("engine", "a chunk in slices cannot begin request=%s tokens=%d", choice->request->params.id, item->n_tokens);
    engine_slice_drop(engine, item->id);
    alps_drop_slice(engine->alps);
    if (status != SITS_AGAIN) engine_fail(engine, status); /* else it would be planned, and fail, for ever */
    return false;
  }
  alps_update(engine->alps, item->id, engine_known(choice), from, n_pages, 0);
  return true;
}

/* Time for one more piece of work? Where the backend does not say how long, pieces take about as long as the longest of the last few; one
 * that took far longer was interrupted, and would leave many slices without a second piece if it were believed. */
static bool go_on(void *user, int64_t end_us)
{
  struct sits_engine *engine = user;
  struct engine_slice *slice = &engine->slice;
  const int64_t now_us = clock_monotonic_us(), gap_us = now_us - slice->asked_us;
  const bool is_first = slice->n_asked++ == 0;
  slice->asked_us = now_us;
  if (end_us > 0) {
    slice->gap_us = 0;
    if (is_first && engine->plan.sliced_us == 0) return true; /* never nothing */
  } else {
    if (is_first) return true;
    if (gap_us > slice->gap_us) slice->gap_us = slice->gap_us > 0 && gap_us > 2 * slice->gap_us ? 2 * slice->gap_us : gap_us;
    else slice->gap_us -= (slice->gap_us - gap_us + GAP_FADE - 1) / GAP_FADE;
    end_us = now_us + slice->gap_us;
  }
  return end_us <= slice->until_us && atomic_load(&engine->inbox_class) >= engine->plan.slice_class;
}

/* The chunk is computed: as if it had been an item of a batch. */
static void end(struct sits_engine *engine)
{
  struct engine_slice *slice = &engine->slice;
  struct backend_result result = {0};
  struct alps_item item = engine->plan.slice;
  struct alps_plan plan = engine->plan;
  const struct engine_row row = engine->rows[0]; /* of the batch whose tokens wait for a slice behind it */
  const int32_t n_rows = engine->batch.n_rows;
  const int64_t last_end_us = engine->last_step_end_us, compute_us = engine->compute_us;
  const enum sits_status status = engine->options.vtable->wait(slice->lane, &result);
  slice->id = -1;
  if (status != SITS_OK) {
    engine_fail(engine, status);
    return;
  }
  engine->rows[0] = (struct engine_row){.position = slice->kv_len - 1, .is_draw = true, .is_device = slice->is_device};
  engine->plan.items = &item;
  engine->plan.n_items = 1;
  engine->batch.n_rows = slice->batch.n_rows;
  engine->compute_us = result.compute_us;
  engine->last_step_end_us = clock_monotonic_us(); /* the time of its token */
  engine->stats.n_steps++;
  engine_outputs(engine, &result);
  engine->last_step_end_us = last_end_us;
  engine->compute_us = compute_us;
  engine->batch.n_rows = n_rows;
  engine->rows[0] = row;
  engine->plan = plan;
  engine->plan.slice_ended = true;
}

enum sits_status engine_slice_ahead(struct sits_engine *engine)
{
  const struct backend_vtable *vtable = engine->options.vtable;
  struct engine_slice *slice = &engine->slice;
  slice->is_ahead = false;
  if (!vtable->lane_ahead || slice->id < 0 || engine->plan.slice.id != slice->id || engine->plan.slice_is_behind) return SITS_OK;
  return vtable->lane_ahead(slice->lane, &slice->is_ahead);
}

void engine_slice_run(struct sits_engine *engine, int64_t from_us)
{
  struct engine_slice *slice = &engine->slice;
  bool is_done = false;
  if (engine->plan.slice.id < 0) return;
  int64_t started_us = clock_monotonic_us(), ended_us;
  if (engine->plan.slice_begins && !begin(engine)) return;
  if (slice->is_ahead) started_us = from_us;
  else if (slice->end_us > started_us) started_us = slice->end_us;
  slice->until_us = from_us + engine->plan.slice_us;
  if (slice->until_us < started_us + engine->plan.slice_least_us) slice->until_us = started_us + engine->plan.slice_least_us;
  slice->asked_us = started_us;
  slice->n_asked = slice->is_ahead; /* that piece has begun */
  slice->is_ahead = false;
  const enum sits_status status = engine->options.vtable->lane_run(slice->lane, go_on, engine, &is_done, &slice->end_us);
  if (status != SITS_OK) engine_fail(engine, status);
  else if (is_done) end(engine);
  ended_us = clock_monotonic_us();
  engine->plan.sliced_us += (ended_us > slice->end_us ? ended_us : slice->end_us) - started_us;
}

void engine_slice_run_behind(struct sits_engine *engine, int64_t from_us)
{
  bool is_urgent;
  do {
    engine_slice_run(engine, from_us);
    is_urgent = atomic_load(&engine->inbox_class) < engine->plan.slice_class;
  } while (atomic_load(&engine->state) != ENGINE_FAILED && !is_urgent && engine->plan.slice_ended &&
           engine_plan_more(engine, engine_slice_has_time(engine)));
}

bool engine_slice_has_time(const struct sits_engine *engine)
{
  const struct engine_slice *slice = &engine->slice;
  return clock_monotonic_us() + slice->gap_us <= slice->until_us;
}
