/* /tokenize and /detokenize, in vLLM's shapes. Both run on a worker. */
#include <stdio.h>
#include <string.h>

#include "front/api/api_prompt.h"
#include "front/http/http_internal.h"

#define MAX_BODY_BYTES (512u << 20)

static enum sits_status parse(struct http_request *request, const struct api_model **model, struct api_request **out,
                              struct sits_error *err)
{
  *model = api_model(request->server->api);
  enum sits_status status = http_request_parse(request, out, err);
  if (!status) status = api_model_check(*model, (*out)->model, "'model'", request->grant, err);
  return status; /* what was parsed is the caller's to destroy */
}

static void append_token_strs(const struct api_model *model, const struct token_list *tokens, struct buf *body)
{
  buf_append_text(body, ",\"token_strs\":[");
  for (int64_t i = 0; i < tokens->n; i++) {
    size_t n_bytes = 0;
    const char *piece = tokenizer_piece(model->tokenizer, tokens->ids[i], &n_bytes);
    buf_append_text(body, i ? ",\"" : "\"");
    if (piece) buf_append_json_escaped(body, piece, n_bytes);
    buf_append_char(body, '"');
  }
  buf_append_char(body, ']');
}

void http_answer_tokenize(struct http_request *request)
{
  struct sits_error err = {0};
  const struct api_model *model;
  struct api_request *parsed = NULL;
  struct token_list tokens = {0};
  struct buf body;
  buf_init(&body, MAX_BODY_BYTES);
  enum sits_status status = parse(request, &model, &parsed, &err);
  if (!status) status = parsed->messages ? api_prompt_messages(request->server->api, parsed, &tokens, &err)
                                         : api_prompt_text(model, parsed, 0, &tokens, &err);
  if (status) {
    http_respond_failure(request, status, &err);
  } else {
    buf_printf(&body, "{\"count\":%lld,\"max_model_len\":%d,\"tokens\":[", (long long)tokens.n, model->max_model_len);
    for (int64_t i = 0; i < tokens.n; i++) buf_printf(&body, i ? ",%d" : "%d", tokens.ids[i]);
    buf_append_char(&body, ']');
    if (parsed->return_token_strs) append_token_strs(model, &tokens, &body);
    else buf_append_text(&body, ",\"token_strs\":null");
    buf_append_char(&body, '}');
    http_respond(request, MHD_HTTP_OK, "application/json", &body);
  }
  token_list_fini(&tokens);
  api_request_destroy(parsed);
  buf_fini(&body);
}

void http_answer_detokenize(struct http_request *request)
{
  struct sits_error err = {0};
  const struct api_model *model;
  struct api_request *parsed = NULL;
  struct buf text, body;
  buf_init(&text, MAX_BODY_BYTES);
  buf_init(&body, MAX_BODY_BYTES);
  enum sits_status status = parse(request, &model, &parsed, &err);
  for (int64_t i = 0; !status && i < parsed->n_tokens; i++)
    if (parsed->tokens[i] >= tokenizer_n_vocab(model->tokenizer))
      status = sits_fail_param(&err, SITS_INVALID_ARGUMENT, "tokens", "a token id is outside the vocabulary of %d",
                               tokenizer_n_vocab(model->tokenizer));
  if (!status) status = tokenizer_decode(model->tokenizer, parsed->tokens, parsed->n_tokens, false, &text);
  if (status) {
    http_respond_failure(request, status, &err);
  } else {
    buf_append_text(&body, "{\"prompt\":\"");
    buf_append_json_escaped(&body, text.data ? text.data : "", text.size);
    buf_append_text(&body, "\"}");
    http_respond(request, MHD_HTTP_OK, "application/json", &body);
  }
  api_request_destroy(parsed);
  buf_fini(&text);
  buf_fini(&body);
}
