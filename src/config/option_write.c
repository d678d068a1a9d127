/* Output of the option table: YAML (values or commented sample) and --help. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "config/option.h"
#include "config/option_internal.h"

static const char *const kind_names[] = {[OPTION_STRING] = "text", [OPTION_INT] = "integer", [OPTION_FLOAT] = "number",
                                         [OPTION_BOOL] = "true or false", [OPTION_BYTES] = "size", [OPTION_ENUM] = "choice"};

/* The value in force as text; NULL for an unset string. */
static const char *value_text(const struct option_set *set, const struct option_spec *spec, char *scratch, size_t n_bytes)
{
  const void *at = (const char *)set->values + spec->offset;
  switch (spec->kind) {
  case OPTION_INT: case OPTION_BYTES: snprintf(scratch, n_bytes, "%lld", (long long)*(const int64_t *)at); return scratch;
  case OPTION_FLOAT: /* as short as it can be read back */
    for (int digits = 15; digits <= 17; digits++) {
      snprintf(scratch, n_bytes, "%.*g", digits, *(const double *)at);
      if (strtod(scratch, NULL) == *(const double *)at) break;
    }
    return scratch;
  case OPTION_BOOL: return *(const bool *)at ? "true" : "false";
  default: break;
  }
  const char *text = *(const char *const *)at;
  return text && spec->flags & OPTION_SECRET ? OPTION_MASK : text;
}

static void append_range(const struct option_spec *spec, struct buf *out)
{
  if (spec->kind == OPTION_ENUM) buf_printf(out, "%s", spec->choices);
  else buf_printf(out, "%s", kind_names[spec->kind]);
  if (spec->kind == OPTION_INT || spec->kind == OPTION_FLOAT) buf_printf(out, " %.15g..%.15g", spec->min, spec->max);
  if (spec->unit[0]) buf_printf(out, ", %s", spec->unit);
}

/* Break help text into lines of at most `width` characters, each after `prefix`. */
static void append_wrapped(const char *text, const char *prefix, size_t width, struct buf *out)
{
  while (*text) {
    size_t n = strlen(text);
    if (n > width) {
      n = width;
      while (n > 1 && text[n] != ' ') n--;
    }
    buf_printf(out, "%s%.*s\n", prefix, (int)n, text);
    text += n;
    while (*text == ' ') text++;
  }
}

/* Characters that a YAML reader takes for ends of lines, or refuses. */
static bool is_yaml_special(uint32_t c)
{
  return (c >= 0x7f && c < 0xa0) || c == 0x2028 || c == 0x2029 || c == 0xfeff || c == 0xfffe || c == 0xffff;
}

static void append_yaml_quoted(const char *text, struct buf *out)
{
  size_t n_bytes = strlen(text), length = 1;
  buf_append_char(out, '"');
  for (size_t at = 0; at < n_bytes; at += length) {
    bool is_valid = utf8_sequence(text + at, n_bytes - at, &length) == UTF8_VALID;
    uint32_t c = is_valid ? utf8_decode(text + at, n_bytes - at, &length) : 0;
    if (is_yaml_special(c)) buf_printf(out, "\\u%04x", c);
    else buf_append_json_escaped(out, text + at, length);
  }
  buf_append_char(out, '"');
}

const char *option_not_utf8(const struct option_set *set)
{
  for (int i = 0; i < set->n_specs; i++) {
    char scratch[64];
    const char *text = value_text(set, &set->specs[i], scratch, sizeof scratch);
    if (text && !utf8_is_valid(text, strlen(text))) return set->specs[i].name;
  }
  return NULL;
}

/* Quote a string for YAML when it could be read as something else. */
static void append_yaml_value(const struct option_spec *spec, const char *text, struct buf *out)
{
  if (!text || !*text) {
    buf_append_text(out, "\"\"");
  } else if (spec->kind == OPTION_STRING) {
    append_yaml_quoted(text, out);
  } else {
    buf_append_text(out, text);
  }
}

bool option_write_yaml(const struct option_set *set, bool sample, struct buf *out)
{
  const char *section = NULL;
  for (int i = 0; i < set->n_specs; i++) {
    const struct option_spec *spec = &set->specs[i];
    char scratch[64], env[96];
    if (!section || strcmp(section, spec->section) != 0) buf_printf(out, "%s# == %s ==\n", i ? "\n" : "", spec->section);
    section = spec->section;
    if (sample) {
      option_env_name(spec->name, env, sizeof env);
      buf_append_text(out, "\n");
      append_wrapped(spec->help, "# ", 110, out);
      buf_append_text(out, "# (");
      append_range(spec, out);
      buf_printf(out, "; environment %s)\n#", env);
    }
    const char *text = sample ? spec->default_text : value_text(set, spec, scratch, sizeof scratch);
    if (!sample && !text) buf_append_char(out, '#'); /* not set: a secret that is given as "" would be refused */
    buf_printf(out, "%s: ", spec->name);
    append_yaml_value(spec, text, out);
    buf_append_char(out, '\n');
  }
  return !out->failed;
}

bool option_write_help(const struct option_set *set, struct buf *out)
{
  const char *section = NULL;
  for (int i = 0; i < set->n_specs; i++) {
    const struct option_spec *spec = &set->specs[i];
    if (!section || strcmp(section, spec->section) != 0) buf_printf(out, "%s%s:\n", i ? "\n" : "", spec->section);
    section = spec->section;
    buf_printf(out, "  --%s", spec->name);
    if (spec->kind != OPTION_BOOL) {
      buf_append_text(out, " <");
      append_range(spec, out);
      buf_append_text(out, ">");
    }
    if (spec->default_text[0]) buf_printf(out, "  (default %s)", spec->default_text);
    buf_append_char(out, '\n');
    append_wrapped(spec->help, "      ", 92, out);
  }
  return !out->failed;
}
