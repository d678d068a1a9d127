/* The engine's own life: creation, the thread, draining, stopping, failure. */
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_internal.h"

enum { DEFAULT_MAX_WAITING = 1024, IDLE_US = 100 * 1000, HELD_US = 1000, ENTRIES_PER_WAITING = 2 };

static enum sits_status check_options(const struct engine_options *o, struct sits_error *err)
{
  if (!o->vtable || !o->program || !o->kv) return sits_fail(err, SITS_INVALID_ARGUMENT, "engine: no backend");
  if (o->geometry.n_pages <= 0 || o->n_vocab <= 0) return sits_fail(err, SITS_INVALID_ARGUMENT, "engine: no pages or no vocabulary");
  if (o->max_num_seqs <= 0 || o->max_num_batched_tokens <= 0 || o->max_rows < o->max_num_seqs) {
    return sits_fail(err, SITS_INVALID_ARGUMENT, "engine: max_num_seqs, max_num_batched_tokens and max_rows must be positive and in order");
  }
  if (o->max_num_batched_tokens < o->max_num_seqs) {
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "max_num_batched_tokens", "must be at least max_num_seqs (%d)", o->max_num_seqs);
  }
  if (o->page_budget != 0 && (o->geometry.codec != KV_FP4_SPARSE || o->page_budget < KV_LEAST_BUDGET))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "page_budget", "a page budget is at least %d pages, and for fp4-sparse only",
                           KV_LEAST_BUDGET);
  int64_t holds = (int64_t)o->geometry.n_pages * KV_PAGE_TOKENS;
  if (o->page_budget > 0 && o->page_budget <= o->geometry.n_pages) holds = INT32_MAX; /* the rest is dropped */
  if (o->max_model_len <= 0 || o->max_model_len > holds) {
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "max_model_len", "must be in [1, %lld], the tokens that the page memory holds",
                           (long long)holds);
  }
  return SITS_OK;
}

static bool alloc_arrays(struct sits_engine *e)
{
  const struct engine_options *o = &e->options;
  size_t n = (size_t)e->max_entries, s = (size_t)o->max_num_seqs, t = (size_t)o->max_num_batched_tokens, r = (size_t)o->max_rows;
  e->end_ids = mem_calloc((size_t)o->n_end_ids + 1, sizeof(int32_t));
  e->by_id = mem_calloc(n, sizeof *e->by_id);
  e->free_ids = mem_calloc(n, sizeof(int32_t));
  e->deadlines = mem_calloc(n, sizeof *e->deadlines);
  e->parked = mem_calloc(n, sizeof(int32_t));
  e->swapping = mem_calloc(s, sizeof(int32_t));
  e->news = mem_calloc(n, sizeof *e->news);
  e->moves = mem_calloc(s, sizeof *e->moves);
  e->copies = mem_calloc(s, sizeof *e->copies);
  e->to_draft = mem_calloc(s, sizeof *e->to_draft);
  e->tokens = mem_calloc(t, sizeof(int32_t));
  e->positions = mem_calloc(t, sizeof(int32_t));
  e->seq_start = mem_calloc(s + 1, sizeof(int32_t));
  e->kv_len = mem_calloc(s, sizeof(int32_t));
  e->tables = mem_calloc(s * (size_t)e->stride, sizeof(int32_t));
  e->row_token = mem_calloc(r, sizeof(int32_t));
  e->rows = mem_calloc(r, sizeof *e->rows);
  e->samples = mem_calloc(r, sizeof *e->samples);
  if (o->page_budget > 0) {
    e->blocks = mem_calloc(s, sizeof *e->blocks);
    e->blocks_slot = mem_calloc(s, sizeof *e->blocks_slot);
    if (!e->blocks || !e->blocks_slot) return false;
  }
  return e->end_ids &&
         e->by_id && e->free_ids && e->deadlines && e->parked && e->news && e->swapping && e->moves && e->copies && e->to_draft &&
         e->tokens && e->positions && e->seq_start && e->kv_len && e->tables && e->row_token && e->rows && e->samples;
}

static enum sits_status create_parts(struct sits_engine *e, struct sits_error *err)
{
  const struct engine_options *o = &e->options;
  /* Prompts that the reader works on have slots of their own here. */
  int32_t n_slots = o->max_num_seqs + (o->reader ? 2 * o->reader->max_num_seqs : 0);
  struct kv_options kv = {.n_pages = o->geometry.n_pages, .n_slots = n_slots, .max_pages = e->stride,
                          .n_host_pages = o->n_host_pages, .prefix_caching = o->prefix_caching, .page_budget = o->page_budget,
                          .n_columns = o->geometry.n_layers * o->geometry.n_kv_heads};
  struct alps_options alps = {.policy = o->policy, .max_entries = e->max_entries,
                              .max_seqs = o->max_num_seqs, .max_batch_tokens = o->max_num_batched_tokens, .max_rows = o->max_rows,
                              .page_tokens = KV_TOKENS, .n_pages = o->geometry.n_pages, .page_budget = o->page_budget,
                              .itl_target_us = o->itl_target_us, .ttft_target_us = o->ttft_target_us, .freed = engine_freed};
  enum sits_status status = engine_slice_open(e, err);
  alps.slice_tokens = e->slice.most_tokens;
  alps.tile_tokens = o->vtable->tile_tokens;
  alps.slices_behind = !o->overlap; /* else the device would wait for the host between the items and the slice */
  alps.slices_by_rate = o->vtable->lane_tokens > 0 || o->itl_target_us > 0;
  if (status == SITS_OK) status = kv_create(&kv, &e->pages);
  if (status == SITS_OK) status = alps_create(&alps, &e->alps);
  if (status == SITS_OK) status = engine_sampler_init(&e->sampler, o->n_vocab);
  bool drafts = o->draft.program && o->spec_max_tokens > 0;
  if (status == SITS_OK && drafts) status = engine_drafter_create(o, &e->drafter);
  if (status == SITS_OK) status = engine_pool_create(o->n_sampler_threads, o->n_vocab, &e->pool);
  if (status == SITS_OK && o->n_host_pages > 0) {
    e->host_memory = mem_aligned(64, (size_t)o->n_host_pages * e->page_bytes);
    if (!e->host_memory) status = SITS_NOMEM;
  }
  return status;
}

static void init_sync(struct sits_engine *e)
{
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_mutex_init(&e->inbox_mutex, NULL);
  pthread_mutex_init(&e->stats_mutex, NULL);
  pthread_cond_init(&e->inbox_cond, &attr);
  pthread_cond_init(&e->idle_cond, &attr);
  pthread_condattr_destroy(&attr);
}

enum sits_status engine_create(const struct engine_options *options, struct sits_engine **out, struct sits_error *err)
{
  enum sits_status status = check_options(options, err);
  if (status != SITS_OK) return status;
  struct sits_engine *e = mem_calloc(1, sizeof *e);
  if (!e) return sits_fail(err, SITS_NOMEM, "engine: out of memory");
  init_sync(e);
  e->options = *options;
  if (e->options.max_waiting_requests <= 0) e->options.max_waiting_requests = DEFAULT_MAX_WAITING;
  if (e->options.spec_max_running <= 0) e->options.spec_max_running = 8;
  if (e->options.spec_max_tokens < 0) e->options.spec_max_tokens = 0;
  if (e->options.spec_max_tokens > ENGINE_MOST_DRAFT) e->options.spec_max_tokens = ENGINE_MOST_DRAFT;
  /* A refused draft is overwritten later; codecs that fold whole groups of tokens into few bits cannot take a token back. */
  if (e->options.spec_max_tokens > 0 && (options->geometry.codec == KV_INT4 || options->geometry.codec == KV_FP4 ||
                                         options->geometry.codec == KV_FP4_SPARSE)) {
    log_info("engine", "no speculation: %s pages cannot take a token back", kv_codec_name(options->geometry.codec));
    e->options.spec_max_tokens = 0;
  }
  e->max_entries = ENTRIES_PER_WAITING * (e->options.max_waiting_requests + options->max_num_seqs) + SITS_MAX_CHOICES;
  e->stride = (options->max_model_len + KV_TOKENS - 1) / KV_TOKENS;
  e->page_bytes = options->vtable->kv_page_bytes(&options->geometry);
  e->page_copy_us = (double)e->page_bytes / 4000; /* 4 GB/s until it is measured */
  if (!alloc_arrays(e)) status = SITS_NOMEM;
  struct sits_error own = {0};               /* what a device says */
  if (status == SITS_OK) status = create_parts(e, &own);
  if (status != SITS_OK) {
    engine_destroy(e);
    if (own.text[0] != '\0') return sits_fail_param(err, status, own.param, "%s", own.text);
    if (status != SITS_NOMEM) return sits_fail(err, status, "engine: %s", sits_status_info(status)->text);
    return sits_fail(err, status, "engine: out of memory for %d sequences and %d pages", options->max_num_seqs, options->geometry.n_pages);
  }
  if (options->reader) status = engine_placement_create(e, options, &e->placement, err);
  e->options.reader = NULL;
  if (status != SITS_OK) {
    engine_destroy(e);
    return status;
  }
  if (options->n_end_ids > 0) memcpy(e->end_ids, options->end_ids, (size_t)options->n_end_ids * sizeof(int32_t));
  for (int32_t i = 0; i < e->max_entries; i++) e->free_ids[i] = e->max_entries - 1 - i;
  e->n_free_ids = e->max_entries;
  engine_stats_init(&e->stats);
  engine_draft_init(e);
  atomic_store(&e->state, ENGINE_CREATED);
  atomic_store(&e->heartbeat_us, clock_monotonic_us());
  engine_stats_publish(e);
  *out = e;
  return SITS_OK;
}

void engine_destroy(struct sits_engine *e)
{
  if (!e) return;
  if (atomic_load(&e->n_requests) > 0) engine_stop(e, 0);
  engine_placement_destroy(e->placement);
  while (e->cancel_first) { /* cancelled after they had ended */
    struct sits_request *request = e->cancel_first;
    e->cancel_first = request->cancel_next;
    engine_request_unref(request);
  }
  engine_slice_close(e);
  kv_destroy(e->pages);
  alps_destroy(e->alps);
  engine_sampler_fini(&e->sampler);
  engine_pool_destroy(e->pool);
  engine_drafter_destroy(e->drafter);
  mem_free(e->to_draft);
  mem_free(e->host_memory);
  mem_free(e->end_ids);
  mem_free(e->by_id);
  mem_free(e->free_ids);
  mem_free(e->deadlines);
  mem_free(e->parked);
  mem_free(e->swapping);
  mem_free(e->news);
  mem_free(e->moves);
  mem_free(e->copies);
  mem_free(e->tokens);
  mem_free(e->positions);
  mem_free(e->seq_start);
  mem_free(e->kv_len);
  mem_free(e->tables);
  mem_free(e->row_token);
  mem_free(e->blocks);
  mem_free(e->blocks_slot);
  mem_free(e->samples);
  mem_free(e->rows);
  pthread_cond_destroy(&e->idle_cond);
  pthread_cond_destroy(&e->inbox_cond);
  pthread_mutex_destroy(&e->stats_mutex);
  pthread_mutex_destroy(&e->inbox_mutex);
  mem_free(e);
}

enum sits_status engine_set_end_ids(struct sits_engine *e, const int32_t *ids, int32_t n_ids)
{
  if (n_ids < 0 || atomic_load(&e->state) != ENGINE_CREATED) return SITS_INVALID_ARGUMENT;
  int32_t *copy = mem_calloc((size_t)n_ids + 1, sizeof *copy);
  if (!copy) return SITS_NOMEM;
  if (n_ids > 0) memcpy(copy, ids, (size_t)n_ids * sizeof *copy);
  mem_free(e->end_ids);
  e->end_ids = copy;
  e->options.n_end_ids = n_ids;
  return SITS_OK;
}

static struct timespec timespec_of(int64_t monotonic_us)
{
  return (struct timespec){.tv_sec = monotonic_us / 1000000, .tv_nsec = monotonic_us % 1000000 * 1000};
}

/* Sleep until there is news from outside, a deadline passes, a slow consumer may have made room, or the heartbeat is due. */
static void wait_for_work(struct sits_engine *e)
{
  int64_t now_us = clock_monotonic_us(), until_us = now_us + (e->n_held > 0 ? HELD_US : IDLE_US);
  if (e->n_deadlines > 0 && e->deadlines[0]->params.deadline_us < until_us) until_us = e->deadlines[0]->params.deadline_us;
  struct timespec until = timespec_of(until_us);
  pthread_mutex_lock(&e->inbox_mutex);
  if (!e->inbox_first && !e->cancel_first && !e->wants_stop && !engine_placement_has_mail(e->placement) && until_us > now_us) {
    e->is_sleeping = true;
    pthread_cond_timedwait(&e->inbox_cond, &e->inbox_mutex, &until);
    e->is_sleeping = false;
  }
  pthread_mutex_unlock(&e->inbox_mutex);
}

static void *run(void *user)
{
  struct sits_engine *e = user;
  pthread_setname_np(pthread_self(), "engine");
  for (;;) {
    bool has_worked = engine_step(e);
    pthread_mutex_lock(&e->inbox_mutex);
    bool stop = e->wants_stop && !e->inbox_first && atomic_load(&e->n_requests) == 0 && !engine_placement_is_busy(e->placement);
    pthread_mutex_unlock(&e->inbox_mutex);
    if (stop) return NULL;
    if (!has_worked) wait_for_work(e);
  }
}

enum sits_status engine_start(struct sits_engine *e, struct sits_error *err)
{
  int expected = ENGINE_CREATED;
  if (!atomic_compare_exchange_strong(&e->state, &expected, ENGINE_RUNNING)) return sits_fail(err, SITS_INTERNAL, "engine: started twice");
  if (e->placement) {
    enum sits_status status = engine_placement_start(e->placement, err);
    if (status != SITS_OK) return status;
  }
  if (pthread_create(&e->thread, NULL, run, e) != 0) {
    atomic_store(&e->state, ENGINE_CREATED);
    return sits_fail(err, SITS_NOMEM, "engine: cannot start a thread");
  }
  e->has_thread = true;
  return SITS_OK;
}

void engine_drain(struct sits_engine *e)
{
  int expected = ENGINE_RUNNING;
  if (!atomic_compare_exchange_strong(&e->state, &expected, ENGINE_DRAINING)) {
    expected = ENGINE_CREATED;
    atomic_compare_exchange_strong(&e->state, &expected, ENGINE_DRAINING);
  }
}

static void stop_inline(struct sits_engine *e)
{
  e->wants_cancel_all = true;
  while (atomic_load(&e->n_requests) > 0) engine_step(e);
}

void engine_stop(struct sits_engine *e, int64_t deadline_us)
{
  if (!e) return;
  engine_drain(e);
  if (!e->has_thread) {
    stop_inline(e);
  } else {
    struct timespec until = timespec_of(deadline_us);
    pthread_mutex_lock(&e->inbox_mutex);
    while (atomic_load(&e->n_requests) > 0 && clock_monotonic_us() < deadline_us) {
      pthread_cond_timedwait(&e->idle_cond, &e->inbox_mutex, &until);
    }
    e->wants_cancel_all = e->wants_stop = true;
    pthread_cond_signal(&e->inbox_cond);
    pthread_mutex_unlock(&e->inbox_mutex);
    pthread_join(e->thread, NULL);
    e->has_thread = false;
  }
  if (atomic_load(&e->state) != ENGINE_FAILED) atomic_store(&e->state, ENGINE_STOPPED);
}

bool engine_step_once(struct sits_engine *engine)
{
  return engine_step(engine);
}

void engine_fail(struct sits_engine *e, enum sits_status status)
{
  log_error("engine", "device failed status=%s; no request is taken any more", sits_status_info(status)->name);
  atomic_store(&e->state, ENGINE_FAILED);
  for (int32_t id = 0; id < e->max_entries; id++) {
    if (e->by_id[id]) engine_finish_all(e, e->by_id[id]->request, SITS_FINISH_ERROR, status);
  }
}

enum engine_state engine_state(const struct sits_engine *engine)
{
  return (enum engine_state)atomic_load(&engine->state);
}

int64_t engine_heartbeat_us(const struct sits_engine *engine)
{
  int64_t mine_us = atomic_load(&engine->heartbeat_us), reader_us = engine_placement_heartbeat_us(engine->placement);
  return mine_us < reader_us ? mine_us : reader_us;
}

void engine_limits(const struct sits_engine *engine, struct engine_limits *out)
{
  const struct engine_options *o = &engine->options;
  *out = (struct engine_limits){.max_model_len = o->max_model_len, .max_prompt_tokens = o->max_model_len - 1,
                                .max_num_seqs = o->max_num_seqs, .n_vocab = o->n_vocab};
}

int32_t engine_retry_after_s(struct sits_engine *engine)
{
  struct engine_stats s;
  engine_stats(engine, &s);
  double each_s = s.inference_seconds.count > 0 ? s.inference_seconds.sum / (double)s.inference_seconds.count : 1;
  double wait_s = each_s * s.n_waiting / engine->options.max_num_seqs;
  return wait_s < 1 ? 1 : wait_s > 60 ? 60 : (int32_t)(wait_s + 0.5);
}
