/* See json.h. */
#include "base/json.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/mapfile.h"

const struct json_limits json_limits_request = {.max_bytes = 4u << 20, .max_nodes = 200000, .max_depth = 64};
const struct json_limits json_limits_file = {.max_bytes = 256u << 20, .max_nodes = 20000000, .max_depth = 64};

/* Count values (an upper bound: openings, commas and colons outside strings) and the deepest nesting, without allocating. */
static void scan(const char *text, size_t n_bytes, size_t *n_nodes, int *depth)
{
  size_t nodes = 1;
  int now = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < n_bytes; i++) {
    char c = text[i];
    if (in_string) {
      if (c == '\\') i++;
      else if (c == '"') in_string = false;
      continue;
    }
    switch (c) {
    case '"': in_string = true; break;
    case '[': case '{':
      nodes++;
      if (++now > deepest) deepest = now;
      break;
    case ']': case '}': now--; break;
    case ',': case ':': nodes++; break;
    default: break;
    }
  }
  *n_nodes = nodes;
  *depth = deepest;
}

enum sits_status json_parse(const char *text, size_t n_bytes, const struct json_limits *limits, json_t **out, struct sits_error *err)
{
  if (n_bytes > limits->max_bytes)
    return sits_fail(err, SITS_TOO_LARGE, "JSON of %zu bytes is over the limit of %zu", n_bytes, limits->max_bytes);
  if (n_bytes == 0) return sits_fail(err, SITS_INVALID_JSON, "there is no JSON: the text is empty");
  size_t nodes;
  int depth;
  scan(text, n_bytes, &nodes, &depth);
  if (depth > limits->max_depth)
    return sits_fail(err, SITS_INVALID_JSON, "JSON nested %d deep is over the limit of %d", depth, limits->max_depth);
  if (nodes > limits->max_nodes)
    return sits_fail(err, SITS_INVALID_JSON, "JSON with about %zu values is over the limit of %zu", nodes, limits->max_nodes);
  json_error_t at;
  json_t *value = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &at);
  if (!value) {
    char *near = strstr(at.text, " near "); /* never echo the input */
    if (near) *near = '\0';
    return sits_fail(err, SITS_INVALID_JSON, "line %d column %d: %s", at.line, at.column, at.text);
  }
  *out = value;
  return SITS_OK;
}

enum sits_status json_parse_file(const char *path, const struct json_limits *limits, json_t **out, struct sits_error *err)
{
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  struct sits_error inner = {0};
  status = json_parse((const char *)file.data, file.n_bytes, limits, out, &inner);
  if (status) sits_fail(err, status, "%s: %s", path, inner.text);
  mapfile_close(&file);
  return status;
}
