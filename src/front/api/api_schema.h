/* The description of request bodies as JSON Schema (2020-12), made from the same table that reads them: it says what is accepted.
 *
 * What a schema cannot say: sums over fields (prompt and answer against the context, n times prompts, min_tokens against max_tokens), what
 * a model's chat template refuses, and the bounds on the whole body (bytes, values, depth). */
#ifndef SITS_FRONT_API_SCHEMA_H
#define SITS_FRONT_API_SCHEMA_H

#include "base/buf.h"
#include "front/api/api.h"

/* Append the schema of one kind's body. model: NULL while loading; names and ids are then not bounded. */
void api_schema_write(enum api_kind kind, const struct api_limits *limits, const struct api_model *model, struct buf *out);

#endif
