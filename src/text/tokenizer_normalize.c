/* Normalisers: NFC, NFD, Prepend, Replace (by a string) and Strip, in sequence. */
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer_internal.h"
#include "text/unicode.h"

enum sits_status norm_add(struct norm *norm, enum norm_kind kind, const char *pattern, size_t pattern_bytes, const char *content,
                          size_t content_bytes, struct sits_error *err)
{
  if (norm->n == TOKENIZER_MAX_NORMS) return sits_fail(err, SITS_UNSUPPORTED, "normalizer: more than %d steps", TOKENIZER_MAX_NORMS);
  struct norm_step *step = &norm->steps[norm->n];
  *step = (struct norm_step){.kind = kind, .pattern_bytes = pattern_bytes, .content_bytes = content_bytes, .left = true, .right = true};
  norm->n++;
  if (pattern && !(step->pattern = mem_strndup(pattern, pattern_bytes))) return SITS_NOMEM;
  if (content && !(step->content = mem_strndup(content, content_bytes))) return SITS_NOMEM;
  return SITS_OK;
}

void norm_fini(struct norm *norm)
{
  for (int i = 0; i < norm->n; i++) {
    mem_free(norm->steps[i].pattern);
    mem_free(norm->steps[i].content);
  }
  *norm = (struct norm){0};
}

static bool replace(const struct norm_step *step, const char *text, size_t n_bytes, struct buf *out)
{
  size_t done = 0;
  while (done < n_bytes) {
    const char *found = step->pattern_bytes == 1 ? memchr(text + done, step->pattern[0], n_bytes - done)
                                                 : memmem(text + done, n_bytes - done, step->pattern, step->pattern_bytes);
    size_t at = found ? (size_t)(found - text) : n_bytes;
    if (!buf_append(out, text + done, at - done)) return false;
    if (!found) break;
    if (!buf_append(out, step->content, step->content_bytes)) return false;
    done = at + step->pattern_bytes;
  }
  return true;
}

static void strip(const struct norm_step *step, const char **text, size_t *n_bytes)
{
  size_t length, start = 0, end = *n_bytes;
  while (step->left && start < end && unicode_class(utf8_decode(*text + start, end - start, &length)) == UNICODE_SPACE) start += length;
  while (step->right && end > start) {
    size_t back = end - 1;
    while (back > start && ((unsigned char)(*text)[back] & 0xC0) == 0x80) back--;
    if (unicode_class(utf8_decode(*text + back, end - back, &length)) != UNICODE_SPACE) break;
    end = back;
  }
  *text += start;
  *n_bytes = end - start;
}

enum sits_status norm_run(const struct norm *norm, const char *text, size_t n_bytes, struct buf scratch[2], const char **out, size_t *n_out)
{
  int which = 0;
  for (int i = 0; i < norm->n && n_bytes; i++) {
    const struct norm_step *step = &norm->steps[i];
    struct buf *made = &scratch[which];
    bool ok = true;
    if (step->kind == NORM_STRIP) {
      strip(step, &text, &n_bytes);
      continue;
    }
    if (step->kind == NORM_NFC && unicode_is_surely_nfc(text, n_bytes)) continue;
    buf_clear(made);
    if (!buf_reserve(made, n_bytes + n_bytes / 2)) return SITS_NOMEM;
    switch (step->kind) {
    case NORM_NFC: case NORM_NFD: ok = unicode_normalize(text, n_bytes, step->kind == NORM_NFC, made); break;
    case NORM_PREPEND: ok = buf_append(made, step->content, step->content_bytes) && buf_append(made, text, n_bytes); break;
    case NORM_REPLACE: ok = replace(step, text, n_bytes, made); break;
    case NORM_STRIP: break;
    }
    if (!ok) return SITS_NOMEM;
    text = made->data;
    n_bytes = made->size;
    which = 1 - which;
  }
  *out = text;
  *n_out = n_bytes;
  return SITS_OK;
}
