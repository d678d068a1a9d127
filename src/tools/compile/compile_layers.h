/* A model run over windows of a text layer by layer: only one layer is packed for the CPU at a time, and what lies between two layers waits
 * in a file without a name, in TMPDIR or else /tmp. So calibration and measurement take the memory of one layer (or of the head) and of one
 * batch, whatever the model's size. Results are those of the whole model in batches of the same size.
 *
 * Life: open, then for each layer any number of layer_walk_run and one with `advance`, then layer_walk_head. One thread, and the backend's
 * workers. Errors name the tensor or file. */
#ifndef SITS_TOOLS_COMPILE_LAYERS_H
#define SITS_TOOLS_COMPILE_LAYERS_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "model/model.h"

struct layer_walk;

struct layer_walk_options {
  int32_t n_threads;                 /* 0: one per core */
  const char *isa;                   /* as backend_options.isa */
  const char *kv_codec;              /* how keys and values are stored between batches: a codec's name; NULL or "auto": the model's own */
};

/* ids: [n_windows][ctx], borrowed for this call; each window is a sequence of its own. The model is borrowed and must stay open. */
enum sits_status layer_walk_open(const struct model *model, const struct layer_walk_options *options, const int32_t *ids,
                                 int64_t n_windows, int32_t ctx, struct layer_walk **out, struct sits_error *err) SITS_MUST_CHECK;
void layer_walk_close(struct layer_walk *walk); /* NULL is fine */

int32_t layer_walk_at(const struct layer_walk *walk); /* the layer that runs next, 0..L; L: the head */
int32_t layer_walk_batch(const struct layer_walk *walk); /* most tokens of a batch */

int32_t layer_walk_tokens(const struct layer_walk *walk); /* of the batch that runs now: for observers */

/* Run the next layer over all windows. observer: sees the inputs of its products (their op's layer is 0), or NULL. advance: its outputs
 * become the next layer's inputs. Formats in the model's layers may have been changed since the last call. */
enum sits_status layer_walk_run(struct layer_walk *walk, const struct backend_observer *observer, bool advance, struct sits_error *err)
    SITS_MUST_CHECK;

/* Sees the logits [V] behind token `position` of window `window`. */
typedef void (*layer_row_fn)(void *user, int64_t window, int32_t position, const float *logits);
/* Norm and head over tokens first..ctx-1 of every window; after the last layer. fn may be NULL. */
enum sits_status layer_walk_head(struct layer_walk *walk, const struct backend_observer *observer, int32_t first, layer_row_fn fn,
                                 void *user, struct sits_error *err) SITS_MUST_CHECK;

/* Where the walk is, to come back to: its hidden states are kept until the walk is closed or another mark is set. layer_walk_back goes
 * there, any number of times. */
enum sits_status layer_walk_mark(struct layer_walk *walk, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status layer_walk_back(struct layer_walk *walk, struct sits_error *err) SITS_MUST_CHECK;

#endif
