/* Counters and histograms. The loop keeps its own copy and publishes it after each step, so a reader never waits for a step. */
#include <string.h>

#include "engine/engine_internal.h"

/* Bounds as vLLM has them, so that dashboards need no change. Seconds, tokens, counts. */
static const double TTFT[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5,
                              7.5, 10, 20, 40, 80, 160, 640, 2560};
static const double ITL[] = {0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
                             0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
static const double LATENCY[] = {0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
                                  120, 240, 480, 960, 1920, 7680};
static const double TOKENS[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
static const double CHOICES[] = {1, 2, 5, 10, 20};
static const double CANCEL_STEPS[] = {0, 1, 2, 4, 8};
static const double ITERATION[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};

#define SET_BOUNDS(histogram, table) \
  do { \
    _Static_assert(sizeof(table) / sizeof *(table) <= ENGINE_HISTOGRAM_MAX, "too many bounds"); \
    (histogram)->bounds = (table); \
    (histogram)->n_bounds = (int32_t)(sizeof(table) / sizeof *(table)); \
  } while (0)

void engine_stats_init(struct engine_stats *stats)
{
  memset(stats, 0, sizeof *stats);
  SET_BOUNDS(&stats->ttft_seconds, TTFT);
  SET_BOUNDS(&stats->itl_seconds, ITL);
  SET_BOUNDS(&stats->tpot_seconds, ITL);
  SET_BOUNDS(&stats->e2e_seconds, LATENCY);
  SET_BOUNDS(&stats->queue_seconds, LATENCY);
  SET_BOUNDS(&stats->prefill_seconds, LATENCY);
  SET_BOUNDS(&stats->decode_seconds, LATENCY);
  SET_BOUNDS(&stats->inference_seconds, LATENCY);
  SET_BOUNDS(&stats->prompt_tokens_hist, TOKENS);
  SET_BOUNDS(&stats->generation_tokens_hist, TOKENS);
  SET_BOUNDS(&stats->max_tokens_hist, TOKENS);
  SET_BOUNDS(&stats->n_choices_hist, CHOICES);
  SET_BOUNDS(&stats->iteration_tokens_hist, ITERATION);
  SET_BOUNDS(&stats->cancel_steps_hist, CANCEL_STEPS);
}

void engine_observe(struct engine_histogram *histogram, double value)
{
  int32_t i = 0;
  while (i < histogram->n_bounds && value > histogram->bounds[i]) i++;
  histogram->counts[i]++;
  histogram->count++;
  histogram->sum += value;
}

void engine_stats_request(struct sits_engine *engine, const struct sits_request *request)
{
  struct engine_stats *s = &engine->stats;
  struct sits_request_timing t;
  sits_request_timing(request, &t);
  engine_observe(&s->e2e_seconds, (double)(t.done_us - t.submitted_us) * 1e-6);
  engine_observe(&s->prompt_tokens_hist, t.n_prompt_tokens);
  engine_observe(&s->generation_tokens_hist, t.n_output_tokens);
  engine_observe(&s->max_tokens_hist, request->params.sampling.max_tokens);
  engine_observe(&s->n_choices_hist, request->n_choices);
  if (t.first_scheduled_us == 0) return;
  engine_observe(&s->prefill_seconds, (double)((t.first_token_us ? t.first_token_us : t.done_us) - t.first_scheduled_us) * 1e-6);
  engine_observe(&s->scheduling_seconds, (double)t.scheduling_us * 1e-6);
  engine_observe(&s->inference_seconds, (double)(t.done_us - t.first_scheduled_us) * 1e-6);
  if (t.first_token_us == 0) return;
  double decode_s = (double)(t.done_us - t.first_token_us) * 1e-6;
  engine_observe(&s->decode_seconds, decode_s);
  double n_each = (double)t.n_output_tokens / request->n_choices;
  if (n_each > 1) engine_observe(&s->tpot_seconds, decode_s / (n_each - 1));
}

void engine_stats_publish(struct sits_engine *engine)
{
  struct engine_stats *s = &engine->stats;
  struct kv_counts kv;
  struct alps_counts alps;
  kv_counts(engine->pages, &kv);
  alps_counts(engine->alps, &alps);
  s->state = (enum engine_state)atomic_load(&engine->state);
  s->n_running = alps.n_running;
  s->n_waiting = alps.n_waiting;
  s->waiting_prompt_tokens = alps.waiting_tokens;
  for (int c = 0; c < SITS_CLASS_COUNT; c++) s->n_waiting_by_class[c] = alps.n_waiting_by_class[c];
  s->n_pages_total = kv.n_total;
  s->n_pages_free = kv.n_free;
  s->n_pages_cached = kv.n_cached;
  s->n_pages_used = kv.n_referenced;
  s->n_host_pages_total = kv.n_host_total;
  s->n_host_pages_free = kv.n_host_free;
  s->kv_usage = (double)kv.n_referenced / kv.n_total;
  s->prefix_query_tokens = kv.query_tokens;
  s->prefix_hit_tokens = kv.hit_tokens;
  s->n_pages_dropped = kv.n_dropped;
  engine_placement_stats(engine->placement, s);
  s->itl_p99_us = alps.itl_p99_us;
  s->rejected_requests = atomic_load(&engine->n_rejected_requests);
  s->rejected_tokens = atomic_load(&engine->n_rejected_tokens);
  pthread_mutex_lock(&engine->stats_mutex);
  engine->published = *s;
  pthread_mutex_unlock(&engine->stats_mutex);
}

void engine_stats(struct sits_engine *engine, struct engine_stats *out)
{
  pthread_mutex_lock(&engine->stats_mutex);
  *out = engine->published;
  pthread_mutex_unlock(&engine->stats_mutex);
  /* What may have changed since the newest step without one. */
  out->state = (enum engine_state)atomic_load(&engine->state);
  out->rejected_requests = atomic_load(&engine->n_rejected_requests);
  out->rejected_tokens = atomic_load(&engine->n_rejected_tokens);
  int32_t n_queued = atomic_load(&engine->n_queued);
  if (n_queued > out->n_waiting) out->n_waiting = n_queued;
}
