/* API keys: the file's fields and refusals, who a key is, roles and quotas, reloading, and every allocation failing in turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "front/access/access.h"
#include "sits2026/engine.h"

/* Hashes of "key-number-one-of-many" and "key-number-two-of-many" with the salts 00..0f and 10..1f, made with another implementation:
 * python3 -c "import hashlib; print(hashlib.sha256(bytes(range(16)) + b'key-number-one-of-many').hexdigest())" */
#define SALT_ONE "000102030405060708090a0b0c0d0e0f"
#define SALT_TWO "101112131415161718191a1b1c1d1e1f"
#define ONE "sha256:" SALT_ONE ":527979c3194839b20724747adb654ac8f96424d094200d47cea0b9d6df8259d5"
#define TWO "sha256:" SALT_TWO ":50b5c5159eafbf54d84f4efcba252efda401cd1e017ba5b9aedbe9eaf33cbc74"
#define BEARER_ONE "Bearer key-number-one-of-many"
#define BEARER_TWO "Bearer key-number-two-of-many"

static char path[64];

static void write_file(const char *text)
{
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  fputs(text, file);
  fclose(file);
}

static int set_up(void **state)
{
  memcpy(path, "/tmp/sits-keys-XXXXXX", sizeof "/tmp/sits-keys-XXXXXX");
  int fd = mkstemp(path);
  return fd < 0 ? -1 : close(fd);
}

static int tear_down(void **state) { return unlink(path); }

static struct access *open_text(const char *text)
{
  struct access *access = NULL;
  struct sits_error err = {0};
  write_file(text);
  if (access_create(NULL, path, &access, &err)) fail_msg("%s", err.text);
  return access;
}

static struct access_grant *identify(struct access *access, const char *authorization)
{
  struct access_grant *grant = NULL;
  if (access_identify(access, authorization, &grant)) fail_msg("not known: %s", authorization);
  return grant;
}

static void test_open_and_single_key(void **state)
{
  struct access *access = NULL;
  struct access_grant *grant = (struct access_grant *)&access;
  struct sits_error err = {0};
  assert_int_equal(access_create(NULL, NULL, &access, &err), SITS_OK);
  assert_true(access_is_open(access));
  assert_int_equal(access_identify(access, NULL, &grant), SITS_OK);
  assert_null(grant);
  assert_int_equal(access_admit(NULL, ACCESS_ADMIN, &err), SITS_OK);
  assert_int_equal(access_start_call(NULL, 1 << 30, &err), SITS_OK);
  access_end_call(NULL, 1, 1, true);
  assert_true(access_tenant(NULL) == 0 && access_max_tokens(NULL) == -1 && access_allows_model(NULL, "x"));
  access_destroy(access);
  assert_int_equal(access_create("sesame", NULL, &access, &err), SITS_OK);
  static const char *const bad[] = {NULL, "", "Bearer", "Bearer \t ", "Bearer sesam", "Bearer sesame2", "Basic sesame", "sesame"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(access_identify(access, bad[i], &grant), SITS_UNAUTHENTICATED);
    assert_null(grant);
  }
  static const char *const good[] = {"Bearer sesame", "bearer   sesame", "Bearer sesame ", "Bearer  sesame\t "};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) { /* from the second time on it comes from the cache */
    grant = identify(access, good[i]);
    assert_true(access_tenant(grant) == 0 && access_has_role(grant, ACCESS_ADMIN));
    access_release(grant);
  }
  assert_int_equal(access_identify(access, "Bearer sesam", &grant), SITS_UNAUTHENTICATED);
  access_destroy(access);
}

#define YAML \
  "# two keys\nkeys:\n  - hash: " ONE "\n    tenant: team-a\n    roles: [inference]\n    models: [tiny, \"b c\"]\n" \
  "    classes: [low, normal]\n    max_tokens: 100\n    requests_per_minute: 3\n    tokens_per_minute: 50\n" \
  "    concurrent_calls: 2\n    comment: any text\n" \
  "  - {hash: " TWO ", tenant: ops, roles: [metrics], id: ops-1}\n"
#define LINES \
  "{\"hash\":\"" ONE "\",\"tenant\":\"team-a\",\"roles\":[\"inference\"],\"models\":[\"tiny\",\"b c\"],\"classes\":[\"low\",\"normal\"]," \
  "\"max_tokens\":100,\"requests_per_minute\":3,\"tokens_per_minute\":50,\"concurrent_calls\":2}\n\n" \
  "{\"hash\":\"" TWO "\",\"tenant\":\"ops\",\"roles\":[\"metrics\"],\"id\":\"ops-1\"}"

#define JSON \
  "{\"keys\":[{\"hash\":\"" ONE "\",\"tenant\":\"team-a\",\"roles\":[\"inference\"],\"models\":[\"tiny\",\"b c\"],\"classes\":[\"low\"," \
  "\"normal\"],\"max_tokens\":100,\"requests_per_minute\":3,\"tokens_per_minute\":50,\"concurrent_calls\":2}," \
  "{\"hash\":\"" TWO "\",\"tenant\":\"ops\",\"roles\":[\"metrics\"],\"id\":\"ops-1\"}]}"

static void test_both_formats_say_the_same(void **state)
{
  static const char *const texts[] = {YAML, LINES, JSON};
  for (int i = 0; i < 3; i++) {
    struct access *access = open_text(texts[i]);
    struct access_grant *a = identify(access, BEARER_ONE), *b = identify(access, BEARER_TWO);
    struct access_usage usage;
    struct sits_error err = {0};
    assert_string_equal(access_tenant_name(a), "team-a");
    assert_string_equal(access_tenant_name(b), "ops");
    assert_string_equal(access_key_id(a), "000102030405");
    assert_string_equal(access_key_id(b), "ops-1");
    assert_true(access_tenant(a) != 0 && access_tenant(a) != access_tenant(b));
    assert_true(access_allows_model(a, "tiny") && access_allows_model(a, "b c") && !access_allows_model(a, "tin"));
    assert_true(access_allows_model(b, "x"));
    assert_true(access_allows_class(a, SITS_CLASS_LOW) && access_allows_class(a, SITS_CLASS_NORMAL));
    assert_false(access_allows_class(a, SITS_CLASS_HIGH));
    assert_int_equal(access_max_tokens(a), 100);
    assert_int_equal(access_max_tokens(b), -1);
    access_usage(a, &usage);
    assert_true(usage.requests.limit == 3 && usage.requests.remaining == 3 && usage.tokens.limit == 50 && usage.tokens.remaining == 50);
    assert_int_equal(access_admit(b, ACCESS_INFERENCE, &err), SITS_PERMISSION_DENIED);
    assert_int_equal(access_admit(a, ACCESS_METRICS, &err), SITS_PERMISSION_DENIED);
    assert_int_equal(access_admit(b, ACCESS_METRICS, &err), SITS_OK);
    assert_int_equal(access_admit(b, ACCESS_ANY_ROLE, &err), SITS_OK);
    access_release(a);
    access_release(b);
    access_destroy(access);
  }
}

static void test_refusals(void **state)
{
  static const struct { const char *text, *want; } cases[] = {
    {"", "expected a list 'keys'"},
    {"keys: []\n", "there is no key in it"},
    {"keys: 5\n", "expected a list 'keys'"},
    {"keys: [5]\n", "key 1:  must be a mapping"},
    {"keys: []\nmore: 1\n", "expected a list 'keys' and nothing else"},
    {"keys:\n  - {tenant: a, roles: [admin]}\n", "key 1: hash is required"},
    {"keys:\n  - {hash: " ONE ", roles: [admin]}\n", "key 1: tenant is required"},
    {"keys:\n  - {hash: " ONE ", tenant: a}\n", "key 1: roles is required"},
    {"keys:\n  - {hash: sha256:00:00, tenant: a, roles: [admin]}\n", "key 1: hash must be what sits2026d --hash-key prints"},
    {"keys:\n  - {hash: key-number-one-of-many, tenant: a, roles: [admin]}\n", "key 1: hash must be"},
    {"keys:\n  - {hash: " ONE ", tenant: a b, roles: [admin]}\n", "key 1: tenant must be text"},
    {"keys:\n  - {hash: " ONE ", tenant: 7, roles: [admin]}\n", "key 1: tenant must be text"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [root]}\n", "key 1: roles must be a list of inference, metrics, admin"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: []}\n", "key 1: roles must be a list"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [admin], classes: [best]}\n", "key 1: classes must be a list of high, normal, low"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [admin], models: [1]}\n", "key 1: models must be a list of names"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [admin], max_tokens: 0}\n", "key 1: max_tokens must be a whole number"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [admin], requests_per_minute: 1.5}\n", "key 1: requests_per_minute must be"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [admin], limit: 1}\n", "key 1:  has an unknown field 'limit'"},
    {"keys:\n  - {hash: " ONE ", tenant: a, roles: [admin]}\n  - {hash: " ONE ", tenant: b, roles: [admin]}\n",
     "key 2: hash is there twice"},
    {"keys:\n  - &x {hash: " ONE "}\n", ":2: tags, anchors"},
    {"keys:\n  - {hash: a, hash: b}\n", ":2: a name is given twice"},
    {"keys: [\n", ":2:"},
    {"{\"hash\":\"" ONE "\",\"tenant\":\"a\",\"roles\":[\"admin\"]}\n{\"hash\":\n", "key 2 is not one line of JSON"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct access *access = NULL;
    struct sits_error err = {0};
    write_file(cases[i].text);
    assert_int_equal(access_create(NULL, path, &access, &err), SITS_CONFIG);
    if (!strstr(err.text, cases[i].want) || strncmp(err.text, path, strlen(path))) fail_msg("'%s' is no '%s'", err.text, cases[i].want);
    if (strstr(err.text, "key-number") || strstr(err.text, SALT_ONE)) fail_msg("'%s' tells a secret", err.text);
  }
  struct access *access = NULL;
  struct sits_error err = {0};
  assert_int_equal(access_create(NULL, "/nowhere/keys.yaml", &access, &err), SITS_NOT_FOUND);
}

static void test_hashing(void **state)
{
  char hash[ACCESS_HASH_BYTES], text[512];
  struct sits_error err = {0};
  static const char key[] = "fresh-key-0123456789";
  assert_int_equal(access_hash_key("short", 5, hash, &err), SITS_INVALID_ARGUMENT);
  assert_int_equal(access_hash_key("sixteen bytes  x", 16, hash, &err), SITS_INVALID_ARGUMENT);
  assert_int_equal(access_hash_key(key, sizeof key - 1, hash, &err), SITS_OK);
  snprintf(text, sizeof text, "keys:\n  - {hash: %s, tenant: a, roles: [admin]}\n", hash);
  struct access *access = open_text(text);
  access_release(identify(access, "Bearer fresh-key-0123456789"));
  access_destroy(access);
}

static void test_quotas(void **state)
{
  struct access *access = open_text(YAML);
  struct access_grant *grant = identify(access, BEARER_ONE);
  struct access_usage usage;
  struct sits_error err = {0};
  for (int i = 0; i < 3; i++) assert_int_equal(access_admit(grant, ACCESS_INFERENCE, &err), SITS_OK);
  assert_int_equal(access_admit(grant, ACCESS_INFERENCE, &err), SITS_RATE_LIMITED);
  assert_non_null(strstr(err.text, "3 requests per minute"));
  access_usage(grant, &usage);
  assert_true(usage.requests.remaining == 0 && usage.requests.reset_us > 50000000 && usage.requests.reset_us <= 60000000);
  assert_in_range(access_retry_after_s(grant), 15, 20); /* a third of a minute brings one request back */
  /* 50 tokens a minute: prompts are paid first, answers after. */
  assert_int_equal(access_start_call(grant, 51, &err), SITS_PERMISSION_DENIED);
  assert_int_equal(access_start_call(grant, 30, &err), SITS_OK);
  assert_int_equal(access_start_call(grant, 30, &err), SITS_RATE_LIMITED);
  assert_in_range(access_retry_after_s(grant), 10, 20);
  assert_int_equal(access_start_call(grant, 10, &err), SITS_OK);
  access_end_call(grant, 10, 0, false); /* it never ran */
  assert_int_equal(access_start_call(grant, 20, &err), SITS_OK);
  access_end_call(grant, 20, 100, true); /* a debt of 100 */
  access_end_call(grant, 30, 0, true);
  access_usage(grant, &usage);
  assert_true(usage.tokens.remaining == 0 && usage.tokens.reset_us > 170000000);
  assert_int_equal(access_start_call(grant, 1, &err), SITS_RATE_LIMITED);
  assert_in_range(access_retry_after_s(grant), 110, 125);
  access_release(grant);
  access_destroy(access);
}

static void test_calls_at_once(void **state)
{
  struct access *access = open_text("keys:\n  - {hash: " ONE ", tenant: a, roles: [inference], concurrent_calls: 2}\n");
  struct access_grant *grant = identify(access, BEARER_ONE);
  struct sits_error err = {0};
  for (int turn = 0; turn < 3; turn++) {
    assert_int_equal(access_start_call(grant, 10, &err), SITS_OK);
    assert_int_equal(access_start_call(grant, 10, &err), SITS_OK);
    assert_int_equal(access_start_call(grant, 10, &err), SITS_RATE_LIMITED);
    assert_non_null(strstr(err.text, "2 calls at once"));
    assert_int_equal(access_retry_after_s(grant), 1);
    access_end_call(grant, 10, 5, true);
    access_end_call(grant, 10, 0, false);
  }
  access_release(grant);
  access_destroy(access);
}

/* A request that is being served keeps its grant; accounts go on; a bad file changes nothing. */
static void test_reload(void **state)
{
  struct access *access = open_text(YAML);
  struct access_grant *held = identify(access, BEARER_ONE), *grant;
  struct access_usage usage;
  struct sits_error err = {0};
  int32_t n = 0;
  assert_int_equal(access_admit(held, ACCESS_INFERENCE, &err), SITS_OK);
  assert_int_equal(access_start_call(held, 40, &err), SITS_OK);
  write_file("keys: [broken\n");
  assert_int_equal(access_reload(access, &n, &err), SITS_CONFIG);
  access_release(identify(access, BEARER_TWO));
  write_file("keys:\n  - {hash: " ONE ", tenant: other, roles: [metrics], requests_per_minute: 10, tokens_per_minute: 50}\n");
  assert_int_equal(access_reload(access, &n, &err), SITS_OK);
  assert_int_equal(n, 1);
  assert_int_equal(access_identify(access, BEARER_TWO, &grant), SITS_UNAUTHENTICATED);
  grant = identify(access, BEARER_ONE);
  assert_string_equal(access_tenant_name(grant), "other");
  assert_string_equal(access_tenant_name(held), "team-a"); /* what runs goes on as it began */
  access_usage(grant, &usage);
  assert_true(usage.tokens.remaining >= 10 && usage.tokens.remaining < 12);
  assert_true(usage.requests.limit == 10 && usage.requests.remaining == 2);
  access_end_call(held, 40, 30, true);
  access_usage(grant, &usage);
  assert_int_equal(usage.tokens.remaining, 0);
  access_release(held);
  access_destroy(access);
  access_release(grant); /* may outlive the table */
}

static void collect(void *context, const char *name, const char *value)
{
  char *text = context;
  size_t n = strlen(text);
  snprintf(text + n, 1024 - n, "%s=%s;", name, value);
}

static void test_headers(void **state)
{
  char text[1024] = "";
  struct access *access = open_text(YAML);
  struct access_grant *a = identify(access, BEARER_ONE), *b = identify(access, BEARER_TWO);
  access_write_headers(b, collect, text);
  access_write_headers(NULL, collect, text);
  assert_string_equal(text, "");
  access_write_headers(a, collect, text);
  assert_string_equal(text, "x-ratelimit-limit-requests=3;x-ratelimit-remaining-requests=3;x-ratelimit-reset-requests=0.000s;"
                            "x-ratelimit-limit-tokens=50;x-ratelimit-remaining-tokens=50;x-ratelimit-reset-tokens=0.000s;");
  access_release(a);
  access_release(b);
  access_destroy(access);
}

static void test_allocation_failures(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip();
#endif
  static const char *const texts[] = {YAML, LINES};
  for (int i = 0; i < 2; i++) {
    write_file(texts[i]);
    int64_t before = mem_live_blocks();
    int fired = 1;
    for (uint64_t n = 1; fired; n++) {
      struct access *access = NULL;
      struct sits_error err = {0};
      mem_fault_arm(n);
      enum sits_status status = access_create("single", path, &access, &err);
      if (!status) status = access_reload(access, NULL, &err);
      fired = mem_fault_fired();
      mem_fault_arm(0);
      if (access) access_release(identify(access, BEARER_ONE));
      access_destroy(access);
      if (fired) assert_int_equal(status, SITS_NOMEM);
      assert_int_equal(mem_live_blocks(), before);
    }
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_open_and_single_key), cmocka_unit_test(test_both_formats_say_the_same),
    cmocka_unit_test(test_refusals),            cmocka_unit_test(test_hashing),
    cmocka_unit_test(test_quotas),              cmocka_unit_test(test_calls_at_once),
    cmocka_unit_test(test_reload),              cmocka_unit_test(test_headers),
    cmocka_unit_test(test_allocation_failures),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
