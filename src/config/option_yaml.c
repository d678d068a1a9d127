/* YAML configuration through libyaml: one mapping of option names to scalars. Sequences and nested mappings are refused, each with
 * its line. */
#include <stdio.h>
#include <string.h>
#include <yaml.h>

#include "base/mapfile.h"
#include "config/option.h"

struct reader {
  struct option_set *set;
  const char *origin;      /* path */
  yaml_parser_t parser;
  char seen[8192];         /* names met, each followed by '\n' */
};

static void where(const struct reader *reader, size_t line, char *out, size_t n_bytes)
{
  snprintf(out, n_bytes, "%.200s:%zu", reader->origin, line + 1);
}

static enum sits_status next_event(struct reader *reader, yaml_event_t *event, struct sits_error *err)
{
  if (yaml_parser_parse(&reader->parser, event)) return SITS_OK;
  if (reader->parser.error == YAML_MEMORY_ERROR) return sits_fail(err, SITS_NOMEM, "%.150s: out of memory", reader->origin);
  return sits_fail(err, SITS_CONFIG, "%.150s:%zu: %s", reader->origin, reader->parser.problem_mark.line + 1,
                   reader->parser.problem ? reader->parser.problem : "cannot be read");
}

/* The event's text, which lives as long as it; refuse what is no scalar, or longer than n_most bytes. */
static enum sits_status take_scalar(const struct reader *reader, const yaml_event_t *event, const char *what, size_t n_most,
                                    const char **text, struct sits_error *err)
{
  size_t line = event->start_mark.line + 1;
  if (event->type != YAML_SCALAR_EVENT)
    return sits_fail(err, SITS_CONFIG, "%.150s:%zu: expected %s, a single value", reader->origin, line, what);
  size_t n = event->data.scalar.length;
  const char *value = (const char *)event->data.scalar.value;
  if (n > n_most || memchr(value, 0, n))
    return sits_fail(err, SITS_CONFIG, "%.150s:%zu: %s is too long or holds a NUL", reader->origin, line, what);
  bool is_null = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE && (strcmp(value, "~") == 0 || strcmp(value, "null") == 0);
  *text = is_null ? "" : value; /* libyaml ends it with a NUL */
  return SITS_OK;
}

static enum sits_status note_seen(struct reader *reader, const char *name, const char *at, struct sits_error *err)
{
  char marked[256];
  int n = snprintf(marked, sizeof marked, "\n%s\n", name);
  size_t used = strlen(reader->seen);
  if (n < 0 || (size_t)n >= sizeof marked || used + (size_t)n >= sizeof reader->seen)
    return sits_fail(err, SITS_CONFIG, "%s: too many options", at);
  if (strstr(reader->seen, marked)) return sits_fail_param(err, SITS_CONFIG, name, "%s: '%s' is given twice", at, name);
  memcpy(reader->seen + used, marked, (size_t)n + 1);
  return SITS_OK;
}

static enum sits_status read_pair(struct reader *reader, const yaml_event_t *key, struct sits_error *err)
{
  enum { NAME_BYTES = 95 };
  const char *name = NULL, *value = NULL;
  char at[256];
  enum sits_status status = take_scalar(reader, key, "an option name", NAME_BYTES, &name, err);
  if (status) return status;
  where(reader, key->start_mark.line, at, sizeof at);
  status = note_seen(reader, name, at, err);
  if (status) return status;
  yaml_event_t event;
  status = next_event(reader, &event, err);
  if (status) return status;
  status = take_scalar(reader, &event, "the value of an option", OPTION_YAML_MAX_BYTES, &value, err);
  if (!status) status = option_assign(reader->set, name, value, at, err);
  yaml_event_delete(&event);
  return status;
}

/* stream start, document start, mapping start, pairs, ends. An empty file is an empty mapping. A second document is refused: which of two
 * was meant cannot be told. */
static enum sits_status read_document(struct reader *reader, struct sits_error *err)
{
  bool in_mapping = false, has_document = false, done = false;
  while (!done) {
    yaml_event_t event;
    enum sits_status status = next_event(reader, &event, err);
    if (status) return status;
    switch (event.type) {
    case YAML_STREAM_END_EVENT: done = true; break;
    case YAML_MAPPING_START_EVENT:
      if (in_mapping) status = read_pair(reader, &event, err); /* where a name belongs: refused */
      in_mapping = true;
      break;
    case YAML_MAPPING_END_EVENT: in_mapping = false; break;
    case YAML_STREAM_START_EVENT: case YAML_DOCUMENT_END_EVENT: break;
    case YAML_DOCUMENT_START_EVENT:
      if (has_document)
        status = sits_fail(err, SITS_CONFIG, "%.150s:%zu: a second document begins here; a configuration is one", reader->origin,
                           event.start_mark.line + 1);
      has_document = true;
      break;
    default:
      if (in_mapping) status = read_pair(reader, &event, err);
      else if (!(event.type == YAML_SCALAR_EVENT && event.data.scalar.length == 0))
        status = sits_fail(err, SITS_CONFIG, "%.150s:%zu: expected 'option: value' lines", reader->origin, event.start_mark.line + 1);
      break;
    }
    yaml_event_delete(&event);
    if (status) return status;
  }
  return SITS_OK;
}

enum sits_status option_parse_yaml(struct option_set *set, const char *text, size_t n_bytes, const char *origin, struct sits_error *err)
{
  struct reader reader = {.set = set, .origin = origin};
  if (!yaml_parser_initialize(&reader.parser)) return sits_fail(err, SITS_NOMEM, "out of memory");
  yaml_parser_set_input_string(&reader.parser, (const unsigned char *)(text ? text : ""), n_bytes);
  enum sits_status status = read_document(&reader, err);
  yaml_parser_delete(&reader.parser);
  return status;
}

enum sits_status option_load_yaml(struct option_set *set, const char *path, struct sits_error *err)
{
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  if (file.n_bytes > OPTION_YAML_MAX_BYTES) status = sits_fail(err, SITS_CONFIG, "%.150s: larger than 32 MiB", path);
  else status = option_parse_yaml(set, (const char *)file.data, file.n_bytes, path, err);
  mapfile_close(&file);
  return status;
}
