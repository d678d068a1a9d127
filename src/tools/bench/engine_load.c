/* See engine_load.h; and the scenario of tenants. */
#include "tools/bench/engine_load.h"

#include <math.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "tools/bench/bench.h"

enum { MOST_LIVE = 400, MOST_PROMPT = 256, QUEUE = 128 };

struct load_client { struct sits_request *request; struct load_kind *kind; int64_t n; bool is_counted; };

/* Of the phase at hand: what is sent and said from `from` to `end` counts. */
struct window { int64_t from_us, end_us; };

static bool is_within(const struct window *w, int64_t now_us)
{
  return now_us >= w->from_us && now_us < w->end_us;
}

static void send(struct load *load, struct load_kind *kind, bool is_counted)
{
  int32_t prompt[MOST_PROMPT], at = 0;
  struct sits_error err;
  while (at < MOST_LIVE && load->clients[at].request) at++;
  uint64_t number = kind->next_number++;
  kind->n_sent++;
  if (at == MOST_LIVE) {
    kind->n_refused++;
    return;
  }
  engine_bench_prompt(prompt, kind->n_prompt, load->n_vocab, (uint32_t)hash_mix(number, kind->tenant));
  struct sits_request_params p = {.prompt = prompt, .n_prompt = kind->n_prompt, .n_choices = 1, .service_class = kind->service_class,
                                  .tenant = kind->tenant, .id = "bench"};
  p.sampling = (struct sits_sampling){.top_p = 1, .repetition_penalty = 1, .max_tokens = kind->n_output, .ignore_eos = true,
                                      .n_top_logprobs = -1, .n_prompt_logprobs = -1};
  struct load_client *client = &load->clients[at];
  *client = (struct load_client){.kind = kind, .is_counted = is_counted && kind->firsts};
  if (sits_engine_submit(load->run.engine, &p, &client->request, &err) != SITS_OK) {
    client->request = NULL;
    kind->n_refused++;
    return;
  }
  kind->n_live++;
  kind->n_unread += client->is_counted;
}

static void arrive(struct load *load, struct load_kind *kind, int64_t now_us, const struct window *w)
{
  while (kind->rate > 0 && kind->next_us <= now_us) {
    double u = ((double)(hash_mix(kind->tenant + 17, kind->next_number) >> 11) + 0.5) * 0x1p-53;
    send(load, kind, is_within(w, now_us));
    kind->next_us += (int64_t)(-log(u) / kind->rate * 1e6);
  }
  while (kind->rate <= 0 && kind->n_live < kind->concurrency) send(load, kind, is_within(w, now_us));
}

static void note_first(struct load_client *client)
{
  struct load_kind *kind = client->kind;
  struct sits_request_timing t;
  client->is_counted = false;
  kind->n_unread--;
  if (kind->n_firsts == kind->most_firsts) return;
  sits_request_timing(client->request, &t);
  kind->firsts[kind->n_firsts++] = (struct load_first){t.submitted_us, t.first_scheduled_us, t.first_token_us};
}

static void take(struct load_client *client, bool is_within)
{
  struct sits_event e;
  struct load_kind *kind = client->kind;
  while (client->request && sits_request_poll(client->request, &e) == SITS_OK) {
    if (e.kind == SITS_EVENT_TOKEN) {
      if (is_within) kind->n_tokens += client->n == 0 ? kind->n_prompt + 1 : 1;
      if (client->n++ == 0 && client->is_counted) note_first(client);
    } else if (e.kind == SITS_EVENT_FINISH) {
      kind->n_done += is_within;
      kind->n_live--;
      kind->n_unread -= client->is_counted;
      sits_request_release(client->request);
      client->request = NULL;
    }
  }
}

static void stop(struct load *load)
{
  for (int32_t i = 0; i < MOST_LIVE; i++) {
    if (load->clients[i].request) sits_request_cancel(load->clients[i].request, -1);
  }
  for (int32_t i = 0; i < MOST_LIVE; i++) {
    struct load_client *client = &load->clients[i];
    if (!client->request) continue;
    engine_bench_await(client->request);
    sits_request_release(client->request);
    client->request = NULL;
    client->kind->n_live--;
    client->kind->n_unread -= client->is_counted;
  }
}

void load_phase(struct load *load, struct load_kind *kinds, int32_t n_kinds, uint64_t first_number, int64_t warm_us)
{
  const int64_t started_us = clock_monotonic_us();
  const struct window w = {started_us + warm_us, started_us + warm_us + (int64_t)(load->seconds * 1e6)};
  for (int32_t k = 0; k < n_kinds; k++) {
    kinds[k].next_us = started_us;
    kinds[k].next_number = first_number;
    for (int32_t i = 0; i < kinds[k].n_burst; i++) send(load, &kinds[k], false);
  }
  bool is_open = true;
  for (int64_t now_us = started_us; is_open; engine_bench_nap()) {
    now_us = clock_monotonic_us();
    is_open = now_us < w.end_us;
    for (int32_t k = 0; k < n_kinds; k++) {
      if (now_us < w.end_us || !kinds[k].is_awaited) arrive(load, &kinds[k], now_us, &w);
      is_open = is_open || (kinds[k].is_awaited && kinds[k].n_unread > 0);
    }
    for (int32_t i = 0; i < MOST_LIVE; i++) take(&load->clients[i], is_within(&w, now_us));
  }
  stop(load);
}

bool load_open(struct load *load, const struct engine_bench_options *o, int64_t longest, engine_step_fn on_step, void *step_user)
{
  const struct instance_options more = {.max_num_seqs = 16, .max_waiting_requests = QUEUE, .on_step = on_step, .step_user = step_user,
                                        .itl_target_us = (int64_t)(o->itl_target_ms * 1000)};
  *load = (struct load){.clients = mem_calloc(MOST_LIVE, sizeof *load->clients), .seconds = (double)o->seconds};
  if (!load->clients || !engine_bench_open(&load->run, o, more, longest)) {
    mem_free(load->clients);
    return false;
  }
  load->n_vocab = instance_model(load->run.instance)->config.n_vocab;
  return true;
}

void load_close(struct load *load)
{
  instance_close(load->run.instance);
  mem_free(load->clients);
}

void load_ttft(const struct load_kind *kind, double *ms)
{
  for (int64_t i = 0; i < kind->n_firsts; i++) ms[i] = (double)(kind->firsts[i].token_us - kind->firsts[i].submitted_us) * 1e-3;
}

json_t *load_row(const char *name, const struct load_kind *kind, double seconds)
{
  double *ms = mem_calloc((size_t)kind->n_firsts + 1, sizeof *ms);
  if (!ms) return NULL;
  load_ttft(kind, ms);
  json_t *row = json_pack("{s:s, s:s, s:f, s:I, s:I, s:I, s:f, s:o}", "case", name, "kind", kind->name, "rate", kind->rate, "sent",
                          (json_int_t)kind->n_sent, "refused", (json_int_t)kind->n_refused, "done", (json_int_t)kind->n_done,
                          "tokens_per_s", (double)kind->n_tokens / seconds, "ttft_ms", bench_summary(ms, kind->n_firsts));
  fprintf(stderr, "%-10s %-8s %lld sent, %lld refused, %lld done, %.1f tokens/s, %lld first tokens, p50 %.1f p99 %.1f ms\n", name,
          kind->name, (long long)kind->n_sent, (long long)kind->n_refused, (long long)kind->n_done, (double)kind->n_tokens / seconds,
          (long long)kind->n_firsts, bench_percentile(ms, kind->n_firsts, 50), bench_percentile(ms, kind->n_firsts, 99));
  mem_free(ms);
  return row;
}

bool engine_bench_tenants(const struct engine_bench_options *o, json_t *rows)
{
  enum { MOST_FIRSTS = 10000, WARM_US = 3000000 };
  static struct load_first firsts[2][MOST_FIRSTS];
  struct load load;
  struct load_kind kinds[2] = {{.name = "few", .tenant = 1, .n_prompt = 128, .n_output = 24, .concurrency = 10},
                               {.name = "many", .tenant = 2, .n_prompt = 128, .n_output = 24, .concurrency = 100}};
  for (int i = 0; i < 2; i++) {
    kinds[i].service_class = SITS_CLASS_NORMAL;
    kinds[i].firsts = firsts[i];
    kinds[i].most_firsts = MOST_FIRSTS;
  }
  if (!load_open(&load, o, 128 + 24, NULL, NULL)) return false;
  load_phase(&load, kinds, 2, 0, WARM_US);
  struct engine_stats stats;
  engine_stats(load.run.engine, &stats);
  load_close(&load);
  double share = (double)kinds[0].n_tokens / (double)(kinds[0].n_tokens + kinds[1].n_tokens);
  fprintf(stderr, "tenants: the one with a tenth of the requests gets %.1f %% of the tokens\n", 100 * share);
  json_array_append_new(rows, load_row("tenants", &kinds[0], load.seconds));
  json_array_append_new(rows, load_row("tenants", &kinds[1], load.seconds));
  json_array_append_new(rows, json_pack("{s:s, s:f, s:f, s:f}", "case", "summary", "share_of_tokens", share, "step_us",
                                        stats.step_us_ewma, "serial_us", stats.serial_us_ewma));
  return true;
}
