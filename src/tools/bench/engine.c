/* sits2026-bench engine: what the engine does with a real model, in process, without a server.
 *
 *   --scenario stall        four streams decode, a long prompt arrives: inter-token P99 and the prompt's reading time, for several targets
 *                           (engine_stall.c)
 *   --scenario speculation  one stream over texts that repeat themselves, with and without prompt lookup: speed, and that answers are equal
 *   --scenario prefix       chats with a common beginning: time to the first token of the first and of the later ones
 *
 *   --scenario classes      high-class requests alone and beside four times what the machine can do of low class (engine_load.c)
 *   --scenario tenants      two tenants, one with ten times as many requests: who gets how many tokens (engine_load.c)
 *
 * Times are those that the engine writes into its events. Entry point: bench_engine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "text/tokenizer.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"

enum { PASSAGE = 300, PASSAGE_AGAIN = 24 };

#define AT(field) offsetof(struct engine_bench_options, field)
static const struct option_spec specs[] = {
    {"model", OPTION_STRING, AT(model), "", 0, 0, "", 0, NULL, "Options", "Model file or directory."},
    {"device", OPTION_ENUM, AT(device), "auto", 0, 0, "", 0, "auto|cpu|cuda", "Options", "Backend."},
    {"scenario", OPTION_ENUM, AT(scenario), "stall", 0, 0, "", 0, "stall|speculation|prefix|classes|tenants|placement", "Options",
     "What is measured."},
    {"threads", OPTION_INT, AT(threads), "0", 0, 1024, "threads", 0, NULL, "Options", "CPU threads; 0 = one per core."},
    {"kv-cache-dtype", OPTION_ENUM, AT(kv_cache_dtype), "auto", 0, 0, "", 0, "auto|f16|int8|int4|fp4|fp4-sparse", "Options",
     "Cache codec."},
    {"prompt", OPTION_INT, AT(prompt), "2000", 16, 1e6, "tokens", 0, NULL, "stall, prefix", "Long prompt, or common part."},
    {"quiet-tokens", OPTION_INT, AT(quiet_tokens), "300", 40, 1e6, "tokens", 0, NULL, "stall",
     "What each stream says undisturbed; as much as while the prompt is read, since contexts grow meanwhile and steps with them."},
    {"stream-prompt", OPTION_INT, AT(stream_prompt), "64", 1, 1e6, "tokens", 0, NULL, "stall", "What each stream begins with."},
    {"chats", OPTION_INT, AT(chats), "64", 2, 1e4, "chats", 0, NULL, "prefix", "Requests with the common beginning."},
    {"text", OPTION_STRING, AT(text), "", 0, 0, "", 0, NULL, "speculation", "File whose passages are repeated."},
    {"texts", OPTION_INT, AT(texts), "10", 1, 1000, "passages", 0, NULL, "speculation", "Passages."},
    {"output", OPTION_INT, AT(output), "96", 1, 1e5, "tokens", 0, NULL, "speculation", "Tokens per answer."},
    {"draft", OPTION_INT, AT(draft), "8", 1, 64, "tokens", 0, NULL, "speculation", "Longest draft."},
    {"seconds", OPTION_INT, AT(seconds), "30", 1, 3600, "s", 0, NULL, "classes, tenants, placement", "Each run."},
    {"itl-target-ms", OPTION_FLOAT, AT(itl_target_ms), "0", 0, 1e5, "ms", 0, NULL, "classes, tenants, placement", "Inter-token target."},
    {"targets", OPTION_STRING, AT(targets), "1,150,200,300", 0, 0, "", 0, NULL, "stall",
     "Targets in percent of the undisturbed P99; below 100: no target, whole prompts."},
    {"quiet-ms", OPTION_FLOAT, AT(quiet_ms), "0", 0, 1e5, "ms", 0, NULL, "stall", "Undisturbed P99; 0: of the case of whole prompts."},
    {"trace", OPTION_STRING, AT(trace), "", 0, 0, "", 0, NULL, "placement", "CSV with TIMESTAMP,ContextTokens,GeneratedTokens."},
    {"speeds", OPTION_STRING, AT(speeds), "4", 0, 0, "", 0, NULL, "placement", "How much faster than in the trace requests come."},
    {"max-num-seqs", OPTION_INT, AT(max_num_seqs), "256", 1, 4096, "sequences", 0, NULL, "placement", "Decoded together."},
    {"ttft-target-ms", OPTION_FLOAT, AT(ttft_target_ms), "1000", 0, 1e6, "ms", 0, NULL, "placement", "First-token target."},
    {"kv-cache-gb", OPTION_FLOAT, AT(kv_cache_gb), "1", 0.001, 1000, "GB", 0, NULL, "placement", "Pages of each device."},
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
    return false;
  }
  run->engine = instance_engine(run->instance);
  return true;
}

struct sits_request *engine_bench_submit(struct engine_run *run, const int32_t *prompt, int64_t n, int32_t max_tokens)
{
  struct sits_request_params p = {.prompt = prompt, .n_prompt = (int32_t)n, .n_choices = 1,
                                  .service_class = SITS_CLASS_NORMAL, .id = "bench"};
  p.sampling = (struct sits_sampling){.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens, .ignore_eos = true,
                                      .n_top_logprobs = -1, .n_prompt_logprobs = -1};
  struct sits_request *request = NULL;
  struct sits_error err = {0};
  if (sits_engine_submit(run->engine, &p, &request, &err) != SITS_OK) fprintf(stderr, "sits2026-bench engine: %s\n", err.text);
  return request;
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

static bool read_text(const char *path, char *text, size_t n_bytes)
{
  FILE *file = path ? fopen(path, "rb") : NULL;
  size_t n = file ? fread(text, 1, n_bytes - 1, file) : 0;
  if (file) fclose(file);
  text[n] = '\0';
  if (n == 0) fprintf(stderr, "sits2026-bench engine: speculation needs --text with a readable file\n");
  return n > 0;
}

/* A passage and its beginning once more: what an edit or a quotation looks like to the model. */
static int64_t passage(const struct token_list *text, int64_t index, int32_t *prompt)
{
  int64_t at = index * PASSAGE;
  if (at + PASSAGE > text->n) return 0;
  memcpy(prompt, text->ids + at, PASSAGE * sizeof *prompt);
  memcpy(prompt + PASSAGE, text->ids + at, PASSAGE_AGAIN * sizeof *prompt);
  return PASSAGE + PASSAGE_AGAIN;
}

static bool measure_speculation(const struct engine_bench_options *o, int32_t draft, const char *text, int32_t *answers,
                                double *tokens_per_s, struct engine_stats *stats)
{
  struct engine_run run;
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  struct token_list ids = {0};
  int32_t prompt[PASSAGE + PASSAGE_AGAIN];
  const struct instance_options more = {.max_num_seqs = 16, .spec_max_tokens = draft};
  if (!engine_bench_open(&run, o, more, PASSAGE + PASSAGE_AGAIN + o->output)) return false;
  enum sits_status status = tokenizer_load(instance_model(run.instance)->source, &tokenizer, &err);
  if (status == SITS_OK) status = tokenizer_encode(tokenizer, text, strlen(text), 0, &ids);
  int64_t n_tokens = 0, busy_us = 0;
  for (int64_t i = 0; status == SITS_OK && i < o->texts; i++) {
    int64_t n = passage(&ids, i, prompt);
    struct sits_request *request = n > 0 ? engine_bench_submit(&run, prompt, n, (int32_t)o->output) : NULL;
    if (!request) break;
    struct sits_event e = {0};
    int64_t first_us = 0, last_us = 0;
    for (int64_t k = 0; e.kind != SITS_EVENT_FINISH;) {
      if (sits_request_poll(request, &e) != SITS_OK) {
        engine_bench_nap();
        continue;
      }
      if (e.kind != SITS_EVENT_TOKEN) continue;
      if (k == 0) first_us = e.emitted_us;
      last_us = e.emitted_us;
      answers[i * o->output + k++] = e.token;
      n_tokens += k > 1;
    }
    busy_us += last_us - first_us;
    sits_request_release(request);
  }
  engine_stats(run.engine, stats);
  *tokens_per_s = busy_us > 0 ? (double)n_tokens / ((double)busy_us * 1e-6) : 0;
  token_list_fini(&ids);
  tokenizer_destroy(tokenizer);
  instance_close(run.instance);
  if (status != SITS_OK) fprintf(stderr, "sits2026-bench engine: %s\n", err.text);
  return status == SITS_OK;
}

static bool run_speculation(const struct engine_bench_options *o, json_t *rows)
{
  static char text[200000];
  struct engine_stats stats;
  double with, without;
  size_t n = (size_t)(o->texts * o->output);
  if (!read_text(o->text, text, sizeof text)) return false;
  int32_t *a = mem_calloc(n, sizeof *a), *b = mem_calloc(n, sizeof *b);
  bool is_good = a && b && measure_speculation(o, 0, text, a, &without, &stats) &&
                 measure_speculation(o, (int32_t)o->draft, text, b, &with, &stats);
  if (is_good) {
    bool is_same = memcmp(a, b, n * sizeof *a) == 0;
    fprintf(stderr, "speculation: %.1f tokens/s, %.1f without (%.2fx), %llu of %llu drafted tokens right, answers %s\n", with, without,
            with / without, (unsigned long long)stats.spec_accepted_tokens, (unsigned long long)stats.spec_draft_tokens,
            is_same ? "equal" : "DIFFER");
    json_array_append_new(rows, json_pack("{s:f, s:f, s:I, s:I, s:b}", "tokens_per_s", with, "tokens_per_s_without", without, "drafted",
                                          (json_int_t)stats.spec_draft_tokens, "accepted", (json_int_t)stats.spec_accepted_tokens,
                                          "answers_equal", is_same));
  }
  mem_free(a);
  mem_free(b);
  return is_good;
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
  else if (is_good && strcmp(o.scenario, "speculation") == 0) is_good = run_speculation(&o, rows);
  else if (is_good && strcmp(o.scenario, "prefix") == 0) is_good = run_prefix(&o, rows);
  else if (is_good && strcmp(o.scenario, "classes") == 0) is_good = engine_bench_classes(&o, rows);
  else if (is_good && strcmp(o.scenario, "placement") == 0) is_good = engine_bench_placement(&o, rows);
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
