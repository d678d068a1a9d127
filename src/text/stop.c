/* See stop.h. */
#include "text/stop.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

enum sits_status stop_init(struct stop_matcher *matcher, const char *const *stops, int32_t n)
{
  *matcher = (struct stop_matcher){0};
  if (n == 0) return SITS_OK;
  matcher->strings = mem_calloc((size_t)n, sizeof *matcher->strings);
  if (!matcher->strings) return SITS_NOMEM;
  enum sits_status status = SITS_OK;
  for (; matcher->n < n && !status; matcher->n++) {
    struct stop_string *s = &matcher->strings[matcher->n];
    s->n_bytes = strlen(stops[matcher->n]);
    if (s->n_bytes == 0 || s->n_bytes > INT32_MAX || !utf8_is_valid(stops[matcher->n], s->n_bytes)) status = SITS_INVALID_ARGUMENT;
    else if (!(s->text = mem_strdup(stops[matcher->n])) || !(s->border = mem_alloc((s->n_bytes + 1) * sizeof *s->border)))
      status = SITS_NOMEM;
    if (status) continue;
    int32_t border = s->border[0] = -1; /* border[k]: length of the longest proper border of the first k bytes */
    for (size_t k = 0; k < s->n_bytes; k++) {
      while (border >= 0 && s->text[border] != s->text[k]) border = s->border[border];
      s->border[k + 1] = ++border;
    }
  }
  if (status) stop_fini(matcher);
  return status;
}

void stop_fini(struct stop_matcher *matcher)
{
  for (int32_t i = 0; i < matcher->n; i++) {
    mem_free(matcher->strings[i].text);
    mem_free(matcher->strings[i].border);
  }
  mem_free(matcher->strings);
  *matcher = (struct stop_matcher){0};
}

int32_t stop_push(struct stop_matcher *matcher, char byte)
{
  int32_t found = -1;
  for (int32_t i = 0; i < matcher->n; i++) {
    struct stop_string *s = &matcher->strings[i];
    int32_t k = (int32_t)s->matched;
    while (k >= 0 && s->text[k] != byte) k = s->border[k];
    s->matched = (size_t)(k + 1);
    if (s->matched < s->n_bytes) continue;
    if (found < 0 || s->n_bytes > matcher->strings[found].n_bytes) found = i;
    s->matched = (size_t)s->border[s->n_bytes]; /* the stream may go on */
  }
  return found;
}

size_t stop_held(const struct stop_matcher *matcher)
{
  size_t held = 0;
  for (int32_t i = 0; i < matcher->n; i++)
    if (matcher->strings[i].matched > held) held = matcher->strings[i].matched;
  return held;
}
