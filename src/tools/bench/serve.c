/* sits2026-bench serve: load on a running server and what its clients see.
 *
 * Closed loop (--concurrency N), open loop with Poisson arrivals (--rate R), or a recorded trace (--trace FILE, a CSV with the columns
 * TIMESTAMP, ContextTokens, GeneratedTokens; --speedup compresses its clock, --max-prompt and --max-output cut its sizes). Prompts are
 * random token ids, so any server that takes ids as `prompt` can be compared.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/serve_client.h"

enum { SERVE_MOST_TOKENS = 1 << 24 }; /* of a trace's row */

struct serve_options {
  const char *url, *model, *api_key, *qos, *trace, *json;
  int64_t concurrency, requests, prompt_tokens, output_tokens, n_vocab, seed, max_prompt, max_output;
  double rate, duration_s, speedup;
};

#define AT(field) offsetof(struct serve_options, field)
static const struct option_spec specs[] = {
    {"url", OPTION_STRING, AT(url), "http://127.0.0.1:8000", 0, 0, "", 0, NULL, "Options", "Server."},
    {"model", OPTION_STRING, AT(model), "", 0, 0, "", 0, NULL, "Options", "Model name to send."},
    {"api-key", OPTION_STRING, AT(api_key), "", 0, 0, "", OPTION_SECRET, NULL, "Options", "Bearer key."},
    {"qos", OPTION_STRING, AT(qos), "", 0, 0, "", 0, NULL, "Options", "X-QoS-Level header to send."},
    {"concurrency", OPTION_INT, AT(concurrency), "0", 0, 100000, "streams", 0, NULL, "Load", "Closed loop with that many at a time."},
    {"rate", OPTION_FLOAT, AT(rate), "0", 0, 1e6, "requests/s", 0, NULL, "Load", "Open loop with Poisson arrivals."},
    {"trace", OPTION_STRING, AT(trace), "", 0, 0, "", 0, NULL, "Load", "Open loop as recorded in this CSV file."},
    {"speedup", OPTION_FLOAT, AT(speedup), "1", 0.001, 1e6, "", 0, NULL, "Load", "Trace only: times are divided by this."},
    {"requests", OPTION_INT, AT(requests), "100", 1, 10000000, "requests", 0, NULL, "Load", "How many; of a trace, at most."},
    {"duration-s", OPTION_FLOAT, AT(duration_s), "0", 0, 1e6, "s", 0, NULL, "Load", "Send nothing after that time. 0: no limit."},
    {"prompt-tokens", OPTION_INT, AT(prompt_tokens), "128", 1, 1048576, "tokens", 0, NULL, "Load", "Prompt length."},
    {"output-tokens", OPTION_INT, AT(output_tokens), "64", 1, 1048576, "tokens", 0, NULL, "Load", "Answer length."},
    {"max-prompt", OPTION_INT, AT(max_prompt), "1048576", 1, 1048576, "tokens", 0, NULL, "Load", "Trace only: cut prompts to this."},
    {"max-output", OPTION_INT, AT(max_output), "1048576", 1, 1048576, "tokens", 0, NULL, "Load", "Trace only: cut answers to this."},
    {"n-vocab", OPTION_INT, AT(n_vocab), "256", 1, 10000000, "tokens", 0, NULL, "Load", "Prompt ids are drawn below this."},
    {"seed", OPTION_INT, AT(seed), "1", 0, 1e15, "", 0, NULL, "Load", "Of prompts and arrivals."},
    {"json", OPTION_STRING, AT(json), "", 0, 0, "", 0, NULL, "Options", "File for the result; default stdout."},
};

/* Uniform in (0, 1). */
static double uniform(uint64_t seed, uint64_t number) { return ((double)(hash_mix(seed, number) >> 11) + 0.5) / 9007199254740992.0; }

/* Microseconds since 1970; -1 where the row begins with no time. */
static int64_t parse_stamp_us(const char *text)
{
  int64_t day;
  double seconds;
  return bench_parse_stamp(text, &day, &seconds) ? day * 86400000000 + (int64_t)llround(seconds * 1e6) : -1;
}

static int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }

/* Rows of the trace; returns how many, -1 after printing an error. */
static int64_t read_trace(const struct serve_options *options, struct serve_request *requests)
{
  char line[256];
  int64_t n = 0, first_us = -1, number = 0;
  FILE *file = fopen(options->trace, "r");
  if (!file) {
    fprintf(stderr, "%s: cannot open\n", options->trace);
    return -1;
  }
  while (n < options->requests && fgets(line, sizeof line, file)) {
    long long prompt, output;
    const char *comma = strchr(line, ',');
    int64_t stamp_us = parse_stamp_us(line);
    if (number++ == 0 && stamp_us < 0) continue; /* heading */
    if (!comma || stamp_us < 0 || sscanf(comma, ",%lld,%lld", &prompt, &output) != 2 || prompt < 1 || output < 0 ||
        prompt > SERVE_MOST_TOKENS || output > SERVE_MOST_TOKENS) {
      fprintf(stderr, "%s:%lld: not a trace row\n", options->trace, (long long)number);
      n = -1;
      break;
    }
    if (first_us < 0) first_us = stamp_us;
    int64_t at_us = (int64_t)((double)(stamp_us - first_us) / options->speedup);
    if (options->duration_s > 0 && at_us > (int64_t)(options->duration_s * 1e6)) break;
    requests[n++] = (struct serve_request){.at_us = at_us, .n_prompt = (int32_t)at_most(prompt, options->max_prompt),
                                           .n_output = (int32_t)at_most(output < 1 ? 1 : output, options->max_output)};
  }
  fclose(file);
  return n;
}

/* Requests of equal size, at once (closed loop) or at Poisson times. */
static int64_t make_requests(const struct serve_options *options, struct serve_request *requests)
{
  double at_s = 0;
  for (int64_t i = 0; i < options->requests; i++) {
    if (options->rate > 0) at_s -= log(uniform((uint64_t)options->seed, (uint64_t)i)) / options->rate;
    if (options->rate > 0 && options->duration_s > 0 && at_s > options->duration_s) return i;
    requests[i] = (struct serve_request){.at_us = (int64_t)(at_s * 1e6), .n_prompt = (int32_t)options->prompt_tokens,
                                         .n_output = (int32_t)options->output_tokens};
  }
  return options->requests;
}

static bool report(const struct serve_options *options, struct serve_result *result, int argc, char **argv)
{
  double seconds = (double)result->elapsed_us / 1e6;
  json_t *out = bench_header("serve", argc, argv);
  json_object_update_new(
      out, json_pack("{s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:o, s:o, s:o}", "sent", (json_int_t)result->n_sent, "done",
                     (json_int_t)result->n_done, "refused", (json_int_t)result->n_refused,
                     "refused_without_retry_after", (json_int_t)result->n_without_retry, "failed", (json_int_t)result->n_failed,
                     "seconds", seconds, "requests_per_s", (double)result->n_done / seconds, "output_tokens_per_s",
                     (double)result->n_output_tokens / seconds, "total_tokens_per_s",
                     (double)(result->n_output_tokens + result->n_prompt_tokens) / seconds, "ttft_ms",
                     bench_summary(result->ttft_ms, result->n_ttft), "itl_ms", bench_summary(result->itl_ms, result->n_itl), "e2e_ms",
                     bench_summary(result->e2e_ms, result->n_e2e)));
  fprintf(stderr, "%lld done, %lld refused, %lld failed in %.2f s: %.2f requests/s, %.1f output tokens/s\n", (long long)result->n_done,
          (long long)result->n_refused, (long long)result->n_failed, seconds, (double)result->n_done / seconds,
          (double)result->n_output_tokens / seconds);
  if (result->first_error[0]) fprintf(stderr, "first failure: %s\n", result->first_error);
  return bench_write_json(out, options->json);
}

int bench_serve(int argc, char **argv)
{
  struct serve_options options;
  struct option_set set;
  int status;
  if (!bench_parse("serve", "load on a running server", &set, specs, sizeof specs / sizeof specs[0], &options, argc, argv, &status))
    return status;
  status = 2;
  struct serve_request *requests = mem_calloc((size_t)options.requests, sizeof *requests);
  struct serve_result result = {0};
  int n_modes = (options.concurrency > 0) + (options.rate > 0) + (options.trace != NULL);
  if (n_modes != 1) {
    fprintf(stderr, "sits2026-bench serve: give exactly one of --concurrency, --rate and --trace\n");
  } else if (requests) {
    int64_t n = options.trace ? read_trace(&options, requests) : make_requests(&options, requests);
    struct serve_plan plan = {.url = options.url, .model = options.model, .api_key = options.api_key, .qos = options.qos,
                              .requests = requests, .n_requests = n, .concurrency = options.concurrency,
                              .duration_us = (int64_t)(options.duration_s * 1e6), .n_vocab = (int32_t)options.n_vocab,
                              .seed = (uint64_t)options.seed};
    bool ok = n > 0 && serve_run(&plan, &result) && report(&options, &result, argc, argv);
    status = ok && result.n_failed == 0 ? 0 : 1;
  }
  serve_result_fini(&result);
  mem_free(requests);
  option_set_fini(&set);
  return status;
}
