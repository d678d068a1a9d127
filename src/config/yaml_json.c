/* See yaml_json.h. Recursive descent over libyaml's events, bounded in depth and nodes. */
#include "config/yaml_json.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define MAX_DEPTH 16

struct reader {
  yaml_parser_t parser;
  const char *origin;
  size_t n_left;           /* nodes that may still come */
};

static enum sits_status next(struct reader *reader, yaml_event_t *event, struct sits_error *err)
{
  if (yaml_parser_parse(&reader->parser, event)) return SITS_OK;
  if (reader->parser.error == YAML_MEMORY_ERROR) return sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
  return sits_fail(err, SITS_CONFIG, "%.150s:%zu: %s", reader->origin, reader->parser.problem_mark.line + 1,
                   reader->parser.problem ? reader->parser.problem : "cannot be read");
}

static enum sits_status refuse(const struct reader *reader, const yaml_event_t *event, const char *text, struct sits_error *err)
{
  return sits_fail(err, SITS_CONFIG, "%.150s:%zu: %s", reader->origin, event->start_mark.line + 1, text);
}

static json_t *plain_scalar(const char *text, size_t n)
{
  char *end;
  if (!n || !strcmp(text, "~") || !strcmp(text, "null")) return json_null();
  if (!strcmp(text, "true") || !strcmp(text, "false")) return json_boolean(text[0] == 't');
  if (strspn(text, "0123456789+-.eE") != n) return json_stringn(text, n);
  errno = 0;
  long long integer = strtoll(text, &end, 10);
  if (!*end && !errno) return json_integer(integer);
  errno = 0;
  double real = strtod(text, &end);
  return !*end && !errno ? json_real(real) : json_stringn(text, n);
}

static enum sits_status scalar(const struct reader *reader, const yaml_event_t *event, json_t **out, struct sits_error *err)
{
  const char *text = (const char *)event->data.scalar.value;
  size_t n = event->data.scalar.length;
  if (event->data.scalar.tag || event->data.scalar.anchor) return refuse(reader, event, "tags and anchors are not read", err);
  if (memchr(text, 0, n)) return refuse(reader, event, "a value holds a NUL", err);
  *out = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE ? plain_scalar(text, n) : json_stringn(text, n);
  return *out ? SITS_OK : sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
}

static enum sits_status value(struct reader *reader, const yaml_event_t *event, int depth, json_t **out, struct sits_error *err);

static enum sits_status sequence(struct reader *reader, int depth, json_t **out, struct sits_error *err)
{
  json_t *list = json_array();
  enum sits_status status = list ? SITS_OK : sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
  while (!status) {
    yaml_event_t event;
    json_t *entry = NULL;
    status = next(reader, &event, err);
    if (status) break;
    bool is_end = event.type == YAML_SEQUENCE_END_EVENT;
    if (!is_end) status = value(reader, &event, depth + 1, &entry, err);
    yaml_event_delete(&event);
    if (is_end) break;
    if (!status && json_array_append_new(list, entry)) status = sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
  }
  if (status) json_decref(list);
  else *out = list;
  return status;
}

static enum sits_status member(struct reader *reader, const yaml_event_t *key, int depth, json_t *object, struct sits_error *err)
{
  if (key->type != YAML_SCALAR_EVENT) return refuse(reader, key, "a name must be a plain word", err);
  const char *name = (const char *)key->data.scalar.value;
  if (memchr(name, 0, key->data.scalar.length) || key->data.scalar.tag) return refuse(reader, key, "a name must be a plain word", err);
  if (json_object_get(object, name)) return refuse(reader, key, "a name is given twice", err);
  yaml_event_t event;
  json_t *entry = NULL;
  enum sits_status status = next(reader, &event, err);
  if (status) return status;
  status = value(reader, &event, depth + 1, &entry, err);
  yaml_event_delete(&event);
  if (!status && json_object_set_new(object, name, entry)) status = sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
  return status;
}

static enum sits_status mapping(struct reader *reader, int depth, json_t **out, struct sits_error *err)
{
  json_t *object = json_object();
  enum sits_status status = object ? SITS_OK : sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
  while (!status) {
    yaml_event_t event;
    status = next(reader, &event, err);
    if (status) break;
    bool is_end = event.type == YAML_MAPPING_END_EVENT;
    if (!is_end) status = member(reader, &event, depth, object, err);
    yaml_event_delete(&event);
    if (is_end) break;
  }
  if (status) json_decref(object);
  else *out = object;
  return status;
}

static enum sits_status value(struct reader *reader, const yaml_event_t *event, int depth, json_t **out, struct sits_error *err)
{
  if (depth > MAX_DEPTH) return refuse(reader, event, "nested too deeply", err);
  if (!reader->n_left--) {
    reader->n_left = 0;
    return refuse(reader, event, "too many values", err);
  }
  switch (event->type) {
  case YAML_SCALAR_EVENT: return scalar(reader, event, out, err);
  case YAML_SEQUENCE_START_EVENT:
    if (event->data.sequence_start.tag || event->data.sequence_start.anchor) break;
    return sequence(reader, depth, out, err);
  case YAML_MAPPING_START_EVENT:
    if (event->data.mapping_start.tag || event->data.mapping_start.anchor) break;
    return mapping(reader, depth, out, err);
  default: break;
  }
  return refuse(reader, event, "tags, anchors and aliases are not read", err);
}

/* Stream start, document start, one value, ends. An empty file is null. */
static enum sits_status document(struct reader *reader, json_t **root, struct sits_error *err)
{
  for (bool is_end = false; !is_end;) {
    yaml_event_t event;
    enum sits_status status = next(reader, &event, err);
    if (status) return status;
    switch (event.type) {
    case YAML_STREAM_START_EVENT: case YAML_DOCUMENT_END_EVENT: break;
    case YAML_STREAM_END_EVENT: is_end = true; break;
    case YAML_DOCUMENT_START_EVENT:
      if (*root) status = refuse(reader, &event, "more than one document", err);
      break;
    default: status = value(reader, &event, 0, root, err); break;
    }
    yaml_event_delete(&event);
    if (status) return status;
  }
  if (!*root) *root = json_null();
  return SITS_OK;
}

enum sits_status yaml_to_json(const char *text, size_t n_bytes, size_t max_nodes, const char *origin, json_t **out, struct sits_error *err)
{
  struct reader reader = {.origin = origin, .n_left = max_nodes};
  if (!yaml_parser_initialize(&reader.parser)) return sits_fail(err, SITS_NOMEM, "out of memory");
  yaml_parser_set_input_string(&reader.parser, (const unsigned char *)(text ? text : ""), n_bytes);
  json_t *root = NULL;
  enum sits_status status = document(&reader, &root, err);
  yaml_parser_delete(&reader.parser);
  if (status) json_decref(root);
  else *out = root;
  return status;
}
