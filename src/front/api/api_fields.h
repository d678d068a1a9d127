/* The table of request fields, the readers of those that have a structure of their own, and the list of fields that are refused. Used by
 * api_request.c, which reads requests by it, and api_schema.c, which describes it. */
#ifndef SITS_FRONT_API_FIELDS_H
#define SITS_FRONT_API_FIELDS_H

#include "front/api/api_request.h"

typedef enum sits_status api_field_reader(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                          struct sits_error *err);

/* The field table: one row a field, its kind of value, where it goes, its range, and which calls know it. */
enum api_field_type { FIELD_BOOL, FIELD_INT, FIELD_REAL, FIELD_STRING, FIELD_READER, FIELD_HARMLESS };

struct api_field {
  const char *name;
  unsigned kinds;
  enum api_field_type type;
  size_t offset, has_offset;       /* of the value in struct api_request, and of a bool set when it is present (0: none) */
  double min, max;                 /* INT and REAL, both ends included */
  api_field_reader *reader;        /* READER */
};
extern const struct api_field api_field_table[];
extern const size_t api_n_fields;

api_field_reader api_read_messages;        /* messages: array of objects; contents are checked by api_messages_normalise */
api_field_reader api_read_prompt;          /* string, [string], [id] or [[id]] */
api_field_reader api_read_tokens;
api_field_reader api_read_stop;            /* string or [string] */
api_field_reader api_read_stop_ids;
api_field_reader api_read_logit_bias;      /* {"id": bias} */
api_field_reader api_read_stream_options;
api_field_reader api_read_template_kwargs;

/* An integer, also when written as 256.0. SITS_INVALID_ARGUMENT names the field. */
enum sits_status api_read_int(const json_t *value, const char *name, double min, double max, int64_t *out, struct sits_error *err)
    SITS_MUST_CHECK;

/* Whether the field is known to change answers elsewhere and is not supported here with this value. */
bool api_field_is_refused(const char *name, const json_t *value);
/* The i-th of those fields and the values that it may have, as a JSON list ("": null only); NULL after the last. */
const char *api_field_refused(size_t i, const char **allowed);

/* A field's row for one kind, NULL when it has none. */
const struct api_field *api_field_find(const char *name, enum api_kind kind);
/* The upper end that the limits set for an integer, -1 when the row's own counts. */
int64_t api_field_cap(const struct api_field *field, const struct api_limits *limits);
bool api_field_is_token_limit(const struct api_field *field); /* max_tokens or max_completion_tokens */

#endif
