/* sits2026-bench engine --scenario stall: streams decode and a long prompt arrives, for several inter-token targets.
 *
 * A case opens its own engine: the prompt alone, the streams undisturbed, the streams beside the prompt. The target is a multiple of the
 * undisturbed P99 that the first case measured, which reads the prompt whole and shows the stall. A target of x times that P99 leaves
 * (x-1)/x of each interval, so the prompt could be read in alone * x/(x-1): "share_of_time_left" is that over what it took. Steps of the
 * streams grow with their contexts, with the prompt or without: --stream-prompt makes those so long that they hardly change meanwhile
 * (a repeated beginning comes from the prefix cache). The longest steps beside the prompt are listed with what they consisted of.
 * Entry point: engine_bench_stall. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"

enum { DEFAULT_STREAMS = 4, MOST_STREAMS = 64, MOST_GAPS = 200000, MOST_STEPS = MOST_GAPS, WARM_TOKENS = 20, WORST = 12 };

/* Steps as the engine tells of them, while is_on. */
struct step_log { atomic_bool is_on; atomic_int n; struct engine_step_times steps[MOST_STEPS]; };

/* How long the prompt took (ms), how long the gaps of the others were meanwhile and before; the log has the steps. */
struct stall { double alone_ms, took_ms, quiet_p99_ms, quiet_p50_ms, p50_ms, p99_ms, worst_ms; int64_t tokens_beside; };

struct scene {
  struct engine_run run;
  struct engine_bench_stream streams[MOST_STREAMS];
  int32_t *prompt, n_vocab, most_tokens, n_streams;
  int64_t n_prompt, n_gaps;
  double gaps[MOST_GAPS];
};

static struct step_log step_log;
static struct scene scene;

/* engine_options.on_step */
static void note_step(void *user, const struct engine_step_times *times)
{
  struct step_log *l = user;
  const int n = atomic_load(&l->n);
  if (!atomic_load(&l->is_on) || n >= MOST_STEPS) return;
  l->steps[n] = *times;
  atomic_store(&l->n, n + 1);
}

/* Each stream begins with a prompt of its own, the same every time. */
static void stream_prompt(struct scene *c, int stream)
{
  engine_bench_prompt(c->prompt, c->run.options->stream_prompt, c->n_vocab, 100 + (uint32_t)stream);
}

static void start_streams(struct scene *c)
{
  for (int i = 0; i < c->n_streams; i++) {
    stream_prompt(c, i);
    c->streams[i] = (struct engine_bench_stream){
        .request = engine_bench_submit(&c->run, c->prompt, c->run.options->stream_prompt, c->most_tokens)};
  }
}

static void take_all(struct scene *c, int64_t *n_gaps)
{
  for (int i = 0; i < c->n_streams; i++) engine_bench_take(&c->streams[i], c->gaps, MOST_GAPS, n_gaps);
}

/* Until each has said its first few tokens and n_tokens more; the gaps of those are kept. */
static void listen(struct scene *c, int64_t n_tokens)
{
  int64_t until[MOST_STREAMS], n_ignored = MOST_GAPS;
  for (int i = 0; i < c->n_streams; take_all(c, &n_ignored)) {
    if (c->streams[i].n >= WARM_TOKENS || c->streams[i].is_done) i++;
    else engine_bench_nap();
  }
  for (int i = 0; i < c->n_streams; i++) until[i] = c->streams[i].n + n_tokens;
  c->n_gaps = 0;
  for (int i = 0; i < c->n_streams; take_all(c, &c->n_gaps)) {
    if (c->streams[i].n >= until[i] || c->streams[i].is_done) i++;
    else engine_bench_nap();
  }
}

/* False after a message: one had come to its end before. */
static bool stop_streams(struct scene *c)
{
  bool is_whole = true;
  for (int i = 0; i < c->n_streams; i++) {
    sits_request_cancel(c->streams[i].request, -1);
    if (!c->streams[i].is_done) engine_bench_await(c->streams[i].request);
    else is_whole = false;
    sits_request_release(c->streams[i].request);
  }
  if (!is_whole) fprintf(stderr, "sits2026-bench engine: a stream came to the end of the model's context\n");
  return is_whole;
}

/* The streams' prompts come into the prefix cache, so that they all begin at once. */
static void prepare_streams(struct scene *c)
{
  for (int i = 0; i < c->n_streams; i++) {
    stream_prompt(c, i);
    struct sits_request *request = engine_bench_submit(&c->run, c->prompt, c->run.options->stream_prompt, 1);
    engine_bench_await(request);
    sits_request_release(request);
  }
}

static double read_alone(struct scene *c)
{
  engine_bench_prompt(c->prompt, c->n_prompt, c->n_vocab, 7);
  const int64_t started_us = clock_monotonic_us();
  struct sits_request *request = engine_bench_submit(&c->run, c->prompt, c->n_prompt, 1);
  engine_bench_await(request);
  sits_request_release(request);
  return (double)(clock_monotonic_us() - started_us) * 1e-3;
}

/* Until every stream has spoken once more after the prompt was read: the longest gap ends then. Returns the reading time. */
static double read_beside(struct scene *c)
{
  int64_t until[MOST_STREAMS] = {0}, n_ignored = MOST_GAPS;
  engine_bench_prompt(c->prompt, c->n_prompt, c->n_vocab, 8);
  const int64_t started_us = clock_monotonic_us();
  struct engine_bench_stream longer = {.request = engine_bench_submit(&c->run, c->prompt, c->n_prompt, 1)};
  c->n_gaps = 0;
  atomic_store(&step_log.n, 0);
  atomic_store(&step_log.is_on, true);
  for (int i = 0; !longer.is_done || i < c->n_streams;) {
    const bool was_done = longer.is_done;
    engine_bench_take(&longer, c->gaps, MOST_GAPS, &n_ignored);
    take_all(c, &c->n_gaps);
    for (int k = 0; k < c->n_streams && !was_done; k++) until[k] = c->streams[k].n + 1;
    if (was_done && (c->streams[i].n >= until[i] || c->streams[i].is_done)) i++;
    else engine_bench_nap();
  }
  atomic_store(&step_log.is_on, false);
  sits_request_release(longer.request);
  return (double)(longer.last_us - started_us) * 1e-3;
}

static bool measure(const struct engine_bench_options *o, double itl_target_ms, bool is_whole, struct stall *out)
{
  struct scene *c = &scene;
  c->n_streams = o->streams > 0 ? (int32_t)o->streams : DEFAULT_STREAMS;
  struct instance_options more = {.max_num_seqs = c->n_streams + 4, .itl_target_us = (int64_t)(itl_target_ms * 1000),
                                  .kv_cache_bytes = (uint64_t)(o->kv_cache_gb * 1e9),
                                  .policy = is_whole ? "continuous" : "alps", .on_step = note_step, .step_user = &step_log,
                                  .prefix_caching = true,
                                  .max_num_batched_tokens = (int32_t)(is_whole ? o->prompt : o->step_tokens)};
  struct instance_info info;
  const int64_t longest = o->prompt > o->stream_prompt ? o->prompt : o->stream_prompt;
  if (!engine_bench_open(&c->run, o, more, longest + 1)) return false;
  instance_info(c->run.instance, &info);
  c->n_vocab = instance_model(c->run.instance)->config.n_vocab;
  const int64_t share = ((int64_t)info.n_pages * KV_PAGE_TOKENS - longest) / c->n_streams - KV_PAGE_TOKENS; /* all fit, whatever they say */
  c->most_tokens = (int32_t)(share < info.max_model_len ? share : info.max_model_len) - (int32_t)o->stream_prompt;
  c->n_prompt = o->prompt;
  c->prompt = mem_calloc((size_t)longest, sizeof *c->prompt);
  if (!c->prompt) return false;
  out->alone_ms = read_alone(c);
  prepare_streams(c);
  start_streams(c);
  listen(c, o->quiet_tokens);
  bool is_good = stop_streams(c);
  out->quiet_p50_ms = bench_percentile(c->gaps, c->n_gaps, 50);
  out->quiet_p99_ms = bench_percentile(c->gaps, c->n_gaps, 99);
  start_streams(c);
  listen(c, WARM_TOKENS);
  out->took_ms = read_beside(c);
  out->tokens_beside = c->n_gaps / c->n_streams;
  out->p50_ms = bench_percentile(c->gaps, c->n_gaps, 50);
  out->p99_ms = bench_percentile(c->gaps, c->n_gaps, 99);
  out->worst_ms = bench_percentile(c->gaps, c->n_gaps, 100);
  is_good = stop_streams(c) && is_good;
  instance_close(c->run.instance);
  mem_free(c->prompt);
  return is_good;
}

static int by_length(const void *a, const void *b)
{
  const struct engine_step_times *x = a, *y = b;
  return (x->step_us < y->step_us) - (x->step_us > y->step_us);
}

/* The longest steps; step = slice + batch + what the host did between them. */
static json_t *worst_steps(void)
{
  const int n = atomic_load(&step_log.n);
  json_t *rows = json_array();
  qsort(step_log.steps, (size_t)n, sizeof step_log.steps[0], by_length);
  for (int i = 0; i < n && i < WORST; i++) {
    const struct engine_step_times *t = &step_log.steps[i];
    fprintf(stderr, "    step %7.2f ms: slice %7.2f of %7.2f, batch %7.2f (predicted %7.2f), host %5.2f\n", (double)t->step_us * 1e-3,
            (double)t->sliced_us * 1e-3, (double)t->slice_us * 1e-3, (double)t->batch_us * 1e-3, (double)t->predicted_us * 1e-3,
            (double)(t->step_us - t->sliced_us - t->batch_us) * 1e-3);
    json_array_append_new(rows, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:i}", "step_us", (json_int_t)t->step_us, "slice_us",
                                          (json_int_t)t->slice_us, "sliced_us", (json_int_t)t->sliced_us, "batch_us",
                                          (json_int_t)t->batch_us, "once_us", (json_int_t)t->once_us, "predicted_us",
                                          (json_int_t)t->predicted_us, "prompt_tokens", (int)t->n_prompt_tokens));
  }
  return rows;
}

/* What a step consisted of on average. */
static json_t *mean_step(void)
{
  const int n = atomic_load(&step_log.n);
  double step = 0, slice = 0, batch = 0, prompt = 0;
  for (int i = 0; i < n; i++) {
    const struct engine_step_times *t = &step_log.steps[i];
    step += (double)t->step_us, slice += (double)t->sliced_us, batch += (double)t->batch_us, prompt += (double)t->n_prompt_tokens;
  }
  const double per = n > 0 ? 1.0 / n : 0;
  fprintf(stderr, "    %d steps of %.2f ms: slices %.2f, batch %.2f with %.0f prompt tokens, host %.2f\n", n, step * per * 1e-3,
          slice * per * 1e-3, batch * per * 1e-3, prompt * per, (step - slice - batch) * per * 1e-3);
  return json_pack("{s:i, s:f, s:f, s:f, s:f}", "n", n, "step_us", step * per, "sliced_us", slice * per, "batch_us", batch * per,
                   "prompt_tokens", prompt * per);
}

static void put(json_t *row, const char *key, double value)
{
  json_object_set_new(row, key, json_real(value));
}

static json_t *row_of(const char *name, double target_ms, double quiet_ms, const struct stall *s)
{
  json_t *row = json_pack("{s:s}", "case", name);
  /* What the target leaves of each interval beside steps as long as the undisturbed P99, and how long the prompt takes in that. */
  const double left = target_ms > quiet_ms ? 1 - quiet_ms / target_ms : 0, ideal_ms = left > 0 ? s->alone_ms / left : 0;
  put(row, "itl_target_ms", target_ms);
  put(row, "alone_ms", s->alone_ms);
  put(row, "took_ms", s->took_ms);
  put(row, "times_alone", s->took_ms / s->alone_ms);
  put(row, "share_of_time_left", ideal_ms / s->took_ms);
  put(row, "itl_p50_ms", s->p50_ms);
  put(row, "itl_p99_ms", s->p99_ms);
  put(row, "itl_worst_ms", s->worst_ms);
  put(row, "p99_over_target", target_ms > 0 ? s->p99_ms / target_ms : 0);
  put(row, "quiet_p99_ms", s->quiet_p99_ms);
  put(row, "quiet_p50_ms", s->quiet_p50_ms);
  json_object_set_new(row, "tokens_beside", json_integer(s->tokens_beside)); /* of each stream */
  fprintf(stderr, "%-6s target %7.2f ms: p99 %.2f (%.2f of it), p50 %.2f, worst %.2f; read in %.0f ms, %.2f times alone (%.0f), "
          "share %.2f; ", name, target_ms, s->p99_ms, target_ms > 0 ? s->p99_ms / target_ms : 0, s->p50_ms, s->worst_ms, s->took_ms,
          s->took_ms / s->alone_ms, s->alone_ms, ideal_ms / s->took_ms);
  fprintf(stderr, "quiet p99 %.2f p50 %.2f; each said %lld\n", s->quiet_p99_ms, s->quiet_p50_ms, (long long)s->tokens_beside);
  json_object_set_new(row, "mean_step", mean_step());
  json_object_set_new(row, "worst_steps", worst_steps());
  return row;
}

bool engine_bench_stall(const struct engine_bench_options *o, json_t *rows)
{
  int64_t percents[8];
  const int n = bench_parse_list(o->targets, percents, 8);
  struct stall s;
  double quiet_ms = o->quiet_ms;
  if (n == 0) fprintf(stderr, "sits2026-bench engine: --targets is a list of at most 8 percentages such as 1,150\n");
  for (int i = 0; i < n; i++) {
    const bool is_whole = percents[i] < 100;
    const double target_ms = is_whole ? 0 : quiet_ms * (double)percents[i] / 100;
    if (!is_whole && quiet_ms <= 0) {
      fprintf(stderr, "sits2026-bench engine: begin --targets with 1, or give --quiet-ms\n");
      return false;
    }
    if (!measure(o, target_ms, is_whole, &s)) return false;
    if (is_whole && quiet_ms <= 0) quiet_ms = s.quiet_p99_ms;
    json_array_append_new(rows, row_of(is_whole ? "whole" : "alps", target_ms, quiet_ms, &s));
  }
  return n > 0;
}
