/* Growable byte buffer with a cap given at init: everything that a client can make grow uses one.
 * A failed append sets `failed` and is remembered, so a writer may append many times and check once. Not thread-safe. */
#ifndef SITS_BASE_BUF_H
#define SITS_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

struct buf {
  char *data;         /* always terminated after the first append; NULL before */
  size_t size;        /* bytes used, terminator not counted */
  size_t capacity;
  size_t limit;       /* most bytes that size may reach */
  bool failed;        /* an append went over the limit or out of memory; contents are those before it */
};

void buf_init(struct buf *buf, size_t limit_bytes);
void buf_fini(struct buf *buf);
void buf_clear(struct buf *buf);                           /* size = 0, failed = false, memory kept */
bool buf_append(struct buf *buf, const void *bytes, size_t n_bytes);
bool buf_append_text(struct buf *buf, const char *text);
bool buf_append_char(struct buf *buf, char c);
bool buf_printf(struct buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool buf_reserve(struct buf *buf, size_t n_more);          /* room for that many more bytes */
void buf_truncate(struct buf *buf, size_t n_bytes);        /* keep the first n_bytes; `failed` stays */
void buf_drop_front(struct buf *buf, size_t n_bytes);      /* remove bytes from the front */
/* Append bytes as the inside of a JSON string (quotes not added). Invalid UTF-8 becomes U+FFFD, one per maximal subpart. */
bool buf_append_json_escaped(struct buf *buf, const char *text, size_t n_bytes);
/* Take the bytes: the caller frees them with mem_free; the buffer is empty afterwards. NULL if nothing was appended. */
char *buf_take(struct buf *buf, size_t *n_bytes);

#endif
