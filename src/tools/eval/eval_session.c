/* See eval.h: sessions, steps, and the arithmetic on logits that the commands share. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mapfile.h"
#include "base/mem.h"
#include "engine/page_budget.h"
#include "tools/eval/eval.h"
#include "tensor/source.h"

static enum sits_status reserve(struct eval_session *s, struct sits_error *err)
{
  size_t tokens = (size_t)s->max_tokens * sizeof(int32_t), slots = (size_t)s->n_slots * sizeof(int32_t);
  const struct kv_options kv = {.n_pages = s->runner.geometry.n_pages, .n_slots = s->n_slots, .max_pages = s->slot_pages,
                                .page_budget = s->page_budget,
                                .n_columns = s->runner.geometry.n_layers * s->runner.geometry.n_kv_heads};
  enum sits_status status = kv_create(&kv, &s->pages);
  if (status) return sits_fail(err, status, "out of memory for the pages' bookkeeping");
  s->kv_slots = mem_calloc(1, slots);
  s->blocks = mem_calloc((size_t)s->n_slots, sizeof *s->blocks);
  s->tokens = mem_alloc(tokens);
  s->positions = mem_alloc(tokens);
  s->rows = mem_alloc((size_t)s->max_rows * sizeof(int32_t));
  s->starts = mem_alloc(slots + sizeof(int32_t));
  s->kv_lengths = mem_alloc(slots);
  s->table = mem_alloc(slots * (size_t)s->slot_pages);
  if (!s->kv_slots || !s->blocks || !s->tokens || !s->positions || !s->rows || !s->starts || !s->kv_lengths || !s->table)
    return sits_fail(err, SITS_NOMEM, "out of memory for the batch");
  for (int32_t i = 0; i < s->n_slots && !status; i++) status = kv_open(s->pages, (struct kv_owner){0}, &s->kv_slots[i]);
  return status;
}

enum sits_status eval_session_open(struct eval_session *s, const struct eval_options *options, int32_t n_slots, int32_t max_length,
                                   int32_t max_rows, struct sits_error *err)
{
  *s = (struct eval_session){.n_slots = n_slots, .slot_pages = (max_length + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, .max_rows = max_rows,
                             .page_budget = (int32_t)options->kv_page_budget};
  s->max_tokens = (int32_t)options->batch_tokens;
  if (s->max_tokens < n_slots) s->max_tokens = n_slots;
  struct runner_options runner = {
      .model_path = options->model, .device = options->device, .kv_codec = options->kv_cache_dtype, .unfused = options->unfused,
      .backend = {.n_threads = (int32_t)options->threads, .max_batch_tokens = s->max_tokens,
                  .max_seqs = max_rows > n_slots ? max_rows : n_slots, .isa = options->isa,
                  .n_ranks = (int32_t)options->tensor_parallel_size, .has_devices = options->one_device,
                  .compress_reduce = options->tensor_parallel_compress}};
  enum sits_status status = runner_open(&s->runner, &runner, err);
  if (status) return status; /* nothing is open */
  if (max_length > s->runner.model->config.max_context)
    status = sits_fail_param(err, SITS_CONTEXT_LENGTH, "ctx", "%d tokens are more than the model's context of %d", max_length,
                             s->runner.model->config.max_context);
  if (!status) status = tokenizer_load(s->runner.model->source, &s->tokenizer, err);
  if (!status && s->page_budget != 0 && (s->runner.codec != KV_FP4_SPARSE || s->page_budget < KV_LEAST_BUDGET))
    status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "kv-page-budget", "kv-page-budget is at least %d, and for fp4-sparse only",
                             KV_LEAST_BUDGET);
  int32_t held = s->page_budget > 0 && s->page_budget < s->slot_pages ? s->page_budget : s->slot_pages;
  s->runner.geometry.max_tokens = max_length;
  if (!status) status = runner_kv_create(&s->runner, n_slots * held, err);
  if (!status) status = reserve(s, err);
  if (!status && options->on_open) status = options->on_open(s, err);
  if (status) eval_session_close(s);
  return status;
}

void eval_session_close(struct eval_session *s)
{
  if (s->tokenizer) tokenizer_destroy(s->tokenizer);
  runner_close(&s->runner);
  kv_destroy(s->pages);
  mem_free(s->kv_slots);
  mem_free(s->blocks);
  mem_free(s->tokens);
  mem_free(s->positions);
  mem_free(s->rows);
  mem_free(s->starts);
  mem_free(s->kv_lengths);
  mem_free(s->table);
  *s = (struct eval_session){0};
}

void eval_session_reset(struct eval_session *s)
{
  for (int32_t i = 0; i < s->n_slots; i++) {
    kv_close(s->pages, s->kv_slots[i]);
    if (kv_open(s->pages, (struct kv_owner){0}, &s->kv_slots[i]) != SITS_OK) abort(); /* as many as were closed */
  }
}

static int32_t length_of(const struct eval_session *s, int32_t slot) { return kv_tokens(s->pages, s->kv_slots[slot]); }

int32_t eval_room(const struct eval_session *s, int32_t slot)
{
  const int32_t n = length_of(s, slot);
  return s->page_budget > 0 ? (int32_t)(kv_sparse_limit(s->page_budget, KV_TOKENS, n) - n) : INT32_MAX;
}

static enum sits_status check_piece(const struct eval_session *s, const struct eval_piece *piece, int32_t n_tokens, int32_t n_rows,
                                    struct sits_error *err)
{
  int32_t n_vocab = s->runner.model->config.n_vocab;
  bool fits = n_tokens + piece->n_tokens <= s->max_tokens && n_rows + piece->n_tokens - piece->first_row <= s->max_rows &&
              length_of(s, piece->slot) + piece->n_tokens <= s->slot_pages * KV_PAGE_TOKENS &&
              piece->n_tokens <= eval_room(s, piece->slot);
  if (!fits) return sits_fail(err, SITS_INTERNAL, "a step is larger than its session");
  for (int32_t i = 0; i < piece->n_tokens; i++)
    if (piece->tokens[i] < 0 || piece->tokens[i] >= n_vocab)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "ids", "token id %d is not within 0 to %d", piece->tokens[i], n_vocab - 1);
  return SITS_OK;
}

/* Pages for the piece, its line of the block table, and its blocks. */
static enum sits_status place_piece(struct eval_session *s, int32_t p, const struct eval_piece *piece, struct sits_error *err)
{
  struct kv_move move;
  int32_t n_moves = 0;
  const int32_t *pages, slot = s->kv_slots[piece->slot];
  enum sits_status status = kv_reserve(s->pages, slot, kv_tokens(s->pages, slot) + piece->n_tokens, &move, &n_moves);
  if (status) return sits_fail(err, SITS_INTERNAL, "a step has more pages than its session");
  if (s->page_budget > 0) {
    status = page_budget_copy(s->pages, slot, s->runner.vtable, s->runner.kv);
    if (status) return sits_fail(err, status, "the backend failed to copy blocks: %s", sits_status_info(status)->text);
    s->blocks[p] = page_budget_blocks(s->pages, slot);
  }
  const int32_t n = kv_pages(s->pages, slot, &pages);
  for (int32_t i = 0; i < s->slot_pages; i++) s->table[p * s->slot_pages + i] = i < n ? pages[i] : 0;
  return SITS_OK;
}

enum sits_status eval_step(struct eval_session *s, const struct eval_piece *pieces, int32_t n_pieces, const float **logits,
                           struct sits_error *err)
{
  int32_t n_tokens = 0, n_rows = 0;
  for (int32_t p = 0; p < n_pieces; p++) {
    const struct eval_piece *piece = &pieces[p];
    const int32_t length = length_of(s, piece->slot);
    enum sits_status status = check_piece(s, piece, n_tokens, n_rows, err);
    if (!status) status = place_piece(s, p, piece, err);
    if (status) return status;
    s->starts[p] = n_tokens;
    for (int32_t i = 0; i < piece->n_tokens; i++) {
      if (i >= piece->first_row) s->rows[n_rows++] = n_tokens;
      s->tokens[n_tokens] = piece->tokens[i];
      s->positions[n_tokens++] = length + i;
    }
    s->kv_lengths[p] = length + piece->n_tokens;
  }
  s->starts[n_pieces] = n_tokens;
  const struct backend_batch batch = {
      .n_tokens = n_tokens, .n_seqs = n_pieces, .n_rows = n_rows, .tokens = s->tokens, .positions = s->positions, .seq_start = s->starts,
      .kv_len = s->kv_lengths, .block_table = s->table, .table_stride = s->slot_pages, .row_token = s->rows,
      .blocks = s->page_budget > 0 ? s->blocks : NULL};
  struct backend_result result = {0};
  enum sits_status status = s->runner.vtable->submit(s->runner.compiled, s->runner.kv, &batch);
  if (!status) status = s->runner.vtable->wait(s->runner.compiled, &result);
  if (status) return sits_fail(err, status, "the backend failed: %s", sits_status_info(status)->text);
  for (int32_t p = 0; p < n_pieces; p++) kv_commit(s->pages, s->kv_slots[pieces[p].slot], pieces[p].tokens, pieces[p].n_tokens);
  *logits = result.logits;
  return SITS_OK;
}

/* exp(x) for -87 <= x <= 0 to a relative 2e-7: 2^n by the exponent field, the rest by a polynomial (Cephes' expf). Written so that the
 * compiler turns the loop below into vector code. */
static inline __attribute__((always_inline)) float exp_negative(float x)
{
  float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  float scale;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127u) << 23; /* the low bits of `shifted` hold n */
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

/* Sum of exp(logits[i] - largest): 16 float lanes over 256 elements, then into a double. */
static inline __attribute__((always_inline)) double sum_exp_body(const float *logits, int32_t n, float largest)
{
  double sum = 0;
  int32_t i = 0;
  for (; i + 256 <= n; i += 256) {
    float lanes[16] = {0};
    for (int32_t k = 0; k < 256; k += 16)
      for (int32_t j = 0; j < 16; j++) {
        float x = logits[i + k + j] - largest;
        lanes[j] += exp_negative(x < -87.0f ? -87.0f : x);
      }
    for (int32_t j = 0; j < 16; j++) sum += (double)lanes[j];
  }
  for (; i < n; i++) sum += (double)expf(logits[i] - largest);
  return sum;
}

/* Sum of exp(p[i] - largest) * (p[i] - q[i]), the same way. */
static inline __attribute__((always_inline)) double sum_gap_body(const float *p, const float *q, int32_t n, float largest)
{
  double sum = 0;
  int32_t i = 0;
  for (; i + 256 <= n; i += 256) {
    float lanes[16] = {0};
    for (int32_t k = 0; k < 256; k += 16)
      for (int32_t j = 0; j < 16; j++) {
        const float a = p[i + k + j], x = a - largest;
        lanes[j] += exp_negative(x < -87.0f ? -87.0f : x) * (a - q[i + k + j]);
      }
    for (int32_t j = 0; j < 16; j++) sum += (double)lanes[j];
  }
  for (; i < n; i++) sum += (double)expf(p[i] - largest) * (double)(p[i] - q[i]);
  return sum;
}

#if defined(__x86_64__)
/* Without trapping-math the clamp becomes a blend, and the loop vector code; clang does so by itself. */
#if defined(__clang__)
#define FAST __attribute__((target("avx2,fma")))
#else
#define FAST __attribute__((target("avx2,fma"), optimize("O3", "no-trapping-math")))
#endif
static FAST double sum_exp_avx2(const float *logits, int32_t n, float largest) { return sum_exp_body(logits, n, largest); }
static FAST double sum_gap_avx2(const float *p, const float *q, int32_t n, float largest) { return sum_gap_body(p, q, n, largest); }
static bool is_fast(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define sum_exp_avx2 sum_exp_body
#define sum_gap_avx2 sum_gap_body
static bool is_fast(void) { return false; }
#endif

static float largest_of(const float *logits, int32_t n)
{
  float largest = logits[0];
  for (int32_t i = 1; i < n; i++) largest = logits[i] > largest ? logits[i] : largest;
  return largest;
}

double eval_logsumexp(const float *logits, int32_t n)
{
  const float largest = largest_of(logits, n);
  if (!isfinite(largest)) return (double)NAN;
  return (double)largest + log(is_fast() ? sum_exp_avx2(logits, n, largest) : sum_exp_body(logits, n, largest));
}

double eval_divergence(const float *p, double p_total, const float *q, double q_total, int32_t n)
{
  const float largest = largest_of(p, n);
  const double sum = is_fast() ? sum_gap_avx2(p, q, n, largest) : sum_gap_body(p, q, n, largest);
  return sum * exp((double)largest - p_total) - p_total + q_total;
}

void eval_top(const float *logits, int32_t n, int32_t k, int32_t *out)
{
  int32_t n_kept = 0;
  for (int32_t i = 0; i < n; i++) {
    if (n_kept == k && logits[i] <= logits[out[k - 1]]) continue;
    int32_t at = n_kept < k ? n_kept++ : k - 1;
    for (; at > 0 && logits[i] > logits[out[at - 1]]; at--) out[at] = out[at - 1];
    out[at] = i;
  }
}

unsigned eval_encode_flags(const struct eval_options *options)
{
  return (options->add_special ? (unsigned)TOKENIZER_ADD_SPECIAL : 0) | (options->parse_special ? (unsigned)TOKENIZER_PARSE_SPECIAL : 0);
}

enum sits_status eval_encode_file(const struct tokenizer *tokenizer, const struct eval_options *options, struct token_list *out,
                                  struct sits_error *err)
{
  if (!options->text) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "text", "--text FILE is missing");
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, options->text, err);
  if (status) return status;
  status = tokenizer_encode(tokenizer, (const char *)file.data, file.n_bytes, eval_encode_flags(options), out);
  mapfile_close(&file);
  return status ? sits_fail(err, status, "%s: cannot be encoded", options->text) : SITS_OK;
}

enum sits_status eval_load_tokenizer(const char *model, struct tokenizer **out, struct sits_error *err)
{
  struct source *source;
  if (!model) return sits_fail_param(err, SITS_CONFIG, "model", "no model: give --model PATH");
  enum sits_status status = source_open(model, &source, err);
  if (status) return status;
  status = tokenizer_load(source, out, err);
  source_close(source);
  return status;
}
