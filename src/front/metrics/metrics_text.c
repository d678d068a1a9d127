/* See metrics_text.h. */
#include "front/metrics/metrics_text.h"

void metrics_text_header(struct buf *out, const char *name, const char *type, const char *help)
{
  buf_printf(out, "# HELP sits2026:%s %s\n# TYPE sits2026:%s %s\n", name, help, name, type);
}

void metrics_text_escape(struct buf *out, const char *value)
{
  for (; *value; value++) {
    if (*value == '\n') {
      buf_append_text(out, "\\n");
      continue;
    }
    if (*value == '"' || *value == '\\') buf_append_char(out, '\\');
    buf_append_char(out, *value);
  }
}

void metrics_text_buckets(struct buf *out, const char *name, const char *labels, const struct metrics_buckets *buckets)
{
  uint64_t total = 0;
  for (int i = 0; i < buckets->n_bounds; i++) {
    total += buckets->counts[i];
    buf_printf(out, "sits2026:%s_bucket{%s,le=\"%g\"} %llu\n", name, labels, buckets->bounds[i], (unsigned long long)total);
  }
  total += buckets->counts[buckets->n_bounds];
  buf_printf(out, "sits2026:%s_bucket{%s,le=\"+Inf\"} %llu\n", name, labels, (unsigned long long)total);
  buf_printf(out, "sits2026:%s_sum{%s} %.9g\nsits2026:%s_count{%s} %llu\n", name, labels, buckets->sum, name, labels,
             (unsigned long long)total);
}
