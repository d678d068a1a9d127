/* Writing an engine file; the format is in engine_file.h. Entry points: engine_writer_create, _add_tensor, _add_blob, _finish. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/hash.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "base/outfile.h"
#include "tensor/engine_file.h"
#include "tensor/engine_format.h"

struct section { const void *bytes; size_t n_bytes; uint64_t offset; bool is_mapped; }; /* is_mapped: of a file; dropped once written */

struct engine_writer {
  json_t *tensors, *blobs;       /* arrays of header rows; "data" etc. are filled in at finish */
  struct section *sections;      /* [n_sections] in file order */
  int64_t n_sections, capacity;
};

enum sits_status engine_writer_create(struct engine_writer **out)
{
  struct engine_writer *writer = mem_calloc(1, sizeof *writer);
  if (!writer) return SITS_NOMEM;
  writer->tensors = json_array();
  writer->blobs = json_array();
  if (!writer->tensors || !writer->blobs) {
    engine_writer_destroy(writer);
    return SITS_NOMEM;
  }
  *out = writer;
  return SITS_OK;
}

void engine_writer_destroy(struct engine_writer *writer)
{
  if (!writer) return;
  json_decref(writer->tensors);
  json_decref(writer->blobs);
  mem_free(writer->sections);
  mem_free(writer);
}

/* Remember a section; its number goes into the header row and is swapped for [offset, bytes] at finish. */
static bool add_section(struct engine_writer *writer, json_t *row, const char *key, const void *bytes, size_t n_bytes, bool is_mapped)
{
  if (writer->n_sections == writer->capacity) {
    int64_t capacity = writer->capacity ? writer->capacity * 2 : 256;
    struct section *grown = mem_realloc(writer->sections, (size_t)capacity * sizeof *grown);
    if (!grown) return false;
    writer->sections = grown;
    writer->capacity = capacity;
  }
  writer->sections[writer->n_sections] = (struct section){.bytes = bytes, .n_bytes = n_bytes, .is_mapped = is_mapped};
  return json_object_set_new(row, key, json_integer(writer->n_sections++)) == 0;
}

static bool set_text(json_t *row, const char *key, const char *text) { return json_object_set_new(row, key, json_string(text)) == 0; }
static bool set_int(json_t *row, const char *key, int64_t value) { return json_object_set_new(row, key, json_integer(value)) == 0; }

static bool set_checksum(json_t *row, uint64_t checksum)
{
  char text[20];
  snprintf(text, sizeof text, "%016llx", (unsigned long long)checksum);
  return set_text(row, "checksum", text);
}

static json_t *tensor_row(struct engine_writer *writer, const struct sits_utd *utd, int64_t n_groups)
{
  json_t *row = json_object(), *dims = json_array();
  size_t side_bytes = (size_t)n_groups * (size_t)sits_dtype_info(utd->scale_dtype)->block_bytes;
  bool ok = row && dims;
  const bool is_mapped = utd->place == SITS_PLACE_MAPPED_FILE;
  for (int i = 0; ok && i < utd->n_dims; i++) ok = json_array_append_new(dims, json_integer(utd->dims[i])) == 0;
  ok = ok && set_text(row, "name", utd->name) && set_text(row, "dtype", sits_dtype_info(utd->dtype)->name) &&
       json_object_set(row, "dims", dims) == 0;
  if (ok && utd->quant != SITS_QUANT_NONE)
    ok = set_text(row, "quant", engine_quant_names[utd->quant]) && set_int(row, "group_size", utd->group_size) &&
         set_int(row, "group_axis", utd->group_axis) && set_text(row, "scale_dtype", sits_dtype_info(utd->scale_dtype)->name);
  if (ok && utd->layout == SITS_LAYOUT_PACKED_TILE) ok = set_text(row, "tile_name", utd->tile_name);
  ok = ok && add_section(writer, row, "data", utd->data, utd->n_bytes, is_mapped);
  uint64_t checksum = hash_bulk(0, utd->data, utd->n_bytes);
  if (ok && utd->quant != SITS_QUANT_NONE) {
    ok = add_section(writer, row, "scales", utd->scales, side_bytes, is_mapped);
    checksum = hash_bulk(checksum, utd->scales, side_bytes);
    if (ok && utd->minimums) {
      ok = add_section(writer, row, "minimums", utd->minimums, side_bytes, is_mapped);
      checksum = hash_bulk(checksum, utd->minimums, side_bytes);
    }
  }
  if (is_mapped) mapfile_drop(&(struct mapfile){utd->data, utd->n_bytes}, 0, utd->n_bytes);
  ok = ok && set_checksum(row, checksum);
  json_decref(dims);
  if (ok) return row;
  json_decref(row);
  return NULL;
}

enum sits_status engine_writer_add_tensor(struct engine_writer *writer, const struct sits_utd *utd)
{
  int64_t n_groups = engine_file_n_groups(utd);
  if (n_groups < 0 || !utd->data || (utd->quant != SITS_QUANT_NONE && !utd->scales)) return SITS_INVALID_ARGUMENT;
  if (utd->layout == SITS_LAYOUT_ROW_MAJOR && (int64_t)utd->n_bytes != sits_utd_row_major_bytes(utd)) return SITS_INVALID_ARGUMENT;
  return json_array_append_new(writer->tensors, tensor_row(writer, utd, n_groups)) == 0 ? SITS_OK : SITS_NOMEM;
}

enum sits_status engine_writer_add_blob(struct engine_writer *writer, const char *name, const void *bytes, size_t n_bytes)
{
  json_t *row = json_object();
  bool ok = row && set_text(row, "name", name) && add_section(writer, row, "data", bytes, n_bytes, false) &&
            set_checksum(row, hash_bulk(0, bytes, n_bytes));
  if (!ok) {
    json_decref(row);
    return SITS_NOMEM;
  }
  return json_array_append_new(writer->blobs, row) == 0 ? SITS_OK : SITS_NOMEM;
}

static uint64_t align_up(uint64_t value) { return (value + ENGINE_FILE_ALIGN - 1) / ENGINE_FILE_ALIGN * ENGINE_FILE_ALIGN; }

/* Sections' offsets once the header takes header_bytes; returns the file's size. */
static uint64_t place_sections(struct engine_writer *writer, size_t header_bytes)
{
  uint64_t at = align_up(ENGINE_PREFIX_BYTES + header_bytes);
  for (int64_t i = 0; i < writer->n_sections; i++) {
    writer->sections[i].offset = at;
    at = align_up(at + writer->sections[i].n_bytes);
  }
  return at;
}

/* A copy of the rows with section numbers replaced by [offset, bytes]. */
static json_t *placed_rows(const struct engine_writer *writer, const json_t *rows)
{
  json_t *copy = json_deep_copy(rows), *row;
  size_t index;
  json_array_foreach(copy, index, row) {
    for (int k = 0; k < ENGINE_SECTION_KEYS; k++) {
      const json_t *number = json_object_get(row, engine_section_keys[k]);
      if (!number) continue;
      const struct section *section = &writer->sections[json_integer_value(number)];
      json_object_set_new(row, engine_section_keys[k],
                          json_pack("[I, I]", (json_int_t)section->offset, (json_int_t)section->n_bytes));
    }
  }
  return copy;
}

/* The header's text; its length depends on the offsets in it, which depend on its length, so the room is rounded up to whole pages. */
static char *write_header(struct engine_writer *writer, const json_t *meta, size_t *n_bytes, uint64_t *file_bytes)
{
  size_t room = 0;
  for (int tries = 0; tries < 8; tries++) {
    *file_bytes = place_sections(writer, room);
    json_t *header = json_pack("{s:O, s:o, s:o}", "meta", meta, "tensors", placed_rows(writer, writer->tensors), "blobs",
                               placed_rows(writer, writer->blobs));
    char *text = header ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text) return NULL;
    *n_bytes = strlen(text);
    if (align_up(ENGINE_PREFIX_BYTES + *n_bytes) == align_up(ENGINE_PREFIX_BYTES + room)) return text;
    room = *n_bytes;
    engine_free_json_text(text);
  }
  return NULL;
}

static bool pad_to(FILE *file, uint64_t *at, uint64_t target)
{
  static const char zeros[ENGINE_FILE_ALIGN];
  while (*at < target) {
    size_t n = target - *at < sizeof zeros ? (size_t)(target - *at) : sizeof zeros;
    if (fwrite(zeros, 1, n, file) != n) return false;
    *at += n;
  }
  return true;
}

static bool write_all(const struct engine_writer *writer, FILE *file, const char *header, size_t header_bytes, uint64_t file_bytes)
{
  struct engine_prefix prefix = {.version = ENGINE_FILE_VERSION, .order = ENGINE_ORDER_MARK, .header_bytes = header_bytes,
                                 .file_bytes = file_bytes, .header_checksum = hash_bulk(0, header, header_bytes)};
  memcpy(prefix.magic, engine_magic, sizeof prefix.magic);
  if (fwrite(&prefix, sizeof prefix, 1, file) != 1 || fwrite(header, 1, header_bytes, file) != header_bytes) return false;
  uint64_t at = sizeof prefix + header_bytes;
  for (int64_t i = 0; i < writer->n_sections; i++) {
    const struct section *section = &writer->sections[i];
    if (!pad_to(file, &at, section->offset)) return false;
    if (section->n_bytes && fwrite(section->bytes, 1, section->n_bytes, file) != section->n_bytes) return false;
    if (section->is_mapped) mapfile_drop(&(struct mapfile){section->bytes, section->n_bytes}, 0, section->n_bytes);
    at += section->n_bytes;
  }
  return pad_to(file, &at, file_bytes) && fflush(file) == 0 && fsync(fileno(file)) == 0;
}

enum sits_status engine_writer_finish(struct engine_writer *writer, const json_t *meta, const char *path, struct sits_error *err)
{
  char part[4096];
  size_t header_bytes = 0;
  uint64_t file_bytes = 0;
  if ((size_t)snprintf(part, sizeof part, "%s.part", path) >= sizeof part) return sits_fail(err, SITS_INVALID_ARGUMENT, "path too long");
  enum sits_status status = outfile_check(path, err);
  if (status) return status;
  char *header = write_header(writer, meta, &header_bytes, &file_bytes);
  if (!header) return sits_fail(err, SITS_NOMEM, "out of memory");
  FILE *file = fopen(part, "wb");
  if (!file) status = sits_fail(err, SITS_IO, "%.200s: %s", part, strerror(errno));
  if (file && !write_all(writer, file, header, header_bytes, file_bytes))
    status = sits_fail(err, SITS_IO, "%.200s: %s", part, strerror(errno));
  if (file && fclose(file) != 0 && !status) status = sits_fail(err, SITS_IO, "%.200s: %s", part, strerror(errno));
  if (!status && rename(part, path) != 0) status = sits_fail(err, SITS_IO, "%.200s: %s", path, strerror(errno));
  if (status) unlink(part);
  engine_free_json_text(header);
  return status;
}
