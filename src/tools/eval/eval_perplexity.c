/* `sits2026-eval perplexity`: llama.cpp's measure (eval_window.c), exp(mean negative log-likelihood) of a text.
 * Entry points: eval_perplexity, which prints, and eval_score. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include <jansson.h>

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tools/compile/compile_layers.h"
#include "tools/eval/eval.h"

struct tally { double nll; int64_t n_right; int32_t n_vocab; };

static void score_row(void *user, int32_t index, const float *row, int32_t wanted)
{
  struct tally *t = user;
  bool is_right = true;
  (void)index;
  for (int32_t v = 0; v < t->n_vocab; v++) is_right &= row[v] <= row[wanted];
  t->n_right += is_right;
  t->nll += eval_logsumexp(row, t->n_vocab) - (double)row[wanted];
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

/* ---- layer by layer ---- */

struct layer_tally { const int32_t *ids; int32_t ctx, n_vocab; struct eval_score *score; };

static void score_layer_row(void *user, int64_t window, int32_t position, const float *logits)
{
  const struct layer_tally *t = user;
  struct tally tally = {.n_vocab = t->n_vocab};
  if (position == t->ctx - 1) return; /* the last token is only predicted */
  score_row(&tally, 0, logits, t->ids[window * t->ctx + position + 1]);
  t->score->nll[window] += tally.nll;
  t->score->n_right += tally.n_right;
}

/* ids: those of the windows, changed where a BOS takes the first place. */
static enum sits_status walk_windows(const struct eval_options *options, const struct model *model, const struct tokenizer *tokenizer,
                                     int32_t *ids, struct eval_score *score, struct sits_error *err)
{
  const struct layer_walk_options how = {.n_threads = (int32_t)options->threads, .isa = options->isa,
                                          .kv_codec = options->kv_cache_dtype};
  const int32_t ctx = (int32_t)options->ctx, bos = tokenizer_bos(tokenizer);
  struct layer_tally tally = {.ids = ids, .ctx = ctx, .n_vocab = model->config.n_vocab, .score = score};
  struct layer_walk *walk = NULL;
  for (int64_t w = 0; w < score->n_windows && tokenizer_adds_bos(tokenizer) && bos >= 0; w++) ids[w * ctx] = bos;
  enum sits_status status = layer_walk_open(model, &how, ids, score->n_windows, ctx, &walk, err);
  while (!status && layer_walk_at(walk) < model->config.n_layers) status = layer_walk_run(walk, NULL, true, err);
  if (!status) status = layer_walk_head(walk, NULL, ctx / 2, score_layer_row, &tally, err);
  layer_walk_close(walk);
  return status;
}

static enum sits_status score_by_layer(const struct eval_options *options, struct eval_score *out, struct sits_error *err)
{
  struct model *model;
  struct tokenizer *tokenizer = NULL;
  struct token_list ids = {0};
  struct eval_score score = {0};
  const int64_t start_us = clock_monotonic_us();
  if (strcmp(options->device, "cuda") == 0 || options->tensor_parallel_size > 1 || options->unfused || options->kv_page_budget > 0)
    return sits_fail_param(err, SITS_UNSUPPORTED, "by-layer", "by-layer runs on the CPU only, fused, on one device, without a page budget");
  enum sits_status status = model_open(options->model, &model, err);
  if (status) return status;
  if (options->ctx > model->config.max_context)
    status = sits_fail_param(err, SITS_CONTEXT_LENGTH, "ctx", "%" PRId64 " tokens are more than the model's context of %d", options->ctx,
                             model->config.max_context);
  if (!status) status = tokenizer_load(model->source, &tokenizer, err);
  if (!status) status = eval_encode_file(tokenizer, options, &ids, err);
  score.n_ids = ids.n;
  if (!status) status = eval_count_windows(options, ids.n, &score.n_windows, err);
  if (!status) {
    score.nll = mem_calloc((size_t)score.n_windows, sizeof *score.nll);
    status = score.nll ? walk_windows(options, model, tokenizer, ids.ids + options->skip_windows * options->ctx, &score, err)
                       : sits_fail(err, SITS_NOMEM, "out of memory");
  }
  for (int64_t i = 0; i < score.n_windows && !status; i++)
    if (!isfinite(score.nll[i])) status = sits_fail(err, SITS_INTERNAL, "a logit is not finite");
  score.seconds = (double)(clock_monotonic_us() - start_us) * 1e-6;
  token_list_fini(&ids);
  if (tokenizer) tokenizer_destroy(tokenizer);
  model_close(model);
  if (status) mem_free(score.nll);
  else *out = score;
  return status;
}

/* ---- whole ---- */

enum sits_status eval_score(const struct eval_options *options, struct eval_score *out, struct sits_error *err)
{
  if (options->by_layer) return score_by_layer(options, out, err);
  struct eval_session s;
  struct token_list ids = {0};
  struct eval_score score = {0};
  int32_t ctx = (int32_t)options->ctx;
  const int64_t rows = eval_scored(ctx), max_rows = options->batch_tokens < rows ? options->batch_tokens : rows;
  enum sits_status status = eval_session_open(&s, options, 1, ctx, (int32_t)max_rows, err);
  if (status) return status;
  status = eval_encode_file(s.tokenizer, options, &ids, err);
  score.n_ids = ids.n;
  if (!status) status = eval_count_windows(options, ids.n, &score.n_windows, err);
  score.nll = mem_calloc((size_t)score.n_windows, sizeof *score.nll);
  if (!status && !score.nll) status = sits_fail(err, SITS_NOMEM, "out of memory");
  int64_t start_us = clock_monotonic_us(), compute_us = 0;
  for (int64_t i = 0; i < score.n_windows && !status; i++) {
    struct tally tally = {.n_vocab = s.runner.model->config.n_vocab};
    status = eval_window(&s, ids.ids + (options->skip_windows + i) * ctx, ctx, score_row, &tally, &compute_us, err);
    if (!status && !isfinite(tally.nll)) status = sits_fail(err, SITS_INTERNAL, "a logit is not finite");
    score.nll[i] = tally.nll;
    score.n_right += tally.n_right;
  }
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
  if (!options->model) return sits_fail_param(err, SITS_CONFIG, "model", "no model: give --model PATH");
  enum sits_status status = eval_score(options, &score, err);
  if (status) return status;
  print_result(options, score.nll, score.n_windows, score.n_right, score.n_ids, score.seconds);
  mem_free(score.nll);
  return SITS_OK;
}
