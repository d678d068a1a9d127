/* sits2026-bench engine --scenario swap: streams decode beside a long sequence of low class. A short request comes for which there are no
 * pages, so the long one's go to host memory; it is cancelled, and they come back. Told are the gaps between the streams' tokens, from
 * each arrival until the long sequence speaks again; and what the host did between the batches of those steps, which other programs on the
 * machine, and the end of the long sequence's text, which is read again, disturb less. Entry point: engine_bench_swap. */
#include <stdatomic.h>
#include <stdio.h>

#include "base/clock.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"

enum { DEFAULT_STREAMS = 8, MOST_STREAMS = 64, MOST_GAPS = 200000, MOST_PAIRS = 1000, MOST_PROMPT = 1 << 17, SHORT_PROMPT = 16,
       SPARE_PAGES = 8, WARM_TOKENS = 60, STAY_TOKENS = 30 };

struct scene {
  struct engine_run run;
  struct engine_bench_stream streams[MOST_STREAMS], longer, guest;
  int32_t n_streams, n_vocab, each, prompt[MOST_PROMPT];
  double quiet[MOST_GAPS], gaps[MOST_GAPS], in_ms[MOST_PAIRS], back_ms[MOST_PAIRS];
  int64_t n_quiet, n_gaps;
};

static struct scene scene;

/* Between the batches (ms), as the engine tells of its steps while is_on. */
static struct { atomic_bool is_on; int64_t n; double host[MOST_GAPS]; } step_log;

/* engine_options.on_step */
static void note_step(void *user, const struct engine_step_times *t)
{
  (void)user;
  if (atomic_load(&step_log.is_on) && step_log.n < MOST_GAPS)
    step_log.host[step_log.n++] = (double)(t->step_us - t->batch_us - t->sliced_us) * 1e-3;
}

static int32_t pages_of(int64_t n_tokens) { return (int32_t)((n_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS); }

static void take_all(struct scene *c, double *gaps, int64_t *n_gaps)
{
  for (int i = 0; i < c->n_streams && c->streams[i].request; i++) engine_bench_take(&c->streams[i], gaps, MOST_GAPS, n_gaps);
}

/* Until it has said n tokens more; the streams' gaps are kept. */
static void listen(struct scene *c, struct engine_bench_stream *to, int64_t n, double *gaps, int64_t *n_gaps)
{
  int64_t n_ignored = MOST_GAPS;
  for (n += to->n; to->n < n && !to->is_done; engine_bench_nap()) {
    take_all(c, gaps, n_gaps);
    if (to < c->streams || to >= c->streams + c->n_streams) engine_bench_take(to, gaps, MOST_GAPS, &n_ignored);
  }
}

/* Memory for the streams and the long sequence to their ends, and hardly more. */
static bool open_engine(struct scene *c, const struct engine_bench_options *o)
{
  struct instance_options more = {.max_num_seqs = c->n_streams + 2, .swap_bytes = (uint64_t)1 << 30, .on_step = note_step,
                                  .itl_target_us = (int64_t)(o->itl_target_ms * 1000)};
  struct instance_info info;
  if (!engine_bench_open(&c->run, o, more, o->prompt + c->each)) return false;
  instance_info(c->run.instance, &info);
  instance_close(c->run.instance);
  more.kv_cache_bytes = info.page_bytes * (uint64_t)(pages_of(o->prompt + c->each) + c->n_streams * pages_of(SHORT_PROMPT + c->each) +
                                                     SPARE_PAGES);
  if (!engine_bench_open(&c->run, o, more, o->prompt + c->each)) return false;
  c->n_vocab = instance_model(c->run.instance)->config.n_vocab;
  return true;
}

static void begin(struct scene *c, struct engine_bench_stream *s, enum sits_class service_class, int64_t n, uint32_t seed)
{
  engine_bench_prompt(c->prompt, n, c->n_vocab, seed);
  *s = (struct engine_bench_stream){.request = engine_bench_submit_as(&c->run, service_class, c->prompt, n, c->each)};
}

static void end(struct engine_bench_stream *s)
{
  sits_request_cancel(s->request, -1);
  if (!s->is_done) engine_bench_await(s->request);
  sits_request_release(s->request);
}

static void swap_once(struct scene *c, int64_t pair)
{
  const int64_t came_us = clock_monotonic_us();
  atomic_store(&step_log.is_on, true);
  begin(c, &c->guest, SITS_CLASS_NORMAL, SHORT_PROMPT, 5000 + (uint32_t)pair);
  listen(c, &c->guest, 1, c->gaps, &c->n_gaps);
  c->in_ms[pair] = (double)(c->guest.last_us - came_us) * 1e-3;
  listen(c, &c->guest, STAY_TOKENS, c->gaps, &c->n_gaps);
  const int64_t left_us = clock_monotonic_us();
  int64_t n_ignored = MOST_GAPS;
  engine_bench_take(&c->longer, c->gaps, MOST_GAPS, &n_ignored); /* from before */
  end(&c->guest);
  listen(c, &c->longer, 1, c->gaps, &c->n_gaps);
  atomic_store(&step_log.is_on, false);
  c->back_ms[pair] = (double)(c->longer.last_us - left_us) * 1e-3;
  listen(c, &c->streams[0], STAY_TOKENS, c->quiet, &c->n_quiet);
}

bool engine_bench_swap(const struct engine_bench_options *o, json_t *rows)
{
  struct scene *c = &scene;
  struct engine_stats stats;
  const int64_t n_pairs = o->pairs;
  c->n_streams = o->streams > 0 ? (int32_t)o->streams : DEFAULT_STREAMS;
  c->each = (int32_t)(2 * WARM_TOKENS + n_pairs * 6 * STAY_TOKENS);
  if (o->prompt > MOST_PROMPT) fprintf(stderr, "sits2026-bench engine: --prompt is at most %d here\n", MOST_PROMPT);
  if (o->prompt > MOST_PROMPT || !open_engine(c, o)) return false;
  begin(c, &c->guest, SITS_CLASS_NORMAL, SHORT_PROMPT, 9); /* from it the planner learns how long answers are */
  engine_bench_await(c->guest.request);
  sits_request_release(c->guest.request);
  begin(c, &c->longer, SITS_CLASS_LOW, o->prompt, 7);
  listen(c, &c->longer, 1, c->quiet, &c->n_quiet);
  for (int i = 0; i < c->n_streams; i++) begin(c, &c->streams[i], SITS_CLASS_NORMAL, SHORT_PROMPT, 100 + (uint32_t)i);
  listen(c, &c->streams[c->n_streams - 1], WARM_TOKENS, c->gaps, &c->n_gaps);
  c->n_quiet = c->n_gaps = 0;
  listen(c, &c->streams[0], WARM_TOKENS, c->quiet, &c->n_quiet);
  for (int64_t i = 0; i < n_pairs; i++) swap_once(c, i);
  engine_stats(c->run.engine, &stats);
  bool is_whole = true;
  for (int i = 0; i < c->n_streams; i++) is_whole = is_whole && !c->streams[i].is_done;
  if (!is_whole || c->longer.is_done) fprintf(stderr, "sits2026-bench engine: a stream came to its end\n");
  for (int i = 0; i < c->n_streams; i++) end(&c->streams[i]);
  end(&c->longer);
  instance_close(c->run.instance);
  json_t *row = json_pack("{s:i, s:I, s:I, s:I, s:I}", "streams", (int)c->n_streams, "prompt", (json_int_t)o->prompt, "swaps",
                          (json_int_t)stats.n_preemptions_swapped, "gaps", (json_int_t)c->n_gaps, "quiet_gaps", (json_int_t)c->n_quiet);
  static const double at[] = {50, 99, 100};
  static const char *const names[] = {"p50", "p99", "worst"};
  fprintf(stderr, "swap: %llu of %lld; gaps (ms)", (unsigned long long)stats.n_preemptions_swapped, (long long)n_pairs);
  for (int i = 0; i < 3; i++) {
    char name[32];
    const double quiet = bench_percentile(c->quiet, c->n_quiet, at[i]), beside = bench_percentile(c->gaps, c->n_gaps, at[i]);
    snprintf(name, sizeof name, "itl_%s_ms", names[i]);
    json_object_set_new(row, name, json_real(beside));
    snprintf(name, sizeof name, "quiet_%s_ms", names[i]);
    json_object_set_new(row, name, json_real(quiet));
    const double host = bench_percentile(step_log.host, step_log.n, at[i]);
    snprintf(name, sizeof name, "host_%s_ms", names[i]);
    json_object_set_new(row, name, json_real(host));
    fprintf(stderr, " %s %.2f (%.2f, host %.2f)", names[i], beside, quiet, host);
  }
  const double in_ms = bench_percentile(c->in_ms, n_pairs, 50), back_ms = bench_percentile(c->back_ms, n_pairs, 50);
  fprintf(stderr, "; first token of who came %.1f, back after %.1f\n", in_ms, back_ms);
  json_object_set_new(row, "came_first_token_p50_ms", json_real(in_ms));
  json_object_set_new(row, "back_p50_ms", json_real(back_ms));
  json_array_append_new(rows, row);
  return is_whole;
}
