/* Two devices under a request trace, in process: as replicas that share the arrivals, and one for prompts and one that decodes
 * (--placement). First a few prompts alone on each: their answers must be the same, their first tokens show what handing over costs. One
 * thread plays all clients; prompts are random, so that nothing comes from the prefix cache. Times are the engine's own. Entry point:
 * engine_bench_placement. */
#include <stdio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"
#include "tools/bench/simulate.h"

enum { MOST_LIVE = 4096, MOST_VALUES = 1 << 20, MOST_SPEEDS = 8, PROBES = 8, PROBE_TOKENS = 64, WARM_US = 3000000, LENGTH = 16384 };

static const int32_t PROBE_LENGTHS[PROBES] = {100, 129, 300, 600, 1100, 2000, 4000, 8000};

struct live { struct sits_request *request; int32_t engine; int64_t n, last_us, submitted_us; };

struct lab {
  const struct engine_bench_options *options;
  struct engine_run runs[2];
  int32_t n_runs, n_vocab, most_tokens;
  int64_t n_waiting[2];          /* replicas: tokens given to each and not answered */
  struct live *live;             /* [MOST_LIVE] */
  int32_t *prompt;               /* [LENGTH] */
  double *itl_ms, *ttft_ms;      /* [MOST_VALUES] */
  int64_t n_itl, n_ttft, n_tokens, n_refused;
  int32_t probes[2][PROBES][PROBE_TOKENS]; /* answers: split, replica */
};

static struct sits_request *submit(struct lab *lab, int32_t engine, int32_t n_prompt, int32_t n_output, uint32_t seed, float temperature)
{
  struct sits_request *request = NULL;
  struct sits_error err;
  engine_bench_prompt(lab->prompt, n_prompt, lab->n_vocab, seed);
  struct sits_request_params p = {.prompt = lab->prompt, .n_prompt = n_prompt, .n_choices = 1, .service_class = SITS_CLASS_NORMAL,
                                  .id = "bench"};
  p.sampling = (struct sits_sampling){.temperature = temperature, .top_p = 1, .repetition_penalty = 1, .max_tokens = n_output,
                                      .ignore_eos = true, .n_top_logprobs = -1, .n_prompt_logprobs = -1};
  return sits_engine_submit(lab->runs[engine].engine, &p, &request, &err) == SITS_OK ? request : NULL;
}

/* Alone and greedy, each length twice with other tokens: the second time is the one measured. */
static bool probe(struct lab *lab, int mode, json_t *row)
{
  json_t *ttft = json_array();
  for (int i = 0; i < 2 * PROBES; i++) {
    int32_t length = PROBE_LENGTHS[i % PROBES];
    if (length > lab->most_tokens - PROBE_TOKENS) length = lab->most_tokens - PROBE_TOKENS;
    struct sits_request *request = submit(lab, 0, length, PROBE_TOKENS, (uint32_t)i + 1, 0);
    struct sits_event e = {.kind = SITS_EVENT_TOKEN};
    int32_t n = 0;
    if (!request) return false;
    for (;; engine_bench_nap()) {
      while (e.kind != SITS_EVENT_FINISH && sits_request_poll(request, &e) == SITS_OK) {
        if (e.kind == SITS_EVENT_TOKEN && i < PROBES) lab->probes[mode][i][n++] = e.token;
      }
      if (e.kind == SITS_EVENT_FINISH) break;
    }
    struct sits_request_timing t;
    sits_request_timing(request, &t);
    sits_request_release(request);
    if (e.status != SITS_OK) return false;
    if (i >= PROBES)
      json_array_append_new(ttft, json_pack("[i, f]", length, (double)(t.first_token_us - t.submitted_us) * 1e-3));
  }
  json_object_set_new(row, "first_token_alone_ms", ttft);
  return true;
}

static void take(struct lab *lab, struct live *live, bool is_warm)
{
  struct sits_event e;
  while (live->request && sits_request_poll(live->request, &e) == SITS_OK) {
    if (e.kind == SITS_EVENT_TOKEN) {
      double ms = (double)(e.emitted_us - (live->n ? live->last_us : live->submitted_us)) * 1e-3;
      if (is_warm && live->n && lab->n_itl < MOST_VALUES) lab->itl_ms[lab->n_itl++] = ms;
      if (is_warm && !live->n && lab->n_ttft < MOST_VALUES) lab->ttft_ms[lab->n_ttft++] = ms;
      lab->n_tokens += is_warm;
      live->n++;
      live->last_us = e.emitted_us;
    } else if (e.kind == SITS_EVENT_FINISH) {
      struct sits_request_timing t;
      sits_request_timing(live->request, &t);
      lab->n_waiting[live->engine] -= t.n_prompt_tokens;
      sits_request_release(live->request);
      live->request = NULL;
    }
  }
}

static void arrive(struct lab *lab, const struct simulate_arrival *a, int64_t number)
{
  int32_t n_output = a->n_output < lab->most_tokens / 2 ? a->n_output : lab->most_tokens / 2;
  int32_t n_prompt = a->n_prompt < lab->most_tokens - n_output ? a->n_prompt : lab->most_tokens - n_output, at = 0;
  while (at < MOST_LIVE && lab->live[at].request) at++;
  int32_t engine = lab->n_runs == 2 && lab->n_waiting[1] < lab->n_waiting[0];
  struct live *live = at < MOST_LIVE ? &lab->live[at] : NULL;
  if (live) *live = (struct live){.engine = engine, .submitted_us = clock_monotonic_us()};
  if (live) live->request = submit(lab, engine, n_prompt, n_output, (uint32_t)number * 7919 + 13, 1);
  if (!live || !live->request) lab->n_refused++;
  else lab->n_waiting[engine] += n_prompt;
}

static json_t *run_speed(struct lab *lab, double speed, const struct simulate_arrival *arrivals, int64_t n_arrivals)
{
  int64_t begun_us = clock_monotonic_us(), warm_us = begun_us + WARM_US, end_us = warm_us + lab->options->seconds * 1000000, n = 0;
  struct engine_stats before, after;
  engine_stats(lab->runs[0].engine, &before);
  lab->n_itl = lab->n_ttft = lab->n_tokens = lab->n_refused = lab->n_waiting[0] = lab->n_waiting[1] = 0;
  for (int64_t now_us; (now_us = clock_monotonic_us()) < end_us; engine_bench_nap()) {
    for (; n < n_arrivals && begun_us + (int64_t)(arrivals[n].at_us / speed) <= now_us; n++) arrive(lab, &arrivals[n], n);
    for (int32_t i = 0; i < MOST_LIVE; i++) take(lab, &lab->live[i], now_us >= warm_us);
  }
  for (int32_t i = 0; i < MOST_LIVE; i++) {
    sits_request_release(lab->live[i].request);
    lab->live[i].request = NULL;
  }
  for (int32_t i = 0; i < lab->n_runs; i++) {
    do {
      engine_bench_nap();
      engine_stats(lab->runs[i].engine, &after);
    } while (after.n_running > 0 || after.n_pages_used > 0);
  }
  engine_stats(lab->runs[0].engine, &after);
  return json_pack("{s:f, s:I, s:I, s:f, s:o, s:o, s:I, s:I, s:I}", "speed", speed, "arrived", (json_int_t)n, "refused",
                   (json_int_t)lab->n_refused, "output_tokens_per_s", (double)lab->n_tokens / (double)lab->options->seconds, "ttft_ms",
                   bench_summary(lab->ttft_ms, lab->n_ttft), "itl_ms", bench_summary(lab->itl_ms, lab->n_itl), "handed_over",
                   (json_int_t)(after.placement_sent - before.placement_sent), "declined",
                   (json_int_t)(after.placement_declined - before.placement_declined), "pages_sent",
                   (json_int_t)(after.placement_pages - before.placement_pages));
}

/* is_split: one engine over both devices; else two. */
static bool run_mode(struct lab *lab, bool is_split, const struct simulate_arrival *arrivals, int64_t n_arrivals, json_t *rows)
{
  const struct engine_bench_options *o = lab->options;
  int64_t speeds[MOST_SPEEDS];
  int n_speeds = bench_parse_list(o->speeds, speeds, MOST_SPEEDS);
  struct instance_options more = {.max_num_seqs = (int32_t)o->max_num_seqs, .prefix_caching = true, .max_waiting_requests = 4096,
                                  .kv_cache_bytes = (uint64_t)(o->kv_cache_gb * 1e9),
                                  .itl_target_us = (int64_t)(o->itl_target_ms * 1000),
                                  .ttft_target_us = (int64_t)(o->ttft_target_ms * 1000), .has_placement = is_split, .decode_device = 1};
  bool is_good = n_speeds > 0;
  lab->n_runs = is_split ? 1 : 2;
  for (int i = 0; i < lab->n_runs; i++) {
    more.device_ordinal = i;
    is_good = is_good && engine_bench_open(&lab->runs[i], o, more, 1);
  }
  if (is_good) {
    struct instance_info info;
    instance_info(lab->runs[0].instance, &info);
    lab->n_vocab = instance_model(lab->runs[0].instance)->config.n_vocab;
    lab->most_tokens = info.max_model_len < LENGTH ? info.max_model_len : LENGTH;
    json_t *mode = json_pack("{s:s, s:o}", "mode", is_split ? "placement" : "replicas", "speeds", json_array());
    is_good = probe(lab, !is_split, mode);
    for (int s = 0; s < n_speeds && is_good; s++) {
      json_t *row = run_speed(lab, (double)speeds[s], arrivals, n_arrivals);
      fprintf(stderr, "%s: ", is_split ? "placement" : "replicas");
      (void)json_dumpf(row, stderr, JSON_COMPACT | JSON_REAL_PRECISION(5));
      fputc('\n', stderr);
      json_array_append_new(json_object_get(mode, "speeds"), row);
    }
    json_array_append_new(rows, mode);
  }
  for (int i = 0; i < lab->n_runs; i++) instance_close(lab->runs[i].instance);
  return is_good;
}

/* Tokens before the first that differs, for each probe. */
static json_t *compare(const struct lab *lab)
{
  json_t *same = json_array();
  for (int i = 0; i < PROBES; i++) {
    int n = 0;
    while (n < PROBE_TOKENS && lab->probes[0][i][n] == lab->probes[1][i][n]) n++;
    json_array_append_new(same, json_integer(n));
  }
  return json_pack("{s:i, s:o}", "answer_tokens", PROBE_TOKENS, "same_tokens", same);
}

bool engine_bench_placement(const struct engine_bench_options *options, json_t *rows)
{
  struct lab lab = {.options = options};
  struct simulate_arrival *arrivals = NULL;
  int64_t n = options->trace ? simulate_read_trace(options->trace, 0, &arrivals) : 0;
  lab.live = mem_calloc(MOST_LIVE, sizeof *lab.live);
  lab.prompt = mem_calloc(LENGTH, sizeof *lab.prompt);
  lab.itl_ms = mem_calloc(MOST_VALUES, sizeof *lab.itl_ms);
  lab.ttft_ms = mem_calloc(MOST_VALUES, sizeof *lab.ttft_ms);
  bool is_good = n > 0 && lab.live && lab.prompt && lab.itl_ms && lab.ttft_ms;
  if (n == 0) fprintf(stderr, "sits2026-bench engine: placement needs --trace\n");
  is_good = is_good && run_mode(&lab, true, arrivals, n, rows) && run_mode(&lab, false, arrivals, n, rows);
  if (is_good) json_array_append_new(rows, compare(&lab));
  mem_free(lab.live);
  mem_free(lab.prompt);
  mem_free(lab.itl_ms);
  mem_free(lab.ttft_ms);
  mem_free(arrivals);
  return is_good;
}
