/* Generate and Chat, unary and streaming: from a message to a call of the api, and from its deltas to messages.
 *
 * rpc_answer_generate runs on a worker, the sink on the api's delivery thread; a call's mutex is what they meet at. */
#include "base/clock.h"
#include "front/grpc/rpc_internal.h"

/* ---- the sink ---- */

static void sink_delta(void *context, const struct api_delta *delta)
{
  struct rpc *rpc = context;
  pthread_mutex_lock(&rpc->mutex);
  const ProtobufCMessage *message = rpc_reply_delta(&rpc->reply, delta);
  bool has_failed = rpc->reply.has_failed || (message && !rpc_send_locked(rpc, message, delta->emitted_us));
  pthread_mutex_unlock(&rpc->mutex);
  if (has_failed) api_call_cancel(rpc->api_call, SITS_NOMEM);
}

static void sink_flush(void *context)
{
  struct rpc *rpc = context;
  pthread_mutex_lock(&rpc->mutex);
  if (rpc->head) rpc_kick_locked(rpc);
  pthread_mutex_unlock(&rpc->mutex);
}

static bool sink_is_full(void *context)
{
  struct rpc *rpc = context;
  pthread_mutex_lock(&rpc->mutex);
  bool is_full = rpc->n_messages >= RPC_STREAM_HIGH_MESSAGES || rpc->n_bytes >= RPC_STREAM_HIGH_BYTES;
  if (is_full && !rpc->is_stalled) metrics_add(rpc->server->metrics, METRICS_SLOW_READERS, 1);
  rpc->is_stalled = is_full;
  if (is_full) rpc_kick_locked(rpc); /* what is queued in this turn is not flushed yet, and only its sending wakes the call again */
  pthread_mutex_unlock(&rpc->mutex);
  return is_full;
}

static void sink_done(void *context, const struct api_result *result)
{
  struct rpc *rpc = context;
  enum sits_status status = result->status;
  pthread_mutex_lock(&rpc->mutex);
  rpc->usage = result->usage;
  const ProtobufCMessage *message = status ? NULL : rpc_reply_done(&rpc->reply, result);
  if (!status && (!message || !rpc_send_locked(rpc, message, 0))) status = SITS_NOMEM;
  rpc_end_locked(rpc, status, status == result->status ? result->text : NULL, NULL);
  rpc_kick_locked(rpc);
  pthread_mutex_unlock(&rpc->mutex);
  rpc_unref(rpc); /* the sink's */
}

static const struct api_sink sink = {.delta = sink_delta, .flush = sink_flush, .is_full = sink_is_full, .done = sink_done};

/* ---- start ---- */

static bool attach_call(struct rpc *rpc, struct api_call *call, enum sits_status *status)
{
  const struct api_model *model = api_model(rpc->server->api);
  const struct api_request *wanted = api_call_request(call);
  pthread_mutex_lock(&rpc->mutex);
  rpc->api_call = call; /* the rpc owns the reference from here on */
  *status = rpc_reply_init(&rpc->reply, wanted, model->tokenizer, wanted->model ? wanted->model : model->names[0], rpc->id, clock_unix_s(),
                           api_call_n_choices(call));
  rpc->has_reply = true;
  rpc->reply.call = call;
  bool is_closed = rpc->is_closed;
  pthread_mutex_unlock(&rpc->mutex);
  return !*status && !is_closed;
}

enum sits_status rpc_answer_generate(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  struct api *api = rpc->server->api;
  struct api_request *parsed = NULL;
  struct api_call *call = NULL;
  enum sits_status status = rpc_parse(rpc, message, &parsed, err);
  if (status) return status;
  status = api_call_create(api, parsed, &sink, rpc, &call, err);
  if (status) {
    api_request_destroy(parsed);
    return status;
  }
  if (!attach_call(rpc, call, &status)) return status ? sits_fail(err, status, "no memory for the answer") : SITS_CANCELLED;
  rpc_ref(rpc); /* the sink's, dropped in sink_done */
  status = api_call_submit(call, rpc->id, err);
  if (status) {
    rpc_unref(rpc);
    return status;
  }
  pthread_mutex_lock(&rpc->mutex);
  bool left = rpc->is_closed;
  pthread_mutex_unlock(&rpc->mutex);
  if (left) api_call_cancel(call, SITS_CANCELLED); /* it left between the first look and the submission */
  return SITS_OK;
}
