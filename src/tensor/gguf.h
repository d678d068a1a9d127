/* GGUF v2/v3 reader over a mapped file. Spec: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
 * dims of tensors are reversed on reading, so that dims[0] is the slowest (out features), as everywhere here. */
#ifndef SITS_TENSOR_GGUF_H
#define SITS_TENSOR_GGUF_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mapfile.h"
#include "sits2026/status.h"
#include "sits2026/utd.h"

struct gguf;

enum gguf_type { /* as in the file */
  GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64
};

struct gguf_string { const char *data; uint64_t size; }; /* not terminated, any bytes */

/* Opens and checks everything. */
enum sits_status gguf_open(const char *path, struct gguf **out, struct sits_error *err) SITS_MUST_CHECK;
/* Parse bytes in memory (tests, fuzzing); `name` stands for the path in errors. The bytes are borrowed. */
enum sits_status gguf_parse(const unsigned char *data, size_t n_bytes, const char *name, struct gguf **out, struct sits_error *err)
    SITS_MUST_CHECK;
void gguf_close(struct gguf *gguf);

/* Metadata. Each returns false when the key is absent or of a wrong type (integers of any width convert when the value fits). */
bool gguf_get_u64(const struct gguf *gguf, const char *key, uint64_t *out);
bool gguf_get_i64(const struct gguf *gguf, const char *key, int64_t *out);
bool gguf_get_f64(const struct gguf *gguf, const char *key, double *out);
bool gguf_get_bool(const struct gguf *gguf, const char *key, bool *out);
bool gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *out);
/* Arrays: element type and count; then elements by index. */
bool gguf_get_array(const struct gguf *gguf, const char *key, enum gguf_type *type, uint64_t *count);
bool gguf_array_string(const struct gguf *gguf, const char *key, uint64_t index, struct gguf_string *out); /* O(1) */
bool gguf_array_i64(const struct gguf *gguf, const char *key, uint64_t index, int64_t *out);
bool gguf_array_f64(const struct gguf *gguf, const char *key, uint64_t index, double *out);

/* The bytes of all keys and values, as in the file, and their number: a GGUF file of version `version` with this part and no tensors is
 * a model's metadata by itself. Borrowed. */
const unsigned char *gguf_metadata(const struct gguf *gguf, size_t *n_bytes, uint64_t *n_values, uint32_t *version);

int64_t gguf_n_tensors(const struct gguf *gguf);
const struct sits_utd *gguf_tensor_at(const struct gguf *gguf, int64_t index);
const struct sits_utd *gguf_tensor(const struct gguf *gguf, const char *name);
/* Let the kernel drop the tensor's pages; nothing happens when the tensor is not of this file. */
void gguf_drop_pages(const struct gguf *gguf, const struct sits_utd *tensor);
uint64_t gguf_file_bytes(const struct gguf *gguf);

#endif
