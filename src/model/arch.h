/* Model architectures as graphs of ops. arch_build describes one forward pass the way a paper does; program_from_model is what engines and
 * tools call. How to add an architecture: map its tensors in the loader, give model_config what is new, and add the ops to arch_layer. */
#ifndef SITS_MODEL_ARCH_H
#define SITS_MODEL_ARCH_H

#include <stdint.h>

#include "backend/backend.h"
#include "backend/program.h"
#include "graph/graph.h"
#include "model/model.h"
#include "sits2026/status.h"

/* Append the model's forward pass to an empty graph. Failures are remembered by the graph and reported by graph_stitch. */
void arch_build(const struct model *model, struct graph *graph);

/* Graph of the model with every fusion of `fusions` (program_fusion bits, 0 = plain ops) wherever it fits. The program borrows the
 * model. */
enum sits_status program_from_model_with(const struct model *model, uint32_t fusions, struct program **out, struct sits_error *err)
    SITS_MUST_CHECK;

/* The same cut over n_ranks devices: a list of programs, one a rank (backend/program.h). n_ranks <= 1: the whole. costs: what fusions are
 * weighed by, or NULL. */
enum sits_status program_for_ranks(const struct model *model, uint32_t fusions, const struct backend_costs *costs, int32_t n_ranks,
                                   struct program **out, struct sits_error *err) SITS_MUST_CHECK;

/* Only the program of rank 0 <= rank < n_ranks, with no more of the weights than its share. */
enum sits_status program_for_rank(const struct model *model, uint32_t fusions, const struct backend_costs *costs, int32_t rank,
                                  int32_t n_ranks, struct program **out, struct sits_error *err) SITS_MUST_CHECK;

/* One layer alone, as a program of one layer: `input`, an F32 table [E][E] of hidden states, stands for the embedding, so that token ids
 * are its rows; the "logits" are the hidden states behind the layer, [R][E]. layer == n_layers: the final norm and the head, over a table
 * [V][E]; logits [R][V]. For tools that hold one layer at a time. The table is borrowed like the model. */
enum sits_status program_from_layer(const struct model *model, int32_t layer, const struct sits_utd *input,
                                    const struct backend_vtable *backend, struct program **out, struct sits_error *err) SITS_MUST_CHECK;

/* The whole for a backend: what it offers, where it saves time by its costs. */
enum sits_status program_from_model(const struct model *model, const struct backend_vtable *backend, struct program **out,
                                    struct sits_error *err) SITS_MUST_CHECK;

#endif
