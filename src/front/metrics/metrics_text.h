/* Lines of the Prometheus text format
 * (https://prometheus.io/docs/instrumenting/exposition_formats/), shared by the files of this folder. */
#ifndef SITS_FRONT_METRICS_METRICS_TEXT_H
#define SITS_FRONT_METRICS_METRICS_TEXT_H

#include <stdint.h>

#include "base/buf.h"

/* # HELP and # TYPE of sits2026:name. */
void metrics_text_header(struct buf *out, const char *name, const char *type, const char *help);
/* A label's value: backslash, quote and line end escaped. */
void metrics_text_escape(struct buf *out, const char *value);

/* A histogram of counts, not cumulative, the last one above all bounds; labels without braces. No header. */
struct metrics_buckets { const double *bounds; int n_bounds; const uint64_t *counts; double sum; };
void metrics_text_buckets(struct buf *out, const char *name, const char *labels, const struct metrics_buckets *buckets);

#endif
