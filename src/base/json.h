/* JSON through jansson, with bounds checked before the parse (jansson takes up to 80 bytes of memory per input byte). */
#ifndef SITS_BASE_JSON_H
#define SITS_BASE_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "sits2026/status.h"

struct json_limits { size_t max_bytes; size_t max_nodes; int max_depth; };

/* Bounds for request bodies (4 MiB, 200,000 nodes, depth 64) and for model files (256 MiB, 20 M nodes, depth 64). */
extern const struct json_limits json_limits_request;
extern const struct json_limits json_limits_file;

/* Parse one value that fills the whole text. Duplicate keys, bad UTF-8, NUL escapes in keys, NaN and trailing bytes are errors.
 * SITS_INVALID_JSON with line and column, SITS_TOO_LARGE when over a limit. On success *out is a new reference. */
enum sits_status json_parse(const char *text, size_t n_bytes, const struct json_limits *limits, json_t **out,
                            struct sits_error *err) SITS_MUST_CHECK;

/* Parse a file; errors name the path. */
enum sits_status json_parse_file(const char *path, const struct json_limits *limits, json_t **out, struct sits_error *err)
    SITS_MUST_CHECK;

#endif
