/* Message normalisation, see api_prompt.h. */
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "front/api/api_prompt.h"

/* "messages[12].content" for error texts. */
static const char *path(char out[SITS_ERROR_PARAM_BYTES], size_t index, const char *field)
{
  snprintf(out, SITS_ERROR_PARAM_BYTES, "messages[%zu].%s", index, field);
  return out;
}

/* Text of one content part; SITS_UNSUPPORTED_PARAMETER for images, audio and files. */
static enum sits_status part_text(const json_t *part, size_t index, const json_t **text, struct sits_error *err)
{
  char where[SITS_ERROR_PARAM_BYTES];
  path(where, index, "content");
  if (json_is_string(part)) {
    *text = part;
    return SITS_OK;
  }
  const char *type = json_string_value(json_object_get(part, "type"));
  if (!type) return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "a content part of '%s' must be an object with a 'type'", where);
  if (!strcmp(type, "image_url") || !strcmp(type, "input_audio") || !strcmp(type, "file") || !strcmp(type, "video_url") ||
      !strcmp(type, "audio_url") || !strcmp(type, "image"))
    return sits_fail_param(err, SITS_UNSUPPORTED_PARAMETER, where, "only text parts are supported in '%s'", where);
  const char *field = !strcmp(type, "refusal") ? "refusal" : !strcmp(type, "text") || !strcmp(type, "input_text") ? "text" : NULL;
  *text = field ? json_object_get(part, field) : NULL;
  if (!json_is_string(*text)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "a content part of '%s' has no text", where);
  return SITS_OK;
}

/* Parts joined by a line end, as vLLM does; the result is a new reference. */
static enum sits_status join_parts(const json_t *parts, size_t index, json_t **out, struct sits_error *err)
{
  struct buf text;
  buf_init(&text, SIZE_MAX / 2);
  enum sits_status status = SITS_OK;
  for (size_t i = 0; i < json_array_size(parts) && !status; i++) {
    const json_t *part;
    status = part_text(json_array_get(parts, i), index, &part, err);
    if (status) break;
    if (i) buf_append_char(&text, '\n');
    buf_append(&text, json_string_value(part), json_string_length(part));
  }
  if (!status) {
    *out = text.failed ? NULL : json_stringn_nocheck(text.data ? text.data : "", text.size);
    if (!*out) status = sits_fail(err, SITS_NOMEM, "no memory for messages");
  }
  buf_fini(&text);
  return status;
}

static json_t *text_part(const char *text, size_t n_bytes)
{
  json_t *part = json_object();
  if (!part || json_object_set_new(part, "type", json_string("text")) ||
      json_object_set_new(part, "text", json_stringn_nocheck(text, n_bytes))) {
    json_decref(part);
    return NULL;
  }
  return part;
}

/* A string or an array of parts as a list of {"type": "text", "text": ...}. */
static enum sits_status list_parts(const json_t *content, size_t index, json_t **out, struct sits_error *err)
{
  json_t *list = json_array();
  enum sits_status status = list ? SITS_OK : SITS_NOMEM;
  size_t n = json_is_array(content) ? json_array_size(content) : 1;
  for (size_t i = 0; i < n && !status; i++) {
    const json_t *text = content;
    if (json_is_array(content)) status = part_text(json_array_get(content, i), index, &text, err);
    if (!status && json_array_append_new(list, text_part(json_string_value(text), json_string_length(text))))
      status = sits_fail(err, SITS_NOMEM, "no memory for messages");
  }
  if (status) json_decref(list);
  else *out = list;
  return status;
}

static enum sits_status normalise_content(const json_t *message, const char *role, size_t index, const struct api_limits *limits,
                                          bool wants_parts, json_t **out, struct sits_error *err)
{
  char where[SITS_ERROR_PARAM_BYTES];
  path(where, index, "content");
  const json_t *content = json_object_get(message, "content");
  if (!content || json_is_null(content)) {
    if (strcmp(role, "assistant")) return sits_fail_param(err, SITS_MISSING_PARAMETER, where, "'%s' is required", where);
    *out = json_string(""); /* the turn is kept, with nothing in it */
    return *out ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for messages");
  }
  if (!json_is_string(content) && !json_is_array(content))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "'%s' must be a string or an array of parts", where);
  if ((int64_t)json_array_size(content) > limits->max_parts)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "'%s' has over %lld parts", where, (long long)limits->max_parts);
  if (wants_parts) return list_parts(content, index, out, err);
  if (json_is_array(content)) return join_parts(content, index, out, err);
  *out = json_incref((json_t *)content);
  return SITS_OK;
}

static enum sits_status check_role(const json_t *message, size_t index, const char **role, struct sits_error *err)
{
  char where[SITS_ERROR_PARAM_BYTES];
  path(where, index, "role");
  const json_t *value = json_object_get(message, "role");
  if (!value) return sits_fail_param(err, SITS_MISSING_PARAMETER, where, "'%s' is required", where);
  const char *text = json_string_value(value);
  static const char *const known[] = {"system", "developer", "user", "assistant"};
  for (size_t i = 0; text && i < sizeof known / sizeof *known; i++)
    if (!strcmp(text, known[i]) && json_string_length(value) == strlen(known[i])) {
      *role = known[i];
      return SITS_OK;
    }
  if (text && (!strcmp(text, "tool") || !strcmp(text, "function")))
    return sits_fail_param(err, SITS_UNSUPPORTED_PARAMETER, where, "the role in '%s' belongs to tools, which are not supported", where);
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "'%s' must be system, developer, user or assistant", where);
}

static enum sits_status copy_optional(const json_t *message, size_t index, const char *field, const struct api_limits *limits, json_t *into,
                                      struct sits_error *err)
{
  json_t *value = json_object_get(message, field);
  if (!value || json_is_null(value)) return SITS_OK;
  char where[SITS_ERROR_PARAM_BYTES];
  path(where, index, field);
  if (!json_is_string(value)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "'%s' must be a string", where);
  if (!strcmp(field, "name") && (int64_t)utf8_length(json_string_value(value), json_string_length(value)) > limits->max_name_chars)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, where, "'%s' is too long", where);
  return json_object_set(into, field, value) ? sits_fail(err, SITS_NOMEM, "no memory for messages") : SITS_OK;
}

static enum sits_status normalise_one(const json_t *message, size_t index, const struct api_limits *limits, bool wants_parts,
                                      bool knows_developer_role, json_t *into, struct sits_error *err)
{
  char where[SITS_ERROR_PARAM_BYTES];
  if (!json_is_object(message))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "messages", "'messages[%zu]' must be an object", index);
  const char *role = NULL;
  enum sits_status status = check_role(message, index, &role, err);
  if (status) return status;
  static const char *const tool_fields[] = {"tool_calls", "function_call", "audio", "tool_call_id"};
  for (size_t i = 0; i < sizeof tool_fields / sizeof *tool_fields; i++) {
    const json_t *value = json_object_get(message, tool_fields[i]);
    if (!value || json_is_null(value) || (json_is_array(value) && !json_array_size(value))) continue;
    path(where, index, tool_fields[i]);
    return sits_fail_param(err, SITS_UNSUPPORTED_PARAMETER, where, "'%s' is not supported", where);
  }
  json_t *content = NULL;
  status = normalise_content(message, role, index, limits, wants_parts, &content, err);
  if (status) return status;
  const char *shown = !strcmp(role, "developer") && !knows_developer_role ? "system" : role;
  if (json_object_set_new(into, "role", json_string(shown)) | json_object_set_new(into, "content", content))
    return sits_fail(err, SITS_NOMEM, "no memory for messages");
  status = copy_optional(message, index, "name", limits, into, err);
  if (!status) status = copy_optional(message, index, "reasoning_content", limits, into, err);
  return status;
}

enum sits_status api_messages_normalise(const json_t *messages, const struct api_limits *limits, bool wants_parts,
                                        bool knows_developer_role, json_t **out, struct sits_error *err)
{
  json_t *list = json_array();
  enum sits_status status = list ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for messages");
  for (size_t i = 0; i < json_array_size(messages) && !status; i++) {
    json_t *into = json_object();
    if (!into) status = sits_fail(err, SITS_NOMEM, "no memory for messages");
    else status = normalise_one(json_array_get(messages, i), i, limits, wants_parts, knows_developer_role, into, err);
    if (!status && json_array_append(list, into)) status = sits_fail(err, SITS_NOMEM, "no memory for messages");
    json_decref(into);
  }
  if (status) json_decref(list);
  else *out = list;
  return status;
}
