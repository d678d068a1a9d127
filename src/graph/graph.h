/* An op graph in single-assignment form, and the pass that turns it into a program.
 *
 * Vocabulary: a value is what one op makes; it has a width and one row per token (or per wanted logit row after select_rows). Builders
 * return the value's number; after a failure (no memory, widths that do not fit) the graph is marked failed, every later call is a
 * no-op, and graph_stitch reports the first cause. That keeps a model's description free of error branches.
 *
 * Rules: 1. Weights and inv_freq are borrowed and must outlive the graph and the program. 2. Not thread-safe. 3. graph_stitch does not
 * change the graph: it may be called again with other fusions.
 *
 * How graph_stitch works: (a) copy the nodes; (b) move select_rows up through row-wise ops while that saves work; (c) weigh what competes:
 * around each norm an ADD before it and the LINEAR behind it can be joined in several ways, of which the cheapest by the backend's costs is
 * taken (graph_weigh.c); (d) apply each fusion the backend offers where it saves time, pattern by pattern, widest first; (e) drop dead
 * nodes; (f) assign values to buffers by liveness, in place where the op table of backend/program.h allows. Each pattern is one function
 * in graph_stitch.c. Precision: norms are computed in f32, so a fusion that would hold one in less is not taken; softmax is inside
 * ATTENTION; LINEARs rescale before they write, so that no norm ever reads integers; LINEARs are grouped only under one rounding of x.
 */
#ifndef SITS_GRAPH_GRAPH_H
#define SITS_GRAPH_GRAPH_H

#include <stdint.h>

#include "backend/backend.h"
#include "backend/program.h"
#include "base/arena.h"
#include "sits2026/status.h"
#include "sits2026/utd.h"

struct graph;
typedef int32_t graph_value;         /* < 0: none (after a failure) */

enum sits_status graph_create(const struct program_dims *dims, const struct program_rope *rope, struct graph **out, struct sits_error *err)
    SITS_MUST_CHECK;
void graph_destroy(struct graph *graph);

/* Layer that the ops appended from now on belong to; PROGRAM_NONE outside. */
void graph_set_layer(struct graph *graph, int32_t layer);

/* How the inputs of the LINEARs appended from now on are rounded (borrowed; NULL: as the backend likes). LINEARs are grouped only where it
 * is the same object. */
void graph_set_act(struct graph *graph, const struct act_format *act);

graph_value graph_embed(struct graph *graph, const struct sits_utd *table);                           /* [T][E]; table [V][E] */
graph_value graph_rmsnorm(struct graph *graph, graph_value x, const struct sits_utd *gain);           /* gain [width of x] */
graph_value graph_linear(struct graph *graph, graph_value x, const struct sits_utd *weight, const struct sits_utd *bias, /* bias or NULL */
                         const char *name);
graph_value graph_head_norm(struct graph *graph, graph_value x, const struct sits_utd *gain);         /* gain [D]; NULL gives x back */
graph_value graph_rope(struct graph *graph, graph_value x);
graph_value graph_kv_append(struct graph *graph, graph_value k, graph_value v);                       /* stands for the layer's cache */
graph_value graph_attention(struct graph *graph, graph_value q, graph_value cache);                   /* [T][H*D] */
graph_value graph_swiglu(struct graph *graph, graph_value gate, graph_value up);
graph_value graph_add(struct graph *graph, graph_value a, graph_value b);
graph_value graph_select_rows(struct graph *graph, graph_value x);                                    /* [R][width] */
graph_value graph_all_reduce(struct graph *graph, graph_value x);                                     /* sum over ranks */
graph_value graph_all_gather(struct graph *graph, graph_value x);                                     /* [.][n_ranks * width] */
void graph_output(struct graph *graph, graph_value logits);                                           /* the graph's result */

/* One rank's share of a graph that was described whole: the weights cut, the collectives added (graph_shard.c says how). The new graph
 * borrows from the same weights; what has to be copied or described anew lies in `arena`, which must live as long. Sizes that do not
 * divide are refused with parameter tensor-parallel-size, naming the size or the tensor. */
enum sits_status graph_shard(const struct graph *whole, int32_t rank, int32_t n_ranks, struct arena *arena, struct graph **out,
                             struct sits_error *err) SITS_MUST_CHECK;

/* fusions: program_fusion bits that may be used. costs: what they are weighed by; NULL: all are taken wherever they fit. */
enum sits_status graph_stitch(const struct graph *graph, uint32_t fusions, const struct backend_costs *costs, struct program **out,
                              struct sits_error *err) SITS_MUST_CHECK;

#endif
