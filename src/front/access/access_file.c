/* The key file: YAML with a list `keys`, or one JSON object a line, with the same fields (README.md shows both). A reader for each
 * field; an unknown one is refused. Errors name the file, the entry's number and the field, never a value. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mapfile.h"
#include "config/yaml_json.h"
#include "front/access/access_internal.h"
#include "sits2026/engine.h"

#define MAX_FILE_BYTES (8u << 20)
#define MAX_NODES 400000
#define MAX_NAME_BYTES 64
#define MAX_QUOTA 1000000000000 /* 1e12 */
#define MAX_MODELS 64

struct entry { const char *path; int number; const json_t *object; struct access_grant *grant; };

__attribute__((format(printf, 4, 5))) static enum sits_status refuse(const struct entry *entry, const char *field, struct sits_error *err,
                                                                    const char *format, ...)
{
  char text[160];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return sits_fail_param(err, SITS_CONFIG, field, "%.80s: key %d: %.40s %s", entry->path, entry->number, field, text);
}

/* ---- fields ---- */

static bool take_hex(const char *text, unsigned char *out, size_t n)
{
  static const char digits[] = "0123456789abcdef";
  for (size_t i = 0; i < 2 * n; i++) {
    const char *at = text[i] ? strchr(digits, text[i]) : NULL;
    if (!at) return false;
    out[i / 2] = (unsigned char)(i % 2 ? out[i / 2] | (at - digits) : (at - digits) << 4);
  }
  return true;
}

static enum sits_status read_hash(struct entry *entry, const json_t *value, struct sits_error *err)
{
  const char *text = json_string_value(value);
  bool is_right = text && strlen(text) == 7 + 2 * ACCESS_SALT_BYTES + 1 + 2 * SHA256_BYTES && !strncmp(text, "sha256:", 7) &&
                  text[7 + 2 * ACCESS_SALT_BYTES] == ':' && take_hex(text + 7, entry->grant->salt, ACCESS_SALT_BYTES) &&
                  take_hex(text + 8 + 2 * ACCESS_SALT_BYTES, entry->grant->digest, SHA256_BYTES);
  return is_right ? SITS_OK : refuse(entry, "hash", err, "must be what sits2026d --hash-key prints");
}

static bool is_name(const json_t *value)
{
  const char *text = json_string_value(value);
  size_t n = text ? strspn(text, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.") : 0;
  return n > 0 && n <= MAX_NAME_BYTES && !text[n];
}

static enum sits_status read_tenant(struct entry *entry, const json_t *value, struct sits_error *err)
{
  if (!is_name(value)) return refuse(entry, "tenant", err, "must be text of 1 to %d letters, digits, '-', '_' and '.'", MAX_NAME_BYTES);
  entry->grant->tenant = arena_strndup(&entry->grant->arena, json_string_value(value), json_string_length(value));
  return entry->grant->tenant ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for the API keys");
}

static enum sits_status read_id(struct entry *entry, const json_t *value, struct sits_error *err)
{
  if (!is_name(value)) return refuse(entry, "id", err, "must be text of 1 to %d letters, digits, '-', '_' and '.'", MAX_NAME_BYTES);
  memcpy(entry->grant->id, json_string_value(value), json_string_length(value) + 1);
  return SITS_OK;
}

/* A list of words of a set, as bits. */
static enum sits_status read_words(const struct entry *entry, const char *field, const json_t *value, const char *const *words, int n_words,
                                   const char *text, unsigned *out, struct sits_error *err)
{
  unsigned bits = 0;
  size_t i;
  json_t *item;
  if (!json_is_array(value) || !json_array_size(value)) return refuse(entry, field, err, "must be a list of %s", text);
  json_array_foreach(value, i, item) {
    int w = 0;
    while (w < n_words && !(json_is_string(item) && !strcmp(json_string_value(item), words[w]))) w++;
    if (w == n_words) return refuse(entry, field, err, "must be a list of %s", text);
    bits |= 1u << w;
  }
  *out = bits;
  return SITS_OK;
}

static enum sits_status read_roles(struct entry *entry, const json_t *value, struct sits_error *err)
{
  static const char *const words[] = {"inference", "metrics", "admin"}; /* in the order of enum access_role's bits */
  return read_words(entry, "roles", value, words, 3, "inference, metrics, admin", &entry->grant->roles, err);
}

static enum sits_status read_classes(struct entry *entry, const json_t *value, struct sits_error *err)
{
  static const char *const words[SITS_CLASS_COUNT] = {[SITS_CLASS_HIGH] = "high", [SITS_CLASS_NORMAL] = "normal", [SITS_CLASS_LOW] = "low"};
  return read_words(entry, "classes", value, words, SITS_CLASS_COUNT, "high, normal, low", &entry->grant->classes, err);
}

static enum sits_status read_models(struct entry *entry, const json_t *value, struct sits_error *err)
{
  size_t i, n = json_array_size(value);
  json_t *item;
  if (!json_is_array(value) || !n || n > MAX_MODELS) return refuse(entry, "models", err, "must be a list of 1 to %d names", MAX_MODELS);
  const char **models = arena_calloc(&entry->grant->arena, n, sizeof *models);
  if (!models) return sits_fail(err, SITS_NOMEM, "no memory for the API keys");
  json_array_foreach(value, i, item) {
    if (!json_is_string(item) || !json_string_length(item)) return refuse(entry, "models", err, "must be a list of names");
    models[i] = arena_strndup(&entry->grant->arena, json_string_value(item), json_string_length(item));
    if (!models[i]) return sits_fail(err, SITS_NOMEM, "no memory for the API keys");
  }
  entry->grant->models = models;
  entry->grant->n_models = (int32_t)n;
  return SITS_OK;
}

static enum sits_status read_count(const struct entry *entry, const char *field, const json_t *value, int64_t *out, struct sits_error *err)
{
  int64_t count = json_is_integer(value) ? json_integer_value(value) : 0;
  if (count < 1 || count > MAX_QUOTA) return refuse(entry, field, err, "must be a whole number from 1 to 1e12");
  *out = count;
  return SITS_OK;
}

/* ---- entries ---- */

static enum sits_status read_field(struct entry *entry, const char *name, const json_t *value, struct sits_error *err)
{
  static const struct {
    const char *name;
    enum sits_status (*read)(struct entry *entry, const json_t *value, struct sits_error *err);
  } readers[] = {{"hash", read_hash},   {"tenant", read_tenant}, {"roles", read_roles},
               {"models", read_models}, {"classes", read_classes}, {"id", read_id}};
  struct access_grant *grant = entry->grant;
  const struct { const char *name; int64_t *at; } counts[] = {{"requests_per_minute", &grant->requests_per_minute},
                                                              {"tokens_per_minute", &grant->tokens_per_minute},
                                                              {"concurrent_calls", &grant->max_calls},
                                                              {"max_tokens", &grant->max_tokens}};
  for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
    if (!strcmp(name, readers[i].name)) return readers[i].read(entry, value, err);
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    if (!strcmp(name, counts[i].name)) return read_count(entry, name, value, counts[i].at, err);
  if (!strcmp(name, "comment")) return SITS_OK;
  return refuse(entry, "", err, "has an unknown field '%.40s'", name);
}

static enum sits_status fill_grant(struct entry *entry, struct sits_error *err)
{
  const char *name;
  json_t *value;
  static const char *const required[] = {"hash", "tenant", "roles"};
  if (!json_is_object(entry->object)) return refuse(entry, "", err, "must be a mapping of fields");
  for (int i = 0; i < 3; i++)
    if (!json_object_get(entry->object, required[i])) return refuse(entry, required[i], err, "is required");
  json_object_foreach((json_t *)entry->object, name, value) {
    enum sits_status status = read_field(entry, name, value, err);
    if (status) return status;
  }
  for (int i = 0; !json_object_get(entry->object, "id") && i < 6; i++) snprintf(entry->grant->id + 2 * i, 3, "%02x", entry->grant->salt[i]);
  return SITS_OK;
}

static enum sits_status add_entry(struct access_table *table, const char *path, int number, const json_t *object, struct sits_error *err)
{
  struct entry entry = {.path = path, .number = number, .object = object, .grant = access_grant_create()};
  if (!entry.grant) return sits_fail(err, SITS_NOMEM, "no memory for the API keys");
  enum sits_status status = table->n < ACCESS_MAX_KEYS ? fill_grant(&entry, err)
                                                       : refuse(&entry, "", err, "is over the limit of %d keys", ACCESS_MAX_KEYS);
  for (int32_t i = 0; !status && i < table->n; i++)
    if (!memcmp(table->grants[i]->digest, entry.grant->digest, SHA256_BYTES)) status = refuse(&entry, "hash", err, "is there twice");
  if (status) {
    access_release(entry.grant);
    return status;
  }
  return access_table_add(table, entry.grant) ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for the API keys");
}

static enum sits_status read_json_lines(const char *path, const struct mapfile *file, struct access_table *table, struct sits_error *err)
{
  const char *at = (const char *)file->data, *end = at + file->n_bytes;
  for (int number = 0; at < end;) {
    const char *line_end = memchr(at, '\n', (size_t)(end - at));
    size_t n = line_end ? (size_t)(line_end - at) : (size_t)(end - at), n_blank = 0;
    while (n_blank < n && strchr(" \t\r", at[n_blank])) n_blank++;
    if (n_blank < n) {
      json_t *object = NULL;
      struct sits_error why = {0};
      number++;
      if (json_parse(at, n, &json_limits_request, &object, &why))
        return sits_fail(err, SITS_CONFIG, "%.80s: key %d is not one line of JSON", path, number);
      enum sits_status status = add_entry(table, path, number, object, err);
      json_decref(object);
      if (status) return status;
    }
    at += line_end ? n + 1 : n;
  }
  return SITS_OK;
}

static enum sits_status read_yaml(const char *path, const struct mapfile *file, struct access_table *table, struct sits_error *err)
{
  json_t *root = NULL, *item;
  size_t i;
  enum sits_status status = yaml_to_json((const char *)file->data, file->n_bytes, MAX_NODES, path, &root, err);
  if (status) return status;
  const json_t *keys = json_object_get(root, "keys");
  if (!json_is_array(keys) || json_object_size(root) != 1)
    status = sits_fail(err, SITS_CONFIG, "%.150s: expected a list 'keys' and nothing else", path);
  else
    json_array_foreach(keys, i, item) {
      status = add_entry(table, path, (int)i + 1, item, err);
      if (status) break;
    }
  json_decref(root);
  return status;
}

/* Whether the file is one object a line: its first line is a JSON object by itself, and no document with a list of keys. */
static bool is_json_lines(const struct mapfile *file)
{
  const char *text = (const char *)file->data;
  size_t from = 0, to;
  while (from < file->n_bytes && strchr(" \t\r\n", text[from])) from++;
  if (from == file->n_bytes || text[from] != '{') return false;
  for (to = from; to < file->n_bytes && text[to] != '\n';) to++;
  json_t *first = NULL;
  if (json_parse(text + from, to - from, &json_limits_request, &first, NULL)) return false;
  bool has_list = json_object_get(first, "keys") != NULL;
  json_decref(first);
  return !has_list;
}

enum sits_status access_file_read(const char *path, struct access_table *table, struct sits_error *err)
{
  struct mapfile file;
  int32_t n_before = table->n;
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  if (file.n_bytes > MAX_FILE_BYTES) status = sits_fail(err, SITS_CONFIG, "%.150s: larger than 8 MiB", path);
  else if (is_json_lines(&file)) status = read_json_lines(path, &file, table, err);
  else status = read_yaml(path, &file, table, err);
  mapfile_close(&file);
  if (!status && table->n == n_before) status = sits_fail(err, SITS_CONFIG, "%.150s: there is no key in it", path);
  return status;
}
