/* Options from one table: flags, environment variables, a YAML file, --help and the sample file all come from the same rows.
 *
 * A program declares a struct of values and a table of struct option_spec that point into it (offsetof). option_set_init fills the
 * defaults; option_load_yaml, option_load_env and option_parse_args then override, each refusing an unknown name, a wrong type and a
 * value out of range with its origin ("file.yaml:12", "environment", "command line"). Call them in that order: the later one wins.
 *
 * Entry points: option_set_init, option_load_yaml, option_load_env, option_parse_args, option_write_yaml, option_write_help.
 * Adding an option is adding a row to the program's table (config/options.c for the daemon); the sample file is checked by a test.
 * Not thread-safe; values are read-only after start.
 */
#ifndef SITS_CONFIG_OPTION_H
#define SITS_CONFIG_OPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "sits2026/status.h"

enum option_kind {
  OPTION_STRING, /* const char *, NULL when unset ("" in the table means NULL) */
  OPTION_INT,    /* int64_t */
  OPTION_FLOAT,  /* double */
  OPTION_BOOL,   /* bool; flags --name, --no-name, --name=true */
  OPTION_BYTES,  /* int64_t; suffixes K M G T (powers of 1024), also KiB, MiB... */
  OPTION_ENUM,   /* const char *, one of `choices` ("auto|cpu|cuda") */
};

enum { OPTION_SECRET = 1 /* never printed, and refused when empty */ };

struct option_spec {
  const char *name;          /* "max-num-seqs": flag --max-num-seqs, YAML key, environment SITS_MAX_NUM_SEQS */
  enum option_kind kind;
  size_t offset;             /* into the values struct */
  const char *default_text;
  double min, max;           /* INT, FLOAT, BYTES */
  const char *unit;          /* "tokens", "ms", "" */
  unsigned flags;
  const char *choices;       /* ENUM */
  const char *section;       /* heading in help and sample file */
  const char *help;          /* whole sentences */
};

struct option_set {
  const struct option_spec *specs; /* [n_specs] */
  int n_specs;
  void *values;              /* caller's struct */
  struct arena arena;        /* strings that values point to */
  bool *is_set;              /* [n_specs] given by file, environment or flag */
};

/* SITS_NOMEM, or SITS_CONFIG if the table itself has a bad default. */
enum sits_status option_set_init(struct option_set *set, const struct option_spec *specs, int n_specs, void *values, struct sits_error *err)
    SITS_MUST_CHECK;
void option_set_fini(struct option_set *set);

/* Set one option from text. `origin` is named in errors. */
enum sits_status option_assign(struct option_set *set, const char *name, const char *text, const char *origin, struct sits_error *err)
    SITS_MUST_CHECK;
/* A mapping of names to scalars, OPTION_YAML_MAX_BYTES at most: more than a command line holds, escaped. */
#define OPTION_YAML_MAX_BYTES (32u << 20)
enum sits_status option_load_yaml(struct option_set *set, const char *path, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status option_parse_yaml(struct option_set *set, const char *text, size_t n_bytes, const char *origin, struct sits_error *err)
    SITS_MUST_CHECK;
enum sits_status option_load_env(struct option_set *set, struct sits_error *err) SITS_MUST_CHECK;
/* argv[first..]. Words that are no options are refused, or, with positional not NULL, one is stored there. */
enum sits_status option_parse_args(struct option_set *set, int argc, char *const *argv, int first, const char **positional,
                                   struct sits_error *err) SITS_MUST_CHECK;

bool option_is_set(const struct option_set *set, const char *name);

/* The name of an option whose value YAML cannot hold, for it is not UTF-8 (a path may be); NULL: none. */
const char *option_not_utf8(const struct option_set *set);
/* The values now in force as YAML (secrets masked, what is unset as a comment) or, with sample, every option commented with help, range and
 * default. */
bool option_write_yaml(const struct option_set *set, bool sample, struct buf *out);
bool option_write_help(const struct option_set *set, struct buf *out);

#endif
