/* See safetensors.h. The header's size and node count are bounded before the JSON parser sees it; then each tensor is checked alone, and
 * all of them, sorted by offset, for overlaps and holes. Tensors that a writer left misaligned for their element type are copied once,
 * so that readers may load elements directly. Entry points: safetensors_open, safetensors_parse. */
#include "tensor/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "tensor/name_index.h"

enum { MAX_HEADER_BYTES = 100000000, MAX_TENSORS = 1 << 16, MAX_NODES = 1 << 20, MAX_DEPTH = 8 };

struct safetensors {
  struct mapfile map;              /* owned when opened by path */
  const unsigned char *data;
  size_t n_bytes;
  char *name;                      /* tail of the path, for errors */
  struct sits_utd *tensors;        /* in the order of their bytes */
  void **copies;                   /* [n_tensors] aligned copy or NULL */
  int64_t n_tensors;
};

static const struct { const char *name; enum sits_dtype dtype; } dtypes[] = {
  {"F32", SITS_DTYPE_F32}, {"F16", SITS_DTYPE_F16}, {"BF16", SITS_DTYPE_BF16}, {"F64", SITS_DTYPE_F64}, {"I8", SITS_DTYPE_I8},
  {"U8", SITS_DTYPE_U8}, {"I16", SITS_DTYPE_I16}, {"I32", SITS_DTYPE_I32}, {"U32", SITS_DTYPE_U32}, {"I64", SITS_DTYPE_I64},
};

static enum sits_status tensor_error(const struct safetensors *f, const char *name, enum sits_status status, const char *what,
                                     struct sits_error *err)
{
  char printable[NAME_INDEX_MAX_PRINTED];
  name_printable(printable, name, strlen(name));
  return sits_fail_param(err, status, printable, "%s: tensor '%s': %s", f->name, printable, what);
}

static enum sits_status read_dtype(const struct safetensors *f, const char *name, const json_t *value, enum sits_dtype *out,
                                   struct sits_error *err)
{
  const char *text = json_string_value(value);
  if (!text) return tensor_error(f, name, SITS_FORMAT, "its dtype is no string", err);
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
    if (strcmp(dtypes[i].name, text) == 0) {
      *out = dtypes[i].dtype;
      return SITS_OK;
    }
  char printable[NAME_INDEX_MAX_PRINTED], other[NAME_INDEX_MAX_PRINTED];
  return sits_fail_param(err, SITS_UNSUPPORTED, name_printable(printable, name, strlen(name)),
                         "%s: tensor '%s': dtype %.24s is not supported (F32, F16 and BF16 weights are)", f->name, printable,
                         name_printable(other, text, strlen(text)));
}

static enum sits_status read_shape(const struct safetensors *f, struct sits_utd *t, const json_t *shape, struct sits_error *err)
{
  if (!json_is_array(shape)) return tensor_error(f, t->name, SITS_FORMAT, "its shape is no array", err);
  size_t n_dims = json_array_size(shape);
  if (n_dims > SITS_MAX_DIMS) return tensor_error(f, t->name, SITS_UNSUPPORTED, "it has more than four dimensions", err);
  t->n_dims = (int32_t)n_dims;
  for (size_t i = 0; i < n_dims; i++) {
    const json_t *dim = json_array_get(shape, i);
    if (!json_is_integer(dim) || json_integer_value(dim) < 0)
      return tensor_error(f, t->name, SITS_FORMAT, "a dimension is no whole number", err);
    t->dims[i] = json_integer_value(dim);
  }
  return SITS_OK;
}

/* t->data is set relative to `bytes`, the file's data section of `room` bytes. */
static enum sits_status read_place(const struct safetensors *f, struct sits_utd *t, const json_t *offsets, const unsigned char *bytes,
                                   uint64_t room, struct sits_error *err)
{
  if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(json_array_get(offsets, 0)) ||
      !json_is_integer(json_array_get(offsets, 1)))
    return tensor_error(f, t->name, SITS_FORMAT, "its data_offsets are not two whole numbers", err);
  int64_t begin = json_integer_value(json_array_get(offsets, 0)), end = json_integer_value(json_array_get(offsets, 1));
  if (begin < 0 || end < begin || (uint64_t)end > room)
    return tensor_error(f, t->name, SITS_FORMAT, "its data_offsets lie outside the file (truncated?)", err);
  int64_t want = sits_utd_row_major_bytes(t);
  if (want < 0) return tensor_error(f, t->name, SITS_FORMAT, "its shape overflows", err);
  if (end - begin != want) return tensor_error(f, t->name, SITS_FORMAT, "its data_offsets do not match its shape and dtype", err);
  t->data = bytes + begin;
  t->n_bytes = (size_t)want;
  return SITS_OK;
}

static enum sits_status read_tensor(const struct safetensors *f, struct sits_utd *t, const char *name, const json_t *entry,
                                    const unsigned char *bytes, uint64_t room, struct sits_error *err)
{
  size_t size = strlen(name);
  if (size == 0 || size >= SITS_MAX_NAME) return tensor_error(f, name, SITS_UNSUPPORTED, "the name is empty or longer than 95 bytes", err);
  memcpy(t->name, name, size);
  if (!json_is_object(entry)) return tensor_error(f, name, SITS_FORMAT, "its entry is no object", err);
  enum sits_status status = read_dtype(f, name, json_object_get(entry, "dtype"), &t->dtype, err);
  if (status == SITS_OK) status = read_shape(f, t, json_object_get(entry, "shape"), err);
  if (status == SITS_OK) status = read_place(f, t, json_object_get(entry, "data_offsets"), bytes, room, err);
  t->scale_dtype = SITS_DTYPE_F32;
  t->place = f->map.data ? SITS_PLACE_MAPPED_FILE : SITS_PLACE_HOST;
  return status;
}

static int compare_places(const void *a, const void *b)
{
  const struct sits_utd *x = a, *y = b;
  if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
  if (x->n_bytes != y->n_bytes) return x->n_bytes < y->n_bytes ? -1 : 1;
  return strcmp(x->name, y->name);
}

static enum sits_status check_places(struct safetensors *f, const unsigned char *bytes, uint64_t room, struct sits_error *err)
{
  qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, compare_places);
  const unsigned char *at = bytes;
  for (int64_t i = 0; i < f->n_tensors; i++) {
    const struct sits_utd *t = &f->tensors[i];
    const unsigned char *begin = t->data;
    if (begin < at) return tensor_error(f, t->name, SITS_FORMAT, "its bytes overlap those of another tensor", err);
    if (begin > at) return tensor_error(f, t->name, SITS_FORMAT, "unused bytes lie before its data", err);
    at = begin + t->n_bytes;
  }
  if ((uint64_t)(at - bytes) != room) return sits_fail(err, SITS_FORMAT, "%s: unused bytes at the end of the file", f->name);
  return SITS_OK;
}

static enum sits_status align_tensors(struct safetensors *f, struct sits_error *err)
{
  for (int64_t i = 0; i < f->n_tensors; i++) {
    struct sits_utd *t = &f->tensors[i];
    if ((uintptr_t)t->data % (uintptr_t)sits_dtype_info(t->dtype)->block_bytes == 0) continue;
    void *copy = mem_aligned(64, t->n_bytes);
    if (!copy) return sits_fail(err, SITS_NOMEM, "%s: out of memory for a misaligned tensor", f->name);
    memcpy(copy, t->data, t->n_bytes);
    f->copies[i] = copy;
    t->data = copy;
    t->place = SITS_PLACE_HOST;
  }
  return SITS_OK;
}

static enum sits_status read_tensors(struct safetensors *f, json_t *header, const unsigned char *bytes, uint64_t room,
                                     struct sits_error *err)
{
  size_t n = json_object_size(header);
  if (n > MAX_TENSORS) return sits_fail(err, SITS_FORMAT, "%s: the header claims %zu tensors", f->name, n);
  f->tensors = mem_calloc(n, sizeof *f->tensors);
  f->copies = mem_calloc(n, sizeof *f->copies);
  if (!f->tensors || !f->copies) return sits_fail(err, SITS_NOMEM, "%s: out of memory for the header", f->name);
  const char *name;
  json_t *entry;
  json_object_foreach(header, name, entry) {
    if (strcmp(name, "__metadata__") == 0) continue;
    enum sits_status status = read_tensor(f, &f->tensors[f->n_tensors], name, entry, bytes, room, err);
    if (status != SITS_OK) return status;
    f->n_tensors++;
  }
  enum sits_status status = check_places(f, bytes, room, err);
  return status == SITS_OK ? align_tensors(f, err) : status;
}

static enum sits_status parse_all(struct safetensors *f, struct sits_error *err)
{
  uint64_t header_bytes;
  if (f->n_bytes < 8) return sits_fail(err, SITS_FORMAT, "%s: too short for a safetensors file", f->name);
  memcpy(&header_bytes, f->data, 8);
  if (header_bytes < 2 || header_bytes > MAX_HEADER_BYTES || header_bytes > f->n_bytes - 8)
    return sits_fail(err, SITS_FORMAT, "%s: the header claims %llu bytes", f->name, (unsigned long long)header_bytes);
  if (f->data[8] != '{') return sits_fail(err, SITS_FORMAT, "%s: the header is no JSON object", f->name);
  const struct json_limits limits = {.max_bytes = MAX_HEADER_BYTES, .max_nodes = MAX_NODES, .max_depth = MAX_DEPTH};
  struct sits_error inner = {0};
  json_t *header = NULL;
  enum sits_status status = json_parse((const char *)f->data + 8, (size_t)header_bytes, &limits, &header, &inner);
  if (status != SITS_OK) return sits_fail(err, SITS_FORMAT, "%s: header: %s", f->name, inner.text);
  status = read_tensors(f, header, f->data + 8 + header_bytes, f->n_bytes - 8 - header_bytes, err);
  json_decref(header);
  return status;
}

static struct safetensors *create(const char *name)
{
  struct safetensors *f = mem_calloc(1, sizeof *f);
  char *copy = f ? mem_strdup(name_path_tail(name)) : NULL;
  if (!copy) {
    mem_free(f);
    return NULL;
  }
  f->name = copy;
  return f;
}

enum sits_status safetensors_open(const char *path, struct safetensors **out, struct sits_error *err)
{
  struct safetensors *f = create(path);
  if (!f) return sits_fail(err, SITS_NOMEM, "%s: out of memory", name_path_tail(path));
  enum sits_status status = mapfile_open(&f->map, path, err);
  f->data = f->map.data;
  f->n_bytes = f->map.n_bytes;
  if (status == SITS_OK) status = parse_all(f, err);
  if (status == SITS_OK) *out = f;
  else safetensors_close(f);
  return status;
}

enum sits_status safetensors_parse(const unsigned char *data, size_t n_bytes, const char *name, struct safetensors **out,
                                   struct sits_error *err)
{
  struct safetensors *f = create(name);
  if (!f) return sits_fail(err, SITS_NOMEM, "%s: out of memory", name_path_tail(name));
  f->data = data;
  f->n_bytes = n_bytes;
  enum sits_status status = parse_all(f, err);
  if (status == SITS_OK) *out = f;
  else safetensors_close(f);
  return status;
}

void safetensors_close(struct safetensors *f)
{
  if (!f) return;
  for (int64_t i = 0; f->copies && i < f->n_tensors; i++) mem_free(f->copies[i]);
  mem_free(f->copies);
  mem_free(f->tensors);
  mapfile_close(&f->map);
  mem_free(f->name);
  mem_free(f);
}

int64_t safetensors_n_tensors(const struct safetensors *f) { return f->n_tensors; }

const struct sits_utd *safetensors_tensor_at(const struct safetensors *f, int64_t index)
{
  return index >= 0 && index < f->n_tensors ? &f->tensors[index] : NULL;
}

void safetensors_drop_pages(const struct safetensors *f, const struct sits_utd *tensor)
{
  uintptr_t start = (uintptr_t)f->map.data, at = (uintptr_t)tensor->data;
  if (start && at >= start && at - start < f->map.n_bytes) mapfile_drop(&f->map, at - start, tensor->n_bytes);
}

uint64_t safetensors_file_bytes(const struct safetensors *f) { return f->n_bytes; }
