/* sits2026-bench throughput: tokens per second of prefill and of decode by batch size, straight on the backend.
 *
 * What is timed is what a server pays per step: submit and wait with logits of the last token of each sequence. Token ids are random but
 * fixed. Prefill reads one prompt in chunks of --max-batch-tokens; decode runs --steps steps on sequences that already hold --context
 * tokens. Each figure is the median of --repeat runs (prefill) or of all steps (decode). "host" is the time that submit takes: what
 * the processor does for a step. Where a device draws tokens and takes a second batch, --sample measures decode a second time, one step
 * ahead: each step is submitted while the one before runs and reads the tokens drawn there. The device is then never without work, so
 * the difference between the two is the time it idles between steps otherwise.
 *
 * With --kv-page-budget, for fp4-sparse, what blocks get is measured as in the engine, and decode runs on sequences that have lost their
 * blocks beyond that many pages: which, a hash says, and the rest stays where it lies, since only the time is of interest here.
 */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "engine/runner.h"
#include "kv/kv_sparse.h"

struct throughput_options {
  const char *model, *device, *isa, *recipe, *prefill_weights, *kv_cache_dtype, *prefill, *batch, *plan_costs, *json;
  int64_t threads, tensor_parallel_size, context, steps, repeat, prompts, max_batch_tokens, kv_page_budget;
  bool unfused, print_plan, sample, no_graphs, one_device, tensor_parallel_compress;
};

#define AT(field) offsetof(struct throughput_options, field)
static const struct option_spec specs[] = {
    {"model", OPTION_STRING, AT(model), "", 0, 0, "", 0, NULL, "Options", "Model file or directory."},
    {"device", OPTION_ENUM, AT(device), "auto", 0, 0, "", 0, "auto|cpu|cuda", "Options", "Backend."},
    {"isa", OPTION_ENUM, AT(isa), "auto", 0, 0, "", 0, "auto|scalar|avx2|avx512", "Options", "CPU instruction set."},
    {"recipe", OPTION_ENUM, AT(recipe), "auto", 0, 0, "", 0, "auto|w4a16|w4a8", "Options", "Activations beside 4-bit weights."},
    {"prefill-weights", OPTION_ENUM, AT(prefill_weights), "auto", 0, 0, "", 0, "auto|resident|expand", "Options",
     "4-bit weights of steps with many tokens (CUDA)."},
    {"sample", OPTION_BOOL, AT(sample), "false", 0, 0, "", 0, NULL, "Options", "Draw tokens on the device, greedy."},
    {"no-graphs", OPTION_BOOL, AT(no_graphs), "false", 0, 0, "", 0, NULL, "Options", "Launch kernels one by one (CUDA)."},
    {"threads", OPTION_INT, AT(threads), "0", 0, 1024, "threads", 0, NULL, "Options", "CPU threads; 0 = one per core."},
    {"tensor-parallel-size", OPTION_INT, AT(tensor_parallel_size), "1", 1, 8, "devices", 0, NULL, "Options", "Devices that share it."},
    {"tensor-parallel-compress", OPTION_BOOL, AT(tensor_parallel_compress), "false", 0, 0, "", 0, NULL, "Options",
     "They sum prompts' activations in 8 bits."},
    {"one-device", OPTION_BOOL, AT(one_device), "false", 0, 0, "", 0, NULL, "Options", "All of them are device 0, for comparison."},
    {"kv-cache-dtype", OPTION_ENUM, AT(kv_cache_dtype), "auto", 0, 0, "", 0, "auto|f16|int8|int4|fp4|fp4-sparse", "Options",
     "Cache codec."},
    {"kv-page-budget", OPTION_INT, AT(kv_page_budget), "0", 0, 1 << 24, "pages", 0, NULL, "Options",
     "fp4-sparse: pages that a decoded sequence keeps; 0: all, and nothing is measured."},
    {"prefill", OPTION_STRING, AT(prefill), "512", 0, 0, "", 0, NULL, "Options", "Prompt lengths, comma separated; none: \"\"."},
    {"batch", OPTION_STRING, AT(batch), "1,8", 0, 0, "", 0, NULL, "Options", "Decode batch sizes, comma separated; none: \"\"."},
    {"context", OPTION_INT, AT(context), "128", 1, 1048576, "tokens", 0, NULL, "Options", "Tokens in the cache when decode starts."},
    {"steps", OPTION_INT, AT(steps), "64", 1, 100000, "steps", 0, NULL, "Options", "Decode steps."},
    {"prompts", OPTION_INT, AT(prompts), "1", 1, 256, "prompts", 0, NULL, "Options", "Prompts of a prefill run, read side by side."},
    {"repeat", OPTION_INT, AT(repeat), "3", 1, 1000, "runs", 0, NULL, "Options", "Prefill runs."},
    {"max-batch-tokens", OPTION_INT, AT(max_batch_tokens), "512", 1, 65536, "tokens", 0, NULL, "Options", "Tokens of a prefill step."},
    {"unfused", OPTION_BOOL, AT(unfused), "false", 0, 0, "", 0, NULL, "Options", "Plain ops only."},
    {"plan-costs", OPTION_STRING, AT(plan_costs), "", 0, 0, "", 0, NULL, "Options", "What ops cost here, by `sits2026-bench costs`."},
    {"print-plan", OPTION_BOOL, AT(print_plan), "false", 0, 0, "", 0, NULL, "Options", "Print the stitched program and measure nothing."},
    {"json", OPTION_STRING, AT(json), "", 0, 0, "", 0, NULL, "Options", "File for the result; default stdout."},
};

enum { MOST_SIZES = 32 };

static int print_plan(const struct program *program)
{
  struct buf text;
  buf_init(&text, 16 << 20);
  const bool is_whole = program_write_plan(program, &text);
  if (is_whole) fwrite(text.data, 1, text.size, stdout);
  buf_fini(&text);
  return is_whole ? 0 : 1;
}

/* Arrays of one batch, sized for the largest. Sequence s owns pages [s * pages_per_seq, ...). */
struct steps {
  const struct runner *runner;
  struct backend_batch batch;
  int32_t *tokens, *positions, *seq_start, *kv_len, *table, *rows;
  struct backend_sample *sample; /* NULL: fetch logits */
  struct backend_blocks *blocks; /* NULL: no budget */
  int32_t *lost_table, *numbers; /* of sequences that have lost blocks */
  _Atomic uint64_t *given;
  int32_t pages_per_seq, n_columns;
  bool has_lost;
  int64_t device_us, host_us;  /* of the last step */
};

static void steps_fini(struct steps *steps)
{
  mem_free(steps->tokens);
  mem_free(steps->positions);
  mem_free(steps->seq_start);
  mem_free(steps->kv_len);
  mem_free(steps->table);
  mem_free(steps->rows);
  mem_free(steps->sample);
  mem_free(steps->blocks);
  mem_free(steps->lost_table);
  mem_free(steps->numbers);
  mem_free((void *)steps->given);
}

static bool blocks_init(struct steps *steps, int64_t most_seqs)
{
  const size_t s = (size_t)most_seqs, n = s * (size_t)steps->pages_per_seq;
  steps->n_columns = steps->runner->geometry.n_layers * steps->runner->geometry.n_kv_heads;
  steps->blocks = mem_calloc(s, sizeof *steps->blocks);
  steps->lost_table = mem_calloc(n, sizeof *steps->lost_table);
  steps->numbers = mem_calloc(n * (size_t)steps->n_columns, sizeof *steps->numbers);
  steps->given = mem_calloc(n * (size_t)steps->n_columns, sizeof *steps->given);
  return steps->blocks && steps->lost_table && steps->numbers && steps->given;
}

/* From now on sequences have what a budget leaves of `context` tokens. */
static void lose_blocks(struct steps *steps, int32_t n_seqs, int32_t context, int32_t page_budget)
{
  const int32_t n_old = context / KV_PAGE_TOKENS - KV_NEWEST_KEPT - 1, n_kept = page_budget - KV_NEWEST_KEPT - 1, n = steps->n_columns;
  if (steps->blocks == NULL || n_old <= n_kept) return;
  steps->has_lost = true;
  for (int32_t s = 0; s < n_seqs; s++)
    for (int32_t i = 0; i < steps->pages_per_seq; i++) {
      const int32_t at = s * steps->pages_per_seq + i, page = steps->table[at];
      const bool is_broken = i > 0 && i <= n_old;
      steps->lost_table[at] = is_broken ? KV_NO_PAGE : page;
      for (int32_t c = 0; c < n && is_broken; c++)
        steps->numbers[(int64_t)at * n + c] =
            (int32_t)(hash_mix((uint64_t)at, (uint64_t)c) % (uint64_t)n_old) < n_kept ? page * n + c : KV_NO_PAGE;
    }
}

/* What a step on these sequences says of blocks. */
static void add_blocks(struct steps *steps, struct backend_batch *batch, int32_t first_seq)
{
  if (steps->blocks == NULL) return;
  for (int32_t s = 0; s < batch->n_seqs; s++) {
    const int64_t at = (int64_t)(first_seq + s) * steps->pages_per_seq * steps->n_columns;
    steps->blocks[s] = (struct backend_blocks){steps->has_lost ? steps->numbers + at : NULL, steps->given + at, KV_NEWEST_KEPT};
  }
  batch->blocks = steps->blocks;
  if (steps->has_lost) batch->block_table = steps->lost_table + (int64_t)first_seq * steps->pages_per_seq;
}

static bool steps_init(struct steps *steps, const struct runner *runner, int64_t most_tokens, int64_t most_seqs, int32_t pages_per_seq,
                       bool wants_sample)
{
  size_t t = (size_t)(most_tokens > most_seqs ? most_tokens : most_seqs), s = (size_t)most_seqs;
  *steps = (struct steps){.runner = runner, .pages_per_seq = pages_per_seq};
  steps->tokens = mem_calloc(t, sizeof(int32_t));
  steps->positions = mem_calloc(t, sizeof(int32_t));
  steps->seq_start = mem_calloc(s + 1, sizeof(int32_t));
  steps->kv_len = mem_calloc(s, sizeof(int32_t));
  steps->table = mem_calloc(s * (size_t)pages_per_seq, sizeof(int32_t));
  steps->rows = mem_calloc(s, sizeof(int32_t));
  if (wants_sample) {
    steps->sample = mem_calloc(s, sizeof *steps->sample); /* temperature 0 */
    if (!steps->sample) return false;
  }
  if (!steps->tokens || !steps->positions || !steps->seq_start || !steps->kv_len || !steps->table || !steps->rows) return false;
  for (size_t i = 0; i < s * (size_t)pages_per_seq; i++) steps->table[i] = (int32_t)i;
  return true;
}

/* n_seqs sequences, each with n_new tokens from position `from` on. is_fed: the tokens are those that the batch before draws. */
static enum sits_status submit_step(struct steps *steps, int32_t first_seq, int32_t n_seqs, int32_t from, int32_t n_new, bool is_fed)
{
  const struct runner *runner = steps->runner;
  int32_t n_vocab = runner->model->config.n_vocab;
  for (int32_t s = 0; s < n_seqs; s++) {
    steps->seq_start[s] = s * n_new;
    steps->kv_len[s] = from + n_new;
    steps->rows[s] = (s + 1) * n_new - 1;
    for (int32_t i = 0; i < n_new; i++) {
      steps->positions[s * n_new + i] = from + i;
      steps->tokens[s * n_new + i] =
          is_fed ? -1 - s : (int32_t)(hash_mix((uint64_t)(first_seq + s), (uint64_t)(from + i)) % (uint64_t)n_vocab);
    }
  }
  steps->seq_start[n_seqs] = n_seqs * n_new;
  struct backend_batch batch = {
      .n_tokens = n_seqs * n_new, .n_seqs = n_seqs, .n_rows = n_seqs, .tokens = steps->tokens, .positions = steps->positions,
      .seq_start = steps->seq_start, .kv_len = steps->kv_len, .row_token = steps->rows, .table_stride = steps->pages_per_seq,
      .sample = steps->sample,
      .block_table = steps->table + (size_t)first_seq * (size_t)steps->pages_per_seq};
  add_blocks(steps, &batch, first_seq);
  const int64_t start_us = clock_monotonic_us();
  const enum sits_status status = runner->vtable->submit(runner->compiled, runner->kv, &batch);
  steps->host_us = clock_monotonic_us() - start_us;
  return status;
}

static enum sits_status wait_step(struct steps *steps)
{
  struct backend_result result;
  const enum sits_status status = steps->runner->vtable->wait(steps->runner->compiled, &result);
  if (status == SITS_OK) steps->device_us = result.compute_us;
  return status;
}

static int64_t report_failure(enum sits_status status)
{
  fprintf(stderr, "a step failed: %s\n", sits_status_info(status)->text);
  return -1;
}

/* One step, waited for; returns microseconds, negative on failure. */
static int64_t run_step(struct steps *steps, int32_t first_seq, int32_t n_seqs, int32_t from, int32_t n_new)
{
  const int64_t start_us = clock_monotonic_us();
  enum sits_status status = submit_step(steps, first_seq, n_seqs, from, n_new, false);
  if (!status) status = wait_step(steps);
  return status ? report_failure(status) : clock_monotonic_us() - start_us;
}

/* Mean microseconds of n decode steps, each submitted before the one before it is waited for; negative on failure. */
static double run_ahead(struct steps *steps, int32_t n_seqs, int32_t from, int64_t n)
{
  enum sits_status status = submit_step(steps, 0, n_seqs, from, 1, false);
  int64_t start_us = 0;
  for (int64_t i = 1; i <= n && !status; i++) {
    status = submit_step(steps, 0, n_seqs, from + (int32_t)i % (int32_t)n, 1, true);
    if (!status) status = wait_step(steps);
    if (i == 1) start_us = clock_monotonic_us(); /* the first step ends here, so what follows is n whole steps */
  }
  if (!status) status = wait_step(steps);
  if (status) return (double)report_failure(status);
  return (double)(clock_monotonic_us() - start_us) / (double)n;
}

/* Read n tokens of each of n_seqs sequences in steps of at most `chunk` tokens; microseconds in all. */
static int64_t read_prompts(struct steps *steps, int32_t seq, int32_t n_seqs, int32_t n, int32_t chunk)
{
  int64_t total_us = 0;
  const int32_t each = chunk / n_seqs > 0 ? chunk / n_seqs : 1;
  for (int32_t at = 0; at < n; at += each) {
    int64_t us = run_step(steps, seq, n_seqs, at, n - at < each ? n - at : each);
    if (us < 0) return -1;
    total_us += us;
  }
  return total_us;
}

static json_t *measure_prefill(struct steps *steps, const struct throughput_options *options, int32_t n)
{
  double runs[1000];
  for (int64_t i = -1; i < options->repeat; i++) { /* run -1 warms up */
    int64_t us = read_prompts(steps, 0, (int32_t)options->prompts, n, (int32_t)options->max_batch_tokens);
    if (us < 0) return NULL;
    if (i >= 0) runs[i] = (double)us;
  }
  double median_us = bench_percentile(runs, options->repeat, 50);
  const double tokens = (double)n * (double)options->prompts;
  fprintf(stderr, "prefill %d x %6d tokens: %10.1f tokens/s  (%.2f ms)\n", (int)options->prompts, n, tokens / median_us * 1e6,
      median_us / 1e3);
  return json_pack("{s:i, s:I, s:f, s:f, s:f}", "tokens", n, "prompts", (json_int_t)options->prompts, "tokens_per_s",
      tokens / median_us * 1e6, "median_ms", median_us / 1e3, "min_ms",
                   runs[0] / 1e3);
}

static json_t *measure_decode(struct steps *steps, const struct throughput_options *options, int32_t n_seqs, double *times,
                              double *host_times)
{
  steps->has_lost = false;
  for (int32_t s = 0; s < n_seqs; s++)
    if (read_prompts(steps, s, 1, (int32_t)options->context, (int32_t)options->max_batch_tokens) < 0) return NULL;
  lose_blocks(steps, n_seqs, (int32_t)options->context, (int32_t)options->kv_page_budget);
  double device_us = 0, ahead_us = 0;
  for (int64_t i = 0; i < options->steps; i++) {
    int64_t us = run_step(steps, 0, n_seqs, (int32_t)(options->context + i), 1);
    if (us < 0) return NULL;
    times[i] = (double)us;
    host_times[i] = (double)steps->host_us;
    device_us += (double)steps->device_us / (double)options->steps;
  }
  double p50 = bench_percentile(times, options->steps, 50), p99 = bench_percentile(times, options->steps, 99);
  const double host_us = bench_percentile(host_times, options->steps, 50);
  fprintf(stderr, "decode batch %4d: %10.1f tokens/s  (step p50 %.3f ms, p99 %.3f ms, device mean %.3f ms, host %.0f us)\n", n_seqs,
          n_seqs / p50 * 1e6, p50 / 1e3, p99 / 1e3, device_us / 1e3, host_us);
  json_t *out = json_pack("{s:i, s:I, s:f, s:f, s:f, s:f, s:f}", "batch", n_seqs, "context", (json_int_t)options->context, "tokens_per_s",
                          n_seqs / p50 * 1e6, "step_p50_ms", p50 / 1e3, "step_p99_ms", p99 / 1e3, "device_ms", device_us / 1e3, "host_us",
                          host_us);
  if (steps->sample == NULL || steps->runner->vtable->in_flight < 2) return out;
  if ((ahead_us = run_ahead(steps, n_seqs, (int32_t)options->context, options->steps)) < 0) {
    json_decref(out);
    return NULL;
  }
  double mean_us = 0;
  for (int64_t i = 0; i < options->steps; i++) mean_us += times[i] / (double)options->steps;
  const double idle = mean_us > ahead_us ? 100 * (1 - ahead_us / mean_us) : 0;
  fprintf(stderr, "   one step ahead: %10.1f tokens/s  (step mean %.3f ms; waiting for each step idles %.1f %%)\n", n_seqs / ahead_us * 1e6,
          ahead_us / 1e3, idle);
  json_object_update_new(out, json_pack("{s:f, s:f, s:f}", "ahead_tokens_per_s", n_seqs / ahead_us * 1e6, "ahead_step_ms", ahead_us / 1e3,
                                        "idle_percent_without", idle));
  return out;
}

/* What the backend measured of its all-reduce when it was opened; empty where one device has the whole model. */
static json_t *collectives_of(const struct runner *runner)
{
  static const char *const ways[] = {"push", "bulk", "library", "compressed"};
  struct backend_collective rows[64];
  json_t *out = json_array();
  const int32_t n = runner->vtable->collectives ? runner->vtable->collectives(runner->compiled, rows, 64) : 0;
  for (int32_t i = 0; i < n; i++)
    json_array_append_new(out, json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:s}", "bytes", (json_int_t)rows[i].n_bytes, "push_us",
                                         rows[i].push_us, "bulk_us", rows[i].bulk_us, "library_us", rows[i].library_us,
                                         "library_alone_us", rows[i].library_alone_us, "compressed_us", rows[i].compressed_us,
                                         "chosen", ways[rows[i].chosen]));
  return out;
}

/* What the sizes ask for must be what a request could be. */
static bool is_within_context(const struct throughput_options *options, int64_t longest_prompt, int64_t longest,
                              const struct runner *runner)
{
  const int32_t most = runner->model->config.max_context;
  if (longest_prompt > most)
    fprintf(stderr, "--prefill %lld is more than the model's context of %d tokens\n", (long long)longest_prompt, most);
  else if (longest > most)
    fprintf(stderr, "--context %lld and --steps %lld are together more than the model's context of %d tokens\n",
            (long long)options->context, (long long)options->steps, most);
  return longest_prompt <= most && longest <= most;
}

static int64_t largest(const int64_t *values, int n)
{
  int64_t most = 0;
  for (int i = 0; i < n; i++) most = values[i] > most ? values[i] : most;
  return most;
}

/* Sizes to measure, and what the largest of them take. */
struct sizes {
  int64_t prompts[MOST_SIZES], batches[MOST_SIZES];
  int n_prompts, n_batches;
  int64_t most_seqs, most_tokens, longest_prompt, longest; /* longest: of a decoded sequence */
  int32_t pages_per_seq;
};

static void find_largest(const struct throughput_options *options, struct sizes *z)
{
  z->longest_prompt = largest(z->prompts, z->n_prompts);
  z->longest = z->n_batches ? options->context + options->steps : 0;
  z->most_seqs = largest(z->batches, z->n_batches);
  if (z->most_seqs < options->prompts) z->most_seqs = options->prompts;
  z->most_tokens = options->max_batch_tokens > z->most_seqs ? options->max_batch_tokens : z->most_seqs;
  const int64_t tokens = z->longest_prompt > z->longest ? z->longest_prompt : z->longest;
  z->pages_per_seq = (int32_t)((tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
}

static bool open_runner(struct runner *runner, const struct throughput_options *options, const struct sizes *z)
{
  struct sits_error err;
  const struct runner_options open = {
      .model_path = options->model, .device = options->device, .kv_codec = options->kv_cache_dtype, .unfused = options->unfused,
      .plan_costs = options->plan_costs,
      .backend = {.n_threads = (int32_t)options->threads, .isa = options->isa, .recipe = options->recipe,
                  .prefill_weights = options->prefill_weights, .no_graphs = options->no_graphs,
                  .n_ranks = (int32_t)options->tensor_parallel_size, .has_devices = options->one_device,
                  .compress_reduce = options->tensor_parallel_compress, .max_batch_tokens = (int32_t)z->most_tokens,
                  .max_seqs = (int32_t)z->most_seqs}};
  enum sits_status status = runner_open(runner, &open, &err);
  if (!status && !is_within_context(options, z->longest_prompt, z->longest, runner)) return false;
  runner->geometry.max_tokens = z->pages_per_seq * KV_PAGE_TOKENS;
  if (!status) status = runner_kv_create(runner, (int32_t)z->most_seqs * z->pages_per_seq, &err);
  if (status) fprintf(stderr, "%s\n", err.text);
  return status == SITS_OK;
}

/* What was measured, beside what the backend says of itself. */
static bool write_result(const struct throughput_options *options, const struct runner *runner, const char *backend, json_t *prefill,
                         json_t *decode, int argc, char **argv)
{
  json_t *out = bench_header("throughput", argc, argv);
  json_object_update_new(out, json_pack("{s:s, s:s, s:s, s:I, s:f, s:O, s:O}", "model", runner->model->config.name, "backend", backend,
                                        "kv_cache_dtype", kv_codec_name(runner->codec), "program_bytes",
                                        (json_int_t)runner->vtable->program_bytes(runner->compiled), "open_ms",
                                        (double)(runner->open_us + runner->compile_us) / 1e3, "prefill", prefill, "decode", decode));
  json_object_set_new(out, "tensor_parallel_size", json_integer(options->tensor_parallel_size));
  json_object_set_new(out, "all_reduce", collectives_of(runner));
  if (runner->vtable->stats) {
    struct backend_stats stats;
    runner->vtable->stats(runner->compiled, &stats);
    fprintf(stderr, "%d graphs captured in %.1f ms, %.1f MB of device memory\n", stats.n_graphs, (double)stats.capture_us / 1e3,
            (double)stats.graph_bytes / 1e6);
    json_object_update_new(out, json_pack("{s:i, s:f, s:I}", "graphs", stats.n_graphs, "graph_capture_ms", (double)stats.capture_us / 1e3,
                                          "graph_bytes", (json_int_t)stats.graph_bytes));
  }
  return bench_write_json(out, options->json);
}

/* Open, measure every size, write. */
static int measure(const struct throughput_options *options, struct sizes *z, int argc, char **argv)
{
  struct runner runner = {0};
  struct steps steps = {0};
  double *times = mem_calloc((size_t)options->steps, sizeof *times), *host_times = mem_calloc((size_t)options->steps, sizeof *times);
  json_t *prefill = json_array(), *decode = json_array();
  int status = 1;
  find_largest(options, z);
  if (!open_runner(&runner, options, z)) goto done;
  if (options->print_plan) {
    status = print_plan(runner.program);
    goto done;
  }
  struct backend_info info;
  runner.vtable->info(runner.backend, &info);
  fprintf(stderr, "%s on %s, cache %s\n", options->model, info.name, kv_codec_name(runner.codec));
  if (!times || !host_times || !steps_init(&steps, &runner, z->most_tokens, z->most_seqs, z->pages_per_seq,
                                           options->sample && runner.vtable->can_sample)) goto done;
  if (options->kv_page_budget > 0 && !blocks_init(&steps, z->most_seqs)) goto done;
  for (int i = 0; i < z->n_prompts; i++)
    if (json_array_append_new(prefill, measure_prefill(&steps, options, (int32_t)z->prompts[i]))) goto done;
  for (int i = 0; i < z->n_batches; i++)
    if (json_array_append_new(decode, measure_decode(&steps, options, (int32_t)z->batches[i], times, host_times))) goto done;
  status = write_result(options, &runner, info.name, prefill, decode, argc, argv) ? 0 : 1;
done:
  json_decref(prefill);
  json_decref(decode);
  steps_fini(&steps);
  runner_close(&runner);
  mem_free(times);
  mem_free(host_times);
  return status;
}

int bench_throughput(int argc, char **argv)
{
  struct throughput_options options;
  struct option_set set;
  int status;
  if (!bench_parse("throughput", "speed of a model on a backend", &set, specs, sizeof specs / sizeof specs[0], &options, argc, argv,
                   &status))
    return status;
  struct sizes sizes = {0};
  sizes.n_prompts = bench_parse_list(options.prefill, sizes.prompts, MOST_SIZES);
  sizes.n_batches = bench_parse_list(options.batch, sizes.batches, MOST_SIZES);
  if (!options.model || (options.prefill && !sizes.n_prompts) || (options.batch && !sizes.n_batches)) {
    fprintf(stderr, "sits2026-bench throughput: needs --model, and lists such as --batch 1,8 of at most %d sizes\n", MOST_SIZES);
    status = 2;
  } else if (options.one_device && options.tensor_parallel_size == 1) {
    fprintf(stderr, "sits2026-bench throughput: --one-device goes with --tensor-parallel-size: one device shares nothing\n");
    status = 2;
  } else if (options.kv_page_budget > 0 &&
             (strcmp(options.kv_cache_dtype, "fp4-sparse") != 0 || options.kv_page_budget < KV_LEAST_BUDGET)) {
    fprintf(stderr, "sits2026-bench throughput: --kv-page-budget is at least %d, and for fp4-sparse only\n", KV_LEAST_BUDGET);
    status = 2;
  } else {
    status = measure(&options, &sizes, argc, argv);
  }
  option_set_fini(&set);
  return status;
}
