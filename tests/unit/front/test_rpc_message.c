/* Bytes to messages to requests: what the walk refuses, what becomes of each field, and clean failure without memory. Expected values are
 * written by hand from the wire format's description. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "front/grpc/rpc_internal.h"
#include "sits2026/v1/inference.pb-c.h"

#define GENERATE (&sits2026__v1__generate_request__descriptor)
#define CHAT (&sits2026__v1__chat_request__descriptor)

static enum sits_status parse(const ProtobufCMessageDescriptor *type, enum api_kind kind, const char *bytes, size_t n,
                              struct api_request **out, struct sits_error *err)
{
  enum sits_status status = rpc_wire_check(type, (const uint8_t *)bytes, n, err);
  if (status) return status;
  ProtobufCMessage *message = protobuf_c_message_unpack(type, &rpc_allocator, n, (const uint8_t *)bytes);
  if (!message) return sits_fail(err, SITS_INVALID_ARGUMENT, "unpack");
  status = rpc_request_parse(message, kind, true, &api_limits_default, out, err);
  protobuf_c_message_free_unpacked(message, &rpc_allocator);
  return status;
}

/* prompt "hi", temperature 0.5, top_k 300, seed -1, n 2, max_tokens 7, ignore_eos, stop "a", stop_token_ids [1, 300] packed and [5] not,
 * logit_bias {7: 1.5}, logprobs 3 */
static const char full[] = "\x12\x02hi" "\x21\x00\x00\x00\x00\x00\x00\xe0\x3f" "\x38\xac\x02"
                           "\x58\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" "\x60\x02" "\x68\x07" "\x78\x01" "\x82\x01\x01" "a"
                           "\x8a\x01\x03\x01\xac\x02" "\x88\x01\x05" "\x92\x01\x0b\x08\x07\x11\x00\x00\x00\x00\x00\x00\xf8\x3f"
                           "\xf8\x01\x03";

static void test_every_field_arrives(void **state)
{
  struct api_request *r = NULL;
  struct sits_error err = {0};
  assert_int_equal(parse(GENERATE, API_COMPLETION, full, sizeof full - 1, &r, &err), SITS_OK);
  assert_int_equal(r->n_prompts, 1);
  assert_string_equal(r->prompts[0].text, "hi");
  assert_true(r->temperature == 0.5 && r->top_p == 1 && r->top_k == 300 && r->seed == -1 && r->has_seed && r->n == 2);
  assert_true(r->max_tokens == 7 && r->ignore_eos && r->stream && r->top_logprobs == 3 && !r->echo);
  assert_int_equal(r->n_stops, 1);
  assert_string_equal(r->stops[0], "a");
  assert_int_equal(r->n_stop_ids, 3);
  assert_true(r->stop_ids[0] == 1 && r->stop_ids[1] == 300 && r->stop_ids[2] == 5);
  assert_int_equal(r->n_bias, 1);
  assert_true(r->bias[0].token == 7 && r->bias[0].bias == 1.5f);
  api_request_destroy(r);
}

static void test_token_prompts(void **state)
{
  static const char two[] = "\x1a\x04\x0a\x02\x05\x06" "\x1a\x03\x0a\x01\x07";
  struct api_request *r = NULL;
  struct sits_error err = {0};
  assert_int_equal(parse(GENERATE, API_COMPLETION, two, sizeof two - 1, &r, &err), SITS_OK);
  assert_int_equal(r->n_prompts, 2);
  assert_true(!r->prompts[0].text && r->prompts[0].n_ids == 2 && r->prompts[0].ids[1] == 6 && r->prompts[1].ids[0] == 7);
  api_request_destroy(r);
  static const char both[] = "\x12\x01" "a" "\x1a\x03\x0a\x01\x07"; /* text and ids */
  assert_int_equal(parse(GENERATE, API_COMPLETION, both, sizeof both - 1, &r, &err), SITS_INVALID_ARGUMENT);
  assert_string_equal(err.param, "prompt_ids");
}

static void test_refusals(void **state)
{
#define ROW(bytes, param) {bytes, sizeof bytes - 1, param}
  static const struct { const char *bytes; size_t n; const char *param; } rows[] = {
    ROW("\x12\x02\xc3(", "prompt"),                                  /* broken UTF-8 */
    ROW("\x12\x03" "a\0b", "prompt"),                                /* NUL */
    ROW("\x12\x03\xed\xa0\x80", "prompt"),                           /* a surrogate */
    ROW("\x0a\x01\xff", "model"),
    ROW("\x12\x05" "ab", ""),                                        /* longer than the bytes */
    ROW("\x12", ""),                                                 /* no length */
    ROW("\x21\x00\x00", ""),                                         /* half a double */
    ROW("\x13\x14", ""),                                             /* a group */
    ROW("\x00\x00", ""),                                             /* field 0 */
    ROW("\x0e", ""),                                                 /* wire type 6 */
    ROW("\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", ""),         /* a tag of 11 bytes */
    ROW("\x12\x01" "a" "\x21\x00\x00\x00\x00\x00\x00\xf8\x7f", "temperature"), /* NaN */
    ROW("\x12\x01" "a" "\x29\x00\x00\x00\x00\x00\x00\xf0\x7f", "top_p"),       /* infinity */
    ROW("\x12\x01" "a" "\x60\x00", "n"),
    ROW("", "prompt"),                                               /* required */
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    struct api_request *r = NULL;
    struct sits_error err = {0};
    enum sits_status status = parse(GENERATE, API_COMPLETION, rows[i].bytes, rows[i].n, &r, &err);
    if (status != SITS_INVALID_ARGUMENT && status != SITS_MISSING_PARAMETER) fail_msg("row %zu: status %d", i, (int)status);
    if (strcmp(err.param, rows[i].param)) fail_msg("row %zu: param '%s'", i, err.param);
    assert_null(r);
  }
}

static void test_unknown_fields_are_bounded(void **state)
{
  char bytes[257 * 3];
  struct sits_error err = {0};
  for (int i = 0; i < 257; i++) memcpy(bytes + 3 * i, "\xd0\x0f\x01", 3); /* field 250, a varint */
  assert_int_equal(rpc_wire_check(GENERATE, (uint8_t *)bytes, 256 * 3, &err), SITS_OK);
  assert_int_equal(rpc_wire_check(GENERATE, (uint8_t *)bytes, 257 * 3, &err), SITS_INVALID_ARGUMENT);
}

static void test_values_are_bounded(void **state)
{
  enum { N = 200000 }; /* HTTP's limit of values; these come with the object's own */
  char *bytes = mem_alloc(N + 16);
  struct api_request *r = NULL;
  struct sits_error err = {0};
  memcpy(bytes, "\x1a\xc4\x9a\x0c\x0a\xc0\x9a\x0c", 8); /* prompt_ids { ids: 200,000 packed ones } */
  memset(bytes + 8, 1, N);
  assert_int_equal(parse(GENERATE, API_COMPLETION, bytes, 8 + N, &r, &err), SITS_INVALID_ARGUMENT);
  assert_non_null(strstr(err.text, "values"));
  mem_free(bytes);
}

static void test_chat(void **state)
{
  static const char bytes[] = "\x12\x0a\x0a\x04user\x12\x02hi" /* a message with content */
                              "\x12\x14\x0a\x04user\x1a\x0c\x0a\x04text\x12\x04part" /* one with a part */
                              "\xe2\x02\x09{\"a\": 7 }"; /* template variables */
  struct api_request *r = NULL;
  struct sits_error err = {0};
  enum sits_status status = parse(CHAT, API_CHAT, bytes, sizeof bytes - 1, &r, &err);
  if (status) fail_msg("%s", err.text);
  assert_int_equal(json_array_size(r->messages), 2);
  const json_t *parts = json_object_get(json_array_get(r->messages, 1), "content");
  assert_string_equal(json_string_value(json_object_get(json_array_get(parts, 0), "text")), "part");
  assert_string_equal(json_string_value(json_object_get(json_array_get(r->messages, 0), "content")), "hi");
  assert_int_equal(json_integer_value(json_object_get(r->template_kwargs, "a")), 7);
  api_request_destroy(r);
}

/* protobuf-c's memory and ours fail in turn; jansson has its own allocator, which is not armed. */
static void test_allocation_failures(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip();
#endif
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1; n < 200; n++) {
    struct api_request *r = NULL;
    struct sits_error err = {0};
    mem_fault_arm(n);
    enum sits_status status = parse(GENERATE, API_COMPLETION, full, sizeof full - 1, &r, &err);
    int has_fired = mem_fault_fired();
    mem_fault_arm(0);
    if (!has_fired) {
      assert_int_equal(status, SITS_OK);
      api_request_destroy(r);
      assert_int_equal(mem_live_blocks(), before);
      assert_true(n > 5);
      return;
    }
    assert_true(status != SITS_OK && !r);
    assert_int_equal(mem_live_blocks(), before);
  }
  fail_msg("the parse never ends without a failure");
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_every_field_arrives),        cmocka_unit_test(test_token_prompts), cmocka_unit_test(test_refusals),
    cmocka_unit_test(test_unknown_fields_are_bounded), cmocka_unit_test(test_values_are_bounded), cmocka_unit_test(test_chat),
    cmocka_unit_test(test_allocation_failures)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
