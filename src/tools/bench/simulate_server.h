/* One modelled device with its planner: the engine's loop, with the forward pass replaced by a formula. plan -> time passes -> tokens are
 * counted. The planner does not know the formula; it learns from the step times, as on a real device. simulate_run.c drives one of them,
 * simulate_pair.c two. */
#ifndef SITS_TOOLS_BENCH_SIMULATE_SERVER_H
#define SITS_TOOLS_BENCH_SIMULATE_SERVER_H

#include "tools/bench/simulate.h"

#define SIMULATE_PAGE 64 /* tokens */

struct simulate_sequence {
  int64_t arrival;             /* index, -1: the id is free */
  int32_t n_known, n_computed, n_pages, n_left;
  int32_t n_ready;             /* tokens whose pages came from elsewhere */
  double last_token_us;
};

struct simulate_server {
  const struct simulate_cost *cost;
  const struct simulate_arrival *arrivals;
  const struct simulate_setting *setting;
  struct simulate_result *result; /* two servers may share one */
  struct alps *alps;
  struct simulate_sequence *sequences; /* by id = arrival index modulo n_ids */
  int32_t n_ids, n_pages_free, n_alive;
  int64_t n_late;
  double now_us, busy_us;
  struct alps_plan plan;       /* of the step that is running */
  double piece_us;             /* of the chunk in slices: the time of a piece, of which n_pieces are left */
  int32_t n_pieces;
  bool is_reader;              /* its sequences end with their prompts, and nobody sees their tokens */
  void (*ended)(void *user, int64_t arrival); /* NULL, or told of each end */
  void *user;
};

/* False without memory. */
bool simulate_server_init(struct simulate_server *server, const struct simulate_cost *cost, const struct simulate_arrival *arrivals,
                          int64_t n, const struct simulate_setting *setting, struct simulate_result *result);
void simulate_server_fini(struct simulate_server *server);
/* A request that arrived at index `arrival` of the trace joins: n_known tokens to read, n_ready of them there already, n_left to draw. */
void simulate_server_enqueue(struct simulate_server *server, int64_t arrival, int32_t n_known, int32_t n_ready, int32_t n_left);
/* Plan a step from now on. Its time in us, 0: nothing to do. */
double simulate_server_begin(struct simulate_server *server);
/* It has run. */
void simulate_server_end(struct simulate_server *server, double step_us);
double simulate_arrival_us(const struct simulate_server *server, int64_t arrival);

#endif
