/* sits2026-bench steps: what one mixed step costs, straight on the backend: some sequences decode, and one more reads a chunk of a prompt
 * at a depth, or verifies a draft (--rows: every token of the chunk gives logits, as a draft's tokens do).
 *
 * A round runs every pair of depth and chunk once, so that what else the machine does meets all of them alike; the figures are minimum
 * and median over rounds. A step writes the same positions each time, so the cache is read to its depth once only. "per_token_us" is
 * what a token of the chunk adds to the step without one. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "engine/runner.h"
#include "tools/bench/bench.h"

struct steps_options {
  const char *model, *device, *isa, *prefill_weights, *kv_cache_dtype, *chunks, *depths, *json;
  int64_t threads, decodes, context, rounds;
  bool rows;
};

#define AT(field) offsetof(struct steps_options, field)
static const struct option_spec specs[] = {
    {"model", OPTION_STRING, AT(model), "", 0, 0, "", 0, NULL, "Options", "Model file or directory."},
    {"device", OPTION_ENUM, AT(device), "auto", 0, 0, "", 0, "auto|cpu|cuda", "Options", "Backend."},
    {"isa", OPTION_ENUM, AT(isa), "auto", 0, 0, "", 0, "auto|scalar|avx2|avx512", "Options", "CPU instruction set."},
    {"prefill-weights", OPTION_ENUM, AT(prefill_weights), "auto", 0, 0, "", 0, "auto|resident|expand", "Options",
     "4-bit weights of steps with many tokens (CUDA)."},
    {"kv-cache-dtype", OPTION_ENUM, AT(kv_cache_dtype), "auto", 0, 0, "", 0, "auto|f16|int8|int4|fp4|fp4-sparse", "Options",
     "Cache codec."},
    {"threads", OPTION_INT, AT(threads), "0", 0, 1024, "threads", 0, NULL, "Options", "CPU threads; 0 = one per core."},
    {"decodes", OPTION_INT, AT(decodes), "4", 0, 256, "sequences", 0, NULL, "Options", "Sequences that decode in each step."},
    {"context", OPTION_INT, AT(context), "128", 1, 1e6, "tokens", 0, NULL, "Options", "What each of them has in the cache."},
    {"chunks", OPTION_STRING, AT(chunks), "1,2,4,8,16,32,64,512", 0, 0, "", 0, NULL, "Options", "Tokens of the chunk."},
    {"depths", OPTION_STRING, AT(depths), "1,2048,4096,7616", 0, 0, "", 0, NULL, "Options", "Tokens before the chunk."},
    {"rows", OPTION_BOOL, AT(rows), "false", 0, 0, "", 0, NULL, "Options", "Logits of every token of the chunk."},
    {"rounds", OPTION_INT, AT(rounds), "10", 1, 1000, "rounds", 0, NULL, "Options", "Measurements of each step."},
    {"json", OPTION_STRING, AT(json), "", 0, 0, "", 0, NULL, "Options", "File for the result; default stdout."},
};

enum { MOST_SIZES = 32, READ_TOKENS = 512 };

/* Sequence 0 reads the chunks, 1.. decode; each owns pages_per_seq pages. */
struct bench {
  const struct steps_options *options;
  struct runner runner;
  int32_t *tokens, *positions, *seq_start, *kv_len, *table, *rows;
  struct backend_sample *samples; /* where the device draws, greedy; NULL: logits come back */
  int32_t pages_per_seq;
  struct backend_batch batch;
};

static void add(struct bench *b, int32_t seq, int32_t from, int32_t n, bool wants_rows)
{
  struct backend_batch *batch = &b->batch;
  const int32_t s = batch->n_seqs++, n_vocab = b->runner.model->config.n_vocab;
  for (int32_t i = 0; i < n; i++) {
    if (wants_rows || i == n - 1) b->rows[batch->n_rows++] = batch->n_tokens;
    b->positions[batch->n_tokens] = from + i;
    b->tokens[batch->n_tokens++] = (int32_t)(hash_mix((uint64_t)seq, (uint64_t)(from + i)) % (uint64_t)n_vocab);
  }
  b->seq_start[s + 1] = batch->n_tokens;
  b->kv_len[s] = from + n;
  for (int32_t i = 0; i < b->pages_per_seq; i++) b->table[s * b->pages_per_seq + i] = seq * b->pages_per_seq + i;
}

static void clear(struct bench *b)
{
  b->batch = (struct backend_batch){.tokens = b->tokens, .positions = b->positions, .seq_start = b->seq_start, .kv_len = b->kv_len,
                                    .row_token = b->rows, .table_stride = b->pages_per_seq, .block_table = b->table,
                                    .sample = b->samples};
  b->seq_start[0] = 0;
}

/* Microseconds of the batch; negative after a message. */
static int64_t run(struct bench *b)
{
  struct backend_result result;
  const int64_t start_us = clock_monotonic_us();
  enum sits_status status = b->runner.vtable->submit(b->runner.compiled, b->runner.kv, &b->batch);
  if (!status) status = b->runner.vtable->wait(b->runner.compiled, &result);
  if (!status) return clock_monotonic_us() - start_us;
  fprintf(stderr, "a step failed: %s\n", sits_status_info(status)->text);
  return -1;
}

static bool fill(struct bench *b, int32_t seq, int32_t n)
{
  for (int32_t at = 0; at < n; at += READ_TOKENS) {
    clear(b);
    add(b, seq, at, n - at < READ_TOKENS ? n - at : READ_TOKENS, false);
    if (run(b) < 0) return false;
  }
  return true;
}

static int64_t run_mixed(struct bench *b, int32_t depth, int32_t chunk)
{
  clear(b);
  for (int32_t s = 0; s < b->options->decodes; s++) add(b, 1 + s, (int32_t)b->options->context, 1, false);
  if (chunk > 0) add(b, 0, depth, chunk, b->options->rows);
  return run(b);
}

/* What the sizes ask for must be what a request could be. */
static bool is_within_context(const struct bench *b, int64_t longest_chunk, int64_t deepest)
{
  const int32_t most = b->runner.model->config.max_context;
  if (b->options->decodes > 0 && b->options->context + 1 > most)
    fprintf(stderr, "--context %lld and the token after it are more than the model's context of %d tokens\n",
            (long long)b->options->context, most);
  else if (deepest + longest_chunk > most)
    fprintf(stderr, "--depths %lld and --chunks %lld are together more than the model's context of %d tokens\n", (long long)deepest,
            (long long)longest_chunk, most);
  else return true;
  return false;
}

static bool open_bench(struct bench *b, int64_t longest_chunk, int64_t deepest)
{
  const struct steps_options *o = b->options;
  struct sits_error err;
  const int64_t most = longest_chunk > READ_TOKENS ? longest_chunk : READ_TOKENS, n_seqs = o->decodes + 1, n_tokens = most + o->decodes;
  const int64_t longest = deepest + longest_chunk > o->context + 1 ? deepest + longest_chunk : o->context + 1;
  b->pages_per_seq = (int32_t)((longest + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
  const struct runner_options open = {.model_path = o->model, .device = o->device, .kv_codec = o->kv_cache_dtype,
                                      .backend = {.n_threads = (int32_t)o->threads, .isa = o->isa, .prefill_weights = o->prefill_weights,
                                                  .max_batch_tokens = (int32_t)n_tokens,
                                                  .max_seqs = (int32_t)(o->rows ? n_tokens : n_seqs)}};
  if (runner_open(&b->runner, &open, &err)) {
    fprintf(stderr, "%s\n", err.text);
    return false;
  }
  if (!is_within_context(b, longest_chunk, deepest)) return false;
  b->runner.geometry.max_tokens = b->pages_per_seq * KV_PAGE_TOKENS;
  if (runner_kv_create(&b->runner, (int32_t)n_seqs * b->pages_per_seq, &err)) {
    fprintf(stderr, "%s\n", err.text);
    return false;
  }
  b->tokens = mem_calloc((size_t)n_tokens, sizeof(int32_t));
  b->positions = mem_calloc((size_t)n_tokens, sizeof(int32_t));
  b->rows = mem_calloc((size_t)n_tokens, sizeof(int32_t));
  const bool draws = b->runner.vtable->can_sample;
  if (draws) b->samples = mem_calloc((size_t)n_tokens, sizeof *b->samples);
  b->seq_start = mem_calloc((size_t)n_seqs + 1, sizeof(int32_t));
  b->kv_len = mem_calloc((size_t)n_seqs, sizeof(int32_t));
  b->table = mem_calloc((size_t)(n_seqs * b->pages_per_seq), sizeof(int32_t));
  return b->tokens && b->positions && b->rows && b->seq_start && b->kv_len && b->table && (b->samples || !draws);
}

static void close_bench(struct bench *b)
{
  runner_close(&b->runner);
  mem_free(b->tokens);
  mem_free(b->positions);
  mem_free(b->rows);
  mem_free(b->samples);
  mem_free(b->seq_start);
  mem_free(b->kv_len);
  mem_free(b->table);
}

struct size { int64_t depth, chunk; double *us; };

static json_t *rows_of(struct size *sizes, int n_sizes, int64_t n, int64_t n_decode)
{
  json_t *out = json_array();
  const double base_us = bench_percentile(sizes[0].us, n, 50);
  for (int i = 0; i < n_sizes; i++) {
    struct size *s = &sizes[i];
    const double p50 = bench_percentile(s->us, n, 50), least = bench_percentile(s->us, n, 0);
    const double each = s->chunk > 0 ? (p50 - base_us) / (double)s->chunk : 0;
    fprintf(stderr, "%d decodes + %4d tokens at %5d: %9.1f us (least %9.1f)  %7.1f us a token\n", (int)n_decode, (int)s->chunk,
            (int)s->depth, p50, least, each);
    json_array_append_new(out, json_pack("{s:I, s:I, s:f, s:f, s:f}", "depth", (json_int_t)s->depth, "chunk", (json_int_t)s->chunk,
                                         "p50_us", p50, "least_us", least, "per_token_us", each));
  }
  return out;
}

static int measure(const struct steps_options *o, const int64_t *chunks, int n_chunks, const int64_t *depths, int n_depths, int argc,
                   char **argv)
{
  struct bench b = {.options = o};
  struct size sizes[MOST_SIZES * MOST_SIZES + 1] = {{0}};
  int n_sizes = 1, status = 1;
  int64_t longest = 0, deepest = 0;
  for (int d = 0; d < n_depths; d++) {
    deepest = depths[d] > deepest ? depths[d] : deepest;
    for (int c = 0; c < n_chunks; c++) {
      longest = chunks[c] > longest ? chunks[c] : longest;
      sizes[n_sizes++] = (struct size){depths[d], chunks[c], NULL};
    }
  }
  double *times = mem_calloc((size_t)(n_sizes * o->rounds), sizeof *times);
  bool is_good = times && open_bench(&b, longest, deepest);
  for (int32_t s = 0; is_good && s < o->decodes; s++) is_good = fill(&b, 1 + s, (int32_t)o->context);
  if (is_good) is_good = fill(&b, 0, (int32_t)deepest);
  for (int i = 0; times && i < n_sizes; i++) sizes[i].us = times + i * o->rounds;
  for (int64_t r = -1; is_good && r < o->rounds; r++) { /* round -1 warms up */
    for (int i = o->decodes == 0; is_good && i < n_sizes; i++) {
      const int64_t us = run_mixed(&b, (int32_t)sizes[i].depth, (int32_t)sizes[i].chunk);
      is_good = us >= 0;
      if (r >= 0) sizes[i].us[r] = (double)us;
    }
  }
  if (is_good) {
    struct backend_info info;
    b.runner.vtable->info(b.runner.backend, &info);
    json_t *out = bench_header("steps", argc, argv);
    json_object_update_new(out, json_pack("{s:s, s:s, s:I, s:o}", "model", b.runner.model->config.name, "backend", info.name, "decodes",
                                          (json_int_t)o->decodes, "steps", rows_of(sizes, n_sizes, o->rounds, o->decodes)));
    status = bench_write_json(out, o->json) ? 0 : 1;
  }
  close_bench(&b);
  mem_free(times);
  return status;
}

int bench_steps(int argc, char **argv)
{
  struct steps_options options;
  struct option_set set;
  int status;
  if (!bench_parse("steps", "cost of one step of decodes and a chunk", &set, specs, sizeof specs / sizeof specs[0], &options, argc, argv,
                   &status))
    return status;
  int64_t chunks[MOST_SIZES], depths[MOST_SIZES];
  const int n_chunks = bench_parse_list(options.chunks, chunks, MOST_SIZES);
  const int n_depths = bench_parse_list(options.depths, depths, MOST_SIZES);
  if (!options.model || n_chunks == 0 || n_depths == 0) {
    fprintf(stderr, "sits2026-bench steps: needs --model, and lists such as --chunks 1,8 of at most %d sizes\n", MOST_SIZES);
    status = 2;
  } else {
    status = measure(&options, chunks, n_chunks, depths, n_depths, argc, argv);
  }
  option_set_fini(&set);
  return status;
}
