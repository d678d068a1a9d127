/* The daemon's parts and the order in which they start and stop. main.c waits for signals around it.
 *
 * service_open: front ends listen and say "loading". service_load: model, tokenizer, template, engine; then "ready". service_drain:
 * readiness turns red and no new connection is taken. service_close: what still runs is ended with an error the client can read.
 * One owner thread, except that service_load may run on a thread of its own that is joined before service_close. */
#ifndef SITS_DAEMON_SERVICE_H
#define SITS_DAEMON_SERVICE_H

#include "config/options.h"
#include "engine/instance.h"
#include "front/audit/audit.h"
#include "front/grpc/rpc_server.h"
#include "front/trace/trace.h"
#include "front/http/http_server.h"

struct service {
  const struct options *options;       /* borrowed */
  struct health health;
  struct metrics *metrics;
  struct access *access;
  struct net_tls *http_tls, *grpc_tls; /* NULL without TLS */
  struct api *api;
  struct audit *audit;                 /* NULL: none is kept */
  struct trace *trace;                 /* NULL: no collector */
  struct http_server *http;
  struct rpc_server *rpc;              /* NULL: gRPC is off */
  struct http_engine http_engine;      /* what the HTTP server asks of the engine */
  struct instance *instance;
  struct tokenizer *tokenizer;
  struct chat_template *chat_template;
  bool has_wedge;                      /* the test hook is there: SITS_TEST_WEDGE is set */
  atomic_bool is_wedged;               /* [atomic] and on */
  char *model_name;                    /* served-model-name's list, split in place */
  struct api_model served;             /* its names are known from the start, the rest once the model is loaded */
};

enum sits_status service_open(struct service *service, const struct options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status service_load(struct service *service, struct sits_error *err) SITS_MUST_CHECK;
/* On SIGHUP: read API keys and certificates again. What cannot be read stays as it was, and the log says why. */
void service_reload(struct service *service);
/* Test hook, without effect unless the environment has SITS_TEST_WEDGE: the engine's thread stands still until the drain. */
void service_wedge(struct service *service);
void service_drain(struct service *service);
/* Whether every request has ended and its answer has left; waits at most twice timeout_us. */
bool service_wait_idle(struct service *service, int64_t timeout_us);
/* The process ends at once and others may still run: only what must be whole on the disk is finished, and nothing is freed. */
void service_leave(struct service *service);
/* Half-open is fine. False: something would not end, nothing that it uses was freed, and the process must be ended at once. */
bool service_close(struct service *service) SITS_MUST_CHECK;

#endif
