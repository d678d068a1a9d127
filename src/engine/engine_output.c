/* From logit rows to tokens and events: prompt logprobs, draws, forks after a shared prompt, ends.
 *
 * A choice's way:  submitted -> (born: leads the prefill | unborn: waits for it) -> forked -> decoding -> finished
 *   leader          add_request (engine_step.c) makes choice 0 born; pass_lead hands the prefill on when the leader ends before it
 *   fork            fork_choices, once the last prompt token is computed: one row of logits, a draw per choice
 *   end             engine_finish, exactly once per choice
 */
#include <assert.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine_internal.h"

static void note_news(struct sits_engine *engine, struct sits_request *request)
{
  if (request->has_news || atomic_load(&request->is_released)) return;
  request->has_news = true;
  engine->news[engine->n_news++] = request;
}

/* The time of what happens now in the turn: the batch's end, or the turn's start for what ends before it (cancels, deadlines). */
static int64_t event_us(const struct sits_engine *engine)
{
  return engine->last_step_end_us > engine->step_started_us ? engine->last_step_end_us : engine->step_started_us;
}

static void push(struct sits_engine *engine, struct sits_request *request, struct sits_event *event)
{
  event->emitted_us = event_us(engine);
  engine_ring_push(&request->ring, event);
  note_news(engine, request);
}

/* The leader ends before the prompt is read: the next living choice takes its place, pages and entry. */
static void pass_lead(struct sits_engine *engine, struct engine_choice *from)
{
  struct sits_request *request = from->request;
  for (int32_t i = 0; i < request->n_choices; i++) {
    struct engine_choice *to = &request->choices[i];
    if (to == from || to->is_done) continue;
    int32_t id = to->id;
    to->id = from->id;
    from->id = id;
    engine->by_id[to->id] = to;
    engine->by_id[from->id] = from;
    to->slot = from->slot;
    to->n_computed = from->n_computed;
    to->swap = from->swap;
    to->is_born = true;
    from->slot = -1;
    from->swap = (struct engine_swap){.at.head = -1};
    from->is_born = false;
    return;
  }
}

static void finish_request(struct sits_engine *engine, struct sits_request *request)
{
  if (!request->was_scheduled) engine_unqueue(engine, request);
  engine_handover_abandon(request);
  engine_deadline_remove(engine, request);
  int64_t n_out = 0;
  for (int32_t i = 0; i < request->n_choices; i++) n_out += request->choices[i].n_out;
  atomic_store(&request->times[TIME_OUTPUT_TOKENS], n_out);
  atomic_store(&request->times[TIME_DONE], event_us(engine));
  engine_stats_request(engine, request);
  request->next = engine->done;
  engine->done = request;
}

void engine_finish(struct sits_engine *engine, struct engine_choice *choice, enum sits_finish finish, enum sits_status status,
                   int32_t token)
{
  struct sits_request *request = choice->request;
  if (choice->is_done) return;
  choice->is_done = true;
  if (!request->is_forked && choice->is_born && request->n_unfinished > 1) pass_lead(engine, choice);
  engine_vacate(engine, choice);
  engine->stats.finished[finish]++;
  atomic_fetch_sub(&engine->n_alive, 1);
  if (--request->n_unfinished == 0) {
    finish_request(engine, request);
    atomic_store(&request->is_done, true);
  }
  struct sits_event event = {.kind = SITS_EVENT_FINISH, .choice = choice->index, .token = token, .finish = finish, .status = status};
  push(engine, request, &event);
}

void engine_finish_all(struct sits_engine *engine, struct sits_request *request, enum sits_finish finish, enum sits_status status)
{
  /* From the last, so that a leader ends after those that wait for it. */
  for (int32_t i = request->n_choices - 1; i >= 0; i--) engine_finish(engine, &request->choices[i], finish, status, -1);
}

static bool is_end(const struct sits_engine *engine, const struct engine_choice *choice, int32_t token)
{
  const struct sits_sampling *s = &choice->request->params.sampling;
  for (int32_t i = 0; !s->ignore_eos && i < engine->options.n_end_ids; i++) {
    if (engine->end_ids[i] == token) return true;
  }
  for (int32_t i = 0; i < s->n_stop_ids; i++) {
    if (s->stop_ids[i] == token) return true;
  }
  return false;
}

static void put_logprobs(struct sits_event *event, const struct engine_logprobs *from)
{
  event->logprob = from->logprob;
  event->n_top = from->n_top;
  memcpy(event->top_token, from->top_token, (size_t)from->n_top * sizeof(int32_t));
  memcpy(event->top_logprob, from->top_logprob, (size_t)from->n_top * sizeof(float));
}

int32_t engine_draw_token(const struct sits_engine *engine, struct engine_sampler *sampler, const struct engine_choice *choice,
                          int32_t n_tokens, const float *logits)
{
  const struct sits_request_params *p = &choice->request->params;
  const struct sits_sampling *s = &p->sampling;
  struct engine_draw d = {.sampling = s, .tokens = choice->tokens, .n_tokens = n_tokens, .n_prompt = p->n_prompt, .choice = choice->index,
                          .end_ids = engine->end_ids, .n_end_ids = s->ignore_eos ? 0 : engine->options.n_end_ids};
  return engine_sample(sampler, logits, &d);
}

/* A token for a choice that holds n_tokens, and its logprobs if they are wanted. Reads shared state only: the pool's threads call it. */
static void make_draw(const struct sits_engine *engine, struct engine_sampler *sampler, const struct engine_choice *choice,
                      int32_t n_tokens, const float *logits, int32_t *token, struct engine_logprobs *logprobs)
{
  *token = engine_draw_token(engine, sampler, choice, n_tokens, logits);
  *logprobs = (struct engine_logprobs){0};
  engine_logprobs(sampler, logits, *token, choice->request->params.sampling.n_top_logprobs, logprobs);
}

/* Whether a row waits for the draw before it, because it may not count: of a draft, without helpers. */
static bool may_wait(const struct sits_engine *engine, const struct engine_row *row)
{
  if (engine_pool_has_helpers(engine->pool) || row == engine->rows || row->is_prompt) return false;
  return row[-1].item == row->item && !row[-1].is_prompt;
}

/* engine_row_fn: everything about a row that does not depend on other rows. Behind a draft the sequence's tokens are the draft's, which
 * is what they will be if the row counts at all. */
static void make_row(void *user, struct engine_sampler *sampler, int32_t r)
{
  struct sits_engine *engine = user;
  struct engine_row *row = &engine->rows[r];
  const struct engine_choice *choice = engine->by_id[engine->plan.items[row->item].id];
  const struct sits_request_params *p = &choice->request->params;
  if (row->is_device || may_wait(engine, row)) return;
  const float *logits = engine->logits + (int64_t)r * engine->options.n_vocab;
  row->logprobs = (struct engine_logprobs){0};
  if (row->is_prompt) engine_logprobs(sampler, logits, p->prompt[row->position + 1], p->sampling.n_prompt_logprobs, &row->logprobs);
  else make_draw(engine, sampler, choice, row->position + 1, logits, &row->token, &row->logprobs);
  row->is_ready = true;
}

/* What the device drew: plain draws of their own sequences. */
static void take_drawn(struct sits_engine *engine, const int32_t *tokens)
{
  for (int32_t r = 0; r < engine->batch.n_rows; r++) {
    struct engine_row *row = &engine->rows[r];
    if (!row->is_device) continue;
    row->token = tokens[r];
    row->logprobs = (struct engine_logprobs){0};
    row->is_ready = true;
  }
}

/* Draw the choice's next token. Returns how it ended, SITS_FINISH_NONE when it goes on; the token is left in *token. The choice is not
 * finished here, because a leader must first serve those that fork from it. */
static enum sits_finish draw(struct sits_engine *engine, struct engine_choice *choice, const struct engine_row *row, int32_t *token)
{
  struct sits_request *request = choice->request;
  const struct sits_sampling *s = &request->params.sampling;
  struct engine_logprobs logprobs;
  if (row->is_ready && engine->by_id[engine->plan.items[row->item].id] == choice) {
    *token = row->token;
    logprobs = row->logprobs;
  } else { /* a row that waited, or a fork, which draws from its leader's row */
    const float *logits = engine->logits + (row - engine->rows) * (int64_t)engine->options.n_vocab;
    make_draw(engine, &engine->sampler, choice, engine_known(choice), logits, token, &logprobs);
  }
  int64_t now_us = engine->last_step_end_us;
  if (atomic_load(&request->times[TIME_FIRST_TOKEN]) == 0) {
    atomic_store(&request->times[TIME_COMPUTED_FIRST], atomic_load(&request->times[TIME_COMPUTED]));
    atomic_store(&request->times[TIME_FIRST_TOKEN], now_us);
    engine_observe(&engine->stats.ttft_seconds, (double)(now_us - atomic_load(&request->times[TIME_SUBMITTED])) * 1e-6);
  }
  if (choice->last_token_us > 0) engine_observe(&engine->stats.itl_seconds, (double)(now_us - choice->last_token_us) * 1e-6);
  choice->last_token_us = now_us;
  if (is_end(engine, choice, *token)) return SITS_FINISH_STOP;
  struct sits_event event = {.kind = SITS_EVENT_TOKEN, .choice = choice->index, .token = *token};
  put_logprobs(&event, &logprobs);
  choice->tokens[engine_known(choice)] = *token;
  choice->n_out++;
  engine->stats.generation_tokens++;
  push(engine, request, &event);
  return choice->n_out >= s->max_tokens ? SITS_FINISH_LENGTH : SITS_FINISH_NONE;
}

static void prompt_row(struct sits_engine *engine, struct sits_request *request, const struct engine_row *row)
{
  struct sits_event event = {.kind = SITS_EVENT_PROMPT_LOGPROB, .token = request->params.prompt[row->position + 1]};
  put_logprobs(&event, &row->logprobs);
  push(engine, request, &event);
  request->next_prompt_row = row->position + 2;
}

void engine_tell_entry(struct sits_engine *engine, const struct engine_choice *choice)
{
  const int32_t *pages;
  int32_t n_pages = kv_pages(engine->pages, choice->slot, &pages);
  alps_update(engine->alps, choice->id, engine_known(choice), choice->n_computed, n_pages, kv_extra(engine->pages, choice->slot));
}

static void commit(struct sits_engine *engine, struct engine_choice *choice, int32_t n_tokens)
{
  int32_t n_prompt = choice->request->params.n_prompt;
  int32_t in_prompt = n_prompt - choice->n_computed;
  if (in_prompt > 0) engine->stats.prompt_tokens_computed += (uint64_t)(in_prompt < n_tokens ? in_prompt : n_tokens);
  kv_commit(engine->pages, choice->slot, choice->tokens + choice->n_computed, n_tokens);
  choice->n_computed += n_tokens;
  engine_tell_filled(engine, choice);
}

/* The prompt is read: every other living choice draws from the same row and goes its own way. */
static void fork_choices(struct sits_engine *engine, struct engine_choice *lead, const struct engine_row *row)
{
  struct sits_request *request = lead->request;
  for (int32_t i = 0; i < request->n_choices; i++) {
    struct engine_choice *choice = &request->choices[i];
    int32_t token = -1;
    if (choice == lead || choice->is_done) continue;
    enum sits_finish finish = draw(engine, choice, row, &token);
    if (finish != SITS_FINISH_NONE) {
      engine_finish(engine, choice, finish, SITS_OK, finish == SITS_FINISH_STOP ? token : -1);
      continue;
    }
    enum sits_status status = kv_fork(engine->pages, lead->slot, &choice->slot);
    if (status != SITS_OK) { /* cannot be: admission kept a slot for it */
      engine_finish(engine, choice, SITS_FINISH_ERROR, SITS_INTERNAL, -1);
      continue;
    }
    choice->n_computed = lead->n_computed;
    choice->is_born = true;
    alps_fork(engine->alps, lead->id, choice->id);
  }
  request->is_forked = true;
  for (int32_t i = 0; i < request->n_choices; i++) {
    struct engine_choice *choice = &request->choices[i];
    if (choice != lead && !choice->is_done) engine_tell_entry(engine, choice);
  }
}

/* Draws of one item, in order. With a draft behind the known tokens, row j is valid as long as the draws before it gave the draft's
 * tokens: a draw depends on logits, seed and position only, so the answer is the same with and without speculation. */
static void draw_rows(struct sits_engine *engine, struct engine_choice *choice, const struct alps_item *item, int32_t n_rows,
                      const struct engine_row *rows)
{
  struct sits_request *request = choice->request;
  int32_t first_known = engine_known(choice);
  int32_t n_draft = choice->n_computed + item->n_tokens - first_known, n_accepted = 0, token = -1;
  if (!request->is_forked) {
    commit(engine, choice, item->n_tokens); /* no draft before the first draw */
    fork_choices(engine, choice, &rows[0]);
  }
  bool is_committed = choice->n_computed == first_known;
  enum sits_finish finish = SITS_FINISH_NONE;
  for (int32_t j = 0; j < n_rows; j++) {
    int32_t drafted = j < n_draft ? choice->tokens[first_known + j] : -1;
    finish = draw(engine, choice, &rows[j], &token);
    if (finish != SITS_FINISH_NONE || token != drafted) break;
    n_accepted++;
  }
  if (!is_committed) commit(engine, choice, item->n_tokens - n_draft + n_accepted);
  if (n_draft > 0) engine_draft_result(engine, choice, n_draft, n_accepted);
  engine_drafter_verified(choice, first_known + n_accepted);
  engine->stats.spec_drafts += n_draft > 0;
  engine->stats.spec_draft_tokens += (uint64_t)n_draft;
  engine->stats.spec_accepted_tokens += (uint64_t)n_accepted;
  for (int32_t i = 0; i < n_accepted; i++) engine->stats.spec_accepted_at[i < ENGINE_SPEC_POSITIONS ? i : ENGINE_SPEC_POSITIONS - 1]++;
  if (finish != SITS_FINISH_NONE) engine_finish(engine, choice, finish, SITS_OK, finish == SITS_FINISH_STOP ? token : -1);
  else engine_tell_entry(engine, choice);
}

static void count_compute(struct sits_engine *engine, struct sits_request *request)
{
  if (request->counted_step == engine->stats.n_steps) return;
  request->counted_step = engine->stats.n_steps;
  atomic_fetch_add(&request->times[TIME_COMPUTED], engine->compute_us);
}

void engine_outputs(struct sits_engine *engine, const struct backend_result *result)
{
  const struct backend_batch *batch = &engine->batch;
  int32_t r = 0;
  if (result->tokens) take_drawn(engine, result->tokens);
  engine->logits = result->logits;
  if (result->logits) engine_pool_run(engine->pool, &engine->sampler, batch->n_rows, make_row, engine);
  for (int32_t i = 0; i < engine->plan.n_items; i++) {
    const struct alps_item *item = &engine->plan.items[i];
    struct engine_choice *choice = engine->by_id[item->id];
    struct sits_request *request = choice->request;
    if (item->n_tokens == 0) continue;
    count_compute(engine, request);
    for (; r < batch->n_rows && engine->rows[r].item == i && engine->rows[r].is_prompt; r++) {
      prompt_row(engine, request, &engine->rows[r]);
    }
    int32_t first = r;
    while (r < batch->n_rows && engine->rows[r].item == i) r++;
    if (r > first) {
      draw_rows(engine, choice, item, r - first, &engine->rows[first]);
    } else {
      commit(engine, choice, item->n_tokens);
      if (item->is_last) engine_finish_all(engine, request, SITS_FINISH_LENGTH, SITS_OK); /* max_tokens == 0 */
      else engine_tell_entry(engine, choice);
    }
  }
}
