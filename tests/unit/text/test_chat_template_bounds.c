/* Hostile templates end with "... limit", in bounded time and stack; running out of memory at any point is clean and leaks nothing. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/mem.h"
#include "text/chat_template.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STACK_BYTES = 8 << 20 }; /* instrumented frames are several times larger */
#else
enum { STACK_BYTES = 1 << 20 };
#endif

static enum sits_status run(const char *source, struct sits_error *err)
{
  struct chat_template *tmpl = NULL;
  struct buf out;
  json_t *variables = json_pack("{s:[{s:s,s:s}],s:s}", "messages", "role", "user", "content", "hello world", "s", "x");
  buf_init(&out, 64 << 20);
  enum sits_status status = chat_template_create(source, strlen(source), &tmpl, err);
  if (!status) status = chat_template_render(tmpl, variables, 0, &out, err);
  if (status) assert_int_equal(out.size, 0);
  chat_template_destroy(tmpl);
  buf_fini(&out);
  json_decref(variables);
  return status;
}

/* what: the word before " limit". A sanitizer build is slow, so the time only catches a hang. */
static void expect_limit(const char *source, const char *what)
{
  struct sits_error err = {0};
  char wanted[64];
  snprintf(wanted, sizeof wanted, "over the %s limit", what);
  int64_t start = clock_monotonic_us();
  enum sits_status status = run(source, &err);
  int64_t spent_us = clock_monotonic_us() - start;
  if (status != SITS_TEMPLATE || !strstr(err.text, wanted)) fail_msg("%.60s: status %d, \"%s\"", source, status, err.text);
  if (getenv("SITS_TEST_VERBOSE")) print_message("%6lld ms %.70s\n", (long long)spent_us / 1000, source);
  if (spent_us > 60 * 1000 * 1000) fail_msg("%.60s took %lld ms", source, (long long)spent_us / 1000);
}

static void endless_work(void **state)
{
  (void)state;
  expect_limit("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "work");
  expect_limit("{% set r = range(100000) %}{% for a in r %}{{ r|sum }}{% endfor %}", "work");
  expect_limit("{% set r = range(100000)|list %}{% set q = range(100000)|list %}{% for a in r %}{% if r == q %}{% endif %}{% endfor %}",
               "work");
  expect_limit("{% set s = 'ab' * 1000000 %}{% for a in range(100000) %}{{ s.rfind('abb' * 100000) }}{{ s.count('q') }}{% endfor %}",
               "work");
  expect_limit(
      "{% set s = 'a' * 1000000 %}{{ s.rfind('b' ~ 'a' * 500000) }}{{ s.rfind('a' * 500000 ~ 'b') }}{{ s.rsplit('a' * 1000 ~ 'b') }}"
      "{% for i in range(100000) %}{{ s.rfind('a' * 500000 ~ 'b') }}{% endfor %}",
      "work");
  expect_limit("{% set s = 'é' * 1000000 %}{% for i in range(100000) %}{% if s[999999] == 'x' %}{% endif %}{% endfor %}", "work");
  expect_limit("{% set s = 'a' * 1000000 %}{{ s.strip(s) }}{% for i in range(100000) %}{{ s.strip(s) }}{% endfor %}", "work");
  expect_limit("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "memory");
}

static void huge_values(void **state)
{
  (void)state;
  expect_limit("{% set s = 'x' * 9000000000000000000 %}", "memory");
  expect_limit("{% set s = [1] * 100000000 %}", "memory");
  expect_limit("{% set ns = namespace(s='lol') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "memory");
  expect_limit("{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "memory");
  expect_limit("{% set ns = namespace(s='lol') %}{% for i in range(100) %}{% set ns.s = ns.s.replace('l', ns.s) %}{% endfor %}", "memory");
  expect_limit("{% set ns = namespace(s='lol') %}{% for i in range(100) %}{% set ns.s = ns.s.join(ns.s) %}{% endfor %}", "memory");
  expect_limit(
      "{% set ns = namespace(l=['lolololol']) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|string|length }}",
      "work");
  expect_limit("{% set s = 'x' * 1000000 %}{% for i in range(1000) %}{{ s }}{% endfor %}", "output");
  expect_limit("{{ 'x'.center(9000000000000000000) }}", "output");
  expect_limit("{{ '%999999999d' % 1 }}", "format width");
  expect_limit("{{ '{:999999999}'.format(1) }}", "format width");
  expect_limit("{{ 'x'|indent(100000000) }}", "indent of 1000");
  expect_limit("{{ [1]|tojson(indent=100000000) }}", "indent of 64");
  struct sits_error err = {0};
  assert_int_equal(run("{{ range(100001) }}", &err), SITS_TEMPLATE);
  assert_non_null(strstr(err.text, "range over the limit of 100000 items"));
}

static void deep_recursion(void **state)
{
  (void)state;
  expect_limit("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion");
  expect_limit("{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
               "recursion");
  expect_limit("{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}", "recursion");
  static const char nest[] = "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}";
  static const char *const walks[] = {"{{ ns.l }}", "{{ ns.l|tojson }}", "{{ ns.l == [ns.l] }}", "{{ [ns.l, [ns.l]]|sort }}",
                                      "{{ ns.l in [[ns.l]] }}"};
  for (size_t i = 0; i < sizeof walks / sizeof walks[0]; i++) {
    char source[400];
    snprintf(source, sizeof source, "%s%s", nest, walks[i]);
    expect_limit(source, "recursion");
  }
  expect_limit("{% set ns = namespace(d={}) %}{% for i in range(100000) %}{% set ns.d = {'k': ns.d} %}{% endfor %}{{ ns.d|tojson }}",
               "recursion");
  expect_limit("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}", "recursion");
  expect_limit("{% set ns = namespace(t=()) %}{% for i in range(100000) %}{% set ns.t = (ns.t,) %}{% endfor %}{{ ns.t < (ns.t,) }}",
               "recursion");
  expect_limit("{% set ns = namespace(g=[1]) %}{% for i in range(5000) %}{% set ns.g = ns.g|map('string') %}{% endfor %}{{ ns.g|list }}",
               "recursion");
}

/* `count` times `part` between head and tail must fail to compile with a nesting or size limit. */
static void expect_compile_limit(const char *head, const char *part, size_t count, const char *tail)
{
  struct sits_error err = {0};
  struct chat_template *tmpl = NULL;
  size_t n = strlen(head) + strlen(part) * count + strlen(tail), used = strlen(head);
  char *source = mem_alloc(n + 1);
  assert_non_null(source);
  memcpy(source, head, used);
  for (size_t i = 0; i < count; i++, used += strlen(part)) memcpy(source + used, part, strlen(part));
  memcpy(source + used, tail, strlen(tail) + 1);
  enum sits_status status = chat_template_create(source, n, &tmpl, &err);
  if (status != SITS_FORMAT || !strstr(err.text, " limit")) fail_msg("%s%s...: status %d, \"%s\"", head, part, status, err.text);
  mem_free(source);
}

static void deep_source(void **state)
{
  (void)state;
  expect_compile_limit("{{ ", "(", 100000, "");
  expect_compile_limit("{{ ", "[", 100000, "");
  expect_compile_limit("{{ ", "{1:", 100000, "");
  expect_compile_limit("{{ ", "- ", 100000, "1 }}");
  expect_compile_limit("{{ ", "not ", 100000, "1 }}");
  expect_compile_limit("{{ 1", "+1", 100000, " }}");
  expect_compile_limit("{{ 1", " and 1", 100000, " }}");
  expect_compile_limit("{{ a", ".b", 100000, " }}");
  expect_compile_limit("{{ a", "|abs", 100000, " }}");
  expect_compile_limit("{{ a", "()", 100000, " }}");
  expect_compile_limit("{{ a", " if 1 else 2", 50000, " }}");
  expect_compile_limit("", "{% if 1 %}", 50000, "");
  expect_compile_limit("", "{% for i in a %}", 50000, "");
  expect_compile_limit("{% set ", "(", 100000, "a = 1 %}");
  expect_compile_limit("", "x", (1 << 20) + 1, "");
}

/* Long but flat sources are fine. */
static void long_flat_source(void **state)
{
  (void)state;
  struct sits_error err = {0};
  struct buf source;
  buf_init(&source, 1 << 20);
  assert_true(buf_append_text(&source, "{% if s == 0 %}0"));
  for (int i = 1; i < 3000; i++) assert_true(buf_printf(&source, "{%% elif s == %d %%}%d", i, i));
  assert_true(buf_append_text(&source, "{% else %}none{% endif %}{{ 'a'"));
  for (int i = 0; i < 3000; i++) assert_true(buf_append_text(&source, " ~ s"));
  assert_true(buf_append_text(&source, " }}{% set l = [0"));
  for (int i = 0; i < 3000; i++) assert_true(buf_printf(&source, ", x%d", i));
  assert_true(buf_append_text(&source, "] %}"));
  if (run(source.data, &err)) fail_msg("%s", err.text);
  buf_fini(&source);
}

static const char *const deepest[] = {
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}{% for i in [1] %}{% if i %}{% set y %}{{ f([x, f(x)])|upper if i else 1 }}{% endset %}{% endif %}{% endfor %}{% "
    "endmacro %}{{ f(1) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "{% for i in [1] recursive %}{% filter upper %}{{ loop([i]) }}{% endfilter %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l|tojson(indent=1) }}",
    "{% set ns = namespace(g=[1]) %}{% for i in range(999) %}{% set ns.g = ns.g|map('string')|select %}{% endfor %}{{ ns.g|list }}",
};
enum { N_DEEPEST = sizeof deepest / sizeof deepest[0] };

static void *run_deepest(void *arg)
{
  struct sits_error *errors = arg;
  for (size_t i = 0; i < N_DEEPEST; i++)
    if (run(deepest[i], &errors[i]) == SITS_OK) errors[i].status = SITS_OK;
  return arg;
}

/* The deepest evaluation fits in the stack that a server thread can count on. */
static void recursion_fits_a_small_stack(void **state)
{
  (void)state;
  pthread_attr_t attributes;
  pthread_t thread;
  struct sits_error errors[N_DEEPEST] = {0};
  assert_int_equal(pthread_attr_init(&attributes), 0);
  assert_int_equal(pthread_attr_setstacksize(&attributes, STACK_BYTES), 0);
  assert_int_equal(pthread_create(&thread, &attributes, run_deepest, errors), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  pthread_attr_destroy(&attributes);
  for (size_t i = 0; i < N_DEEPEST; i++)
    if (errors[i].status != SITS_TEMPLATE || !strstr(errors[i].text, "recursion limit")) fail_msg("%s: \"%s\"", deepest[i], errors[i].text);
}

/* ---- Out of memory ---- */

static const char fault_source[] =
    "{% set ns = namespace(t='') %}{% macro f(x, y='d') %}{{ x|upper }}{{ y }}{{ caller() if caller else '' }}{% endmacro %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.t = ns.t + m.content * 200 %}{{ loop.index }}{{ loop.length }}{{ "
    "m|tojson(indent=2) }}"
    "{% call f(m.content, y=[1, 2.5, none]) %}{{ {'a': 1, 'b': (1,)}|dictsort }}{% endcall %}{% endfor %}"
    "{% set b | trim %}{{ messages|map(attribute='content')|join(',')|replace('l', 'L') }}{% endset %}{{ b }}{{ '%s-%d'|format('a', 3) }}"
    "{{ '{:>5}'.format(1) }}{{ range(40)|list|sort(reverse=true) }}{{ s.split() + 'a b c'.split() }}{{ ns.t|length }}{{ ns.t[3:7] }}"
    "{{ {'k1':1,'k2':2,'k3':3,'k4':4,'k5':5,'k6':6,'k7':7,'k8':8,'k9':9,'k10':10} }}{{ 'x' * 20000 }}{{ strftime_now('%Y') }}";

static void every_allocation_may_fail(void **state)
{
  (void)state;
  json_t *variables = json_pack("{s:[{s:s,s:s},{s:s,s:s}],s:s}", "messages", "role", "user", "content", "hello world", "role", "assistant",
                                "content", "x", "s", "x");
  struct buf out;
  buf_init(&out, 1 << 20);
  int64_t live = mem_live_blocks();
  bool is_done = false;
  int n_failed = 0;
  for (uint64_t n = 1; !is_done; n++) {
    struct chat_template *tmpl = NULL;
    struct sits_error err = {0};
    mem_fault_arm(n);
    enum sits_status status = chat_template_create(fault_source, sizeof fault_source - 1, &tmpl, &err);
    if (status) assert_null(tmpl);
    else status = chat_template_render(tmpl, variables, 0, &out, &err);
    bool fired = mem_fault_fired();
    mem_fault_arm(0);
    if (fired) {
      n_failed++;
      if (status != SITS_NOMEM) fail_msg("allocation %d: status %d, \"%s\"", (int)n, status, err.text);
      assert_int_equal(out.size, 0);
    } else if (status) {
      fail_msg("%s", err.text);
    }
    is_done = !fired;
    chat_template_destroy(tmpl);
    buf_fini(&out);
    assert_int_equal(mem_live_blocks(), live);
  }
#ifdef SITS_DEBUG_CHECKS
  assert_true(n_failed > 15);
#endif
  json_decref(variables);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(endless_work),         cmocka_unit_test(huge_values),
      cmocka_unit_test(deep_recursion),       cmocka_unit_test(deep_source),
      cmocka_unit_test(long_flat_source),     cmocka_unit_test(recursion_fits_a_small_stack),
      cmocka_unit_test(every_allocation_may_fail),
  };
  return cmocka_run_group_tests_name("chat_template_bounds", tests, NULL, NULL);
}
