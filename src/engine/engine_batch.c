/* From the planner's counts to a batch: who is held back, admission (slots and cached pages), pre-emption (recompute or swap), page
 * reservation, and the arrays that the backend reads. */
#include <assert.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/engine_internal.h"
#include "engine/page_budget.h"

/* Rule 3 of engine.h: a choice whose ring might overflow in this step stays out of it. One place per choice is kept for its end. */
static bool is_short_of_room(const struct sits_engine *engine, const struct sits_request *request)
{
  int32_t need = request->n_unfinished * (2 + engine->options.spec_max_tokens);
  int32_t n_rows = request->params.n_prompt - request->next_prompt_row;
  need += n_rows < engine->options.max_rows ? n_rows : engine->options.max_rows;
  return engine_ring_room(&request->ring) < need;
}

void engine_hold_full(struct sits_engine *engine)
{
  const int32_t *ids;
  int32_t n = alps_running(engine->alps, &ids);
  engine->n_held = 0;
  for (int32_t i = 0; i < n; i++) {
    bool is_held = is_short_of_room(engine, engine->by_id[ids[i]]->request);
    alps_hold(engine->alps, ids[i], is_held);
    engine->n_held += is_held;
  }
  /* Those that were pre-empted while they were held wait outside the queues for their consumers. */
  for (int32_t i = 0; i < engine->n_parked;) {
    if (is_short_of_room(engine, engine->by_id[engine->parked[i]]->request)) {
      engine->n_held++;
      i++;
    } else {
      alps_hold(engine->alps, engine->parked[i], false);
      engine->parked[i] = engine->parked[--engine->n_parked];
    }
  }
}

static void forget_parked(struct sits_engine *engine, int32_t id)
{
  for (int32_t i = 0; i < engine->n_parked; i++) {
    if (engine->parked[i] == id) engine->parked[i--] = engine->parked[--engine->n_parked];
  }
}

static void note_scheduled(struct sits_engine *engine, struct sits_request *request, int32_t n_cached)
{
  if (request->was_scheduled) return;
  const struct engine_read_elsewhere *before = &request->read_elsewhere;
  int64_t now_us = before->scheduled_us ? before->scheduled_us : engine->step_started_us;
  if (before->scheduled_us && n_cached > before->n_cached) n_cached = before->n_cached;
  request->was_scheduled = true;
  engine_unqueue(engine, request);
  atomic_store(&request->times[TIME_SCHEDULED], now_us);
  atomic_store(&request->times[TIME_CACHED_TOKENS], n_cached);
  engine->stats.prompt_tokens += (uint64_t)request->params.n_prompt;
  engine->stats.prompt_tokens_cached += (uint64_t)n_cached;
  engine_observe(&engine->stats.queue_seconds, (double)(now_us - atomic_load(&request->times[TIME_SUBMITTED])) * 1e-6);
}

void engine_tell_filled(struct sits_engine *engine, const struct engine_choice *choice)
{
  const struct engine_pages_watch *watch = &engine->options.pages;
  if (!watch->filled) return;
  const int32_t *pages;
  kv_pages(engine->pages, choice->slot, &pages);
  watch->filled(watch->user, choice->request, pages, choice->n_computed / KV_TOKENS);
}

/* Some pages are no longer shared with the request's other choices, which need fewer copies from now on. */
static void tell_siblings(struct sits_engine *engine, const struct sits_request *request)
{
  for (int32_t i = 0; request->is_forked && i < request->n_choices; i++) {
    const struct engine_choice *sibling = &request->choices[i];
    if (sibling->slot >= 0 && sibling->swap.way != SWAP_OUT)
      alps_update_copies(engine->alps, sibling->id, kv_extra(engine->pages, sibling->slot));
  }
}

void engine_give_back(struct sits_engine *engine, struct engine_choice *choice, int32_t n_left)
{
  if (engine->options.pages.closing) engine->options.pages.closing(engine->options.pages.user);
  kv_give_back(engine->pages, choice->slot, n_left);
}

void engine_close_slot(struct sits_engine *engine, struct engine_choice *choice)
{
  if (engine->options.pages.closing) engine->options.pages.closing(engine->options.pages.user);
  kv_close(engine->pages, choice->slot);
  choice->slot = -1;
  tell_siblings(engine, choice->request);
}

void engine_wait_again(struct sits_engine *engine, struct engine_choice *choice)
{
  alps_requeue(engine->alps, choice->id, engine_known(choice));
  if (is_short_of_room(engine, choice->request)) {
    alps_hold(engine->alps, choice->id, true);
    engine->parked[engine->n_parked++] = choice->id;
  } else {
    alps_hold(engine->alps, choice->id, false);
  }
}

/* alps_admit_fn: give the entry a slot and what the cache or the host still has of it. */
static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  struct sits_engine *engine = user;
  struct engine_choice *choice = engine->by_id[id];
  struct sits_request *request = choice->request;
  struct kv_owner owner = {.tenant = request->params.tenant, .salt = request->params.cache_salt};
  enum sits_status status = kv_open(engine->pages, owner, &choice->slot);
  assert(status == SITS_OK);
  (void)status;
  const bool is_swapped = choice->swap.at.head >= 0 && engine_swap_in(engine, choice);
  const bool is_coming = is_swapped && !engine_swap_fill(engine, choice);
  if (!is_swapped) kv_swap_free(engine->pages, &choice->swap.at);
  /* A prompt whose every logprob is wanted must be computed; what was emitted before a pre-emption need not be. */
  bool may_attach = request->params.sampling.n_prompt_logprobs < 0 || request->next_prompt_row >= request->params.n_prompt;
  bool is_counted = request->read_elsewhere.scheduled_us && !request->was_scheduled; /* its look-up, by the placement */
  if (!is_swapped && may_attach)
    (is_counted ? kv_attach_uncounted : kv_attach)(engine->pages, choice->slot, choice->tokens, engine_known(choice));
  choice->n_computed = kv_tokens(engine->pages, choice->slot);
  note_scheduled(engine, request, choice->n_computed);
  engine_tell_filled(engine, choice);
  const int32_t *pages;
  *out = (struct alps_admitted){.n_computed = is_coming ? choice->swap.at.n_tokens : choice->n_computed,
                                .n_pages = kv_pages(engine->pages, choice->slot, &pages),
                                .n_available = kv_available(engine->pages), .is_coming = is_coming};
}

int32_t engine_freed(void *user, const int32_t *ids, int32_t n)
{
  struct sits_engine *engine = user;
  int32_t n_pages = 0;
  for (int32_t i = 0; i < n; i++) n_pages += kv_suppose_closed(engine->pages, engine->by_id[ids[i]]->slot);
  for (int32_t i = 0; i < n; i++) kv_suppose_open(engine->pages, engine->by_id[ids[i]]->slot);
  return n_pages;
}

/* Take a victim's pages: to host memory when copying out and back is cheaper than computing them again and there is room. One that was
 * still coming back has lost nothing. */
static void preempt(struct sits_engine *engine, int32_t id)
{
  struct engine_choice *choice = engine->by_id[id];
  struct alps_cost_work work = {0};
  engine_slice_drop(engine, id);
  alps_cost_add_chunk(&work, choice->n_computed, 0);
  double recompute_us = alps_cost_predict(alps_cost_model(engine->alps), &work);
  const int32_t *pages;
  int32_t n_pages = kv_pages(engine->pages, choice->slot, &pages);
  double swap_us = 2 * engine->page_copy_us * n_pages;
  const bool was_coming = choice->swap.way == SWAP_IN;
  engine_swap_stop(engine, choice);
  const bool leaves = !was_coming && swap_us < recompute_us && choice->n_computed > 0 && engine_swap_out(engine, choice);
  log_info("engine", "preempted request=%s choice=%d how=%s tokens=%d pages=%d recompute_us=%.0f swap_us=%.0f", choice->request->params.id,
           choice->index, leaves || was_coming ? "swap" : "recompute", choice->n_computed, n_pages, recompute_us, swap_us);
  engine_drafter_drop(engine, choice);
  choice->n_computed = 0;
  if (leaves) {
    tell_siblings(engine, choice->request);
    alps_leave(engine->alps, id);
  } else {
    engine_close_slot(engine, choice);
    engine_wait_again(engine, choice);
  }
  atomic_fetch_add(&choice->request->times[TIME_PREEMPTIONS], 1);
  engine->stats.n_preemptions++;
  engine->stats.n_preemptions_swapped += was_coming;
}

#ifdef SITS_DEBUG_CHECKS
/* What the planner reserves for copies is what they will take; more would pre-empt for nothing. */
static void check_copies(const struct sits_engine *engine)
{
  const int32_t *ids, n = alps_running(engine->alps, &ids);
  for (int32_t i = 0; i < n; i++) {
    const int32_t slot = engine->by_id[ids[i]]->slot;
    assert(slot < 0 || alps_copies(engine->alps, ids[i]) == kv_extra(engine->pages, slot));
  }
}
#endif

void engine_plan(struct sits_engine *engine)
{
  enum sits_status status;
#ifdef SITS_DEBUG_CHECKS
  check_copies(engine);
#endif
  while ((status = alps_plan(engine->alps, engine->step_started_us, kv_available(engine->pages), admit, engine, &engine->plan)) ==
         SITS_AGAIN) {
    for (int32_t i = 0; i < engine->plan.n_victims; i++) preempt(engine, engine->plan.victims[i]);
    if (engine->plan.n_victims == 0) engine_swap_hurry(engine);
  }
}

bool engine_plan_more(struct sits_engine *engine, bool has_time)
{
  return alps_plan_more(engine->alps, kv_available(engine->pages), has_time, admit, engine, &engine->plan);
}

void engine_vacate(struct sits_engine *engine, struct engine_choice *choice)
{
  engine_slice_drop(engine, choice->id);
  engine_swap_stop(engine, choice);
  if (choice->slot >= 0) engine_close_slot(engine, choice);
  engine_drafter_drop(engine, choice);
  kv_swap_free(engine->pages, &choice->swap.at);
  if (choice->id < 0) return;
  if (choice->is_born) {
    alps_remove(engine->alps, choice->id);
    forget_parked(engine, choice->id);
  } else if (!choice->request->handover) {
    for (int32_t i = 0; i < choice->request->n_choices; i++) {
      struct engine_choice *lead = &choice->request->choices[i];
      if (lead->is_born && lead->id >= 0) {
        alps_narrow(engine->alps, lead->id);
        break;
      }
    }
  }
  engine->by_id[choice->id] = NULL;
  engine->free_ids[engine->n_free_ids++] = choice->id;
  choice->id = -1;
}

/* Some steps of a large model on a small machine are longer than any limit on a silent loop: the backend says that it lives. */
void engine_beat(void *user)
{
  atomic_store(&((struct sits_engine *)user)->heartbeat_us, clock_monotonic_us());
}

static void add_rows(struct sits_engine *engine, int32_t item, const struct engine_choice *choice, int32_t first_token)
{
  const struct sits_request *request = choice->request;
  struct backend_batch *batch = &engine->batch;
  const struct alps_item *it = &engine->plan.items[item];
  int32_t n_prompt = request->params.n_prompt, known = engine_known(choice);
  bool wants_draw = it->is_last && request->params.sampling.max_tokens > 0;
  for (int32_t i = 0; i < it->n_tokens; i++) {
    int32_t position = choice->n_computed + i;
    bool is_prompt = position + 1 >= request->next_prompt_row && position + 1 < n_prompt;
    bool is_draw = wants_draw && position >= known - 1;
    if (!is_prompt && !is_draw) continue;
    engine->row_token[batch->n_rows] = first_token + i;
    engine->rows[batch->n_rows++] = (struct engine_row){.item = item, .position = position, .is_prompt = is_prompt, .is_draw = is_draw};
  }
}

static void add_item(struct sits_engine *engine, int32_t item)
{
  struct alps_item *it = &engine->plan.items[item];
  struct engine_choice *choice = engine->by_id[it->id];
  struct backend_batch *batch = &engine->batch;
  int32_t s = batch->n_seqs, end = choice->n_computed + it->n_tokens;
  const bool leaves_shared = choice->request->is_forked && kv_extra(engine->pages, choice->slot) > 0;
  enum sits_status status = kv_reserve(engine->pages, choice->slot, end, &engine->moves[engine->n_moves], &engine->n_moves);
  if (status != SITS_OK) { /* the planner counted wrong; the sequence waits for the next step rather than take the process down */
#ifdef SITS_DEBUG_CHECKS
    assert(!"the planner counts the pages that its items take");
#endif
    log_error("engine", "no pages for a planned item request=%s tokens=%d", choice->request->params.id, it->n_tokens);
    it->n_tokens = 0;
    return;
  }
  if (leaves_shared) tell_siblings(engine, choice->request);
  int32_t first_token = batch->n_tokens;
  memcpy(engine->tokens + first_token, choice->tokens + choice->n_computed, (size_t)it->n_tokens * sizeof(int32_t));
  for (int32_t i = 0; i < it->n_tokens; i++) engine->positions[first_token + i] = choice->n_computed + i;
  engine->seq_start[s] = first_token;
  engine->kv_len[s] = end;
  batch->n_tokens += it->n_tokens;
  batch->n_seqs++;
  engine->seq_start[s + 1] = batch->n_tokens;
  add_rows(engine, item, choice, first_token);
  if (engine->blocks) {
    engine->blocks[s] = page_budget_blocks(engine->pages, choice->slot);
    engine->blocks_slot[s] = choice->slot;
  }
}

/* Block tables come last, once reserving can no longer change them; the stride is the longest of this batch. */
static void add_tables(struct sits_engine *engine)
{
  struct backend_batch *batch = &engine->batch;
  int32_t stride = 1, s = 0;
  for (int32_t i = 0; i < batch->n_seqs; i++) {
    int32_t n = (engine->kv_len[i] + KV_TOKENS - 1) / KV_TOKENS;
    if (n > stride) stride = n;
  }
  batch->table_stride = stride;
  for (int32_t i = 0; i < engine->plan.n_items; i++) {
    const struct alps_item *it = &engine->plan.items[i];
    if (it->n_tokens == 0) continue;
    const int32_t *pages;
    int32_t n = kv_pages(engine->pages, engine->by_id[it->id]->slot, &pages);
    if (n > stride) n = stride;
    memcpy(engine->tables + (int64_t)s * stride, pages, (size_t)n * sizeof(int32_t));
    for (int32_t k = n; k < stride; k++) engine->tables[(int64_t)s * stride + k] = 0;
    s++;
  }
}

bool engine_may_device_draw(const struct engine_choice *choice, const struct engine_row *row, struct backend_sample *out)
{
  const struct sits_request *request = choice->request;
  const struct engine_draw draw = {.sampling = &request->params.sampling, .n_tokens = row->position + 1,
                                   .n_prompt = request->params.n_prompt, .choice = choice->index};
  if (row->is_prompt || (!request->is_forked && request->n_choices > 1)) return false; /* log probabilities; several draws from one row */
  return engine_device_draw(&draw, out);
}

/* Let the device draw what it can: where that is every row, tokens come back instead of V logits a row. */
static void ask_device(struct sits_engine *engine)
{
  struct backend_batch *batch = &engine->batch;
  if (!engine->options.vtable->can_sample || batch->n_rows == 0) return;
  int32_t n_device = 0;
  for (int32_t r = 0; r < batch->n_rows; r++) {
    struct engine_row *row = &engine->rows[r];
    row->is_device = engine_may_device_draw(engine->by_id[engine->plan.items[row->item].id], row, &engine->samples[r]);
    if (!row->is_device) engine->samples[r] = (struct backend_sample){.top_p = 1}; /* greedy, and not looked at */
    n_device += row->is_device;
  }
  if (n_device == 0) return;
  batch->sample = engine->samples;
  batch->wants_logits = n_device < batch->n_rows;
}

void engine_build(struct sits_engine *engine)
{
  engine->batch = (struct backend_batch){.tokens = engine->tokens, .positions = engine->positions, .seq_start = engine->seq_start,
                                         .kv_len = engine->kv_len, .block_table = engine->tables, .row_token = engine->row_token,
                                         .blocks = engine->blocks, .progress = engine_beat, .progress_user = engine};
  engine->n_moves = 0;
  engine->seq_start[0] = 0;
  for (int32_t i = 0; i < engine->plan.n_items; i++) add_item(engine, i);
  add_tables(engine);
  ask_device(engine);
}

enum sits_status engine_submit_batch(struct sits_engine *engine)
{
  const struct engine_options *o = &engine->options;
  enum sits_status status = SITS_OK;
  /* Blocks first: the page that they leave may be one that a page is copied to. */
  for (int32_t s = 0; engine->blocks && s < engine->batch.n_seqs && status == SITS_OK; s++)
    status = page_budget_copy(engine->pages, engine->blocks_slot[s], o->vtable, o->kv);
  if (status == SITS_OK && engine->n_moves > 0) {
    for (int32_t i = 0; i < engine->n_moves; i++) {
      engine->copies[i] = (struct kv_copy){.from_page = engine->moves[i].from_page, .to_page = engine->moves[i].to_page};
    }
    status = o->vtable->kv_copy_pages(o->kv, engine->copies, engine->n_moves);
  }
  return status == SITS_OK ? o->vtable->submit(o->program, o->kv, &engine->batch) : status;
}

enum sits_status engine_wait_batch(struct sits_engine *engine, struct backend_result *result)
{
  return engine->options.vtable->wait(engine->options.program, result);
}
