/* Counters by tenant are bounded: beyond 64 names a scrape does not grow, whatever clients call themselves; odd names are escaped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/utf8.h"
#include "front/metrics/metrics.h"
#include "front/metrics/metrics_request.h"

static void take(struct metrics_requests *requests, const char *tenant, enum sits_status status)
{
  struct api_record record = {.transport = "http", .tenant = tenant, .key = "", .kind = API_CHAT, .status = status,
                              .usage.n_output_tokens = 3};
  metrics_requests_take(requests, &record);
}

static char *render(struct metrics_requests *requests)
{
  struct buf out;
  buf_init(&out, 1 << 20);
  metrics_requests_render(requests, "model_name=\"m\"", &out);
  assert_false(out.failed);
  char *text = strdup(out.data);
  buf_fini(&out);
  return text;
}

static void test_tenants_are_bounded(void **state)
{
  struct metrics_requests *requests = metrics_requests_create();
  char name[200];
  for (int i = 0; i < METRICS_MAX_TENANTS; i++) {
    snprintf(name, sizeof name, "tenant%d", i);
    take(requests, name, SITS_OK);
  }
  char *full = render(requests);
  for (int i = 0; i < 10000; i++) {
    snprintf(name, sizeof name, "another%d", i);
    take(requests, name, SITS_OK);
  }
  take(requests, "tenant5", SITS_OK);
  char *text = render(requests);
  assert_true(strlen(text) < strlen(full) + 100);
  assert_non_null(strstr(text, "tenant_requests_total{model_name=\"m\",tenant=\"other\",outcome=\"ok\"} 10000\n"));
  assert_non_null(strstr(text, "tenant_generation_tokens_total{model_name=\"m\",tenant=\"other\"} 30000\n"));
  assert_non_null(strstr(text, "tenant_requests_total{model_name=\"m\",tenant=\"tenant5\",outcome=\"ok\"} 2\n"));
  assert_null(strstr(text, "another"));
  free(full);
  free(text);
  metrics_requests_destroy(requests);
}

static void test_outcomes_and_names(void **state)
{
  struct metrics_requests *requests = metrics_requests_create();
  static const struct { enum sits_status status; const char *outcome; } cases[] = {
    {SITS_INVALID_ARGUMENT, "client_error"}, {SITS_UNAUTHENTICATED, "client_error"}, {SITS_QUEUE_FULL, "refused"},
    {SITS_UNAVAILABLE, "refused"}, {SITS_INTERNAL, "server_error"}, {SITS_DEADLINE, "server_error"}, {SITS_CANCELLED, "client_left"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char name[32], line[128];
    snprintf(name, sizeof name, "t%zu", i);
    take(requests, name, cases[i].status);
    char *text = render(requests);
    snprintf(line, sizeof line, "tenant=\"t%zu\",outcome=\"%s\"} 1\n", i, cases[i].outcome);
    assert_non_null(strstr(text, line));
    free(text);
  }
  take(requests, "quo\"te\\and\nline", SITS_OK);
  char *text = render(requests);
  assert_non_null(strstr(text, "tenant=\"quo\\\"te\\\\and\\nline\",outcome=\"ok\"} 1\n"));
  free(text);
  struct api_record public = {.tenant = "nobody", .is_public = true, .kind = API_CHAT};
  metrics_requests_take(requests, &public);
  text = render(requests);
  assert_null(strstr(text, "nobody"));
  free(text);
  metrics_requests_destroy(requests);
}

/* A tenant may be called as the row of all others is: still one series of each name, before and after the table is full. */
static void test_a_tenant_called_other(void **state)
{
  struct metrics_requests *requests = metrics_requests_create();
  static const char row[] = "tenant_requests_total{model_name=\"m\",tenant=\"other\",outcome=\"ok\"} ";
  char name[32];
  take(requests, "other", SITS_OK);
  for (int i = 0; i < METRICS_MAX_TENANTS + 10; i++) {
    char *text = render(requests);
    const char *at = strstr(text, row);
    assert_non_null(at);
    assert_null(strstr(at + 1, row));
    assert_int_equal(strtol(at + sizeof row - 1, NULL, 10), i > METRICS_MAX_TENANTS ? 1 + i - METRICS_MAX_TENANTS : 1);
    free(text);
    snprintf(name, sizeof name, "t%d", i);
    take(requests, name, SITS_OK);
  }
  metrics_requests_destroy(requests);
}

/* A page with a byte that is no UTF-8, or with a label that does not end, is refused whole by scrapers. */
static void test_any_model_name_makes_a_label(void **state)
{
  char longest[601], quotes[400];
  for (size_t i = 0; i + 3 < sizeof longest; i += 3) memcpy(longest + i, "\xE2\x82\xAC", 4);
  memset(quotes, '"', sizeof quotes - 1);
  quotes[sizeof quotes - 1] = '\0';
  const char *const names[] = {"", "m", longest, longest + 3, quotes, quotes + 1, "a\\\"b\nc", "\xFF\xFE", "cut \xE2\x82"};
  struct metrics *metrics;
  assert_int_equal(metrics_create(&metrics), SITS_OK);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char shifted[640];
    for (int shift = 0; shift < 4; shift++) {
      struct metrics_now now = {0};
      struct buf out;
      snprintf(shifted, sizeof shifted, "%.*s%s", shift, "xxx", names[i]);
      metrics_set_model(metrics, shifted);
      buf_init(&out, 1 << 20);
      metrics_render(metrics, &now, &out);
      assert_false(out.failed);
      assert_true(utf8_is_valid(out.data, out.size));
      const char *at = strstr(out.data, "num_requests_running{model_name=\"");
      assert_non_null(at);
      for (at += 33; *at != '"'; at++) {
        assert_true(*at && *at != '\n');
        if (*at == '\\') at++;
      }
      assert_memory_equal(at, "\"} 0\n", 5);
      buf_fini(&out);
    }
  }
  metrics_destroy(metrics);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_tenants_are_bounded), cmocka_unit_test(test_outcomes_and_names),
                                     cmocka_unit_test(test_any_model_name_makes_a_label), cmocka_unit_test(test_a_tenant_called_other)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
