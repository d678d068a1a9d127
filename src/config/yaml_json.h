/* YAML as a JSON value, for files with structure: mappings, sequences and scalars, read with libyaml. Anchors, tags and several documents
 * are refused. Plain scalars become null, booleans, integers or numbers where YAML 1.2's core schema says so; quoted ones stay strings. */
#ifndef SITS_CONFIG_YAML_JSON_H
#define SITS_CONFIG_YAML_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "sits2026/status.h"

/* Errors name the origin and the line. SITS_CONFIG: malformed, deeper than 16 levels, over max_nodes, or a key that is there twice. */
enum sits_status yaml_to_json(const char *text, size_t n_bytes, size_t max_nodes, const char *origin, json_t **out, struct sits_error *err)
    SITS_MUST_CHECK;

#endif
