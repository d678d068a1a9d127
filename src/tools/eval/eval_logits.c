/* `sits2026-eval forced`: logits over given ids, position by position. `greedy`: the most likely continuation of several prompts at once.
 * `tokenize`: the ids of a file. Entry points: eval_forced, eval_greedy, eval_tokenize. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "base/json.h"
#include "base/mem.h"
#include "tools/eval/eval.h"

/* ---- reading ids ---- */

static enum sits_status ids_from_json(const json_t *list, struct token_list *out, struct sits_error *err)
{
  const json_t *value;
  size_t i;
  if (!json_is_array(list)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "ids", "ids are no JSON list of whole numbers");
  json_array_foreach(list, i, value) {
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > INT32_MAX)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "ids", "element %zu of the ids is no token id", i);
    if (!token_list_push(out, (int32_t)json_integer_value(value))) return sits_fail(err, SITS_NOMEM, "out of memory");
  }
  return SITS_OK;
}

/* --ids "[1,2,3]", or --text FILE. */
static enum sits_status read_ids(const struct eval_options *options, const struct tokenizer *tokenizer, struct token_list *out,
                                 struct sits_error *err)
{
  if (!options->ids) return eval_encode_file(tokenizer, options, out, err);
  json_t *list;
  enum sits_status status = json_parse(options->ids, strlen(options->ids), &json_limits_request, &list, err);
  if (status) return status;
  status = ids_from_json(list, out, err);
  json_decref(list);
  return status;
}

/* ---- forced ---- */

static json_t *position_json(const float *row, int32_t n_vocab, int32_t id, int32_t next, int32_t n_top)
{
  int32_t best[64];
  double total = eval_logsumexp(row, n_vocab);
  json_t *ids = json_array(), *logits = json_array();
  eval_top(row, n_vocab, n_top, best);
  for (int32_t i = 0; i < n_top; i++) {
    json_array_append_new(ids, json_integer(best[i]));
    json_array_append_new(logits, json_real((double)row[best[i]]));
  }
  json_t *position = json_pack("{si sf so so}", "id", id, "logsumexp", total, "top_ids", ids, "top_logits", logits);
  if (next >= 0) json_object_set_new(position, "next_logprob", json_real((double)row[next] - total));
  return position;
}

static enum sits_status force(struct eval_session *s, const struct eval_options *options, const struct token_list *ids, FILE *dump,
                              json_t *positions, struct sits_error *err)
{
  int32_t n_vocab = s->runner.model->config.n_vocab, n_top = (int32_t)options->top < n_vocab ? (int32_t)options->top : n_vocab;
  for (int64_t at = 0; at < ids->n;) {
    int32_t n = ids->n - at < s->max_rows ? (int32_t)(ids->n - at) : s->max_rows;
    if (n > eval_room(s, 0)) n = eval_room(s, 0);
    const float *logits;
    struct eval_piece piece = {.slot = 0, .tokens = ids->ids + at, .n_tokens = n, .first_row = 0};
    enum sits_status status = eval_step(s, &piece, 1, &logits, err);
    if (status) return status;
    if (dump && fwrite(logits, sizeof *logits * (size_t)n_vocab, (size_t)n, dump) != (size_t)n)
      return sits_fail_param(err, SITS_IO, "out", "%s: cannot be written", options->out);
    for (int32_t i = 0; i < n; i++) {
      int32_t next = at + i + 1 < ids->n ? ids->ids[at + i + 1] : -1;
      json_array_append_new(positions, position_json(logits + (size_t)i * (size_t)n_vocab, n_vocab, ids->ids[at + i], next, n_top));
    }
    at += n;
  }
  return SITS_OK;
}

enum sits_status eval_forced(const struct eval_options *options, struct sits_error *err)
{
  struct tokenizer *tokenizer = NULL;
  struct token_list ids = {0};
  struct eval_session s = {0};
  json_t *positions = json_array();
  FILE *dump = NULL;
  enum sits_status status = eval_load_tokenizer(options->model, &tokenizer, err);
  if (!status) status = read_ids(options, tokenizer, &ids, err);
  if (!status && ids.n == 0) status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "ids", "there are no ids");
  if (!status && ids.n > 1 << 24) status = sits_fail_param(err, SITS_CONTEXT_LENGTH, "ids", "%" PRId64 " ids are too many", ids.n);
  int64_t rows = ids.n < options->batch_tokens ? ids.n : options->batch_tokens;
  if (!status) status = eval_session_open(&s, options, 1, (int32_t)ids.n, (int32_t)rows, err);
  if (!status && options->out) {
    dump = fopen(options->out, "wb");
    if (!dump) status = sits_fail_param(err, SITS_IO, "out", "%s: cannot be opened for writing", options->out);
  }
  if (!status) status = force(&s, options, &ids, dump, positions, err);
  if (dump && fclose(dump) != 0 && !status) status = sits_fail_param(err, SITS_IO, "out", "%s: cannot be written", options->out);
  if (!status) {
    json_t *result = json_pack("{si sO}", "n_vocab", s.runner.model->config.n_vocab, "positions", positions);
    json_dumpf(result, stdout, JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(result);
  }
  json_decref(positions);
  token_list_fini(&ids);
  if (tokenizer) tokenizer_destroy(tokenizer);
  eval_session_close(&s);
  return status;
}

/* ---- greedy ---- */

struct answer {
  struct token_list prompt, ids;
  json_t *gaps;                      /* difference of the best two logits, per id */
  int64_t n_fed;                     /* prompt tokens in the cache */
  bool is_done;
};

/* The prompts file: a JSON list of {"ids": [...]} or {"prompt": "text"}. */
static enum sits_status read_prompt(const struct tokenizer *tokenizer, const struct eval_options *options, const json_t *item,
                                    struct token_list *out, struct sits_error *err)
{
  const json_t *ids = json_object_get(item, "ids"), *text = json_object_get(item, "prompt");
  if (ids) return ids_from_json(ids, out, err);
  if (!json_is_string(text)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompts", "a prompt has neither `ids` nor `prompt`");
  enum sits_status status = tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text), eval_encode_flags(options), out);
  return status ? sits_fail(err, status, "a prompt cannot be encoded") : SITS_OK;
}

static enum sits_status read_prompts(const struct tokenizer *tokenizer, const struct eval_options *options, struct answer **out, int32_t *n,
                                     struct sits_error *err)
{
  json_t *list = NULL;
  if (!options->prompts) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompts", "--prompts FILE is missing");
  enum sits_status status = json_parse_file(options->prompts, &json_limits_request, &list, err);
  if (status) return status;
  size_t size = json_array_size(list);
  struct answer *answers = size > 0 && size <= 1024 ? mem_calloc(size, sizeof *answers) : NULL;
  if (size == 0 || size > 1024)
    status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompts", "%s: no list of 1 to 1024 prompts", options->prompts);
  else if (!answers) status = sits_fail(err, SITS_NOMEM, "out of memory");
  if (answers) { /* owned by the caller from here, whatever happens */
    *out = answers;
    *n = (int32_t)size;
  }
  for (size_t i = 0; i < size && !status; i++) {
    answers[i].gaps = json_array();
    status = read_prompt(tokenizer, options, json_array_get(list, i), &answers[i].prompt, err);
    if (!status && answers[i].prompt.n == 0) status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompts", "prompt %zu is empty", i);
  }
  json_decref(list);
  return status;
}

static bool ends(const struct eval_session *s, int32_t id)
{
  int32_t n;
  const int32_t *list = tokenizer_end_tokens(s->tokenizer, &n);
  for (int32_t i = 0; i < n; i++)
    if (list[i] == id) return true;
  return false;
}

static enum sits_status take_best(const struct eval_session *s, const struct eval_options *options, struct answer *a, const float *row,
                                  struct sits_error *err)
{
  int32_t best[2];
  eval_top(row, s->runner.model->config.n_vocab, 2, best);
  if (!token_list_push(&a->ids, best[0])) return sits_fail(err, SITS_NOMEM, "out of memory");
  json_array_append_new(a->gaps, json_real((double)row[best[0]] - (double)row[best[1]]));
  a->is_done = a->ids.n >= options->max_tokens || (!options->ignore_eos && ends(s, best[0]));
  return SITS_OK;
}

/* Read whole prompts, in chunks, one sequence at a time; each ends with its first answer token. */
static enum sits_status read_all(struct eval_session *s, const struct eval_options *options, struct answer *answers, int32_t n,
                                 struct sits_error *err)
{
  for (int32_t i = 0; i < n; i++)
    while (answers[i].n_fed < answers[i].prompt.n) {
      struct answer *a = &answers[i];
      int64_t left = a->prompt.n - a->n_fed;
      int32_t size = left < s->max_tokens ? (int32_t)left : s->max_tokens;
      if (size > eval_room(s, i)) size = eval_room(s, i);
      bool is_last = size == left;
      const float *logits;
      struct eval_piece piece = {.slot = i, .tokens = a->prompt.ids + a->n_fed, .n_tokens = size, .first_row = is_last ? size - 1 : size};
      enum sits_status status = eval_step(s, &piece, 1, &logits, err);
      if (!status && is_last) status = take_best(s, options, a, logits, err);
      if (status) return status;
      a->n_fed += size;
    }
  return SITS_OK;
}

static enum sits_status decode_all(struct eval_session *s, const struct eval_options *options, struct answer *answers, int32_t n,
                                   struct sits_error *err)
{
  struct eval_piece *pieces = mem_calloc((size_t)n, sizeof *pieces);
  enum sits_status status = pieces ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  while (!status) {
    int32_t n_pieces = 0;
    const float *logits;
    for (int32_t i = 0; i < n; i++) {
      const int32_t *newest = answers[i].ids.ids + answers[i].ids.n - 1;
      if (!answers[i].is_done) pieces[n_pieces++] = (struct eval_piece){.slot = i, .tokens = newest, .n_tokens = 1, .first_row = 0};
    }
    if (n_pieces == 0) break;
    status = eval_step(s, pieces, n_pieces, &logits, err);
    for (int32_t p = 0; p < n_pieces && !status; p++)
      status = take_best(s, options, &answers[pieces[p].slot], logits + (size_t)p * (size_t)s->runner.model->config.n_vocab, err);
  }
  mem_free(pieces);
  return status;
}

static enum sits_status print_answers(const struct eval_session *s, const struct answer *answers, int32_t n, struct sits_error *err)
{
  json_t *list = json_array();
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < n && !status; i++) {
    struct buf text;
    json_t *ids = json_array(), *prompt = json_array();
    buf_init(&text, 64u << 20);
    status = tokenizer_decode(s->tokenizer, answers[i].ids.ids, answers[i].ids.n, true, &text);
    if (status) sits_fail(err, status, "an answer cannot be decoded");
    for (int64_t k = 0; k < answers[i].ids.n; k++) json_array_append_new(ids, json_integer(answers[i].ids.ids[k]));
    for (int64_t k = 0; k < answers[i].prompt.n; k++) json_array_append_new(prompt, json_integer(answers[i].prompt.ids[k]));
    json_array_append_new(list, json_pack("{so so sO ss%}", "prompt_ids", prompt, "ids", ids, "gap", answers[i].gaps, "text",
                                          text.data ? text.data : "", text.size));
    buf_fini(&text);
  }
  if (!status) {
    json_dumpf(list, stdout, JSON_REAL_PRECISION(9));
    printf("\n");
  }
  json_decref(list);
  return status;
}

enum sits_status eval_greedy(const struct eval_options *options, struct sits_error *err)
{
  struct tokenizer *tokenizer = NULL;
  struct answer *answers = NULL;
  struct eval_session s = {0};
  int32_t n = 0;
  int64_t longest = 0;
  enum sits_status status = eval_load_tokenizer(options->model, &tokenizer, err);
  if (!status) status = read_prompts(tokenizer, options, &answers, &n, err);
  for (int32_t i = 0; i < n; i++)
    if (answers[i].prompt.n > longest) longest = answers[i].prompt.n;
  longest += options->max_tokens;
  if (!status && longest > 1 << 24) status = sits_fail_param(err, SITS_CONTEXT_LENGTH, "prompts", "a prompt is too long");
  if (!status) status = eval_session_open(&s, options, n, (int32_t)longest, n, err);
  if (!status) status = read_all(&s, options, answers, n, err);
  if (!status) status = decode_all(&s, options, answers, n, err);
  if (!status) status = print_answers(&s, answers, n, err);
  for (int32_t i = 0; i < n; i++) {
    token_list_fini(&answers[i].prompt);
    token_list_fini(&answers[i].ids);
    json_decref(answers[i].gaps);
  }
  mem_free(answers);
  if (tokenizer) tokenizer_destroy(tokenizer);
  eval_session_close(&s);
  return status;
}

/* ---- tokenize ---- */

enum sits_status eval_tokenize(const struct eval_options *options, struct sits_error *err)
{
  struct tokenizer *tokenizer = NULL;
  struct token_list ids = {0};
  enum sits_status status = eval_load_tokenizer(options->model, &tokenizer, err);
  if (!status) status = eval_encode_file(tokenizer, options, &ids, err);
  FILE *out = status || !options->out ? NULL : fopen(options->out, "wb");
  if (!status && options->out && !out) status = sits_fail_param(err, SITS_IO, "out", "%s: cannot be opened for writing", options->out);
  if (out) {
    bool is_ok = fwrite(ids.ids, sizeof *ids.ids, (size_t)ids.n, out) == (size_t)ids.n;
    if (fclose(out) != 0 || !is_ok) status = sits_fail_param(err, SITS_IO, "out", "%s: cannot be written", options->out);
  }
  if (!status && out) printf("%" PRId64 " ids\n", ids.n);
  for (int64_t i = 0; i < ids.n && !status && !out; i++) printf("%s%d%s", i ? "," : "[", ids.ids[i], i == ids.n - 1 ? "]\n" : "");
  if (!status && !out && ids.n == 0) printf("[]\n");
  token_list_fini(&ids);
  if (tokenizer) tokenizer_destroy(tokenizer);
  return status;
}
