/* Where finished matrices wait until the file is written: spool.bin, one after the other, and journal.jsonl, one line a matrix. So memory
 * holds one matrix at a time, and a run that was cut goes on where it stopped when it is given the same folder (--work). The first line is
 * a key of everything that decides the result; with another key the folder starts anew. Without a folder the spool is a temporary file.
 * Entry points: compile_fingerprint, compile_journal_open, compile_journal_put, compile_journal_take, compile_journal_map,
 * compile_journal_close. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "tools/compile/compile.h"

#define SPOOL_ALIGN 64

static enum sits_status io_error(const char *path, struct sits_error *err)
{
  return sits_fail(err, SITS_IO, "%.150s: %s", path, strerror(errno));
}

enum sits_status compile_fingerprint(const struct source *source, const char *text_path, uint64_t *out, struct sits_error *err)
{
  struct mapfile text = {0};
  if (!source) return sits_fail_param(err, SITS_UNSUPPORTED, "model", "a synthetic model has no weights to work on");
  const enum sits_status status = text_path ? mapfile_open(&text, text_path, err) : SITS_OK;
  if (status) return status;
  *out = hash_bulk(source_fingerprint(source), text.data, text.n_bytes);
  mapfile_close(&text);
  return SITS_OK;
}

/* Rows of an earlier run with this key; a torn last line ends them. */
static enum sits_status read_rows(struct compile_journal *j, const char *key, struct sits_error *err)
{
  struct mapfile file;
  if (access(j->journal_path, R_OK) != 0) return SITS_OK;
  enum sits_status status = mapfile_open(&file, j->journal_path, err);
  if (status) return status;
  struct stat spool;
  const uint64_t spool_bytes = stat(j->spool_path, &spool) == 0 ? (uint64_t)spool.st_size : 0;
  const char *text = (const char *)file.data, *end = text + file.n_bytes, *stop;
  for (bool is_first = true; text && (stop = memchr(text, '\n', (size_t)(end - text))); text = stop + 1, is_first = false) {
    json_t *row = NULL;
    struct sits_error ignored;
    if (json_parse(text, (size_t)(stop - text), &json_limits_request, &row, &ignored)) break;
    const char *name = json_string_value(json_object_get(row, "tensor")), *old_key = json_string_value(json_object_get(row, "key"));
    const uint64_t row_end = (uint64_t)json_integer_value(json_object_get(row, "end"));
    const bool is_good = is_first ? old_key && strcmp(old_key, key) == 0 : name && row_end <= spool_bytes && row_end >= j->n_bytes;
    if (is_good && !is_first) {
      json_object_set(j->done, name, row);
      j->n_bytes = row_end;
    }
    json_decref(row);
    if (!is_good) break;
  }
  mapfile_close(&file);
  return SITS_OK;
}

/* The journal anew: its key and the rows that hold. */
static bool rewrite(struct compile_journal *j, const char *key)
{
  const char *name;
  json_t *row;
  j->lines = fopen(j->journal_path, "wb");
  bool ok = j->lines && fprintf(j->lines, "{\"key\": \"%s\"}\n", key) > 0;
  json_object_foreach(j->done, name, row)
    ok = ok && json_dumpf(row, j->lines, JSON_COMPACT | JSON_REAL_PRECISION(17)) == 0 && fputc('\n', j->lines) != EOF;
  return ok && fflush(j->lines) == 0;
}

enum sits_status compile_journal_open(struct compile_journal *j, const char *folder, const char *key, struct sits_error *err)
{
  *j = (struct compile_journal){.done = json_object()};
  if (!j->done) return sits_fail(err, SITS_NOMEM, "out of memory");
  const char *tmp = getenv("TMPDIR");
  if (!folder) {
    snprintf(j->spool_path, sizeof j->spool_path, "%.4000s/sits2026-spool-XXXXXX", tmp ? tmp : "/tmp");
    const int fd = mkstemp(j->spool_path);
    if (fd < 0) return io_error(j->spool_path, err);
    j->spool = fdopen(fd, "w+b");
    if (!j->spool) close(fd);
    return j->spool ? SITS_OK : io_error(j->spool_path, err);
  }
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) return io_error(folder, err);
  snprintf(j->spool_path, sizeof j->spool_path, "%.4000s/spool.bin", folder);
  snprintf(j->journal_path, sizeof j->journal_path, "%.4000s/journal.jsonl", folder);
  const enum sits_status status = read_rows(j, key, err);
  if (status) return status;
  j->n_resumed = (int64_t)json_object_size(j->done);
  j->spool = fopen(j->spool_path, j->n_bytes > 0 ? "r+b" : "w+b");
  if (!j->spool || fseeko(j->spool, (off_t)j->n_bytes, SEEK_SET) != 0) return io_error(j->spool_path, err);
  return rewrite(j, key) ? SITS_OK : io_error(j->journal_path, err);
}

static bool spool_part(struct compile_journal *j, void **owned, uint64_t n_bytes, uint64_t *at)
{
  static const char zeros[SPOOL_ALIGN];
  const uint64_t pad = (SPOOL_ALIGN - n_bytes % SPOOL_ALIGN) % SPOOL_ALIGN;
  *at = j->n_bytes;
  if (!*owned) return true;
  if (fwrite(*owned, 1, n_bytes, j->spool) != n_bytes || fwrite(zeros, 1, pad, j->spool) != pad) return false;
  j->n_bytes += n_bytes + pad;
  mem_free(*owned);
  *owned = NULL;
  return true;
}

enum sits_status compile_journal_put(struct compile_journal *j, struct compile_matrix *m, struct sits_error *err)
{
  struct quant_tensor *t = &m->made;
  const uint64_t side = (uint64_t)(engine_file_n_groups(&t->utd) > 0 ? engine_file_n_groups(&t->utd) : 0) * sizeof(uint16_t);
  m->is_spooled = t->data != NULL;
  if (!spool_part(j, &t->data, t->utd.n_bytes, &m->at[0]) || !spool_part(j, &t->scales, side, &m->at[1]) ||
      !spool_part(j, &t->minimums, side, &m->at[2]) || fflush(j->spool) != 0)
    return io_error(j->spool_path, err);
  if (!j->lines) return SITS_OK;
  json_t *row = json_pack("{ss ss si sb sb sb sf sf sf sf sI sI sI sI}", "tensor", t->utd.name, "dtype",
                          sits_dtype_info(t->utd.dtype)->name, "group", t->utd.quant == SITS_QUANT_GROUP ? t->utd.group_size : 0,
                          "minimum", t->utd.minimums != NULL, "kept",
                          t->is_kept, "spooled", m->is_spooled, "norm", t->norm, "error", t->error, "bound", t->bound, "output_error",
                          m->output_error, "data", (json_int_t)m->at[0], "scales", (json_int_t)m->at[1], "minimums",
                          (json_int_t)m->at[2], "end", (json_int_t)j->n_bytes);
  const bool ok = row && json_dumpf(row, j->lines, JSON_COMPACT | JSON_REAL_PRECISION(17)) == 0 && fputc('\n', j->lines) != EOF &&
                  fflush(j->lines) == 0;
  json_decref(row);
  return ok ? SITS_OK : io_error(j->journal_path, err);
}

bool compile_journal_take(const struct compile_journal *j, struct compile_matrix *m)
{
  const json_t *row = json_object_get(j->done, m->source->name);
  const char *name = json_string_value(json_object_get(row, "dtype"));
  if (!row || !name) return false;
  enum sits_dtype dtype = SITS_DTYPE_F16;
  for (int d = 0; d < SITS_DTYPE_COUNT; d++)
    if (strcmp(sits_dtype_info((enum sits_dtype)d)->name, name) == 0) dtype = (enum sits_dtype)d;
  m->is_spooled = json_is_true(json_object_get(row, "spooled"));
  m->made = (struct quant_tensor){.is_kept = json_is_true(json_object_get(row, "kept")),
                                  .norm = json_number_value(json_object_get(row, "norm")),
                                  .error = json_number_value(json_object_get(row, "error")),
                                  .bound = json_number_value(json_object_get(row, "bound"))};
  m->output_error = json_number_value(json_object_get(row, "output_error"));
  m->at[0] = (uint64_t)json_integer_value(json_object_get(row, "data"));
  m->at[1] = (uint64_t)json_integer_value(json_object_get(row, "scales"));
  m->at[2] = (uint64_t)json_integer_value(json_object_get(row, "minimums"));
  if (!m->is_spooled) m->made.utd = *m->source;
  else quant_describe(m->source, dtype, (int32_t)json_integer_value(json_object_get(row, "group")), &m->made.utd);
  m->has_minimum = json_is_true(json_object_get(row, "minimum"));
  m->is_done = true;
  return true;
}

enum sits_status compile_journal_map(struct compile_journal *j, struct compile_matrix *matrices, int64_t n, struct sits_error *err)
{
  const enum sits_status status = mapfile_open(&j->map, j->spool_path, err);
  for (int64_t i = 0; i < n && !status; i++) {
    struct compile_matrix *m = &matrices[i];
    if (!m->is_spooled) continue;
    struct sits_utd *u = &m->made.utd;
    u->place = SITS_PLACE_MAPPED_FILE;
    u->data = j->map.data + m->at[0];
    u->scales = u->quant != SITS_QUANT_NONE ? j->map.data + m->at[1] : NULL;
    u->minimums = m->has_minimum ? j->map.data + m->at[2] : NULL;
  }
  return status;
}

void compile_journal_close(struct compile_journal *j, bool is_finished)
{
  mapfile_close(&j->map);
  if (j->spool) fclose(j->spool);
  if (j->lines) fclose(j->lines);
  json_decref(j->done);
  if (*j->spool_path && (is_finished || !*j->journal_path)) unlink(j->spool_path);
  if (*j->journal_path && is_finished) unlink(j->journal_path);
  *j = (struct compile_journal){0};
}
