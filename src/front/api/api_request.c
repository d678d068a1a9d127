/* See api_request.h. The field table is the heart: one row a field, its kind of value, where it goes, its range, and which calls know it.
 * To add a field: add it to struct api_request, its default to api_request_create and a row here; a field with structure of its own gets a
 * reader in api_fields.c. */
#include "front/api/api_request.h"

#include <math.h>
#include <stddef.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "front/api/api_fields.h"

const struct api_limits api_limits_default = {
  .max_body_bytes = 4 << 20,
  .max_choices = SITS_MAX_CHOICES,
  .max_prompts = 256,
  .max_sequences = 512,
  .max_messages = 4096,
  .max_parts = 1024,
  .max_tokens = 1 << 24,
  .max_stops = 16,
  .max_stop_chars = 1024,
  .max_stop_ids = 128,
  .max_logit_bias = 1024,
  .max_top_logprobs = SITS_MAX_TOP_LOGPROBS,
  .max_template_kwargs = 64,
  .max_name_chars = 256,
};

#define GENERATE API_GENERATE
#define PROMPTED (API_CHAT | API_COMPLETION | API_TOKENIZE)
#define EVERY (API_CHAT | API_COMPLETION | API_TOKENIZE | API_DETOKENIZE)

#define AT(member) offsetof(struct api_request, member)
#define LARGE 9007199254740991.0   /* 2^53 - 1 */
#define LEAST 1e-6                 /* of what must not be 0, also not as a float */

const struct api_field api_field_table[] = {
  {"model", EVERY, FIELD_STRING, AT(model)},
  {"messages", API_CHAT | API_TOKENIZE, FIELD_READER, .reader = api_read_messages},
  {"prompt", API_COMPLETION | API_TOKENIZE, FIELD_READER, .reader = api_read_prompt},
  {"tokens", API_DETOKENIZE, FIELD_READER, .reader = api_read_tokens},
  {"temperature", GENERATE, FIELD_REAL, AT(temperature), 0, 0, 2},
  {"top_p", GENERATE, FIELD_REAL, AT(top_p), 0, LEAST, 1},
  {"min_p", GENERATE, FIELD_REAL, AT(min_p), 0, 0, 1},
  {"top_k", GENERATE, FIELD_INT, AT(top_k), 0, -1, 1 << 24},
  {"repetition_penalty", GENERATE, FIELD_REAL, AT(repetition_penalty), 0, LEAST, 1e3},
  {"presence_penalty", GENERATE, FIELD_REAL, AT(presence_penalty), 0, -2, 2},
  {"frequency_penalty", GENERATE, FIELD_REAL, AT(frequency_penalty), 0, -2, 2},
  {"seed", GENERATE, FIELD_INT, AT(seed), AT(has_seed), -9223372036854775808.0, 9223372036854775807.0},
  {"n", GENERATE, FIELD_INT, AT(n), 0, 1, LARGE},                     /* upper end: limits, in api_request_check */
  {"max_tokens", GENERATE, FIELD_INT, AT(max_tokens), 0, 0, LARGE},
  {"max_completion_tokens", GENERATE, FIELD_INT, AT(max_completion_tokens), 0, 0, LARGE},
  {"min_tokens", GENERATE, FIELD_INT, AT(min_tokens), 0, 0, LARGE},
  {"ignore_eos", GENERATE, FIELD_BOOL, AT(ignore_eos)},
  {"stop", GENERATE, FIELD_READER, .reader = api_read_stop},
  {"stop_token_ids", GENERATE, FIELD_READER, .reader = api_read_stop_ids},
  {"logit_bias", GENERATE, FIELD_READER, .reader = api_read_logit_bias},
  {"priority", GENERATE, FIELD_INT, AT(priority), 0, -2147483648.0, 2147483647.0},
  {"cache_salt", GENERATE, FIELD_STRING, AT(cache_salt)},
  {"stream", GENERATE, FIELD_BOOL, AT(stream)},
  {"stream_options", GENERATE, FIELD_READER, .reader = api_read_stream_options},
  {"echo", API_COMPLETION, FIELD_BOOL, AT(echo)},
  {"logprobs", API_CHAT, FIELD_BOOL, AT(wants_logprobs)},
  {"top_logprobs", API_CHAT, FIELD_INT, AT(top_logprobs), AT(has_top_logprobs), 0, LARGE},
  {"logprobs", API_COMPLETION, FIELD_INT, AT(top_logprobs), AT(has_top_logprobs), 0, LARGE},
  {"skip_special_tokens", GENERATE, FIELD_BOOL, AT(skip_special_tokens)},
  {"include_stop_str_in_output", GENERATE, FIELD_BOOL, AT(include_stop_str_in_output)},
  {"return_token_ids", GENERATE, FIELD_BOOL, AT(return_token_ids)},
  {"return_timing", GENERATE, FIELD_BOOL, AT(return_timing)},
  {"return_token_strs", API_TOKENIZE, FIELD_BOOL, AT(return_token_strs)},
  {"add_special_tokens", PROMPTED, FIELD_BOOL, AT(add_special_tokens), AT(has_add_special_tokens)},
  {"parse_special", API_COMPLETION | API_TOKENIZE, FIELD_BOOL, AT(parse_special)},
  {"add_generation_prompt", API_CHAT | API_TOKENIZE, FIELD_BOOL, AT(add_generation_prompt)},
  {"chat_template_kwargs", API_CHAT | API_TOKENIZE, FIELD_READER, .reader = api_read_template_kwargs},
  {"user", EVERY, FIELD_HARMLESS},
  {"metadata", EVERY, FIELD_HARMLESS},
  {"store", EVERY, FIELD_HARMLESS},
  {"service_tier", EVERY, FIELD_HARMLESS},
  {"safety_identifier", EVERY, FIELD_HARMLESS},
  {"prompt_cache_key", EVERY, FIELD_HARMLESS},
  {"prompt_cache_retention", EVERY, FIELD_HARMLESS},
  {"prediction", EVERY, FIELD_HARMLESS},          /* predicted output: changes speed only */
  {"parallel_tool_calls", EVERY, FIELD_HARMLESS}, /* says nothing without tools, and tools are refused */
  {"request_id", EVERY, FIELD_HARMLESS},          /* the X-Request-Id header is the one that counts */
};
const size_t api_n_fields = sizeof api_field_table / sizeof *api_field_table;

struct api_request *api_request_create(enum api_kind kind)
{
  struct api_request *request = mem_calloc(1, sizeof *request);
  if (!request) return NULL;
  arena_init(&request->arena, 64u << 20);
  request->kind = kind;
  request->temperature = 1;
  request->top_p = 1;
  request->repetition_penalty = 1;
  request->n = 1;
  request->service_class = SITS_CLASS_NORMAL;
  request->max_tokens = request->max_completion_tokens = -1;
  request->top_logprobs = kind == API_CHAT ? 0 : -1;
  request->add_generation_prompt = true;
  request->add_special_tokens = kind != API_CHAT;
  request->parse_special = true;
  request->skip_special_tokens = true;
  return request;
}

void api_request_destroy(struct api_request *request)
{
  if (!request) return;
  if (request->body) json_decref(request->body);
  access_release(request->grant);
  arena_fini(&request->arena);
  mem_free(request);
}

enum sits_status api_request_set_class(struct api_request *request, const char *name, struct sits_error *err)
{
  static const char *const names[SITS_CLASS_COUNT] = {[SITS_CLASS_HIGH] = "high", [SITS_CLASS_NORMAL] = "normal", [SITS_CLASS_LOW] = "low"};
  static const enum sits_class by_default[] = {SITS_CLASS_NORMAL, SITS_CLASS_LOW, SITS_CLASS_HIGH};
  int wanted = 0;
  if (!name) {
    while (wanted < 2 && !access_allows_class(request->grant, by_default[wanted])) wanted++;
    wanted = by_default[wanted];
  } else {
    while (wanted < SITS_CLASS_COUNT && strcasecmp(name, names[wanted])) wanted++;
  }
  if (wanted == SITS_CLASS_COUNT)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "X-QoS-Level", "X-QoS-Level must be high, normal or low");
  if (!access_allows_class(request->grant, wanted))
    return sits_fail_param(err, SITS_PERMISSION_DENIED, "X-QoS-Level", "this key may not ask for the class '%s'", names[wanted]);
  request->service_class = (enum sits_class)wanted;
  return SITS_OK;
}

int64_t api_request_max_tokens(const struct api_request *request)
{
  return request->max_completion_tokens >= 0 ? request->max_completion_tokens : request->max_tokens;
}

int32_t api_request_logprobs(const struct api_request *request)
{
  if (request->kind == API_CHAT) return request->wants_logprobs ? (int32_t)request->top_logprobs : -1;
  return (int32_t)request->top_logprobs;
}

enum sits_status api_read_int(const json_t *value, const char *name, double min, double max, int64_t *out, struct sits_error *err)
{
  if (json_is_integer(value)) {
    int64_t v = json_integer_value(value);
    /* Comparing as doubles is exact below 2^53; the wider bounds are those of the type itself. */
    if ((double)v < min || (double)v > max) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' is out of range", name);
    *out = v;
    return SITS_OK;
  }
  double v = json_is_real(value) ? json_real_value(value) : NAN;
  if (!(v == floor(v)) || fabs(v) > LARGE) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' must be an integer", name);
  if (v < min || v > max) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' is out of range", name);
  *out = (int64_t)v;
  return SITS_OK;
}

static enum sits_status check_real(const struct api_field *field, double v, struct sits_error *err)
{
  if (v >= field->min && v <= field->max) return SITS_OK; /* NaN fails both */
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, field->name, "'%s' must be at least %g and at most %g", field->name, field->min,
                         field->max);
}

static enum sits_status read_field(const struct api_field *field, const json_t *value, const struct api_limits *limits,
                                   struct api_request *request, struct sits_error *err)
{
  char *at = (char *)request + field->offset;
  const char *name = field->name;
  enum sits_status status = SITS_OK;
  switch (field->type) {
  case FIELD_BOOL:
    if (!json_is_boolean(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' must be true or false", name);
    *(bool *)at = json_is_true(value);
    break;
  case FIELD_INT: status = api_read_int(value, name, field->min, field->max, (int64_t *)at, err); break;
  case FIELD_REAL:
    if (!json_is_number(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' must be a number", name);
    *(double *)at = json_number_value(value);
    status = check_real(field, *(double *)at, err);
    break;
  case FIELD_STRING:
    if (!json_is_string(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' must be a string", name);
    if ((int64_t)utf8_length(json_string_value(value), json_string_length(value)) > limits->max_name_chars)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' is longer than %lld characters", name,
                             (long long)limits->max_name_chars);
    if (memchr(json_string_value(value), 0, json_string_length(value)))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' must not hold a NUL character", name);
    *(const char **)at = json_string_value(value);
    break;
  case FIELD_READER: status = field->reader(request, value, limits, err); break;
  case FIELD_HARMLESS: break;
  }
  if (!status && field->has_offset) *(bool *)((char *)request + field->has_offset) = true;
  return status;
}

const struct api_field *api_field_find(const char *name, enum api_kind kind)
{
  for (size_t i = 0; i < api_n_fields; i++)
    if ((api_field_table[i].kinds & kind) && !strcmp(api_field_table[i].name, name)) return &api_field_table[i];
  return NULL;
}

enum sits_status api_request_parse(enum api_kind kind, const char *body, size_t n_bytes, const struct api_limits *limits,
                                   struct api_request **out, struct sits_error *err)
{
  struct json_limits json_limits = json_limits_request;
  json_limits.max_bytes = (size_t)limits->max_body_bytes;
  json_t *root = NULL;
  enum sits_status status = json_parse(body, n_bytes, &json_limits, &root, err);
  return status ? status : api_request_parse_json(kind, root, limits, out, err);
}

enum sits_status api_request_parse_json(enum api_kind kind, json_t *root, const struct api_limits *limits, struct api_request **out,
                                        struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  struct api_request *request = api_request_create(kind);
  if (!request) {
    json_decref(root);
    return sits_fail(err, SITS_NOMEM, "no memory for the request");
  }
  request->body = root;
  if (!json_is_object(root)) {
    status = sits_fail(err, SITS_INVALID_ARGUMENT, "the request body must be a JSON object");
    goto fail;
  }
  const char *key;
  json_t *value;
  json_object_foreach(root, key, value) {
    if (json_is_null(value)) continue;
    const struct api_field *field = api_field_find(key, kind);
    if (field) {
      status = read_field(field, value, limits, request, err);
    } else if (api_field_is_refused(key, value) || ((kind & GENERATE) && api_field_find(key, GENERATE) && !json_is_false(value))) {
      /* Also what only the other kind of completion knows, such as echo in a chat: it would change the answer. */
      status = sits_fail_param(err, SITS_UNSUPPORTED_PARAMETER, key, "the parameter '%s' is not supported with this value", key);
    } else {
      log_debug("api", "unknown request field ignored: %.40s", key);
    }
    if (status) goto fail;
  }
  if (request->messages && !request->has_add_special_tokens) request->add_special_tokens = false;
  status = api_request_check(request, limits, err);
  if (status) goto fail;
  *out = request;
  return SITS_OK;
fail:
  api_request_destroy(request);
  return status;
}

static enum sits_status check_most(struct sits_error *err, const char *name, int64_t value, int64_t most)
{
  if (value <= most) return SITS_OK;
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' is over the limit of %lld", name, (long long)most);
}

bool api_field_is_token_limit(const struct api_field *field)
{
  return field->offset == AT(max_tokens) || field->offset == AT(max_completion_tokens);
}

int64_t api_field_cap(const struct api_field *field, const struct api_limits *limits)
{
  if (field->offset == AT(n)) return limits->max_choices;
  if (field->offset == AT(top_logprobs)) return limits->max_top_logprobs;
  if (api_field_is_token_limit(field) || field->offset == AT(min_tokens)) return limits->max_tokens;
  return -1;
}

/* Integers against the limits, whichever of several counts in the end. */
static enum sits_status check_caps(const struct api_request *request, const struct api_limits *limits, struct sits_error *err)
{
  for (size_t i = 0; i < api_n_fields; i++) {
    const struct api_field *field = &api_field_table[i];
    if (!(field->kinds & request->kind) || field->type != FIELD_INT) continue;
    int64_t value = *(const int64_t *)((const char *)request + field->offset), cap = api_field_cap(field, limits);
    enum sits_status status = cap >= 0 ? check_most(err, field->name, value, cap) : SITS_OK;
    if (status) return status;
    if (value == 0 && api_field_is_token_limit(field) && !request->echo)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, field->name, "'%s' must be at least 1", field->name);
  }
  return SITS_OK;
}

static enum sits_status check_ranges(const struct api_request *request, struct sits_error *err)
{
  for (size_t i = 0; i < api_n_fields; i++) {
    const struct api_field *field = &api_field_table[i];
    if (!(field->kinds & request->kind) || field->type != FIELD_REAL) continue;
    enum sits_status status = check_real(field, *(const double *)((const char *)request + field->offset), err);
    if (status) return status;
  }
  if (request->n < 1) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "n", "'n' must be at least 1");
  if (request->max_tokens < -1 || request->max_completion_tokens < -1 || request->min_tokens < 0)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "max_tokens", "token limits must not be negative");
  return SITS_OK;
}

static enum sits_status check_required(const struct api_request *request, struct sits_error *err)
{
  switch (request->kind) {
  case API_CHAT:
    if (!request->messages) return sits_fail_param(err, SITS_MISSING_PARAMETER, "messages", "'messages' is required");
    break;
  case API_COMPLETION:
    if (!request->has_prompt) return sits_fail_param(err, SITS_MISSING_PARAMETER, "prompt", "'prompt' is required");
    break;
  case API_TOKENIZE:
    if (!request->has_prompt && !request->messages)
      return sits_fail_param(err, SITS_MISSING_PARAMETER, "prompt", "'prompt' or 'messages' is required");
    if (request->has_prompt && request->messages)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "'prompt' and 'messages' exclude each other");
    if (request->has_prompt && (request->n_prompts != 1 || !request->prompts[0].text))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "'prompt' must be a string");
    break;
  case API_DETOKENIZE:
    if (!request->has_tokens) return sits_fail_param(err, SITS_MISSING_PARAMETER, "tokens", "'tokens' is required");
    break;
  }
  return SITS_OK;
}

enum sits_status api_request_check(const struct api_request *request, const struct api_limits *limits, struct sits_error *err)
{
  enum sits_status status = check_required(request, err);
  if (!status && !(request->kind & GENERATE)) return SITS_OK;
  if (!status) status = check_ranges(request, err);
  if (!status) status = check_caps(request, limits, err);
  if (!status) status = check_most(err, "stop", request->n_stops, limits->max_stops);
  if (!status) status = check_most(err, "stop_token_ids", request->n_stop_ids, limits->max_stop_ids);
  if (!status) status = check_most(err, "logit_bias", request->n_bias, limits->max_logit_bias);
  if (!status) status = check_most(err, "prompt", request->n_prompts, limits->max_prompts);
  int64_t n_prompts = request->kind == API_CHAT ? 1 : request->n_prompts;
  if (!status) status = check_most(err, "n", request->n * n_prompts, limits->max_sequences);
  if (status) return status;
  int64_t max_tokens = api_request_max_tokens(request);
  if (max_tokens >= 0 && request->min_tokens > max_tokens)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "min_tokens", "'min_tokens' is over 'max_tokens'");
  if (request->has_stream_options && !request->stream)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stream_options", "'stream_options' needs 'stream' to be true");
  if (request->kind == API_CHAT && request->has_top_logprobs && !request->wants_logprobs && request->top_logprobs > 0)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "top_logprobs", "'top_logprobs' needs 'logprobs' to be true");
  return SITS_OK;
}
