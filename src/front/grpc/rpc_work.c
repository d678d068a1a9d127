/* What happens on a worker: unpacking megabytes, templates, tokenizers. */
#include "front/grpc/rpc_internal.h"

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

static void run_job(void *owner)
{
  struct rpc *rpc = owner;
  metrics_reading(rpc->server->metrics, -1);
  pthread_mutex_lock(&rpc->mutex);
  bool is_closed = rpc->is_closed;
  pthread_mutex_unlock(&rpc->mutex);
  if (!is_closed) rpc_run(rpc); /* else its client left while it waited */
  rpc_unref(rpc);
}

bool rpc_work_push(struct rpc *rpc)
{
  struct rpc_server *server = rpc->server;
  rpc->n_payload_bytes = rpc->payload ? (int64_t)grpc_byte_buffer_length(rpc->payload) : 0;
  int64_t before = atomic_fetch_add(&server->payload_bytes, rpc->n_payload_bytes);
  if (before + rpc->n_payload_bytes > MAX_PAYLOADS_BYTES) return false;
  rpc_ref(rpc); /* the job's */
  rpc->job = (struct net_job){.run = run_job, .owner = rpc};
  metrics_reading(server->metrics, 1);
  if (net_work_push(&server->work, &rpc->job)) return true;
  metrics_reading(server->metrics, -1);
  rpc_unref(rpc); /* never the last one: the caller holds another */
  return false;
}
