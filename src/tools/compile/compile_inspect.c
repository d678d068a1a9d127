/* `sits2026-compile --inspect FILE`: what an engine file holds. Entry point: compile_inspect. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tensor/engine_format.h"
#include "tensor/name_index.h"
#include "tools/compile/compile.h"

static const char *quant_text(const struct sits_utd *utd, char *out, size_t n_bytes)
{
  const char *minimums = utd->minimums ? ", minimums" : "";
  if (utd->quant == SITS_QUANT_NONE) snprintf(out, n_bytes, "-");
  else if (utd->quant == SITS_QUANT_CHANNEL) snprintf(out, n_bytes, "per channel%s", minimums);
  else snprintf(out, n_bytes, "groups of %d%s", utd->group_size, minimums);
  return out;
}

/* Text of a file that may come from anywhere, fit for a terminal. */
static const char *shown(const char *text, char out[NAME_INDEX_MAX_PRINTED])
{
  return text ? name_printable(out, text, strlen(text)) : "?";
}

static void print_meta(const struct engine_file *file)
{
  const json_t *meta = engine_file_meta(file), *sites = json_object_get(meta, "sites"), *value, *row;
  const char *key;
  char first[NAME_INDEX_MAX_PRINTED], second[NAME_INDEX_MAX_PRINTED];
  size_t index;
  json_object_foreach((json_t *)meta, key, value) {
    if (value == sites) continue;
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
    for (char *c = text; c && *c; c++)
      if (*c == 0x7f) *c = '?'; /* the one control character that JSON leaves as it is */
    printf("%s: %s\n", shown(key, first), text ? text : "?");
    if (text) engine_free_json_text(text);
  }
  printf("sites: %zu\n", json_array_size(sites));
  json_array_foreach(sites, index, row) {
    const char *act = json_string_value(json_object_get(row, "act")), *site = json_string_value(json_object_get(row, "site"));
    printf("  layer %-4" JSON_INTEGER_FORMAT " %-8s %s", json_integer_value(json_object_get(row, "layer")), shown(site, first),
           shown(act, second));
    const size_t n_outliers = json_array_size(json_object_get(row, "outliers"));
    if (n_outliers) printf(", %zu channels in 8 bits", n_outliers);
    printf("\n");
  }
}

enum sits_status compile_inspect(const char *path, struct sits_error *err)
{
  struct engine_file *file;
  enum sits_status status = engine_file_open(path, &file, err);
  if (status) return status;
  printf("engine file version %d, %" PRIu64 " bytes\n", ENGINE_FILE_VERSION, engine_file_bytes(file));
  print_meta(file);
  printf("tensors: %" PRId64 "\n", engine_file_n_tensors(file));
  for (int64_t i = 0; i < engine_file_n_tensors(file); i++) {
    const struct sits_utd *utd = engine_file_tensor_at(file, i);
    char quant[64], shape[64];
    size_t at = 0;
    for (int d = 0; d < utd->n_dims && at < sizeof shape; d++)
      at += (size_t)snprintf(shape + at, sizeof shape - at, "[%" PRId64 "]", utd->dims[d]);
    printf("  %-40s %-5s %-16s %s\n", utd->name, sits_dtype_info(utd->dtype)->name, shape, quant_text(utd, quant, sizeof quant));
  }
  printf("blobs: %" PRId64 "\n", engine_file_n_blobs(file));
  for (int64_t i = 0; i < engine_file_n_blobs(file); i++) {
    size_t n_bytes = 0;
    const char *name = engine_file_blob_name(file, i);
    engine_file_blob(file, name, &n_bytes);
    printf("  %-40s %zu bytes\n", name, n_bytes);
  }
  status = engine_file_verify(file, 0, -1, err);
  if (!status) printf("checksums: good\n");
  engine_file_close(file);
  return status;
}
