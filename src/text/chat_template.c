/* Chat templates: see chat_template.h. The interpreter is in jinja_*.c; this file owns a compiled template and finds out at creation how it
 * wants message content. */
#include "text/chat_template.h"

#include <string.h>

#include "base/mem.h"
#include "text/jinja_internal.h"

struct chat_template {
  struct jinja_program program;
  bool wants_parts;
};

static const char needle[] = "sits-content-probe";
enum { PROBE_OUTPUT_BYTES = 1 << 20 };

/* A conversation of one user message, with a system message before it or not, content as a string or as one text part. NULL: no memory. */
static json_t *probe_variables(bool has_system, bool is_parts)
{
  json_t *content = is_parts ? json_pack("[{s:s,s:s}]", "type", "text", "text", needle) : json_string(needle);
  json_t *messages = json_pack("[{s:s,s:o}]", "role", "user", "content", content);
  if (messages && has_system) {
    json_t *system = is_parts ? json_pack("{s:s,s:[{s:s,s:s}]}", "role", "system", "content", "type", "text", "text", "x")
                              : json_pack("{s:s,s:s}", "role", "system", "content", "x");
    if (json_array_insert_new(messages, 0, system)) {
      json_decref(messages);
      return NULL;
    }
  }
  return json_pack("{s:o,s:b,s:s,s:s}", "messages", messages, "add_generation_prompt", 1, "bos_token", "", "eos_token", "");
}

/* Whether a rendering of the probe shows its text as itself, not inside the printed form of a list. */
static enum sits_status probe(const struct jinja_program *program, bool has_system, bool is_parts, bool *shows)
{
  struct sits_error ignored = {0};
  struct buf out;
  json_t *variables = probe_variables(has_system, is_parts);
  if (!variables) return SITS_NOMEM;
  buf_init(&out, PROBE_OUTPUT_BYTES);
  enum sits_status status = jinja_render(program, variables, 0, &out, &ignored);
  *shows = status == SITS_OK && out.data && strstr(out.data, needle) && !strstr(out.data, "'sits-content-probe'") &&
           !strstr(out.data, "\"sits-content-probe\"");
  buf_fini(&out);
  json_decref(variables);
  return status == SITS_NOMEM ? status : SITS_OK; /* a template may refuse the probe */
}

static enum sits_status find_content_form(struct chat_template *tmpl)
{
  bool shows_string = false, shows_parts = false;
  for (int has_system = 0; has_system < 2 && !shows_string && !shows_parts; has_system++) {
    enum sits_status status = probe(&tmpl->program, has_system, false, &shows_string);
    if (!status && !shows_string) status = probe(&tmpl->program, has_system, true, &shows_parts);
    if (status) return status;
  }
  tmpl->wants_parts = shows_parts && !shows_string;
  return SITS_OK;
}

enum sits_status chat_template_create(const char *source, size_t n_bytes, struct chat_template **out, struct sits_error *err)
{
  struct chat_template *tmpl = mem_calloc(1, sizeof *tmpl);
  if (!tmpl) return sits_fail(err, SITS_NOMEM, "out of memory for a chat template");
  enum sits_status status = jinja_compile(&tmpl->program, source, n_bytes, err);
  if (!status && (status = find_content_form(tmpl))) sits_fail(err, status, "out of memory for a chat template");
  if (status) {
    chat_template_destroy(tmpl);
    return status;
  }
  *out = tmpl;
  return SITS_OK;
}

void chat_template_destroy(struct chat_template *tmpl)
{
  if (!tmpl) return;
  jinja_program_fini(&tmpl->program);
  mem_free(tmpl);
}

enum sits_status chat_template_render(const struct chat_template *tmpl, const json_t *variables, int64_t now_unix, struct buf *out,
                                      struct sits_error *err)
{
  if (!json_is_object(variables)) return sits_fail(err, SITS_INVALID_ARGUMENT, "chat template variables must be an object");
  return jinja_render(&tmpl->program, variables, now_unix, out, err);
}

bool chat_template_wants_parts(const struct chat_template *tmpl) { return tmpl->wants_parts; }
bool chat_template_uses_tools(const struct chat_template *tmpl) { return tmpl->program.reads_tools; }
