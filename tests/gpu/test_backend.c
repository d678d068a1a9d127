/* The CUDA backend against the CPU backend on real models: logits of prompts read whole, in pieces and mixed with decode steps, page
 * copies,
 * swaps, device sampling, and refusals.
 *
 * Models: stories260K (SITS_SHARED_DATA or ../shared/data), a SmolLM2 file (SITS_TEST_MODEL), and every *.bin of a folder of engine files
 * (SITS_TEST_ENGINES, one file a recipe); those that are absent are skipped.
 * Tolerances, ||cuda - cpu|| / ||cpu|| over all logits, both sides with pages of the same codec, which hold the same numbers but for
 * roundings. For quantised weights of model files the CPU has 8-bit activations of its own, CUDA f16 ones; in engine files both have the
 * file's. So they must agree within 4 %, with nibbles (int4, fp4) within 8 %, where a last bit before rounding now and then moves a value
 * by a fifteenth of its group's range. Engine files with 4-bit activations, where that happens in every product: 12 % and 15 %.
 */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/runner.h"
#include "gpu_test.h"

enum { SEQS = 5, MAX_LEN = 330, PAGES = 8 };
static const int32_t prompt_lens[SEQS] = {1, 40, 64, 150, 300};

struct side {
  struct runner runner;
  float *logits;
};

static uint32_t mix(uint32_t x)
{
  x = (x ^ x >> 16) * 0x7FEB352Du;
  return x ^ x >> 15;
}

static int32_t token_of(int32_t seq, int32_t pos, int32_t vocab)
{
  return (int32_t)((mix((uint32_t)(seq * 7919 + pos)) >> 8) % (uint32_t)vocab);
}

static int32_t n_ranks_of_cuda = 1;     /* all on device 0 */

static bool open_side(struct side *side, const char *path, const char *device, const char *codec, const char *recipe)
{
  struct sits_error err = {0};
  struct runner_options options = {
      .model_path = path, .device = device, .kv_codec = codec, .backend = {.max_batch_tokens = 1024, .max_seqs = 32, .recipe = recipe}};
  if (strcmp(device, "cuda") == 0) options.backend.n_ranks = n_ranks_of_cuda, options.backend.has_devices = true;
  enum sits_status status = runner_open(&side->runner, &options, &err);
  if (!status) status = runner_kv_create(&side->runner, SEQS * PAGES + 4, &err);
  if (status) printf("      %s %s: %s\n", device, codec, err.text);
  return status == SITS_OK;
}

/* One step: n_new[s] tokens of each sequence from from[s] on, logits of each last token. permute: page p of the pool is used as
 * PAGES*SEQS-1-p. */
static enum sits_status step(struct side *side, const int32_t *from, const int32_t *n_new, const struct backend_sample *sample,
                             struct backend_result *result)
{
  static int32_t tokens[SEQS * MAX_LEN], positions[SEQS * MAX_LEN];
  int32_t start[SEQS + 1], kv_len[SEQS], rows[SEQS], table[SEQS * PAGES], n = 0, n_seqs = 0;
  for (int32_t s = 0; s < SEQS; s++) {
    if (n_new[s] == 0) continue;
    start[n_seqs] = n;
    for (int32_t i = 0; i < n_new[s]; i++, n++)
      tokens[n] = token_of(s, from[s] + i, side->runner.model->config.n_vocab), positions[n] = from[s] + i;
    kv_len[n_seqs] = from[s] + n_new[s];
    rows[n_seqs] = n - 1;
    for (int32_t i = 0; i < PAGES; i++) table[n_seqs * PAGES + i] = SEQS * PAGES - 1 - (i * SEQS + s);
    start[++n_seqs] = n;
  }
  const struct backend_batch batch = {.n_tokens = n,
                                      .n_seqs = n_seqs,
                                      .n_rows = n_seqs,
                                      .tokens = tokens,
                                      .positions = positions,
                                      .seq_start = start,
                                      .kv_len = kv_len,
                                      .block_table = table,
                                      .table_stride = PAGES,
                                      .row_token = rows,
                                      .sample = sample};
  enum sits_status status = side->runner.vtable->submit(side->runner.compiled, side->runner.kv, &batch);
  return status ? status : side->runner.vtable->wait(side->runner.compiled, result);
}

static void compare(struct side *cpu, struct side *cuda, const int32_t *from, const int32_t *n_new, double limit, const char *what)
{
  struct backend_result a, b;
  enum sits_status cpu_status = step(cpu, from, n_new, NULL, &a), cuda_status = step(cuda, from, n_new, NULL, &b);
  if (cpu_status || cuda_status) {
    verdict(false, "%s: status %d and %d", what, cpu_status, cuda_status);
    return;
  }
  const int32_t vocab = cpu->runner.model->config.n_vocab;
  int32_t rows = 0, same = 0;
  for (int32_t s = 0; s < SEQS; s++) rows += n_new[s] > 0;
  for (int32_t r = 0; r < rows; r++) {
    int32_t best[2] = {0, 0};
    for (int32_t i = 1; i < vocab; i++) {
      if (a.logits[(size_t)r * vocab + i] > a.logits[(size_t)r * vocab + best[0]]) best[0] = i;
      if (b.logits[(size_t)r * vocab + i] > b.logits[(size_t)r * vocab + best[1]]) best[1] = i;
    }
    same += best[0] == best[1];
  }
  const double error = relative_error(b.logits, a.logits, (size_t)rows * vocab);
  verdict(error < limit, "%s: %.4f, best token equal in %d of %d", what, error, same, rows);
}

/* Device draws: greedy rows equal the host's argmax of a second run's logits, and the run can be repeated. */
static void check_sampling(struct side *cuda, const int32_t *from, const int32_t *n_new)
{
  struct backend_sample sample[SEQS];
  struct backend_result r;
  int32_t drawn[SEQS], bad = 0, rows = 0;
  for (int32_t s = 0; s < SEQS; s++) sample[s] = (struct backend_sample){.top_p = 1.f}, rows += n_new[s] > 0;
  enum sits_status status = step(cuda, from, n_new, sample, &r);
  if (!status && r.tokens) memcpy(drawn, r.tokens, sizeof drawn);
  if (!status) status = step(cuda, from, n_new, NULL, &r);
  const int32_t vocab = cuda->runner.model->config.n_vocab;
  for (int32_t i = 0; !status && i < rows; i++) {
    const float *row = r.logits + (size_t)i * vocab;
    int32_t best = 0;
    for (int32_t k = 1; k < vocab; k++)
      if (row[k] > row[best]) best = k;
    bad += best != drawn[i];
  }
  verdict(!status && bad == 0, "greedy on the device, %d rows: status %d, %d differ", rows, status, bad);
}

/* A step whose tokens the step before draws, submitted before that one is waited for, gives what the same steps give one by one. */
static void check_ahead(struct side *cuda, int32_t position)
{
  const struct backend_vtable *v = cuda->runner.vtable;
  const struct backend_sample greedy = {.top_p = 1.f};
  const int32_t start[2] = {0, 1}, row = 0, first = token_of(0, position, cuda->runner.model->config.n_vocab);
  int32_t table[PAGES], token, at, kv_len, drawn[2][3] = {{0}};
  for (int32_t i = 0; i < PAGES; i++) table[i] = SEQS * PAGES - 1 - i * SEQS;
  struct backend_batch b = {.n_tokens = 1, .n_seqs = 1, .n_rows = 1, .tokens = &token, .positions = &at,
                            .seq_start = start, .kv_len = &kv_len, .block_table = table, .table_stride = PAGES, .row_token = &row,
                            .sample = &greedy};
  struct backend_result r = {0};
  enum sits_status status = SITS_OK;
  token = -1, at = position, kv_len = position + 1;
  const bool is_refused = v->submit(cuda->runner.compiled, cuda->runner.kv, &b) == SITS_INVALID_ARGUMENT;
  for (int32_t ahead = 0; ahead < 2; ahead++)
    for (int32_t i = 0; i < 3 && !status; i++) {
      token = i == 0 ? first : ahead ? -1 : drawn[0][i - 1], at = position + i, kv_len = at + 1;
      status = v->submit(cuda->runner.compiled, cuda->runner.kv, &b);
      if (!status && ahead && i == 1) { /* a third is too many */
        token = 0;
        status = v->submit(cuda->runner.compiled, cuda->runner.kv, &b) == SITS_INVALID_ARGUMENT ? SITS_OK : SITS_INTERNAL;
      }
      for (int32_t w = ahead ? i - 1 : i; !status && w >= 0 && w <= (ahead && i < 2 ? i - 1 : i); w++) {
        status = v->wait(cuda->runner.compiled, &r);
        if (!status) drawn[ahead][w] = r.tokens[0];
      }
    }
  const bool is_same = memcmp(drawn[0], drawn[1], sizeof drawn[0]) == 0;
  verdict(!status && is_same && is_refused, "one step ahead: status %d, tokens %d %d %d and %d %d %d", status, drawn[0][0], drawn[0][1],
          drawn[0][2], drawn[1][0], drawn[1][1], drawn[1][2]);
}

/* Page swap: read all pages, clear them, write them back. */
static void swap_pages(struct side *side)
{
  const struct backend_vtable *v = side->runner.vtable;
  void *page = mem_calloc(1, (size_t)side->runner.page_bytes), *zero = mem_calloc(1, (size_t)side->runner.page_bytes);
  enum sits_status status = page && zero ? SITS_OK : SITS_NOMEM;
  for (int32_t i = 0; i < SEQS * PAGES && !status; i++) {
    const struct kv_copy copy = {i, SEQS * PAGES};
    status = v->kv_copy_pages(side->runner.kv, &copy, 1);
    if (!status) status = v->kv_read_page(side->runner.kv, SEQS * PAGES, page);
    if (!status) status = v->kv_write_page(side->runner.kv, i, zero);
    if (!status) status = v->kv_write_page(side->runner.kv, i, page);
  }
  verdict(status == SITS_OK, "copy, read and write of every page: status %d", status);
  mem_free(page);
  mem_free(zero);
}

static void run_model(const char *path, const char *name, const char *codec, double limit)
{
  struct side cpu = {0}, cuda = {0};
  int32_t from[SEQS] = {0}, n_new[SEQS], split[SEQS], part[SEQS] = {0};
  printf("== %s, %s pages\n", name, codec);
  if (!open_side(&cpu, path, "cpu", codec, NULL) || !open_side(&cuda, path, "cuda", codec, NULL)) {
    verdict(false, "open %s", name);
    goto done;
  }
  compare(&cpu, &cuda, from, prompt_lens, limit, "prompts at once");
  for (int32_t s = 0; s < SEQS; s++) split[s] = prompt_lens[s] / 3, n_new[s] = prompt_lens[s] - split[s];
  compare(&cpu, &cuda, from, split, limit, "first third");
  compare(&cpu, &cuda, split, n_new, limit, "the rest");
  memcpy(from, prompt_lens, sizeof from);
  for (int32_t i = 0; i < 3; i++) {
    for (int32_t s = 0; s < SEQS; s++) n_new[s] = 1;
    compare(&cpu, &cuda, from, n_new, limit, "decode of all");
    for (int32_t s = 0; s < SEQS; s++) from[s]++;
  }
  swap_pages(&cpu);
  swap_pages(&cuda);
  n_new[0] = n_new[2] = n_new[4] = 0;
  compare(&cpu, &cuda, from, n_new, limit, "decode of two");
  from[1]++, from[3]++;
  n_new[3] = 0;
  compare(&cpu, &cuda, from, n_new, limit, "decode of one");
  from[1]++;
  part[0] = 1, part[1] = 9, part[2] = 1, part[3] = 20, part[4] = 1;
  compare(&cpu, &cuda, from, part, limit, "decode beside pieces of prompts");
  for (int32_t s = 0; s < SEQS; s++) from[s] += part[s], n_new[s] = 1;
  compare(&cpu, &cuda, from, n_new, limit, "decode again");
  check_sampling(&cuda, from, n_new);
  if (cuda.runner.vtable->in_flight > 1) check_ahead(&cuda, from[0]);
  const int32_t beyond[SEQS] = {PAGES * 64, 1, 1, 1, 1};
  struct backend_result r;
  verdict(step(&cuda, beyond, n_new, NULL, &r) == SITS_INVALID_ARGUMENT, "a position outside the table is refused");
done:
  runner_close(&cpu.runner);
  runner_close(&cuda.runner);
}

/* Few short sequences beside a prompt: each gets what a step of decodes alone gave it. */
static void run_beside(const char *codec)
{
  static const int32_t lens[SEQS] = {1, 40, 130, 0, 300}, nothing[SEQS] = {0};
  static const int32_t beside[] = {20, 64};
  struct side side = {0};
  struct backend_result r;
  int32_t n_new[SEQS], n_rows = 0;
  printf("== synthetic:tiny, %s pages, decodes beside a prompt\n", codec);
  enum sits_status status = open_side(&side, "synthetic:tiny", "cuda", codec, "w4a16") ? SITS_OK : SITS_INTERNAL;
  if (!status) status = step(&side, nothing, lens, NULL, &r);
  for (int32_t s = 0; s < SEQS; s++) n_new[s] = lens[s] > 0, n_rows += n_new[s];
  if (!status) status = step(&side, lens, n_new, NULL, &r);
  const size_t vocab = status ? 0 : (size_t)side.runner.model->config.n_vocab;
  float *alone = mem_calloc((size_t)n_rows * vocab + 1, sizeof *alone);
  if (!status) memcpy(alone, r.logits, (size_t)n_rows * vocab * sizeof *alone);
  for (size_t i = 0; i < sizeof beside / sizeof *beside && !status; i++) {
    n_new[3] = beside[i]; /* the row before the last one is its */
    status = step(&side, lens, n_new, NULL, &r);
    if (status) break;
    const double error = fmax(relative_error(r.logits, alone, (size_t)(n_rows - 1) * vocab),
                              relative_error(r.logits + (size_t)n_rows * vocab, alone + (size_t)(n_rows - 1) * vocab, vocab));
    verdict(error < 0.02, "%d decodes beside %d tokens against alone: %.4f", n_rows, beside[i], error);
  }
  verdict(status == SITS_OK, "all steps ran: status %d", status);
  mem_free(alone);
  runner_close(&side.runner);
}

/* Many short sequences at once: every bucket of the synthetic model must give each sequence what it gets alone. */
static void run_buckets(const char *codec, const char *recipe, double limit)
{
  enum { MOST = 130 };
  static int32_t tokens[MOST], positions[MOST], start[MOST + 1], kv_len[MOST], rows[MOST], table[MOST];
  static const int32_t sizes[] = {2, 3, 8, 9, 16, 17, 33, 64, 65, 100, 130};
  struct sits_error err = {0};
  struct runner runner;
  const struct runner_options options = {.model_path = "synthetic:tiny",
                                         .device = "cuda",
                                         .kv_codec = codec,
                                         .backend = {.max_batch_tokens = 512, .max_seqs = MOST, .recipe = recipe}};
  printf("== synthetic:tiny, %s pages, recipe %s\n", codec, recipe);
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = runner_kv_create(&runner, MOST, &err);
  if (status) {
    verdict(false, "open synthetic:tiny: %s", err.text);
    return;
  }
  const int32_t vocab = runner.model->config.n_vocab;
  float *alone = mem_calloc((size_t)MOST * (size_t)vocab, sizeof *alone),
        *together = mem_calloc((size_t)MOST * (size_t)vocab, sizeof *together);
  struct backend_result r;
  for (int32_t i = 0; i < MOST; i++)
    tokens[i] = token_of(i, 3, vocab), positions[i] = 0, kv_len[i] = 1, rows[i] = i, start[i + 1] = i + 1, table[i] = i;
  struct backend_batch batch = {.n_tokens = 1,
                                .n_seqs = 1,
                                .n_rows = 1,
                                .positions = positions,
                                .seq_start = start,
                                .kv_len = kv_len,
                                .table_stride = 1,
                                .row_token = rows};
  for (int32_t i = 0; i < MOST && !status; i++) {
    batch.tokens = tokens + i, batch.block_table = table + i;
    status = runner.vtable->submit(runner.compiled, runner.kv, &batch);
    if (!status) status = runner.vtable->wait(runner.compiled, &r);
    if (!status) memcpy(alone + (size_t)i * vocab, r.logits, (size_t)vocab * sizeof *alone);
  }
  batch.tokens = tokens, batch.block_table = table;
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes && !status; k++) {
    batch.n_tokens = batch.n_seqs = batch.n_rows = sizes[k];
    status = runner.vtable->submit(runner.compiled, runner.kv, &batch);
    if (!status) status = runner.vtable->wait(runner.compiled, &r);
    if (status) break;
    double error =
        relative_error(r.logits, alone, (size_t)sizes[k] * (size_t)vocab); /* of all rows: a random model amplifies one or two */
    verdict(error < limit, "batch of %d against one by one: %.4f", sizes[k], error);
  }
  verdict(status == SITS_OK, "all steps ran: status %d", status);
  mem_free(alone);
  mem_free(together);
  runner_close(&runner);
}

/* Weights expanded once and kept, or in each step: the same logits to the bit, more memory; other names are refused. */
static void run_prefill_weights(const char *recipe)
{
  enum { N = 600 };
  static const char *const names[] = {"expand", "resident", "auto"};
  static int32_t tokens[N], positions[N], table[N / KV_PAGE_TOKENS + 1];
  const int32_t start[2] = {0, N}, kv_len = N, row = N - 1;
  float *logits[3] = {0};
  uint64_t bytes[3] = {0};
  size_t vocab = 0;
  struct sits_error err = {0};
  struct runner runner;
  printf("== synthetic:tiny, prefill-weights, recipe %s\n", recipe);
  struct runner_options options = {.model_path = "synthetic:tiny", .device = "cuda", .kv_codec = "f16",
                                   .backend = {.max_batch_tokens = N, .max_seqs = 4, .recipe = recipe, .prefill_weights = "some"}};
  enum sits_status status = runner_open(&runner, &options, &err);
  verdict(status == SITS_INVALID_ARGUMENT && strcmp(err.param, "prefill-weights") == 0, "'some' is refused: %s", err.text);
  for (int i = 0; i < 3; i++) {
    options.backend.prefill_weights = names[i];
    status = runner_open(&runner, &options, &err);
    if (!status) status = runner_kv_create(&runner, N / KV_PAGE_TOKENS + 1, &err);
    for (int32_t t = 0; t < N && !status; t++) tokens[t] = token_of(1, t, runner.model->config.n_vocab), positions[t] = t;
    for (int32_t k = 0; k <= N / KV_PAGE_TOKENS; k++) table[k] = k;
    const struct backend_batch batch = {.n_tokens = N, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions,
                                        .seq_start = start, .kv_len = &kv_len, .block_table = table,
                                        .table_stride = N / KV_PAGE_TOKENS + 1, .row_token = &row};
    struct backend_result r = {0};
    if (!status) status = runner.vtable->submit(runner.compiled, runner.kv, &batch);
    if (!status) status = runner.vtable->wait(runner.compiled, &r);
    if (status) break;
    vocab = (size_t)runner.model->config.n_vocab;
    logits[i] = mem_calloc(vocab, sizeof **logits);
    memcpy(logits[i], r.logits, vocab * sizeof **logits);
    bytes[i] = runner.vtable->program_bytes(runner.compiled);
    runner_close(&runner);
  }
  verdict(!status && memcmp(logits[0], logits[1], vocab * sizeof **logits) == 0, "resident gives what expanding gives: status %d %s",
          status, status ? err.text : "");
  verdict(!status && bytes[1] > bytes[0] && bytes[2] >= bytes[0] && bytes[2] <= bytes[1], "bytes: %llu expand, %llu resident, %llu auto",
          (unsigned long long)bytes[0], (unsigned long long)bytes[1], (unsigned long long)bytes[2]);
  for (int i = 0; i < 3; i++) mem_free(logits[i]);
  if (status) runner_close(&runner);
}

/* A prompt, then a token by a captured graph: its logits in `out` [V]. */
static enum sits_status prompt_and_decode(struct runner *runner, float *out)
{
  enum { N = 40 };
  int32_t tokens[N + 1], positions[N + 1], start[2] = {0, N}, kv_len = N, row = N - 1, page = 0;
  struct backend_result r = {0};
  for (int32_t t = 0; t <= N; t++) tokens[t] = token_of(2, t, runner->model->config.n_vocab), positions[t] = t;
  struct backend_batch batch = {.n_tokens = N, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions, .seq_start = start,
                                .kv_len = &kv_len, .block_table = &page, .table_stride = 1, .row_token = &row};
  enum sits_status status = runner->vtable->submit(runner->compiled, runner->kv, &batch);
  if (!status) status = runner->vtable->wait(runner->compiled, &r);
  batch.tokens = tokens + N, batch.positions = positions + N, batch.n_tokens = start[1] = 1, kv_len = N + 1, row = 0;
  if (!status) status = runner->vtable->submit(runner->compiled, runner->kv, &batch);
  if (!status) status = runner->vtable->wait(runner->compiled, &r);
  if (!status) memcpy(out, r.logits, (size_t)runner->model->config.n_vocab * sizeof *out);
  return status;
}

/* Page memory given back and made anew, at the same address of the host as may be: graphs of the old one must not serve the new one. */
static void run_new_pages(void)
{
  struct sits_error err = {0};
  struct runner runner = {0};
  const struct runner_options options = {.model_path = "synthetic:tiny", .device = "cuda", .kv_codec = "int4",
                                         .backend = {.max_batch_tokens = 64, .max_seqs = 4}};
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = runner_kv_create(&runner, 4, &err);
  const size_t bytes = status ? 4 : (size_t)runner.model->config.n_vocab * sizeof(float);
  float *first = mem_calloc(1, bytes), *second = mem_calloc(1, bytes);
  if (!status) status = prompt_and_decode(&runner, first);
  if (!status) {
    runner.vtable->kv_destroy(runner.kv);
    runner.kv = NULL;
    (void)gpu_alloc(4 * (size_t)runner.page_bytes); /* where the old pages lay, so that the new ones lie elsewhere */
    status = runner_kv_create(&runner, 4, &err);
  }
  if (!status) status = prompt_and_decode(&runner, second);
  verdict(!status && memcmp(first, second, bytes) == 0, "new page memory: the same logits: status %d %s", status, err.text);
  mem_free(first);
  mem_free(second);
  runner_close(&runner);
}

/* Every engine file of a folder, with every codec. */
static void run_engine_files(const char *folder)
{
  static const char *const codecs[] = {"f16", "int8", "int4", "fp4"};
  struct dirent **names = NULL;
  const int n = scandir(folder, &names, NULL, alphasort);
  char path[1024];
  for (int i = 0; i < n; i++) {
    const char *name = names[i]->d_name, *end = strstr(name, ".bin");
    const bool has_int4 = strstr(name, "w4a4") != NULL;
    if (end != NULL && end[4] == 0) {
      snprintf(path, sizeof path, "%s/%s", folder, name);
      for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++)
        run_model(path, name, codecs[c], c < 2 ? has_int4 ? 0.12 : 0.04 : has_int4 ? 0.15 : 0.08);
    }
    free(names[i]);
  }
  free(names);
}

/* A rank's device hangs: the step ends with DEVICE soon after the time allowed. */
static void run_stall(const char *path)
{
  struct sits_error err = {0};
  struct side side = {0};
  struct backend_result r;
  const int32_t from[SEQS] = {0}, n_new[SEQS] = {1, 1, 1, 1, 1};
  const struct runner_options options = {.model_path = path, .device = "cuda", .kv_codec = "f16",
                                         .backend = {.max_batch_tokens = 1024, .max_seqs = 32, .n_ranks = 2, .has_devices = true,
                                                     .collective_timeout_ms = 1000}};
  setenv("SITS_CUDA_STALL", "1:2", 1);
  enum sits_status status = runner_open(&side.runner, &options, &err);
  if (!status) status = runner_kv_create(&side.runner, SEQS * PAGES + 4, &err);
  if (!status) status = step(&side, from, n_new, NULL, &r);
  verdict(status == SITS_OK, "before a rank hangs: status %d %s", status, err.text);
  if (status) return;
  const int64_t start_us = clock_monotonic_us();
  status = step(&side, from, n_new, NULL, &r);
  const double s = (double)(clock_monotonic_us() - start_us) * 1e-6;
  verdict(status == SITS_DEVICE && s < 10, "a rank that hangs: status %d after %.1f s", status, s);
  verdict(step(&side, from, n_new, NULL, &r) == SITS_DEVICE, "and for ever");
  unsetenv("SITS_CUDA_STALL");
  runner_close(&side.runner);
}

int main(void)
{
  gpu_open();
  char path[1024];
  const char *shared = getenv("SITS_SHARED_DATA"), *big = getenv("SITS_TEST_MODEL");
  snprintf(path, sizeof path, "%s/models/stories260K/stories260K.gguf", shared ? shared : "../shared/data");
  if (access(path, R_OK) == 0) {
    run_model(path, "stories260K", "f16", 0.04);
    run_model(path, "stories260K", "int8", 0.04);
    run_model(path, "stories260K", "int4", 0.08);
    run_model(path, "stories260K", "fp4", 0.08);
    if (!gpu_is_small()) {
      n_ranks_of_cuda = 2;
      run_model(path, "stories260K over 2 ranks", "f16", 0.04);
      run_model(path, "stories260K over 2 ranks", "int8", 0.04);
      n_ranks_of_cuda = 1;
      run_stall(path);
    }
  } else
    printf("SKIP  %s is absent\n", path);
  if (big && access(big, R_OK) == 0) {
    run_model(big, "SmolLM2", "f16", 0.04);
    run_model(big, "SmolLM2", "int8", 0.04);
    run_model(big, "SmolLM2", "int4", 0.08);
    run_model(big, "SmolLM2", "fp4", 0.08);
  } else
    printf("SKIP  SITS_TEST_MODEL is not set\n");
  if (getenv("SITS_TEST_ENGINES") != NULL)
    run_engine_files(getenv("SITS_TEST_ENGINES"));
  else
    printf("SKIP  SITS_TEST_ENGINES is not set\n");
  run_new_pages();
  run_beside("int4");
  run_beside("fp4");
  run_prefill_weights("w4a16");
  run_prefill_weights("w4a8");
  run_buckets("int4", "w4a16", 0.02);
  run_buckets("int4", "w4a8", 0.06);
  run_buckets("f16", "w4a16", 0.02);
  return gpu_finish();
}
