/* See buf.h. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

void buf_init(struct buf *buf, size_t limit_bytes) { *buf = (struct buf){.limit = limit_bytes}; }

void buf_fini(struct buf *buf)
{
  mem_free(buf->data);
  *buf = (struct buf){.limit = buf->limit};
}

void buf_clear(struct buf *buf)
{
  buf->size = 0;
  buf->failed = false;
  if (buf->data) buf->data[0] = '\0';
}

bool buf_reserve(struct buf *buf, size_t n_more)
{
  if (n_more > buf->limit || buf->size > buf->limit - n_more) {
    buf->failed = true;
    return false;
  }
  size_t need = buf->size + n_more + 1;
  if (need <= buf->capacity) return true;
  size_t capacity = buf->capacity ? buf->capacity : 64;
  while (capacity < need) capacity += capacity / 2 + 16;
  char *data = mem_realloc(buf->data, capacity);
  if (!data) {
    buf->failed = true;
    return false;
  }
  buf->data = data;
  buf->capacity = capacity;
  return true;
}

bool buf_append(struct buf *buf, const void *bytes, size_t n_bytes)
{
  if (!buf_reserve(buf, n_bytes)) return false;
  if (n_bytes) memcpy(buf->data + buf->size, bytes, n_bytes);
  buf->size += n_bytes;
  buf->data[buf->size] = '\0';
  return true;
}

bool buf_append_text(struct buf *buf, const char *text) { return buf_append(buf, text, strlen(text)); }
bool buf_append_char(struct buf *buf, char c) { return buf_append(buf, &c, 1); }

bool buf_printf(struct buf *buf, const char *format, ...)
{
  va_list args, again;
  size_t room = buf->capacity - buf->size; /* most texts fit in what is there: one pass then */
  va_start(args, format);
  va_copy(again, args);
  int n = vsnprintf(room ? buf->data + buf->size : NULL, room, format, args);
  va_end(args);
  bool ok = n >= 0 && buf_reserve(buf, (size_t)n);
  if (ok && (size_t)n >= room) vsnprintf(buf->data + buf->size, (size_t)n + 1, format, again);
  if (ok) buf->size += (size_t)n;
  else if (room) buf->data[buf->size] = '\0';
  va_end(again);
  return ok;
}

void buf_truncate(struct buf *buf, size_t n_bytes)
{
  if (n_bytes >= buf->size) return;
  buf->size = n_bytes;
  buf->data[n_bytes] = '\0';
}

void buf_drop_front(struct buf *buf, size_t n_bytes)
{
  if (n_bytes >= buf->size) {
    buf->size = 0;
    if (buf->data) buf->data[0] = '\0';
    return;
  }
  memmove(buf->data, buf->data + n_bytes, buf->size - n_bytes + 1);
  buf->size -= n_bytes;
}

static bool append_escaped_control(struct buf *buf, unsigned char c)
{
  switch (c) {
  case '\n': return buf_append(buf, "\\n", 2);
  case '\r': return buf_append(buf, "\\r", 2);
  case '\t': return buf_append(buf, "\\t", 2);
  case '"': return buf_append(buf, "\\\"", 2);
  case '\\': return buf_append(buf, "\\\\", 2);
  default: return buf_printf(buf, "\\u%04x", c);
  }
}

bool buf_append_json_escaped(struct buf *buf, const char *text, size_t n_bytes)
{
  size_t i = 0, run = 0; /* run: start of bytes that pass unchanged */
  while (i < n_bytes) {
    unsigned char c = (unsigned char)text[i];
    if (c >= 0x20 && c < 0x80 && c != '"' && c != '\\' && c != 0x7f) {
      i++;
      continue;
    }
    size_t length = 1;
    bool valid = c < 0x80 || utf8_sequence(text + i, n_bytes - i, &length) == UTF8_VALID;
    if (c >= 0x80 && valid) {
      i += length;
      continue;
    }
    if (!buf_append(buf, text + run, i - run)) return false;
    if (!(c < 0x80 ? append_escaped_control(buf, c) : buf_append(buf, "\xEF\xBF\xBD", 3))) return false;
    i += length;
    run = i;
  }
  return buf_append(buf, text + run, n_bytes - run);
}

char *buf_take(struct buf *buf, size_t *n_bytes)
{
  char *data = buf->data;
  if (n_bytes) *n_bytes = buf->size;
  *buf = (struct buf){.limit = buf->limit};
  return data;
}
