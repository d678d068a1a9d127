/* See rpc_server.h. Start, the completion queues' threads, and the stop: no new connections, calls in flight end, leftovers are told
 * UNAVAILABLE, then in the order that the C core wants: its shutdown and the tag of that, the queues, the server. */
#include "front/grpc/rpc_server.h"

#include <errno.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/log.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/grpc/rpc_internal.h"

#define ARMED_PER_METHOD 2               /* waiting calls per method and queue */
#define MAX_METADATA_BYTES (16 << 10)
#define MAX_READ_BYTES (64 << 10)        /* of one read: calls that are opened and taken back in one are begun all at once */
#define MAX_SEND_BYTES (256 << 20)
#define PING_INTERVAL_MS 500             /* clients may ping that often while nothing is sent: a first token can take long */
#define KEEPALIVE_TIME_MS 30000
#define KEEPALIVE_TIMEOUT_MS 10000
#define LAST_WORDS_US 1000000            /* time for final statuses to leave */
#define CORE_DOWN_US 10000000
#define CORE_DOWN_TURNS 3

static void on_core_log(gpr_log_func_args *args) { log_debug("grpc-core", "%s", args->message); }

static void *queue_main(void *argument)
{
  struct rpc_queue *queue = argument;
  struct rpc_server *server = queue->server;
  for (;;) {
    grpc_event event = grpc_completion_queue_next(queue->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    if (event.type == GRPC_QUEUE_SHUTDOWN) return NULL;
    struct rpc_tag *tag = event.tag;
    RPC_TAG_BACK(tag);
    if (tag == &server->shutdown_tag) {
      pthread_mutex_lock(&server->mutex);
      server->is_core_down = true;
      pthread_cond_broadcast(&server->change);
      pthread_mutex_unlock(&server->mutex);
    } else {
      tag->run(tag->rpc, event.success != 0);
    }
  }
}

/* ---- start ---- */

static grpc_arg int_arg(const char *key, int value)
{
  grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)key};
  arg.value.integer = value;
  return arg;
}

static void create_core(struct rpc_server *server)
{
  grpc_arg args[] = {
    int_arg(GRPC_ARG_ALLOW_REUSEPORT, 0),
    int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)api_limits(server->api)->max_body_bytes),
    int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, MAX_SEND_BYTES),
    int_arg(GRPC_ARG_MAX_METADATA_SIZE, MAX_METADATA_BYTES),
    int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, RPC_STREAMS_PER_CONNECTION),
    int_arg(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, MAX_READ_BYTES),
    int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, PING_INTERVAL_MS),
    int_arg(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0),
    int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
    int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_TIME_MS),
    int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_TIMEOUT_MS),
    int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
    /* Identity only: what a small compressed message unpacks to has no limit in this version. */
    int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE),
  };
  grpc_channel_args list = {.num_args = sizeof args / sizeof *args, .args = args};
  server->core = grpc_server_create(&list, NULL);
  for (int q = 0; q < RPC_QUEUES; q++) {
    server->queues[q].cq = grpc_completion_queue_create_for_next(NULL);
    grpc_server_register_completion_queue(server->core, server->queues[q].cq, NULL);
  }
  for (int m = 0; m < rpc_n_methods; m++) /* no method reads its message before its key is known */
    server->handles[m] = grpc_server_register_method(server->core, rpc_methods[m].path, NULL, GRPC_SRM_PAYLOAD_NONE, 0);
}

static enum sits_status start_queues(struct rpc_server *server, struct sits_error *err)
{
  for (int q = 0; q < RPC_QUEUES; q++) {
    int failed = pthread_create(&server->queues[q].thread, NULL, queue_main, &server->queues[q]);
    if (failed) return sits_fail(err, SITS_INTERNAL, "a gRPC thread could not be started: %s", strerror(failed));
    server->queues[q].has_thread = true;
  }
  return SITS_OK;
}

/* Asked by the library at every handshake. It keeps a copy, so the set need not outlive the call. */
static grpc_ssl_certificate_config_reload_status fetch_certificates(void *context, grpc_ssl_server_certificate_config **out)
{
  struct rpc_server *server = context;
  const struct net_tls_set *set = net_tls_now(server->options.tls);
  uint64_t shown = atomic_exchange(&server->tls_version, set->version);
  if (shown == set->version) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  grpc_ssl_pem_key_cert_pair pair = {.private_key = set->key, .cert_chain = set->certificates};
  /* This version aborts without authorities, also where it asks no client for a certificate; then these count for nothing. */
  *out = grpc_ssl_server_certificate_config_create(set->authorities ? set->authorities : set->certificates, &pair, 1);
  return *out ? GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW : GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL;
}

/* With TLS the library listens. */
static enum sits_status add_tls_port(struct rpc_server *server, struct sits_error *err)
{
  char address[300];
  grpc_ssl_client_certificate_request_type request = net_tls_now(server->options.tls)->authorities
                                                       ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                                       : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
  grpc_server_credentials *credentials = grpc_ssl_server_credentials_create_with_options(
    grpc_ssl_server_credentials_create_options_using_config_fetcher(request, fetch_certificates, server));
  bool is_v6 = strchr(server->options.host, ':') != NULL;
  snprintf(address, sizeof address, is_v6 ? "[%s]:%d" : "%s:%d", server->options.host, server->options.port);
  server->port = credentials ? grpc_server_add_http2_port(server->core, address, credentials) : 0;
  if (credentials) grpc_server_credentials_release(credentials);
  return server->port > 0 ? SITS_OK : sits_fail_param(err, SITS_IO, "grpc-port", "cannot listen with TLS on %s", address);
}

static void start_core(struct rpc_server *server)
{
  grpc_server_start(server->core);
  server->is_started = true;
  for (int q = 0; q < RPC_QUEUES; q++)
    for (int i = 0; i < ARMED_PER_METHOD; i++)
      for (int m = -1; m < rpc_n_methods; m++) rpc_arm(server, q, m);
}

enum sits_status rpc_server_start(const struct rpc_options *options, struct api *api, struct health *health, struct metrics *metrics,
                                  struct rpc_server **out, struct sits_error *err)
{
  struct rpc_server *server = mem_calloc(1, sizeof *server);
  if (!server) return sits_fail(err, SITS_NOMEM, "no memory for the gRPC server");
  server->options = *options;
  if (!server->options.host) server->options.host = "127.0.0.1";
  server->api = api;
  server->health = health;
  server->metrics = metrics;
  server->listen_fd = server->wake_fd = -1;
  atomic_init(&server->next_number, 1);
  for (int q = 0; q < RPC_QUEUES; q++) server->queues[q] = (struct rpc_queue){.server = server, .index = q};
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&server->mutex, NULL);
  pthread_mutex_init(&server->connection_mutex, NULL);
  pthread_cond_init(&server->change, &monotonic);
  net_work_init(&server->work);
  pthread_condattr_destroy(&monotonic);
  static const char *names[RPC_MAX_METHODS + 1];
  for (int m = 0; m < rpc_n_methods; m++) names[m] = rpc_methods[m].path;
  names[rpc_n_methods] = "other"; /* clients choose the names of unknown methods: one label for all */
  metrics_set_methods(metrics, names, rpc_n_methods + 1);
  gpr_set_log_function(on_core_log);
  grpc_init();
  enum sits_status status = rpc_accept_prepare(server, err);
  if (!status) status = net_work_start(&server->work, RPC_WORKERS, err);
  if (!status) {
    create_core(server);
    status = start_queues(server, err);
  }
  if (!status) {
    if (options->tls) status = add_tls_port(server, err);
    start_core(server); /* also after a failure: only a server that was started can be stopped with a listener */
  }
  if (!status) status = rpc_accept_start(server, err);
  if (status) {
    bool is_stopped = rpc_server_stop(server);
    return is_stopped ? status : sits_fail(err, SITS_INTERNAL, "the gRPC server could neither start nor stop");
  }
  *out = server;
  return SITS_OK;
}

int rpc_server_port(const struct rpc_server *server) { return server->port; }

/* ---- stop ---- */

/* Wait until done(server), which is asked under server->mutex, or the time is up. */
static bool wait_for(struct rpc_server *server, bool (*done)(const struct rpc_server *server), int64_t timeout_us)
{
  int64_t end_us = clock_monotonic_us() + timeout_us;
  struct timespec end = {.tv_sec = end_us / 1000000, .tv_nsec = end_us % 1000000 * 1000};
  int failed = 0;
  pthread_mutex_lock(&server->mutex);
  while (!done(server) && failed != ETIMEDOUT) failed = pthread_cond_timedwait(&server->change, &server->mutex, &end);
  bool is_done = done(server);
  pthread_mutex_unlock(&server->mutex);
  return is_done;
}

static bool has_no_listener(const struct rpc_server *server) { return server->listen_fd < 0; }
static bool has_no_work(const struct rpc_server *server) { return server->n_rpcs == server->n_endless; }
static bool has_no_call(const struct rpc_server *server) { return server->n_rpcs == 0; }
static bool is_down(const struct rpc_server *server) { return server->is_core_down && server->n_rpcs == 0; }

void rpc_server_drain(struct rpc_server *server)
{
  if (server && server->is_started) rpc_health_broadcast(server);
}

void rpc_server_quiesce(struct rpc_server *server)
{
  if (!server || server->is_quiesced || !server->is_started) return;
  server->is_quiesced = true;
  rpc_server_drain(server);
  atomic_store(&server->is_accept_stopping, true);
  rpc_accept_wake(server);
  if (server->has_acceptor) wait_for(server, has_no_listener, CORE_DOWN_US); /* no socket may be added to a server that shuts down */
}

bool rpc_server_wait_idle(struct rpc_server *server, int64_t timeout_us) { return !server || wait_for(server, has_no_work, timeout_us); }

static void end_all(struct rpc_server *server)
{
  pthread_mutex_lock(&server->mutex);
  for (struct rpc *rpc = server->rpcs; rpc; rpc = rpc->next) {
    pthread_mutex_lock(&rpc->mutex);
    rpc_end_locked(rpc, SITS_UNAVAILABLE, "the server is shutting down", NULL);
    rpc_kick_locked(rpc);
    pthread_mutex_unlock(&rpc->mutex);
  }
  pthread_mutex_unlock(&server->mutex);
}

/* The library is told last: a call that meets a library in shutdown is reset, which clients show as CANCELLED, while the api refuses it
 * with UNAVAILABLE and a text. False: calls are left that hold the server. */
static bool stop_core(struct rpc_server *server)
{
  rpc_server_quiesce(server);
  net_work_stop(&server->work); /* what was queued is answered first */
  api_abort_all(server->api, SITS_UNAVAILABLE);
  api_wait_idle(server->api, LAST_WORDS_US);
  end_all(server);
  wait_for(server, has_no_call, LAST_WORDS_US);
  RPC_TAG_OUT(&server->shutdown_tag);
  grpc_server_shutdown_and_notify(server->core, server->queues[0].cq, &server->shutdown_tag);
  for (int i = 0; i < CORE_DOWN_TURNS; i++) {
    grpc_server_cancel_all_calls(server->core);
    if (wait_for(server, is_down, CORE_DOWN_US)) return true;
    pthread_mutex_lock(&server->mutex);
    log_error("grpc", "%lld calls have not ended, the library is %s", (long long)server->n_rpcs, server->is_core_down ? "down" : "up");
    for (struct rpc *rpc = server->rpcs; rpc; rpc = rpc->next) log_error("grpc", "id=%s has not ended", rpc->id);
    pthread_mutex_unlock(&server->mutex);
    api_abort_all(server->api, SITS_UNAVAILABLE);
  }
  return false;
}

bool rpc_server_stop(struct rpc_server *server)
{
  if (!server) return true;
  if (server->is_started && !stop_core(server)) return false; /* a call that is left would use what is freed below */
  net_work_stop(&server->work);
  rpc_accept_stop(server);
  for (int q = 0; q < RPC_QUEUES; q++) {
    struct rpc_queue *queue = &server->queues[q];
    if (!queue->cq) continue;
    grpc_completion_queue_shutdown(queue->cq);
    if (queue->has_thread) pthread_join(queue->thread, NULL);
    else queue_main(queue); /* drains it */
  }
  if (server->core) grpc_server_destroy(server->core);
  for (int q = 0; q < RPC_QUEUES; q++)
    if (server->queues[q].cq) grpc_completion_queue_destroy(server->queues[q].cq);
  grpc_shutdown();
  pthread_cond_destroy(&server->change);
  pthread_mutex_destroy(&server->mutex);
  pthread_mutex_destroy(&server->connection_mutex);
  net_work_fini(&server->work);
  mem_free(server);
  return true;
}
