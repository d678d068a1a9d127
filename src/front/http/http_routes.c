/* The route table, and the routes that answer from memory. To add a route: a row here and its function. */
#include <string.h>

#include "front/http/http_internal.h"

static void respond_status_text(struct http_request *request, int status, const char *text)
{
  struct buf body;
  buf_init(&body, 4096);
  buf_printf(&body, "{\"status\":\"%s\"}", text);
  http_respond(request, status, "application/json", &body);
}

static void answer_live(struct http_request *request)
{
  const struct health *health = request->server->health;
  respond_status_text(request, health_is_live(health) ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, health_text(health));
}

static void answer_ready(struct http_request *request)
{
  const struct health *health = request->server->health;
  respond_status_text(request, health_is_ready(health) ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, health_text(health));
}

static void answer_model_health(struct http_request *request)
{
  const struct api_model *model = api_model(request->server->api);
  const struct health *health = request->server->health;
  struct buf body;
  buf_init(&body, 65536);
  buf_append_text(&body, "{\"models\":[");
  if (model) {
    buf_append_text(&body, "{\"id\":\"");
    buf_append_json_escaped(&body, model->names[0], strlen(model->names[0]));
    buf_printf(&body,
               "\",\"state\":\"%s\",\"ready\":%s,\"loaded_bytes\":%llu,\"loaded_at\":%lld,\"max_model_len\":%d,\"last_step_age_us\":%lld}",
               health_text(health), health_is_ready(health) ? "true" : "false", (unsigned long long)model->loaded_bytes,
               (long long)model->loaded_unix_s, model->max_model_len, (long long)health_heartbeat_age_us(health));
  }
  buf_printf(&body, "],\"status\":\"%s\"}", health_text(health));
  http_respond(request, health_is_ready(health) ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, "application/json", &body);
}

static void append_model(const struct api_model *model, const char *name, struct buf *body)
{
  buf_append_text(body, "{\"id\":\"");
  buf_append_json_escaped(body, name, strlen(name));
  buf_printf(body, "\",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"sits2026\",\"root\":\"", (long long)model->loaded_unix_s);
  buf_append_json_escaped(body, model->names[0], strlen(model->names[0]));
  buf_printf(body, "\",\"parent\":null,\"max_model_len\":%d}", model->max_model_len);
}

static void answer_models(struct http_request *request)
{
  const struct api_model *model = api_model(request->server->api);
  struct buf body;
  buf_init(&body, 65536);
  buf_append_text(&body, "{\"object\":\"list\",\"data\":[");
  bool is_first = true;
  for (int32_t i = 0; model && i < model->n_names; i++) {
    if (!access_allows_model(request->grant, model->names[i])) continue;
    if (!is_first) buf_append_char(&body, ',');
    append_model(model, model->names[i], &body);
    is_first = false;
  }
  buf_append_text(&body, "]}");
  http_respond(request, MHD_HTTP_OK, "application/json", &body);
}

static void answer_model(struct http_request *request)
{
  const struct api_model *model = api_model(request->server->api);
  struct sits_error err = {0};
  enum sits_status status = api_model_check(model, request->tail, "the path", request->grant, &err);
  if (status) {
    http_respond_failure(request, status, &err);
    return;
  }
  struct buf body;
  buf_init(&body, 65536);
  append_model(model, request->tail, &body);
  http_respond(request, MHD_HTTP_OK, "application/json", &body);
}

static void answer_version(struct http_request *request)
{
  struct buf body;
  buf_init(&body, 4096);
  buf_append_text(&body, "{\"version\":\"" SITS_VERSION "\"}");
  http_respond(request, MHD_HTTP_OK, "application/json", &body);
}

static void answer_metrics(struct http_request *request)
{
  struct http_server *server = request->server;
  const struct http_engine *engine = atomic_load(&server->engine);
  struct engine_stats stats;
  struct metrics_now now = {.heartbeat_age_us = health_heartbeat_age_us(server->health)};
  if (engine) {
    engine->stats(engine->context, &stats);
    now.engine = &stats;
    now.page_tokens = engine->page_tokens;
  }
  pthread_mutex_lock(&server->mutex);
  now.n_in_flight = server->n_requests;
  pthread_mutex_unlock(&server->mutex);
  struct buf body;
  buf_init(&body, 1u << 20);
  metrics_render(server->metrics, &now, &body);
  http_respond(request, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", &body);
}

const struct http_route http_routes[] = {
  {"/v1/chat/completions", .is_post = true, .roles = ACCESS_INFERENCE, .kind = API_CHAT, .answer = http_answer_generate},
  {"/v1/completions", .is_post = true, .roles = ACCESS_INFERENCE, .kind = API_COMPLETION, .answer = http_answer_generate},
  {"/tokenize", .is_post = true, .roles = ACCESS_INFERENCE, .kind = API_TOKENIZE, .answer = http_answer_tokenize},
  {"/detokenize", .is_post = true, .roles = ACCESS_INFERENCE, .kind = API_DETOKENIZE, .answer = http_answer_detokenize},
  {"/v1/models", .roles = ACCESS_INFERENCE, .answer = answer_models},
  {"/v1/models/", .roles = ACCESS_INFERENCE, .answer = answer_model},
  {"/v1/health/model", .answer = answer_model_health},
  {"/health", .answer = answer_ready},
  {"/health/live", .answer = answer_live},
  {"/health/ready", .answer = answer_ready},
  {"/ping", .answer = answer_ready},
  {"/metrics", .roles = ACCESS_METRICS, .answer = answer_metrics},
  {"/version", .roles = ACCESS_ANY_ROLE, .answer = answer_version},
  {"/openapi.json", .roles = ACCESS_ANY_ROLE, .answer = http_answer_openapi},
};
const int http_n_routes = sizeof http_routes / sizeof *http_routes;

unsigned http_route_roles(const struct http_server *server, const struct http_route *route)
{
  return route->roles == ACCESS_METRICS && !server->options.metrics_require_key ? 0 : route->roles;
}

int http_route_find(const char *url, const char **tail)
{
  for (int i = 0; i < http_n_routes; i++) {
    size_t n = strlen(http_routes[i].path);
    bool is_prefix = http_routes[i].path[n - 1] == '/';
    if (is_prefix ? !strncmp(url, http_routes[i].path, n) && url[n] : !strcmp(url, http_routes[i].path)) {
      *tail = url + n;
      return i;
    }
  }
  return -1;
}
