/* Request parsing: defaults, ranges, limits, structure of each field, and what is refused by name. Expected values are OpenAI's and vLLM's
 * documented ones, written out here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "front/api/api_request.h"

#define CHAT(rest) "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" rest "}"
#define TEXT(rest) "{\"prompt\":\"hi\"" rest "}"

static struct api_request *parse_ok(enum api_kind kind, const char *body)
{
  struct api_request *request = NULL;
  struct sits_error err = {0};
  enum sits_status status = api_request_parse(kind, body, strlen(body), &api_limits_default, &request, &err);
  if (status) fail_msg("%s: %s %s (%s)", body, sits_status_info(status)->name, err.text, err.param);
  return request;
}

static void test_defaults(void **state)
{
  struct api_request *r = parse_ok(API_CHAT, CHAT(""));
  assert_true(r->temperature == 1 && r->top_p == 1 && r->min_p == 0 && r->top_k == 0 && r->n == 1);
  assert_true(r->repetition_penalty == 1 && r->presence_penalty == 0 && r->frequency_penalty == 0);
  assert_int_equal(api_request_max_tokens(r), -1);
  assert_int_equal(api_request_logprobs(r), -1);
  assert_false(r->stream || r->echo || r->ignore_eos || r->include_usage || r->has_seed || r->return_token_ids);
  assert_true(r->skip_special_tokens && r->add_generation_prompt);
  assert_false(r->add_special_tokens); /* the template writes them */
  api_request_destroy(r);
  r = parse_ok(API_COMPLETION, TEXT(""));
  assert_true(r->add_special_tokens && r->parse_special);
  assert_int_equal(r->n_prompts, 1);
  assert_string_equal(r->prompts[0].text, "hi");
  api_request_destroy(r);
}

struct refusal { enum api_kind kind; const char *body; enum sits_status status; const char *param; };

static const struct refusal refusals[] = {
  {API_CHAT, "", SITS_INVALID_JSON, ""},
  {API_CHAT, "[]", SITS_INVALID_ARGUMENT, ""},
  {API_CHAT, "{\"messages\":[],}", SITS_INVALID_JSON, ""},
  {API_CHAT, "{\"messages\":[],\"messages\":[]}", SITS_INVALID_JSON, ""},
  {API_CHAT, "{}", SITS_MISSING_PARAMETER, "messages"},
  {API_CHAT, "{\"messages\":[]}", SITS_INVALID_ARGUMENT, "messages"},
  {API_CHAT, "{\"messages\":\"hi\"}", SITS_INVALID_ARGUMENT, "messages"},
  {API_COMPLETION, "{}", SITS_MISSING_PARAMETER, "prompt"},
  {API_COMPLETION, "{\"prompt\":null}", SITS_MISSING_PARAMETER, "prompt"},
  {API_COMPLETION, "{\"prompt\":[]}", SITS_INVALID_ARGUMENT, "prompt"},
  {API_COMPLETION, "{\"prompt\":[[]]}", SITS_INVALID_ARGUMENT, "prompt"},
  {API_COMPLETION, "{\"prompt\":[-1]}", SITS_INVALID_ARGUMENT, "prompt"},
  {API_COMPLETION, "{\"prompt\":[1,\"a\"]}", SITS_INVALID_ARGUMENT, "prompt"},
  {API_COMPLETION, "{\"prompt\":7}", SITS_INVALID_ARGUMENT, "prompt"},
  {API_CHAT, CHAT(",\"temperature\":-0.1"), SITS_INVALID_ARGUMENT, "temperature"},
  {API_CHAT, CHAT(",\"temperature\":2.1"), SITS_INVALID_ARGUMENT, "temperature"},
  {API_CHAT, CHAT(",\"temperature\":\"1\""), SITS_INVALID_ARGUMENT, "temperature"},
  {API_CHAT, CHAT(",\"top_p\":0"), SITS_INVALID_ARGUMENT, "top_p"},
  {API_CHAT, CHAT(",\"top_p\":1e-300"), SITS_INVALID_ARGUMENT, "top_p"}, /* 0 as a float */
  {API_CHAT, CHAT(",\"top_p\":1.01"), SITS_INVALID_ARGUMENT, "top_p"},
  {API_CHAT, CHAT(",\"min_p\":-0.5"), SITS_INVALID_ARGUMENT, "min_p"},
  {API_CHAT, CHAT(",\"top_k\":1.5"), SITS_INVALID_ARGUMENT, "top_k"},
  {API_CHAT, CHAT(",\"presence_penalty\":2.5"), SITS_INVALID_ARGUMENT, "presence_penalty"},
  {API_CHAT, CHAT(",\"frequency_penalty\":-2.5"), SITS_INVALID_ARGUMENT, "frequency_penalty"},
  {API_CHAT, CHAT(",\"repetition_penalty\":1e-300"), SITS_INVALID_ARGUMENT, "repetition_penalty"},
  {API_CHAT, CHAT(",\"repetition_penalty\":0"), SITS_INVALID_ARGUMENT, "repetition_penalty"},
  {API_CHAT, CHAT(",\"n\":0"), SITS_INVALID_ARGUMENT, "n"},
  {API_CHAT, CHAT(",\"n\":129"), SITS_INVALID_ARGUMENT, "n"},
  {API_CHAT, CHAT(",\"n\":1e300"), SITS_INVALID_ARGUMENT, "n"},
  {API_CHAT, CHAT(",\"n\":9007199254740991"), SITS_INVALID_ARGUMENT, "n"},
  {API_COMPLETION, "{\"prompt\":[\"a\",\"b\",\"c\",\"d\",\"e\"],\"n\":128}", SITS_INVALID_ARGUMENT, "n"},
  {API_CHAT, CHAT(",\"max_tokens\":0"), SITS_INVALID_ARGUMENT, "max_tokens"},
  {API_CHAT, CHAT(",\"max_tokens\":-1"), SITS_INVALID_ARGUMENT, "max_tokens"},
  {API_CHAT, CHAT(",\"max_completion_tokens\":99999999999"), SITS_INVALID_ARGUMENT, "max_completion_tokens"},
  {API_COMPLETION, TEXT(",\"max_tokens\":0"), SITS_INVALID_ARGUMENT, "max_tokens"},
  {API_CHAT, CHAT(",\"max_tokens\":4,\"min_tokens\":5"), SITS_INVALID_ARGUMENT, "min_tokens"},
  {API_CHAT, CHAT(",\"stop\":\"\""), SITS_INVALID_ARGUMENT, "stop"},
  {API_CHAT, CHAT(",\"stop\":[1]"), SITS_INVALID_ARGUMENT, "stop"},
  {API_CHAT, CHAT(",\"stop\":\"a\\u0000b\""), SITS_INVALID_ARGUMENT, "stop"},
  {API_CHAT, CHAT(",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\"]"),
   SITS_INVALID_ARGUMENT, "stop"},
  {API_CHAT, CHAT(",\"stop_token_ids\":[1.5]"), SITS_INVALID_ARGUMENT, "stop_token_ids"},
  {API_CHAT, CHAT(",\"logit_bias\":{\"a\":1}"), SITS_INVALID_ARGUMENT, "logit_bias"},
  {API_CHAT, CHAT(",\"logit_bias\":{\"99999999999\":1}"), SITS_INVALID_ARGUMENT, "logit_bias"},
  {API_CHAT, CHAT(",\"logit_bias\":{\"1\":101}"), SITS_INVALID_ARGUMENT, "logit_bias"},
  {API_CHAT, CHAT(",\"logit_bias\":{\"1\":\"x\"}"), SITS_INVALID_ARGUMENT, "logit_bias"},
  {API_CHAT, CHAT(",\"logit_bias\":[]"), SITS_INVALID_ARGUMENT, "logit_bias"},
  {API_CHAT, CHAT(",\"top_logprobs\":3"), SITS_INVALID_ARGUMENT, "top_logprobs"},
  {API_CHAT, CHAT(",\"logprobs\":true,\"top_logprobs\":21"), SITS_INVALID_ARGUMENT, "top_logprobs"},
  {API_CHAT, CHAT(",\"logprobs\":5"), SITS_INVALID_ARGUMENT, "logprobs"},
  {API_COMPLETION, TEXT(",\"logprobs\":true"), SITS_INVALID_ARGUMENT, "logprobs"},
  {API_COMPLETION, TEXT(",\"logprobs\":21"), SITS_INVALID_ARGUMENT, "logprobs"},
  {API_CHAT, CHAT(",\"stream\":1"), SITS_INVALID_ARGUMENT, "stream"},
  {API_CHAT, CHAT(",\"return_timing\":1"), SITS_INVALID_ARGUMENT, "return_timing"},
  {API_COMPLETION, TEXT(",\"return_timing\":\"true\""), SITS_INVALID_ARGUMENT, "return_timing"},
  {API_CHAT, CHAT(",\"stream_options\":{\"include_usage\":true}"), SITS_INVALID_ARGUMENT, "stream_options"},
  {API_CHAT, CHAT(",\"stream\":true,\"stream_options\":{\"include_usage\":1}"), SITS_INVALID_ARGUMENT, "stream_options"},
  {API_CHAT, CHAT(",\"model\":5"), SITS_INVALID_ARGUMENT, "model"},
  {API_CHAT, CHAT(",\"chat_template_kwargs\":{\"messages\":[]}"), SITS_INVALID_ARGUMENT, "chat_template_kwargs"},
  {API_CHAT, CHAT(",\"tools\":[{\"type\":\"function\"}]"), SITS_UNSUPPORTED_PARAMETER, "tools"},
  {API_CHAT, CHAT(",\"tool_choice\":\"required\""), SITS_UNSUPPORTED_PARAMETER, "tool_choice"},
  {API_CHAT, CHAT(",\"response_format\":{\"type\":\"json_object\"}"), SITS_UNSUPPORTED_PARAMETER, "response_format"},
  {API_CHAT, CHAT(",\"functions\":[{}]"), SITS_UNSUPPORTED_PARAMETER, "functions"},
  {API_CHAT, CHAT(",\"modalities\":[\"text\",\"audio\"]"), SITS_UNSUPPORTED_PARAMETER, "modalities"},
  {API_CHAT, CHAT(",\"audio\":{}"), SITS_UNSUPPORTED_PARAMETER, "audio"},
  {API_CHAT, CHAT(",\"guided_json\":{}"), SITS_UNSUPPORTED_PARAMETER, "guided_json"},
  {API_CHAT, CHAT(",\"reasoning_effort\":\"high\""), SITS_UNSUPPORTED_PARAMETER, "reasoning_effort"},
  {API_COMPLETION, TEXT(",\"best_of\":1"), SITS_UNSUPPORTED_PARAMETER, "best_of"},
  {API_COMPLETION, TEXT(",\"suffix\":\"x\""), SITS_UNSUPPORTED_PARAMETER, "suffix"},
  {API_TOKENIZE, "{}", SITS_MISSING_PARAMETER, "prompt"},
  {API_TOKENIZE, "{\"prompt\":[1]}", SITS_INVALID_ARGUMENT, "prompt"},
  {API_DETOKENIZE, "{}", SITS_MISSING_PARAMETER, "tokens"},
  {API_DETOKENIZE, "{\"tokens\":[\"a\"]}", SITS_INVALID_ARGUMENT, "tokens"},
};

static void test_refusals(void **state)
{
  int64_t before = mem_live_blocks();
  for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
    const struct refusal *want = &refusals[i];
    struct api_request *request = NULL;
    struct sits_error err = {0};
    enum sits_status status = api_request_parse(want->kind, want->body, strlen(want->body), &api_limits_default, &request, &err);
    if (status != want->status || strcmp(err.param, want->param))
      fail_msg("%s: got %s '%s', want %s '%s'", want->body, sits_status_info(status)->name, err.param, sits_status_info(want->status)->name,
               want->param);
    assert_null(request);
    assert_true(err.text[0]);
  }
  assert_int_equal(mem_live_blocks(), before);
}

static void test_accepted(void **state)
{
  static const char *const bodies[] = {CHAT(",\"user\":\"u\",\"metadata\":{\"a\":\"b\"},\"store\":true,\"service_tier\":\"auto\",\"safety_"
                                            "identifier\":\"s\",\"prompt_cache_key\":\"k\""),
                                       CHAT(",\"parallel_tool_calls\":false,\"tools\":[],\"tool_choice\":\"none\",\"response_format\":{"
                                            "\"type\":\"text\"},\"modalities\":[\"text\"]"),
                                       CHAT(",\"tools\":null,\"functions\":null,\"best_of\":null,\"audio\":null,\"temperature\":null,"
                                            "\"n\":null,\"stop\":null,\"logit_bias\":null"),
                                       CHAT(",\"never_heard_of\":{\"x\":[1]}"),
                                       CHAT(",\"seed\":-9223372036854775808"),
                                       CHAT(",\"n\":2.0"),
                                       CHAT(",\"stop\":[]"),
                                       CHAT(",\"top_logprobs\":0"),
                                       CHAT(",\"logprobs\":false,\"top_logprobs\":null")};
  for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) api_request_destroy(parse_ok(API_CHAT, bodies[i]));
}

static void test_values(void **state)
{
  struct api_request *r =
    parse_ok(API_CHAT, CHAT(",\"max_tokens\":50,\"max_completion_tokens\":7,\"stop\":[\"a\",\"\\u00e9\"],"
                            "\"logit_bias\":{\"12\":-100,\"3\":2.5},\"seed\":5,\"logprobs\":true,\"top_logprobs\":2,\"stream\":true,"
                            "\"stream_options\":{\"include_usage\":true},\"stop_token_ids\":[7,8]"));
  assert_int_equal(api_request_max_tokens(r), 7); /* the newer name wins */
  assert_int_equal(r->n_stops, 2);
  assert_string_equal(r->stops[1], "\xC3\xA9");
  assert_int_equal(r->n_bias, 2);
  for (int i = 0; i < 2; i++)
    assert_true((r->bias[i].token == 12 && r->bias[i].bias == -100) || (r->bias[i].token == 3 && r->bias[i].bias == 2.5f));
  assert_true(r->has_seed && r->seed == 5 && r->stream && r->include_usage);
  assert_int_equal(api_request_logprobs(r), 2);
  assert_int_equal(r->stop_ids[1], 8);
  api_request_destroy(r);
  r = parse_ok(API_CHAT, CHAT(",\"logprobs\":true")); /* the chosen token's alone */
  assert_int_equal(api_request_logprobs(r), 0);
  api_request_destroy(r);
  r = parse_ok(API_COMPLETION, "{\"prompt\":[[1,2],\"x\",[3]],\"echo\":true,\"max_tokens\":0,\"logprobs\":0}");
  assert_int_equal(r->n_prompts, 3);
  assert_int_equal(r->prompts[0].n_ids, 2);
  assert_int_equal(r->prompts[2].ids[0], 3);
  assert_string_equal(r->prompts[1].text, "x");
  assert_int_equal(api_request_logprobs(r), 0);
  api_request_destroy(r);
}

static void test_error_never_echoes(void **state)
{
  char body[4000], secret[2000];
  memset(secret, 'Z', sizeof secret - 1);
  secret[sizeof secret - 1] = '\0';
  static const char *const shapes[] = {CHAT(",\"model\":\"%s\""), CHAT(",\"temperature\":\"%s\""), CHAT(",\"logit_bias\":{\"%s\":1}"),
                                       CHAT(",\"stop\":[\"%s\"]"), "{\"%s\" 1}", "%s", CHAT(",\"tool_choice\":\"%s\"")};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    const char *mark = strstr(shapes[i], "%s");
    snprintf(body, sizeof body, "%.*s%s%s", (int)(mark - shapes[i]), shapes[i], secret, mark + 2);
    struct api_request *request = NULL;
    struct sits_error err = {0};
    assert_int_not_equal(api_request_parse(API_CHAT, body, strlen(body), &api_limits_default, &request, &err), SITS_OK);
    assert_null(strstr(err.text, "ZZ"));
    assert_null(strstr(err.param, "ZZ"));
  }
}

static void test_body_limits(void **state)
{
  struct api_limits limits = api_limits_default;
  limits.max_body_bytes = 20;
  struct api_request *request = NULL;
  struct sits_error err = {0};
  const char *body = CHAT("");
  assert_int_equal(api_request_parse(API_CHAT, body, strlen(body), &limits, &request, &err), SITS_TOO_LARGE);
  char deep[400];
  memset(deep, '[', sizeof deep);
  assert_int_equal(api_request_parse(API_CHAT, deep, sizeof deep, &api_limits_default, &request, &err), SITS_INVALID_JSON);
}

static void test_every_allocation_may_fail(void **state)
{
  const char *body = CHAT(",\"stop\":[\"a\"],\"stop_token_ids\":[1],\"logit_bias\":{\"1\":1}");
  for (uint64_t n = 1;; n++) {
    struct api_request *request = NULL;
    struct sits_error err = {0};
    int64_t before = mem_live_blocks();
    mem_fault_arm(n);
    enum sits_status status = api_request_parse(API_CHAT, body, strlen(body), &api_limits_default, &request, &err);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    api_request_destroy(request);
    assert_int_equal(mem_live_blocks(), before);
    if (!fired) {
      assert_int_equal(status, SITS_OK);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_defaults),
                                     cmocka_unit_test(test_refusals),
                                     cmocka_unit_test(test_accepted),
                                     cmocka_unit_test(test_values),
                                     cmocka_unit_test(test_error_never_echoes),
                                     cmocka_unit_test(test_body_limits),
                                     cmocka_unit_test(test_every_allocation_may_fail)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
