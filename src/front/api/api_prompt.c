/* See api_prompt.h. api_prompt_chat is the path of every chat request: normalise, mark, render, unmark, encode. */
#include "front/api/api_prompt.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

#define MAX_RENDERED_BYTES (64u << 20)
#define MARKER_BYTES 3        /* U+FDD0 .. U+FDEF are EF B7 90 .. EF B7 AF: noncharacters, never assigned */
#define N_MARKERS 32

struct special { const char *text; size_t n_bytes; };

struct range { int32_t from, to; };

struct api_specials {
  struct special *list;       /* [n] in the order of their bytes */
  int32_t n;
  struct range starts[256];   /* of those that start with this byte */
};

static int by_bytes(const void *a, const void *b)
{
  const struct special *x = a, *y = b;
  int order = memcmp(x->text, y->text, x->n_bytes < y->n_bytes ? x->n_bytes : y->n_bytes);
  return order ? order : x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

enum sits_status api_specials_create(const struct tokenizer *tokenizer, struct api_specials **out)
{
  struct api_specials *specials = mem_calloc(1, sizeof *specials);
  if (!specials) return SITS_NOMEM;
  int32_t n_vocab = tokenizer_n_vocab(tokenizer), n = 0;
  for (int32_t id = 0; id < n_vocab; id++) n += tokenizer_is_special(tokenizer, id);
  specials->list = mem_calloc((size_t)n + 1, sizeof *specials->list);
  if (!specials->list) {
    api_specials_destroy(specials);
    return SITS_NOMEM;
  }
  for (int32_t id = 0; id < n_vocab; id++) {
    if (!tokenizer_is_special(tokenizer, id)) continue;
    struct special s = {0};
    s.text = tokenizer_piece(tokenizer, id, &s.n_bytes);
    if (!s.text || !s.n_bytes) continue;
    specials->list[specials->n++] = s;
  }
  qsort(specials->list, (size_t)specials->n, sizeof *specials->list, by_bytes);
  for (int32_t i = 0; i < specials->n; i++) {
    struct range *range = &specials->starts[(unsigned char)specials->list[i].text[0]];
    if (range->to == 0) range->from = i;
    range->to = i + 1;
  }
  *out = specials;
  return SITS_OK;
}

void api_specials_destroy(struct api_specials *specials)
{
  if (!specials) return;
  mem_free(specials->list);
  mem_free(specials);
}

/* The first of the range's entries whose byte at `depth` is at least c; those that end before it come first. */
static int32_t first_with(const struct api_specials *specials, struct range range, size_t depth, unsigned c)
{
  while (range.from < range.to) {
    int32_t middle = range.from + (range.to - range.from) / 2;
    const struct special *s = &specials->list[middle];
    if (s->n_bytes <= depth || (unsigned char)s->text[depth] < c) range.from = middle + 1;
    else range.to = middle;
  }
  return range.from;
}

/* Whether a special token is at text[0], or one that the end of the text cuts off. Byte by byte the range of entries that begin as the text
 * does is narrowed, so a place costs as many steps as it shares bytes with some entry, not one per entry. */
static bool begins_special(const struct api_specials *specials, const char *text, size_t n_bytes)
{
  struct range range = specials->starts[(unsigned char)text[0]];
  for (size_t depth = 1; range.from < range.to; depth++) {
    if (depth == n_bytes || specials->list[range.from].n_bytes == depth) return true;
    unsigned c = (unsigned char)text[depth];
    range = (struct range){first_with(specials, range, depth, c), first_with(specials, range, depth, c + 1)};
  }
  return false;
}

/* ---- marking ---- */

struct marking {
  const struct api_specials *specials;
  char marker[MARKER_BYTES];
  bool used[N_MARKERS];       /* markers that occur in the client's strings */
  bool is_needed;
  bool failed;                /* out of memory */
};

/* First pass: is there anything to mark, and which markers are taken? */
static void survey(struct marking *marking, const json_t *value)
{
  const char *key;
  json_t *entry;
  size_t i;
  if (json_is_object(value)) {
    json_object_foreach((json_t *)value, key, entry) survey(marking, entry);
  } else if (json_is_array(value)) {
    json_array_foreach((json_t *)value, i, entry) survey(marking, entry);
  } else if (json_is_string(value)) {
    const char *text = json_string_value(value);
    size_t n = json_string_length(value);
    for (size_t k = 0; k < n; k++) {
      unsigned char c = (unsigned char)text[k];
      if (c == 0xEF && k + 2 < n && (unsigned char)text[k + 1] == 0xB7) {
        unsigned last = (unsigned char)text[k + 2] - 0x90u;
        if (last < N_MARKERS) marking->used[last] = true;
      }
      if (!marking->is_needed && begins_special(marking->specials, text + k, n - k)) marking->is_needed = true;
    }
  }
}

static json_t *mark_string(struct marking *marking, const json_t *value)
{
  const char *text = json_string_value(value);
  size_t n = json_string_length(value);
  struct buf out;
  buf_init(&out, MAX_RENDERED_BYTES);
  for (size_t k = 0; k < n; k++) {
    if (begins_special(marking->specials, text + k, n - k)) buf_append(&out, marking->marker, MARKER_BYTES);
    buf_append_char(&out, text[k]);
  }
  json_t *marked = out.failed ? NULL : json_stringn_nocheck(out.data ? out.data : "", out.size);
  buf_fini(&out);
  return marked;
}

/* Second pass: a deep copy with markers in. Roles are ours, not the client's, and hold no special token. */
static json_t *mark(struct marking *marking, const json_t *value)
{
  const char *key;
  json_t *entry, *copy = NULL;
  size_t i;
  if (json_is_object(value)) {
    copy = json_object();
    json_object_foreach((json_t *)value, key, entry)
      if (json_object_set_new(copy, key, mark(marking, entry))) marking->failed = true;
  } else if (json_is_array(value)) {
    copy = json_array();
    json_array_foreach((json_t *)value, i, entry)
      if (json_array_append_new(copy, mark(marking, entry))) marking->failed = true;
  } else {
    copy = json_is_string(value) ? mark_string(marking, value) : json_incref((json_t *)value);
  }
  if (!copy) marking->failed = true;
  return copy;
}

/* ---- encoding ---- */

/* Take the markers out of text in place and note where they stood. */
static enum sits_status unmark(struct buf *text, const char *marker, bool **guards)
{
  bool *at = mem_calloc(text->size + 1, sizeof *at);
  if (!at) return SITS_NOMEM;
  size_t to = 0;
  for (size_t from = 0; from < text->size;) {
    if (text->size - from >= MARKER_BYTES && !memcmp(text->data + from, marker, MARKER_BYTES)) {
      at[to] = true;
      from += MARKER_BYTES;
    } else {
      text->data[to++] = text->data[from++];
    }
  }
  text->size = to;
  text->data[to] = '\0';
  *guards = at;
  return SITS_OK;
}

static enum sits_status encode_rendered(const struct api_model *model, const struct marking *marking, bool add_special, struct buf *text,
                                        struct token_list *out)
{
  const unsigned flags = TOKENIZER_PARSE_SPECIAL | (add_special ? TOKENIZER_ADD_SPECIAL : 0u);
  bool *guards = NULL;
  enum sits_status status = marking->is_needed && text->data ? unmark(text, marking->marker, &guards) : SITS_OK;
  if (!status) status = tokenizer_encode_guarded(model->tokenizer, text->data ? text->data : "", text->size, flags, guards, out);
  mem_free(guards);
  return status;
}

/* ---- rendering ---- */

static bool set_token_text(json_t *variables, const char *name, const struct tokenizer *tokenizer, int32_t id)
{
  size_t n_bytes = 0;
  const char *piece = id >= 0 ? tokenizer_piece(tokenizer, id, &n_bytes) : NULL;
  return !json_object_set_new(variables, name, piece ? json_stringn(piece, n_bytes) : json_string(""));
}

/* The variables a template sees, as transformers' apply_chat_template passes them. *messages is taken over. */
static json_t *make_variables(const struct api_model *model, const struct api_request *request, json_t *messages, json_t *kwargs)
{
  json_t *variables = json_object();
  bool ok = variables && !json_object_set_new(variables, "messages", messages);
  if (!variables) json_decref(messages);
  ok = ok && !json_object_set_new(variables, "tools", json_null()) && !json_object_set_new(variables, "documents", json_null()) &&
       !json_object_set_new(variables, "add_generation_prompt", json_boolean(request->add_generation_prompt)) &&
       set_token_text(variables, "bos_token", model->tokenizer, tokenizer_bos(model->tokenizer)) &&
       set_token_text(variables, "eos_token", model->tokenizer, tokenizer_eos(model->tokenizer));
  if (ok && kwargs) ok = !json_object_update(variables, kwargs);
  if (ok) return variables;
  json_decref(variables);
  return NULL;
}

static enum sits_status choose_marker(struct marking *marking, struct sits_error *err)
{
  for (unsigned i = 0; i < N_MARKERS; i++) {
    if (marking->used[i]) continue;
    marking->marker[0] = (char)0xEF;
    marking->marker[1] = (char)0xB7;
    marking->marker[2] = (char)(0x90 + i);
    return SITS_OK;
  }
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, "messages", "'messages' holds every noncharacter of Unicode's U+FDD0 block");
}

enum sits_status api_prompt_chat(const struct api_model *model, const struct api_specials *specials, const struct api_limits *limits,
                                 const struct api_request *request, struct token_list *out, struct sits_error *err)
{
  if (!model->chat_template)
    return sits_fail_param(err, SITS_TEMPLATE, "messages",
                           "this model has no chat template; give one with --chat-template or use /v1/completions");
  json_t *messages = NULL, *kwargs = json_incref(request->template_kwargs), *variables = NULL;
  struct buf text;
  buf_init(&text, MAX_RENDERED_BYTES);
  struct marking marking = {.specials = specials};
  enum sits_status status = api_messages_normalise(request->messages, limits, chat_template_wants_parts(model->chat_template),
                                                   model->knows_developer_role, &messages, err);
  if (status) goto done;
  survey(&marking, messages);
  if (kwargs) survey(&marking, kwargs);
  if (marking.is_needed) {
    status = choose_marker(&marking, err);
    if (status) goto done;
    json_t *plain = messages, *plain_kwargs = kwargs;
    messages = mark(&marking, plain);
    kwargs = plain_kwargs ? mark(&marking, plain_kwargs) : NULL;
    json_decref(plain);
    json_decref(plain_kwargs);
  }
  variables = marking.failed ? NULL : make_variables(model, request, json_incref(messages), kwargs);
  if (!variables) {
    status = sits_fail(err, SITS_NOMEM, "no memory for the chat template");
    goto done;
  }
  status = chat_template_render(model->chat_template, variables, clock_unix_s(), &text, err);
  if (status) {
    if (err && !err->param[0]) memcpy(err->param, "messages", sizeof "messages");
    goto done;
  }
  status = encode_rendered(model, &marking, request->add_special_tokens, &text, out);
  if (status) sits_fail(err, status, "the rendered messages could not be tokenized");
done:
  json_decref(messages);
  json_decref(kwargs);
  json_decref(variables);
  buf_fini(&text);
  return status;
}

enum sits_status api_prompt_text(const struct api_model *model, const struct api_request *request, int64_t index, struct token_list *out,
                                 struct sits_error *err)
{
  const struct api_prompt *prompt = &request->prompts[index];
  if (prompt->text) {
    unsigned flags = (request->add_special_tokens ? TOKENIZER_ADD_SPECIAL : 0u) | (request->parse_special ? TOKENIZER_PARSE_SPECIAL : 0u);
    enum sits_status status = tokenizer_encode(model->tokenizer, prompt->text, prompt->n_bytes, flags, out);
    return status ? sits_fail_param(err, status, "prompt", "the prompt could not be tokenized") : SITS_OK;
  }
  int32_t n_vocab = tokenizer_n_vocab(model->tokenizer);
  for (int64_t i = 0; i < prompt->n_ids; i++) {
    if (prompt->ids[i] < 0 || prompt->ids[i] >= n_vocab)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "a token id of 'prompt' is outside the vocabulary of %d", n_vocab);
    if (!token_list_push(out, prompt->ids[i])) return sits_fail(err, SITS_NOMEM, "no memory for the prompt");
  }
  return SITS_OK;
}

enum sits_status api_prompt_budget(const struct api_model *model, const struct api_request *request, int64_t n_prompt, int32_t *max_tokens,
                                   struct sits_error *err)
{
  const char *param = request->kind == API_CHAT ? "messages" : "prompt";
  int64_t most = access_max_tokens(request->grant);
  if (n_prompt == 0) return sits_fail_param(err, SITS_INVALID_ARGUMENT, param, "the prompt has no tokens");
  int64_t wanted = api_request_max_tokens(request), room = model->max_model_len - n_prompt;
  int64_t least = wanted >= 0 ? wanted : 1; /* what must fit */
  if (room < least)
    return sits_fail_param(err, SITS_CONTEXT_LENGTH, param,
                           "This model's maximum context length is %d tokens. However, you requested %lld tokens (%lld in the %s, %lld in "
                           "the completion). Please reduce the length of the %s or the completion.",
                           model->max_model_len, (long long)(n_prompt + least), (long long)n_prompt, param, (long long)least, param);
  if (most >= 0 && wanted > most)
    return sits_fail_param(err, SITS_PERMISSION_DENIED, request->max_completion_tokens >= 0 ? "max_completion_tokens" : "max_tokens",
                           "this key may ask for at most %lld tokens", (long long)most);
  if (wanted < 0) wanted = request->kind == API_CHAT || room < 16 ? room : 16; /* OpenAI's default for completions */
  if (most >= 0 && wanted > most) wanted = most;
  *max_tokens = (int32_t)wanted;
  return SITS_OK;
}
