/* A long prompt read in chunks, whose expanded keys the CUDA backend keeps from one chunk to the next, against the same prompt read at
 * once, and against the same steps with nothing kept: whatever else is written to its pages in between must be seen.
 *
 * Model: synthetic:tiny, f16 activations. Tolerances: chunks against one step 2 % of the norm (other shapes of products, int4 pages that
 * see other roundings); the same steps with and without kept keys: equal to the bit.
 */
#include <stdio.h>
#include <string.h>

#include "engine/runner.h"
#include "gpu_test.h"

enum { LENGTH = 3000, CHUNK = 700, PROMPT_PAGES = (LENGTH + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, POOL_PAGES = 600, MOST_VOCAB = 200000 };

static struct runner runner;
static float first[MOST_VOCAB], second[MOST_VOCAB];

/* Tokens from .. from + n - 1 of the prompt `text`, whose pages begin at page0; beside them, if wanted, one token of a sequence of its own
 * (page 599). Logits of the prompt's last token. */
static enum sits_status read_chunk(int32_t text, int32_t page0, int32_t from, int32_t n, bool has_decode, float *logits)
{
  static int32_t tokens[LENGTH + 1], positions[LENGTH + 1], table[2][PROMPT_PAGES];
  const int32_t vocab = runner.model->config.n_vocab, d = has_decode;
  const int32_t start[3] = {0, d ? 1 : n, n + d}, kv_len[2] = {d ? 1 : from + n, from + n};
  const int32_t rows[2] = {d ? 0 : n - 1, n};
  for (int32_t i = 0; i < n + d; i++) {
    const int32_t at = i < d ? 0 : from + i - d;
    tokens[i] = (int32_t)(((uint32_t)(text * 7919 + at) * 2654435761U >> 7) % (uint32_t)vocab), positions[i] = at;
  }
  for (int32_t i = 0; i < PROMPT_PAGES; i++) table[d][i] = page0 + i, table[!d][i] = POOL_PAGES - 1;
  const struct backend_batch batch = {.n_tokens = n + d, .n_seqs = 1 + d, .n_rows = 1 + d, .tokens = tokens, .positions = positions,
                                      .seq_start = start, .kv_len = kv_len, .block_table = table[0], .table_stride = PROMPT_PAGES,
                                      .row_token = rows};
  struct backend_result r;
  enum sits_status status = runner.vtable->submit(runner.compiled, runner.kv, &batch);
  if (!status) status = runner.vtable->wait(runner.compiled, &r);
  if (!status) memcpy(logits, r.logits + (size_t)d * (size_t)vocab, (size_t)vocab * sizeof *logits);
  return status;
}

static enum sits_status read_in_chunks(int32_t text, int32_t page0, int32_t end, bool has_decode, float *logits)
{
  enum sits_status status = SITS_OK;
  for (int32_t at = 0; at < end && !status; at += CHUNK)
    status = read_chunk(text, page0, at, end - at < CHUNK ? end - at : CHUNK, has_decode, logits);
  return status;
}

/* Half a prompt, then another sequence writes over the first group of its first page, then the rest. is_dropped: a page is read and written
 * back before the rest, which ends the keeping. */
static enum sits_status read_disturbed(int32_t page0, bool is_dropped, float *logits)
{
  static uint8_t page[1 << 22];
  enum sits_status status = read_in_chunks(1, page0, 2 * CHUNK, false, logits);
  if (!status) status = read_chunk(2, page0, 0, 32, false, logits); /* a whole group of int4's keys */
  if (!status && is_dropped) status = runner.vtable->kv_read_page(runner.kv, page0, page);
  if (!status && is_dropped) status = runner.vtable->kv_write_page(runner.kv, page0, page);
  return status ? status : read_chunk(1, page0, 2 * CHUNK, CHUNK, false, logits);
}

int main(void)
{
  gpu_open();
  struct sits_error err = {0};
  const struct runner_options options = {
      .model_path = "synthetic:tiny", .device = "cuda", .kv_codec = "int4",
      .backend = {.max_batch_tokens = 4096, .max_seqs = 8, .recipe = "w4a16"}};
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = runner_kv_create(&runner, POOL_PAGES, &err);
  if (status || runner.page_bytes > (1 << 22) || runner.model->config.n_vocab > MOST_VOCAB) {
    verdict(false, "open: %s", err.text);
    return gpu_finish();
  }
  const size_t vocab = (size_t)runner.model->config.n_vocab;
  status = read_chunk(1, 0, 0, LENGTH, false, first);
  if (!status) status = read_in_chunks(1, 100, LENGTH, false, second);
  double error = relative_error(second, first, vocab);
  verdict(!status && error < 0.02, "in chunks against at once: status %d, %.4f", status, error);
  status = read_in_chunks(1, 200, LENGTH, true, second);
  error = relative_error(second, first, vocab);
  verdict(!status && error < 0.02, "in chunks beside a decode: status %d, %.4f", status, error);
  status = read_in_chunks(3, 200, LENGTH, false, second); /* other text on the same pages, then the first again */
  if (!status) status = read_in_chunks(1, 200, LENGTH, false, second);
  error = relative_error(second, first, vocab);
  verdict(!status && error < 0.02, "pages used again: status %d, %.4f", status, error);
  status = read_disturbed(300, true, first);
  if (!status) status = read_disturbed(400, false, second);
  verdict(!status && memcmp(first, second, vocab * sizeof *first) == 0, "a write by someone else is seen: status %d, %.1e", status,
          relative_error(second, first, vocab));
  status = read_in_chunks(1, 500, 3 * CHUNK, false, second);
  error = relative_error(second, first, vocab);
  verdict(!status && error > 1e-6, "and that write matters: %.1e", error);
  runner_close(&runner);
  return gpu_finish();
}
