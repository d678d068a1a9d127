/* What a backend's plain ops cost on this machine: the constants by which graph_stitch weighs fusions, measured, and kept in a small file.
 *
 * Measured are chains of ADDs and of RMSNORMs of two widths: the difference between a long and a short chain is the price of its ops alone,
 * what grows with the width is that of bytes and of normalising, the rest that of an op. The shortest of many runs counts. norm_repeats and
 * f32_fusions say how a backend is made, and stay its own. */
#ifndef SITS_GRAPH_GRAPH_COSTS_H
#define SITS_GRAPH_GRAPH_COSTS_H

#include "backend/backend.h"
#include "sits2026/status.h"

/* An open backend of at least costs.tokens tokens a batch, which runs nothing else meanwhile. */
enum sits_status graph_costs_measure(const struct backend_vtable *vtable, struct backend *backend, struct backend_costs *out,
                                     struct sits_error *err) SITS_MUST_CHECK;

/* A JSON object: device, tokens, op_ns, byte_ns, norm_ns. Loading refuses, by the field's name, what is missing, out of range, or of
 * another device than the backend's. */
enum sits_status graph_costs_save(const char *path, const struct backend_vtable *vtable, const struct backend_costs *costs,
                                  struct sits_error *err) SITS_MUST_CHECK;
enum sits_status graph_costs_load(const char *path, const struct backend_vtable *vtable, struct backend_costs *out, struct sits_error *err)
    SITS_MUST_CHECK;

#endif
