/* See serve_client.h. */
#include "tools/bench/serve_client.h"

#include <curl/curl.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"

enum { MOST_LINE = 1 << 20 };

struct stream {
  CURL *easy;
  struct client *client;
  struct buf body, line;           /* request; unfinished response line */
  int64_t sent_us, last_us;        /* last_us: latest chunk, 0 before the first */
  int64_t n_output;                /* from the usage chunk, else chunks seen */
  int64_t n_chunks;
  int32_t n_prompt;
  bool is_done;                    /* [DONE] seen */
  bool is_busy;
};

struct client {
  const struct serve_plan *plan;
  struct serve_result *result;
  CURLM *multi;
  struct curl_slist *headers;
  struct stream *streams;
  int64_t n_streams, n_busy, start_us;
  char url[512];
};

static bool record_gap(struct serve_result *result, double ms)
{
  if (result->n_itl == result->itl_capacity) {
    int64_t capacity = result->itl_capacity ? result->itl_capacity * 2 : 65536;
    double *grown = mem_realloc(result->itl_ms, (size_t)capacity * sizeof *grown);
    if (!grown) return false;
    result->itl_ms = grown;
    result->itl_capacity = capacity;
  }
  result->itl_ms[result->n_itl++] = ms;
  return true;
}

/* The integer after a key in a JSON line that this program's own requests bring back; -1 when absent. */
static int64_t integer_after(const char *line, const char *key)
{
  const char *at = strstr(line, key);
  long long value = -1;
  if (!at || sscanf(at + strlen(key), " : %lld", &value) != 1) return -1;
  return value;
}

static void take_line(struct stream *stream, const char *line)
{
  struct serve_result *result = stream->client->result;
  if (strncmp(line, "data: ", 6) != 0) return;
  if (strncmp(line + 6, "[DONE]", 6) == 0) {
    stream->is_done = true;
    return;
  }
  int64_t n_output = integer_after(line, "\"completion_tokens\"");
  if (n_output >= 0) {
    stream->n_output = n_output;
    return;
  }
  if (!strstr(line, "\"text\"")) {
    if (strstr(line, "\"error\"") && !result->first_error[0]) snprintf(result->first_error, sizeof result->first_error, "%.250s", line);
    return;
  }
  int64_t now_us = clock_monotonic_us();
  if (!stream->last_us) result->ttft_ms[result->n_ttft++] = (double)(now_us - stream->sent_us) / 1e3;
  else record_gap(result, (double)(now_us - stream->last_us) / 1e3);
  stream->last_us = now_us;
  stream->n_chunks++;
}

static size_t on_bytes(char *bytes, size_t size, size_t count, void *user)
{
  struct stream *stream = user;
  size_t n = size * count, at = 0;
  while (at < n) {
    const char *end = memchr(bytes + at, '\n', n - at);
    size_t length = end ? (size_t)(end - (bytes + at)) : n - at;
    if (!buf_append(&stream->line, bytes + at, length)) return 0;
    if (!end) break;
    take_line(stream, stream->line.data);
    buf_clear(&stream->line);
    at += length + 1;
  }
  return n;
}

static bool write_body(struct stream *stream, const struct serve_request *request, uint64_t number)
{
  const struct serve_plan *plan = stream->client->plan;
  struct buf *body = &stream->body;
  buf_clear(body);
  buf_append_text(body, "{\"prompt\":[");
  for (int32_t i = 0; i < request->n_prompt; i++)
    buf_printf(body, i ? ",%u" : "%u", (unsigned)(hash_mix(plan->seed + number * 1000003u, (uint64_t)i) % (uint64_t)plan->n_vocab));
  buf_printf(body, "],\"max_tokens\":%d,\"ignore_eos\":true,\"stream\":true,\"temperature\":0,"
                   "\"stream_options\":{\"include_usage\":true}", request->n_output);
  if (plan->model) {
    buf_append_text(body, ",\"model\":\"");
    buf_append_json_escaped(body, plan->model, strlen(plan->model));
    buf_append_char(body, '"');
  }
  return buf_append_char(body, '}');
}

static bool start_stream(struct client *client, struct stream *stream, const struct serve_request *request, int64_t number)
{
  if (!stream->easy && !(stream->easy = curl_easy_init())) return false;
  stream->client = client;
  if (!write_body(stream, request, (uint64_t)number)) return false;
  buf_clear(&stream->line);
  stream->last_us = stream->n_output = stream->n_chunks = 0;
  stream->is_done = false;
  stream->is_busy = true;
  curl_easy_setopt(stream->easy, CURLOPT_URL, client->url);
  curl_easy_setopt(stream->easy, CURLOPT_HTTPHEADER, client->headers);
  curl_easy_setopt(stream->easy, CURLOPT_POSTFIELDS, stream->body.data);
  curl_easy_setopt(stream->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)stream->body.size);
  curl_easy_setopt(stream->easy, CURLOPT_WRITEFUNCTION, on_bytes);
  curl_easy_setopt(stream->easy, CURLOPT_WRITEDATA, stream);
  curl_easy_setopt(stream->easy, CURLOPT_PRIVATE, stream);
  curl_easy_setopt(stream->easy, CURLOPT_NOSIGNAL, 1L);
  stream->sent_us = clock_monotonic_us();
  client->result->n_sent++;
  stream->n_prompt = request->n_prompt;
  client->n_busy++;
  return curl_multi_add_handle(client->multi, stream->easy) == CURLM_OK;
}

static void finish_stream(struct client *client, CURLMsg *message)
{
  struct stream *stream;
  struct serve_result *result = client->result;
  long code = 0;
  CURLcode outcome = message->data.result;
  curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &stream);
  curl_easy_getinfo(stream->easy, CURLINFO_RESPONSE_CODE, &code);
  curl_multi_remove_handle(client->multi, stream->easy);
  stream->is_busy = false;
  client->n_busy--;
  if (code == 429 || code == 503) {
    struct curl_header *retry;
    result->n_refused++;
    result->n_without_retry += curl_easy_header(stream->easy, "Retry-After", 0, CURLH_HEADER, -1, &retry) != CURLHE_OK;
  } else if (outcome != CURLE_OK || code != 200 || !stream->is_done) {
    result->n_failed++;
    if (!result->first_error[0])
      snprintf(result->first_error, sizeof result->first_error, "status %ld, %s%s", code, curl_easy_strerror(outcome),
               code == 200 && !stream->is_done ? ", no [DONE]" : "");
  } else {
    result->n_done++;
    result->n_prompt_tokens += stream->n_prompt;
    result->n_output_tokens += stream->n_output ? stream->n_output : stream->n_chunks;
    result->e2e_ms[result->n_e2e++] = (double)(clock_monotonic_us() - stream->sent_us) / 1e3;
  }
}

static struct stream *idle_stream(struct client *client)
{
  for (int64_t i = 0; i < client->n_streams; i++)
    if (!client->streams[i].is_busy) return &client->streams[i];
  return NULL;
}

/* Send what is due; returns the next request's number, or -1 on failure. */
static int64_t send_due(struct client *client, int64_t next)
{
  const struct serve_plan *plan = client->plan;
  while (next < plan->n_requests) {
    int64_t elapsed_us = clock_monotonic_us() - client->start_us;
    bool is_due = plan->concurrency ? client->n_busy < plan->concurrency : plan->requests[next].at_us <= elapsed_us;
    if (plan->concurrency && plan->duration_us && elapsed_us >= plan->duration_us) return plan->n_requests;
    struct stream *stream = is_due ? idle_stream(client) : NULL;
    if (!stream) break;
    if (!start_stream(client, stream, &plan->requests[next], next)) return -1;
    next++;
  }
  return next;
}

static bool run_loop(struct client *client)
{
  const struct serve_plan *plan = client->plan;
  int64_t next = 0;
  client->start_us = clock_monotonic_us();
  while (next < plan->n_requests || client->n_busy > 0) {
    next = send_due(client, next);
    if (next < 0) return false;
    int running, left;
    if (curl_multi_perform(client->multi, &running) != CURLM_OK) return false;
    for (CURLMsg *message; (message = curl_multi_info_read(client->multi, &left));)
      if (message->msg == CURLMSG_DONE) finish_stream(client, message);
    int64_t wait_us = 100000;
    if (!plan->concurrency && next < plan->n_requests) {
      int64_t until_us = plan->requests[next].at_us - (clock_monotonic_us() - client->start_us);
      wait_us = until_us < wait_us ? until_us : wait_us;
    }
    bool has_due = plan->concurrency && client->n_busy < plan->concurrency && next < plan->n_requests;
    if (wait_us > 0 && !has_due) curl_multi_poll(client->multi, NULL, 0, (int)((wait_us + 999) / 1000), NULL);
  }
  client->result->elapsed_us = clock_monotonic_us() - client->start_us;
  return true;
}

static struct curl_slist *make_headers(const struct serve_plan *plan)
{
  char line[600];
  struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
  headers = curl_slist_append(headers, "Expect:");
  if (plan->api_key) {
    snprintf(line, sizeof line, "Authorization: Bearer %.500s", plan->api_key);
    headers = curl_slist_append(headers, line);
  }
  if (plan->qos) {
    snprintf(line, sizeof line, "X-QoS-Level: %.32s", plan->qos);
    headers = curl_slist_append(headers, line);
  }
  return headers;
}

bool serve_run(const struct serve_plan *plan, struct serve_result *result)
{
  *result = (struct serve_result){0};
  struct client client = {.plan = plan, .result = result, .n_streams = plan->concurrency ? plan->concurrency : plan->n_requests};
  bool ok = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
  snprintf(client.url, sizeof client.url, "%.480s/v1/completions", plan->url);
  client.multi = curl_multi_init();
  client.headers = make_headers(plan);
  client.streams = mem_calloc((size_t)client.n_streams, sizeof *client.streams);
  result->ttft_ms = mem_calloc((size_t)plan->n_requests, sizeof(double));
  result->e2e_ms = mem_calloc((size_t)plan->n_requests, sizeof(double));
  ok = ok && client.multi && client.headers && client.streams && result->ttft_ms && result->e2e_ms;
  for (int64_t i = 0; ok && i < client.n_streams; i++) {
    buf_init(&client.streams[i].body, 64u << 20);
    buf_init(&client.streams[i].line, MOST_LINE);
  }
  if (ok) {
    curl_multi_setopt(client.multi, CURLMOPT_MAXCONNECTS, (long)client.n_streams + 16);
    ok = run_loop(&client);
  }
  for (int64_t i = 0; client.streams && i < client.n_streams; i++) {
    if (client.streams[i].easy) curl_multi_remove_handle(client.multi, client.streams[i].easy);
    if (client.streams[i].easy) curl_easy_cleanup(client.streams[i].easy);
    buf_fini(&client.streams[i].body);
    buf_fini(&client.streams[i].line);
  }
  mem_free(client.streams);
  curl_slist_free_all(client.headers);
  if (client.multi) curl_multi_cleanup(client.multi);
  curl_global_cleanup();
  return ok;
}

void serve_result_fini(struct serve_result *result)
{
  mem_free(result->ttft_ms);
  mem_free(result->itl_ms);
  mem_free(result->e2e_ms);
}
