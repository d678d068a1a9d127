/* Request bodies: the first byte chooses the call, the rest is the JSON. Whatever comes in is either a request within its limits or an
 * error with a text; messages are normalised too. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "front/api/api_prompt.h"
#include "front/http/http_reply.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_request(const struct api_request *request)
{
  const struct api_limits *limits = &api_limits_default;
  if (request->kind & (API_CHAT | API_COMPLETION)) {
    if (request->n < 1 || request->n > limits->max_choices || request->n_stops > limits->max_stops ||
        request->n_bias > limits->max_logit_bias || !(request->temperature >= 0 && request->temperature <= 2) ||
        !(request->top_p > 0 && request->top_p <= 1))
      abort();
  }
  for (int parts = 0; request->messages && parts < 2; parts++) {
    json_t *messages = NULL;
    struct sits_error err = {0};
    if (api_messages_normalise(request->messages, limits, parts, false, &messages, &err)) {
      if (!err.text[0]) abort();
      continue;
    }
    if (json_array_size(messages) != json_array_size(request->messages)) abort();
    json_decref(messages);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  static const enum api_kind kinds[] = {API_CHAT, API_COMPLETION, API_TOKENIZE, API_DETOKENIZE};
  if (size == 0) return 0;
  struct api_request *request = NULL;
  struct sits_error err = {0};
  if (api_request_parse(kinds[data[0] % 4], (const char *)data + 1, size - 1, &api_limits_default, &request, &err)) {
    struct buf body;
    buf_init(&body, 65536);
    http_error_body(err.status, err.text, err.param, &body);
    if (!err.text[0] || !err.status || body.failed) abort();
    buf_fini(&body);
    return 0;
  }
  check_request(request);
  api_request_destroy(request);
  return 0;
}
