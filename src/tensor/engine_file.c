/* Reading an engine file; the format is in engine_file.h. Entry points: engine_file_open, engine_file_verify. */
#include "tensor/engine_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "tensor/engine_format.h"

const char engine_magic[8] = "SITSENG";
const char *const engine_quant_names[3] = {"none", "channel", "group"};
const char *const engine_section_keys[ENGINE_SECTION_KEYS] = {"data", "scales", "minimums"};

enum { MOST_TENSORS = 1 << 20 };

struct span { uint64_t offset, n_bytes; };

struct engine_tensor { struct sits_utd utd; struct span spans[ENGINE_SECTION_KEYS]; uint64_t checksum; };

struct engine_file {
  char *name;                      /* for errors */
  struct mapfile map;              /* data == NULL when parsed from memory */
  const unsigned char *data;
  size_t n_bytes;
  json_t *header;                  /* blob and tile names point into it */
  struct engine_tensor *tensors;   /* [n_tensors] */
  int64_t n_tensors;
};

void engine_free_json_text(char *text)
{
  json_malloc_t allocate;
  json_free_t release;
  json_get_alloc_funcs(&allocate, &release);
  release(text);
}

bool engine_file_is(const char *path)
{
  char magic[8] = "";
  FILE *file = fopen(path, "rb");
  if (!file) return false;
  bool is = fread(magic, 1, sizeof magic, file) == sizeof magic && memcmp(magic, engine_magic, sizeof magic) == 0;
  fclose(file);
  return is;
}

int64_t engine_file_n_groups(const struct sits_utd *utd)
{
  int64_t n = sits_utd_elements(utd);
  if (n < 0 || utd->n_dims < 1) return -1;
  if (utd->quant == SITS_QUANT_NONE) return 0;
  if (utd->quant == SITS_QUANT_CHANNEL) return utd->dims[0];
  if (utd->group_axis < 0 || utd->group_axis >= utd->n_dims || utd->group_size <= 0) return -1;
  int64_t along = utd->dims[utd->group_axis];
  if (along <= 0) return -1;
  return n / along * (along / utd->group_size + (along % utd->group_size != 0));
}

static enum sits_status bad(const struct engine_file *file, const char *tensor, const char *what, struct sits_error *err)
{
  return sits_fail_param(err, SITS_FORMAT, tensor, "%.120s: '%.60s': %s", file->name, tensor, what);
}

/* [offset, bytes] inside the file and aligned. */
static bool read_span(const struct engine_file *file, const json_t *value, struct span *out)
{
  json_int_t offset = json_integer_value(json_array_get(value, 0)), n = json_integer_value(json_array_get(value, 1));
  if (json_array_size(value) != 2 || !json_is_integer(json_array_get(value, 0)) || !json_is_integer(json_array_get(value, 1))) return false;
  if (offset < ENGINE_FILE_ALIGN || offset % ENGINE_FILE_ALIGN || n < 0) return false;
  if ((uint64_t)offset > file->n_bytes || (uint64_t)n > file->n_bytes - (uint64_t)offset) return false;
  *out = (struct span){(uint64_t)offset, (uint64_t)n};
  return true;
}

static bool read_checksum(const json_t *row, uint64_t *out)
{
  const char *text = json_string_value(json_object_get(row, "checksum"));
  char *end;
  if (!text || strlen(text) != 16) return false;
  *out = strtoull(text, &end, 16);
  return *end == '\0';
}

static bool read_dtype(const json_t *row, const char *key, enum sits_dtype *out)
{
  const char *name = json_string_value(json_object_get(row, key));
  for (int i = 0; name && i < SITS_DTYPE_COUNT; i++) {
    if (strcmp(name, sits_dtype_info((enum sits_dtype)i)->name) != 0) continue;
    *out = (enum sits_dtype)i;
    return true;
  }
  return false;
}

static bool read_dims(const json_t *row, struct sits_utd *utd)
{
  const json_t *dims = json_object_get(row, "dims");
  utd->n_dims = (int32_t)json_array_size(dims);
  if (utd->n_dims < 1 || utd->n_dims > SITS_MAX_DIMS) return false;
  for (int i = 0; i < utd->n_dims; i++) {
    const json_t *value = json_array_get(dims, (size_t)i);
    utd->dims[i] = json_integer_value(value);
    if (!json_is_integer(value) || utd->dims[i] <= 0) return false;
  }
  return sits_utd_elements(utd) > 0;
}

/* Printable ASCII, of which error texts and listings are made; NULL where the row has no such name. */
static const char *read_name(const json_t *row)
{
  const json_t *value = json_object_get(row, "name");
  const char *name = json_string_value(value);
  if (!name || !*name || strlen(name) != json_string_length(value)) return NULL;
  for (const char *c = name; *c; c++)
    if (*c < 0x20 || *c > 0x7e) return NULL;
  return name;
}

static bool read_int32(const json_t *row, const char *key, int32_t *out)
{
  const json_t *value = json_object_get(row, key);
  if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > INT32_MAX) return false;
  *out = (int32_t)json_integer_value(value);
  return true;
}

static const char *read_quant(const json_t *row, struct sits_utd *utd)
{
  const json_t *value = json_object_get(row, "quant");
  const char *name = json_string_value(value);
  int kind = SITS_QUANT_NONE;
  if (!value) return NULL;
  while (name && kind < 3 && strcmp(name, engine_quant_names[kind]) != 0) kind++;
  if (!name || kind == 3) return "unknown kind of quantisation";
  utd->quant = (enum sits_quant)kind;
  if (kind != SITS_QUANT_NONE && (!read_int32(row, "group_size", &utd->group_size) || !read_int32(row, "group_axis", &utd->group_axis)))
    return "bad group size or axis";
  return read_dtype(row, "scale_dtype", &utd->scale_dtype) ? NULL : "unknown scale type";
}

/* NULL when the row is good, else what is wrong with it. */
static const char *read_sections(const struct engine_file *file, const json_t *row, struct engine_tensor *tensor)
{
  struct sits_utd *utd = &tensor->utd;
  int64_t n_groups = engine_file_n_groups(utd), row_major = sits_utd_row_major_bytes(utd);
  if (n_groups < 0) return "bad group size or axis";
  uint64_t side_bytes = (uint64_t)n_groups * (uint64_t)sits_dtype_info(utd->scale_dtype)->block_bytes;
  for (int k = 0; k < ENGINE_SECTION_KEYS; k++) {
    const json_t *value = json_object_get(row, engine_section_keys[k]);
    bool is_wanted = k == 0 || (k == 1 && utd->quant != SITS_QUANT_NONE);
    if (!value && is_wanted) return "a section is missing";
    if (!value) continue;
    if (k > 0 && utd->quant == SITS_QUANT_NONE) return "scales on a tensor that is not quantised";
    if (!read_span(file, value, &tensor->spans[k])) return "a section lies outside the file or is not aligned";
    if (k > 0 && tensor->spans[k].n_bytes != side_bytes) return "scales of a wrong size";
  }
  if (utd->layout == SITS_LAYOUT_ROW_MAJOR && (int64_t)tensor->spans[0].n_bytes != row_major) return "data of a wrong size";
  utd->data = file->data + tensor->spans[0].offset;
  utd->n_bytes = (size_t)tensor->spans[0].n_bytes;
  if (tensor->spans[1].offset) utd->scales = file->data + tensor->spans[1].offset;
  if (tensor->spans[2].offset) utd->minimums = file->data + tensor->spans[2].offset;
  return read_checksum(row, &tensor->checksum) ? NULL : "no checksum";
}

static enum sits_status read_tensor(const struct engine_file *file, const json_t *row, struct engine_tensor *tensor, struct sits_error *err)
{
  struct sits_utd *utd = &tensor->utd;
  const char *name = read_name(row);
  const json_t *tile = json_object_get(row, "tile_name");
  if (!name || strlen(name) >= sizeof utd->name) return bad(file, "tensors", "a tensor without a usable name", err);
  snprintf(utd->name, sizeof utd->name, "%s", name);
  utd->place = file->map.data ? SITS_PLACE_MAPPED_FILE : SITS_PLACE_HOST;
  if (!read_dtype(row, "dtype", &utd->dtype)) return bad(file, name, "unknown element type", err);
  if (!read_dims(row, utd)) return bad(file, name, "bad shape", err);
  if (tile && !json_is_string(tile)) return bad(file, name, "tile_name is no text", err);
  utd->tile_name = json_string_value(tile);
  utd->layout = utd->tile_name ? SITS_LAYOUT_PACKED_TILE : SITS_LAYOUT_ROW_MAJOR;
  const char *what = read_quant(row, utd);
  if (!what) what = read_sections(file, row, tensor);
  return what ? bad(file, name, what, err) : SITS_OK;
}

static int by_offset(const void *a, const void *b)
{
  uint64_t x = ((const struct span *)a)->offset, y = ((const struct span *)b)->offset;
  return (x > y) - (x < y);
}

/* No two sections share a byte. */
static enum sits_status check_overlap(const struct engine_file *file, struct sits_error *err)
{
  const json_t *blobs = json_object_get(file->header, "blobs"), *row;
  size_t n = 0, index, most = (size_t)file->n_tensors * ENGINE_SECTION_KEYS + json_array_size(blobs);
  struct span *spans = mem_calloc(most, sizeof *spans);
  if (!spans) return sits_fail(err, SITS_NOMEM, "%.120s: out of memory", file->name);
  for (int64_t i = 0; i < file->n_tensors; i++)
    for (int k = 0; k < ENGINE_SECTION_KEYS; k++)
      if (file->tensors[i].spans[k].offset) spans[n++] = file->tensors[i].spans[k];
  json_array_foreach(blobs, index, row) {
    if (!read_span(file, json_object_get(row, "data"), &spans[n++])) n--;
  }
  qsort(spans, n, sizeof *spans, by_offset);
  bool overlaps = false;
  for (size_t i = 1; i < n; i++) overlaps |= spans[i].offset < spans[i - 1].offset + spans[i - 1].n_bytes;
  mem_free(spans);
  return overlaps ? bad(file, "tensors", "sections overlap", err) : SITS_OK;
}

static enum sits_status read_header(struct engine_file *file, struct sits_error *err)
{
  const json_t *tensors = json_object_get(file->header, "tensors"), *blobs = json_object_get(file->header, "blobs"), *row;
  size_t index;
  if (!json_is_object(json_object_get(file->header, "meta")) || !json_is_array(tensors) || !json_is_array(blobs))
    return bad(file, "header", "meta, tensors or blobs are missing", err);
  if (json_array_size(tensors) > MOST_TENSORS) return bad(file, "tensors", "too many", err);
  file->tensors = mem_calloc(json_array_size(tensors), sizeof *file->tensors);
  if (!file->tensors) return sits_fail(err, SITS_NOMEM, "%.120s: out of memory", file->name);
  json_array_foreach(tensors, index, row) {
    enum sits_status status = read_tensor(file, row, &file->tensors[index], err);
    if (status) return status;
    file->n_tensors++;
  }
  json_array_foreach(blobs, index, row) {
    struct span span;
    uint64_t checksum;
    const char *name = read_name(row);
    if (!name || !read_span(file, json_object_get(row, "data"), &span) || !read_checksum(row, &checksum))
      return bad(file, name ? name : "blobs", "a blob lies outside the file or lacks name or checksum", err);
  }
  return check_overlap(file, err);
}

static enum sits_status truncated(const struct engine_file *file, uint64_t file_bytes, const char *name, struct sits_error *err)
{
  return sits_fail_param(err, SITS_FORMAT, name, "%.120s: truncated: %zu bytes of %llu, '%.71s' is not whole", file->name, file->n_bytes,
                         (unsigned long long)file_bytes, name);
}

/* The first tensor or blob, in the header's order, that ends past the file's end; the file's own padding when all are there. */
static const char *first_cut(const struct engine_file *file)
{
  static const char *const lists[] = {"tensors", "blobs"};
  const json_t *row;
  size_t index;
  for (int l = 0; l < 2; l++)
    json_array_foreach(json_object_get(file->header, lists[l]), index, row)
      for (int k = 0; k < ENGINE_SECTION_KEYS; k++) {
        const json_t *span = json_object_get(row, engine_section_keys[k]);
        const json_int_t offset = json_integer_value(json_array_get(span, 0)), size = json_integer_value(json_array_get(span, 1));
        const char *name = read_name(row);
        if (name && offset >= 0 && size >= 0 && (uint64_t)offset + (uint64_t)size > file->n_bytes) return name;
      }
  return "padding";
}

static enum sits_status read_prefix(struct engine_file *file, struct engine_prefix *prefix, struct sits_error *err)
{
  if (file->n_bytes < sizeof *prefix) return bad(file, "prefix", "the file is too short", err);
  memcpy(prefix, file->data, sizeof *prefix);
  if (memcmp(prefix->magic, engine_magic, sizeof prefix->magic) != 0) return bad(file, "magic", "not an engine file", err);
  if (prefix->order == __builtin_bswap32(ENGINE_ORDER_MARK))
    return sits_fail(err, SITS_UNSUPPORTED, "%.120s: written with the other byte order", file->name);
  if (prefix->version != ENGINE_FILE_VERSION)
    return sits_fail(err, SITS_UNSUPPORTED, "%.120s: engine file version %u; this build reads version %d: compile the model again",
                     file->name, prefix->version, ENGINE_FILE_VERSION);
  if (prefix->order != ENGINE_ORDER_MARK) return bad(file, "prefix", "byte-order mark is damaged", err);
  if (prefix->header_bytes > file->n_bytes - sizeof *prefix)
    return prefix->file_bytes != file->n_bytes ? truncated(file, prefix->file_bytes, "header", err)
                                               : bad(file, "header", "longer than the file", err);
  if (hash_bulk(0, file->data + sizeof *prefix, (size_t)prefix->header_bytes) != prefix->header_checksum)
    return bad(file, "header", "checksum differs: the file is damaged", err);
  return SITS_OK;
}

static enum sits_status parse(struct engine_file *file, struct sits_error *err)
{
  struct engine_prefix prefix;
  struct sits_error inner = {0};
  enum sits_status status = read_prefix(file, &prefix, err);
  if (status) return status;
  status = json_parse((const char *)file->data + sizeof prefix, (size_t)prefix.header_bytes, &json_limits_file, &file->header, &inner);
  if (status) return bad(file, "header", inner.text, err);
  if (prefix.file_bytes != file->n_bytes) return truncated(file, prefix.file_bytes, first_cut(file), err);
  return read_header(file, err);
}

/* Takes over map. */
static enum sits_status create(struct mapfile map, const unsigned char *data, size_t n_bytes, const char *name, struct engine_file **out,
                               struct sits_error *err)
{
  struct engine_file *file = mem_calloc(1, sizeof *file);
  enum sits_status status = SITS_NOMEM;
  if (file) {
    *file = (struct engine_file){.map = map, .data = data, .n_bytes = n_bytes, .name = mem_strdup(name)};
    if (file->name) status = parse(file, err);
    if (!status) {
      *out = file;
      return SITS_OK;
    }
    engine_file_close(file);
  } else {
    mapfile_close(&map);
  }
  return status == SITS_NOMEM ? sits_fail(err, SITS_NOMEM, "%.120s: out of memory", name) : status;
}

enum sits_status engine_file_open(const char *path, struct engine_file **out, struct sits_error *err)
{
  struct mapfile map;
  const char *slash = strrchr(path, '/');
  enum sits_status status = mapfile_open(&map, path, err);
  return status ? status : create(map, map.data, map.n_bytes, slash ? slash + 1 : path, out, err);
}

enum sits_status engine_file_parse(const unsigned char *data, size_t n_bytes, const char *name, struct engine_file **out,
                                   struct sits_error *err)
{
  return create((struct mapfile){0}, data, n_bytes, name, out, err);
}

void engine_file_close(struct engine_file *file)
{
  if (!file) return;
  json_decref(file->header);
  mem_free(file->tensors);
  mapfile_close(&file->map);
  mem_free(file->name);
  mem_free(file);
}

const json_t *engine_file_meta(const struct engine_file *file) { return json_object_get(file->header, "meta"); }
int64_t engine_file_n_tensors(const struct engine_file *file) { return file->n_tensors; }
const struct sits_utd *engine_file_tensor_at(const struct engine_file *file, int64_t index) { return &file->tensors[index].utd; }
uint64_t engine_file_bytes(const struct engine_file *file) { return file->n_bytes; }
int64_t engine_file_n_blobs(const struct engine_file *file) { return (int64_t)json_array_size(json_object_get(file->header, "blobs")); }

const char *engine_file_blob_name(const struct engine_file *file, int64_t index)
{
  return json_string_value(json_object_get(json_array_get(json_object_get(file->header, "blobs"), (size_t)index), "name"));
}

const unsigned char *engine_file_blob(const struct engine_file *file, const char *name, size_t *n_bytes)
{
  const json_t *row;
  size_t index;
  json_array_foreach(json_object_get(file->header, "blobs"), index, row) {
    struct span span;
    if (strcmp(json_string_value(json_object_get(row, "name")), name) != 0) continue;
    if (!read_span(file, json_object_get(row, "data"), &span)) return NULL; /* checked when the file was opened */
    *n_bytes = (size_t)span.n_bytes;
    return file->data + span.offset;
  }
  return NULL;
}

void engine_file_drop(const struct engine_file *file, const struct sits_utd *tensor)
{
  const struct engine_tensor *at = (const struct engine_tensor *)tensor; /* utd is its first member */
  for (int k = 0; k < ENGINE_SECTION_KEYS; k++) mapfile_drop(&file->map, at->spans[k].offset, at->spans[k].n_bytes);
}

enum sits_status engine_file_verify(const struct engine_file *file, int64_t first, int64_t last, struct sits_error *err)
{
  if (last < 0 || last > file->n_tensors) last = file->n_tensors;
  for (int64_t i = first; i < last; i++) {
    const struct engine_tensor *tensor = &file->tensors[i];
    uint64_t checksum = 0;
    for (int k = 0; k < ENGINE_SECTION_KEYS; k++)
      if (tensor->spans[k].offset) checksum = hash_bulk(checksum, file->data + tensor->spans[k].offset, (size_t)tensor->spans[k].n_bytes);
    if (checksum != tensor->checksum) return bad(file, tensor->utd.name, "checksum differs: the file is damaged", err);
    engine_file_drop(file, &tensor->utd); /* not the whole file at once in this process; who packs it reads it from the page cache */
  }
  for (int64_t i = 0; first == 0 && i < engine_file_n_blobs(file); i++) {
    const json_t *row = json_array_get(json_object_get(file->header, "blobs"), (size_t)i);
    size_t n_bytes = 0;
    uint64_t want = 0;
    const char *name = engine_file_blob_name(file, i);
    const unsigned char *bytes = engine_file_blob(file, name, &n_bytes);
    if (!read_checksum(row, &want) || hash_bulk(0, bytes, n_bytes) != want)
      return bad(file, name, "checksum differs: the file is damaged", err);
  }
  return SITS_OK;
}
