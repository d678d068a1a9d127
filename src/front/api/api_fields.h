/* Readers of request fields that have a structure of their own, and the list of fields that are refused. Used by api_request.c only. */
#ifndef SITS_FRONT_API_FIELDS_H
#define SITS_FRONT_API_FIELDS_H

#include "front/api/api_request.h"

typedef enum sits_status api_field_reader(struct api_request *request, const json_t *value, const struct api_limits *limits,
                                          struct sits_error *err);

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

#endif
