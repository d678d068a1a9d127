/* sits2026-opt: prepare a model for a recipe, and choose the recipe's details for it.
 *
 * Main path: main -> optimise: reference (the model in 16 bits), opt_rotate (which scales and rotations pay, by the output error of every
 * matrix),
 * compile by the recipe, and, with --max-ppl-loss, opt_search (which inputs can have 4 bits, by the sensitivity of each). Every finished
 * step is a row of DIR/search.json, so that a run that was cut goes on where it stopped. One thread, and the backend's workers. */
#ifndef SITS_TOOLS_OPT_H
#define SITS_TOOLS_OPT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "model/model.h"
#include "sits2026/status.h"

struct opt_options {
  const char *model, *output, *recipe, *calibration, *kv_cache_compress, *rotate;
  int64_t calibration_windows, ctx, windows, sensitivity_ctx, threads, rotation_seeds, down_rotation, hessian_memory;
  double max_ppl_loss;
};

struct opt_run {
  const struct opt_options *options;
  char source[4096];                 /* what is compiled: the model, or DIR/prepared.bin */
  char recipe[4096];                 /* by what: the recipe given, or DIR/base.yaml where its open questions were settled */
  int32_t n_layers;
  double reference;                  /* mean negative log-likelihood of the 16-bit model on the measuring windows */
  double held_out_reference;         /* and on those held out; with a search only */
  json_t *state;                     /* object: DIR/search.json */
};

/* Path of a file in DIR; n bytes at out. */
void opt_path(const struct opt_run *run, const char *name, char out[4096]);
/* Compile `source` by a recipe; report: JSON file or NULL; work: folder for a run that was cut, or NULL. */
enum sits_status opt_compile(const struct opt_run *run, const char *source, const char *recipe, const char *output, const char *report,
                             const char *work, bool is_quiet, struct sits_error *err) SITS_MUST_CHECK;
/* Mean negative log-likelihood on the windows after those that calibrate, or, held_out, on as many after these. Layer by layer. */
enum sits_status opt_measure(const struct opt_run *run, const char *model, bool held_out, double *nll, struct sits_error *err)
    SITS_MUST_CHECK;
/* Write the state to DIR/search.json. */
enum sits_status opt_save(const struct opt_run *run, struct sits_error *err) SITS_MUST_CHECK;
/* A bar on stderr, where that is a terminal. */
void opt_progress(const char *what, int64_t done, int64_t total);

/* Which rotations a prepared model gets. */
struct opt_plan {
  uint64_t residual;                 /* seed; 0: the residual stream stays as it is */
  bool *heads;                       /* [L] values and o's input, per head */
  bool *down;                        /* [L] down's input, online */
  int32_t block;                     /* of down */
};

/* Write the model with norm gains folded and those rotations fused into its weights (F16 where changed, else as they come). */
enum sits_status opt_prepare(const struct model *model, const struct opt_plan *plan, const char *path, struct sits_error *err)
    SITS_MUST_CHECK;
/* Decide on scaling and rotations and leave DIR/prepared.bin and run->source, or run->source as it is. */
enum sits_status opt_rotate(struct opt_run *run, struct sits_error *err) SITS_MUST_CHECK;
/* DIR/recipe.yaml: the recipe, with the fewest 8-bit inputs that keep the loss, also on windows held out. Reads DIR/model.bin, made by the
 * recipe as it is, and DIR/reference.bin. Without --max-ppl-loss the recipe as it is, and nothing is read. */
enum sits_status opt_search(struct opt_run *run, struct sits_error *err) SITS_MUST_CHECK;

/* DIR/report.png from DIR/report.json. */
enum sits_status opt_plot(const struct opt_run *run, struct sits_error *err) SITS_MUST_CHECK;

#endif
