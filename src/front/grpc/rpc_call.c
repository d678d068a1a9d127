/* One call: armed, begun, answered, ended. The pattern is that of gRPC's C core: every batch has a tag, every tag that is out holds a
 * reference, and the last reference frees the call.
 *
 * States: ARMED (waits for a client) -> BEGUN (on_new: metadata only) -> READ (on_payload: its message, which is asked for once its key is
 * known) -> sending: one batch in flight, further messages in the list -> status sent ->
 * close tag -> last reference. The close tag may come at any time after BEGUN (the client left, its deadline passed). */
#include <grpc/support/alloc.h>
#include <grpc/support/log.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/api/api_timing.h"
#include "front/grpc/rpc_internal.h"

#define TAKEN_BACK_US 100000 /* a call that its client ends sooner is taken back */

static void on_new(struct rpc *rpc, bool ok);
static void on_payload(struct rpc *rpc, bool ok);
static void on_close(struct rpc *rpc, bool ok);
static void on_write(struct rpc *rpc, bool ok);
static void on_kick(struct rpc *rpc, bool ok);

static int sent_code(const struct rpc *rpc) { return rpc->has_sent_status ? (int)rpc->code : GRPC_STATUS_CANCELLED; }

/* ---- arming and references ---- */

static void prepare(struct rpc *rpc, struct rpc_server *server, int queue, const struct rpc_method *method)
{
  *rpc = (struct rpc){.server = server, .queue = queue, .method = method};
  atomic_init(&rpc->n_refs, 1); /* the new tag's */
  pthread_mutex_init(&rpc->mutex, NULL);
  grpc_metadata_array_init(&rpc->metadata);
  grpc_call_details_init(&rpc->details);
  rpc->new_tag = (struct rpc_tag){on_new, rpc};
  rpc->read_tag = (struct rpc_tag){on_payload, rpc};
  rpc->close_tag = (struct rpc_tag){on_close, rpc};
  rpc->write_tag = (struct rpc_tag){on_write, rpc};
  rpc->kick_tag = (struct rpc_tag){on_kick, rpc};
}

static void dispose(struct rpc *rpc)
{
  grpc_metadata_array_destroy(&rpc->metadata);
  grpc_call_details_destroy(&rpc->details);
  rpc_drop_payload(rpc);
  if (rpc->received) grpc_byte_buffer_destroy(rpc->received);
  if (rpc->writing) grpc_byte_buffer_destroy(rpc->writing);
  if (rpc->call) grpc_call_unref(rpc->call);
  access_release(rpc->grant);
  pthread_mutex_destroy(&rpc->mutex);
  mem_free(rpc->text);
  mem_free(rpc->param);
}

static bool arm(struct rpc *rpc)
{
  struct rpc_server *server = rpc->server;
  grpc_completion_queue *cq = server->queues[rpc->queue].cq;
  RPC_TAG_OUT(&rpc->new_tag);
  grpc_call_error error =
    rpc->method ? grpc_server_request_registered_call(server->core, server->handles[rpc->method - rpc_methods], &rpc->call, &rpc->deadline,
                                                      &rpc->metadata, NULL, cq, cq, &rpc->new_tag)
                : grpc_server_request_call(server->core, &rpc->call, &rpc->details, &rpc->metadata, cq, cq, &rpc->new_tag);
  if (error) log_error("grpc", "a call could not be armed: %s", grpc_call_error_to_string(error));
  return !error;
}

static bool arm_successor(struct rpc_server *server, int queue, const struct rpc_method *method)
{
  struct rpc *rpc = mem_alloc(sizeof *rpc);
  if (!rpc) return false;
  prepare(rpc, server, queue, method);
  if (arm(rpc)) return true;
  dispose(rpc);
  mem_free(rpc);
  return true; /* the library refuses only when it stops */
}

void rpc_arm(struct rpc_server *server, int queue, int method)
{
  if (!arm_successor(server, queue, method < 0 ? NULL : &rpc_methods[method])) log_error("grpc", "no memory to arm a method");
}

void rpc_ref(struct rpc *rpc) { atomic_fetch_add(&rpc->n_refs, 1); }

static void drop_messages_locked(struct rpc *rpc)
{
  while (rpc->head) {
    struct rpc_message *message = rpc->head;
    rpc->head = message->next;
    grpc_slice_unref(message->bytes);
    mem_free(message);
  }
  rpc->tail = NULL;
  rpc->n_messages = 0;
  rpc->n_bytes = 0;
}

/* Off the list first, so that no one finds a call that is being freed; out of the count last, so that a server with none is really idle. */
static void unlist(struct rpc *rpc)
{
  struct rpc_server *server = rpc->server;
  if (rpc->is_watching) atomic_fetch_sub(&server->n_watchers, 1);
  pthread_mutex_lock(&server->mutex);
  if (rpc->previous) rpc->previous->next = rpc->next;
  else server->rpcs = rpc->next;
  if (rpc->next) rpc->next->previous = rpc->previous;
  pthread_mutex_unlock(&server->mutex);
}

static void uncount(struct rpc_server *server, const struct rpc_method *method)
{
  pthread_mutex_lock(&server->mutex);
  server->n_rpcs--;
  if (method && method->is_endless) server->n_endless--;
  pthread_cond_broadcast(&server->change);
  pthread_mutex_unlock(&server->mutex);
}

/* Nobody uses the call any more: tell what became of it. */
static void observe(const struct rpc *rpc)
{
  const struct rpc_method *method = rpc->method;
  struct api_record record = {.transport = "grpc", .id = rpc->id, .route = method ? method->path : "?",
                              .tenant = access_tenant_name(rpc->grant), .key = access_key_id(rpc->grant), .peer = rpc->peer,
                              .is_public = method && !method->roles, .kind = method ? method->kind : 0, .code = sent_code(rpc),
                              .status = rpc->has_sent_status ? rpc->status : SITS_CANCELLED,
                              .client_left = rpc->is_cancelled && !rpc->has_sent_status, .started_unix_us = rpc->started_unix_us,
                              .started_us = rpc->started_us, .received_us = rpc->received_us, .ended_us = rpc->ended_us,
                              .parent = &rpc->parent};
  if (rpc->api_call) api_record_call(&record, rpc->api_call);
  api_observe(rpc->server->api, &record);
}

void rpc_unref(struct rpc *rpc)
{
  if (atomic_fetch_sub(&rpc->n_refs, 1) != 1) return;
  struct rpc_server *server = rpc->server;
  const struct rpc_method *method = rpc->method;
  int queue = rpc->queue, fd = rpc->fd;
  bool is_listed = rpc->is_listed, owes_arm = rpc->owes_arm;
  if (is_listed) {
    observe(rpc);
    unlist(rpc);
  }
  drop_messages_locked(rpc);
  if (rpc->api_call) api_call_release(rpc->api_call);
  if (rpc->has_reply) rpc_reply_fini(&rpc->reply);
  dispose(rpc);
  if (owes_arm) { /* memory was short when this call began: it is armed again in place */
    prepare(rpc, server, queue, method);
    if (!arm(rpc)) {
      dispose(rpc);
      mem_free(rpc);
    }
  } else {
    mem_free(rpc);
  }
  if (!is_listed) return;
  rpc_accept_freed(server, fd);
  uncount(server, method); /* last: the server may be gone after it */
}

/* ---- sending ---- */

#define MAX_TRAILERS 12 /* error code and field, Retry-After, six of X-RateLimit */

struct metadata { grpc_metadata list[MAX_TRAILERS]; size_t n; };

static void add_metadata(void *context, const char *key, const char *value)
{
  struct metadata *trailer = context;
  if (trailer->n == MAX_TRAILERS) return;
  trailer->list[trailer->n++] = (grpc_metadata){.key = grpc_slice_from_static_string(key), .value = grpc_slice_from_copied_string(value)};
}

static void drop_metadata(struct metadata *trailer)
{
  for (size_t i = 0; i < trailer->n; i++) grpc_slice_unref(trailer->list[i].value);
}

/* Bytes that metadata values may hold are printable ASCII; ours are constants and names of fields, checked anyway. */
static bool is_plain(const char *text)
{
  for (; *text; text++)
    if (*text < 0x20 || *text > 0x7e) return false;
  return true;
}

static void fill_trailer(const struct rpc *rpc, struct metadata *trailer)
{
  access_write_headers(rpc->grant, add_metadata, trailer);
  if (!rpc->status) return;
  const char *code = sits_status_info(rpc->status)->code;
  if (code) add_metadata(trailer, "sits-error-code", code);
  if (rpc->param && rpc->param[0] && is_plain(rpc->param)) add_metadata(trailer, "sits-error-param", rpc->param);
  if (rpc->status != SITS_RATE_LIMITED) return;
  char seconds[16];
  snprintf(seconds, sizeof seconds, "%d", access_retry_after_s(rpc->grant));
  add_metadata(trailer, "retry-after", seconds);
}

/* Start the next batch when none is in flight: head, at most one message, and the status after the last one. */
static void pump_locked(struct rpc *rpc)
{
  struct rpc_message *message = rpc->head;
  bool ends = rpc->wants_status && (!message || !message->next);
  if (rpc->is_closed || rpc->is_broken || rpc->is_writing || rpc->has_sent_status || (!message && !ends)) return;
  grpc_op ops[3] = {0};
  struct metadata head = {.n = 0}, trailer = {.n = 0};
  grpc_slice details = grpc_empty_slice();
  size_t n = 0;
  if (!rpc->has_sent_head) {
    add_metadata(&head, "x-request-id", rpc->id);
    ops[n].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[n].data.send_initial_metadata.count = head.n;
    ops[n++].data.send_initial_metadata.metadata = head.list;
  }
  if (message) {
    rpc->writing = grpc_raw_byte_buffer_create(&message->bytes, 1);
    ops[n].op = GRPC_OP_SEND_MESSAGE;
    ops[n++].data.send_message.send_message = rpc->writing;
    rpc->head = message->next;
    if (!rpc->head) rpc->tail = NULL;
    rpc->n_messages--;
    rpc->n_bytes -= message->n_bytes;
    if (message->emitted_us) metrics_delivery(rpc->server->metrics, clock_monotonic_us() - message->emitted_us);
    grpc_slice_unref(message->bytes);
    mem_free(message);
  }
  if (ends) {
    fill_trailer(rpc, &trailer);
    if (rpc->text) details = grpc_slice_from_copied_string(rpc->text);
    ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[n].data.send_status_from_server.status = rpc->code;
    ops[n].data.send_status_from_server.status_details = rpc->text ? &details : NULL;
    ops[n].data.send_status_from_server.trailing_metadata_count = trailer.n;
    ops[n++].data.send_status_from_server.trailing_metadata = trailer.list;
  }
  rpc_ref(rpc);
  RPC_TAG_OUT(&rpc->write_tag);
  grpc_call_error error = grpc_call_start_batch(rpc->call, ops, n, &rpc->write_tag, NULL);
  drop_metadata(&head);
  drop_metadata(&trailer);
  grpc_slice_unref(details);
  if (error) {
    log_error("grpc", "id=%s a batch was refused: %s", rpc->id, grpc_call_error_to_string(error));
    rpc->is_broken = true;
    grpc_call_cancel(rpc->call, NULL);
    atomic_fetch_sub(&rpc->n_refs, 1); /* never the last one: the caller holds another */
    return;
  }
  rpc->is_writing = rpc->has_sent_head = true;
  if (ends) rpc->has_sent_status = true;
}

static void on_write(struct rpc *rpc, bool ok)
{
  bool resumes = false;
  pthread_mutex_lock(&rpc->mutex);
  rpc->is_writing = false;
  if (rpc->writing) grpc_byte_buffer_destroy(rpc->writing);
  rpc->writing = NULL;
  if (!ok) rpc->is_broken = true; /* the close tag says why and ends the work */
  else pump_locked(rpc);
  if (rpc->is_stalled && rpc->n_messages < RPC_STREAM_LOW_MESSAGES && rpc->n_bytes < RPC_STREAM_HIGH_BYTES) {
    rpc->is_stalled = false;
    resumes = true;
  }
  struct api_call *call = rpc->api_call;
  pthread_mutex_unlock(&rpc->mutex);
  if (resumes && call) api_call_resume(call);
  rpc_unref(rpc);
}

static void on_kick(struct rpc *rpc, bool ok)
{
  pthread_mutex_lock(&rpc->mutex);
  rpc->is_kicked = false;
  if (ok) pump_locked(rpc);
  pthread_mutex_unlock(&rpc->mutex);
  rpc_unref(rpc);
}

void rpc_kick_locked(struct rpc *rpc)
{
  if (rpc->is_kicked || rpc->is_writing || rpc->is_closed || rpc->is_broken) return; /* the write tag goes on by itself */
  rpc->is_kicked = true;
  rpc_ref(rpc);
  RPC_TAG_OUT(&rpc->kick_tag);
  grpc_call_error error = grpc_call_start_batch(rpc->call, NULL, 0, &rpc->kick_tag, NULL);
  if (!error) return;
  log_error("grpc", "id=%s a hand-over was refused: %s", rpc->id, grpc_call_error_to_string(error));
  rpc->is_kicked = false;
  atomic_fetch_sub(&rpc->n_refs, 1);
}

bool rpc_send_locked(struct rpc *rpc, const ProtobufCMessage *message, int64_t emitted_us)
{
  if (rpc->is_closed || rpc->is_broken || rpc->wants_status) return true;
  struct rpc_message *entry = mem_alloc(sizeof *entry);
  if (!entry) return false;
  size_t n_bytes = protobuf_c_message_get_packed_size(message);
  *entry = (struct rpc_message){.bytes = grpc_slice_malloc(n_bytes), .n_bytes = n_bytes, .emitted_us = emitted_us};
  protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(entry->bytes));
  if (rpc->tail) rpc->tail->next = entry;
  else rpc->head = entry;
  rpc->tail = entry;
  rpc->n_messages++;
  rpc->n_bytes += n_bytes;
  return true;
}

void rpc_end_locked(struct rpc *rpc, enum sits_status status, const char *text, const char *param)
{
  if (rpc->wants_status) return;
  const struct sits_status_info *info = sits_status_info(status);
  rpc->wants_status = true;
  rpc->status = status;
  rpc->code = (grpc_status_code)info->grpc;
  if (!status) return;
  rpc->text = mem_strdup(text && text[0] ? text : info->text); /* without memory the code alone is sent */
  rpc->param = param && param[0] ? mem_strdup(param) : NULL;
  metrics_refused(rpc->server->metrics, status);
}

enum sits_status rpc_reply_one(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  pthread_mutex_lock(&rpc->mutex);
  bool has_room = rpc_send_locked(rpc, message, 0);
  if (has_room) {
    rpc_end_locked(rpc, SITS_OK, NULL, NULL);
    rpc_kick_locked(rpc);
  }
  pthread_mutex_unlock(&rpc->mutex);
  return has_room ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for the answer");
}

void rpc_fail(struct rpc *rpc, enum sits_status status, const struct sits_error *err)
{
  bool is_ours = err && err->status == status;
  if (sits_status_info(status)->http >= 500)
    log_warn("grpc", "id=%s status=%s %s", rpc->id, sits_status_info(status)->name, is_ours ? err->text : "");
  pthread_mutex_lock(&rpc->mutex);
  rpc_end_locked(rpc, status, is_ours ? err->text : NULL, is_ours ? err->param : NULL);
  rpc_kick_locked(rpc);
  pthread_mutex_unlock(&rpc->mutex);
}

/* ---- beginning and end ---- */

/* The value of a metadata key, copied; false when it is absent or does not fit. Of several the first counts. */
static bool find_metadata(const struct rpc *rpc, const char *key, char *out, size_t capacity)
{
  for (size_t i = 0; i < rpc->metadata.count; i++) {
    const grpc_metadata *entry = &rpc->metadata.metadata[i];
    if (grpc_slice_str_cmp(entry->key, key)) continue;
    size_t n = GRPC_SLICE_LENGTH(entry->value);
    if (n >= capacity) return false;
    memcpy(out, GRPC_SLICE_START_PTR(entry->value), n);
    out[n] = '\0';
    return true;
  }
  return false;
}

static int count_metadata(const struct rpc *rpc, const char *key)
{
  int n = 0;
  for (size_t i = 0; i < rpc->metadata.count; i++) n += !grpc_slice_str_cmp(rpc->metadata.metadata[i].key, key);
  return n;
}

/* Key, quota and role. An unknown method tells itself apart only to those who have a key. */
static enum sits_status check_access(struct rpc *rpc, struct sits_error *err)
{
  unsigned roles = rpc->method ? rpc->method->roles : ACCESS_ANY_ROLE;
  char value[8192];
  if (count_metadata(rpc, "authorization") > 1)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "authorization", "more than one authorization entry");
  if (!roles) return SITS_OK;
  bool has_value = find_metadata(rpc, "authorization", value, sizeof value);
  enum sits_status status = access_identify(rpc->server->options.access, has_value ? value : NULL, &rpc->grant);
  return status ? status : access_admit(rpc->grant, roles, err);
}

/* Sockets that rpc_accept.c handed over are known to the library by their number only. */
static void name_peer(struct rpc *rpc)
{
  char *peer = grpc_call_get_peer(rpc->call);
  struct sockaddr_storage address = {0};
  socklen_t n = sizeof address;
  if (!peer || sscanf(peer, "fd:%d", &rpc->fd) != 1) rpc->fd = -1;
  if (rpc->fd >= 0 && !getpeername(rpc->fd, (struct sockaddr *)&address, &n))
    api_peer_name((const struct sockaddr *)&address, rpc->peer);
  else snprintf(rpc->peer, sizeof rpc->peer, "%s", peer ? peer : "");
  gpr_free(peer);
}

/* One that is too long or empty is there, and wrong. */
static void find_class(struct rpc *rpc)
{
  static const char key[] = "x-qos-level";
  if (find_metadata(rpc, key, rpc->qos, sizeof rpc->qos) && rpc->qos[0]) return;
  snprintf(rpc->qos, sizeof rpc->qos, "%s", count_metadata(rpc, key) ? "?" : "");
}

static void find_trace_parent(struct rpc *rpc)
{
  char parent[256], state[API_TRACE_STATE_BYTES];
  bool has_parent = find_metadata(rpc, "traceparent", parent, sizeof parent);
  bool has_state = find_metadata(rpc, "tracestate", state, sizeof state);
  api_trace_parent_parse(has_parent ? parent : NULL, has_state ? state : NULL, &rpc->parent);
}

static void begin(struct rpc *rpc)
{
  struct rpc_server *server = rpc->server;
  rpc->started_us = clock_monotonic_us();
  rpc->started_unix_us = clock_unix_us();
  name_peer(rpc);
  rpc_accept_begun(server, rpc->fd);
  find_trace_parent(rpc);
  metrics_grpc_begin(server->metrics);
  char given[80];
  bool has_id = find_metadata(rpc, "x-request-id", given, sizeof given);
  access_choose_id(has_id ? given : NULL, atomic_fetch_add(&server->next_number, 1), rpc->id, sizeof rpc->id);
  find_class(rpc);
  pthread_mutex_lock(&server->mutex);
  rpc->is_listed = true;
  rpc->next = server->rpcs;
  if (server->rpcs) server->rpcs->previous = rpc;
  server->rpcs = rpc;
  server->n_rpcs++;
  if (rpc->method && rpc->method->is_endless) server->n_endless++;
  pthread_mutex_unlock(&server->mutex);
  rpc_ref(rpc);
  grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
  op.data.recv_close_on_server.cancelled = &rpc->is_cancelled;
  RPC_TAG_OUT(&rpc->close_tag);
  grpc_call_error error = grpc_call_start_batch(rpc->call, &op, 1, &rpc->close_tag, NULL);
  GPR_ASSERT(!error); /* a fresh call takes its first batch, or the library is broken */
}

/* Decide on key, quota, role, method and drain, in this order, before any of the message is read. */
static enum sits_status check_head(struct rpc *rpc, struct sits_error *err)
{
  enum sits_status status = check_access(rpc, err);
  if (rpc->grant || access_is_open(rpc->server->options.access)) rpc_accept_known(rpc->server, rpc->fd);
  if (status) return status;
  if (!rpc->method) return sits_fail(err, SITS_METHOD_NOT_ALLOWED, "there is no such method");
  if (rpc->method->is_slow && !api_is_admitting(rpc->server->api))
    return sits_fail(err, SITS_UNAVAILABLE, "the server is shutting down");
  return SITS_OK;
}

/* Until a message is asked for, the library takes no more of it than a stream's window. */
static void ask_payload(struct rpc *rpc)
{
  grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
  op.data.recv_message.recv_message = &rpc->payload;
  rpc_ref(rpc);
  RPC_TAG_OUT(&rpc->read_tag);
  grpc_call_error error = grpc_call_start_batch(rpc->call, &op, 1, &rpc->read_tag, NULL);
  GPR_ASSERT(!error); /* the first of its kind on this call */
}

static void on_new(struct rpc *rpc, bool ok)
{
  if (!ok) { /* the server stops; nothing began */
    rpc_unref(rpc);
    return;
  }
  rpc->owes_arm = !arm_successor(rpc->server, rpc->queue, rpc->method);
  begin(rpc);
  struct sits_error err = {0};
  enum sits_status status = check_head(rpc, &err);
  if (status) rpc_fail(rpc, status, &err);
  else if (rpc->method->request) ask_payload(rpc);
  else rpc_run(rpc);
  rpc_unref(rpc);
}

/* A call counts once, whether its message or its end shows it first. */
static void note_taken_back(struct rpc *rpc)
{
  pthread_mutex_lock(&rpc->mutex);
  bool is_first = !rpc->is_taken_back;
  rpc->is_taken_back = true;
  pthread_mutex_unlock(&rpc->mutex);
  if (is_first) rpc_accept_taken_back(rpc->server, rpc->fd);
}

static void on_payload(struct rpc *rpc, bool ok)
{
  struct sits_error err = {0};
  if (rpc->payload) rpc->received_us = clock_monotonic_us();
  else note_taken_back(rpc);
  pthread_mutex_lock(&rpc->mutex);
  bool is_closed = rpc->is_closed;
  pthread_mutex_unlock(&rpc->mutex);
  if (is_closed || !ok) { /* the close tag tells */
  } else if (!rpc->method->is_slow) {
    rpc_run(rpc);
  } else if (!rpc_work_push(rpc)) {
    (void)sits_fail(&err, SITS_QUEUE_FULL, "too many requests are waiting to be read");
    rpc_fail(rpc, SITS_QUEUE_FULL, &err);
  }
  rpc_unref(rpc);
}

/* What the log line tells of a call, copied under its mutex and written without it: stderr may be slow. */
struct outcome { int code; struct api_usage usage; };

static void note_end(const struct rpc *rpc, const struct outcome *outcome)
{
  char timing[API_TIMING_LOG_BYTES];
  metrics_grpc_end(rpc->server->metrics, rpc->method ? (int)(rpc->method - rpc_methods) : rpc_n_methods, outcome->code);
  const int64_t now_us = clock_monotonic_us();
  double ms = (double)(now_us - rpc->started_us) / 1000;
  const char *path = rpc->method ? rpc->method->path : "?";
  api_timing_log(&outcome->usage, now_us, timing);
  if (rpc->method && rpc->method->kind)
    log_info("grpc", "id=%s method=%s status=%d ms=%.1f prompt_tokens=%lld output_tokens=%lld%s%s", rpc->id, path, outcome->code, ms,
             (long long)outcome->usage.n_prompt_tokens, (long long)outcome->usage.n_output_tokens, timing,
             rpc->is_cancelled ? " client_left=1" : "");
  else log_debug("grpc", "id=%s method=%s status=%d ms=%.1f", rpc->id, path, outcome->code, ms);
}

static void on_close(struct rpc *rpc, bool ok)
{
  pthread_mutex_lock(&rpc->mutex);
  rpc->is_closed = true;
  rpc->ended_us = clock_monotonic_us();
  drop_messages_locked(rpc);
  struct api_call *call = rpc->api_call;
  bool left = rpc->is_cancelled && !rpc->has_sent_status && rpc->method && rpc->method->kind;
  struct outcome outcome = {sent_code(rpc), rpc->usage};
  pthread_mutex_unlock(&rpc->mutex);
  note_end(rpc, &outcome);
  if (rpc->is_cancelled && rpc->ended_us - rpc->started_us < TAKEN_BACK_US) note_taken_back(rpc);
  if (left) metrics_add(rpc->server->metrics, METRICS_DISCONNECTS, 1);
  if (call) api_call_cancel(call, SITS_CANCELLED); /* does nothing when it is done */
  rpc_unref(rpc);
}
