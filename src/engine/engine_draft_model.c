/* See engine_draft_model.h. engine_drafter_run is the table of contents: take up, catch up, first guesses, further guesses, offers. */
#include "engine/engine_draft_model.h"

#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_internal.h"

enum { CATCH_UP = 256, PAUSE = 16 };

static const double COST_GUESS = 0.3;  /* of a draft step in target steps, until both are measured */
static const double COST_RATE = 0.1;

/* One sequence in this turn. */
struct entry {
  struct engine_choice *choice;
  int32_t n_wanted;              /* tokens to guess */
  int32_t n_guessed;
  int32_t n_fed;                 /* tokens of it in the batch at hand */
  bool is_over;                  /* no further guesses */
};

struct engine_drafter {
  struct engine_draft_model model;
  const struct backend_vtable *vtable;
  struct kv *pages;
  int32_t n_slots, stride, max_tokens;
  int32_t *tokens, *positions;   /* [max_tokens] */
  int32_t *seq_start, *kv_len, *tables, *row_token; /* [n_slots + 1] [n_slots] [n_slots][stride] [n_slots] */
  struct entry *entries, **rows; /* [n_slots] of this turn; those whose rows the batch gives */
  int32_t n_entries, n_rows;
  struct backend_batch batch;
  double step_us;                /* of a draft step of one token a sequence, moving average; 0 = not measured */
  bool is_broken;
};

enum sits_status engine_drafter_create(const struct engine_options *o, struct engine_drafter **out)
{
  struct engine_drafter *d = mem_calloc(1, sizeof *d);
  if (!d) return SITS_NOMEM;
  d->model = o->draft;
  d->vtable = o->vtable;
  d->n_slots = o->spec_max_running < o->max_num_seqs ? o->spec_max_running : o->max_num_seqs;
  d->stride = (o->draft.max_model_len + KV_TOKENS - 1) / KV_TOKENS;
  d->max_tokens = o->max_num_batched_tokens;
  const struct kv_options kv = {.n_pages = o->draft.geometry.n_pages, .n_slots = d->n_slots, .max_pages = d->stride};
  size_t t = (size_t)d->max_tokens, s = (size_t)d->n_slots;
  enum sits_status status = kv_create(&kv, &d->pages);
  d->tokens = mem_calloc(t, sizeof(int32_t));
  d->positions = mem_calloc(t, sizeof(int32_t));
  d->seq_start = mem_calloc(s + 1, sizeof(int32_t));
  d->kv_len = mem_calloc(s, sizeof(int32_t));
  d->tables = mem_calloc(s * (size_t)d->stride, sizeof(int32_t));
  d->row_token = mem_calloc(s, sizeof(int32_t));
  d->entries = mem_calloc(s, sizeof *d->entries);
  d->rows = mem_calloc(s, sizeof *d->rows);
  if (status != SITS_OK || !d->tokens || !d->positions || !d->seq_start || !d->kv_len || !d->tables || !d->row_token || !d->entries ||
      !d->rows) {
    engine_drafter_destroy(d);
    return SITS_NOMEM;
  }
  *out = d;
  return SITS_OK;
}

void engine_drafter_destroy(struct engine_drafter *d)
{
  if (!d) return;
  kv_destroy(d->pages);
  mem_free(d->tokens);
  mem_free(d->positions);
  mem_free(d->seq_start);
  mem_free(d->kv_len);
  mem_free(d->tables);
  mem_free(d->row_token);
  mem_free(d->entries);
  mem_free(d->rows);
  mem_free(d);
}

void engine_drafter_drop(struct sits_engine *engine, struct engine_choice *choice)
{
  if (choice->draft_slot < 0) return;
  kv_close(engine->drafter->pages, choice->draft_slot);
  choice->draft_slot = -1;
}

void engine_drafter_verified(struct engine_choice *choice, int32_t n_known)
{
  if (choice->draft_right > n_known) choice->draft_right = n_known;
}

int32_t engine_draft_length(float accept, double cost, int32_t most)
{
  double expected = 1, chance = 1, best_rate = 1;
  int32_t best = 0;
  for (int32_t k = 1; k <= most; k++) {
    chance *= (double)accept;
    expected += chance;
    if (expected / (1 + k * cost) <= best_rate) continue;
    best_rate = expected / (1 + k * cost);
    best = k;
  }
  return best;
}

/* What one more guess costs, in steps of the target as it decodes now: a draft step, and one more token to verify. */
static double relative_cost(const struct sits_engine *engine, struct engine_choice *const *choices, int32_t n)
{
  const struct engine_drafter *d = engine->drafter;
  struct alps_cost_work work = {0};
  for (int32_t i = 0; i < n; i++) alps_cost_add_decode(&work, engine_known(choices[i]));
  const double target_us = alps_cost_predict(alps_cost_model(engine->alps), &work);
  alps_cost_add_chunk(&work, 1, engine_known(choices[0]));
  const double verify_us = alps_cost_predict(alps_cost_model(engine->alps), &work) - target_us;
  return d->step_us > 0 && target_us > 0 ? (d->step_us + verify_us) / target_us : COST_GUESS;
}

static void close_batch(struct engine_drafter *d)
{
  d->batch = (struct backend_batch){.tokens = d->tokens, .positions = d->positions, .seq_start = d->seq_start, .kv_len = d->kv_len,
                                    .block_table = d->tables, .table_stride = d->stride, .row_token = d->row_token};
  d->n_rows = 0;
}

/* Add the choice's tokens [from, from + n) to the batch; with a row behind the last one. False: no pages for it. */
static bool add_tokens(struct engine_drafter *d, struct entry *e, int32_t from, int32_t n, bool with_row)
{
  struct backend_batch *b = &d->batch;
  struct kv_move move;
  int32_t n_moves = 0, s = b->n_seqs;
  const int32_t *pages, slot = e->choice->draft_slot;
  if (kv_reserve(d->pages, slot, from + n, &move, &n_moves) != SITS_OK) return false;
  const int32_t n_pages = kv_pages(d->pages, slot, &pages);
  memcpy(d->tables + (int64_t)s * d->stride, pages, (size_t)n_pages * sizeof *pages);
  for (int32_t i = n_pages; i < d->stride; i++) d->tables[(int64_t)s * d->stride + i] = 0;
  d->seq_start[s] = b->n_tokens;
  for (int32_t i = 0; i < n; i++, b->n_tokens++) {
    d->tokens[b->n_tokens] = e->choice->tokens[from + i];
    d->positions[b->n_tokens] = from + i;
  }
  d->seq_start[s + 1] = b->n_tokens;
  d->kv_len[s] = from + n;
  b->n_seqs++;
  if (with_row) {
    d->row_token[b->n_rows++] = b->n_tokens - 1;
    d->rows[d->n_rows++] = e;
  }
  return true;
}

/* Run the batch, and let every row guess its sequence's next token. */
static bool run_batch(struct sits_engine *engine)
{
  struct engine_drafter *d = engine->drafter;
  struct backend_result result = {0};
  enum sits_status status = d->vtable->submit(d->model.program, d->model.kv, &d->batch);
  if (status == SITS_OK) status = d->vtable->wait(d->model.program, &result);
  if (status != SITS_OK) {
    log_error("engine", "the draft model failed and is not asked any more status=%s", sits_status_info(status)->name);
    d->is_broken = true;
    return false;
  }
  for (int32_t r = 0; r < d->n_rows; r++) {
    struct entry *e = d->rows[r];
    struct engine_choice *choice = e->choice;
    const int32_t n_tokens = engine_known(choice) + e->n_guessed;
    const float *logits = result.logits + (int64_t)r * engine->options.n_vocab;
    choice->tokens[n_tokens] = engine_draw_token(engine, &engine->sampler, choice, n_tokens, logits);
    e->n_guessed++;
  }
  return true;
}

/* Which choices are drafted for in this turn, and how many tokens each. */
static void take_up(struct sits_engine *engine, struct engine_choice *const *choices, int32_t n)
{
  struct engine_drafter *d = engine->drafter;
  const double cost = relative_cost(engine, choices, n);
  d->n_entries = 0;
  for (int32_t i = 0; i < n && d->n_entries < d->n_slots; i++) {
    struct engine_choice *choice = choices[i];
    int32_t known = engine_known(choice), most = engine->options.spec_max_tokens;
    const int32_t left = choice->request->params.sampling.max_tokens - choice->n_out - 1;
    if (most > left) most = left;
    if (most > d->model.max_model_len - known) most = d->model.max_model_len - known;
    float accept;
    if (most <= 0 || !engine_may_guess(choice, &accept)) continue;
    const int32_t n_wanted = engine_draft_length(accept, cost, most);
    if (n_wanted == 0) {
      choice->guesses.wait = PAUSE;
      continue;
    }
    if (choice->draft_slot < 0) {
      if (kv_open(d->pages, (struct kv_owner){0}, &choice->draft_slot) != SITS_OK) continue;
      choice->draft_right = 0;
    }
    d->entries[d->n_entries++] = (struct entry){.choice = choice, .n_wanted = n_wanted};
  }
}

/* Read what the sequences hold beyond what the draft model knows; those that get to their end guess a first token. */
static bool first_pass(struct sits_engine *engine)
{
  struct engine_drafter *d = engine->drafter;
  close_batch(d);
  for (int32_t i = 0; i < d->n_entries; i++) {
    struct entry *e = &d->entries[i];
    struct engine_choice *choice = e->choice;
    const int32_t read = kv_tokens(d->pages, choice->draft_slot), known = engine_known(choice);
    const int32_t right = choice->draft_right < known - 1 ? choice->draft_right : known - 1; /* guesses that came true and were read */
    struct kv_move move;
    int32_t n_moves = 0;
    if (right > read) {
      if (kv_reserve(d->pages, choice->draft_slot, right, &move, &n_moves) != SITS_OK) continue;
      kv_commit(d->pages, choice->draft_slot, choice->tokens + read, right - read);
    }
    const int32_t from = right > read ? right : read;
    int32_t room = d->max_tokens - d->batch.n_tokens;
    if (room > CATCH_UP) room = CATCH_UP;
    e->n_fed = known - from < room ? known - from : room;
    e->is_over = e->n_fed < known - from;
    if (e->n_fed == 0 || !add_tokens(d, e, from, e->n_fed, !e->is_over)) e->n_fed = 0, e->is_over = true;
  }
  if (d->batch.n_tokens == 0) return true;
  if (!run_batch(engine)) return false;
  for (int32_t i = 0; i < d->n_entries; i++) {
    struct entry *e = &d->entries[i];
    if (e->n_fed == 0) continue;
    const int32_t slot = e->choice->draft_slot, read = kv_tokens(d->pages, slot);
    kv_commit(d->pages, slot, e->choice->tokens + read, e->n_fed);
    e->choice->draft_right = read + e->n_fed;
  }
  return true;
}

/* One more guess for each sequence that wants it. Guesses are not committed: kv_commit would give back the pages behind them. */
static bool next_pass(struct sits_engine *engine)
{
  struct engine_drafter *d = engine->drafter;
  const int64_t started_us = clock_monotonic_us();
  close_batch(d);
  for (int32_t i = 0; i < d->n_entries; i++) {
    struct entry *e = &d->entries[i];
    const int32_t end = engine_known(e->choice) + e->n_guessed;
    if (e->is_over || e->n_guessed >= e->n_wanted) continue;
    if (!add_tokens(d, e, end - 1, 1, true)) e->is_over = true;
  }
  if (d->batch.n_tokens == 0) return false;
  if (!run_batch(engine)) return false;
  for (int32_t r = 0; r < d->n_rows; r++) {
    struct engine_choice *choice = d->rows[r]->choice;
    choice->draft_right = engine_known(choice) + d->rows[r]->n_guessed - 1;
  }
  const double took_us = (double)(clock_monotonic_us() - started_us);
  d->step_us += d->step_us > 0 ? COST_RATE * (took_us - d->step_us) : took_us;
  return true;
}

void engine_drafter_run(struct sits_engine *engine, struct engine_choice *const *choices, int32_t n)
{
  struct engine_drafter *d = engine->drafter;
  if (n == 0 || d->is_broken) return;
  const int64_t started_us = clock_monotonic_us();
  take_up(engine, choices, n);
  if (d->n_entries > 0 && first_pass(engine)) {
    while (next_pass(engine)) {}
    for (int32_t i = 0; i < d->n_entries && !d->is_broken; i++) {
      const struct entry *e = &d->entries[i];
      if (e->n_guessed == 0) continue;
      e->choice->draft_kind = DRAFT_MODEL;
      for (int32_t k = 0; k < e->n_guessed; k++) e->choice->draft_chance[k] = e->choice->guesses.accept;
      alps_offer(engine->alps, e->choice->id, e->n_guessed, e->choice->draft_chance);
      engine->stats.spec_model_tokens += (uint64_t)e->n_guessed;
    }
  }
  engine->draft_us = clock_monotonic_us() - started_us;
}
