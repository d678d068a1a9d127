/* See api_fields.h. */
#include "front/api/api_fields.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

#define MAX_TOKEN_ID 2147483647.0

enum sits_status api_read_messages(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                   struct sits_error *err)
{
  if (!json_is_array(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "messages", "'messages' must be an array");
  size_t n = json_array_size(value);
  if (n == 0) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "messages", "'messages' must not be empty");
  if ((int64_t)n > limits->max_messages)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "messages", "'messages' has over %lld entries", (long long)limits->max_messages);
  request->messages = (json_t *)value; /* the body keeps it alive */
  return SITS_OK;
}

/* An array of token ids into the arena. */
static enum sits_status read_ids(struct api_request *request, const json_t *array, const char *name, const int32_t **ids, int64_t *n,
                                 struct sits_error *err)
{
  size_t count = json_array_size(array);
  int32_t *out = arena_alloc(&request->arena, (count ? count : 1) * sizeof *out);
  if (!out) return sits_fail(err, SITS_NOMEM, "no memory for '%s'", name);
  for (size_t i = 0; i < count; i++) {
    int64_t id;
    enum sits_status status = api_read_int(json_array_get(array, i), name, 0, MAX_TOKEN_ID, &id, err);
    if (status) return status;
    out[i] = (int32_t)id;
  }
  *ids = out;
  *n = (int64_t)count;
  return SITS_OK;
}

static enum sits_status read_one_prompt(struct api_request *request, const json_t *value, struct api_prompt *out, struct sits_error *err)
{
  if (json_is_string(value)) {
    *out = (struct api_prompt){.text = json_string_value(value), .n_bytes = json_string_length(value)};
    return SITS_OK;
  }
  if (!json_is_array(value) || !json_array_size(value))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "a prompt must be a string or a non-empty array of token ids");
  return read_ids(request, value, "prompt", &out->ids, &out->n_ids, err);
}

enum sits_status api_read_prompt(struct api_request *request, const json_t *value, const struct api_limits *limits, struct sits_error *err)
{
  bool is_batch = json_is_array(value) && !json_is_number(json_array_get(value, 0));
  size_t n = is_batch ? json_array_size(value) : 1;
  if (n == 0) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "'prompt' must not be empty");
  if ((int64_t)n > limits->max_prompts)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "'prompt' has over %lld entries", (long long)limits->max_prompts);
  struct api_prompt *prompts = arena_calloc(&request->arena, n, sizeof *prompts);
  if (!prompts) return sits_fail(err, SITS_NOMEM, "no memory for 'prompt'");
  for (size_t i = 0; i < n; i++) {
    enum sits_status status = read_one_prompt(request, is_batch ? json_array_get(value, i) : value, &prompts[i], err);
    if (status) return status;
  }
  request->prompts = prompts;
  request->n_prompts = (int64_t)n;
  request->has_prompt = true;
  return SITS_OK;
}

enum sits_status api_read_tokens(struct api_request *request, const json_t *value, const struct api_limits *limits, struct sits_error *err)
{
  if (!json_is_array(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "tokens", "'tokens' must be an array of token ids");
  enum sits_status status = read_ids(request, value, "tokens", &request->tokens, &request->n_tokens, err);
  if (!status) request->has_tokens = true;
  return status;
}

enum sits_status api_read_stop(struct api_request *request, const json_t *value, const struct api_limits *limits, struct sits_error *err)
{
  size_t n = json_is_array(value) ? json_array_size(value) : 1;
  if ((int64_t)n > limits->max_stops)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop", "'stop' has over %lld entries", (long long)limits->max_stops);
  const char **stops = arena_calloc(&request->arena, n ? n : 1, sizeof *stops);
  if (!stops) return sits_fail(err, SITS_NOMEM, "no memory for 'stop'");
  for (size_t i = 0; i < n; i++) {
    const json_t *stop = json_is_array(value) ? json_array_get(value, i) : value;
    if (!json_is_string(stop))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop", "'stop' must be a string or an array of strings");
    size_t n_bytes = json_string_length(stop);
    if (n_bytes == 0) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop", "a stop string must not be empty");
    if ((int64_t)utf8_length(json_string_value(stop), n_bytes) > limits->max_stop_chars)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop", "a stop string is over %lld characters",
                             (long long)limits->max_stop_chars);
    if (memchr(json_string_value(stop), 0, n_bytes))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop", "a stop string must not hold a NUL character");
    stops[i] = json_string_value(stop);
  }
  request->stops = stops;
  request->n_stops = (int64_t)n;
  return SITS_OK;
}

enum sits_status api_read_stop_ids(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                   struct sits_error *err)
{
  if (!json_is_array(value))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop_token_ids", "'stop_token_ids' must be an array of token ids");
  if ((int64_t)json_array_size(value) > limits->max_stop_ids)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stop_token_ids", "'stop_token_ids' has over %lld entries",
                           (long long)limits->max_stop_ids);
  return read_ids(request, value, "stop_token_ids", &request->stop_ids, &request->n_stop_ids, err);
}

/* A key of logit_bias: a decimal token id with nothing before or after it, no zeros either. */
static bool read_token_key(const char *key, int32_t *out)
{
  int64_t id = 0;
  size_t i = 0;
  for (; key[i] >= '0' && key[i] <= '9' && i < 10; i++) id = id * 10 + (key[i] - '0');
  if (i == 0 || key[i] || id > INT32_MAX || (key[0] == '0' && i > 1)) return false;
  *out = (int32_t)id;
  return true;
}

enum sits_status api_read_logit_bias(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                     struct sits_error *err)
{
  if (!json_is_object(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "logit_bias", "'logit_bias' must be an object");
  size_t n = json_object_size(value), i = 0;
  if ((int64_t)n > limits->max_logit_bias)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "logit_bias", "'logit_bias' has over %lld entries",
                           (long long)limits->max_logit_bias);
  struct sits_logit_bias *bias = arena_calloc(&request->arena, n ? n : 1, sizeof *bias);
  if (!bias) return sits_fail(err, SITS_NOMEM, "no memory for 'logit_bias'");
  const char *key;
  json_t *entry;
  json_object_foreach((json_t *)value, key, entry) {
    if (!read_token_key(key, &bias[i].token))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "logit_bias", "keys of 'logit_bias' must be token ids");
    double b = json_is_number(entry) ? json_number_value(entry) : 1e9;
    if (!(b >= -100 && b <= 100))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "logit_bias", "values of 'logit_bias' must be numbers from -100 to 100");
    bias[i++].bias = (float)b;
  }
  request->bias = bias;
  request->n_bias = (int64_t)n;
  return SITS_OK;
}

enum sits_status api_read_stream_options(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                         struct sits_error *err)
{
  if (!json_is_object(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stream_options", "'stream_options' must be an object");
  const char *key;
  json_t *entry;
  json_object_foreach((json_t *)value, key, entry) {
    bool *flag = !strcmp(key, "include_usage") ? &request->include_usage
                 : !strcmp(key, "continuous_usage_stats") ? &request->continuous_usage : NULL;
    if (!flag || json_is_null(entry)) continue; /* include_obfuscation and the like say nothing here */
    if (!json_is_boolean(entry))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "stream_options", "flags of 'stream_options' must be true or false");
    *flag = json_is_true(entry);
  }
  request->has_stream_options = true;
  if (request->continuous_usage) request->include_usage = true;
  return SITS_OK;
}

enum sits_status api_read_template_kwargs(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                          struct sits_error *err)
{
  static const char *const reserved[] = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"};
  if (!json_is_object(value))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "chat_template_kwargs", "'chat_template_kwargs' must be an object");
  if ((int64_t)json_object_size(value) > limits->max_template_kwargs)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "chat_template_kwargs", "'chat_template_kwargs' has over %lld entries",
                           (long long)limits->max_template_kwargs);
  for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
    if (json_object_get(value, reserved[i]))
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "chat_template_kwargs", "'chat_template_kwargs' must not set '%s'", reserved[i]);
  request->template_kwargs = (json_t *)value;
  return SITS_OK;
}

/* Fields that change the answer elsewhere. allowed: values that ask for nothing, as a JSON list; "" when only null does. */
static const struct { const char *name, *allowed; } refused[] = {
  {"tools", "[[]]"},
  {"tool_choice", "[\"none\", \"auto\"]"},
  {"functions", "[[]]"},
  {"function_call", "[\"none\", \"auto\"]"},
  {"response_format", "[{\"type\": \"text\"}]"},
  {"modalities", "[[\"text\"]]"},
  {"audio", ""},
  {"best_of", ""},
  {"suffix", "[\"\"]"},
  {"web_search_options", ""},
  {"reasoning_effort", ""},
  {"verbosity", "[\"medium\"]"},
  {"moderation", ""},
  {"guided_json", ""},
  {"guided_regex", ""},
  {"guided_choice", ""},
  {"guided_grammar", ""},
  {"guided_decoding_backend", ""},
  {"guided_whitespace_pattern", ""},
  {"structured_outputs", ""},
  {"structural_tag", ""},
  {"grammar", "[\"\"]"},
  {"json_schema", ""},
  {"use_beam_search", "[false]"},
  {"length_penalty", "[1, 1.0]"},
  {"early_stopping", "[false]"},
  {"allowed_token_ids", ""},
  {"bad_words", "[[]]"},
  {"prompt_logprobs", ""},
  {"truncate_prompt_tokens", ""},
  {"truncation", ""},
  {"documents", "[[]]"},
  {"chat_template", ""},
  {"continue_final_message", "[false]"},
  {"mm_processor_kwargs", "[{}]"},
  {"logits_processors", "[[]]"},
  {"spaces_between_special_tokens", "[true]"},
  {"vllm_xargs", "[{}]"},
  {"kv_transfer_params", ""},
  {"return_tokens_as_token_ids", "[false]"},
  {"thinking_token_budget", ""},
  {"include_reasoning", "[true]"},
  {"bad_words_ids", "[[]]"},
  {"prompt_embeds", ""},
  {"typical_p", "[1, 1.0]"},
  {"mirostat", "[0]"},
  {"dry_multiplier", "[0, 0.0]"},
  {"dynatemp_range", "[0, 0.0]"},
  {"xtc_probability", "[0, 0.0]"},
  {"repeat_penalty", "[1, 1.0]"},
  {"n_predict", ""},
  {"n_probs", "[0]"},
  {"samplers", ""},
  {"regex", ""},
  {"ebnf", ""},
  {"lora_path", ""},
  {"reasoning", ""},
};

const char *api_field_refused(size_t i, const char **allowed)
{
  if (i >= sizeof refused / sizeof *refused) return NULL;
  *allowed = refused[i].allowed;
  return refused[i].name;
}

bool api_field_is_refused(const char *name, const json_t *value)
{
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    if (strcmp(refused[i].name, name)) continue;
    json_t *allowed = refused[i].allowed[0] ? json_loads(refused[i].allowed, 0, NULL) : NULL;
    bool is_allowed = false;
    for (size_t k = 0; k < json_array_size(allowed); k++) is_allowed |= json_equal(json_array_get(allowed, k), value);
    json_decref(allowed);
    return !is_allowed;
  }
  return false;
}
