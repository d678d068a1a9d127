/* `sits2026-eval join`: results of `compare` over different windows of one text, as one table: so a long comparison can be run in pieces,
 * in any order. All parts must compare the same rows; no window may be in two of them. Entry point: eval_join. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "tools/eval/eval.h"
#include "tools/eval/eval_table.h"

struct join {
  json_t **parts;                    /* [n] by their first window */
  int32_t n, n_rows;
  int64_t n_windows, ctx;
  struct eval_sums *sums;            /* [n_rows] */
};

static int64_t whole(const json_t *object, const char *key) { return json_integer_value(json_object_get(object, key)); }

static int by_first(const void *a, const void *b)
{
  const int64_t x = whole(*(json_t *const *)a, "skip_windows"), y = whole(*(json_t *const *)b, "skip_windows");
  return x < y ? -1 : x > y;
}

/* What compare writes, and in which bounds: a likelihood beyond MOST_NATS a token has no finite perplexity; a divergence is not negative
 * but for rounding. */
enum { MOST_NATS = 700 };
struct bound { const char *name; bool is_whole, is_optional; double least, most; };
static const struct bound of_result[] = {{"ctx", true, false, 4, 1 << 24}, {"windows", true, false, 1, 1e9},
                                         {"skip_windows", true, false, 0, 1e9}, {"ids", true, false, 1, 1e15}};
static const struct bound of_row[] = {{"weight_bytes", true, false, 0, 1e15}, {"accuracy", false, false, 0, 1},
                                      {"top1_agreement", false, false, 0, 1}, {"tokens_per_s", false, false, 1e-3, 1e9},
                                      {"share_4x4", false, true, 0, 1}, {"compile_s", false, true, 0, 1e9}};
static const struct bound of_window[] = {{"window_nll", false, false, 0, MOST_NATS}, {"window_kl", false, false, -1e-3, 1e6}};
#define N_OF(list) ((int)(sizeof list / sizeof list[0]))

static bool is_in(const struct bound *bound, const json_t *value)
{
  if (!value) return bound->is_optional;
  const double x = json_number_value(value);
  return (bound->is_whole ? json_is_integer(value) : json_is_number(value)) && x >= bound->least && x <= bound->most;
}

/* The name of the first of n fields that is missing, of another type or out of its bounds; NULL: all are well. */
static const char *bad_field(const struct bound *bounds, int n, const json_t *object)
{
  for (int i = 0; i < n; i++)
    if (!is_in(&bounds[i], json_object_get(object, bounds[i].name))) return bounds[i].name;
  return NULL;
}

static const char *bad_text(const char *const *names, int n, const json_t *object)
{
  for (int i = 0; i < n; i++)
    if (!json_is_string(json_object_get(object, names[i]))) return names[i];
  return NULL;
}

static const char *bad_row(const json_t *row, int64_t n_windows)
{
  static const char *const texts[] = {"name", "kv"};
  const char *bad = bad_text(texts, N_OF(texts), row);
  if (!bad) bad = bad_field(of_row, N_OF(of_row), row);
  for (int i = 0; !bad && i < N_OF(of_window); i++) {
    const json_t *values = json_object_get(row, of_window[i].name), *value;
    size_t at;
    if ((json_int_t)json_array_size(values) != n_windows) bad = of_window[i].name;
    json_array_foreach(values, at, value) bad = is_in(&of_window[i], value) ? bad : of_window[i].name;
  }
  return bad;
}

/* A file's fields are what compare writes: NULL, or the name of one that is not. */
static const char *bad_part(const json_t *part)
{
  static const char *const texts[] = {"text", "reference"};
  const json_t *rows = json_object_get(part, "rows"), *row;
  size_t index;
  const char *bad = bad_text(texts, N_OF(texts), part);
  if (!bad) bad = bad_field(of_result, N_OF(of_result), part);
  if (!bad && json_array_size(rows) == 0) bad = "rows";
  json_array_foreach(rows, index, row) bad = bad ? bad : bad_row(row, whole(part, "windows"));
  return bad;
}

/* What two parts must share; NULL when they do, else its name. */
static const char *difference(const json_t *a, const json_t *b)
{
  static const char *const in_result[] = {"text", "ctx", "ids", "reference"}, *const in_row[] = {"name", "kv", "weight_bytes", "share_4x4"};
  const json_t *rows = json_object_get(a, "rows"), *others = json_object_get(b, "rows"), *row;
  size_t index;
  for (int i = 0; i < N_OF(in_result); i++)
    if (!json_equal(json_object_get(a, in_result[i]), json_object_get(b, in_result[i]))) return in_result[i];
  if (json_array_size(rows) != json_array_size(others)) return "rows";
  json_array_foreach(rows, index, row)
    for (int i = 0; i < N_OF(in_row); i++) {
      const json_t *x = json_object_get(row, in_row[i]), *y = json_object_get(json_array_get(others, index), in_row[i]);
      if (x != y && !json_equal(x, y)) return in_row[i];
    }
  return NULL;
}

static enum sits_status read_parts(struct join *j, const char *list, struct sits_error *err)
{
  char *text = mem_strdup(list), *rest = text;
  enum sits_status status = text ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  while (!status && rest) {
    char *path = rest, *comma = strchr(path, ',');
    rest = comma ? comma + 1 : NULL;
    if (comma) *comma = '\0';
    json_t **parts = mem_realloc(j->parts, (size_t)(j->n + 1) * sizeof *parts);
    if (!parts) {
      status = sits_fail(err, SITS_NOMEM, "out of memory");
      break;
    }
    j->parts = parts;
    status = json_parse_file(path, &json_limits_file, &j->parts[j->n], err);
    if (status) break;
    j->n++;
    const char *bad = bad_part(j->parts[j->n - 1]);
    if (bad)
      status = sits_fail_param(err, SITS_FORMAT, "parts", "%.150s is no result of sits2026-eval compare: '%s' is not there or not a value "
                               "that it could have", path, bad);
    const char *what = status ? NULL : difference(j->parts[0], j->parts[j->n - 1]);
    if (what) status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "parts", "%.150s has another '%s' than the first part", path, what);
  }
  mem_free(text);
  if (status) return status;
  qsort(j->parts, (size_t)j->n, sizeof *j->parts, by_first);
  for (int32_t i = 1; i < j->n; i++)
    if (whole(j->parts[i], "skip_windows") < whole(j->parts[i - 1], "skip_windows") + whole(j->parts[i - 1], "windows"))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "parts", "window %" PRId64 " is in two parts", whole(j->parts[i], "skip_windows"));
  return SITS_OK;
}

static enum sits_status add_up(struct join *j, struct sits_error *err)
{
  for (int32_t i = 0; i < j->n; i++) j->n_windows += whole(j->parts[i], "windows");
  j->ctx = whole(j->parts[0], "ctx");
  j->n_rows = (int32_t)json_array_size(json_object_get(j->parts[0], "rows"));
  j->sums = mem_calloc((size_t)j->n_rows, sizeof *j->sums);
  if (!j->sums) return sits_fail(err, SITS_NOMEM, "out of memory");
  const double scored = eval_scored(j->ctx);
  for (int32_t r = 0; r < j->n_rows; r++) {
    struct eval_sums *sums = &j->sums[r];
    sums->nll = mem_calloc((size_t)j->n_windows, sizeof(double));
    sums->kl = mem_calloc((size_t)j->n_windows, sizeof(double));
    if (!sums->nll || !sums->kl) return sits_fail(err, SITS_NOMEM, "out of memory");
    int64_t at = 0;
    for (int32_t i = 0; i < j->n; i++) {
      const json_t *row = json_array_get(json_object_get(j->parts[i], "rows"), (size_t)r);
      const json_t *nll = json_object_get(row, "window_nll"), *kl = json_object_get(row, "window_kl");
      const int64_t n = whole(j->parts[i], "windows");
      const double rate = json_number_value(json_object_get(row, "tokens_per_s"));
      sums->n_right += llrint(json_number_value(json_object_get(row, "accuracy")) * scored * (double)n);
      sums->n_agree += llrint(json_number_value(json_object_get(row, "top1_agreement")) * scored * (double)n);
      sums->compute_us += rate > 0 ? llrint((double)(n * (j->ctx - 1)) / rate * 1e6) : 0;
      for (int64_t w = 0; w < n; w++, at++) {
        sums->nll[at] = json_number_value(json_array_get(nll, (size_t)w)) * scored;
        sums->kl[at] = json_number_value(json_array_get(kl, (size_t)w)) * scored;
      }
    }
  }
  return SITS_OK;
}

static json_t *result_json(const struct join *j)
{
  const json_t *first = j->parts[0], *row;
  json_t *rows = json_array(), *spans = json_array();
  size_t index;
  json_array_foreach(json_object_get(first, "rows"), index, row) {
    const json_t *share = json_object_get(row, "share_4x4");
    const struct eval_label label = {
        .name = json_string_value(json_object_get(row, "name")), .kv = json_string_value(json_object_get(row, "kv")),
        .weight_bytes = whole(row, "weight_bytes"), .share_4x4 = share ? json_number_value(share) : -1,
        .compile_s = json_number_value(json_object_get(row, "compile_s"))};
    json_array_append_new(rows, eval_table_row(&label, &j->sums[index], &j->sums[0], j->n_windows, j->ctx));
  }
  for (int32_t i = 0; i < j->n; i++)
    json_array_append_new(spans, json_pack("[II]", (json_int_t)whole(j->parts[i], "skip_windows"),
                                           (json_int_t)whole(j->parts[i], "windows")));
  return json_pack("{sO sO sI sI so sO sO so}", "text", json_object_get(first, "text"), "ctx", json_object_get(first, "ctx"),
                   "skip_windows", (json_int_t)whole(first, "skip_windows"), "windows", (json_int_t)j->n_windows, "spans", spans, "ids",
                   json_object_get(first, "ids"), "reference", json_object_get(first, "reference"), "rows", rows);
}

static enum sits_status write_result(const struct join *j, const struct eval_options *options, struct sits_error *err)
{
  json_t *result = result_json(j);
  enum sits_status status = result ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  if (!status && options->out) status = eval_write_json(result, options->out, err);
  if (!status && options->json) {
    json_dumpf(result, stdout, JSON_REAL_PRECISION(10));
    printf("\n");
  } else if (!status) {
    eval_table_print(result, NULL);
  }
  json_decref(result);
  return status;
}

enum sits_status eval_join(const struct eval_options *options, struct sits_error *err)
{
  struct join j = {0};
  if (!options->parts) return sits_fail_param(err, SITS_CONFIG, "parts", "no parts: give --parts FILE,FILE,...");
  enum sits_status status = read_parts(&j, options->parts, err);
  if (!status) status = add_up(&j, err);
  if (!status) status = write_result(&j, options, err);
  for (int32_t r = 0; j.sums && r < j.n_rows; r++) {
    mem_free(j.sums[r].nll);
    mem_free(j.sums[r].kl);
  }
  for (int32_t i = 0; i < j.n; i++) json_decref(j.parts[i]);
  mem_free(j.sums);
  mem_free(j.parts);
  return status;
}
