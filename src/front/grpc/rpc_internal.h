/* Shared by the files of front/grpc: the server, one call, and the steps between them.
 *
 * Lock order: server.mutex, rpc.mutex, then the library's and the api's. A call's batches are started on its queue's thread only (other
 * threads post an empty batch, whose tag wakes that thread), so no engine or delivery thread ever writes a socket. */
#ifndef SITS_FRONT_GRPC_RPC_INTERNAL_H
#define SITS_FRONT_GRPC_RPC_INTERNAL_H

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <protobuf-c/protobuf-c.h>
#include <pthread.h>
#include <stdatomic.h>

#include "front/api/api_record.h"
#include "front/grpc/rpc_reply.h"
#include "front/grpc/rpc_server.h"
#include "front/net/net_work.h"

#define RPC_QUEUES 2                        /* completion queues, one thread each */
#define RPC_WORKERS 2
#define RPC_STREAM_HIGH_MESSAGES 256        /* unsent messages of a stream beyond which its events stay in the engine */
#define RPC_STREAM_LOW_MESSAGES 64          /* and below which they flow again */
#define RPC_STREAM_HIGH_BYTES (256 << 10)
#define RPC_STREAMS_PER_CONNECTION 1024

struct rpc;

/* What a completion queue's event carries. ok is false when the batch could not be done (the client left, the server stops). */
struct rpc_tag { void (*run)(struct rpc *rpc, bool ok); struct rpc *rpc; };

/* For ThreadSanitizer, which cannot see how the library orders a batch's start and its tag's return, for the library was not compiled for
 * it (tests/tools/completion_queue.c shows it without our code): what was written before the start is seen by who takes the tag. */
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define RPC_TAG_OUT(tag) __tsan_release(tag)
#define RPC_TAG_BACK(tag) __tsan_acquire(tag)
#else
#define RPC_TAG_OUT(tag) ((void)(tag))
#define RPC_TAG_BACK(tag) ((void)(tag))
#endif

struct rpc_method {
  const char *path;                          /* "/package.Service/Method" */
  const ProtobufCMessageDescriptor *request; /* what is read first; NULL: the handler reads messages itself (bidirectional streams) */
  unsigned roles;                            /* of enum access_role, a key needs one of them; 0: no key is asked */
  bool is_slow;                              /* answered on a worker */
  bool is_endless;                           /* may stay open without work: a drain does not wait for it */
  bool is_stream;                            /* the server streams */
  enum api_kind kind;
  /* message is freed by the caller. On failure err is filled and the call is ended with it. */
  enum sits_status (*answer)(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err);
};
extern const struct rpc_method rpc_methods[];
extern const int rpc_n_methods;
#define RPC_MAX_METHODS 24

struct rpc_message { struct rpc_message *next; grpc_slice bytes; size_t n_bytes; int64_t emitted_us; };

struct rpc {
  struct rpc_server *server;           /* [init] */
  const struct rpc_method *method;     /* [init] NULL: a method that is not known */
  int queue;                           /* [init] its completion queue */
  atomic_int n_refs;                   /* [atomic] one per tag that is out, one per worker's job, the sink's */
  grpc_call *call;                     /* [init] once it has begun */
  grpc_call_details details;           /* [queue] of unknown methods */
  grpc_metadata_array metadata;        /* [queue] the client's; its slices live as long as the call */
  grpc_byte_buffer *payload;           /* [queue] then [worker]; written by the library before the read tag */
  int64_t n_payload_bytes;             /* [queue] then [worker] counted in the server's budget */
  gpr_timespec deadline;               /* [queue] the library enforces it */
  int is_cancelled;                    /* [queue] written by the library before the close tag */
  char id[68];                         /* [init] x-request-id */
  char qos[16];                        /* [init] x-qos-level */
  struct access_grant *grant;          /* [init] once it has begun: what its key allows; one reference */
  bool owes_arm;                       /* [queue] no successor could be allocated: this one is armed again instead of freed */
  bool is_listed;                      /* [server.mutex] */
  struct rpc_tag new_tag, close_tag, write_tag, kick_tag, read_tag; /* [init] */
  char peer[API_PEER_BYTES];           /* [init] as the library names it */
  int fd;                              /* [init] its connection's, where we accepted it; else -1 */
  struct api_trace_parent parent;      /* [init] */
  int64_t started_us, started_unix_us; /* [init] */
  int64_t received_us;                 /* [queue] its message is here, 0: not yet */
  int64_t ended_us;                    /* [queue] */

  pthread_mutex_t mutex;
  bool is_closed;                      /* [mutex] the close tag came: nothing more is sent */
  bool is_taken_back;                  /* [mutex] counted as such */
  bool is_broken;                      /* [mutex] a write failed */
  bool is_writing, is_kicked;          /* [mutex] */
  bool has_sent_head;                  /* [mutex] initial metadata */
  bool wants_status, has_sent_status;  /* [mutex] */
  enum sits_status status;             /* [mutex] how it ended, valid with wants_status */
  grpc_status_code code;               /* [mutex] likewise */
  char *text, *param;                  /* [mutex] of the error, owned, may be NULL */
  struct rpc_message *head, *tail;     /* [mutex] unsent */
  int32_t n_messages;                  /* [mutex] */
  size_t n_bytes;                      /* [mutex] */
  grpc_byte_buffer *writing;           /* [mutex] in flight */
  bool is_stalled;                     /* [mutex] the api was told that the queue is full */
  struct api_call *api_call;           /* [mutex] one reference; NULL until created */
  struct rpc_reply reply;              /* [mutex] */
  bool has_reply;                      /* [mutex] */
  struct api_usage usage;           /* [mutex] for the log line */
  grpc_byte_buffer *received;          /* [queue] reflection */
  bool is_watching;                    /* [mutex] health */
  int shown_health;                    /* [mutex] the last status a watcher was told */

  struct rpc *next, *previous;         /* [server.mutex] all calls that have begun */
  struct net_job job;                  /* [queue] holds a reference while it is in the workers' queue */
};

struct rpc_queue { grpc_completion_queue *cq; pthread_t thread; bool has_thread; struct rpc_server *server; int index; };

struct rpc_server {
  struct rpc_options options;          /* [init] */
  struct api *api;                     /* [init] */
  struct health *health;               /* [init] */
  struct metrics *metrics;             /* [init] */
  grpc_server *core;                   /* [init] */
  struct rpc_queue queues[RPC_QUEUES]; /* [init] */
  void *handles[RPC_MAX_METHODS];      /* [init] the library's, per method */
  int port;                            /* [init] */
  _Atomic uint64_t tls_version;        /* [atomic] of the certificates that the library has */
  bool is_started, is_quiesced;        /* [owner] */
  struct rpc_tag shutdown_tag;         /* [init] */
  _Atomic uint64_t next_number;        /* [atomic] */
  _Atomic int64_t payload_bytes;       /* [atomic] of requests that wait for a worker */

  pthread_mutex_t mutex;
  pthread_cond_t change;               /* n_rpcs, n_endless or is_core_down changed */
  struct rpc *rpcs;                    /* [mutex] */
  int64_t n_rpcs, n_endless;           /* [mutex] */
  bool is_core_down;                   /* [mutex] */

  struct net_work work;

  int listen_fd, wake_fd;              /* [init] */
  atomic_bool is_accept_stopping;      /* [atomic] listen no more */
  atomic_bool is_stopping;             /* [atomic] the acceptor ends */
  atomic_int n_watchers;               /* [atomic] */
  pthread_mutex_t connection_mutex;    /* no other lock is taken under it */
  struct rpc_connection *connections;  /* [connection_mutex] [max_connections] */
  int n_connections;                   /* [connection_mutex] */
  pthread_t acceptor;
  bool has_acceptor;
};

/* rpc_call.c: one call's life */
void rpc_arm(struct rpc_server *server, int queue, int method); /* method -1: the catch-all */
void rpc_ref(struct rpc *rpc);
void rpc_unref(struct rpc *rpc);
/* Queue a message. The lock is held; nothing is sent before rpc_kick_locked. False: no memory. */
bool rpc_send_locked(struct rpc *rpc, const ProtobufCMessage *message, int64_t emitted_us);
/* End it once what is queued is sent; the first end stands. text and param may be NULL. */
void rpc_end_locked(struct rpc *rpc, enum sits_status status, const char *text, const char *param);
void rpc_kick_locked(struct rpc *rpc);
/* Send one message and end, or end with an error. */
enum sits_status rpc_reply_one(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err) SITS_MUST_CHECK;
void rpc_fail(struct rpc *rpc, enum sits_status status, const struct sits_error *err);

/* rpc_message.c: bytes <-> messages */
extern ProtobufCAllocator rpc_allocator;
/* Read and check a message; free with protobuf_c_message_free_unpacked(message, &rpc_allocator). */
enum sits_status rpc_unpack(grpc_byte_buffer *payload, const ProtobufCMessageDescriptor *type, ProtobufCMessage **out,
                            struct sits_error *err) SITS_MUST_CHECK;
/* Walk a message's bytes: wire format, UTF-8 without NUL in every string, a bound on unknown fields. */
enum sits_status rpc_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t n_bytes, struct sits_error *err)
    SITS_MUST_CHECK;
/* The request as the JSON object that HTTP would have brought, parsed and checked by the same parser. */
enum sits_status rpc_request_parse(const ProtobufCMessage *message, enum api_kind kind, bool is_stream, const struct api_limits *limits,
                                   struct api_request **out, struct sits_error *err) SITS_MUST_CHECK;

/* rpc_work.c: the same with the rpc's grant and class, before anything that needs the model. */
enum sits_status rpc_parse(struct rpc *rpc, const ProtobufCMessage *message, struct api_request **out, struct sits_error *err)
    SITS_MUST_CHECK;

/* rpc_generate.c, rpc_methods.c, rpc_health.c, rpc_reflection.c: answers */
enum sits_status rpc_answer_generate(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err);
enum sits_status rpc_answer_health_check(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err);
enum sits_status rpc_answer_health_watch(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err);
enum sits_status rpc_answer_reflection(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err);
/* Tell watchers whose status changed. */
void rpc_health_broadcast(struct rpc_server *server);

/* rpc_work.c */
bool rpc_work_push(struct rpc *rpc); /* false: the queue is full */
/* Read the payload and run the method's answer. */
void rpc_run(struct rpc *rpc);
/* Free the payload and give its bytes back to the server's budget. */
void rpc_drop_payload(struct rpc *rpc);

/* rpc_accept.c */
/* What the acceptor needs; and, without TLS, the listening socket. */
enum sits_status rpc_accept_prepare(struct rpc_server *server, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status rpc_accept_start(struct rpc_server *server, struct sits_error *err) SITS_MUST_CHECK;
void rpc_accept_wake(struct rpc_server *server);
void rpc_accept_stop(struct rpc_server *server);
/* A call came on the connection; it came with a right key, or none is asked; it was taken back before its message was whole, or soon
 * after; it is freed. fd: rpc.fd. Any thread. */
void rpc_accept_begun(struct rpc_server *server, int fd);
void rpc_accept_known(struct rpc_server *server, int fd);
void rpc_accept_taken_back(struct rpc_server *server, int fd);
void rpc_accept_freed(struct rpc_server *server, int fd);

#endif
