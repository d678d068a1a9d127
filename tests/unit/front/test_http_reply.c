/* OpenAI's shapes as bytes: chunks, whole answers, log probabilities, usage and errors, against texts written out by hand. */
#include "front_rig.h"

#include <math.h>

#include "base/json.h"
#include "front/http/http_reply.h"

struct bench { struct rig rig; struct api_call *call; struct http_reply reply; struct buf out; };

static void no_delta(void *context, const struct api_delta *delta) {}
static void no_flush(void *context) {}
static bool never_full(void *context) { return false; }
static void no_done(void *context, const struct api_result *result) {}
static const struct api_sink sink = {.delta = no_delta, .flush = no_flush, .is_full = never_full, .done = no_done};

static void open_bench(struct bench *b, enum api_kind kind, const char *body)
{
  struct sits_error err = {0};
  rig_open(&b->rig);
  if (api_call_create(b->rig.api, rig_parse(kind, body), &sink, NULL, &b->call, &err)) fail_msg("%s", err.text);
  assert_int_equal(
    http_reply_init(&b->reply, api_call_request(b->call), b->rig.tokenizer, "m\"1", "ID", 1700000000, api_call_n_choices(b->call)),
    SITS_OK);
  b->reply.call = b->call;
  buf_init(&b->out, 1 << 20);
}

static void close_bench(struct bench *b)
{
  http_reply_fini(&b->reply);
  buf_fini(&b->out);
  api_call_release(b->call);
  rig_close(&b->rig);
}

static void delta(struct bench *b, struct api_delta d)
{
  d.n_bytes = d.text ? strlen(d.text) : 0;
  if (!d.stop_token) d.stop_token = -1;
  http_reply_delta(&b->reply, &d, &b->out);
}

#define CHAT "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"
#define HEAD(kind, object) "{\"id\":\"" kind "-ID\",\"object\":\"" object "\",\"created\":1700000000,\"model\":\"m\\\"1\"," \
                           "\"system_fingerprint\":\"sits2026-" SITS_VERSION "\",\"choices\":["

static void test_chat_chunks(void **state)
{
  struct bench b;
  open_bench(&b, API_CHAT, CHAT ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
  delta(&b, (struct api_delta){.text = "a\n\"\xE2\x82\xAC", .n_output_tokens = 1});
  delta(&b, (struct api_delta){.text = "", .finish = API_FINISH_STOP, .stop_text = "E\"D", .n_output_tokens = 2});
  http_reply_done(&b.reply, &(struct api_result){.usage = {.n_prompt_tokens = 3, .n_output_tokens = 2, .n_cached_tokens = 1}}, &b.out);
  assert_string_equal(b.out.data,
    "data: " HEAD("chatcmpl", "chat.completion.chunk") "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
    "\"finish_reason\":null}],\"usage\":null}\n\n"
    "data: " HEAD("chatcmpl", "chat.completion.chunk") "{\"index\":0,\"delta\":{\"content\":\"a\\n\\\"\xE2\x82\xAC\"},\"logprobs\":null,"
    "\"finish_reason\":null}],\"usage\":null}\n\n"
    "data: " HEAD("chatcmpl", "chat.completion.chunk") "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\","
    "\"stop_reason\":\"E\\\"D\"}],\"usage\":null}\n\n"
    "data: " HEAD("chatcmpl", "chat.completion.chunk") "],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5,"
    "\"prompt_tokens_details\":{\"cached_tokens\":1}}}\n\n"
    "data: [DONE]\n\n");
  close_bench(&b);
}

/* The stages add up to the total, delivery being what came after the engine. */
static void test_timing(void **state)
{
  struct bench b;
  open_bench(&b, API_COMPLETION, "{\"prompt\":\"x\",\"return_timing\":true}");
  delta(&b, (struct api_delta){.text = "y", .finish = API_FINISH_LENGTH, .n_output_tokens = 1});
  const struct api_usage usage = {
      .n_prompt_tokens = 1, .n_output_tokens = 1, .delivered_us = 9000,
      .timing = {.submitted_us = 1000, .first_scheduled_us = 1250, .first_token_us = 3500, .done_us = 8000, .queue_us = 250,
                 .prefill_us = 2000, .decode_us = 4000, .scheduling_us = 750, .n_preemptions = 2}};
  http_reply_done(&b.reply, &(struct api_result){.usage = usage}, &b.out);
  assert_non_null(strstr(b.out.data,
    "\"timing\":{\"queue_ms\":0.250,\"prefill_ms\":2.000,\"decode_ms\":4.000,\"scheduling_ms\":0.750,\"delivery_ms\":1.000,"
    "\"time_to_first_token_ms\":2.500,\"total_ms\":8.000,\"preemptions\":2}}}"));
  close_bench(&b);
}

static void test_error_in_a_stream(void **state)
{
  struct bench b;
  open_bench(&b, API_COMPLETION, "{\"prompt\":\"x\",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
  http_reply_done(&b.reply, &(struct api_result){.status = SITS_DEVICE, .text = "gone"}, &b.out);
  assert_string_equal(b.out.data,
                      "data: {\"error\":{\"message\":\"gone\",\"type\":\"server_error\",\"param\":null,\"code\":\"device_failed\"}}\n\n"
                      "data: [DONE]\n\n");
  close_bench(&b);
}

static void test_whole_completion(void **state)
{
  struct bench b;
  open_bench(&b, API_COMPLETION, "{\"prompt\":\"x\",\"n\":2}");
  delta(&b, (struct api_delta){.choice = 1, .text = "one", .n_output_tokens = 1});
  delta(&b, (struct api_delta){.choice = 0, .text = "zero", .finish = API_FINISH_LENGTH, .n_output_tokens = 1});
  delta(&b, (struct api_delta){.choice = 1, .text = "!", .finish = API_FINISH_STOP, .stop_token = 9, .n_output_tokens = 3});
  http_reply_done(&b.reply, &(struct api_result){.usage = {.n_prompt_tokens = 1, .n_output_tokens = 4}}, &b.out);
  assert_string_equal(b.out.data, HEAD("cmpl", "text_completion")
    "{\"index\":0,\"text\":\"zero\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null},"
    "{\"index\":1,\"text\":\"one!\",\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":9}],"
    "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":4,\"total_tokens\":5,\"prompt_tokens_details\":{\"cached_tokens\":0}}}");
  close_bench(&b);
}

/* Tokens that are no whole text are escaped, floors hold, and NaN never comes out. */
static void test_log_probabilities(void **state)
{
  struct api_token tokens[2] = {{.id = 'h', .logprob = -0.25f, .n_top = 2, .top_ids = {'h', 0xE2}, .top_logprobs = {-0.25f, -INFINITY}},
                                {.id = 0xE2, .logprob = NAN, .n_top = 1, .top_ids = {0xE2}, .top_logprobs = {-2}}};
  struct bench b;
  open_bench(&b, API_CHAT, CHAT ",\"logprobs\":true,\"top_logprobs\":2}");
  delta(&b, (struct api_delta){.text = "h?", .tokens = tokens, .n_tokens = 2, .finish = API_FINISH_LENGTH});
  http_reply_done(&b.reply, &(struct api_result){.status = SITS_OK}, &b.out);
  assert_non_null(strstr(
    b.out.data, "\"logprobs\":{\"content\":[{\"token\":\"h\",\"logprob\":-0.25,\"bytes\":[104],\"top_logprobs\":[{\"token\":\"h\","
                "\"logprob\":-0.25,\"bytes\":[104]},"
                "{\"token\":\"\\\\xe2\",\"logprob\":-9999.0,\"bytes\":[226]}]},{\"token\":\"\\\\xe2\",\"logprob\":-9999.0,\"bytes\":[226],"
                "\"top_logprobs\":[{\"token\":\"\\\\xe2\",\"logprob\":-2.0,\"bytes\":[226]}]}],\"refusal\":null}"));
  close_bench(&b);
  open_bench(&b, API_COMPLETION, "{\"prompt\":\"x\",\"logprobs\":2}");
  delta(&b, (struct api_delta){.text = "h?", .tokens = tokens, .n_tokens = 2, .finish = API_FINISH_LENGTH});
  http_reply_done(&b.reply, &(struct api_result){.status = SITS_OK}, &b.out);
  assert_non_null(strstr(b.out.data,
    "\"logprobs\":{\"tokens\":[\"h\",\"bytes:\\\\xe2\"],\"token_logprobs\":[-0.25,-9999.0],\"top_logprobs\":[{\"h\":-0.25,"
    "\"bytes:\\\\xe2\":-9999.0},{\"bytes:\\\\xe2\":-2.0}],\"text_offset\":[0,1]}"));
  close_bench(&b);
}

static void test_errors(void **state)
{
  struct buf out;
  buf_init(&out, 1 << 16);
  http_error_body(SITS_INVALID_ARGUMENT, "bad \"x\"\n\xFF", "n", &out);
  assert_string_equal(out.data,
                      "{\"error\":{\"message\":\"bad \\\"x\\\"\\n\xEF\xBF\xBD\",\"type\":\"invalid_request_error\",\"param\":\"n\","
                      "\"code\":\"invalid_value\"}}");
  for (int s = 1; s < SITS_STATUS_COUNT; s++) { /* every row of the table is a proper error */
    json_t *root = NULL;
    struct sits_error err = {0};
    buf_clear(&out);
    http_error_body((enum sits_status)s, NULL, NULL, &out);
    assert_int_equal(json_parse(out.data, out.size, &json_limits_request, &root, &err), SITS_OK);
    const json_t *error = json_object_get(root, "error");
    assert_int_equal(json_object_size(error), 4);
    assert_true(json_string_length(json_object_get(error, "message")) > 0 && json_string_length(json_object_get(error, "type")) > 0);
    assert_true(json_is_null(json_object_get(error, "param")));
    assert_true(json_is_string(json_object_get(error, "code")) || json_is_null(json_object_get(error, "code")));
    json_decref(root);
  }
  char text[9000]; /* cut at a character's end */
  for (size_t i = 0; i + 3 < sizeof text; i += 3) memcpy(text + i, "\xE2\x82\xAC", 4);
  buf_clear(&out);
  http_error_body(SITS_INTERNAL, text, NULL, &out);
  assert_true(out.size < 4300);
  assert_null(strstr(out.data, "\xEF\xBF\xBD"));
  buf_fini(&out);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_chat_chunks), cmocka_unit_test(test_timing),
                                     cmocka_unit_test(test_error_in_a_stream),
                                     cmocka_unit_test(test_whole_completion), cmocka_unit_test(test_log_probabilities),
                                     cmocka_unit_test(test_errors)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
