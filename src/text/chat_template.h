/* Chat templates: a sandboxed subset of Jinja 2, enough for the templates that models ship, rendered as Hugging Face transformers does
 * (ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop controls, {% generation %}, tojson, raise_exception, strftime_now).
 *
 * Rules: 1. Immutable after create; any thread may render. 2. Work, memory, output and nesting are bounded; over a bound is an error, never
 * a hang. 3. raise_exception gives SITS_TEMPLATE with the template's own message; other run-time errors give SITS_TEMPLATE with line. */
#ifndef SITS_TEXT_CHAT_TEMPLATE_H
#define SITS_TEXT_CHAT_TEMPLATE_H

#include <jansson.h>

#include "base/buf.h"
#include "sits2026/status.h"

struct chat_template;

/* Compile. SITS_UNSUPPORTED or SITS_FORMAT with the line. The source is copied. */
enum sits_status chat_template_create(const char *source, size_t n_bytes, struct chat_template **out, struct sits_error *err)
    SITS_MUST_CHECK;
void chat_template_destroy(struct chat_template *tmpl);

/* Render with an object of variables (messages, tools, documents, add_generation_prompt, bos_token, ...). now_unix: what strftime_now
 * sees (UTC). Appends to out. */
enum sits_status chat_template_render(const struct chat_template *tmpl, const json_t *variables, int64_t now_unix, struct buf *out,
                                      struct sits_error *err) SITS_MUST_CHECK;

/* Whether the template treats message content as a list of parts (true) or as a string (false), found by trial rendering at creation. */
bool chat_template_wants_parts(const struct chat_template *tmpl);
/* Whether the template reads `tools`. */
bool chat_template_uses_tools(const struct chat_template *tmpl);

#endif
