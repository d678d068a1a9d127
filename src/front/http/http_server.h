/* The HTTP front end on libmicrohttpd: an epoll pool with suspend and resume, so that thousands of streams need a handful of threads.
 *
 * Life: http_server_start (listens at once; routes that need the model answer 503 until api_model_set) -> http_server_drain (probes on new
 * connections still get their answer, work a 503) -> http_server_quiesce (no new connections) -> http_server_wait_idle -> http_server_stop.
 * One owner thread.
 *
 * Threads: the pool's (parse HTTP, write sockets; nothing slow), two workers (JSON, template, tokenizer), the watcher (clients that
 * leave, keep-alive comments), and the api's delivery thread. Lock order: server.mutex, request.mutex, then libmicrohttpd's and the api's.
 */
#ifndef SITS_FRONT_HTTP_HTTP_SERVER_H
#define SITS_FRONT_HTTP_HTTP_SERVER_H

#include "engine/engine_core.h"
#include "front/access/access.h"
#include "front/api/api.h"
#include "front/health/health.h"
#include "front/metrics/metrics.h"
#include "front/net/net_tls.h"

struct http_server;

struct http_options {
  const char *host;             /* numeric address or name; NULL: 127.0.0.1 */
  int port;                     /* 0: any */
  int n_threads;                /* of the pool */
  int n_workers;                /* parsing and tokenizing, at most NET_MAX_WORKERS */
  int max_connections;
  int64_t idle_timeout_s;       /* of a connection that waits for us or for its client's bytes */
  int64_t ping_us;              /* silence on a stream before a comment is sent; 0 never */
  struct access *access;        /* who may do what; borrowed */
  bool metrics_require_key;     /* false: /metrics is open too */
  struct net_tls *tls;          /* certificate, key and authorities; NULL: no TLS; borrowed */
  const char *cors_origins;     /* "*", or allowed origins with commas between them; NULL: browsers' other origins get no answer */
};

/* What /metrics and Retry-After ask of the engine. Both functions answer from memory. */
struct http_engine {
  void (*stats)(void *context, struct engine_stats *out);
  int32_t (*retry_after_s)(void *context);
  void *context;
  int64_t page_tokens;
};

/* The strings of options, api, health and metrics are borrowed. SITS_IO names the address. */
enum sits_status http_server_start(const struct http_options *options, struct api *api, struct health *health, struct metrics *metrics,
                                   struct http_server **out, struct sits_error *err) SITS_MUST_CHECK;
int http_server_port(const struct http_server *server);
/* Set when the engine runs, NULL before it goes; the struct is borrowed. */
void http_server_set_engine(struct http_server *server, const struct http_engine *engine);

/* Call after health_set(HEALTH_DRAINING) and api_stop_admission: every answer from now on closes its connection. */
void http_server_drain(struct http_server *server);
/* Drain, and refuse new connections; open ones go on. */
void http_server_quiesce(struct http_server *server);
/* Wait until no request is being served; true: none is. */
bool http_server_wait_idle(struct http_server *server, int64_t timeout_us);
/* Cut what is left (calls that still run are cancelled), close, join, wait until no sink of ours is in use, and free. The api's delivery
 * thread must still run. NULL is fine. */
void http_server_stop(struct http_server *server);

#endif
