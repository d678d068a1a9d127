/* See ranks.h. Launchers known here: torchrun and what is like it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and
 * LeaderWorkerSet (LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS). Options come first. */
#include "daemon/ranks.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/runner.h"

enum { DEFAULT_PORT = 29400 };

/* The number in one of two variables; `missing` where there is none. */
static int64_t number_of(const char *first, const char *second, int64_t missing)
{
  const char *names[] = {first, second};
  for (int i = 0; i < 2; i++) {
    const char *text = names[i] != NULL ? getenv(names[i]) : NULL;
    char *end;
    if (text == NULL || text[0] == '\0') continue;
    const long n = strtol(text, &end, 10);
    return *end == '\0' && n >= 0 && n <= 65535 ? n : missing;
  }
  return missing;
}

static int64_t rank_of(const struct options *o) { return o->node_rank >= 0 ? o->node_rank : number_of("RANK", "LWS_WORKER_INDEX", -1); }

bool ranks_follows(const struct options *o) { return o->multi_node && rank_of(o) > 0; }

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
  const int64_t count = o->node_count > 0 ? o->node_count : number_of("WORLD_SIZE", "LWS_GROUP_SIZE", 0), rank = rank_of(o);
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
                                  .port = (int32_t)(o->leader_port > 0 ? o->leader_port : number_of("MASTER_PORT", NULL, DEFAULT_PORT)),
                                  .connect_timeout_us = (int64_t)(o->node_connect_timeout_s * 1e6)};
  out->n_ranks = (int32_t)count;
  out->nodes = nodes;
  out->device_ordinal = (int32_t)number_of("LOCAL_RANK", NULL, 0);
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

static void stay(int signal_number) { (void)signal_number; }

/* Whoever stops a job tells all its processes at once, and the leader's drain needs its followers: they end when it has closed or is lost.
 * A second signal ends this one. */
static void leave_stop_to_leader(void)
{
  const struct sigaction once = {.sa_handler = stay, .sa_flags = (int)SA_RESETHAND | SA_RESTART};
  sigaction(SIGTERM, &once, NULL);
  sigaction(SIGINT, &once, NULL);
}

int ranks_follow(const struct options *o)
{
  struct nodes_options nodes;
  struct instance_options read = {0};
  struct sits_error err = {0};
  enum sits_status status = ranks_read(o, &nodes, &read, &err);
  if (!status) {
    nodes.joined = leave_stop_to_leader;
    const struct runner_options runner = {.model_path = o->model, .device = o->device,
                                          .backend = {.n_threads = (int32_t)o->threads, .isa = o->isa, .nodes = &nodes,
                                                      .prefill_weights = o->prefill_weights, .device = read.device_ordinal}};
    status = runner_follow(&runner, &err);
  }
  if (status) log_error("daemon", "cannot follow: %s", err.text);
  else log_info("daemon", "the leader has stopped");
  return status ? 1 : 0;
}
