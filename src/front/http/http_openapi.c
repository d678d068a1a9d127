/* GET /openapi.json: the description of this server's HTTP API (OpenAPI 3.1). Bodies come from the field table (api_schema.h), names and
 * limits from the model that is served; paths, answers and errors stand here. A test fails when a route of http_routes.c is missing. */
#include <string.h>

#include "front/api/api_schema.h"
#include "front/http/http_internal.h"

#define MAX_DOCUMENT_BYTES (1u << 20)

static const char info[] =
  "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"sits2026\",\"version\":\"" SITS_VERSION "\",\"description\":\"OpenAI-compatible inference "
  "server. Unknown fields are ignored; fields that would change an answer and are not supported are refused.\"},"
  "\"security\":[{\"key\":[]}],\"paths\":{";

/* What any route may answer, and what those with a body may. */
static const char errors[] =
  "\"400\":{\"$ref\":\"#/components/responses/Error\"},\"401\":{\"$ref\":\"#/components/responses/Error\"},"
  "\"403\":{\"$ref\":\"#/components/responses/Error\"},\"404\":{\"$ref\":\"#/components/responses/Error\"},"
  "\"405\":{\"$ref\":\"#/components/responses/Error\"},\"429\":{\"$ref\":\"#/components/responses/Limited\"}";
static const char body_errors[] =
  ",\"413\":{\"$ref\":\"#/components/responses/Error\"},\"415\":{\"$ref\":\"#/components/responses/Error\"},"
  "\"503\":{\"$ref\":\"#/components/responses/Limited\"},\"504\":{\"$ref\":\"#/components/responses/Error\"}";

static const char qos_header[] =
  ",\"parameters\":[{\"name\":\"X-QoS-Level\",\"in\":\"header\",\"required\":false,\"schema\":{\"type\":\"string\",\"pattern\":"
  "\"^(?:[Hh][Ii][Gg][Hh]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Ll][Oo][Ww])$\"}}]";

static const struct { const char *path, *id, *summary, *schema; enum api_kind kind; } posts[] = {
  {"/v1/chat/completions", "createChatCompletion", "Answer a conversation", "ChatCompletion", API_CHAT},
  {"/v1/completions", "createCompletion", "Continue a prompt", "Completion", API_COMPLETION},
  {"/tokenize", "tokenize", "Tokens of a prompt or a conversation", "Tokens", API_TOKENIZE},
  {"/detokenize", "detokenize", "Text of tokens", "Prompt", API_DETOKENIZE},
};

static const struct { const char *path, *id, *summary, *schema; bool is_open, may_be_red; } gets[] = {
  {"/v1/models", "listModels", "The models that the key may use", "ModelList", false, false},
  {"/v1/models/{model}", "getModel", "One model", "Model", false, true},
  {"/v1/health/model", "modelHealth", "State of the model", "ModelHealth", true, true},
  {"/health", "health", "Whether requests may be sent here", "Status", true, true},
  {"/health/live", "live", "Whether the process works", "Status", true, true},
  {"/health/ready", "ready", "Whether requests may be sent here", "Status", true, true},
  {"/ping", "ping", "Whether requests may be sent here", "Status", true, true},
  {"/version", "version", "The server's version", "Version", false, false},
  {"/openapi.json", "openapi", "This document", "Any", false, false},
};

/* Answers' schemas: the fields that are always there. */
static const char schemas[] =
  "\"Any\":{\"type\":\"object\"},"
  "\"Status\":{\"type\":\"object\",\"required\":[\"status\"],\"properties\":{\"status\":{\"enum\":[\"loading\",\"ready\",\"draining\","
  "\"failed\",\"wedged\"]}}},"
  "\"Version\":{\"type\":\"object\",\"required\":[\"version\"],\"properties\":{\"version\":{\"type\":\"string\"}}},"
  "\"Model\":{\"type\":\"object\",\"required\":[\"id\",\"object\",\"created\",\"owned_by\"],\"properties\":{\"id\":{\"type\":\"string\"},"
  "\"object\":{\"const\":\"model\"},\"created\":{\"type\":\"integer\"},\"owned_by\":{\"type\":\"string\"},"
  "\"max_model_len\":{\"type\":\"integer\",\"minimum\":1}}},"
  "\"ModelList\":{\"type\":\"object\",\"required\":[\"object\",\"data\"],\"properties\":{\"object\":{\"const\":\"list\"},"
  "\"data\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/components/schemas/Model\"}}}},"
  "\"ModelHealth\":{\"type\":\"object\",\"required\":[\"models\",\"status\"],\"properties\":{\"status\":{\"type\":\"string\"},"
  "\"models\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"required\":[\"id\",\"state\",\"ready\",\"loaded_bytes\","
  "\"last_step_age_us\"],\"properties\":{\"ready\":{\"type\":\"boolean\"},\"loaded_bytes\":{\"type\":\"integer\"}}}}}},"
  "\"Tokens\":{\"type\":\"object\",\"required\":[\"count\",\"max_model_len\",\"tokens\",\"token_strs\"],\"properties\":{"
  "\"count\":{\"type\":\"integer\",\"minimum\":0},\"max_model_len\":{\"type\":\"integer\"},"
  "\"tokens\":{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":0}},"
  "\"token_strs\":{\"type\":[\"array\",\"null\"],\"items\":{\"type\":\"string\"}}}},"
  "\"Prompt\":{\"type\":\"object\",\"required\":[\"prompt\"],\"properties\":{\"prompt\":{\"type\":\"string\"}}},"
  "\"Usage\":{\"type\":\"object\",\"required\":[\"prompt_tokens\",\"completion_tokens\",\"total_tokens\"],\"properties\":{"
  "\"prompt_tokens\":{\"type\":\"integer\",\"minimum\":0},\"completion_tokens\":{\"type\":\"integer\",\"minimum\":0},"
  "\"total_tokens\":{\"type\":\"integer\",\"minimum\":0}}},"
  "\"Finish\":{\"enum\":[\"stop\",\"length\",\"tool_calls\",\"content_filter\",\"function_call\"]},"
  "\"ChatCompletion\":{\"type\":\"object\",\"required\":[\"id\",\"object\",\"created\",\"model\",\"choices\",\"usage\"],\"properties\":{"
  "\"id\":{\"type\":\"string\",\"pattern\":\"^chatcmpl-.\"},\"object\":{\"const\":\"chat.completion\"},\"created\":{\"type\":\"integer\"},"
  "\"model\":{\"type\":\"string\"},\"usage\":{\"$ref\":\"#/components/schemas/Usage\"},\"choices\":{\"type\":\"array\",\"minItems\":1,"
  "\"items\":{\"type\":\"object\",\"required\":[\"index\",\"message\",\"finish_reason\",\"logprobs\"],\"properties\":{"
  "\"index\":{\"type\":\"integer\",\"minimum\":0},\"finish_reason\":{\"$ref\":\"#/components/schemas/Finish\"},\"message\":{"
  "\"type\":\"object\",\"required\":[\"role\",\"content\"],\"properties\":{\"role\":{\"const\":\"assistant\"},"
  "\"content\":{\"type\":\"string\"}}}}}}}},"
  "\"Completion\":{\"type\":\"object\",\"required\":[\"id\",\"object\",\"created\",\"model\",\"choices\",\"usage\"],\"properties\":{"
  "\"id\":{\"type\":\"string\",\"pattern\":\"^cmpl-.\"},\"object\":{\"const\":\"text_completion\"},\"created\":{\"type\":\"integer\"},"
  "\"model\":{\"type\":\"string\"},\"usage\":{\"$ref\":\"#/components/schemas/Usage\"},\"choices\":{\"type\":\"array\",\"minItems\":1,"
  "\"items\":{\"type\":\"object\",\"required\":[\"index\",\"text\",\"finish_reason\",\"logprobs\"],\"properties\":{"
  "\"index\":{\"type\":\"integer\",\"minimum\":0},\"text\":{\"type\":\"string\"},"
  "\"finish_reason\":{\"$ref\":\"#/components/schemas/Finish\"}}}}}},"
  "\"Error\":{\"type\":\"object\",\"required\":[\"error\"],\"properties\":{\"error\":{\"type\":\"object\",\"required\":[\"message\","
  "\"type\",\"param\",\"code\"],\"properties\":{\"message\":{\"type\":\"string\",\"minLength\":1},\"type\":{\"type\":\"string\"},"
  "\"param\":{\"type\":[\"string\",\"null\"]},\"code\":{\"type\":[\"string\",\"null\"]}}}}}";

static const char responses[] =
  "\"responses\":{\"Error\":{\"description\":\"Refused\",\"content\":{\"application/json\":{\"schema\":{\"$ref\":"
  "\"#/components/schemas/Error\"}}}},\"Limited\":{\"description\":\"Try again later\",\"headers\":{\"Retry-After\":{\"required\":true,"
  "\"schema\":{\"type\":\"integer\",\"minimum\":1}}},\"content\":{\"application/json\":{\"schema\":{\"$ref\":"
  "\"#/components/schemas/Error\"}}}}},\"securitySchemes\":{\"key\":{\"type\":\"http\",\"scheme\":\"bearer\"}}";

static void write_post(size_t i, const struct api_limits *limits, const struct api_model *model, struct buf *out)
{
  bool is_call = (posts[i].kind & API_GENERATE) != 0;
  buf_printf(out, "\"%s\":{\"post\":{\"operationId\":\"%s\",\"summary\":\"%s\"%s,\"requestBody\":{\"required\":true,\"content\":{"
             "\"application/json\":{\"schema\":", posts[i].path, posts[i].id, posts[i].summary, qos_header);
  api_schema_write(posts[i].kind, limits, model, out);
  buf_printf(out, "}}},\"responses\":{\"200\":{\"description\":\"The answer\",\"content\":{\"application/json\":{\"schema\":{\"$ref\":"
             "\"#/components/schemas/%s\"}}%s}},%s%s}}},", posts[i].schema,
             is_call ? ",\"text/event-stream\":{}" : "", errors, body_errors);
}

/* A route with a name in its path says which names there are. */
static void write_path_parameter(const struct api_model *model, struct buf *out)
{
  buf_append_text(out, ",\"parameters\":[{\"name\":\"model\",\"in\":\"path\",\"required\":true,\"schema\":{\"type\":\"string\"");
  for (int32_t n = 0; model && n < model->n_names; n++) {
    buf_append_text(out, n ? ",\"" : ",\"enum\":[\"");
    buf_append_json_escaped(out, model->names[n], strlen(model->names[n]));
    buf_append_char(out, '"');
  }
  buf_append_text(out, model ? "]}}]" : "}}]");
}

static void write_get(size_t i, const struct api_model *model, struct buf *out)
{
  buf_printf(out, "\"%s\":{\"get\":{\"operationId\":\"%s\",\"summary\":\"%s\"%s", gets[i].path, gets[i].id, gets[i].summary,
             gets[i].is_open ? ",\"security\":[]" : "");
  if (strchr(gets[i].path, '{')) write_path_parameter(model, out);
  buf_printf(out, ",\"responses\":{\"200\":{\"description\":\"The answer\",\"content\":{\"application/json\":{\"schema\":{\"$ref\":"
             "\"#/components/schemas/%s\"}}}},%s", gets[i].schema, errors);
  if (gets[i].may_be_red)
    buf_printf(out, ",\"503\":{\"description\":\"Not now\",\"content\":{\"application/json\":{\"schema\":{\"anyOf\":[{\"$ref\":"
               "\"#/components/schemas/%s\"},{\"$ref\":\"#/components/schemas/Error\"}]}}}}", gets[i].schema);
  buf_append_text(out, "}}},");
}

static void write_metrics(bool is_open, struct buf *out)
{
  buf_printf(out, "\"/metrics\":{\"get\":{\"operationId\":\"metrics\",\"summary\":\"Prometheus text\"%s,\"responses\":{\"200\":{"
             "\"description\":\"Metrics\",\"content\":{\"text/plain\":{\"schema\":{\"type\":\"string\"}}}},%s}}}}",
             is_open ? ",\"security\":[]" : "", errors);
}

/* The model under the names that the key may use; NULL when there is none, as while it loads. */
static const struct api_model *visible_model(const struct http_request *request, struct api_model *copy)
{
  const struct api_model *model = api_model(request->server->api);
  if (!model) return NULL;
  *copy = *model;
  copy->n_names = 0;
  for (int32_t n = 0; n < model->n_names; n++)
    if (access_allows_model(request->grant, model->names[n])) copy->names[copy->n_names++] = model->names[n];
  return copy->n_names ? copy : NULL;
}

void http_answer_openapi(struct http_request *request)
{
  const struct http_server *server = request->server;
  struct api_model copy;
  const struct api_model *model = visible_model(request, &copy);
  struct buf body;
  buf_init(&body, MAX_DOCUMENT_BYTES);
  buf_append_text(&body, info);
  for (size_t i = 0; i < sizeof posts / sizeof *posts; i++) write_post(i, api_limits(server->api), model, &body);
  for (size_t i = 0; i < sizeof gets / sizeof *gets; i++) write_get(i, model, &body);
  write_metrics(!server->options.metrics_require_key, &body);
  buf_printf(&body, ",\"components\":{%s,\"schemas\":{%s}}}", responses, schemas);
  http_respond(request, MHD_HTTP_OK, "application/json", &body);
}
