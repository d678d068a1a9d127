/* `sits2026-eval compare`: several models on the same windows of a text, the first one the reference of the others. For each window all of
 * them run in turn, and every scored row is held against the reference's: so deltas are paired window by window, and logits are kept for
 * one window only ([ctx/2][V] f32). All models are in memory at once. Entry point: eval_compare. The table: eval_table.h. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "tools/eval/eval.h"
#include "tools/eval/eval_table.h"

struct comparison {
  const struct eval_options *options;
  struct eval_contender *list;
  struct eval_sums *measures;        /* [n] */
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
  struct eval_sums *m = &c->measures[context->index];
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

/* What an engine file says of itself; negative when it says nothing. */
static double share_of(const struct eval_contender *contender)
{
  const json_t *meta = source_engine_meta(contender->session.runner.model->source);
  return meta ? json_number_value(json_object_get(meta, "share_4x4")) : -1;
}

static json_t *row_json(const struct comparison *c, int32_t i)
{
  const struct eval_contender *contender = &c->list[i];
  const struct eval_label label = {.name = contender->name, .kv = kv_codec_name(contender->session.runner.codec),
                                   .weight_bytes = (int64_t)eval_weight_bytes(&contender->session), .share_4x4 = share_of(contender),
                                   .compile_s = contender->compile_s};
  return eval_table_row(&label, &c->measures[i], &c->measures[0], c->n_done, c->options->ctx);
}

static json_t *result_json(const struct comparison *c)
{
  const char *slash = strrchr(c->options->text, '/');
  json_t *rows = json_array();
  for (int32_t i = 0; i < c->n; i++) json_array_append_new(rows, row_json(c, i));
  return json_pack("{ss sI sI sI sI ss so}", "text", slash ? slash + 1 : c->options->text, "ctx", (json_int_t)c->options->ctx,
                   "skip_windows", (json_int_t)c->options->skip_windows, "windows", (json_int_t)c->n_done, "ids",
                   (json_int_t)c->ids.n, "reference", c->list[0].name, "rows", rows);
}

static enum sits_status print_result(const struct comparison *c, struct sits_error *err)
{
  struct backend_info info;
  const struct runner *runner = &c->list[0].session.runner;
  json_t *result = result_json(c);
  if (!result) return sits_fail(err, SITS_NOMEM, "out of memory");
  runner->vtable->info(runner->backend, &info);
  if (c->options->json) {
    json_dumpf(result, stdout, JSON_REAL_PRECISION(10));
    printf("\n");
  } else {
    eval_table_print(result, info.name);
  }
  json_decref(result);
  return SITS_OK;
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
    struct eval_sums *m = &c->measures[i];
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
  if (!status) status = print_result(&c, err);
  comparison_fini(&c);
  return status;
}
