/* `sits2026-eval choice`: multiple choice by log-likelihood. A task is one line of JSON,
 *   {"prompt": "The sky is", "choices": [" blue", " green"], "answer": 0}
 * with the number of the right choice (from 0); other keys are ignored, empty lines too. prompt + choice is encoded as one text (under
 * --add-special), the choice's ids are those after the longest beginning that it shares with the prompt's own ids, and the score is the
 * sum of their log-probabilities given all ids before (raw), or that sum divided by the choice's bytes (normalised). The choice with the
 * highest score is the model's answer, the first among equals. Each choice is read alone. Entry point: eval_choice. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "tools/eval/eval.h"

struct verdict { int64_t n_raw, n_normalised; json_t *items; }; /* right answers; per task what each choice scored */

/* ---- reading ---- */

static enum sits_status check_task(const json_t *task, int64_t line, struct sits_error *err)
{
  const json_t *choices = json_object_get(task, "choices"), *answer = json_object_get(task, "answer"), *choice;
  const char *wrong = NULL;
  size_t i;
  if (!json_is_object(task)) wrong = "no JSON object";
  else if (!json_is_string(json_object_get(task, "prompt"))) wrong = "'prompt' is no text";
  else if (json_array_size(choices) < 2) wrong = "'choices' is no list of two or more texts";
  else if (!json_is_integer(answer) || json_integer_value(answer) < 0 || (size_t)json_integer_value(answer) >= json_array_size(choices))
    wrong = "'answer' is no number of a choice";
  json_array_foreach(choices, i, choice)
    if (!wrong && json_string_length(choice) == 0) wrong = "a choice is no text, or empty";
  return wrong ? sits_fail_param(err, SITS_INVALID_ARGUMENT, "tasks", "line %" PRId64 " of the tasks: %s", line, wrong) : SITS_OK;
}

static enum sits_status parse_line(const char *text, size_t n, int64_t line, json_t *list, struct sits_error *err)
{
  json_t *task;
  struct sits_error inner = {0};
  enum sits_status status = json_parse(text, n, &json_limits_request, &task, &inner);
  if (status) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "tasks", "line %" PRId64 " of the tasks: %.150s", line, inner.text);
  status = check_task(task, line, err);
  if (!status && json_array_append(list, task)) status = sits_fail(err, SITS_NOMEM, "out of memory");
  json_decref(task);
  return status;
}

static bool is_blank(const char *text, size_t n)
{
  for (size_t i = 0; i < n; i++)
    if (text[i] != ' ' && text[i] != '\t' && text[i] != '\r') return false;
  return true;
}

static enum sits_status read_tasks(const char *path, json_t *list, struct sits_error *err)
{
  struct mapfile file;
  if (!path) return sits_fail_param(err, SITS_CONFIG, "tasks", "--tasks FILE is missing");
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  const char *text = (const char *)file.data, *end = text + file.n_bytes;
  for (int64_t line = 1; text < end && !status; line++) {
    const char *stop = memchr(text, '\n', (size_t)(end - text));
    const size_t n = (size_t)((stop ? stop : end) - text);
    if (!is_blank(text, n)) status = parse_line(text, n, line, list, err);
    text = stop ? stop + 1 : end;
  }
  mapfile_close(&file);
  if (!status && json_array_size(list) == 0)
    status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "tasks", "%.150s: no task in it", path);
  return status;
}

/* ---- scoring ---- */

/* Ids of prompt + choice, and where the choice begins. */
static enum sits_status encode_choice(const struct eval_session *s, const struct eval_options *o, const json_t *prompt,
                                      const json_t *choice,
                                      struct token_list *ids, int64_t *first, struct sits_error *err)
{
  struct buf text;
  struct token_list alone = {0};
  buf_init(&text, 16u << 20);
  enum sits_status status = SITS_OK;
  if (!buf_append(&text, json_string_value(prompt), json_string_length(prompt)) ||
      !buf_append(&text, json_string_value(choice), json_string_length(choice)))
    status = sits_fail(err, SITS_NOMEM, "out of memory for a task");
  if (!status) status = tokenizer_encode(s->tokenizer, json_string_value(prompt), json_string_length(prompt), eval_encode_flags(o), &alone);
  if (!status) status = tokenizer_encode(s->tokenizer, text.data, text.size, eval_encode_flags(o), ids);
  if (!status) {
    int64_t same = 0;
    while (same < alone.n && same < ids->n && alone.ids[same] == ids->ids[same]) same++;
    if (same == ids->n) same--;      /* the prompt's end and the choice are one token: that one is scored */
    *first = same;
    if (same < 1) status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "tasks", "a prompt without tokens: give --add-special or a prompt");
  }
  token_list_fini(&alone);
  buf_fini(&text);
  return status;
}

/* Sum of the log-probabilities of ids[first..]. */
static enum sits_status score_ids(struct eval_session *s, const struct token_list *ids, int64_t first, double *out, struct sits_error *err)
{
  const int32_t n_vocab = s->runner.model->config.n_vocab;
  double sum = 0;
  eval_session_reset(s);
  for (int64_t at = 0; at < ids->n - 1;) { /* the last id is only predicted */
    const int64_t left = ids->n - 1 - at;
    const int32_t rows = left < s->max_rows ? (int32_t)left : s->max_rows, n = rows < eval_room(s, 0) ? rows : eval_room(s, 0);
    const int64_t skip = first - 1 - at < 0 ? 0 : first - 1 - at < n ? first - 1 - at : n;
    const struct eval_piece piece = {.slot = 0, .tokens = ids->ids + at, .n_tokens = n, .first_row = (int32_t)skip};
    const float *logits;
    const enum sits_status status = eval_step(s, &piece, 1, &logits, err);
    if (status) return status;
    for (int64_t i = skip; i < n; i++) {
      const float *row = logits + (size_t)(i - skip) * (size_t)n_vocab;
      sum += (double)row[ids->ids[at + i + 1]] - eval_logsumexp(row, n_vocab);
    }
    at += n;
  }
  *out = sum;
  return isfinite(sum) ? SITS_OK : sits_fail(err, SITS_INTERNAL, "a logit is not finite");
}

static enum sits_status run_task(struct eval_session *s, const struct eval_options *o, const json_t *task, struct verdict *v,
                                 struct sits_error *err)
{
  const json_t *choices = json_object_get(task, "choices"), *choice;
  json_t *scores = json_array();
  double best_raw = -INFINITY, best_normalised = -INFINITY;
  size_t raw = 0, normalised = 0, i;
  enum sits_status status = SITS_OK;
  json_array_foreach(choices, i, choice) {
    struct token_list ids = {0};
    int64_t first = 0;
    double score = 0;
    status = encode_choice(s, o, json_object_get(task, "prompt"), choice, &ids, &first, err);
    if (!status && ids.n > o->ctx)
      status = sits_fail_param(err, SITS_CONTEXT_LENGTH, "tasks", "a task of %" PRId64 " tokens is longer than --ctx %" PRId64, ids.n,
                               o->ctx);
    if (!status) status = score_ids(s, &ids, first, &score, err);
    token_list_fini(&ids);
    if (status) break;
    const double each = score / (double)json_string_length(choice);
    if (score > best_raw) best_raw = score, raw = i;
    if (each > best_normalised) best_normalised = each, normalised = i;
    json_array_append_new(scores, json_real(score));
  }
  const size_t answer = (size_t)json_integer_value(json_object_get(task, "answer"));
  v->n_raw += !status && raw == answer;
  v->n_normalised += !status && normalised == answer;
  if (!status)
    json_array_append_new(v->items, json_pack("{sI sI sI sO}", "answer", (json_int_t)answer, "raw", (json_int_t)raw, "normalised",
                                              (json_int_t)normalised, "log_likelihood", scores));
  json_decref(scores);
  return status;
}

/* ---- results ---- */

static double error_of(double share, double n) { return sqrt(share * (1 - share) / n); } /* standard error of a share */

static json_t *row_json(const struct eval_contender *c, const struct verdict *v, double n)
{
  const double raw = (double)v->n_raw / n, normalised = (double)v->n_normalised / n;
  return json_pack("{ss ss sf sf sf sf sO}", "name", c->name, "kv", kv_codec_name(c->session.runner.codec), "accuracy", raw, "error",
                   error_of(raw, n), "accuracy_normalised", normalised, "error_normalised", error_of(normalised, n), "items", v->items);
}

static enum sits_status run_model(struct eval_contender *c, const struct eval_options *o, const json_t *tasks, json_t *rows,
                                  struct sits_error *err)
{
  struct verdict v = {.items = json_array()};
  const json_t *task;
  size_t i;
  enum sits_status status = eval_contender_open(c, o, (int32_t)o->ctx, (int32_t)(o->batch_tokens < o->ctx ? o->batch_tokens : o->ctx), err);
  json_array_foreach(tasks, i, task) {
    if (!status) status = run_task(&c->session, o, task, &v, err);
    if (!status && isatty(STDERR_FILENO)) fprintf(stderr, "\r%s: task %zu of %zu ", c->name, i + 1, json_array_size(tasks));
  }
  if (!status) {
    const double n = (double)json_array_size(tasks), raw = 100 * (double)v.n_raw / n, normalised = 100 * (double)v.n_normalised / n;
    if (!o->json) printf("| %-20s | %6.2f ± %5.2f | %6.2f ± %5.2f |\n", c->name, raw, 100 * error_of(raw / 100, n), normalised,
                         100 * error_of(normalised / 100, n));
    json_array_append_new(rows, row_json(c, &v, n));
  }
  json_decref(v.items);
  eval_session_close(&c->session);
  return status;
}

enum sits_status eval_choice(const struct eval_options *options, struct sits_error *err)
{
  struct eval_options own = *options;
  struct eval_contender *list = NULL;
  int32_t n = 0;
  json_t *tasks = json_array(), *rows = json_array();
  if (!own.models) own.models = own.model;
  enum sits_status status = read_tasks(own.tasks, tasks, err);
  if (!status) status = eval_contenders_list(&own, &list, &n, err);
  if (!status && !own.json)
    printf("%zu tasks\n| %-20s | %14s | %14s |\n|---|---|---|\n", json_array_size(tasks), "model", "raw %", "normalised %");
  for (int32_t i = 0; i < n && !status; i++) status = run_model(&list[i], &own, tasks, rows, err);
  json_t *result = status ? NULL : json_pack("{sI sO}", "tasks", (json_int_t)json_array_size(tasks), "rows", rows);
  if (!status && own.out) status = eval_write_json(result, own.out, err);
  if (!status && own.json) {
    json_dumpf(result, stdout, JSON_REAL_PRECISION(10));
    printf("\n");
  }
  json_decref(result);
  json_decref(rows);
  json_decref(tasks);
  eval_contenders_close(list, n);
  return status;
}
