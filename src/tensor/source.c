/* See source.h; source_engine.c opens engine files. A GGUF file is one reader; a Hugging Face directory is config.json, a list of its
 * files, and one or many safetensors readers whose tensors share one index. File names that the shard index gives are taken only as plain
 * names inside the directory. Entry point: source_open. */
#include "tensor/source.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "tensor/gguf.h"
#include "tensor/name_index.h"
#include "tensor/safetensors.h"
#include "tensor/source_internal.h"

enum { MAX_SHARDS = 4096, MAX_FILES = 16384 };

static const char single_file[] = "model.safetensors", shard_index[] = "model.safetensors.index.json";

/* ---- the directory ---- */

static enum sits_status no_memory(const struct source *s, struct sits_error *err)
{
  return sits_fail(err, SITS_NOMEM, "%s: out of memory", s->name);
}

static const char *base_name(const char *path)
{
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static enum sits_status add_file(struct source *s, const char *name, struct sits_error *err)
{
  if (s->n_files == MAX_FILES) return sits_fail(err, SITS_UNSUPPORTED, "%s: the directory holds more than %d files", s->name, MAX_FILES);
  if (s->n_files == s->files_capacity) {
    size_t capacity = s->files_capacity ? s->files_capacity * 2 : 32;
    const char **files = mem_realloc((void *)s->files, capacity * sizeof *files);
    if (!files) return no_memory(s, err);
    s->files = files;
    s->files_capacity = capacity;
  }
  size_t n_bytes = strlen(s->path) + strlen(name) + 2;
  char *path = arena_alloc(&s->arena, n_bytes);
  if (!path) return no_memory(s, err);
  snprintf(path, n_bytes, "%s/%s", s->path, name);
  s->files[s->n_files++] = path;
  return SITS_OK;
}

static enum sits_status list_files(struct source *s, struct sits_error *err)
{
  DIR *dir = opendir(s->path);
  if (!dir) return sits_fail(err, SITS_IO, "%s: %s", s->name, strerror(errno));
  enum sits_status status = SITS_OK;
  const struct dirent *entry;
  while (status == SITS_OK && (entry = readdir(dir)) != NULL) {
    struct stat st;
    if (fstatat(dirfd(dir), entry->d_name, &st, 0) == 0 && S_ISREG(st.st_mode)) status = add_file(s, entry->d_name, err);
  }
  closedir(dir);
  return status;
}

const char *source_hf_file(const struct source *s, const char *name)
{
  for (size_t i = 0; i < s->n_files; i++)
    if (strcmp(base_name(s->files[i]), name) == 0) return s->files[i];
  return NULL;
}

bool source_hf_has(const struct source *s, const char *name)
{
  size_t n_bytes;
  return s->engine ? engine_file_blob(s->engine, name, &n_bytes) != NULL : source_hf_file(s, name) != NULL;
}

enum sits_status source_hf_read(const struct source *s, const char *name, struct buf *out, struct sits_error *err)
{
  struct mapfile map = {0};
  const char *path = NULL;
  if (!source_hf_has(s, name)) return sits_fail(err, SITS_NOT_FOUND, "%s: no %s", s->name, name);
  if (s->engine) {
    map.data = engine_file_blob(s->engine, name, &map.n_bytes);
  } else {
    path = source_hf_file(s, name);
    enum sits_status status = mapfile_open(&map, path, err);
    if (status != SITS_OK) return status;
  }
  bool fits = buf_append(out, map.data ? (const void *)map.data : "", map.n_bytes);
  if (path) mapfile_close(&map);
  return fits ? SITS_OK : sits_fail(err, SITS_TOO_LARGE, "%s: %s is too large", s->name, name);
}

/* JSON that is too large or malformed is a malformed file here, not a bad request. */
static enum sits_status parse_json(const char *path, const struct json_limits *limits, json_t **out, struct sits_error *err)
{
  enum sits_status status = json_parse_file(path, limits, out, err);
  if (status != SITS_INVALID_JSON && status != SITS_TOO_LARGE) return status;
  if (err) err->status = SITS_FORMAT;
  return SITS_FORMAT;
}

/* ---- shards ---- */

static enum sits_status open_shard(struct source *s, const char *path, struct sits_error *err)
{
  if (s->n_shards == s->shards_capacity) {
    size_t capacity = s->shards_capacity ? s->shards_capacity * 2 : 8;
    struct safetensors **shards = mem_realloc(s->shards, capacity * sizeof *shards);
    if (!shards) return no_memory(s, err);
    s->shards = shards;
    s->shards_capacity = capacity;
  }
  enum sits_status status = safetensors_open(path, &s->shards[s->n_shards], err);
  if (status == SITS_OK) s->n_shards++;
  return status;
}

/* Each file that the index names, once, in the index's order. seen maps names to shard numbers. */
static enum sits_status open_indexed_shards(struct source *s, const json_t *weights, struct name_index *seen, struct sits_error *err)
{
  const char *tensor;
  json_t *value;
  json_object_foreach((json_t *)weights, tensor, value) {
    const char *file = json_string_value(value);
    char shown[NAME_INDEX_MAX_PRINTED], shown_file[NAME_INDEX_MAX_PRINTED];
    name_printable(shown, tensor, strlen(tensor));
    if (!file)
      return sits_fail_param(err, SITS_FORMAT, shown, "%s/%s: tensor '%s': its file is no string", s->name, shard_index, shown);
    if (name_index_find(seen, file, strlen(file)) >= 0) continue;
    name_printable(shown_file, file, strlen(file));
    size_t size = strlen(file), suffix = strlen(".safetensors");
    if (strlen(file) != json_string_length(value) || strchr(file, '/') || file[0] == '.' || size <= suffix ||
        strcmp(file + size - suffix, ".safetensors") != 0)
      return sits_fail_param(err, SITS_FORMAT, shown, "%s: tensor '%s': '%s' is no plain *.safetensors file name", shard_index, shown,
                             shown_file);
    const char *path = source_hf_file(s, file);
    if (!path)
      return sits_fail_param(err, SITS_NOT_FOUND, shown, "%s: tensor '%s': its file '%s' is missing", shard_index, shown, shown_file);
    if (s->n_shards == MAX_SHARDS) return sits_fail(err, SITS_UNSUPPORTED, "%s: more than %d shards", shard_index, MAX_SHARDS);
    enum sits_status status = open_shard(s, path, err);
    if (status != SITS_OK) return status;
    name_index_add(seen, file, size, (uint32_t)(s->n_shards - 1));
  }
  return SITS_OK;
}

static enum sits_status index_tensors(struct source *s, struct sits_error *err)
{
  int64_t n = 0;
  for (size_t i = 0; i < s->n_shards; i++) n += safetensors_n_tensors(s->shards[i]);
  if (n > 1 << 20) return sits_fail(err, SITS_UNSUPPORTED, "%s: %lld tensors are too many", s->name, (long long)n);
  s->tensors = mem_calloc((size_t)n, sizeof *s->tensors);
  if (!s->tensors || !name_index_init(&s->index, (uint64_t)n)) return no_memory(s, err);
  for (size_t i = 0; i < s->n_shards; i++)
    for (int64_t k = 0; k < safetensors_n_tensors(s->shards[i]); k++) {
      const struct sits_utd *t = safetensors_tensor_at(s->shards[i], k);
      if (!name_index_add(&s->index, t->name, strlen(t->name), (uint32_t)s->n_tensors)) {
        char shown[NAME_INDEX_MAX_PRINTED];
        name_printable(shown, t->name, strlen(t->name));
        return sits_fail_param(err, SITS_FORMAT, shown, "%s: tensor '%s' lies in two shards", s->name, shown);
      }
      s->tensors[s->n_tensors++] = t;
    }
  return SITS_OK;
}

/* Every tensor that the index promises is in the shard it names. */
static enum sits_status check_index(const struct source *s, const json_t *weights, const struct name_index *seen, struct sits_error *err)
{
  const char *tensor;
  json_t *value;
  json_object_foreach((json_t *)weights, tensor, value) {
    const char *file = json_string_value(value);
    int64_t shard = name_index_find(seen, file, strlen(file)), number = name_index_find(&s->index, tensor, strlen(tensor));
    bool is_there = false;
    if (number >= 0) { /* tensors of a shard lie in one array */
      int64_t first = 0;
      for (int64_t i = 0; i < shard; i++) first += safetensors_n_tensors(s->shards[i]);
      is_there = number >= first && number < first + safetensors_n_tensors(s->shards[shard]);
    }
    if (is_there) continue;
    char shown[NAME_INDEX_MAX_PRINTED], shown_file[NAME_INDEX_MAX_PRINTED];
    name_printable(shown, tensor, strlen(tensor));
    return sits_fail_param(err, SITS_FORMAT, shown, "%s: tensor '%s' is not in '%s'", shard_index, shown,
                           name_printable(shown_file, file, strlen(file)));
  }
  return SITS_OK;
}

static enum sits_status open_sharded(struct source *s, const char *index_path, struct sits_error *err)
{
  const struct json_limits limits = {.max_bytes = 64u << 20, .max_nodes = 4u << 20, .max_depth = 8};
  json_t *index = NULL;
  struct name_index seen = {0};
  enum sits_status status = parse_json(index_path, &limits, &index, err);
  if (status != SITS_OK) return status;
  const json_t *weights = json_object_get(index, "weight_map");
  if (!json_is_object(weights) || json_object_size(weights) == 0)
    status = sits_fail_param(err, SITS_FORMAT, "weight_map", "%s: weight_map is missing, empty or no object", shard_index);
  else if (!name_index_init(&seen, json_object_size(weights))) status = no_memory(s, err);
  if (status == SITS_OK) status = open_indexed_shards(s, weights, &seen, err);
  if (status == SITS_OK) status = index_tensors(s, err);
  if (status == SITS_OK) status = check_index(s, weights, &seen, err);
  name_index_fini(&seen);
  json_decref(index);
  return status;
}

static enum sits_status open_hf(struct source *s, struct sits_error *err)
{
  s->kind = SOURCE_HF;
  enum sits_status status = list_files(s, err);
  if (status != SITS_OK) return status;
  const char *config = source_hf_file(s, "config.json");
  if (!config) return sits_fail(err, SITS_NOT_FOUND, "%s: the directory has no config.json", s->name);
  status = parse_json(config, &json_limits_request, &s->config, err);
  if (status != SITS_OK) return status;
  if (!json_is_object(s->config)) return sits_fail(err, SITS_FORMAT, "%s: config.json is no object", s->name);
  const char *single = source_hf_file(s, single_file), *sharded = source_hf_file(s, shard_index);
  if (single) {
    status = open_shard(s, single, err);
    return status == SITS_OK ? index_tensors(s, err) : status;
  }
  if (sharded) return open_sharded(s, sharded, err);
  bool has_pickle = source_hf_file(s, "pytorch_model.bin") || source_hf_file(s, "pytorch_model.bin.index.json");
  return sits_fail(err, has_pickle ? SITS_UNSUPPORTED : SITS_NOT_FOUND, "%s: the directory has no %s and no %s%s", s->name, single_file,
                   shard_index, has_pickle ? " (PyTorch pickle files are not read)" : "");
}

/* ---- open and close ---- */

static enum sits_status open_gguf(struct source *s, struct sits_error *err)
{
  s->kind = SOURCE_GGUF;
  enum sits_status status = gguf_open(s->path, &s->gguf, err);
  if (status != SITS_OK) return status;
  uint64_t n_splits;
  if (gguf_get_u64(s->gguf, "split.count", &n_splits) && n_splits > 1)
    return sits_fail_param(err, SITS_UNSUPPORTED, "split.count", "%s: GGUF files split into %llu parts are not supported; join them first",
                           s->name, (unsigned long long)n_splits);
  return SITS_OK;
}

enum sits_status source_open(const char *path, struct source **out, struct sits_error *err)
{
  const char *tail = name_path_tail(path);
  struct stat st;
  if (stat(path, &st) != 0) return sits_fail(err, errno == ENOENT ? SITS_NOT_FOUND : SITS_IO, "%s: %s", tail, strerror(errno));
  if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) return sits_fail(err, SITS_IO, "%s: not a regular file", tail); /* nor wait on a FIFO */
  struct source *s = mem_calloc(1, sizeof *s);
  if (!s) return sits_fail(err, SITS_NOMEM, "%s: out of memory", tail);
  arena_init(&s->arena, 0);
  s->path = mem_strdup(path);
  enum sits_status status = SITS_OK;
  if (!s->path) {
    status = sits_fail(err, SITS_NOMEM, "%s: out of memory", tail);
  } else {
    for (size_t n = strlen(s->path); n > 1 && s->path[n - 1] == '/'; n--) s->path[n - 1] = '\0';
    s->name = name_path_tail(s->path);
    if (S_ISDIR(st.st_mode)) status = open_hf(s, err);
    else status = engine_file_is(path) ? source_open_engine(s, err) : open_gguf(s, err);
  }
  if (status == SITS_OK) *out = s;
  else source_close(s);
  return status;
}

void source_close(struct source *s)
{
  if (!s) return;
  gguf_close(s->gguf);
  engine_file_close(s->engine);
  name_index_fini(&s->index);
  mem_free((void *)s->tensors);
  for (size_t i = 0; i < s->n_shards; i++) safetensors_close(s->shards[i]);
  mem_free(s->shards);
  json_decref(s->config);
  mem_free((void *)s->files);
  arena_fini(&s->arena);
  mem_free(s->path);
  mem_free(s);
}

/* ---- access ---- */

enum source_kind source_kind(const struct source *s) { return s->kind; }
const char *source_path(const struct source *s) { return s->path; }
const struct gguf *source_gguf(const struct source *s) { return s->gguf; }
const json_t *source_hf_config(const struct source *s) { return s->config; }
int64_t source_n_tensors(const struct source *s) { return s->gguf && !s->engine ? gguf_n_tensors(s->gguf) : s->n_tensors; }
const struct engine_file *source_engine(const struct source *s) { return s->engine; }
const json_t *source_engine_meta(const struct source *s) { return s->engine ? engine_file_meta(s->engine) : NULL; }

const struct sits_utd *source_tensor_at(const struct source *s, int64_t index)
{
  if (s->gguf && !s->engine) return gguf_tensor_at(s->gguf, index);
  return index >= 0 && index < s->n_tensors ? s->tensors[index] : NULL;
}

const struct sits_utd *source_tensor(const struct source *s, const char *name)
{
  if (s->gguf && !s->engine) return gguf_tensor(s->gguf, name);
  int64_t number = name_index_find(&s->index, name, strlen(name));
  return number >= 0 ? s->tensors[number] : NULL;
}

void source_drop_pages(const struct source *s, const struct sits_utd *tensor)
{
  if (s->engine) engine_file_drop(s->engine, tensor);
  else if (s->gguf) gguf_drop_pages(s->gguf, tensor);
  for (size_t i = 0; i < s->n_shards; i++) safetensors_drop_pages(s->shards[i], tensor);
}

uint64_t source_file_bytes(const struct source *s)
{
  if (s->engine) return engine_file_bytes(s->engine);
  uint64_t n = s->gguf ? gguf_file_bytes(s->gguf) : 0;
  for (size_t i = 0; i < s->n_shards; i++) n += safetensors_file_bytes(s->shards[i]);
  return n;
}

uint64_t source_fingerprint(const struct source *s)
{
  uint64_t hash = source_file_bytes(s);
  for (int64_t i = 0; i < source_n_tensors(s); i++) {
    const struct sits_utd *t = source_tensor_at(s, i);
    hash = hash_mix(hash_bytes(hash, t->name, strlen(t->name)), (uint64_t)t->dtype);
    hash = hash_bulk(hash, t->data, t->n_bytes);
    source_drop_pages(s, t);
  }
  return hash;
}
