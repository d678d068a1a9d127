/* See gguf.h. The header is walked once: every length is compared with the bytes that are left before it is used, counts are bounded by
 * the fewest bytes an entry can take, so memory stays below about a dozen times the header's own size. Values stay in the map; only
 * arrays of strings get a table of positions, to make access by index O(1). Entry points: gguf_open, gguf_parse; the getters below. */
#include "tensor/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/mem.h"
#include "tensor/name_index.h"

enum {
  MAX_KEYS = 1 << 16,
  MAX_TENSORS = 1 << 16,
  MAX_KEY_BYTES = 65535,      /* the spec's bound */
  MIN_KEY_ENTRY_BYTES = 8 + 1 + 4 + 1,
  MIN_TENSOR_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8,
  DEFAULT_ALIGNMENT = 32,
  MAX_ALIGNMENT = 1 << 20,
};

struct value {
  struct gguf_string key;
  enum gguf_type type;              /* of the value; of the elements when is_array */
  bool is_array;
  uint64_t count;                   /* elements of an array */
  const unsigned char *data;        /* scalars and fixed-size elements, little endian, any alignment; a string's length word */
  const uint64_t *string_positions; /* arrays of strings: where each element's length word lies */
};

struct gguf {
  struct mapfile map;               /* owned when opened by path */
  const unsigned char *data;
  size_t n_bytes;
  char *name;                       /* tail of the path, for errors */
  struct arena arena;               /* positions of string arrays */
  struct value *values;
  uint64_t n_values;
  uint32_t version;
  size_t values_at, values_end;     /* the keys and values in the file */
  struct sits_utd *tensors;
  uint64_t *offsets;                /* of each tensor within the data section; needed while opening */
  uint64_t n_tensors;
  struct name_index keys, tensor_names;
};

struct cursor { const unsigned char *data; size_t n_bytes, at; };

static const struct { const char *name; int dtype; } ggml_types[] = { /* dtype -1: known by name, not read */
  [0] = {"F32", SITS_DTYPE_F32}, [1] = {"F16", SITS_DTYPE_F16}, [2] = {"Q4_0", SITS_DTYPE_Q4_0}, [3] = {"Q4_1", SITS_DTYPE_Q4_1},
  [4] = {"Q4_2", -1}, [5] = {"Q4_3", -1}, [6] = {"Q5_0", SITS_DTYPE_Q5_0}, [7] = {"Q5_1", SITS_DTYPE_Q5_1},
  [8] = {"Q8_0", SITS_DTYPE_Q8_0}, [9] = {"Q8_1", -1}, [10] = {"Q2_K", SITS_DTYPE_Q2_K}, [11] = {"Q3_K", SITS_DTYPE_Q3_K},
  [12] = {"Q4_K", SITS_DTYPE_Q4_K}, [13] = {"Q5_K", SITS_DTYPE_Q5_K}, [14] = {"Q6_K", SITS_DTYPE_Q6_K}, [15] = {"Q8_K", -1},
  [16] = {"IQ2_XXS", -1}, [17] = {"IQ2_XS", -1}, [18] = {"IQ3_XXS", -1}, [19] = {"IQ1_S", -1}, [20] = {"IQ4_NL", -1},
  [21] = {"IQ3_S", -1}, [22] = {"IQ2_S", -1}, [23] = {"IQ4_XS", -1}, [24] = {"I8", SITS_DTYPE_I8}, [25] = {"I16", SITS_DTYPE_I16},
  [26] = {"I32", SITS_DTYPE_I32}, [27] = {"I64", SITS_DTYPE_I64}, [28] = {"F64", SITS_DTYPE_F64}, [29] = {"IQ1_M", -1},
  [30] = {"BF16", SITS_DTYPE_BF16}, [31] = {"Q4_0_4_4", -1}, [32] = {"Q4_0_4_8", -1}, [33] = {"Q4_0_8_8", -1}, [34] = {"TQ1_0", -1},
  [35] = {"TQ2_0", -1}, [36] = {"IQ4_NL_4_4", -1}, [37] = {"IQ4_NL_4_8", -1}, [38] = {"IQ4_NL_8_8", -1}, [39] = {"MXFP4", -1},
  [40] = {"NVFP4", -1},
};

static const uint8_t type_bytes[] = { /* 0: not of fixed size */
  [GGUF_U8] = 1, [GGUF_I8] = 1, [GGUF_U16] = 2, [GGUF_I16] = 2, [GGUF_U32] = 4, [GGUF_I32] = 4, [GGUF_F32] = 4, [GGUF_BOOL] = 1,
  [GGUF_STRING] = 0, [GGUF_ARRAY] = 0, [GGUF_U64] = 8, [GGUF_I64] = 8, [GGUF_F64] = 8,
};

static uint32_t load_u32(const unsigned char *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
static uint64_t load_u64(const unsigned char *p) { uint64_t v; memcpy(&v, p, sizeof v); return v; }

static bool take(struct cursor *c, uint64_t n_bytes, const unsigned char **out)
{
  if (n_bytes > c->n_bytes - c->at) return false;
  *out = c->data + c->at;
  c->at += (size_t)n_bytes;
  return true;
}

static bool take_u32(struct cursor *c, uint32_t *out)
{
  const unsigned char *p;
  if (!take(c, 4, &p)) return false;
  *out = load_u32(p);
  return true;
}

static bool take_u64(struct cursor *c, uint64_t *out)
{
  const unsigned char *p;
  if (!take(c, 8, &p)) return false;
  *out = load_u64(p);
  return true;
}

static bool take_string(struct cursor *c, struct gguf_string *out)
{
  uint64_t size;
  const unsigned char *p;
  if (!take_u64(c, &size) || !take(c, size, &p)) return false;
  *out = (struct gguf_string){.data = (const char *)p, .size = size};
  return true;
}

/* ---- metadata ---- */

static enum sits_status key_error(const struct gguf *g, const struct gguf_string *key, enum sits_status status, const char *what,
                                  struct sits_error *err)
{
  char printable[NAME_INDEX_MAX_PRINTED];
  name_printable(printable, key->data, key->size);
  return sits_fail_param(err, status, printable, "%s: key '%s': %s", g->name, printable, what);
}

static bool bools_are_valid(const unsigned char *data, uint64_t count)
{
  for (uint64_t i = 0; i < count; i++)
    if (data[i] > 1) return false;
  return true;
}

static enum sits_status parse_array(struct gguf *g, struct cursor *c, struct value *v, struct sits_error *err)
{
  uint32_t type;
  if (!take_u32(c, &type) || !take_u64(c, &v->count)) return key_error(g, &v->key, SITS_FORMAT, "the file ends inside the array", err);
  v->is_array = true;
  v->type = (enum gguf_type)type;
  if (type == GGUF_ARRAY) return key_error(g, &v->key, SITS_UNSUPPORTED, "arrays of arrays are not supported", err);
  if (type > GGUF_F64) return key_error(g, &v->key, SITS_FORMAT, "unknown element type", err);
  uint64_t least = type == GGUF_STRING ? 8 : type_bytes[type];
  if (v->count > (c->n_bytes - c->at) / least) return key_error(g, &v->key, SITS_FORMAT, "the array is longer than the file", err);
  if (type != GGUF_STRING) {
    (void)take(c, v->count * least, &v->data);
    if (type == GGUF_BOOL && !bools_are_valid(v->data, v->count))
      return key_error(g, &v->key, SITS_FORMAT, "a bool is neither 0 nor 1", err);
    return SITS_OK;
  }
  uint64_t *positions = arena_alloc(&g->arena, (size_t)v->count * sizeof *positions);
  if (!positions) return sits_fail(err, SITS_NOMEM, "%s: out of memory for the metadata", g->name);
  for (uint64_t i = 0; i < v->count; i++) {
    struct gguf_string text;
    positions[i] = c->at;
    if (!take_string(c, &text)) return key_error(g, &v->key, SITS_FORMAT, "the file ends inside a string of the array", err);
  }
  v->string_positions = positions;
  return SITS_OK;
}

static enum sits_status parse_value(struct gguf *g, struct cursor *c, uint64_t number, struct sits_error *err)
{
  struct value *v = &g->values[number];
  uint32_t type;
  if (!take_string(c, &v->key))
    return sits_fail(err, SITS_FORMAT, "%s: the file ends inside key number %llu", g->name, (unsigned long long)number);
  if (v->key.size == 0 || v->key.size > MAX_KEY_BYTES || memchr(v->key.data, 0, v->key.size))
    return key_error(g, &v->key, SITS_FORMAT, "the name is empty, too long or holds a NUL", err);
  if (!take_u32(c, &type)) return key_error(g, &v->key, SITS_FORMAT, "the file ends before its value", err);
  if (!name_index_add(&g->keys, v->key.data, v->key.size, (uint32_t)number))
    return key_error(g, &v->key, SITS_FORMAT, "appears twice", err);
  if (type > GGUF_F64) return key_error(g, &v->key, SITS_FORMAT, "unknown value type", err);
  if (type == GGUF_ARRAY) return parse_array(g, c, v, err);
  v->type = (enum gguf_type)type;
  struct gguf_string text;
  v->data = c->data + c->at;
  if (type == GGUF_STRING ? !take_string(c, &text) : !take(c, type_bytes[type], &v->data))
    return key_error(g, &v->key, SITS_FORMAT, "the file ends inside its value", err);
  if (type == GGUF_BOOL && v->data[0] > 1) return key_error(g, &v->key, SITS_FORMAT, "a bool is neither 0 nor 1", err);
  return SITS_OK;
}

/* ---- tensors ---- */

static enum sits_status tensor_error(const struct gguf *g, const char *name, enum sits_status status, const char *what,
                                     struct sits_error *err)
{
  char printable[NAME_INDEX_MAX_PRINTED];
  name_printable(printable, name, strlen(name));
  return sits_fail_param(err, status, printable, "%s: tensor '%s': %s", g->name, printable, what);
}

static enum sits_status type_error(const struct gguf *g, const struct sits_utd *t, uint32_t type, struct sits_error *err)
{
  char what[64] = "unknown element type";
  bool is_known = type < sizeof ggml_types / sizeof ggml_types[0];
  if (is_known) snprintf(what, sizeof what, "element type %s is not supported", ggml_types[type].name);
  else snprintf(what, sizeof what, "unknown element type number %u", (unsigned)type);
  return tensor_error(g, t->name, is_known ? SITS_UNSUPPORTED : SITS_FORMAT, what, err);
}

static enum sits_status parse_dims(struct gguf *g, struct cursor *c, struct sits_utd *t, struct sits_error *err)
{
  uint32_t n_dims;
  if (!take_u32(c, &n_dims)) return tensor_error(g, t->name, SITS_FORMAT, "the file ends inside its description", err);
  if (n_dims < 1 || n_dims > SITS_MAX_DIMS) return tensor_error(g, t->name, SITS_FORMAT, "the number of dimensions is not 1 to 4", err);
  t->n_dims = (int32_t)n_dims;
  for (uint32_t i = 0; i < n_dims; i++) { /* the file has the fastest dimension first */
    uint64_t dim;
    if (!take_u64(c, &dim)) return tensor_error(g, t->name, SITS_FORMAT, "the file ends inside its dimensions", err);
    if (dim == 0 || dim > INT64_MAX) return tensor_error(g, t->name, SITS_FORMAT, "a dimension is zero or too large", err);
    t->dims[n_dims - 1 - i] = (int64_t)dim;
  }
  return SITS_OK;
}

static enum sits_status parse_tensor(struct gguf *g, struct cursor *c, uint64_t number, struct sits_error *err)
{
  struct sits_utd *t = &g->tensors[number];
  struct gguf_string name;
  uint32_t type;
  if (!take_string(c, &name))
    return sits_fail(err, SITS_FORMAT, "%s: the file ends inside the name of tensor number %llu", g->name, (unsigned long long)number);
  char printable[NAME_INDEX_MAX_PRINTED];
  if (name.size == 0 || name.size >= SITS_MAX_NAME || memchr(name.data, 0, name.size))
    return sits_fail_param(err, SITS_FORMAT, name_printable(printable, name.data, name.size),
                           "%s: tensor number %llu '%s': the name is empty, longer than %d bytes or holds a NUL", g->name,
                           (unsigned long long)number, printable, SITS_MAX_NAME - 1);
  memcpy(t->name, name.data, name.size);
  if (!name_index_add(&g->tensor_names, t->name, name.size, (uint32_t)number))
    return tensor_error(g, t->name, SITS_FORMAT, "appears twice", err);
  enum sits_status status = parse_dims(g, c, t, err);
  if (status != SITS_OK) return status;
  if (!take_u32(c, &type) || !take_u64(c, &g->offsets[number]))
    return tensor_error(g, t->name, SITS_FORMAT, "the file ends inside its description", err);
  if (type >= sizeof ggml_types / sizeof ggml_types[0] || ggml_types[type].dtype < 0) return type_error(g, t, type, err);
  t->dtype = (enum sits_dtype)ggml_types[type].dtype;
  t->scale_dtype = SITS_DTYPE_F32;
  t->place = g->map.data ? SITS_PLACE_MAPPED_FILE : SITS_PLACE_HOST;
  if (sits_utd_elements(t) < 0) return tensor_error(g, t->name, SITS_FORMAT, "the number of elements overflows", err);
  int64_t n_bytes = sits_utd_row_major_bytes(t);
  if (n_bytes < 0) return tensor_error(g, t->name, SITS_FORMAT, "a row is no whole number of blocks, or the size overflows", err);
  t->n_bytes = (size_t)n_bytes;
  return SITS_OK;
}

static enum sits_status read_alignment(const struct gguf *g, uint64_t *out, struct sits_error *err)
{
  static const struct gguf_string key = {"general.alignment", 17};
  *out = DEFAULT_ALIGNMENT;
  if (name_index_find(&g->keys, key.data, key.size) < 0) return SITS_OK;
  uint64_t alignment;
  if (!gguf_get_u64(g, key.data, &alignment) || alignment < 8 || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1)) != 0)
    return key_error(g, &key, SITS_FORMAT, "must be a power of two from 8 to 1048576", err);
  *out = alignment;
  return SITS_OK;
}

struct extent { uint64_t offset, n_bytes; uint32_t number; };

static int compare_extents(const void *a, const void *b)
{
  const struct extent *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->number > y->number) - (x->number < y->number);
}

static enum sits_status check_overlaps(const struct gguf *g, struct sits_error *err)
{
  struct extent *extents = mem_calloc((size_t)g->n_tensors, sizeof *extents);
  if (!extents) return sits_fail(err, SITS_NOMEM, "%s: out of memory", g->name);
  for (uint64_t i = 0; i < g->n_tensors; i++)
    extents[i] = (struct extent){.offset = g->offsets[i], .n_bytes = g->tensors[i].n_bytes, .number = (uint32_t)i};
  qsort(extents, (size_t)g->n_tensors, sizeof *extents, compare_extents);
  enum sits_status status = SITS_OK;
  for (uint64_t i = 1; i < g->n_tensors && status == SITS_OK; i++) {
    if (extents[i - 1].offset + extents[i - 1].n_bytes <= extents[i].offset) continue;
    char what[NAME_INDEX_MAX_PRINTED + 32], other[NAME_INDEX_MAX_PRINTED];
    const char *other_name = g->tensors[extents[i - 1].number].name;
    snprintf(what, sizeof what, "its bytes overlap those of '%s'", name_printable(other, other_name, strlen(other_name)));
    status = tensor_error(g, g->tensors[extents[i].number].name, SITS_FORMAT, what, err);
  }
  mem_free(extents);
  return status;
}

static enum sits_status place_tensors(struct gguf *g, const struct cursor *c, struct sits_error *err)
{
  uint64_t alignment;
  enum sits_status status = read_alignment(g, &alignment, err);
  if (status != SITS_OK || g->n_tensors == 0) return status;
  uint64_t start = (c->at + alignment - 1) & ~(alignment - 1);
  uint64_t room = start < g->n_bytes ? g->n_bytes - start : 0;
  for (uint64_t i = 0; i < g->n_tensors; i++) {
    struct sits_utd *t = &g->tensors[i];
    if (g->offsets[i] % alignment != 0) return tensor_error(g, t->name, SITS_FORMAT, "its offset is no multiple of the alignment", err);
    if (g->offsets[i] > room || t->n_bytes > room - g->offsets[i])
      return tensor_error(g, t->name, SITS_FORMAT, "its bytes lie beyond the end of the file (truncated?)", err);
    t->data = g->data + start + g->offsets[i];
  }
  return check_overlaps(g, err);
}

/* ---- open and close ---- */

static enum sits_status parse_header(struct gguf *g, struct cursor *c, struct sits_error *err)
{
  const unsigned char *magic;
  uint32_t version = 0;
  if (!take(c, 4, &magic) || memcmp(magic, "GGUF", 4) != 0) return sits_fail(err, SITS_FORMAT, "%s: not a GGUF file", g->name);
  if (!take_u32(c, &version)) return sits_fail(err, SITS_FORMAT, "%s: the file ends inside its header", g->name);
  if ((version & 0xFFFF) == 0 && version != 0)
    return sits_fail(err, SITS_UNSUPPORTED, "%s: big-endian GGUF files are not supported", g->name);
  if (version != 2 && version != 3)
    return sits_fail(err, SITS_UNSUPPORTED, "%s: GGUF version %u is not supported (2 and 3 are)", g->name, (unsigned)version);
  if (!take_u64(c, &g->n_tensors) || !take_u64(c, &g->n_values))
    return sits_fail(err, SITS_FORMAT, "%s: the file ends inside its header", g->name);
  g->version = version;
  g->values_at = c->at;
  uint64_t room = c->n_bytes - c->at;
  if (g->n_tensors > MAX_TENSORS || g->n_tensors > room / MIN_TENSOR_ENTRY_BYTES)
    return sits_fail(err, SITS_FORMAT, "%s: the header claims %llu tensors", g->name, (unsigned long long)g->n_tensors);
  if (g->n_values > MAX_KEYS || g->n_values > room / MIN_KEY_ENTRY_BYTES)
    return sits_fail(err, SITS_FORMAT, "%s: the header claims %llu keys", g->name, (unsigned long long)g->n_values);
  return SITS_OK;
}

static enum sits_status parse_all(struct gguf *g, struct sits_error *err)
{
  struct cursor c = {.data = g->data, .n_bytes = g->n_bytes};
  enum sits_status status = parse_header(g, &c, err);
  if (status != SITS_OK) return status;
  g->values = mem_calloc((size_t)g->n_values, sizeof *g->values);
  g->tensors = mem_calloc((size_t)g->n_tensors, sizeof *g->tensors);
  g->offsets = mem_calloc((size_t)g->n_tensors, sizeof *g->offsets);
  bool has_memory = g->values && g->tensors && g->offsets && name_index_init(&g->keys, g->n_values) &&
                    name_index_init(&g->tensor_names, g->n_tensors);
  if (!has_memory)
    return sits_fail(err, SITS_NOMEM, "%s: out of memory for the header", g->name);
  for (uint64_t i = 0; i < g->n_values && status == SITS_OK; i++) status = parse_value(g, &c, i, err);
  g->values_end = c.at;
  for (uint64_t i = 0; i < g->n_tensors && status == SITS_OK; i++) status = parse_tensor(g, &c, i, err);
  if (status == SITS_OK) status = place_tensors(g, &c, err);
  mem_free(g->offsets);
  g->offsets = NULL;
  return status;
}

static enum sits_status create(const char *name, struct gguf **out, struct sits_error *err)
{
  struct gguf *g = mem_calloc(1, sizeof *g);
  char *copy = g ? mem_strdup(name_path_tail(name)) : NULL;
  if (!copy) {
    mem_free(g);
    return sits_fail(err, SITS_NOMEM, "%s: out of memory", name_path_tail(name));
  }
  g->name = copy;
  arena_init(&g->arena, 0);
  *out = g;
  return SITS_OK;
}

enum sits_status gguf_open(const char *path, struct gguf **out, struct sits_error *err)
{
  struct gguf *g;
  enum sits_status status = create(path, &g, err);
  if (status != SITS_OK) return status;
  status = mapfile_open(&g->map, path, err);
  g->data = g->map.data;
  g->n_bytes = g->map.n_bytes;
  if (status == SITS_OK) status = parse_all(g, err);
  if (status == SITS_OK) *out = g;
  else gguf_close(g);
  return status;
}

enum sits_status gguf_parse(const unsigned char *data, size_t n_bytes, const char *name, struct gguf **out, struct sits_error *err)
{
  struct gguf *g;
  enum sits_status status = create(name, &g, err);
  if (status != SITS_OK) return status;
  g->data = data;
  g->n_bytes = n_bytes;
  status = parse_all(g, err);
  if (status == SITS_OK) *out = g;
  else gguf_close(g);
  return status;
}

void gguf_close(struct gguf *g)
{
  if (!g) return;
  name_index_fini(&g->keys);
  name_index_fini(&g->tensor_names);
  mem_free(g->values);
  mem_free(g->tensors);
  mem_free(g->offsets);
  arena_fini(&g->arena);
  mapfile_close(&g->map);
  mem_free(g->name);
  mem_free(g);
}

/* ---- getters ---- */

static const struct value *find(const struct gguf *g, const char *key, bool is_array)
{
  int64_t number = name_index_find(&g->keys, key, strlen(key));
  return number >= 0 && g->values[number].is_array == is_array ? &g->values[number] : NULL;
}

/* An integer or bool as 64 bits; *is_signed tells how to read them. */
static bool load_integer(enum gguf_type type, const unsigned char *p, uint64_t *bits, bool *is_signed)
{
  uint16_t half;
  *is_signed = type == GGUF_I8 || type == GGUF_I16 || type == GGUF_I32 || type == GGUF_I64;
  switch (type) {
  case GGUF_U8: case GGUF_BOOL: *bits = p[0]; return true;
  case GGUF_I8: *bits = (uint64_t)(int64_t)(int8_t)p[0]; return true;
  case GGUF_U16: memcpy(&half, p, sizeof half); *bits = half; return true;
  case GGUF_I16: memcpy(&half, p, sizeof half); *bits = (uint64_t)(int64_t)(int16_t)half; return true;
  case GGUF_U32: *bits = load_u32(p); return true;
  case GGUF_I32: *bits = (uint64_t)(int64_t)(int32_t)load_u32(p); return true;
  case GGUF_U64: case GGUF_I64: *bits = load_u64(p); return true;
  default: return false;
  }
}

static bool load_real(enum gguf_type type, const unsigned char *p, double *out)
{
  float single;
  if (type == GGUF_F64) {
    memcpy(out, p, sizeof *out);
    return true;
  }
  if (type != GGUF_F32) return false;
  memcpy(&single, p, sizeof single);
  *out = single;
  return true;
}

bool gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out)
{
  const struct value *v = find(g, key, false);
  uint64_t bits;
  bool is_signed;
  if (!v || v->type == GGUF_BOOL || !load_integer(v->type, v->data, &bits, &is_signed)) return false;
  if (is_signed && bits > INT64_MAX) return false;
  *out = bits;
  return true;
}

bool gguf_get_i64(const struct gguf *g, const char *key, int64_t *out)
{
  const struct value *v = find(g, key, false);
  uint64_t bits;
  bool is_signed;
  if (!v || v->type == GGUF_BOOL || !load_integer(v->type, v->data, &bits, &is_signed)) return false;
  if (!is_signed && bits > INT64_MAX) return false;
  *out = (int64_t)bits;
  return true;
}

bool gguf_get_f64(const struct gguf *g, const char *key, double *out)
{
  const struct value *v = find(g, key, false);
  return v && load_real(v->type, v->data, out);
}

bool gguf_get_bool(const struct gguf *g, const char *key, bool *out)
{
  const struct value *v = find(g, key, false);
  if (!v || v->type != GGUF_BOOL) return false;
  *out = v->data[0] != 0;
  return true;
}

bool gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *out)
{
  const struct value *v = find(g, key, false);
  if (!v || v->type != GGUF_STRING) return false;
  *out = (struct gguf_string){.data = (const char *)v->data + 8, .size = load_u64(v->data)};
  return true;
}

bool gguf_get_array(const struct gguf *g, const char *key, enum gguf_type *type, uint64_t *count)
{
  const struct value *v = find(g, key, true);
  if (!v) return false;
  *type = v->type;
  *count = v->count;
  return true;
}

bool gguf_array_string(const struct gguf *g, const char *key, uint64_t index, struct gguf_string *out)
{
  const struct value *v = find(g, key, true);
  if (!v || v->type != GGUF_STRING || index >= v->count) return false;
  const unsigned char *p = g->data + v->string_positions[index];
  *out = (struct gguf_string){.data = (const char *)p + 8, .size = load_u64(p)};
  return true;
}

bool gguf_array_i64(const struct gguf *g, const char *key, uint64_t index, int64_t *out)
{
  const struct value *v = find(g, key, true);
  uint64_t bits;
  bool is_signed;
  if (!v || index >= v->count || type_bytes[v->type] == 0) return false;
  if (!load_integer(v->type, v->data + index * type_bytes[v->type], &bits, &is_signed)) return false;
  if (!is_signed && bits > INT64_MAX) return false;
  *out = (int64_t)bits;
  return true;
}

bool gguf_array_f64(const struct gguf *g, const char *key, uint64_t index, double *out)
{
  const struct value *v = find(g, key, true);
  if (!v || index >= v->count || type_bytes[v->type] == 0) return false;
  return load_real(v->type, v->data + index * type_bytes[v->type], out);
}

const unsigned char *gguf_metadata(const struct gguf *g, size_t *n_bytes, uint64_t *n_values, uint32_t *version)
{
  *n_bytes = g->values_end - g->values_at;
  *n_values = g->n_values;
  *version = g->version;
  return g->data + g->values_at;
}

int64_t gguf_n_tensors(const struct gguf *g) { return (int64_t)g->n_tensors; }

const struct sits_utd *gguf_tensor_at(const struct gguf *g, int64_t index)
{
  return index >= 0 && (uint64_t)index < g->n_tensors ? &g->tensors[index] : NULL;
}

const struct sits_utd *gguf_tensor(const struct gguf *g, const char *name)
{
  int64_t number = name_index_find(&g->tensor_names, name, strlen(name));
  return number >= 0 ? &g->tensors[number] : NULL;
}

void gguf_drop_pages(const struct gguf *g, const struct sits_utd *tensor)
{
  uintptr_t start = (uintptr_t)g->map.data, at = (uintptr_t)tensor->data;
  if (start && at >= start && at - start < g->map.n_bytes) mapfile_drop(&g->map, at - start, tensor->n_bytes);
}

uint64_t gguf_file_bytes(const struct gguf *g) { return g->n_bytes; }
