/* The method table, and the methods that answer at once. To add a method: the .proto, a row here and its function. */
#include <string.h>

#include "base/arena.h"
#include "front/api/api_prompt.h"
#include "front/grpc/rpc_internal.h"
#include "grpc/health/v1/health.pb-c.h"
#include "sits2026/v1/inference.pb-c.h"

#define MAX_ANSWER_BYTES (64u << 20)

static enum sits_status parse(struct rpc *rpc, const ProtobufCMessage *message, const struct api_model **model, struct api_request **out,
                              struct sits_error *err)
{
  *model = api_model(rpc->server->api);
  enum sits_status status = rpc_parse(rpc, message, out, err);
  if (!status) status = api_model_check(*model, (*out)->model, "'model'", rpc->grant, err);
  return status; /* what was parsed is the caller's to destroy */
}

/* ---- tokenizer ---- */

static bool fill_token_strs(const struct api_model *model, const struct token_list *tokens, struct arena *arena,
                            Sits2026__V1__TokenizeResponse *out)
{
  struct buf piece;
  buf_init(&piece, 1u << 20);
  out->token_strs = arena_alloc(arena, ((size_t)tokens->n + 1) * sizeof *out->token_strs);
  bool has_room = out->token_strs != NULL;
  for (int64_t i = 0; has_room && i < tokens->n; i++) {
    size_t n_bytes = 0;
    const char *text = tokenizer_piece(model->tokenizer, tokens->ids[i], &n_bytes);
    out->token_strs[i] = rpc_reply_text(arena, text ? text : "", n_bytes);
    has_room = out->token_strs[i] != NULL;
  }
  out->n_token_strs = has_room ? (size_t)tokens->n : 0;
  buf_fini(&piece);
  return has_room;
}

static enum sits_status answer_tokenize(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  const struct api_model *model;
  struct api_request *parsed = NULL;
  struct token_list tokens = {0};
  struct arena arena;
  arena_init(&arena, MAX_ANSWER_BYTES);
  enum sits_status status = parse(rpc, message, &model, &parsed, err);
  if (!status) status = parsed->messages ? api_prompt_messages(rpc->server->api, parsed, &tokens, err)
                                         : api_prompt_text(model, parsed, 0, &tokens, err);
  if (!status) {
    Sits2026__V1__TokenizeResponse out = SITS2026__V1__TOKENIZE_RESPONSE__INIT;
    out.has_count = out.has_max_model_len = true;
    out.count = tokens.n;
    out.max_model_len = model->max_model_len;
    out.tokens = tokens.ids;
    out.n_tokens = (size_t)tokens.n;
    if (parsed->return_token_strs && !fill_token_strs(model, &tokens, &arena, &out))
      status = sits_fail(err, SITS_NOMEM, "no memory for the answer");
    else status = rpc_reply_one(rpc, &out.base, err);
  }
  token_list_fini(&tokens);
  api_request_destroy(parsed);
  arena_fini(&arena);
  return status;
}

static enum sits_status answer_detokenize(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  const struct api_model *model;
  struct api_request *parsed = NULL;
  struct buf text;
  struct arena arena;
  buf_init(&text, MAX_ANSWER_BYTES);
  arena_init(&arena, 4 * (size_t)MAX_ANSWER_BYTES);
  enum sits_status status = parse(rpc, message, &model, &parsed, err);
  for (int64_t i = 0; !status && i < parsed->n_tokens; i++)
    if (parsed->tokens[i] >= tokenizer_n_vocab(model->tokenizer))
      status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "tokens", "a token id is outside the vocabulary of %d",
                               tokenizer_n_vocab(model->tokenizer));
  if (!status) status = tokenizer_decode(model->tokenizer, parsed->tokens, parsed->n_tokens, false, &text);
  if (!status) {
    Sits2026__V1__DetokenizeResponse out = SITS2026__V1__DETOKENIZE_RESPONSE__INIT;
    out.prompt = rpc_reply_text(&arena, text.data ? text.data : "", text.size);
    status = out.prompt ? rpc_reply_one(rpc, &out.base, err) : sits_fail(err, SITS_NOMEM, "no memory for the answer");
  }
  api_request_destroy(parsed);
  buf_fini(&text);
  arena_fini(&arena);
  return status;
}

/* ---- models ---- */

static void fill_model(const struct api_model *model, const char *name, Sits2026__V1__Model *out)
{
  sits2026__v1__model__init(out);
  out->id = (char *)name; /* packing only reads */
  out->has_created = out->has_max_model_len = true;
  out->created = model->loaded_unix_s;
  out->owned_by = "sits2026";
  out->root = (char *)model->names[0];
  out->max_model_len = model->max_model_len;
}

static enum sits_status answer_list_models(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  const struct api_model *model = api_model(rpc->server->api);
  Sits2026__V1__Model models[API_MAX_MODEL_NAMES], *list[API_MAX_MODEL_NAMES];
  Sits2026__V1__ListModelsResponse out = SITS2026__V1__LIST_MODELS_RESPONSE__INIT;
  out.data = list;
  for (int32_t i = 0; model && i < model->n_names; i++) {
    if (!access_allows_model(rpc->grant, model->names[i])) continue;
    fill_model(model, model->names[i], &models[i]);
    list[out.n_data++] = &models[i];
  }
  return rpc_reply_one(rpc, &out.base, err);
}

static enum sits_status answer_get_model(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  const Sits2026__V1__GetModelRequest *wanted = (const Sits2026__V1__GetModelRequest *)message;
  const struct api_model *model = api_model(rpc->server->api);
  if (!wanted->model || !wanted->model[0]) return sits_fail_param(err, SITS_MISSING_PARAMETER, "model", "'model' is required");
  enum sits_status status = api_model_check(model, wanted->model, "'model'", rpc->grant, err);
  if (status) return status;
  Sits2026__V1__Model out;
  fill_model(model, wanted->model, &out);
  return rpc_reply_one(rpc, &out.base, err);
}

/* ---- abort ---- */

/* A key may end its own tenant's calls, an admin's everyone's; others do not exist for it. */
static bool may_abort(const struct rpc *rpc, const struct rpc *other)
{
  return access_has_role(rpc->grant, ACCESS_ADMIN) || access_tenant(rpc->grant) == access_tenant(other->grant);
}

/* Cancelling takes the api's locks, which come after server.mutex in the order; the calls are found first and held. */
static enum sits_status answer_abort(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  const Sits2026__V1__AbortRequest *wanted = (const Sits2026__V1__AbortRequest *)message;
  struct rpc_server *server = rpc->server;
  if (!wanted->request_id || !wanted->request_id[0])
    return sits_fail_param(err, SITS_MISSING_PARAMETER, "request_id", "'request_id' is required");
  int32_t n = 0;
  pthread_mutex_lock(&server->mutex);
  for (struct rpc *at = server->rpcs; at; at = at->next) {
    if (strcmp(at->id, wanted->request_id) || !may_abort(rpc, at)) continue;
    pthread_mutex_lock(&at->mutex);
    bool is_running = at->api_call && !at->wants_status && !at->is_closed;
    pthread_mutex_unlock(&at->mutex);
    if (!is_running) continue;
    api_call_cancel(at->api_call, SITS_CANCELLED);
    n++;
  }
  pthread_mutex_unlock(&server->mutex);
  if (n == 0) return sits_fail_param(err, SITS_NOT_FOUND, "request_id", "no running call has this request id");
  Sits2026__V1__AbortResponse out = SITS2026__V1__ABORT_RESPONSE__INIT;
  out.has_aborted = true;
  out.aborted = n;
  return rpc_reply_one(rpc, &out.base, err);
}

#define INFERENCE "/sits2026.v1.Inference/"
#define MODEL_WORK .roles = ACCESS_INFERENCE, .is_slow = true

const struct rpc_method rpc_methods[] = {
  {INFERENCE "Generate", &sits2026__v1__generate_request__descriptor, MODEL_WORK, .kind = API_COMPLETION, .answer = rpc_answer_generate},
  {INFERENCE "GenerateStream", &sits2026__v1__generate_request__descriptor, MODEL_WORK, .is_stream = true,
   .kind = API_COMPLETION, .answer = rpc_answer_generate},
  {INFERENCE "Chat", &sits2026__v1__chat_request__descriptor, MODEL_WORK, .kind = API_CHAT, .answer = rpc_answer_generate},
  {INFERENCE "ChatStream", &sits2026__v1__chat_request__descriptor, MODEL_WORK, .is_stream = true, .kind = API_CHAT,
   .answer = rpc_answer_generate},
  {INFERENCE "Tokenize", &sits2026__v1__tokenize_request__descriptor, MODEL_WORK, .kind = API_TOKENIZE, .answer = answer_tokenize},
  {INFERENCE "Detokenize", &sits2026__v1__detokenize_request__descriptor, MODEL_WORK, .kind = API_DETOKENIZE,
   .answer = answer_detokenize},
  {INFERENCE "ListModels", &sits2026__v1__list_models_request__descriptor, .roles = ACCESS_INFERENCE, .answer = answer_list_models},
  {INFERENCE "GetModel", &sits2026__v1__get_model_request__descriptor, .roles = ACCESS_INFERENCE, .answer = answer_get_model},
  {INFERENCE "Abort", &sits2026__v1__abort_request__descriptor, .roles = ACCESS_INFERENCE, .answer = answer_abort},
  {"/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_request__descriptor, .answer = rpc_answer_health_check},
  {"/grpc.health.v1.Health/Watch", &grpc__health__v1__health_check_request__descriptor, .is_endless = true,
   .is_stream = true, .answer = rpc_answer_health_watch},
  {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", NULL, .roles = ACCESS_ANY_ROLE, .is_endless = true,
   .is_stream = true, .answer = rpc_answer_reflection},
  {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", NULL, .roles = ACCESS_ANY_ROLE,
   .is_endless = true, .is_stream = true, .answer = rpc_answer_reflection},
};
const int rpc_n_methods = sizeof rpc_methods / sizeof *rpc_methods;
_Static_assert(sizeof rpc_methods / sizeof *rpc_methods <= RPC_MAX_METHODS, "make room in struct rpc_server");
