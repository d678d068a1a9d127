/* grpc.health.v1: the readiness that HTTP shows, for the server ("") and for each service. A watcher is told at once and on each change;
 * changes are found by the acceptor's thread, which looks every 20 ms while anyone watches (a wedged engine changes no variable). */
#include <string.h>

#include "front/grpc/rpc_internal.h"
#include "grpc/health/v1/health.pb-c.h"

#define UNKNOWN_SERVICE GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN

static bool is_service(const char *name)
{
  static const char *const names[] = {"", "sits2026.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                                      "grpc.reflection.v1alpha.ServerReflection"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!strcmp(name, names[i])) return true;
  return false;
}

static int status_now(const struct rpc_server *server)
{
  return health_is_ready(server->health) ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                                         : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
}

static const char *service_of(const ProtobufCMessage *message)
{
  const char *service = ((const Grpc__Health__V1__HealthCheckRequest *)message)->service;
  return service ? service : "";
}

enum sits_status rpc_answer_health_check(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  if (!is_service(service_of(message))) return sits_fail_param(err, SITS_NOT_FOUND, "service", "there is no such service");
  Grpc__Health__V1__HealthCheckResponse out = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
  out.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status_now(rpc->server);
  return rpc_reply_one(rpc, &out.base, err);
}

/* Send what changed. False without memory: it is tried again at the next look. */
static void tell_locked(struct rpc *rpc, int status)
{
  if (rpc->shown_health == status) return;
  Grpc__Health__V1__HealthCheckResponse out = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
  out.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
  if (!rpc_send_locked(rpc, &out.base, 0)) return;
  rpc->shown_health = status;
  rpc_kick_locked(rpc);
}

enum sits_status rpc_answer_health_watch(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  bool is_known = is_service(service_of(message));
  pthread_mutex_lock(&rpc->mutex);
  rpc->shown_health = -1;
  rpc->is_watching = is_known;
  tell_locked(rpc, is_known ? status_now(rpc->server) : UNKNOWN_SERVICE);
  pthread_mutex_unlock(&rpc->mutex);
  if (!is_known) return SITS_OK; /* the set of services is fixed: it stays open and silent, as the protocol asks */
  atomic_fetch_add(&rpc->server->n_watchers, 1);
  rpc_accept_wake(rpc->server);
  return SITS_OK;
}

void rpc_health_broadcast(struct rpc_server *server)
{
  int status = status_now(server);
  pthread_mutex_lock(&server->mutex);
  for (struct rpc *rpc = server->rpcs; rpc; rpc = rpc->next) {
    pthread_mutex_lock(&rpc->mutex);
    if (rpc->is_watching && !rpc->is_closed) tell_locked(rpc, status);
    pthread_mutex_unlock(&rpc->mutex);
  }
  pthread_mutex_unlock(&server->mutex);
}
