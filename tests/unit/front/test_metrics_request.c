/* Counters by tenant are bounded: beyond 64 names a scrape does not grow, whatever clients call themselves; odd names are escaped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

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

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_tenants_are_bounded), cmocka_unit_test(test_outcomes_and_names)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
