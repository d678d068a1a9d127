/* Chat and legacy completions: from a body to a call, and from its deltas to a stream or a whole answer.
 *
 * http_answer_generate runs on a worker. The sink's functions run on the api's delivery thread; read_stream on the pool's. The request's
 * mutex is what they meet at. A stream's 200 goes out only after the engine has admitted the call. */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/utf8.h"
#include "front/http/http_internal.h"

#define STREAM_BLOCK_BYTES 8192
#define MAX_WHOLE_BYTES (512u << 20)

/* ---- the stream's reader ---- */

static size_t unsent_bytes(const struct http_request *request) { return request->out.size - request->out_at; }

/* Copy what fits, ending at a character's end. */
static size_t take_bytes(struct http_request *request, char *to, size_t max)
{
  const char *from = request->out.data + request->out_at;
  size_t n = unsent_bytes(request);
  if (n > max) n = max - utf8_incomplete_tail(from, max);
  memcpy(to, from, n);
  request->out_at += n;
  if (request->out_at == request->out.size) {
    buf_clear(&request->out);
    request->out_at = 0;
  }
  return n;
}

static ssize_t read_stream(void *context, uint64_t position, char *to, size_t max)
{
  struct http_request *request = context;
  bool resumes = false;
  ssize_t result = 0;
  pthread_mutex_lock(&request->mutex);
  http_looked_locked(request);
  if (request->is_gone) {
    result = MHD_CONTENT_READER_END_WITH_ERROR;
  } else if (unsent_bytes(request)) {
    result = (ssize_t)take_bytes(request, to, max);
    request->last_write_us = clock_monotonic_us();
    if (request->oldest_us) metrics_delivery(request->server->metrics, request->last_write_us - request->oldest_us);
    request->oldest_us = 0;
    resumes = request->is_stalled && unsent_bytes(request) < HTTP_STREAM_LOW_BYTES;
    if (resumes) request->is_stalled = false;
  } else if (request->is_finished) {
    result = MHD_CONTENT_READER_END_OF_STREAM;
  } else {
    request->wait = HTTP_WAIT_BYTES;
    MHD_suspend_connection(request->connection);
  }
  pthread_mutex_unlock(&request->mutex);
  if (resumes) api_call_resume(request->call);
  return result;
}

static void free_stream(void *context) { http_request_unref(context); }

/* The response of an admitted stream; holds a reference to the request. */
static struct MHD_Response *make_stream_response(struct http_request *request)
{
  http_request_ref(request);
  struct MHD_Response *response =
    MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream, request, free_stream);
  if (!response) {
    http_request_unref(request);
    return NULL;
  }
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream; charset=utf-8");
  MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
  MHD_add_response_header(response, "X-Accel-Buffering", "no");
  http_add_headers(request, response);
  return response;
}

/* ---- the sink ---- */

static void compact(struct http_request *request)
{
  if (request->out_at < HTTP_STREAM_LOW_BYTES || request->out_at * 2 < request->out.size) return;
  buf_drop_front(&request->out, request->out_at);
  request->out_at = 0;
}

static void sink_delta(void *context, const struct api_delta *delta)
{
  struct http_request *request = context;
  pthread_mutex_lock(&request->mutex);
  compact(request);
  size_t n_whole = request->out.size;
  http_reply_delta(&request->reply, delta, &request->out);
  if (request->out.failed) buf_truncate(&request->out, n_whole); /* no half event before the error that sink_done appends */
  if (delta->emitted_us && !request->oldest_us && request->is_stream) request->oldest_us = delta->emitted_us;
  bool has_failed = request->reply.has_failed || request->out.failed;
  pthread_mutex_unlock(&request->mutex);
  if (has_failed) api_call_cancel(request->call, SITS_NOMEM);
}

static void sink_flush(void *context)
{
  struct http_request *request = context;
  pthread_mutex_lock(&request->mutex);
  if (unsent_bytes(request)) http_wake_locked(request, HTTP_WAIT_BYTES);
  pthread_mutex_unlock(&request->mutex);
  net_pace_wait(&request->server->pace);
}

static bool sink_is_full(void *context)
{
  struct http_request *request = context;
  pthread_mutex_lock(&request->mutex);
  bool is_full = unsent_bytes(request) > HTTP_STREAM_HIGH_BYTES;
  if (is_full && !request->is_stalled) metrics_add(request->server->metrics, METRICS_SLOW_READERS, 1);
  request->is_stalled = is_full;
  pthread_mutex_unlock(&request->mutex);
  return is_full;
}

static void sink_done(void *context, const struct api_result *result)
{
  struct http_request *request = context;
  struct buf whole;
  buf_init(&whole, MAX_WHOLE_BYTES);
  pthread_mutex_lock(&request->mutex);
  request->usage = result->usage;
  bool is_stream = request->is_stream;
  if (is_stream) {
    request->outcome = result->status;
    request->out.failed = false; /* the end is always said, even when memory was short before */
    http_reply_done(&request->reply, result, &request->out);
    request->is_finished = true;
    if (request->out.failed) request->is_gone = true;
    http_wake_locked(request, HTTP_WAIT_BYTES);
  } else if (!result->status) {
    http_reply_done(&request->reply, result, &whole);
  }
  pthread_mutex_unlock(&request->mutex);
  if (is_stream) net_pace_wait(&request->server->pace);
  if (!is_stream && result->status) http_respond_error(request, result->status, result->text, NULL);
  else if (!is_stream) http_respond(request, MHD_HTTP_OK, "application/json", &whole);
  http_request_unref(request); /* the sink's */
}

static const struct api_sink sink = {.delta = sink_delta, .flush = sink_flush, .is_full = sink_is_full, .done = sink_done};

/* ---- start ---- */

/* Keep the call on the request and make its reply ready. False: the client is gone, or no memory (*status). */
static bool attach_call(struct http_request *request, struct api_call *call, enum sits_status *status)
{
  const struct api_model *model = api_model(request->server->api);
  const struct api_request *wanted = api_call_request(call);
  pthread_mutex_lock(&request->mutex);
  request->call = call; /* the request owns the reference from here on */
  request->is_stream = wanted->stream;
  *status = http_reply_init(&request->reply, wanted, model->tokenizer, wanted->model ? wanted->model : model->names[0], request->id,
                            clock_unix_s(), api_call_n_choices(call));
  request->has_reply = true;
  request->reply.call = call;
  if (request->is_half_closed && request->is_stream) http_watch_probe_locked(request);
  else if (request->is_half_closed) http_leave_locked(request); /* as http_watch.c would have seen it later */
  bool is_gone = request->is_gone;
  pthread_mutex_unlock(&request->mutex);
  return !*status && !is_gone;
}

static enum sits_status start_call(struct http_request *request, struct sits_error *err)
{
  struct http_server *server = request->server;
  struct api_request *parsed = NULL;
  struct api_call *call = NULL;
  enum sits_status status = http_request_parse(request, &parsed, err);
  if (status) return status;
  status = api_call_create(server->api, parsed, &sink, request, &call, err);
  if (status) {
    api_request_destroy(parsed);
    return status;
  }
  if (!attach_call(request, call, &status)) return status ? sits_fail(err, status, "no memory for the answer") : SITS_CANCELLED;
  http_request_ref(request); /* the sink's, dropped in sink_done */
  status = api_call_submit(call, request->id, err);
  if (status) http_request_unref(request);
  return status;
}

void http_answer_generate(struct http_request *request)
{
  struct sits_error err = {0};
  enum sits_status status = start_call(request, &err);
  if (status) {
    http_respond_failure(request, status, &err);
    return;
  }
  pthread_mutex_lock(&request->mutex);
  bool left = request->is_gone;
  if (request->is_stream && !request->is_completed) {
    request->response = make_stream_response(request);
    request->status = MHD_HTTP_OK;
    if (!request->response) request->is_gone = left = true;
    http_wake_locked(request, HTTP_WAIT_RESPONSE);
  }
  pthread_mutex_unlock(&request->mutex);
  if (left) api_call_cancel(request->call, SITS_CANCELLED); /* it left between the first look and the submission */
}

void http_leave_locked(struct http_request *request)
{
  bool is_call = request->is_begun && (http_routes[request->route].kind & API_GENERATE);
  bool is_ended = request->is_gone || request->is_completed || (request->is_stream ? request->is_finished : request->response != NULL);
  request->is_gone = true;
  if (is_call && !is_ended) metrics_add(request->server->metrics, METRICS_DISCONNECTS, 1);
}

void http_request_abandon(struct http_request *request)
{
  pthread_mutex_lock(&request->mutex);
  http_leave_locked(request);
  struct api_call *call = request->call;
  http_wake_locked(request, HTTP_WAIT_BYTES);
  pthread_mutex_unlock(&request->mutex);
  if (call) api_call_cancel(call, SITS_CANCELLED);
}
