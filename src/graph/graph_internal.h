/* Private to src/graph: the nodes behind graph.h. */
#ifndef SITS_GRAPH_GRAPH_INTERNAL_H
#define SITS_GRAPH_GRAPH_INTERNAL_H

#include <stdbool.h>

#include "graph/graph.h"

/* A node makes up to three values; in plain graphs one (node i makes value i), and after grouping a LINEAR makes one per part.
 * KV_APPEND makes a value of width 0 that stands for the cache. */
struct graph_node {
  enum program_op_kind kind;
  uint32_t fused;
  int32_t layer;
  graph_value in[3];                 /* values read; -1 = none */
  graph_value out[3];                /* values made; -1 = none */
  int32_t n_parts;
  struct program_part parts[PROGRAM_MAX_PARTS];
  const struct act_format *act;
  const struct sits_utd *gain, *q_gain, *k_gain;
  uint32_t barred;                   /* program_fusion bits that the weighing decided against */
  bool is_dead;                      /* absorbed by another node */
};

struct graph_value_info { char name[24]; int32_t width; bool is_rows; };

struct graph {
  struct program_dims dims;
  struct program_rope rope;
  struct graph_node *nodes;          /* [n_nodes] in execution order */
  struct graph_value_info *values;   /* [n_values] */
  int32_t n_nodes, nodes_capacity, n_values, values_capacity;
  int32_t layer;                     /* current */
  const struct act_format *act;      /* current */
  graph_value output;
  const struct backend_costs *costs; /* while stitching; NULL: everything offered is taken */
  struct program_choice choices[PROGRAM_FUSIONS];
  enum sits_status status;           /* first failure */
  struct sits_error error;
};

/* Append. A negative result means failure, which the graph remembers. */
graph_value graph_new_value(struct graph *graph, const char *name, int32_t width, bool is_rows);
struct graph_node *graph_new_node(struct graph *graph, enum program_op_kind kind); /* operands none; NULL on failure */

int32_t graph_producer(const struct graph *graph, graph_value value);  /* live node; -1: none */
int32_t graph_n_uses(const struct graph *graph, graph_value value);    /* by live nodes, and as the output */
/* The node of this kind that makes `value` for one reader only; -1 otherwise. */
int32_t graph_sole_producer(const struct graph *graph, graph_value value, enum program_op_kind kind);

/* ---- graph_weigh.c ---- */

/* Bar, node by node, the fusions that compete with cheaper ones. Before the passes. */
void graph_weigh(struct graph *graph, uint32_t fusions);
/* Time that one op less and `times` passes less over a value save; what computing a norm over it again and again costs. 0 without costs. */
double graph_saved(const struct graph *graph, graph_value value, int times);
double graph_repeated(const struct graph *graph, graph_value value);
/* May that fusion hold a norm? */
bool graph_is_f32(const struct graph *graph, uint32_t fusion);
/* Is this possible fusion taken? Counts it. node: which would be absorbed; its bars hold. */
bool graph_take(struct graph *graph, uint32_t fusion, const struct graph_node *node, double saved_ns);

#endif
