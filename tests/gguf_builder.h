/* Builds GGUF bytes by hand for tests, straight from the format's description, independent of the reader. */
#ifndef TESTS_GGUF_BUILDER_H
#define TESTS_GGUF_BUILDER_H

#include <stdint.h>
#include <string.h>

#include "base/buf.h"

static inline void put_u32(struct buf *b, uint32_t v) { buf_append(b, &v, sizeof v); }
static inline void put_u64(struct buf *b, uint64_t v) { buf_append(b, &v, sizeof v); }
static inline void put_f32(struct buf *b, float v) { buf_append(b, &v, sizeof v); }
static inline void put_text(struct buf *b, const char *text) { put_u64(b, strlen(text)); buf_append(b, text, strlen(text)); }
static inline void put_header(struct buf *b, uint32_t version, uint64_t n_tensors, uint64_t n_keys)
{
  buf_append(b, "GGUF", 4);
  put_u32(b, version);
  put_u64(b, n_tensors);
  put_u64(b, n_keys);
}
static inline void put_key(struct buf *b, const char *key, uint32_t type) { put_text(b, key); put_u32(b, type); }
static inline void put_key_u32(struct buf *b, const char *key, uint32_t v) { put_key(b, key, 4); put_u32(b, v); }
static inline void put_key_f32(struct buf *b, const char *key, float v) { put_key(b, key, 6); put_f32(b, v); }
static inline void put_key_text(struct buf *b, const char *key, const char *v) { put_key(b, key, 8); put_text(b, v); }
/* dims as in the file: fastest first */
static inline void put_tensor(struct buf *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset)
{
  put_text(b, name);
  put_u32(b, n_dims);
  for (uint32_t i = 0; i < n_dims; i++) put_u64(b, dims[i]);
  put_u32(b, type);
  put_u64(b, offset);
}
static inline void pad_to(struct buf *b, size_t alignment) { while (b->size % alignment) buf_append_char(b, 0); }

#endif
