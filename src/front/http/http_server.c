/* See http_server.h. on_request is called by libmicrohttpd for each step of a request: headers, body bytes, end, and again when a
 * suspended connection was resumed with its answer. */
#include "front/http/http_server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/api/api_timing.h"
#include "front/http/http_internal.h"
#include "front/net/net_listen.h"

#define CONNECTION_MEMORY_BYTES (32u << 10) /* headers and the window of a body */
#define MAX_HEADERS 100
#define MAX_BODIES_BYTES (512 << 20)        /* of all bodies that are being received or wait for a worker */
#define DRAIN_BODY_FACTOR 4                 /* a chunked body is read and dropped up to that many times the limit, for a clean 413 */

/* ---- checks before the body ---- */

/* The roles of which a key needs one; 0: no key is asked. An unknown route tells itself apart only to those who have a key. */
static unsigned roles_of(const struct http_request *request)
{
  return request->route < 0 ? ACCESS_ANY_ROLE : http_route_roles(request->server, &http_routes[request->route]);
}

static enum sits_status identify(struct http_request *request)
{
  return access_identify(request->server->options.access,
                         MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION), &request->grant);
}

struct framing { int n_length, n_encoding, n_host, n_keys, n_headers; bool is_malformed; const char *length, *encoding; };

/* Whether the text begins with a header's name and goes on. */
static bool extends_name(const char *text, const char *name)
{
  size_t n = strlen(name);
  return !strncasecmp(text, name, n) && text[n];
}

/* A name that is no token ("Content-Length :"), or a value with a control character (a bare CR ends a line for some). A folded line arrives
 * with its continuation glued to the name ("Content-Length:\r\n 3" as "Content-Length3"), so names that extend a framing header's are
 * refused too: its own effect on the body would be lost. */
static bool is_malformed_header(const char *name, const char *value)
{
  static const char token[] = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  if (!name[0] || name[strspn(name, token)]) return true;
  if (extends_name(name, MHD_HTTP_HEADER_CONTENT_LENGTH) || extends_name(name, MHD_HTTP_HEADER_TRANSFER_ENCODING)) return true;
  for (const char *at = value ? value : ""; *at; at++)
    if (((unsigned char)*at < ' ' && *at != '\t') || *at == 127) return true;
  return false;
}

static enum MHD_Result note_header(void *context, enum MHD_ValueKind kind, const char *name, const char *value)
{
  struct framing *framing = context;
  framing->n_headers++;
  framing->is_malformed |= is_malformed_header(name, value);
  if (!strcasecmp(name, MHD_HTTP_HEADER_CONTENT_LENGTH)) {
    framing->n_length++;
    framing->length = value;
  } else if (!strcasecmp(name, MHD_HTTP_HEADER_TRANSFER_ENCODING)) {
    framing->n_encoding++;
    framing->encoding = value;
  } else if (!strcasecmp(name, MHD_HTTP_HEADER_HOST)) {
    framing->n_host++;
  } else if (!strcasecmp(name, MHD_HTTP_HEADER_AUTHORIZATION)) {
    framing->n_keys++;
  }
  return MHD_YES;
}

/* What could make a proxy and this server see different requests is refused; libmicrohttpd alone would let it pass. */
static enum sits_status check_framing(struct http_request *request, const char **text)
{
  struct framing framing = {0};
  MHD_get_connection_values(request->connection, MHD_HEADER_KIND, note_header, &framing);
  *text = NULL;
  if (framing.is_malformed) *text = "a malformed header line";
  else if (framing.n_length > 1) *text = "more than one Content-Length header";
  else if (framing.n_length && framing.n_encoding) *text = "both Content-Length and Transfer-Encoding";
  else if (framing.n_encoding > 1 || (framing.encoding && strcasecmp(framing.encoding, "chunked")))
    *text = "a Transfer-Encoding other than chunked";
  else if (framing.n_host > 1) *text = "more than one Host header";
  else if (framing.n_keys > 1) *text = "more than one Authorization header";
  else if (framing.n_headers > MAX_HEADERS) *text = "too many headers";
  if (*text) return SITS_INVALID_ARGUMENT;
  if (!framing.length) return SITS_OK;
  char *end;
  errno = 0;
  long long n = strtoll(framing.length, &end, 10);
  if (*end || end == framing.length || n < 0) {
    *text = "a Content-Length that is no number";
    return SITS_INVALID_ARGUMENT;
  }
  if (errno || n > api_limits(request->server->api)->max_body_bytes) return SITS_TOO_LARGE;
  return SITS_OK;
}

static bool has_json_type(const struct http_request *request)
{
  const char *type = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_TYPE);
  static const char json[] = "application/json";
  if (!type) return true;
  return !strncasecmp(type, json, sizeof json - 1) && strchr(" ;\t", type[sizeof json - 1]); /* strchr finds the terminator too */
}

static bool has_body(const struct http_request *request)
{
  return MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH) ||
         MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_TRANSFER_ENCODING);
}

/* Decide on headers, key, quota, role, route, method, type and drain, in this order; on failure the answer is stored. */
static enum sits_status check_head(struct http_request *request, const char *method)
{
  const char *text = NULL;
  struct sits_error err = {0};
  const struct http_route *route = request->route >= 0 ? &http_routes[request->route] : NULL;
  unsigned roles = roles_of(request);
  bool is_get = !strcmp(method, "GET") || !strcmp(method, "HEAD");
  enum sits_status status = check_framing(request, &text);
  if (!status && roles) status = identify(request);
  if (!status && roles && (status = access_admit(request->grant, roles, &err))) text = err.text;
  if (status) {
  } else if (!route) {
    status = SITS_NOT_FOUND;
    text = "there is no such route";
  } else if (route->is_post ? strcmp(method, "POST") != 0 : !is_get) {
    status = SITS_METHOD_NOT_ALLOWED;
  } else if (route->is_post && !has_json_type(request)) {
    status = SITS_UNSUPPORTED_MEDIA;
    text = "the body must be application/json";
  } else if (route->is_post && !api_is_admitting(request->server->api)) {
    status = SITS_UNAVAILABLE;
    text = "the server is shutting down";
  }
  if (status) http_respond_error(request, status, text, NULL);
  return status;
}

/* ---- libmicrohttpd's callbacks ---- */

/* Give the stored answer to the socket; no answer means: cut the connection. */
static enum MHD_Result queue_answer(struct http_request *request)
{
  pthread_mutex_lock(&request->mutex);
  struct MHD_Response *response = request->is_gone ? NULL : request->response;
  int status = request->status;
  pthread_mutex_unlock(&request->mutex);
  return response ? MHD_queue_response(request->connection, (unsigned)status, response) : MHD_NO;
}

/* Keep the bytes of a body. One that is too large (only a chunked one comes so far) or for which there is no room is dropped and read on,
 * for libmicrohttpd allows no answer before its end. */
static enum MHD_Result take_body(struct http_request *request, const char *bytes, size_t n_bytes)
{
  struct http_server *server = request->server;
  size_t most = (size_t)api_limits(server->api)->max_body_bytes;
  if (!request->is_too_large && !request->is_crowded) {
    int64_t before = atomic_fetch_add(&server->body_bytes, (int64_t)n_bytes);
    request->is_too_large = request->body.size + n_bytes > most;
    request->is_crowded =
      !request->is_too_large && (before + (int64_t)n_bytes > MAX_BODIES_BYTES || !buf_append(&request->body, bytes, n_bytes));
    if (!request->is_too_large && !request->is_crowded) return MHD_YES;
    atomic_fetch_sub(&server->body_bytes, (int64_t)n_bytes);
    request->n_dropped_bytes = request->body.size;
    http_request_drop_body(request);
  }
  request->n_dropped_bytes += n_bytes;
  return request->n_dropped_bytes > most * DRAIN_BODY_FACTOR ? MHD_NO : MHD_YES;
}

static void run_job(void *owner)
{
  struct http_request *request = owner;
  metrics_reading(request->server->metrics, -1);
  http_routes[request->route].answer(request);
  http_request_unref(request);
}

static enum MHD_Result hand_to_worker(struct http_request *request)
{
  pthread_mutex_lock(&request->mutex);
  request->is_begun = true;
  request->wait = HTTP_WAIT_RESPONSE;
  MHD_suspend_connection(request->connection);
  pthread_mutex_unlock(&request->mutex);
  http_watch_add(request);
  http_request_ref(request); /* the job's */
  request->job = (struct net_job){.run = run_job, .owner = request};
  metrics_reading(request->server->metrics, 1);
  if (net_work_push(&request->server->work, &request->job)) return MHD_YES;
  metrics_reading(request->server->metrics, -1);
  http_request_unref(request);
  http_respond_error(request, SITS_QUEUE_FULL, "too many requests are waiting to be read", NULL);
  return MHD_YES;
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *n_upload, void **slot)
{
  struct http_server *server = context;
  struct http_request *request = *slot;
  if (!request) {
    request = http_request_create(server, connection, method);
    if (!request) return MHD_NO;
    *slot = request;
    const char *tail = NULL;
    request->route = http_route_find(url, &tail);
    if (http_cors_preflight(request, method) || check_head(request, method)) return queue_answer(request);
    if (has_body(request)) http_watch_add(request);
    return MHD_YES;
  }
  if (*n_upload) {
    enum MHD_Result result = take_body(request, upload, *n_upload);
    *n_upload = 0;
    return result;
  }
  if (request->is_begun || request->response) return queue_answer(request);
  request->received_us = clock_monotonic_us();
  if (request->is_too_large) {
    http_respond_error(request, SITS_TOO_LARGE, NULL, NULL);
    return queue_answer(request);
  }
  if (request->is_crowded) {
    http_respond_error(request, SITS_QUEUE_FULL, "too many large requests are being read", NULL);
    return queue_answer(request);
  }
  if (http_routes[request->route].is_post) {
    /* A connection suspended in the pass that has read the request is read again when it is resumed, and closed if the client has ended
     * its sending side meanwhile. In the pass behind it libmicrohttpd waits for this handler alone. */
    bool is_read = request->is_read;
    request->is_read = true;
    return is_read ? hand_to_worker(request) : MHD_YES;
  }
  pthread_mutex_lock(&request->mutex);
  request->is_begun = true;
  pthread_mutex_unlock(&request->mutex);
  http_route_find(url, &request->tail);
  http_routes[request->route].answer(request);
  return queue_answer(request);
}

/* What the log line tells of a request, copied under its mutex and written without it: stderr may be slow. */
struct outcome { int status; bool is_gone; struct api_usage usage; };

static void note_end(const struct http_request *request, const struct outcome *outcome)
{
  const struct api_usage *usage = &outcome->usage;
  int64_t now_us = clock_monotonic_us();
  double ms = (double)(now_us - request->started_us) / 1000;
  char timing[API_TIMING_LOG_BYTES];
  const char *path = request->route >= 0 ? http_routes[request->route].path : "?";
  bool is_call = request->route >= 0 && http_routes[request->route].is_post;
  api_timing_log(usage, now_us, timing);
  if (is_call)
    log_info("http", "id=%s route=%s status=%d ms=%.1f prompt_tokens=%lld output_tokens=%lld%s%s", request->id, path, outcome->status, ms,
             (long long)usage->n_prompt_tokens, (long long)usage->n_output_tokens, timing, outcome->is_gone ? " client_left=1" : "");
  else log_debug("http", "id=%s route=%s status=%d ms=%.1f", request->id, path, outcome->status, ms);
}

static bool is_left(enum MHD_RequestTerminationCode code)
{
  return code == MHD_REQUEST_TERMINATED_WITH_ERROR || code == MHD_REQUEST_TERMINATED_READ_ERROR ||
         code == MHD_REQUEST_TERMINATED_CLIENT_ABORT;
}

static void on_completed(void *context, struct MHD_Connection *connection, void **slot, enum MHD_RequestTerminationCode code)
{
  struct http_server *server = context;
  struct http_request *request = *slot;
  if (!request) return;
  *slot = NULL;
  http_watch_remove(request);
  if (code == MHD_REQUEST_TERMINATED_COMPLETED_OK) http_watch_show_end(request->fd);
  pthread_mutex_lock(&request->mutex);
  if (is_left(code)) http_leave_locked(request); /* libmicrohttpd's write saw it before the watcher did */
  request->is_completed = true;
  request->wait = HTTP_WAIT_NONE;
  http_looked_locked(request);
  request->ended_us = clock_monotonic_us();
  request->was_cut = code != MHD_REQUEST_TERMINATED_COMPLETED_OK;
  if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK) request->is_gone = true;
  struct api_call *call = request->call;
  struct MHD_Response *response = request->response; /* a stream's response holds the request: let it go here, not in the destructor */
  request->response = NULL;
  struct outcome outcome = {request->status, request->is_gone, request->usage};
  pthread_mutex_unlock(&request->mutex);
  note_end(request, &outcome);
  metrics_http(server->metrics, request->route < 0 ? http_n_routes : request->route, outcome.status);
  if (response) MHD_destroy_response(response);
  if (call) api_call_cancel(call, SITS_CANCELLED); /* does nothing when it is done */
  pthread_mutex_lock(&server->mutex);
  if (request->previous) request->previous->next = request->next;
  else server->requests = request->next;
  if (request->next) request->next->previous = request->previous;
  if (--server->n_requests == 0) pthread_cond_broadcast(&server->idle);
  pthread_mutex_unlock(&server->mutex);
  http_request_unref(request);
}

/* A small send buffer bounds what a slow reader holds there. */
static void on_connection(void *context, struct MHD_Connection *connection, void **slot, enum MHD_ConnectionNotificationCode code)
{
  if (code != MHD_CONNECTION_NOTIFY_STARTED) return;
  const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  if (!info) return;
  int send_bytes = 128 << 10;
  net_prepare(info->connect_fd);
  setsockopt(info->connect_fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
}

__attribute__((format(printf, 2, 0))) static void on_log(void *context, const char *format, va_list args)
{
  char line[512];
  if (!log_enabled(LOG_DEBUG)) return; /* one line per peer that broke off: for debugging only */
  vsnprintf(line, sizeof line, format, args);
  size_t n = strlen(line);
  if (n && line[n - 1] == '\n') line[n - 1] = '\0';
  log_debug("mhd", "%s", line);
}

/* ---- start and stop ---- */

static enum sits_status start_daemon(struct http_server *server, struct sits_error *err)
{
  const struct http_options *options = &server->options;
  int fd = -1;
  enum sits_status status =
    net_listen(options->host ? options->host : "127.0.0.1", options->port, "host", "port", &fd, &server->port, err);
  if (status) return status;
  struct MHD_OptionItem more[8] = {{MHD_OPTION_END, 0, NULL}};
  int n = 0;
  if (options->n_threads > 1) more[n++] = (struct MHD_OptionItem){MHD_OPTION_THREAD_POOL_SIZE, options->n_threads, NULL};
  if (options->tls) n += http_tls_options(options->tls, more + n);
  more[n] = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
  unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (options->tls ? MHD_USE_TLS : 0);
  server->daemon = MHD_start_daemon(
    flags, 0, NULL, NULL, on_request, server, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET, fd,
    MHD_OPTION_CONNECTION_LIMIT, (unsigned)options->max_connections, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)options->idle_timeout_s,
    MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY_BYTES, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_NOTIFY_COMPLETED,
    on_completed, server, MHD_OPTION_NOTIFY_CONNECTION, on_connection, server, MHD_OPTION_ARRAY, more, MHD_OPTION_END);
  if (server->daemon) return SITS_OK;
  close(fd);
  return sits_fail(err, SITS_INTERNAL, "the HTTP server could not be started");
}

enum sits_status http_server_start(const struct http_options *options, struct api *api, struct health *health, struct metrics *metrics,
                                   struct http_server **out, struct sits_error *err)
{
  struct http_server *server = mem_calloc(1, sizeof *server);
  if (!server) return sits_fail(err, SITS_NOMEM, "no memory for the HTTP server");
  server->options = *options;
  server->api = api;
  server->health = health;
  server->metrics = metrics;
  server->epoll_fd = server->stop_fd = server->listen_fd = -1;
  atomic_init(&server->next_number, 1);
  pthread_mutex_init(&server->mutex, NULL);
  net_work_init(&server->work);
  net_pace_init(&server->pace);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&server->idle, &monotonic);
  pthread_condattr_destroy(&monotonic);
  static const char *route_names[32];
  int n = 0;
  for (; n < http_n_routes; n++) route_names[n] = http_routes[n].path;
  route_names[n++] = "other";
  metrics_set_routes(metrics, route_names, n);
  enum sits_status status = net_work_start(&server->work, options->n_workers, err);
  if (!status) status = http_watch_start(server, err);
  if (!status) status = start_daemon(server, err);
  if (status) {
    http_server_stop(server);
    return status;
  }
  *out = server;
  return SITS_OK;
}

int http_server_port(const struct http_server *server) { return server->port; }
void http_server_set_engine(struct http_server *server, const struct http_engine *engine) { atomic_store(&server->engine, engine); }

void http_server_drain(struct http_server *server) { atomic_store(&server->is_draining, true); }

void http_server_quiesce(struct http_server *server)
{
  http_server_drain(server);
  if (server->listen_fd >= 0) return;
  server->listen_fd = MHD_quiesce_daemon(server->daemon);
  if (server->listen_fd >= 0) shutdown(server->listen_fd, SHUT_RDWR); /* connects are refused at once, not left in the backlog */
}

bool http_server_wait_idle(struct http_server *server, int64_t timeout_us)
{
  int64_t end_us = clock_monotonic_us() + timeout_us;
  struct timespec end = {.tv_sec = end_us / 1000000, .tv_nsec = end_us % 1000000 * 1000};
  pthread_mutex_lock(&server->mutex);
  int failed = 0;
  while (server->n_requests > 0 && failed != ETIMEDOUT) failed = pthread_cond_timedwait(&server->idle, &server->mutex, &end);
  bool is_idle = server->n_requests == 0;
  pthread_mutex_unlock(&server->mutex);
  return is_idle;
}

/* Requests whose client does not read, or that no one answered: cut them, for libmicrohttpd must not stop with one suspended. */
static void cut_requests(struct http_server *server)
{
  pthread_mutex_lock(&server->mutex);
  for (struct http_request *request = server->requests; request; request = request->next) {
    pthread_mutex_lock(&request->mutex);
    if (!request->is_completed) {
      request->is_gone = true;
      http_wake_locked(request, request->wait);
      shutdown(request->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&request->mutex);
  }
  pthread_mutex_unlock(&server->mutex);
}

/* The delivery thread may still be telling a sink that its call was cancelled; the request that it holds needs the server. */
static void wait_objects(struct http_server *server)
{
  pthread_mutex_lock(&server->mutex);
  while (server->n_objects > 0) pthread_cond_wait(&server->idle, &server->mutex);
  pthread_mutex_unlock(&server->mutex);
}

void http_server_stop(struct http_server *server)
{
  if (!server) return;
  if (server->daemon) {
    http_server_quiesce(server);
    net_work_stop(&server->work); /* what was queued is answered first */
    for (int i = 0; i < 50 && !http_server_wait_idle(server, 100000); i++) cut_requests(server);
    MHD_stop_daemon(server->daemon);
    if (server->listen_fd >= 0) close(server->listen_fd);
    wait_objects(server);
  } else {
    net_work_stop(&server->work);
  }
  http_watch_stop(server);
  pthread_cond_destroy(&server->idle);
  pthread_mutex_destroy(&server->mutex);
  net_pace_fini(&server->pace);
  net_work_fini(&server->work);
  mem_free(server);
}
