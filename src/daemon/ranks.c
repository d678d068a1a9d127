/* See ranks.h. Launchers known here: torchrun and what is like it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and
 * LeaderWorkerSet (LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS). Options come first. */
#include "daemon/ranks.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "daemon/notify.h"
#include "engine/runner.h"

enum { DEFAULT_PORT = 29400 };

/* The number in the first of two variables that is set; `missing` where none is. One that is no number of 0 to 65535 is refused. */
static enum sits_status read_number(const char *first, const char *second, int64_t missing, int64_t *out, struct sits_error *err)
{
  const char *names[] = {first, second};
  *out = missing;
  for (int i = 0; i < 2; i++) {
    const char *text = names[i] != NULL ? getenv(names[i]) : NULL;
    if (text == NULL || text[0] == '\0') continue;
    const size_t n_digits = strspn(text, "0123456789");
    if (text[n_digits] != '\0' || n_digits > 9 || strtol(text, NULL, 10) > 65535)
      return sits_fail_param(err, SITS_CONFIG, names[i], "the environment's %s: '%.32s' is not a number of 0 to 65535", names[i], text);
    *out = strtol(text, NULL, 10);
    return SITS_OK;
  }
  return SITS_OK;
}

static enum sits_status read_rank(const struct options *o, int64_t *out, struct sits_error *err)
{
  *out = o->node_rank;
  return o->node_rank >= 0 ? SITS_OK : read_number("RANK", "LWS_WORKER_INDEX", -1, out, err);
}

bool ranks_follows(const struct options *o)
{
  int64_t rank;
  return o->multi_node && read_rank(o, &rank, NULL) == SITS_OK && rank > 0;
}

/* Which process of how many, where the leader listens, which device is its: options before the environment. */
struct place { int64_t rank, count, port, device; };

static enum sits_status read_place(const struct options *o, struct place *out, struct sits_error *err)
{
  *out = (struct place){.count = o->node_count, .port = o->leader_port};
  enum sits_status status = read_rank(o, &out->rank, err);
  if (status == SITS_OK && out->count <= 0) status = read_number("WORLD_SIZE", "LWS_GROUP_SIZE", 0, &out->count, err);
  if (status == SITS_OK && out->port <= 0) status = read_number("MASTER_PORT", NULL, DEFAULT_PORT, &out->port, err);
  if (status == SITS_OK && out->port == 0)
    status = sits_fail_param(err, SITS_CONFIG, "MASTER_PORT", "the environment's MASTER_PORT: 0 is no port to be called on");
  if (status == SITS_OK && o->tensor_parallel_devices == NULL) status = read_number("LOCAL_RANK", NULL, 0, &out->device, err);
  return status;
}

/* "0,1" -> one ordinal for each of n. */
static enum sits_status read_devices(const struct options *o, int32_t n, int32_t *devices, struct sits_error *err)
{
  const char *at = o->tensor_parallel_devices;
  for (int32_t r = 0; r < n; r++) {
    char *end;
    const long ordinal = strtol(at, &end, 10);
    if (end == at || ordinal < 0 || ordinal > 255 || *end != (r + 1 < n ? ',' : '\0'))
      return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-devices", "tensor-parallel-devices: '%.64s' does not name %d devices",
                             o->tensor_parallel_devices, (int)n);
    devices[r] = (int32_t)ordinal;
    at = end + 1;
  }
  return SITS_OK;
}

static enum sits_status read_nodes(const struct options *o, struct nodes_options *nodes, struct instance_options *out,
                                   struct sits_error *err)
{
  struct place place;
  const enum sits_status status = read_place(o, &place, err);
  if (status != SITS_OK) return status;
  const int64_t rank = place.rank, count = place.count;
  const char *address = o->leader_address != NULL ? o->leader_address : getenv("MASTER_ADDR");
  if (address == NULL) address = getenv("LWS_LEADER_ADDRESS");
  if (rank < 0 || count < 2 || count > BACKEND_MAX_RANKS || rank >= count)
    return sits_fail_param(err, SITS_CONFIG, "multi-node",
                           "multi-node: process %lld of %lld; node-rank and node-count, or a launcher's RANK and WORLD_SIZE or "
                           "LWS_WORKER_INDEX and LWS_GROUP_SIZE, must say which of 2 to %d this is", (long long)rank, (long long)count,
                           BACKEND_MAX_RANKS);
  if (address == NULL)
    return sits_fail_param(err, SITS_CONFIG, "leader-address",
                           "multi-node needs leader-address, or a launcher's MASTER_ADDR or LWS_LEADER_ADDRESS");
  if (o->node_secret == NULL)
    return sits_fail_param(err, SITS_CONFIG, "node-secret", "multi-node needs node-secret, the same for all its processes");
  if (o->tensor_parallel_size != 1 && o->tensor_parallel_size != count)
    return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-size",
                           "multi-node: each process has one device, so tensor-parallel-size is the number of processes, %lld",
                           (long long)count);
  *nodes = (struct nodes_options){.rank = (int32_t)rank, .n_ranks = (int32_t)count, .address = address, .secret = o->node_secret,
                                  .port = (int32_t)place.port,
                                  .connect_timeout_us = (int64_t)(o->node_connect_timeout_s * 1e6)};
  out->n_ranks = (int32_t)count;
  out->nodes = nodes;
  out->device_ordinal = (int32_t)place.device;
  return o->tensor_parallel_devices != NULL ? read_devices(o, 1, &out->device_ordinal, err) : SITS_OK;
}

enum sits_status ranks_read(const struct options *o, struct nodes_options *nodes, struct instance_options *out, struct sits_error *err)
{
  out->n_ranks = (int32_t)o->tensor_parallel_size;
  out->collective_timeout_ms = (int32_t)(o->collective_timeout_s * 1000);
  out->compress_reduce = o->tensor_parallel_compress;
  if (o->multi_node) return read_nodes(o, nodes, out, err);
  if (o->tensor_parallel_devices == NULL) return SITS_OK;
  out->has_devices = true;
  return read_devices(o, out->n_ranks, out->devices, err);
}

static struct notify notify; /* of the one follower that a process can be */

static void stay(int signal_number) { (void)signal_number; }

/* Whoever stops a job tells all its processes at once, and the leader's drain needs its followers: they end when it has closed or is lost.
 * A second signal ends this one. */
static void leave_stop_to_leader(void)
{
  const struct sigaction once = {.sa_handler = stay, .sa_flags = (int)SA_RESETHAND | SA_RESTART};
  sigaction(SIGTERM, &once, NULL);
  sigaction(SIGINT, &once, NULL);
}

/* systemd's watchdog has no say from here on: the leader sees a follower that stands still, and its end is the leader's. */
static void joined(void)
{
  leave_stop_to_leader();
  notify_send(&notify, "READY=1\nSTATUS=following the leader\nWATCHDOG_USEC=0");
}

int ranks_follow(const struct options *o)
{
  struct nodes_options nodes;
  struct instance_options read = {0};
  struct sits_error err = {0};
  signal(SIGHUP, SIG_IGN); /* it has neither keys nor certificates to read again */
  notify_init(&notify);
  enum sits_status status = ranks_read(o, &nodes, &read, &err);
  if (!status) {
    nodes.joined = joined;
    const struct runner_options runner = {.model_path = o->model, .device = o->device,
                                          .backend = {.n_threads = (int32_t)o->threads, .isa = o->isa, .nodes = &nodes,
                                                      .prefill_weights = o->prefill_weights, .device = read.device_ordinal}};
    status = runner_follow(&runner, &err);
  }
  if (status) log_error("daemon", "cannot follow: %s", err.text);
  else log_info("daemon", "the leader has stopped");
  notify_fini(&notify);
  return status ? 1 : 0;
}
