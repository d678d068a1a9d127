/* sits2026-bench engine: what the engine does with a real model, in process, without a server.
 *
 *   --scenario stall        streams decode, a long prompt arrives: inter-token P99 and the prompt's reading time, for several targets
 *                           (engine_stall.c)
 *   --scenario speculation  texts that repeat themselves with and without prompt lookup, or what it costs many streams
 *                           (engine_speculation.c)
 *   --scenario prefix       chats with a common beginning: time to the first token of the first and of the later ones
 *
 *   --scenario swap         streams decode while a long sequence of low class loses its pages to host memory and gets them back
 *                           (engine_swap.c)
 *   --scenario classes      high-class requests alone and beside four times what the machine can do of low class
 *                           (engine_classes.c)
 *   --scenario tenants      two tenants, one with ten times as many requests: who gets how many tokens (engine_load.c)
 *
 * Times are those that the engine writes into its events. Entry point: bench_engine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"

#define AT(field) offsetof(struct engine_bench_options, field)
static const struct option_spec specs[] = {
    {"model", OPTION_STRING, AT(model), "", 0, 0, "", 0, NULL, "Options", "Model file or directory."},
    {"device", OPTION_ENUM, AT(device), "auto", 0, 0, "", 0, "auto|cpu|cuda", "Options", "Backend."},
    {"scenario", OPTION_ENUM, AT(scenario), "stall", 0, 0, "", 0, "stall|speculation|prefix|classes|tenants|placement|swap", "Options",
     "What is measured."},
    {"threads", OPTION_INT, AT(threads), "0", 0, 1024, "threads", 0, NULL, "Options", "CPU threads; 0 = one per core."},
    {"kv-cache-dtype", OPTION_ENUM, AT(kv_cache_dtype), "auto", 0, 0, "", 0, "auto|f16|int8|int4|fp4|fp4-sparse", "Options",
     "Cache codec."},
    {"prompt", OPTION_INT, AT(prompt), "2000", 16, 1e6, "tokens", 0, NULL, "stall, prefix, swap", "Long prompt, or common part."},
    {"quiet-tokens", OPTION_INT, AT(quiet_tokens), "300", 40, 1e6, "tokens", 0, NULL, "stall",
     "What each stream says undisturbed; as much as while the prompt is read, since contexts grow meanwhile and steps with them."},
    {"stream-prompt", OPTION_INT, AT(stream_prompt), "64", 1, 1e6, "tokens", 0, NULL, "stall", "What each stream begins with."},
    {"chats", OPTION_INT, AT(chats), "64", 2, 1e4, "chats", 0, NULL, "prefix", "Requests with the common beginning."},
    {"text", OPTION_STRING, AT(text), "", 0, 0, "", 0, NULL, "speculation", "File whose passages are repeated."},
    {"texts", OPTION_INT, AT(texts), "10", 1, 1000, "passages", 0, NULL, "speculation", "Passages, or requests of a run."},
    {"output", OPTION_INT, AT(output), "96", 1, 1e5, "tokens", 0, NULL, "speculation", "Tokens per answer."},
    {"draft", OPTION_INT, AT(draft), "8", 1, 64, "tokens", 0, NULL, "speculation", "Longest draft."},
    {"streams", OPTION_INT, AT(streams), "0", 0, 64, "requests", 0, NULL, "stall, speculation, swap",
     "At once; 0: 4 for stall, 8 for swap, 1 for speculation, where more mean pairs of runs with and without, each of --texts requests."},
    {"step-tokens", OPTION_INT, AT(step_tokens), "512", 16, 1e6, "tokens", 0, NULL, "stall", "Most tokens of a step beside the streams."},
    {"pairs", OPTION_INT, AT(pairs), "30", 1, 1000, "pairs", 0, NULL, "speculation, swap, classes",
     "Of runs, where there are several streams; of swaps; of phases without and with low class."},
    {"seconds", OPTION_INT, AT(seconds), "30", 1, 3600, "s", 0, NULL, "classes, tenants, placement", "Each run or phase."},
    {"itl-target-ms", OPTION_FLOAT, AT(itl_target_ms), "0", 0, 1e5, "ms", 0, NULL, "classes, tenants, placement", "Inter-token target."},
    {"targets", OPTION_STRING, AT(targets), "1,150,200,300", 0, 0, "", 0, NULL, "stall",
     "Targets in percent of the undisturbed P99; below 100: no target, whole prompts."},
    {"quiet-ms", OPTION_FLOAT, AT(quiet_ms), "0", 0, 1e5, "ms", 0, NULL, "stall", "Undisturbed P99; 0: of the case of whole prompts."},
    {"trace", OPTION_STRING, AT(trace), "", 0, 0, "", 0, NULL, "placement", "CSV with TIMESTAMP,ContextTokens,GeneratedTokens."},
    {"speeds", OPTION_STRING, AT(speeds), "4", 0, 0, "", 0, NULL, "placement", "How much faster than in the trace requests come."},
    {"max-num-seqs", OPTION_INT, AT(max_num_seqs), "256", 1, 4096, "sequences", 0, NULL, "placement", "Decoded together."},
    {"ttft-target-ms", OPTION_FLOAT, AT(ttft_target_ms), "1000", 0, 1e6, "ms", 0, NULL, "placement", "First-token target."},
    {"kv-cache-gb", OPTION_FLOAT, AT(kv_cache_gb), "1", 0.001, 1000, "GB", 0, NULL, "stall, placement", "Pages of each device."},
    {"json", OPTION_STRING, AT(json), "", 0, 0, "", 0, NULL, "Options", "File for the result; default stdout."},
};

bool engine_bench_open(struct engine_run *run, const struct engine_bench_options *o, struct instance_options more, int64_t longest)
{
  struct sits_error err = {0};
  more.model_path = o->model;
  more.device = o->device;
  more.n_threads = (int32_t)o->threads;
  more.kv_codec = o->kv_cache_dtype;
  more.kv_cache_bytes = more.kv_cache_bytes ? more.kv_cache_bytes : (uint64_t)1 << 30;
  run->options = o;
  run->instance = NULL;
  struct instance_info info;
  enum sits_status status = instance_open(&more, &run->instance, &err);
  if (status == SITS_OK) instance_info(run->instance, &info);
  if (status == SITS_OK && longest > info.max_model_len)
    status = sits_fail(&err, SITS_CONTEXT_LENGTH, "requests of %lld tokens are more than the %d that this model takes here",
                       (long long)longest, (int)info.max_model_len);
  if (status == SITS_OK) status = instance_start(run->instance, &err);
  if (status != SITS_OK) {
    fprintf(stderr, "sits2026-bench engine: %s\n", err.text);
    instance_close(run->instance);
    run->instance = NULL;
    return false;
  }
  run->engine = instance_engine(run->instance);
  return true;
}

struct sits_request *engine_bench_submit_as(struct engine_run *run, enum sits_class service_class, const int32_t *prompt, int64_t n,
                                            int32_t max_tokens)
{
  struct sits_request_params p = {.prompt = prompt, .n_prompt = (int32_t)n, .n_choices = 1,
                                  .service_class = service_class, .id = "bench"};
  p.sampling = (struct sits_sampling){.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens, .ignore_eos = true,
                                      .n_top_logprobs = -1, .n_prompt_logprobs = -1};
  struct sits_request *request = NULL;
  struct sits_error err = {0};
  if (sits_engine_submit(run->engine, &p, &request, &err) != SITS_OK) fprintf(stderr, "sits2026-bench engine: %s\n", err.text);
  return request;
}

struct sits_request *engine_bench_submit(struct engine_run *run, const int32_t *prompt, int64_t n, int32_t max_tokens)
{
  return engine_bench_submit_as(run, SITS_CLASS_NORMAL, prompt, n, max_tokens);
}

void engine_bench_take(struct engine_bench_stream *s, double *gaps, int64_t most, int64_t *n_gaps)
{
  struct sits_event e;
  while (sits_request_poll(s->request, &e) == SITS_OK) {
    if (e.kind == SITS_EVENT_FINISH) s->is_done = true;
    if (e.kind != SITS_EVENT_TOKEN) continue;
    if (s->n++ > 0 && *n_gaps < most) gaps[(*n_gaps)++] = (double)(e.emitted_us - s->last_us) * 1e-3;
    s->last_us = e.emitted_us;
  }
}

void engine_bench_nap(void)
{
  nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
}

void engine_bench_await(struct sits_request *request)
{
  struct sits_event e = {0};
  while (request && e.kind != SITS_EVENT_FINISH) {
    if (sits_request_poll(request, &e) != SITS_OK) engine_bench_nap();
  }
}

void engine_bench_prompt(int32_t *tokens, int64_t n, int32_t n_vocab, uint32_t seed)
{
  for (int64_t i = 0; i < n; i++) {
    seed = seed * 1664525u + 1013904223u;
    tokens[i] = (int32_t)((seed >> 8) % (uint32_t)(n_vocab - 300)) + 256;
  }
}

static bool run_prefix(const struct engine_bench_options *o, json_t *rows)
{
  struct engine_run run;
  int32_t *prompt = mem_calloc((size_t)o->prompt + 16, sizeof *prompt);
  double *ttft = mem_calloc((size_t)o->chats, sizeof *ttft), first = 0;
  const struct instance_options more = {.max_num_seqs = 8, .prefix_caching = true};
  if (!prompt || !ttft || !engine_bench_open(&run, o, more, o->prompt + 16 + 1)) {
    mem_free(prompt);
    mem_free(ttft);
    return false;
  }
  int32_t n_vocab = instance_model(run.instance)->config.n_vocab;
  engine_bench_prompt(prompt, o->prompt, n_vocab, 5);
  for (int64_t i = 0; i < o->chats; i++) {
    engine_bench_prompt(prompt + o->prompt, 16, n_vocab, 1000 + (uint32_t)i);
    struct sits_request *request = engine_bench_submit(&run, prompt, o->prompt + 16, 1);
    engine_bench_await(request);
    struct sits_request_timing t;
    sits_request_timing(request, &t);
    if (i == 0) first = (double)(t.first_token_us - t.submitted_us) * 1e-3;
    else ttft[i - 1] = (double)(t.first_token_us - t.submitted_us) * 1e-3;
    sits_request_release(request);
  }
  struct engine_stats stats;
  engine_stats(run.engine, &stats);
  double later = bench_percentile(ttft, o->chats - 1, 50);
  fprintf(stderr, "prefix: first token after %.1f ms, later %.1f ms (%.1f %%), %llu of %llu tokens from the cache\n", first, later,
          100 * later / first, (unsigned long long)stats.prefix_hit_tokens, (unsigned long long)stats.prefix_query_tokens);
  /* Whole pages of the common part, for every chat but the first. */
  int64_t expected = (o->chats - 1) * (o->prompt / KV_PAGE_TOKENS * KV_PAGE_TOKENS);
  json_array_append_new(rows, json_pack("{s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I}", "first_ms", first, "later_p50_ms", later,
                                        "later_p99_ms", bench_percentile(ttft, o->chats - 1, 99), "later_over_first", later / first,
                                        "hit_tokens", (json_int_t)stats.prefix_hit_tokens, "expected_hit_tokens", (json_int_t)expected,
                                        "computed_tokens", (json_int_t)stats.prompt_tokens_computed, "query_tokens",
                                        (json_int_t)stats.prefix_query_tokens));
  instance_close(run.instance);
  mem_free(prompt);
  mem_free(ttft);
  return true;
}

int bench_engine(int argc, char **argv)
{
  struct engine_bench_options o;
  struct option_set set;
  int status;
  if (!bench_parse("engine", "the engine with a real model, in process", &set, specs, sizeof specs / sizeof specs[0], &o, argc, argv,
                   &status)) {
    return status;
  }
  log_set_level(LOG_WARN);
  json_t *out = bench_header("engine", argc, argv), *rows = json_array();
  bool is_good = o.model && out && rows;
  if (!o.model) fprintf(stderr, "sits2026-bench engine: needs --model\n");
  if (is_good && strcmp(o.scenario, "stall") == 0) is_good = engine_bench_stall(&o, rows);
  else if (is_good && strcmp(o.scenario, "speculation") == 0) is_good = engine_bench_speculation(&o, rows);
  else if (is_good && strcmp(o.scenario, "prefix") == 0) is_good = run_prefix(&o, rows);
  else if (is_good && strcmp(o.scenario, "classes") == 0) is_good = engine_bench_classes(&o, rows);
  else if (is_good && strcmp(o.scenario, "placement") == 0) is_good = engine_bench_placement(&o, rows);
  else if (is_good && strcmp(o.scenario, "swap") == 0) is_good = engine_bench_swap(&o, rows);
  else if (is_good) is_good = engine_bench_tenants(&o, rows);
  if (is_good) {
    json_object_set_new(out, "scenario", json_string(o.scenario));
    json_object_set_new(out, "results", rows);
    is_good = bench_write_json(out, o.json);
  } else {
    json_decref(rows);
    json_decref(out);
  }
  option_set_fini(&set);
  return is_good ? 0 : 1;
}
