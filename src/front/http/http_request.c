/* One HTTP request: creation, references, and the answer. See http_internal.h for who may touch what.
 *
 * An answer is made on any thread by http_respond, which only stores it and wakes the connection; the handler, called again by
 * libmicrohttpd on its own thread, gives it to the socket. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/http/http_internal.h"

static const char *header_of(struct MHD_Connection *connection, const char *name)
{
  return MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
}

struct http_request *http_request_create(struct http_server *server, struct MHD_Connection *connection, const char *verb)
{
  struct http_request *request = mem_calloc(1, sizeof *request);
  if (!request) return NULL;
  request->server = server;
  atomic_init(&request->n_refs, 1);
  request->number = atomic_fetch_add(&server->next_number, 1);
  request->connection = connection;
  request->route = -1;
  const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  request->fd = info ? info->connect_fd : -1;
  request->started_us = clock_monotonic_us();
  request->started_unix_us = clock_unix_us();
  snprintf(request->verb, sizeof request->verb, "%s", verb);
  info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  api_peer_name(info ? info->client_addr : NULL, request->peer);
  api_trace_parent_parse(header_of(connection, "traceparent"), header_of(connection, "tracestate"), &request->parent);
  request->last_write_us = request->started_us;
  buf_init(&request->body, (size_t)api_limits(server->api)->max_body_bytes + 1);
  buf_init(&request->out, 64u << 20);
  pthread_mutex_init(&request->mutex, NULL);
  access_choose_id(header_of(connection, "X-Request-Id"), request->number, request->id, sizeof request->id);
  const char *qos = header_of(connection, "X-QoS-Level");
  size_t n_qos = qos ? strlen(qos) : 0;
  while (n_qos > 0 && (qos[n_qos - 1] == ' ' || qos[n_qos - 1] == '\t')) n_qos--;
  if (qos && n_qos == 0) qos = "?", n_qos = 1; /* an empty one is there, and wrong */
  if (qos) snprintf(request->qos, sizeof request->qos, "%.*s", (int)n_qos, qos);
  pthread_mutex_lock(&server->mutex);
  request->next = server->requests;
  if (server->requests) server->requests->previous = request;
  server->requests = request;
  server->n_requests++;
  server->n_objects++;
  pthread_mutex_unlock(&server->mutex);
  return request;
}

void http_request_ref(struct http_request *request) { atomic_fetch_add(&request->n_refs, 1); }

/* Nobody uses the request any more: tell what became of it. */
static void observe(const struct http_request *request)
{
  const struct http_server *server = request->server;
  const struct http_route *route = request->route >= 0 ? &http_routes[request->route] : NULL;
  struct api_record record = {.transport = "http", .id = request->id, .route = route ? route->path : "?", .verb = request->verb,
                              .tenant = access_tenant_name(request->grant), .key = access_key_id(request->grant), .peer = request->peer,
                              .kind = route ? route->kind : 0, .code = request->status, .status = request->outcome,
                              .client_left = request->was_cut, .started_unix_us = request->started_unix_us,
                              .started_us = request->started_us, .received_us = request->received_us, .ended_us = request->ended_us,
                              .parent = &request->parent};
  record.is_public = route && !record.status && (!route->roles || route->roles == ACCESS_METRICS);
  if (request->was_cut && !record.status) record.status = SITS_CANCELLED;
  if (request->call) api_record_call(&record, request->call);
  api_observe(server->api, &record);
}

void http_request_unref(struct http_request *request)
{
  if (atomic_fetch_sub(&request->n_refs, 1) != 1) return;
  struct http_server *server = request->server;
  observe(request);
  if (request->call) api_call_release(request->call);
  if (request->has_reply) http_reply_fini(&request->reply);
  if (request->response) MHD_destroy_response(request->response);
  http_request_drop_body(request);
  access_release(request->grant);
  buf_fini(&request->out);
  pthread_mutex_destroy(&request->mutex);
  mem_free(request);
  pthread_mutex_lock(&server->mutex);
  if (--server->n_objects == 0) pthread_cond_broadcast(&server->idle);
  pthread_mutex_unlock(&server->mutex); /* the last use of the server: http_server_stop may free it now */
}

void http_request_drop_body(struct http_request *request)
{
  atomic_fetch_sub(&request->server->body_bytes, (int64_t)request->body.size);
  buf_fini(&request->body);
}

enum sits_status http_request_parse(struct http_request *request, struct api_request **out, struct sits_error *err)
{
  struct api_request *parsed = NULL;
  enum sits_status status = api_request_parse(http_routes[request->route].kind, request->body.data ? request->body.data : "",
                                              request->body.size, api_limits(request->server->api), &parsed, err);
  http_request_drop_body(request);
  if (status) return status;
  parsed->grant = access_hold(request->grant);
  status = api_request_set_class(parsed, request->qos[0] ? request->qos : NULL, err);
  if (status) api_request_destroy(parsed);
  else *out = parsed;
  return status;
}

void http_wake_locked(struct http_request *request, enum http_wait wait)
{
  if (wait == HTTP_WAIT_NONE || request->wait != wait || request->is_completed) return;
  request->wait = HTTP_WAIT_NONE;
  if (wait == HTTP_WAIT_BYTES) {
    request->is_given = true;
    net_pace_give(&request->server->pace);
  }
  MHD_resume_connection(request->connection);
}

void http_looked_locked(struct http_request *request)
{
  if (!request->is_given) return;
  request->is_given = false;
  net_pace_take(&request->server->pace);
}

static void add_header(void *response, const char *name, const char *value) { MHD_add_response_header(response, name, value); }

void http_add_headers(struct http_request *request, struct MHD_Response *response)
{
  access_write_headers(request->grant, add_header, response);
  MHD_add_response_header(response, "X-Request-Id", request->id);
  MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
  http_cors_add_headers(request, response);
  if (atomic_load(&request->server->is_draining)) MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
}

static void add_retry_after(struct http_request *request, enum sits_status status, struct MHD_Response *response)
{
  if (!sits_status_info(status)->retryable) return;
  const struct http_engine *engine = atomic_load(&request->server->engine);
  int32_t seconds = 1;
  if (engine && status == SITS_QUEUE_FULL) seconds = engine->retry_after_s(engine->context);
  if (status == SITS_RATE_LIMITED) seconds = access_retry_after_s(request->grant);
  char text[16];
  snprintf(text, sizeof text, "%d", seconds > 0 ? seconds : 1);
  MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, text);
}

static struct MHD_Response *make_response(struct http_request *request, const char *content_type, struct buf *body)
{
  size_t n_bytes = 0;
  char *bytes = body->failed ? NULL : buf_take(body, &n_bytes);
  if (!bytes) {
    buf_fini(body);
    return NULL;
  }
  struct MHD_Response *response = MHD_create_response_from_buffer_with_free_callback(n_bytes, bytes, mem_free);
  if (!response) {
    mem_free(bytes);
    return NULL;
  }
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
  http_add_headers(request, response);
  return response;
}

/* Store the answer (NULL: the connection will be cut) and wake the connection. */
static void store(struct http_request *request, int status, enum sits_status outcome, struct MHD_Response *response)
{
  pthread_mutex_lock(&request->mutex);
  if (request->response || request->is_completed) {
    if (response) MHD_destroy_response(response);
  } else {
    request->response = response;
    request->status = status;
    request->outcome = outcome;
    if (!response) request->is_gone = true;
  }
  http_wake_locked(request, HTTP_WAIT_RESPONSE);
  pthread_mutex_unlock(&request->mutex);
}

void http_respond(struct http_request *request, int status, const char *content_type, struct buf *body)
{
  store(request, status, SITS_OK, make_response(request, content_type, body));
}

void http_respond_error(struct http_request *request, enum sits_status status, const char *text, const char *param)
{
  struct buf body;
  buf_init(&body, 64u << 10);
  http_error_body(status, text, param, &body);
  struct MHD_Response *response = make_response(request, "application/json", &body);
  if (response) {
    add_retry_after(request, status, response);
    if (status == SITS_UNAUTHENTICATED) MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    if (status == SITS_METHOD_NOT_ALLOWED && request->route >= 0)
      MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, http_routes[request->route].is_post ? "POST" : "GET, HEAD");
  }
  metrics_refused(request->server->metrics, status);
  store(request, sits_status_info(status)->http, status, response);
}

void http_respond_failure(struct http_request *request, enum sits_status status, const struct sits_error *err)
{
  bool is_ours = err->status == status;
  if (sits_status_info(status)->http >= 500)
    log_warn("http", "id=%s status=%s %s", request->id, sits_status_info(status)->name, is_ours ? err->text : "");
  http_respond_error(request, status, is_ours ? err->text : NULL, is_ours ? err->param : NULL);
}
