/* How a text becomes scored rows of logits, by llama.cpp's rule, so that figures can be laid side by side. The text's ids are cut into
 * windows of ctx tokens; each is read alone, and the tokens ctx/2+1 .. ctx-1 are predicted, each given all before it in its window. Where
 * the tokenizer adds a BOS, it takes the place of each window's first token. Entry points: eval_window, eval_count_windows. */
#include <inttypes.h>

#include "base/clock.h"
#include "tools/eval/eval.h"

enum sits_status eval_window(struct eval_session *s, int32_t *tokens, int32_t ctx, eval_row_fn fn, void *user, int64_t *compute_us,
                             struct sits_error *err)
{
  const int32_t n_vocab = s->runner.model->config.n_vocab, first = ctx / 2, bos = tokenizer_bos(s->tokenizer), kept = tokens[0];
  enum sits_status status = SITS_OK;
  if (tokenizer_adds_bos(s->tokenizer) && bos >= 0) tokens[0] = bos;
  eval_session_reset(s);
  for (int32_t at = 0; at < ctx - 1 && !status;) { /* the last token is only predicted */
    int32_t n = ctx - 1 - at < s->max_tokens ? ctx - 1 - at : s->max_tokens;
    if (at < first && at + n > first && n > s->max_rows) n = first - at; /* a step asks for rows of its own tokens only */
    if (at >= first && n > s->max_rows) n = s->max_rows;
    if (n > eval_room(s, 0)) n = eval_room(s, 0);
    const int32_t skip = at >= first ? 0 : first - at < n ? first - at : n;
    const float *logits;
    const struct eval_piece piece = {.slot = 0, .tokens = tokens + at, .n_tokens = n, .first_row = skip};
    const int64_t start_us = clock_monotonic_us();
    status = eval_step(s, &piece, 1, &logits, err);
    *compute_us += clock_monotonic_us() - start_us;
    for (int32_t i = skip; i < n && !status; i++)
      fn(user, at + i - first, logits + (size_t)(i - skip) * (size_t)n_vocab, tokens[at + i + 1]);
    at += n;
  }
  tokens[0] = kept;
  return status;
}

enum sits_status eval_count_windows(const struct eval_options *options, int64_t n_ids, int64_t *out, struct sits_error *err)
{
  const int64_t n = n_ids / options->ctx - options->skip_windows;
  if (n <= 0)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "text", "the text's %" PRId64 " tokens hold no window of %" PRId64 " there", n_ids,
                           options->ctx);
  *out = options->windows > 0 && options->windows < n ? options->windows : n;
  return SITS_OK;
}
