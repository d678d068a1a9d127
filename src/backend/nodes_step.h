/* A batch as bytes, for the processes of a model (backend/nodes.h). */
#ifndef SITS_BACKEND_NODES_STEP_H
#define SITS_BACKEND_NODES_STEP_H

#include "backend/nodes_wire.h"

/* Most bytes of a batch of at most T tokens, S sequences and n_columns pages each; 0: more than the protocol takes. */
size_t node_step_bytes(int32_t max_tokens, int32_t max_seqs, int32_t max_columns);

/* The batch's arrays into out; *head says how to read them. False: an index is out of its bounds, or the batch asks for what other
 * processes cannot do. */
bool node_step_write(const struct backend_batch *batch, int32_t max_tokens, int32_t max_seqs, int32_t max_columns, struct node_step *head,
                     void *out, size_t *n_bytes);
/* The batch back, its arrays lying in `bytes`. False: it is not what node_step_write makes within these bounds. */
bool node_step_read(const struct node_step *head, const void *bytes, size_t n_bytes, int32_t max_tokens, int32_t max_seqs,
                    int32_t max_columns, struct backend_batch *out);

#endif
