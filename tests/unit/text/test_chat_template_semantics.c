/* What templates mean, against answers recorded from Python's jinja2 (jinja_cases.jsonl, written by record_jinja_cases.py), and what this
 * interpreter adds or refuses on its own account: errors with lines, the probes at creation, sharing between threads. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/mapfile.h"
#include "text/chat_template.h"

static const int64_t clock_2025_01_15 = 1736944496; /* 2025-01-15 12:34:56 UTC */
static const char cases_path[] = "tests/unit/text/jinja_cases.jsonl";

struct outcome { enum sits_status status; bool compiled; struct sits_error err; struct buf out; };

static struct outcome render(const char *source, size_t n_bytes, const json_t *variables)
{
  struct outcome o = {0};
  struct chat_template *tmpl = NULL;
  buf_init(&o.out, 1 << 20);
  o.status = chat_template_create(source, n_bytes, &tmpl, &o.err);
  o.compiled = o.status == SITS_OK;
  if (o.compiled) o.status = chat_template_render(tmpl, variables, clock_2025_01_15, &o.out, &o.err);
  chat_template_destroy(tmpl);
  return o;
}

static bool matches(const json_t *row, const struct outcome *o)
{
  const json_t *out = json_object_get(row, "out");
  if (!out) return o->status && o->out.size == 0 && o->compiled == json_is_true(json_object_get(row, "compiles"));
  return !o->status && o->out.size == json_string_length(out) &&
         memcmp(o->out.data ? o->out.data : "", json_string_value(out), o->out.size) == 0;
}

static void answers_of_jinja2(void **state)
{
  (void)state;
  struct mapfile file;
  struct sits_error err = {0};
  json_t *variables = NULL;
  int n = 0, n_wrong = 0;
  if (mapfile_open(&file, cases_path, &err)) fail_msg("%s (run from the repository's root)", err.text);
  const char *at = (const char *)file.data, *end = at + file.n_bytes;
  while (at < end) {
    const char *stop = memchr(at, '\n', (size_t)(end - at));
    json_t *row = NULL;
    assert_int_equal(json_parse(at, (size_t)((stop ? stop : end) - at), &json_limits_file, &row, NULL), SITS_OK);
    at = stop ? stop + 1 : end;
    if (!variables) {
      variables = json_incref(json_object_get(row, "variables"));
    } else {
      const json_t *source = json_object_get(row, "t");
      struct outcome o = render(json_string_value(source), json_string_length(source), variables);
      n++;
      if (!matches(row, &o)) {
        n_wrong++;
        const char *wanted = json_string_value(json_object_get(row, "out")), *error = json_string_value(json_object_get(row, "error"));
        print_message("%s\n  wanted %s\n  got    %s %s\n", json_string_value(source), wanted ? wanted : error, o.out.data ? o.out.data : "",
                      o.err.text);
      }
      buf_fini(&o.out);
    }
    json_decref(row);
  }
  mapfile_close(&file);
  json_decref(variables);
  assert_true(n > 900);
  assert_int_equal(n_wrong, 0);
}

/* ---- Errors ---- */

static void expect_error(const char *source, enum sits_status status, const char *text)
{
  json_t *variables = json_pack("{s:[], s:I}", "messages", "big", (json_int_t)INT64_MAX);
  struct outcome o = render(source, strlen(source), variables);
  if (o.status != status || strcmp(o.err.text, text) != 0)
    fail_msg("%s: status %d, \"%s\"; wanted %d, \"%s\"", source, o.status, o.err.text, status, text);
  assert_int_equal(o.out.size, 0);
  buf_fini(&o.out);
  json_decref(variables);
}

static void errors_name_the_line(void **state)
{
  (void)state;
  expect_error("a\n{{ nope.x }}", SITS_TEMPLATE, "chat template line 2: UndefinedError: 'nope' is undefined");
  expect_error("{% if true %}\n\n{{ 1 + 'a' }}{% endif %}", SITS_TEMPLATE,
               "chat template line 3: TypeError: unsupported operand type(s) for +: 'int' and 'str'");
  expect_error("\n{{ messages[0].role }}", SITS_TEMPLATE, "chat template line 2: UndefinedError: list object has no element 0");
  expect_error("\n\n{{ messages.append(1) }}", SITS_TEMPLATE,
               "chat template line 3: SecurityError: access to attribute 'append' of 'list' object is unsafe.");
  expect_error("\n\n{% if x %}", SITS_FORMAT, "chat template line 3: tag is never closed: expected 'endif'");
  expect_error("{{ 1 +\n }}", SITS_FORMAT, "chat template line 2: unexpected '}}' in an expression");
  expect_error("{{ 'a\n' }}\n{{ \"b }}", SITS_FORMAT, "chat template line 3: unterminated string");
  expect_error("\n{{ 1|nosuch }}", SITS_FORMAT, "chat template line 2: no filter named 'nosuch'");
  expect_error("{% include 'x' %}", SITS_UNSUPPORTED, "chat template line 1: tag 'include' is not supported");
  expect_error("{{ '\xff' }}", SITS_FORMAT, "chat template is not valid UTF-8");
}

static void integers_beyond_64_bits_are_refused(void **state)
{
  (void)state;
  static const char text[] = "chat template line 1: OverflowError: integer beyond 64 bits is not supported";
  expect_error("{{ big + 1 }}", SITS_TEMPLATE, text);
  expect_error("{{ big * 2 }}", SITS_TEMPLATE, text);
  expect_error("{{ -big - 2 }}", SITS_TEMPLATE, text);
  expect_error("{{ 2 ** 63 }}", SITS_TEMPLATE, text);
  expect_error("{{ (-big - 1) // -1 }}", SITS_TEMPLATE, text);
  expect_error("{{ -(-big - 1) }}", SITS_TEMPLATE, text);
  expect_error("{{ [big, 1]|sum }}", SITS_TEMPLATE, text);
  expect_error("{{ 9223372036854775808 }}", SITS_FORMAT, "chat template line 1: integer literal beyond 64 bits is not supported");
}

static void raise_exception_gives_the_text_alone(void **state)
{
  (void)state;
  expect_error("\n{{ raise_exception('Roles must alternate!') }}", SITS_TEMPLATE, "Roles must alternate!");
  char source[1200] = "{{ raise_exception('", wanted[SITS_ERROR_TEXT_BYTES] = "";
  for (int i = 0; i < 200; i++) strncat(source, "\xC3\xA9", 3);
  strncat(source, "') }}", 6);
  for (int i = 0; i < 127; i++) memcpy(wanted + 2 * i, "\xC3\xA9", 3);
  expect_error(source, SITS_TEMPLATE, wanted); /* cut to what fits, between characters */
}

static void output_is_appended_and_kept_on_failure(void **state)
{
  (void)state;
  struct chat_template *tmpl = NULL;
  struct buf out;
  json_t *none = json_object(), *one = json_pack("{s:i}", "x", 1);
  buf_init(&out, 1000);
  assert_true(buf_append_text(&out, "before "));
  assert_int_equal(chat_template_create("{{ x + 1 }}", 11, &tmpl, NULL), SITS_OK);
  assert_int_equal(chat_template_render(tmpl, none, 0, &out, NULL), SITS_TEMPLATE);
  assert_string_equal(out.data, "before ");
  assert_int_equal(chat_template_render(tmpl, one, 0, &out, NULL), SITS_OK);
  assert_string_equal(out.data, "before 2");
  assert_int_equal(chat_template_render(tmpl, json_null(), 0, &out, NULL), SITS_INVALID_ARGUMENT);
  chat_template_destroy(tmpl);
  buf_fini(&out);
  json_decref(none);
  json_decref(one);
}

static void text_with_nul_bytes_passes(void **state)
{
  (void)state;
  json_t *variables = json_object();
  json_object_set_new(variables, "s", json_stringn("a\0b", 3));
  struct outcome o = render("{{ s }}{{ s|length }}{{ s|tojson }}", 35, variables);
  assert_int_equal(o.status, SITS_OK);
  assert_int_equal(o.out.size, 14);
  assert_memory_equal(o.out.data, "a\0b3\"a\\u0000b\"", 14);
  buf_fini(&o.out);
  json_decref(variables);
}

/* ---- Probes at creation ---- */

static void expect_probes(const char *source, bool wants_parts, bool uses_tools)
{
  struct chat_template *tmpl = NULL;
  assert_int_equal(chat_template_create(source, strlen(source), &tmpl, NULL), SITS_OK);
  if (chat_template_wants_parts(tmpl) != wants_parts || chat_template_uses_tools(tmpl) != uses_tools)
    fail_msg("%s: parts %d, tools %d", source, chat_template_wants_parts(tmpl), chat_template_uses_tools(tmpl));
  chat_template_destroy(tmpl);
}

static void content_form_and_tools_are_found(void **state)
{
  (void)state;
  expect_probes("{% for m in messages %}{{ m.content }}{% endfor %}", false, false);
  expect_probes("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", true, false);
  expect_probes(
      "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c['text'] }}{% endfor %}"
      "{% endif %}{% endfor %}",
      false, false);
  expect_probes("{% for m in messages %}{% for c in m.content if c.type == 'text' %}{{ c.text | trim }}{% endfor %}{% endfor %}", true,
                false);
  expect_probes("{{ messages[0].content[0].text + messages[1].content[0].text }}", true, false); /* needs a system message */
  expect_probes("{{ raise_exception('never') }}", false, false);
  expect_probes("plain", false, false);
  expect_probes("{% if tools %}{{ tools|tojson }}{% endif %}", false, true);
  expect_probes("{% macro f(tools) %}{{ tools }}{% endmacro %}{{ f(1) }}", false, false);
  expect_probes("{% macro f(tools) %}{{ tools }}{% endmacro %}{{ f(tools) }}", false, true);
}

/* ---- Threads ---- */

struct shared { struct chat_template *tmpl; json_t *variables; };

static void *render_many(void *arg)
{
  const struct shared *shared = arg;
  static const char wanted[] = "UGRÜẞE 漢1234";
  for (int i = 0; i < 50; i++) {
    struct buf out;
    buf_init(&out, 1000);
    bool is_right = chat_template_render(shared->tmpl, shared->variables, 0, &out, NULL) == SITS_OK && strcmp(out.data, wanted) == 0;
    buf_fini(&out);
    if (!is_right) return arg;
  }
  return NULL;
}

static void threads_share_a_template(void **state)
{
  (void)state;
  static const char source[] = "{% set ns = namespace(t='Grü\u1E9Ee 漢'|upper) %}{% for i in [1,2,3,4] %}{% set ns.t = ns.t ~ i %}{% "
                               "endfor %}{{ 'u'|upper ~ ns.t }}";
  struct shared shared = {.variables = json_object()};
  pthread_t threads[4];
  assert_int_equal(chat_template_create(source, sizeof source - 1, &shared.tmpl, NULL), SITS_OK);
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, render_many, &shared), 0);
  void *failed = NULL, *result;
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_join(threads[i], &result), 0);
    if (result) failed = result;
  }
  assert_null(failed);
  chat_template_destroy(shared.tmpl);
  json_decref(shared.variables);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(answers_of_jinja2),
      cmocka_unit_test(errors_name_the_line),
      cmocka_unit_test(integers_beyond_64_bits_are_refused),
      cmocka_unit_test(raise_exception_gives_the_text_alone),
      cmocka_unit_test(output_is_appended_and_kept_on_failure),
      cmocka_unit_test(text_with_nul_bytes_passes),
      cmocka_unit_test(content_form_and_tools_are_found),
      cmocka_unit_test(threads_share_a_template),
  };
  return cmocka_run_group_tests_name("chat_template_semantics", tests, NULL, NULL);
}
