/* The worker pool: what is too slow for a completion queue's thread (unpacking megabytes, templates, tokenizers) happens here, in order of
 * arrival. A job holds a reference to its call. */
#include <string.h>

#include "front/grpc/rpc_internal.h"

#define MAX_JOBS 8192
#define MAX_PAYLOADS_BYTES (512 << 20) /* of all requests that wait for a worker, as for HTTP's bodies */

void rpc_drop_payload(struct rpc *rpc)
{
  if (rpc->payload) grpc_byte_buffer_destroy(rpc->payload);
  rpc->payload = NULL;
  atomic_fetch_sub(&rpc->server->payload_bytes, rpc->n_payload_bytes);
  rpc->n_payload_bytes = 0;
}

enum sits_status rpc_parse(struct rpc *rpc, const ProtobufCMessage *message, struct api_request **out, struct sits_error *err)
{
  struct api_request *parsed = NULL;
  enum sits_status status =
    rpc_request_parse(message, rpc->method->kind, rpc->method->is_stream, api_limits(rpc->server->api), &parsed, err);
  if (status) return status;
  parsed->grant = access_hold(rpc->grant);
  status = api_request_set_class(parsed, rpc->qos[0] ? rpc->qos : NULL, err);
  if (status) api_request_destroy(parsed);
  else *out = parsed;
  return status;
}

void rpc_run(struct rpc *rpc)
{
  struct sits_error err = {0};
  ProtobufCMessage *message = NULL;
  enum sits_status status = SITS_OK;
  if (rpc->method->request) {
    status = rpc_unpack(rpc->payload, rpc->method->request, &message, &err);
    rpc_drop_payload(rpc);
  }
  if (!status) status = rpc->method->answer(rpc, message, &err);
  if (message) protobuf_c_message_free_unpacked(message, &rpc_allocator);
  if (status) rpc_fail(rpc, status, &err);
}

static void *work_main(void *argument)
{
  struct rpc_server *server = argument;
  pthread_mutex_lock(&server->work_mutex);
  for (;;) {
    while (!server->jobs && !server->is_work_stopping) pthread_cond_wait(&server->work_wake, &server->work_mutex);
    struct rpc *rpc = server->jobs;
    if (!rpc) break;
    server->jobs = rpc->next_job;
    if (!server->jobs) server->last_job = NULL;
    server->n_jobs--;
    metrics_reading(server->metrics, -1);
    pthread_mutex_unlock(&server->work_mutex);
    pthread_mutex_lock(&rpc->mutex);
    bool is_closed = rpc->is_closed;
    pthread_mutex_unlock(&rpc->mutex);
    if (!is_closed) rpc_run(rpc); /* else its client left while it waited */
    rpc_unref(rpc);
    pthread_mutex_lock(&server->work_mutex);
  }
  pthread_mutex_unlock(&server->work_mutex);
  return NULL;
}

enum sits_status rpc_work_start(struct rpc_server *server, struct sits_error *err)
{
  for (int i = 0; i < RPC_WORKERS; i++) {
    int failed = pthread_create(&server->workers[i], NULL, work_main, server);
    if (failed) return sits_fail(err, SITS_INTERNAL, "a gRPC worker could not be started: %s", strerror(failed));
    server->n_workers++;
  }
  return SITS_OK;
}

bool rpc_work_push(struct rpc *rpc)
{
  struct rpc_server *server = rpc->server;
  rpc->n_payload_bytes = rpc->payload ? (int64_t)grpc_byte_buffer_length(rpc->payload) : 0;
  int64_t before = atomic_fetch_add(&server->payload_bytes, rpc->n_payload_bytes);
  pthread_mutex_lock(&server->work_mutex);
  bool has_room = before + rpc->n_payload_bytes <= MAX_PAYLOADS_BYTES && server->n_jobs < MAX_JOBS && !server->is_work_stopping;
  if (has_room) {
    rpc_ref(rpc);
    rpc->next_job = NULL;
    if (server->last_job) server->last_job->next_job = rpc;
    else server->jobs = rpc;
    server->last_job = rpc;
    server->n_jobs++;
    metrics_reading(server->metrics, 1);
    pthread_cond_signal(&server->work_wake);
  }
  pthread_mutex_unlock(&server->work_mutex);
  return has_room;
}

void rpc_work_stop(struct rpc_server *server)
{
  pthread_mutex_lock(&server->work_mutex);
  server->is_work_stopping = true;
  pthread_cond_broadcast(&server->work_wake);
  pthread_mutex_unlock(&server->work_mutex);
  for (int i = 0; i < server->n_workers; i++) pthread_join(server->workers[i], NULL);
  server->n_workers = 0;
}
