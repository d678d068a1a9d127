/* Request messages of the gRPC front end: the first byte chooses the message, the rest is its bytes. What the walk lets pass and protobuf-c
 * unpacks holds only whole UTF-8 strings without NUL, and becomes a request within its limits or an error with a text. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "front/grpc/rpc_internal.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "sits2026/v1/inference.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct { const ProtobufCMessageDescriptor *type; enum api_kind kind; } messages[] = {
  {&sits2026__v1__generate_request__descriptor, API_COMPLETION}, {&sits2026__v1__chat_request__descriptor, API_CHAT},
  {&sits2026__v1__tokenize_request__descriptor, API_TOKENIZE},   {&sits2026__v1__detokenize_request__descriptor, API_DETOKENIZE},
  {&grpc__health__v1__health_check_request__descriptor, 0},      {&grpc__reflection__v1__server_reflection_request__descriptor, 0},
  {&sits2026__v1__get_model_request__descriptor, 0},             {&sits2026__v1__abort_request__descriptor, 0}};

static void check_request(const struct api_request *request)
{
  const struct api_limits *limits = &api_limits_default;
  if (!(request->kind & (API_CHAT | API_COMPLETION))) return;
  if (request->n < 1 || request->n > limits->max_choices || request->n_stops > limits->max_stops ||
      request->n_bias > limits->max_logit_bias || !(request->temperature >= 0 && request->temperature <= 2) ||
      !(request->top_p > 0 && request->top_p <= 1))
    abort();
  for (int64_t i = 0; i < request->n_prompts; i++)
    if (request->prompts[i].text && !utf8_is_valid(request->prompts[i].text, request->prompts[i].n_bytes)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  struct sits_error err = {0};
  if (size == 0) return 0;
  size_t which = data[0] % (sizeof messages / sizeof *messages);
  const ProtobufCMessageDescriptor *type = messages[which].type;
  if (rpc_wire_check(type, data + 1, size - 1, &err)) {
    if (err.status != SITS_INVALID_ARGUMENT || !err.text[0]) abort();
    return 0;
  }
  ProtobufCMessage *message = protobuf_c_message_unpack(type, &rpc_allocator, size - 1, data + 1);
  if (!message) return 0;
  struct api_request *request = NULL;
  if (messages[which].kind) {
    enum sits_status status = rpc_request_parse(message, messages[which].kind, data[0] & 0x80, &api_limits_default, &request, &err);
    if (status && (err.status != status || !err.text[0])) abort();
    if (!status) check_request(request);
    api_request_destroy(request);
  }
  protobuf_c_message_free_unpacked(message, &rpc_allocator);
  return 0;
}
