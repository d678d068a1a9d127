/* The option table's reader: assignment with checks, arguments and environment. YAML is in option_yaml.c, output in option_write.c. */
#include "config/option.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "config/option_internal.h"

static void *field(const struct option_set *set, const struct option_spec *spec) { return (char *)set->values + spec->offset; }

static const struct option_spec *find(const struct option_set *set, const char *name)
{
  for (int i = 0; i < set->n_specs; i++)
    if (strcmp(set->specs[i].name, name) == 0) return &set->specs[i];
  return NULL;
}

/* Levenshtein distance of two short words, capped by the row buffer. */
static int distance(const char *a, const char *b)
{
  enum { MOST = 64 };
  size_t n = strlen(b);
  if (n >= MOST || strlen(a) >= MOST) return MOST;
  int row[MOST + 1];
  for (size_t j = 0; j <= n; j++) row[j] = (int)j;
  for (size_t i = 1; a[i - 1]; i++) {
    int diagonal = row[0];
    row[0] = (int)i;
    for (size_t j = 1; j <= n; j++) {
      int best = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      if (row[j] + 1 < best) best = row[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      row[j] = best;
    }
  }
  return row[n];
}

static enum sits_status unknown(const struct option_set *set, const char *name, const char *origin, struct sits_error *err)
{
  const char *nearest = NULL;
  int best = 4;
  for (int i = 0; i < set->n_specs; i++) {
    int d = distance(name, set->specs[i].name);
    if (d < best) {
      best = d;
      nearest = set->specs[i].name;
    }
  }
  if (nearest)
    return sits_fail_param(err, SITS_CONFIG, name, "%s: unknown option '%.60s' (did you mean '%s'?)", origin, name, nearest);
  return sits_fail_param(err, SITS_CONFIG, name, "%s: unknown option '%.60s'", origin, name);
}

/* A decimal number that fills the text. Bytes take a binary suffix. */
static bool parse_number(const char *text, enum option_kind kind, double *out)
{
  char *end;
  errno = 0;
  double value = strtod(text, &end);
  if (end == text || errno == ERANGE || !isfinite(value)) return false;
  if (kind == OPTION_BYTES && *end) {
    static const char suffixes[] = "KMGT";
    const char *at = strchr(suffixes, toupper((unsigned char)*end));
    if (!at || !*at) return false;
    for (int i = 0; i <= (int)(at - suffixes); i++) value *= 1024;
    end++;
    if ((end[0] == 'i' && end[1] == 'B') || end[0] == 'B') end += end[0] == 'i' ? 2 : 1;
  }
  if (*end || (kind != OPTION_FLOAT && (value != floor(value) || fabs(value) > 9007199254740992.0))) return false;
  *out = value;
  return true;
}

static bool is_choice(const char *choices, const char *text)
{
  size_t n = strcspn(text, "|"); /* several at once are none */
  for (const char *at = choices; n && !text[n] && at; at = strchr(at, '|')) {
    if (*at == '|') at++;
    if (strncmp(at, text, n) == 0 && (at[n] == '|' || !at[n])) return true;
  }
  return false;
}

static enum sits_status assign_number(const struct option_set *set, const struct option_spec *spec, const char *text, const char *origin,
                                      struct sits_error *err)
{
  static const char *const what[] = {[OPTION_INT] = "an integer", [OPTION_FLOAT] = "a number",
                                     [OPTION_BYTES] = "a size such as 512M or 2G"};
  double value;
  if (!parse_number(text, spec->kind, &value))
    return sits_fail_param(err, SITS_CONFIG, spec->name, "%s: %s takes %s, not '%.40s'", origin, spec->name, what[spec->kind], text);
  if (value < spec->min || value > spec->max)
    return sits_fail_param(err, SITS_CONFIG, spec->name, "%s: %s = %.40s is outside %.15g..%.15g%s%s", origin, spec->name, text, spec->min,
                           spec->max, spec->unit[0] ? " " : "", spec->unit);
  if (spec->kind == OPTION_FLOAT) *(double *)field(set, spec) = value;
  else *(int64_t *)field(set, spec) = (int64_t)value;
  return SITS_OK;
}

static enum sits_status assign_bool(const struct option_set *set, const struct option_spec *spec, const char *text, const char *origin,
                                    struct sits_error *err)
{
  static const char *const words[] = {"false", "true", "no", "yes", "off", "on", "0", "1"};
  for (int i = 0; i < 8; i++) {
    if (strcmp(text, words[i]) != 0) continue;
    *(bool *)field(set, spec) = i & 1;
    return SITS_OK;
  }
  return sits_fail_param(err, SITS_CONFIG, spec->name, "%s: %s takes true or false, not '%.40s'", origin, spec->name, text);
}

/* An empty secret is a mistake (an unset variable in a script), and would leave open what was to be locked; the mask is what --print-config
 * shows in place of a secret, and anyone may know it. */
static enum sits_status check_secret(const struct option_spec *spec, const char *text, const char *origin, struct sits_error *err)
{
  if (!*text)
    return sits_fail_param(err, SITS_CONFIG, spec->name, "%s: %s is empty; leave the option out if none is wanted", origin, spec->name);
  if (!strcmp(text, OPTION_MASK))
    return sits_fail_param(err, SITS_CONFIG, spec->name, "%s: %s holds the mask that is printed in its place", origin, spec->name);
  return SITS_OK;
}

static enum sits_status assign_spec(struct option_set *set, const struct option_spec *spec, const char *text, const char *origin,
                                    struct sits_error *err)
{
  switch (spec->kind) {
  case OPTION_INT: case OPTION_FLOAT: case OPTION_BYTES: return assign_number(set, spec, text, origin, err);
  case OPTION_BOOL: return assign_bool(set, spec, text, origin, err);
  case OPTION_ENUM:
    if (!is_choice(spec->choices, text))
      return sits_fail_param(err, SITS_CONFIG, spec->name, "%s: %s takes one of %s, not '%.40s'", origin, spec->name,
                             spec->choices, text);
    break;
  case OPTION_STRING: break;
  }
  char *copy = NULL;
  if (*text || spec->kind == OPTION_ENUM) {
    copy = arena_strndup(&set->arena, text, strlen(text));
    if (!copy) return sits_fail(err, SITS_NOMEM, "out of memory");
  }
  *(const char **)field(set, spec) = copy;
  return SITS_OK;
}

enum sits_status option_set_init(struct option_set *set, const struct option_spec *specs, int n_specs, void *values, struct sits_error *err)
{
  *set = (struct option_set){.specs = specs, .n_specs = n_specs, .values = values};
  arena_init(&set->arena, 1u << 20);
  set->is_set = mem_calloc((size_t)n_specs, sizeof *set->is_set);
  enum sits_status status = set->is_set ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  for (int i = 0; status == SITS_OK && i < n_specs; i++) status = assign_spec(set, &specs[i], specs[i].default_text, "default", err);
  if (status) option_set_fini(set);
  return status;
}

void option_set_fini(struct option_set *set)
{
  arena_fini(&set->arena);
  mem_free(set->is_set);
  set->is_set = NULL;
}

enum sits_status option_assign(struct option_set *set, const char *name, const char *text, const char *origin, struct sits_error *err)
{
  const struct option_spec *spec = find(set, name);
  if (!spec) return unknown(set, name, origin, err);
  enum sits_status status = spec->flags & OPTION_SECRET ? check_secret(spec, text, origin, err) : SITS_OK;
  if (!status) status = assign_spec(set, spec, text, origin, err);
  if (status == SITS_OK) set->is_set[spec - set->specs] = true;
  return status;
}

bool option_is_set(const struct option_set *set, const char *name)
{
  const struct option_spec *spec = find(set, name);
  return spec && set->is_set[spec - set->specs];
}

void option_env_name(const char *name, char *out, size_t n_bytes)
{
  size_t used = (size_t)snprintf(out, n_bytes, "SITS_%s", name);
  for (size_t i = 0; i < used && i < n_bytes; i++) out[i] = out[i] == '-' ? '_' : (char)toupper((unsigned char)out[i]);
}

enum sits_status option_load_env(struct option_set *set, struct sits_error *err)
{
  for (int i = 0; i < set->n_specs; i++) {
    char name[96];
    option_env_name(set->specs[i].name, name, sizeof name);
    const char *text = getenv(name);
    if (!text) continue;
    enum sits_status status = option_assign(set, set->specs[i].name, text, "environment", err);
    if (status) return status;
  }
  return SITS_OK;
}

static const char origin_args[] = "command line";

/* One flag without "--"; sets *used_next when the following word was its value. */
static enum sits_status parse_flag(struct option_set *set, const char *word, const char *next, bool *used_next, struct sits_error *err)
{
  char name[96];
  size_t n = strcspn(word, "=");
  *used_next = false;
  if (n >= sizeof name) return sits_fail(err, SITS_CONFIG, "%s: option name too long", origin_args);
  memcpy(name, word, n);
  name[n] = '\0';
  if (word[n] == '=') return option_assign(set, name, word + n + 1, origin_args, err);
  const struct option_spec *spec = find(set, name);
  if (!spec && strncmp(name, "no-", 3) == 0) {
    const struct option_spec *negated = find(set, name + 3);
    if (negated && negated->kind == OPTION_BOOL) return option_assign(set, name + 3, "false", origin_args, err);
  }
  if (!spec) return unknown(set, name, origin_args, err);
  if (spec->kind == OPTION_BOOL) return option_assign(set, name, "true", origin_args, err);
  if (!next) return sits_fail_param(err, SITS_CONFIG, name, "%s: --%s needs a value", origin_args, name);
  *used_next = true;
  return option_assign(set, name, next, origin_args, err);
}

enum sits_status option_parse_args(struct option_set *set, int argc, char *const *argv, int first, const char **positional,
                                   struct sits_error *err)
{
  bool has_positional = false;
  for (int i = first; i < argc; i++) {
    if (strncmp(argv[i], "--", 2) != 0 || !argv[i][2]) {
      if (!positional || has_positional) return sits_fail(err, SITS_CONFIG, "%s: unexpected word '%.60s'", origin_args, argv[i]);
      *positional = argv[i];
      has_positional = true;
      continue;
    }
    bool used_next;
    enum sits_status status = parse_flag(set, argv[i] + 2, i + 1 < argc ? argv[i + 1] : NULL, &used_next, err);
    if (status) return status;
    i += used_next;
  }
  return SITS_OK;
}
