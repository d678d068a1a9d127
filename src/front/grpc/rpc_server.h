/* The gRPC front end on gRPC's C core and protobuf-c: sits2026.v1.Inference, grpc.health.v1.Health, grpc.reflection.
 *
 * Life: rpc_server_start (listens at once; calls that need the model answer UNAVAILABLE until api_model_set) -> rpc_server_drain (health
 * NOT_SERVING) -> rpc_server_quiesce (no new connections) -> rpc_server_wait_idle -> rpc_server_stop. One owner thread. Signals must be
 * blocked before the start, for the library's threads inherit the mask.
 *
 * Names begin with rpc_ because grpc_ is the library's. Threads: one per completion queue (all sending), workers (parsing, templates,
 * tokenizing), the acceptor (connections, health watchers), the library's own, and the api's delivery thread. */
#ifndef SITS_FRONT_GRPC_RPC_SERVER_H
#define SITS_FRONT_GRPC_RPC_SERVER_H

#include "front/access/access.h"
#include "front/api/api.h"
#include "front/health/health.h"
#include "front/metrics/metrics.h"
#include "front/net/net_tls.h"

struct rpc_server;

struct rpc_options {
  const char *host;             /* NULL: 127.0.0.1 */
  int port;                     /* 0: any */
  int max_connections;          /* plain text only; with TLS the library accepts without a limit */
  struct access *access;        /* who may do what; borrowed. Health is always open */
  struct net_tls *tls;          /* certificate, key and authorities of clients; NULL: no TLS; borrowed */
};

/* The strings of options, api, health and metrics are borrowed. SITS_IO names the address. */
enum sits_status rpc_server_start(const struct rpc_options *options, struct api *api, struct health *health, struct metrics *metrics,
                                  struct rpc_server **out, struct sits_error *err) SITS_MUST_CHECK;
int rpc_server_port(const struct rpc_server *server);

/* Call after health_set(HEALTH_DRAINING) and api_stop_admission: watchers are told. Calls in flight go on; new ones are answered, also on
 * new connections: those that need the model with UNAVAILABLE. */
void rpc_server_drain(struct rpc_server *server);
/* Drain, and close the listener (with TLS it is the library's and stays). */
void rpc_server_quiesce(struct rpc_server *server);
/* Wait until no call is being served, health watches and reflection streams aside; true: none is. */
bool rpc_server_wait_idle(struct rpc_server *server, int64_t timeout_us);
/* End what is left with UNAVAILABLE, close, join and free. NULL is fine. False: calls did not end within half a minute, which the library
 * promises they do; nothing was freed, what the server uses must stay, and the process can only be ended. */
bool rpc_server_stop(struct rpc_server *server) SITS_MUST_CHECK;

#endif
