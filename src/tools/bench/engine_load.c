/* Several kinds of clients on one engine: what each gets of it. See engine.c for the scenarios.
 * One thread plays all clients; prompts are random, so that nothing comes from the prefix cache. */
#include <math.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"

enum { MOST_LIVE = 400, MOST_PROMPT = 256, QUEUE = 128, WARM_US = 3000000 };

static const double OVERLOAD = 4, HIGH_LOAD = 0.3; /* of what the machine can do */

/* One kind of client: open loop with Poisson arrivals at a rate, or closed loop with so many at a time. */
struct kind {
  const char *name;
  enum sits_class service_class;
  uint64_t tenant;
  int32_t n_prompt, n_output, concurrency;
  double rate;                     /* requests a second; 0 = closed loop */
  int32_t n_live;
  int64_t next_us, n_sent, n_refused, n_done, n_tokens; /* tokens read and drawn, after the warm-up as n_done */
  double *ttft_ms;                 /* [n_sent] at most; owned by the caller */
  int64_t n_ttft;
};

/* What the engine itself took. */
struct engine_time { double step_us, serial_us; };

struct client { struct sits_request *request; struct kind *kind; int64_t n; };

static void send(struct engine_run *run, struct client *clients, struct kind *kind, int32_t n_vocab)
{
  int32_t prompt[MOST_PROMPT], at = 0;
  struct sits_error err;
  while (at < MOST_LIVE && clients[at].request) at++;
  uint64_t number = (uint64_t)kind->n_sent++;
  if (at == MOST_LIVE) {
    kind->n_refused++;
    return;
  }
  engine_bench_prompt(prompt, kind->n_prompt, n_vocab, (uint32_t)hash_mix(number, kind->tenant));
  struct sits_request_params p = {.prompt = prompt, .n_prompt = kind->n_prompt, .n_choices = 1, .service_class = kind->service_class,
                                  .tenant = kind->tenant, .id = "bench"};
  p.sampling = (struct sits_sampling){.top_p = 1, .repetition_penalty = 1, .max_tokens = kind->n_output, .ignore_eos = true,
                                      .n_top_logprobs = -1, .n_prompt_logprobs = -1};
  clients[at] = (struct client){.kind = kind};
  if (sits_engine_submit(run->engine, &p, &clients[at].request, &err) != SITS_OK) {
    clients[at].request = NULL;
    kind->n_refused++;
    return;
  }
  kind->n_live++;
}

static void arrive(struct engine_run *run, struct client *clients, struct kind *kind, int64_t now_us, int32_t n_vocab)
{
  while (kind->rate > 0 && kind->next_us <= now_us) {
    double u = ((double)(hash_mix(kind->tenant + 17, (uint64_t)kind->n_sent) >> 11) + 0.5) * 0x1p-53;
    send(run, clients, kind, n_vocab);
    kind->next_us += (int64_t)(-log(u) / kind->rate * 1e6);
  }
  while (kind->rate <= 0 && kind->n_live < kind->concurrency) send(run, clients, kind, n_vocab);
}

static void take(struct client *client, bool is_warm, int64_t most_ttft)
{
  struct sits_event e;
  struct kind *kind = client->kind;
  while (client->request && sits_request_poll(client->request, &e) == SITS_OK) {
    if (e.kind == SITS_EVENT_TOKEN) {
      if (is_warm) kind->n_tokens += client->n == 0 ? kind->n_prompt + 1 : 1;
      if (client->n++ > 0 || !is_warm || kind->n_ttft == most_ttft) continue;
      struct sits_request_timing t;
      sits_request_timing(client->request, &t);
      kind->ttft_ms[kind->n_ttft++] = (double)(t.first_token_us - t.submitted_us) * 1e-3;
    } else if (e.kind == SITS_EVENT_FINISH) {
      kind->n_done += is_warm;
      kind->n_live--;
      sits_request_release(client->request);
      client->request = NULL;
    }
  }
}

/* All kinds together for the options' seconds after a warm-up. */
static bool run_kinds(const struct engine_bench_options *o, struct kind *kinds, int32_t n_kinds, struct engine_time *time)
{
  enum { MOST_TTFT = 100000 };
  struct engine_run run;
  struct client *clients = mem_calloc(MOST_LIVE, sizeof *clients);
  const struct instance_options more = {.max_num_seqs = 16, .max_waiting_requests = QUEUE,
                                        .itl_target_us = (int64_t)(o->itl_target_ms * 1000)};
  int64_t longest = 0;
  for (int32_t k = 0; k < n_kinds; k++)
    if (longest < kinds[k].n_prompt + kinds[k].n_output) longest = kinds[k].n_prompt + kinds[k].n_output;
  bool is_good = clients && engine_bench_open(&run, o, more, longest);
  for (int32_t k = 0; k < n_kinds; k++) {
    kinds[k].ttft_ms = mem_calloc(MOST_TTFT, sizeof(double));
    is_good = is_good && kinds[k].ttft_ms;
  }
  if (is_good) {
    int32_t n_vocab = instance_model(run.instance)->config.n_vocab;
    int64_t started_us = clock_monotonic_us(), warm_us = started_us + WARM_US, end_us = warm_us + o->seconds * 1000000;
    for (int32_t k = 0; k < n_kinds; k++) kinds[k].next_us = started_us;
    for (int64_t now_us; (now_us = clock_monotonic_us()) < end_us; engine_bench_nap()) {
      for (int32_t k = 0; k < n_kinds; k++) arrive(&run, clients, &kinds[k], now_us, n_vocab);
      for (int32_t i = 0; i < MOST_LIVE; i++) take(&clients[i], now_us >= warm_us, MOST_TTFT);
    }
    struct engine_stats stats;
    engine_stats(run.engine, &stats);
    *time = (struct engine_time){stats.step_us_ewma, stats.serial_us_ewma};
    for (int32_t i = 0; i < MOST_LIVE; i++) sits_request_release(clients[i].request);
    instance_close(run.instance);
  }
  mem_free(clients);
  return is_good;
}

static json_t *row_of(const char *name, const struct engine_bench_options *o, struct kind *kind)
{
  double seconds = (double)o->seconds;
  json_t *row = json_pack("{s:s, s:s, s:f, s:I, s:I, s:I, s:f, s:o}", "case", name, "kind", kind->name, "rate", kind->rate, "sent",
                          (json_int_t)kind->n_sent, "refused", (json_int_t)kind->n_refused, "done", (json_int_t)kind->n_done,
                          "tokens_per_s", (double)kind->n_tokens / seconds, "ttft_ms", bench_summary(kind->ttft_ms, kind->n_ttft));
  fprintf(stderr, "%-10s %-8s %6.2f requests/s sent, %lld refused, %lld done, %.1f tokens/s, first token p50 %.1f p99 %.1f ms\n", name,
          kind->name, (double)kind->n_sent / (seconds + WARM_US * 1e-6), (long long)kind->n_refused, (long long)kind->n_done,
          (double)kind->n_tokens / seconds, bench_percentile(kind->ttft_ms, kind->n_ttft, 50),
          bench_percentile(kind->ttft_ms, kind->n_ttft, 99));
  mem_free(kind->ttft_ms);
  kind->ttft_ms = NULL;
  return row;
}

bool engine_bench_classes(const struct engine_bench_options *o, json_t *rows)
{
  const struct kind low = {.name = "low", .service_class = SITS_CLASS_LOW, .tenant = 2, .n_prompt = 192, .n_output = 32};
  struct kind full[1] = {low}, alone[1] = {{.name = "high", .service_class = SITS_CLASS_HIGH, .tenant = 1, .n_prompt = 96, .n_output = 16}};
  full[0].concurrency = 32;
  struct engine_time time;
  if (!run_kinds(o, full, 1, &time)) return false;
  double can_do = (double)full[0].n_done / (double)o->seconds;
  json_array_append_new(rows, row_of("capacity", o, &full[0]));
  alone[0].rate = HIGH_LOAD * can_do;
  struct kind both[2] = {alone[0], low};
  both[1].rate = OVERLOAD * can_do;
  if (!run_kinds(o, alone, 1, &time) || !run_kinds(o, both, 2, &time)) return false;
  double p99_alone = bench_percentile(alone[0].ttft_ms, alone[0].n_ttft, 99), p99 = bench_percentile(both[0].ttft_ms, both[0].n_ttft, 99);
  fprintf(stderr, "classes: high class first token p99 %.1f ms alone, %.1f ms under overload: %.2fx\n", p99_alone, p99, p99 / p99_alone);
  json_array_append_new(rows, row_of("alone", o, &alone[0]));
  json_array_append_new(rows, row_of("overload", o, &both[0]));
  json_array_append_new(rows, row_of("overload", o, &both[1]));
  json_array_append_new(rows, json_pack("{s:s, s:f, s:f, s:f}", "case", "summary", "ttft_p99_ratio", p99 / p99_alone, "step_us",
                                        time.step_us, "serial_us", time.serial_us));
  return true;
}

bool engine_bench_tenants(const struct engine_bench_options *o, json_t *rows)
{
  struct kind kinds[2] = {{.name = "few", .tenant = 1, .n_prompt = 128, .n_output = 24, .concurrency = 10},
                          {.name = "many", .tenant = 2, .n_prompt = 128, .n_output = 24, .concurrency = 100}};
  for (int i = 0; i < 2; i++) kinds[i].service_class = SITS_CLASS_NORMAL;
  struct engine_time time;
  if (!run_kinds(o, kinds, 2, &time)) return false;
  double share = (double)kinds[0].n_tokens / (double)(kinds[0].n_tokens + kinds[1].n_tokens);
  fprintf(stderr, "tenants: the one with a tenth of the requests gets %.1f %% of the tokens\n", 100 * share);
  json_array_append_new(rows, row_of("tenants", o, &kinds[0]));
  json_array_append_new(rows, row_of("tenants", o, &kinds[1]));
  json_array_append_new(rows, json_pack("{s:s, s:f, s:f, s:f}", "case", "summary", "share_of_tokens", share, "step_us", time.step_us,
                                        "serial_us", time.serial_us));
  return true;
}
