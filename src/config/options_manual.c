/* The manual page (man 8 sits2026d) and bash's completion, from the option table and the words beside it. The build installs both. */
#include <stdio.h>
#include <string.h>

#include "config/option_internal.h"
#include "config/options.h"

/* ---- roff ---- */

/* Text inside a line: backslash and minus are roff's own; a dot or quote that begins a line is a request. */
static void append_roff(struct buf *out, const char *text)
{
  if (*text == '.' || *text == '\'') buf_append_text(out, "\\&");
  for (; *text; text++) {
    if (*text == '\\') buf_append_text(out, "\\e");
    else if (*text == '-') buf_append_text(out, "\\-");
    else buf_append_char(out, *text);
  }
}

static void append_entry(struct buf *out, const char *name, const char *value, const char *help)
{
  buf_append_text(out, ".TP\n\\fB\\-\\-");
  append_roff(out, name);
  buf_append_text(out, "\\fR");
  if (value && *value) {
    buf_append_text(out, " \\fI");
    append_roff(out, value);
    buf_append_text(out, "\\fR");
  }
  buf_append_char(out, '\n');
  append_roff(out, help);
  buf_append_char(out, '\n');
}

static const char *kind_name(const struct option_spec *spec)
{
  switch (spec->kind) {
  case OPTION_STRING: return "text";
  case OPTION_INT: return "integer";
  case OPTION_FLOAT: return "number";
  case OPTION_BYTES: return "size";
  case OPTION_ENUM: return spec->choices;
  case OPTION_BOOL: break;
  }
  return "";
}

static void append_spec(struct buf *out, const struct option_spec *spec)
{
  char env[96];
  append_entry(out, spec->name, kind_name(spec), spec->help);
  if (spec->kind == OPTION_INT || spec->kind == OPTION_FLOAT) {
    char range[96];
    snprintf(range, sizeof range, "%.15g to %.15g%s%s. ", spec->min, spec->max, spec->unit[0] ? " " : "", spec->unit);
    append_roff(out, range);
  }
  if (spec->default_text[0]) {
    buf_append_text(out, "Default: ");
    append_roff(out, spec->default_text);
    buf_append_text(out, ". ");
  }
  option_env_name(spec->name, env, sizeof env);
  buf_printf(out, "Environment: %s.\n", env);
}

static const char man_head[] =
  ".TH SITS2026D 8 \"\" \"sits2026 " SITS_VERSION "\" \"System Administration\"\n"
  ".SH NAME\nsits2026d \\- serve a language model over HTTP and gRPC\n"
  ".SH SYNOPSIS\n.B sits2026d\n\\fB\\-\\-model\\fR \\fIPATH\\fR [\\fIoptions\\fR]\n"
  ".SH DESCRIPTION\nLoads one model and answers OpenAI's API, and with \\fB\\-\\-grpc\\-port\\fR the same over gRPC. Every option is a\n"
  "flag, a key of the YAML file given with \\fB\\-\\-config\\fR, and an environment variable; the later one wins in the order file,\n"
  "environment, flag. Flags of options that are true or false have the forms \\fB\\-\\-name\\fR, \\fB\\-\\-no\\-name\\fR and\n"
  "\\fB\\-\\-name=false\\fR. Sizes take the suffixes K, M, G and T.\n"
  ".SH COMMANDS\n";

static const char man_tail[] =
  ".SH SIGNALS\n.TP\nTERM, INT\nStop taking requests, let running ones finish for \\fB\\-\\-shutdown\\-timeout\\-s\\fR, and end.\n"
  "A second signal ends them at once.\n.TP\nHUP\nRead the key file and the certificates again.\n"
  ".SH EXIT STATUS\n0 after a stop that was asked for, 1 when starting, loading or checking failed.\n"
  ".SH ENVIRONMENT\n.TP\nSITS_CONFIG\nThe file that \\fB\\-\\-config\\fR names.\n"
  ".TP\nNOTIFY_SOCKET, WATCHDOG_USEC\nSet by systemd: it is told when the model serves, and its watchdog is fed while the engine lives.\n"
  ".SH FILES\n.TP\n/etc/sits2026/sits2026d.yaml\nThe configuration that the service reads; every option, commented.\n"
  ".SH SEE ALSO\n.BR sits2026\\-compile (1),\n.BR sits2026\\-bench (1),\n.BR sits2026\\-eval (1),\n.BR sits2026\\-opt (1)\n";

bool options_write_man(const struct option_set *set, struct buf *out)
{
  const char *section = NULL;
  buf_append_text(out, man_head);
  for (int w = 0; w < options_n_words; w++) append_entry(out, options_words[w].name, options_words[w].value, options_words[w].help);
  buf_append_text(out, ".SH OPTIONS\n");
  for (int i = 0; i < set->n_specs; i++) {
    const struct option_spec *spec = &set->specs[i];
    if (!section || strcmp(section, spec->section)) {
      buf_append_text(out, ".SS ");
      append_roff(out, spec->section);
      buf_append_char(out, '\n');
    }
    section = spec->section;
    append_spec(out, spec);
  }
  buf_append_text(out, man_tail);
  return !out->failed;
}

/* ---- bash ---- */

static const char bash_head[] =
  "# bash completion for sits2026d; written by `sits2026d --print-completion`.\n"
  "_sits2026d() {\n  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n  COMPREPLY=()\n  case $prev in\n";

/* The tools list their options themselves. */
static const char bash_tail[] =
  "  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n}\ncomplete -F _sits2026d sits2026d\n\n"
  "_sits2026_tool() {\n  local cur=${COMP_WORDS[COMP_CWORD]} command=()\n  COMPREPLY=()\n"
  "  case ${COMP_WORDS[1]} in [a-z]*) [ \"$COMP_CWORD\" -gt 1 ] && command=(\"${COMP_WORDS[1]}\");; esac\n"
  "  local words=$(\"$1\" \"${command[@]}\" --help 2>/dev/null | grep -o -- '^ *--[a-z0-9-]*')\n"
  "  case $cur in\n  -*) COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"));;\n"
  "  *) COMPREPLY=($(compgen -f -- \"$cur\"));;\n  esac\n}\n"
  "complete -o filenames -F _sits2026_tool sits2026-bench sits2026-compile sits2026-eval sits2026-opt\n";

static void append_choices(struct buf *out, const struct option_spec *spec)
{
  buf_printf(out, "  --%s) COMPREPLY=($(compgen -W \"", spec->name);
  for (const char *c = spec->choices; *c; c++) buf_append_char(out, *c == '|' ? ' ' : *c);
  buf_append_text(out, "\" -- \"$cur\")); return;;\n");
}

bool options_write_completion(const struct option_set *set, struct buf *out)
{
  buf_append_text(out, bash_head);
  for (int i = 0; i < set->n_specs; i++) {
    const struct option_spec *spec = &set->specs[i];
    if (spec->kind == OPTION_ENUM) append_choices(out, spec);
    else if (spec->kind == OPTION_STRING) buf_printf(out, "  --%s) COMPREPLY=($(compgen -f -- \"$cur\")); return;;\n", spec->name);
    else if (spec->kind != OPTION_BOOL) buf_printf(out, "  --%s) return;;\n", spec->name);
  }
  for (int w = 0; w < options_n_words; w++)
    if (options_words[w].value) buf_printf(out, "  --%s) COMPREPLY=($(compgen -f -- \"$cur\")); return;;\n", options_words[w].name);
  buf_append_text(out, "  esac\n  local words=\"");
  for (int w = 0; w < options_n_words; w++) buf_printf(out, "--%s ", options_words[w].name);
  for (int i = 0; i < set->n_specs; i++) {
    buf_printf(out, "--%s ", set->specs[i].name);
    if (set->specs[i].kind == OPTION_BOOL) buf_printf(out, "--no-%s ", set->specs[i].name);
  }
  buf_append_text(out, "\"\n");
  buf_append_text(out, bash_tail);
  return !out->failed;
}
