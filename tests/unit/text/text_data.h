/* Shared data for the text tests: where it is, whole files, tokenizer.json unpacked where it is stored compressed.
 * Everything is looked for under $SITS_SHARED_DATA, else ../shared/data; tests skip what is absent. */
#ifndef SITS_TESTS_TEXT_DATA_H
#define SITS_TESTS_TEXT_DATA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sha256.h"
#include "text/tokenizer.h"

/* Path below the data directory; NULL when the file is absent. Four results are alive at a time. */
static inline const char *data_path(const char *name)
{
  static char paths[4][512];
  static int next;
  const char *dir = getenv("SITS_SHARED_DATA");
  char *path = paths[next++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", dir && *dir ? dir : "../shared/data", name);
  return access(path, R_OK) == 0 ? path : NULL;
}

/* Whole file or a command's output; free() it. */
static inline char *read_stream(FILE *file, size_t *n_bytes)
{
  size_t capacity = 1 << 16, n = 0;
  char *text = malloc(capacity + 1);
  assert_non_null(text);
  for (size_t got; (got = fread(text + n, 1, capacity - n, file)) > 0;) {
    n += got;
    if (n == capacity) assert_non_null(text = realloc(text, (capacity *= 2) + 1));
  }
  text[n] = '\0';
  *n_bytes = n;
  return text;
}

static inline char *read_whole(const char *path, size_t *n_bytes)
{
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  char *text = read_stream(file, n_bytes);
  fclose(file);
  return text;
}

/* Path of tokenizers/NAME/tokenizer.json, unpacked into a temporary file when only the .gz is there (then *temporary is true and the caller
 * unlinks it). NULL: absent. */
static inline const char *tokenizer_json_path(const char *name, char path[64], bool *is_temporary)
{
  char relative[128], command[640];
  *is_temporary = false;
  bool is_model = strcmp(name, "stories260K") == 0;
  snprintf(relative, sizeof relative, is_model ? "models/%s/hf/tokenizer.json" : "tokenizers/%s/tokenizer.json", name);
  const char *plain = data_path(relative);
  if (plain) return plain;
  snprintf(relative, sizeof relative, "tokenizers/%s/tokenizer.json.gz", name);
  const char *packed = data_path(relative);
  if (!packed) return NULL;
  snprintf(path, 64, "/tmp/sits_tokenizer_XXXXXX");
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  snprintf(command, sizeof command, "gzip -dc '%s' > '%s'", packed, path);
  assert_int_equal(system(command), 0);
  *is_temporary = true;
  return path;
}

/* Loaded tokenizer of that name; NULL when the data is absent. */
static inline struct tokenizer *load_named(const char *name)
{
  char temporary[64];
  bool is_temporary;
  struct sits_error err = {0};
  struct tokenizer *tokenizer = NULL;
  const char *path = tokenizer_json_path(name, temporary, &is_temporary);
  if (!path) return NULL;
  enum sits_status status = tokenizer_load_json(path, &tokenizer, &err);
  if (is_temporary) unlink(path);
  if (status) fail_msg("%s: %s", name, err.text);
  return tokenizer;
}

/* Lower-case hex SHA-256 of ids as little-endian u32 (this test suite runs on little-endian machines). */
static inline void ids_sha256(const struct token_list *ids, char hex[SHA256_HEX_BYTES])
{
  sha256_hex(ids->ids, (size_t)ids->n * sizeof *ids->ids, hex);
}

#endif
