/* The option table: precedence, every kind of refusal with its origin, and that the sample file in configs/ is up to date. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mapfile.h"
#include "base/mem.h"
#include "config/options.h"

struct fixture { struct options options; struct option_set set; struct sits_error err; enum options_action action; };

static enum sits_status load(struct fixture *f, int n, const char *const *words)
{
  char *argv[32] = {(char *)(uintptr_t) "sits2026d"};
  for (int i = 0; i < n; i++) argv[i + 1] = (char *)(uintptr_t)words[i];
  memset(f, 0, sizeof *f);
  return options_load(&f->options, &f->set, n + 1, argv, &f->action, &f->err);
}
#define LOAD(f, ...) load(f, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *), (const char *[]){__VA_ARGS__})

static void write_file(char *path, const char *text)
{
  snprintf(path, 64, "/tmp/sits-options-XXXXXX");
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
  close(fd);
}

static void test_defaults(void **state)
{
  struct fixture f;
  assert_int_equal(LOAD(&f, "--model", "m.gguf"), SITS_OK);
  assert_string_equal(f.options.model, "m.gguf");
  assert_string_equal(f.options.host, "127.0.0.1");
  assert_int_equal(f.options.port, 8000);
  assert_int_equal(f.options.max_body_bytes, 4 << 20);
  assert_true(f.options.enable_prefix_caching);
  assert_null(f.options.api_key);
  assert_false(option_is_set(&f.set, "port"));
  option_set_fini(&f.set);
}

static void test_precedence(void **state)
{
  struct fixture f;
  char path[64];
  write_file(path, "port: 1\nthreads: 3\nmax-num-seqs: 7\nmodel: \"a b.gguf\"\n");
  setenv("SITS_THREADS", "4", 1);
  setenv("SITS_MAX_NUM_SEQS", "8", 1);
  assert_int_equal(LOAD(&f, "--config", path, "--max-num-seqs=9", "--no-enable-prefix-caching", "--kv-cache-memory", "1.5G"), SITS_OK);
  assert_int_equal(f.options.port, 1);
  assert_int_equal(f.options.threads, 4);
  assert_int_equal(f.options.max_num_seqs, 9);
  assert_string_equal(f.options.model, "a b.gguf");
  assert_false(f.options.enable_prefix_caching);
  assert_int_equal(f.options.kv_cache_memory, 1610612736);
  option_set_fini(&f.set);
  unsetenv("SITS_THREADS");
  unsetenv("SITS_MAX_NUM_SEQS");
  unlink(path);
}

static void refuse_yaml(const char *text, const char *want)
{
  struct fixture f;
  char path[64];
  write_file(path, text);
  assert_int_equal(LOAD(&f, "--config", path, "--model", "m"), SITS_CONFIG);
  if (!strstr(f.err.text, want) || strncmp(f.err.text, path, strlen(path)) != 0)
    fail_msg("'%s' does not name file and '%s'", f.err.text, want);
  unlink(path);
}

/* Two documents in one file were one configuration once; the second is refused with its line. */
static void test_a_second_yaml_document_is_refused(void **state)
{
  refuse_yaml("port: 1\n---\nhost: a\n", ":2: a second document begins here");
  refuse_yaml("---\nport: 1\n...\n---\nhost: a\n", ":4: a second document begins here");
  refuse_yaml("---\n---\nport: 1\n", ":2: a second document begins here");
  refuse_yaml("port: 1\n--- # nothing in it\n", ":2: a second document begins here");
}

static void test_yaml_refusals(void **state)
{
  refuse_yaml("port: 1\nprot: 2\n", ":2: unknown option 'prot' (did you mean 'port'?)");
  refuse_yaml("\n\nport: many\n", ":3: port takes an integer, not 'many'");
  refuse_yaml("port: 70000\n", ":1: port = 70000 is outside 0..65535");
  refuse_yaml("port: 1.5\n", ":1: port takes an integer");
  refuse_yaml("device: tpu\n", ":1: device takes one of auto|cpu|cuda, not 'tpu'");
  refuse_yaml("device: cp\n", ":1: device takes one of");
  refuse_yaml("device: auto|cpu\n", ":1: device takes one of auto|cpu|cuda, not 'auto|cpu'");
  refuse_yaml("enable-prefix-caching: maybe\n", ":1: enable-prefix-caching takes true or false");
  refuse_yaml("port: 1\nport: 2\n", ":2: 'port' is given twice");
  refuse_yaml("port: [1]\n", ":1: expected the value of an option");
  refuse_yaml("- port\n", ":1: expected 'option: value' lines");
  refuse_yaml("port: {a: 1}\n", ":1: expected the value");
  refuse_yaml("threads: 1\n? {port: 1}\n", ":2: expected an option name, a single value");
  refuse_yaml("port: \"unfinished\n", ":2:");
}

static void refuse_args(struct fixture *f, enum sits_status status, const char *want)
{
  assert_int_equal(status, SITS_CONFIG);
  if (!strstr(f->err.text, want)) fail_msg("'%s' does not hold '%s'", f->err.text, want);
}

static void test_argument_refusals(void **state)
{
  struct fixture f;
  refuse_args(&f, LOAD(&f, "--port", "80"), "no model");
  refuse_args(&f, LOAD(&f, "--model"), "--model needs a value");
  static const char *const of_nodes[][2] = {{"--node-rank", "0"}, {"--node-count", "2"}, {"--leader-address", "::1"},
                                            {"--leader-port", "29400"}, {"--node-secret", "a secret of the tests"}};
  for (size_t i = 0; i < sizeof of_nodes / sizeof of_nodes[0]; i++) {
    refuse_args(&f, LOAD(&f, "--model", "m", of_nodes[i][0], of_nodes[i][1]), "needs multi-node");
    assert_string_equal(f.err.param, of_nodes[i][0] + 2);
    assert_int_equal(LOAD(&f, "--model", "m", "--multi-node", of_nodes[i][0], of_nodes[i][1]), SITS_OK);
    option_set_fini(&f.set);
  }
  refuse_args(&f, LOAD(&f, "--model", "m", "--audit-key-file", "k"), "audit-key-file needs audit-log");
  refuse_args(&f, LOAD(&f, "--model", "m", "--no-enable-chunked-prefill", "--policy", "chunked"), "is the policy continuous, not chunked");
  assert_int_equal(LOAD(&f, "--model", "m", "--no-enable-chunked-prefill", "--policy", "continuous"), SITS_OK);
  option_set_fini(&f.set);
  refuse_args(&f, LOAD(&f, "--modle", "x"), "did you mean 'model'");
  refuse_args(&f, LOAD(&f, "stray"), "unexpected word 'stray'");
  refuse_args(&f, LOAD(&f, "--model", "m", "--ssl-certfile", "c"), "go together");
  refuse_args(&f, LOAD(&f, "--model", "m", "--max-num-seqs", "512", "--max-num-batched-tokens", "256"), "at least max-num-seqs");
  assert_int_equal(LOAD(&f, "--model", "m", "--grpc-port", "1", "--grpc-max-connections", "1024", "--ssl-certfile", "c", "--ssl-keyfile",
                        "k"), SITS_OK); /* as --print-config writes it */
  option_set_fini(&f.set);
  refuse_args(&f, LOAD(&f, "--model", "m", "--grpc-port", "1", "--grpc-max-connections", "9", "--ssl-certfile", "c", "--ssl-keyfile", "k"),
              "cannot be kept with TLS");
  setenv("SITS_PORT", "x", 1);
  refuse_args(&f, LOAD(&f, "--model", "m"), "environment: port takes an integer");
  unsetenv("SITS_PORT");
}

static void test_secret_is_masked(void **state)
{
  struct fixture f;
  struct buf out;
  buf_init(&out, 1 << 20);
  assert_int_equal(LOAD(&f, "--api-key", "hush-hush", "--print-config"), SITS_OK);
  assert_int_equal(f.action, OPTIONS_PRINT_CONFIG);
  assert_true(option_write_yaml(&f.set, false, &out));
  assert_null(strstr(out.data, "hush"));
  assert_non_null(strstr(out.data, "api-key: \"********\""));
  buf_fini(&out);
  option_set_fini(&f.set);
}

/* What --print-config writes can be read back and gives the same again. */
static void test_print_config_round_trip(void **state)
{
  struct fixture f, g;
  struct buf out, again;
  char path[64];
  static char longest[100000], breaks[] = "a\xc2\x85" "b\xe2\x80\xa8" "c\xe2\x80\xa9 \xef\xbb\xbf\xc2\x9f\xef\xbf\xbf\x7f"
                                          "\x01\n\t'\"\\ \xf0\x9f\x98\x80 ";
  memset(longest, 'x', sizeof longest - 1);
  memcpy(longest + 4094, "\xc2\x85: #", 5);
  buf_init(&out, 1 << 20);
  buf_init(&again, 1 << 20);
  assert_int_equal(LOAD(&f, "--chat-template", longest, "--audit-log", breaks, "--model", "we\"ird: name", "--itl-target-ms", "12.5",
                        "--max-body-bytes", "2M", "--request-timeout-s", "0.12345678901234567", "--otlp-sampling-ratio",
                        "0.3333333333333333", "--sse-ping-s", "0.1"), SITS_OK);
  assert_true(option_write_yaml(&f.set, false, &out));
  assert_non_null(strstr(out.data, "\nsse-ping-s: 0.1\n"));
  write_file(path, out.data);
  assert_int_equal(LOAD(&g, "--config", path), SITS_OK);
  assert_true(option_write_yaml(&g.set, false, &again));
  assert_string_equal(out.data, again.data);
  assert_string_equal(g.options.chat_template, longest);
  assert_string_equal(g.options.audit_log, breaks);
  assert_null(option_not_utf8(&g.set));
  assert_true(g.options.request_timeout_s == f.options.request_timeout_s && f.options.request_timeout_s == 0.12345678901234567);
  assert_true(g.options.otlp_sampling_ratio == f.options.otlp_sampling_ratio);
  unlink(path);
  buf_fini(&out);
  buf_fini(&again);
  option_set_fini(&f.set);
  option_set_fini(&g.set);
}

/* An empty key is not "no key": a script whose variable is unset must not open the server. */
static void test_empty_secrets_are_refused(void **state)
{
  struct fixture f;
  refuse_yaml("api-key: \"\"\n", ":1: api-key is empty");
  refuse_yaml("api-key:\n", ":1: api-key is empty");
  refuse_yaml("api-key: \"********\"\n", ":1: api-key holds the mask");
  refuse_args(&f, LOAD(&f, "--model", "m", "--api-key", ""), "command line: api-key is empty");
  refuse_args(&f, LOAD(&f, "--model", "m", "--api-key="), "command line: api-key is empty");
  setenv("SITS_API_KEY", "", 1);
  refuse_args(&f, LOAD(&f, "--model", "m"), "environment: api-key is empty");
  unsetenv("SITS_API_KEY");
}

/* Without a key the printed configuration starts a server without one; with a key it does not start until the key is filled in. */
static void test_secrets_in_the_round_trip(void **state)
{
  struct fixture f, g;
  struct buf out;
  char path[64];
  buf_init(&out, 1 << 20);
  assert_int_equal(LOAD(&f, "--model", "m"), SITS_OK);
  assert_true(option_write_yaml(&f.set, false, &out));
  assert_non_null(strstr(out.data, "\n#api-key: \"\"\n"));
  write_file(path, out.data);
  assert_int_equal(LOAD(&g, "--config", path), SITS_OK);
  assert_null(g.options.api_key);
  assert_false(option_is_set(&g.set, "api-key"));
  option_set_fini(&f.set);
  option_set_fini(&g.set);
  unlink(path);
  buf_clear(&out);
  assert_int_equal(LOAD(&f, "--model", "m", "--api-key", "hush-hush"), SITS_OK);
  assert_true(option_write_yaml(&f.set, false, &out));
  write_file(path, out.data);
  refuse_args(&g, LOAD(&g, "--config", path), "holds the mask");
  unlink(path);
  option_set_fini(&f.set);
  buf_fini(&out);
}

static void test_sample_file_is_current(void **state)
{
  struct fixture f;
  struct buf out;
  struct mapfile file;
  buf_init(&out, 1 << 20);
  assert_int_equal(LOAD(&f, "--print-sample-config"), SITS_OK);
  assert_true(option_write_yaml(&f.set, true, &out));
  assert_int_equal(mapfile_open(&file, "configs/sits2026d.yaml", NULL), SITS_OK);
  if (file.n_bytes != out.size || memcmp(file.data, out.data, out.size) != 0)
    fail_msg("configs/sits2026d.yaml is stale: run scripts/gen_config");
  mapfile_close(&file);
  buf_fini(&out);
  option_set_fini(&f.set);
}

static void test_allocation_failures(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip();
#endif
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1; n < 1000; n++) {
    struct fixture f;
    mem_fault_arm(n);
    enum sits_status status = LOAD(&f, "--model", "m", "--host", "::1");
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (status == SITS_OK) option_set_fini(&f.set);
    else assert_int_equal(status, SITS_NOMEM);
    assert_int_equal(mem_live_blocks(), before);
    if (!fired) return;
  }
  fail_msg("never ran out of faults");
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_defaults),          cmocka_unit_test(test_precedence),
      cmocka_unit_test(test_yaml_refusals),     cmocka_unit_test(test_argument_refusals),
      cmocka_unit_test(test_a_second_yaml_document_is_refused),
      cmocka_unit_test(test_secret_is_masked),  cmocka_unit_test(test_print_config_round_trip),
      cmocka_unit_test(test_empty_secrets_are_refused), cmocka_unit_test(test_secrets_in_the_round_trip),
      cmocka_unit_test(test_sample_file_is_current), cmocka_unit_test(test_allocation_failures),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
