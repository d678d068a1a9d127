/* `sits2026-eval perplexity`: llama.cpp's measure, so that figures can be laid side by side. The text's ids are cut into windows of ctx
 * tokens; each is read alone, and the tokens ctx/2+1 .. ctx-1 are predicted, each given all before it in its window. Where the
 * tokenizer adds a BOS, it takes the place of each window's first token. Perplexity = exp(mean negative log-likelihood).
 * Entry points: eval_perplexity, which prints, and eval_score. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include <jansson.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tools/eval/eval.h"

/* One window; *nll is the sum over its second half, *n_right how many of its tokens had the largest logit. */
static enum sits_status score_window(struct eval_session *s, int32_t *tokens, int32_t ctx, double *nll, int64_t *n_right,
                                     struct sits_error *err)
{
  int32_t n_vocab = s->runner.model->config.n_vocab, first = ctx / 2, bos = tokenizer_bos(s->tokenizer), kept = tokens[0];
  double sum = 0;
  enum sits_status status = SITS_OK;
  if (tokenizer_adds_bos(s->tokenizer) && bos >= 0) tokens[0] = bos;
  eval_session_reset(s);
  for (int32_t at = 0; at < ctx - 1 && !status;) { /* the last token is only predicted */
    int32_t n = ctx - 1 - at < s->max_tokens ? ctx - 1 - at : s->max_tokens;
    if (at < first && at + n > first && n > s->max_rows) n = first - at; /* a step asks for rows of its own tokens only */
    if (at >= first && n > s->max_rows) n = s->max_rows;
    int32_t skip = at >= first ? 0 : first - at < n ? first - at : n;
    const float *logits;
    struct eval_piece piece = {.slot = 0, .tokens = tokens + at, .n_tokens = n, .first_row = skip};
    status = eval_step(s, &piece, 1, &logits, err);
    for (int32_t i = skip; i < n && !status; i++) {
      const float *row = logits + (size_t)(i - skip) * (size_t)n_vocab;
      const float wanted = row[tokens[at + i + 1]];
      bool is_right = true;
      for (int32_t v = 0; v < n_vocab; v++) is_right &= row[v] <= wanted;
      *n_right += is_right;
      sum += eval_logsumexp(row, n_vocab) - (double)wanted;
    }
    at += n;
  }
  tokens[0] = kept;
  if (!status && !isfinite(sum)) status = sits_fail(err, SITS_INTERNAL, "a logit is not finite");
  if (!status) *nll = sum;
  return status;
}

static void print_result(const struct eval_options *options, const double *nll, int64_t n_windows, int64_t n_right, int64_t n_ids,
                         double seconds)
{
  int64_t ctx = options->ctx, scored = ctx - 1 - ctx / 2;
  double sum = 0;
  json_t *list = json_array();
  for (int64_t i = 0; i < n_windows; i++) {
    sum += nll[i];
    json_array_append_new(list, json_real(nll[i] / (double)scored));
  }
  double perplexity = exp(sum / (double)(n_windows * scored)), rate = (double)(n_windows * (ctx - 1)) / seconds;
  double accuracy = (double)n_right / (double)(n_windows * scored);
  if (options->json) {
    json_t *result = json_pack("{sf sf sI sI sI sI sf sf so}", "perplexity", perplexity, "accuracy", accuracy, "ctx", (json_int_t)ctx,
                               "windows",
                               (json_int_t)n_windows, "ids", (json_int_t)n_ids, "scored", (json_int_t)(n_windows * scored), "seconds",
                               seconds, "tokens_per_s", rate, "window_nll", list);
    json_dumpf(result, stdout, JSON_REAL_PRECISION(10));
    printf("\n");
    json_decref(result);
    return;
  }
  json_decref(list);
  printf("perplexity %.4f, accuracy %.2f %% over %" PRId64 " windows of %" PRId64 " tokens (%" PRId64 " predictions), %.1f s, "
         "%.0f tokens/s\n", perplexity, 100 * accuracy, n_windows, ctx,
         n_windows * scored, seconds, rate);
}

enum sits_status eval_score(const struct eval_options *options, struct eval_score *out, struct sits_error *err)
{
  struct eval_session s;
  struct token_list ids = {0};
  struct eval_score score = {0};
  int32_t ctx = (int32_t)options->ctx;
  int64_t max_rows = options->batch_tokens < ctx - 1 - ctx / 2 ? options->batch_tokens : ctx - 1 - ctx / 2;
  enum sits_status status = eval_session_open(&s, options, 1, ctx, (int32_t)max_rows, err);
  if (status) return status;
  status = eval_encode_file(s.tokenizer, options, &ids, err);
  score.n_ids = ids.n;
  score.n_windows = ids.n / ctx - options->skip_windows;
  if (options->windows > 0 && options->windows < score.n_windows) score.n_windows = options->windows;
  if (!status && score.n_windows <= 0)
    status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "text", "the text's %" PRId64 " tokens hold no window of %d there", ids.n, ctx);
  score.nll = mem_calloc(score.n_windows > 0 ? (size_t)score.n_windows : 0, sizeof *score.nll);
  if (!status && !score.nll) status = sits_fail(err, SITS_NOMEM, "out of memory");
  int64_t start_us = clock_monotonic_us();
  for (int64_t i = 0; i < score.n_windows && !status; i++)
    status = score_window(&s, ids.ids + (options->skip_windows + i) * ctx, ctx, &score.nll[i], &score.n_right, err);
  score.seconds = (double)(clock_monotonic_us() - start_us) * 1e-6;
  token_list_fini(&ids);
  eval_session_close(&s);
  if (status) mem_free(score.nll);
  else *out = score;
  return status;
}

enum sits_status eval_perplexity(const struct eval_options *options, struct sits_error *err)
{
  struct eval_score score;
  enum sits_status status = eval_score(options, &score, err);
  if (status) return status;
  print_result(options, score.nll, score.n_windows, score.n_right, score.n_ids, score.seconds);
  mem_free(score.nll);
  return SITS_OK;
}
