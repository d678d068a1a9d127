/* What is known of one client request when all of it is over: for the audit log, traces and counters by tenant and class.
 *
 * Transports fill one record for each request whose bytes reached them, after the last use of the request (the answer is sent or the client
 * left, and the engine is done with it), and give it to api_observe. The daemon sets one observer, which passes it on; transports know none
 * of those who look at it. Everything a record points to is borrowed for the call. Observers must not block: records come on event loops'
 * threads and on the delivery thread. */
#ifndef SITS_FRONT_API_RECORD_H
#define SITS_FRONT_API_RECORD_H

#include <sys/socket.h>

#include "front/api/api_call.h"

enum { API_TRACE_STATE_BYTES = 513, API_PEER_BYTES = 64 };

/* W3C Trace Context, as a client gave it (https://www.w3.org/TR/trace-context/). */
struct api_trace_parent {
  bool is_set;                     /* the client gave a valid traceparent */
  bool is_sampled;                 /* its sampled flag */
  unsigned char trace_id[16], span_id[8];
  char state[API_TRACE_STATE_BYTES]; /* tracestate, "" when there is none or it is longer than 512 bytes */
};

/* traceparent and tracestate as the client sent them, NULL when absent. A malformed traceparent counts as none, its tracestate too. */
void api_trace_parent_parse(const char *traceparent, const char *tracestate, struct api_trace_parent *out);

/* "127.0.0.1:4711", "[::1]:4711"; "" for other families and NULL. */
void api_peer_name(const struct sockaddr *address, char out[API_PEER_BYTES]);

struct api_record {
  const char *transport;           /* "http", "grpc" */
  const char *id;                  /* request id */
  const char *route;               /* HTTP path of the route table or gRPC method; "?" when unknown */
  const char *verb;                /* HTTP method; NULL for gRPC */
  const char *tenant, *key;        /* who: tenant and key id; "" when keys are not in use or the key was refused */
  const char *peer;                /* address, "" when unknown */
  bool is_public;                  /* a probe or a scrape that was answered: they come by the second and say nothing of anyone */
  enum api_kind kind;              /* 0: no call of the api */
  const struct api_request *request; /* NULL when it did not parse */
  const char *model;               /* name served; NULL likewise */
  const char *prompt;              /* JSON value, NULL unless prompts are kept */
  bool is_prompt_omitted;          /* it was larger than what is kept */
  int code;                        /* HTTP status or gRPC status; 0 over HTTP: nothing was sent */
  enum sits_status status;         /* how it ended */
  bool client_left;
  int64_t started_unix_us;
  int64_t started_us, received_us, ended_us; /* monotonic: first byte, whole request read (0: never), end of the answer */
  struct api_usage usage;
  const struct api_trace_parent *parent;
};

typedef void api_observer(void *context, const struct api_record *record);

/* Before traffic. */
void api_set_observer(struct api *api, api_observer *observer, void *context);
/* Keep each call's prompt as JSON of at most that many bytes for its record; 0 (the default): never. Before traffic. */
void api_set_prompt_bytes(struct api *api, size_t max_bytes);

/* Nothing without an observer. */
void api_observe(const struct api *api, const struct api_record *record);

/* A call's part of a record: request, model, prompt, usage. */
void api_record_call(struct api_record *record, const struct api_call *call);

#endif
