/* Shared by the files of front/http: the server, one request, and the steps between them. */
#ifndef SITS_FRONT_HTTP_HTTP_INTERNAL_H
#define SITS_FRONT_HTTP_HTTP_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/buf.h"
#include "front/api/api_record.h"
#include "front/http/http_reply.h"
#include "front/http/http_server.h"
#include "front/net/net_pace.h"
#include "front/net/net_work.h"

#define HTTP_STREAM_HIGH_BYTES (256 << 10) /* a stream's unsent bytes beyond which its events stay in the engine */
#define HTTP_STREAM_LOW_BYTES (64 << 10)   /* and below which they flow again */
#define HTTP_WATCH_BUCKETS 1024
#define HTTP_MAX_ORIGIN 256

struct http_request;

struct http_route {
  const char *path;              /* exact, or a prefix when it ends in '/' */
  bool is_post;                  /* POST, else GET and HEAD */
  unsigned roles;                /* of enum access_role, a key needs one of them; 0: no key is asked */
  enum api_kind kind;            /* of POST routes */
  void (*answer)(struct http_request *request); /* GET: on the pool's thread; POST: on a worker. Ends in http_respond* or waits for one */
};
extern const struct http_route http_routes[];
extern const int http_n_routes;

/* Why a suspended connection sleeps. */
enum http_wait { HTTP_WAIT_NONE, HTTP_WAIT_RESPONSE, HTTP_WAIT_BYTES };

struct http_request {
  struct http_server *server;         /* [init] */
  atomic_int n_refs;                  /* [atomic] MHD, worker, sink, look-ups */
  uint64_t number;                    /* [init] unique, what the watcher's epoll carries */
  struct MHD_Connection *connection;  /* [mutex] usable until is_completed */
  int fd;                             /* [mutex] likewise */
  int route;                          /* [init] index, -1 unknown */
  const char *tail;                   /* [pool] what follows a prefix route's path; valid within the handler */
  char id[68];                        /* [init] X-Request-Id */
  char qos[16];                       /* [init] X-QoS-Level, "" when absent */
  struct access_grant *grant;         /* [pool] before it begins, then constant: what its key allows; one reference */
  char verb[8];                       /* [init] HTTP method, cut */
  char peer[API_PEER_BYTES];          /* [init] address and port */
  struct api_trace_parent parent;     /* [init] */
  int64_t started_us, started_unix_us;/* [init] */
  int64_t received_us;                /* [pool] all of it is here, 0: not yet */
  struct net_job job;                 /* [pool] holds a reference while it is in the workers' queue */
  char origin[HTTP_MAX_ORIGIN];       /* [init] Origin, when it is an allowed one; else "" */
  struct buf body;                    /* [pool] while it arrives, then [worker] */
  bool is_too_large;                  /* [pool] */
  bool is_crowded;                    /* [pool] there was no memory for its body */
  size_t n_dropped_bytes;             /* [pool] of a body that is not kept */
  bool is_watched;                    /* [pool] */
  bool is_read;                       /* [pool] the handler was called once with all of it */
  bool has_hung_up;                   /* [mutex] the client will send nothing more, and the request was not complete then */
  bool is_half_closed;                /* [mutex] the same, and it was: the client has left, or reads on */

  pthread_mutex_t mutex;
  enum http_wait wait;                /* [mutex] */
  bool is_begun;                      /* [mutex] the whole request is here and was handed on; written by the pool only */
  bool is_completed;                  /* [mutex] MHD is done with it */
  bool is_gone;                       /* [mutex] the client left, or is to be cut */
  struct MHD_Response *response;      /* [mutex] set once by http_respond; taken by the handler */
  int status;                         /* [mutex] its HTTP status */
  enum sits_status outcome;           /* [mutex] how it ended; of streams too, whose status is 200 */
  bool was_cut;                       /* [pool] the answer did not reach the client */
  int64_t ended_us;                   /* [pool] */
  struct api_call *call;              /* [mutex] one reference; NULL until created */
  struct http_reply reply;            /* [mutex] */
  bool has_reply;                     /* [mutex] */
  bool is_stream;                     /* [mutex] */
  struct buf out;                     /* [mutex] stream bytes; those before out_at are sent */
  size_t out_at;                      /* [mutex] */
  bool is_finished;                   /* [mutex] nothing will be appended to out */
  bool is_stalled;                    /* [mutex] the api was told that out is full */
  bool is_given;                      /* [mutex] woken for bytes, and the pool has not looked yet: counted in server.pace */
  int64_t oldest_us;                  /* [mutex] when the engine handed over the oldest unsent token, 0 none */
  int64_t last_write_us;              /* [mutex] of bytes taken by the writer */
  struct api_usage usage;           /* [mutex] for the log line */

  struct http_request *next, *previous; /* [mutex server.mutex] all requests */
  struct http_request *hash_next;       /* [mutex server.mutex] watched ones, by number */
};

struct http_server {
  struct http_options options;        /* [init] */
  struct api *api;                    /* [init] */
  struct health *health;              /* [init] */
  struct metrics *metrics;            /* [init] */
  _Atomic(const struct http_engine *) engine; /* [atomic] */
  struct MHD_Daemon *daemon;          /* [init] */
  int port;                           /* [init] */
  int listen_fd;                      /* [owner] after quiesce */
  atomic_bool is_draining;            /* [atomic] */
  _Atomic uint64_t next_number;       /* [atomic] */
  _Atomic int64_t body_bytes;         /* [atomic] of bodies that are kept now */

  pthread_mutex_t mutex;
  pthread_cond_t idle;                /* n_requests or n_objects fell to 0 */
  struct http_request *requests;      /* [mutex] */
  int64_t n_requests;                 /* [mutex] being served */
  int64_t n_objects;                  /* [mutex] that still exist: a sink may hold one for a moment after its connection is gone */
  struct http_request *watched[HTTP_WATCH_BUCKETS]; /* [mutex] */

  struct net_work work;
  struct net_pace pace;               /* streams that were woken for bytes, from the delivery thread to the pool */

  int epoll_fd, stop_fd;              /* [init] */
  pthread_t watcher;
  bool has_watcher;
};

/* http_request.c */
struct http_request *http_request_create(struct http_server *server, struct MHD_Connection *connection, const char *verb);
void http_request_ref(struct http_request *request);
void http_request_unref(struct http_request *request);
/* Wake the connection if it sleeps for this reason; the request's mutex is held, until it is done: once a request has ended, so may its
 * daemon. */
void http_wake_locked(struct http_request *request, enum http_wait wait);
/* The pool looks at a stream that was woken for bytes, or never will; the request's mutex is held. */
void http_looked_locked(struct http_request *request);
/* Parse the body and free it; the grant and the class are set. Before anything that needs the model. */
enum sits_status http_request_parse(struct http_request *request, struct api_request **out, struct sits_error *err) SITS_MUST_CHECK;
/* Free the body and give its bytes back to the server's budget. */
void http_request_drop_body(struct http_request *request);
/* Answer. The body's bytes are taken over. Any thread, once; later ones are dropped. */
void http_respond(struct http_request *request, int status, const char *content_type, struct buf *body);
void http_respond_error(struct http_request *request, enum sits_status status, const char *text, const char *param);
void http_respond_failure(struct http_request *request, enum sits_status status, const struct sits_error *err);
/* Add what every response carries. */
void http_add_headers(struct http_request *request, struct MHD_Response *response);

/* http_routes.c */
int http_route_find(const char *url, const char **tail);   /* -1: none */
/* The roles of which a key needs one here; 0: no key is asked. */
unsigned http_route_roles(const struct http_server *server, const struct http_route *route);

/* http_generate.c, http_tokenize.c, http_openapi.c */
void http_answer_openapi(struct http_request *request);
void http_answer_generate(struct http_request *request);
void http_answer_tokenize(struct http_request *request);
void http_answer_detokenize(struct http_request *request);
/* The client left: note it, and count it if its call had anything left to say. Whoever sees it first counts it. */
void http_leave_locked(struct http_request *request);
/* The same, and end the call. */
void http_request_abandon(struct http_request *request);

/* http_tls.c: options for libmicrohttpd; returns how many. */
struct net_tls;
int http_tls_options(struct net_tls *tls, struct MHD_OptionItem *out);

/* http_cors.c */
/* Whether the request is a preflight that is answered here; then its answer is stored. */
bool http_cors_preflight(struct http_request *request, const char *method);
/* Add what browsers ask for when the origin is allowed. */
void http_cors_add_headers(struct http_request *request, struct MHD_Response *response);

/* http_watch.c */
enum sits_status http_watch_start(struct http_server *server, struct sits_error *err) SITS_MUST_CHECK;
/* Look for the client's leaving from now on; again once the request is complete, for before that a hang-up means something else. */
void http_watch_add(struct http_request *request);
/* A comment on the stream, which must have a reply; the request's mutex is held. If the client has left, its system resets the connection
 * then. */
void http_watch_probe_locked(struct http_request *request);
void http_watch_remove(struct http_request *request);
/* An answer was sent: let libmicrohttpd see the end of the connection, if that came with the request. On the pool's thread. */
void http_watch_show_end(int fd);
void http_watch_stop(struct http_server *server);

#endif
