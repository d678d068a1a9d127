/* `sits2026-eval compare`: several models on the same windows of a text, the first one the reference of the others. For each window all of
 * them run in turn, and every scored row is held against the reference's: so deltas are paired window by window, and logits are kept for
 * one window only ([ctx/2][V] f32). All models are in memory at once. Entry point: eval_compare.
 *
 * Columns: delta of perplexity in percent, 100 (exp(mean difference of log-likelihoods) - 1), with the standard error over windows;
 * accuracy: share of predictions whose token had the largest logit; KL: mean over rows of the divergence from the reference, in nats;
 * agreement: share of rows with the reference's largest logit; tokens/s: of the backend, prompts in steps of --batch-tokens. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "tools/eval/eval.h"

struct measure {                     /* of one contender */
  double *nll, *kl;                  /* [n_windows] sums over a window's rows */
  int64_t n_right, n_agree, compute_us;
};

struct comparison {
  const struct eval_options *options;
  struct eval_contender *list;
  struct measure *measures;          /* [n] */
  int32_t n, n_vocab;
  int64_t n_windows, n_done;
  struct token_list ids;
  float *reference;                  /* [rows][V] logits of the window at hand */
  double *totals;                    /* [rows] their logsumexp */
  int32_t *best;                     /* [rows] their largest */
};

struct row_context { struct comparison *c; int32_t index; int64_t window; };

static void take_row(void *user, int32_t index, const float *row, int32_t wanted)
{
  const struct row_context *context = user;
  struct comparison *c = context->c;
  struct measure *m = &c->measures[context->index];
  float *reference = c->reference + (size_t)index * (size_t)c->n_vocab;
  const double total = eval_logsumexp(row, c->n_vocab);
  int32_t best;
  eval_top(row, c->n_vocab, 1, &best);
  m->nll[context->window] += total - (double)row[wanted];
  m->n_right += row[wanted] >= row[best];
  if (context->index == 0) {
    memcpy(reference, row, (size_t)c->n_vocab * sizeof *row);
    c->totals[index] = total;
    c->best[index] = best;
  } else {
    m->kl[context->window] += eval_divergence(reference, c->totals[index], row, total, c->n_vocab);
  }
  m->n_agree += best == c->best[index];
}

/* ---- results ---- */

struct figures { double perplexity, delta, delta_error, accuracy, kl, kl_error, agreement, rate; };

/* Mean of x[i] - y[i] over n (y may be NULL), and its standard error. */
static double mean_of(const double *x, const double *y, int64_t n, double *error)
{
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < n; i++) mean += (x[i] - (y ? y[i] : 0)) / (double)n;
  for (int64_t i = 0; i < n; i++) {
    const double d = x[i] - (y ? y[i] : 0) - mean;
    squares += d * d;
  }
  *error = n > 1 ? sqrt(squares / (double)(n - 1) / (double)n) : 0;
  return mean;
}

static struct figures figures_of(const struct comparison *c, int32_t i)
{
  const struct measure *m = &c->measures[i], *reference = &c->measures[0];
  const double rows = eval_scored(c->options->ctx), all = rows * (double)c->n_done;
  double ignored, error;
  struct figures f = {.perplexity = exp(mean_of(m->nll, NULL, c->n_done, &ignored) / rows), .accuracy = (double)m->n_right / all,
                      .agreement = (double)m->n_agree / all,
                      .rate = (double)(c->n_done * (c->options->ctx - 1)) / ((double)m->compute_us * 1e-6)};
  f.delta = 100 * (exp(mean_of(m->nll, reference->nll, c->n_done, &error) / rows) - 1);
  f.delta_error = 100 * error / rows;
  f.kl = mean_of(m->kl, NULL, c->n_done, &f.kl_error) / rows;
  f.kl_error /= rows;
  return f;
}

/* What an engine file says of itself; negative when it says nothing. */
static double share_of(const struct eval_contender *contender)
{
  const json_t *meta = source_engine_meta(contender->session.runner.model->source);
  return meta ? json_number_value(json_object_get(meta, "share_4x4")) : -1;
}

static json_t *row_json(const struct comparison *c, int32_t i)
{
  const struct eval_contender *contender = &c->list[i];
  const struct figures f = figures_of(c, i);
  json_t *nll = json_array(), *kl = json_array();
  for (int64_t w = 0; w < c->n_done; w++) {
    json_array_append_new(nll, json_real(c->measures[i].nll[w] / eval_scored(c->options->ctx)));
    json_array_append_new(kl, json_real(c->measures[i].kl[w] / eval_scored(c->options->ctx)));
  }
  json_t *row = json_pack("{ss ss sI sf sf sf sf sf sf sf sf sf so so}", "name", contender->name, "kv",
                          kv_codec_name(contender->session.runner.codec), "weight_bytes",
                          (json_int_t)eval_weight_bytes(&contender->session), "perplexity", f.perplexity, "delta_percent", f.delta,
                          "delta_error_percent", f.delta_error, "accuracy", f.accuracy,
                          "delta_accuracy_points", 100 * (f.accuracy - figures_of(c, 0).accuracy), "kl", f.kl, "kl_error", f.kl_error,
                          "top1_agreement", f.agreement, "tokens_per_s", f.rate, "window_nll", nll, "window_kl", kl);
  if (share_of(contender) >= 0) json_object_set_new(row, "share_4x4", json_real(share_of(contender)));
  if (contender->compile_s > 0) json_object_set_new(row, "compile_s", json_real(contender->compile_s));
  return row;
}

static json_t *result_json(const struct comparison *c)
{
  const char *slash = strrchr(c->options->text, '/');
  json_t *rows = json_array();
  for (int32_t i = 0; i < c->n; i++) json_array_append_new(rows, row_json(c, i));
  return json_pack("{ss sI sI sI ss so}", "text", slash ? slash + 1 : c->options->text, "ctx", (json_int_t)c->options->ctx, "windows",
                   (json_int_t)c->n_done, "ids", (json_int_t)c->ids.n, "reference", c->list[0].name, "rows", rows);
}

static void print_table(const struct comparison *c)
{
  struct backend_info info;
  const struct runner *runner = &c->list[0].session.runner;
  runner->vtable->info(runner->backend, &info);
  printf("%" PRId64 " windows of %" PRId64 " tokens, %" PRId64 " predictions, %s\n", c->n_done, c->options->ctx,
         c->n_done * eval_scored(c->options->ctx), info.name);
  printf("| %-20s | %8s | %10s | %16s | %10s | %8s | %8s | %7s | %5s | %8s |\n|", "model", "MB", "perplexity", "delta %", "accuracy %",
         "points", "KL", "agree %", "4x4 %", "tokens/s");
  for (int k = 0; k < 10; k++) printf("---|");
  printf("\n");
  for (int32_t i = 0; i < c->n; i++) {
    const struct figures f = figures_of(c, i);
    char share[16] = "";
    if (share_of(&c->list[i]) >= 0) snprintf(share, sizeof share, "%.1f", 100 * share_of(&c->list[i]));
    printf("| %-20s | %8.1f | %10.4f | %+8.3f ± %5.3f | %10.2f | %+8.2f | %8.5f | %7.2f | %5s | %8.0f |\n", c->list[i].name,
           (double)eval_weight_bytes(&c->list[i].session) * 1e-6, f.perplexity, f.delta, f.delta_error, 100 * f.accuracy,
           100 * (f.accuracy - figures_of(c, 0).accuracy), f.kl, 100 * f.agreement, share, f.rate);
  }
}

/* ---- running ---- */

/* All models must read the text as the same ids. */
static enum sits_status open_all(struct comparison *c, struct sits_error *err)
{
  const int32_t rows = eval_scored(c->options->ctx), batch = (int32_t)c->options->batch_tokens, most = rows < batch ? rows : batch;
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < c->n && !status; i++) {
    struct eval_contender *contender = &c->list[i];
    struct token_list ids = {0};
    status = eval_contender_open(contender, c->options, (int32_t)c->options->ctx, most, err);
    if (!status) status = eval_encode_file(contender->session.tokenizer, c->options, i == 0 ? &c->ids : &ids, err);
    if (!status && i == 0) c->n_vocab = contender->session.runner.model->config.n_vocab;
    if (!status && i > 0 && (contender->session.runner.model->config.n_vocab != c->n_vocab || ids.n != c->ids.n ||
                             memcmp(ids.ids, c->ids.ids, (size_t)ids.n * sizeof *ids.ids) != 0))
      status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "models", "%s has another vocabulary than %s", contender->name,
                               c->list[0].name);
    token_list_fini(&ids);
  }
  if (!status) status = eval_count_windows(c->options, c->ids.n, &c->n_windows, err);
  return status;
}

static enum sits_status reserve(struct comparison *c, struct sits_error *err)
{
  const size_t rows = (size_t)eval_scored(c->options->ctx), windows = (size_t)c->n_windows;
  c->reference = mem_calloc(rows * (size_t)c->n_vocab, sizeof *c->reference);
  c->totals = mem_calloc(rows, sizeof *c->totals);
  c->best = mem_calloc(rows, sizeof *c->best);
  c->measures = mem_calloc((size_t)c->n, sizeof *c->measures);
  bool has = c->reference && c->totals && c->best && c->measures;
  for (int32_t i = 0; i < c->n && has; i++) {
    c->measures[i].nll = mem_calloc(windows, sizeof(double));
    c->measures[i].kl = mem_calloc(windows, sizeof(double));
    has = c->measures[i].nll && c->measures[i].kl;
  }
  return has ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory for a window's logits");
}

/* A cut run leaves the windows it finished in --out. */
static enum sits_status run_window(struct comparison *c, int64_t window, struct sits_error *err)
{
  const int32_t ctx = (int32_t)c->options->ctx;
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < c->n && !status; i++) {
    struct row_context context = {.c = c, .index = i, .window = window};
    struct measure *m = &c->measures[i];
    status = eval_window(&c->list[i].session, c->ids.ids + (c->options->skip_windows + window) * ctx, ctx, take_row, &context,
                         &m->compute_us, err);
    if (!status && !(isfinite(m->nll[window]) && isfinite(m->kl[window])))
      status = sits_fail(err, SITS_INTERNAL, "%s: a logit is not finite", c->list[i].name);
  }
  if (status) return status;
  c->n_done = window + 1;
  if (isatty(STDERR_FILENO)) fprintf(stderr, "\rwindow %" PRId64 " of %" PRId64 "%s", c->n_done, c->n_windows,
                                     c->n_done == c->n_windows ? "\n" : "");
  if (!c->options->out) return SITS_OK;
  json_t *result = result_json(c);
  status = eval_write_json(result, c->options->out, err);
  json_decref(result);
  return status;
}

static void comparison_fini(struct comparison *c)
{
  for (int32_t i = 0; c->measures && i < c->n; i++) {
    mem_free(c->measures[i].nll);
    mem_free(c->measures[i].kl);
  }
  mem_free(c->measures);
  mem_free(c->reference);
  mem_free(c->totals);
  mem_free(c->best);
  token_list_fini(&c->ids);
  eval_contenders_close(c->list, c->n);
}

enum sits_status eval_compare(const struct eval_options *options, struct sits_error *err)
{
  struct comparison c = {.options = options};
  if (!options->text) return sits_fail_param(err, SITS_CONFIG, "text", "--text FILE is missing");
  enum sits_status status = eval_contenders_list(options, &c.list, &c.n, err);
  if (!status) status = open_all(&c, err);
  if (!status) status = reserve(&c, err);
  for (int64_t w = 0; w < c.n_windows && !status; w++) status = run_window(&c, w, err);
  if (!status && options->json) {
    json_t *result = result_json(&c);
    json_dumpf(result, stdout, JSON_REAL_PRECISION(10));
    printf("\n");
    json_decref(result);
  } else if (!status) {
    print_table(&c);
  }
  comparison_fini(&c);
  return status;
}
