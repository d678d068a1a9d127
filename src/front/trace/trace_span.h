/* From a record to the JSON of its spans. Used by trace.c only. Stateless, thread-safe. */
#ifndef SITS_FRONT_TRACE_TRACE_SPAN_H
#define SITS_FRONT_TRACE_TRACE_SPAN_H

#include "base/buf.h"
#include "front/api/api_record.h"

enum { TRACE_MAX_SPANS = 6 };

struct trace_ids { unsigned char trace[16], spans[TRACE_MAX_SPANS][8]; }; /* spans[0] is the request's */

/* Append the spans as comma-separated objects; returns how many, 0 when out failed. */
int trace_span_append(struct buf *out, const struct api_record *record, const struct trace_ids *ids);

/* {"resourceSpans":[...,"spans":[ and what closes it. */
void trace_span_head(struct buf *out);
extern const char trace_span_tail[];

#endif
