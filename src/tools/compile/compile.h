/* sits2026-compile: from a model and a recipe to one engine file.
 *
 * Main path: main -> compile_run: model_open, recipe, compile_calibrate where the recipe needs activations (outliers, GPTQ), then
 * compile_tensors rounds every matrix, compile_meta describes every site, and the writer puts both into the file. One thread, except for
 * the backend's workers while calibrating, and those that the rows of a matrix are dealt to. */
#ifndef SITS_TOOLS_COMPILE_H
#define SITS_TOOLS_COMPILE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/mapfile.h"
#include "model/model.h"
#include "quant/quant_gptq.h"
#include "quant/quant_recipe.h"
#include "quant/quant_weight.h"
#include "tensor/engine_file.h"

struct compile_options {
  const char *model, *output, *recipe, *target, *kv_cache_compress, *calibration, *report, *inspect, *work;
  int64_t calibration_windows, calibration_ctx, threads, hessian_memory;
  bool recipes, recipe_help, quiet;
};

/* Number of the head's site; those of layer l are l * MODEL_SITES + site. */
#define COMPILE_HEAD_SITE(model) ((model)->config.n_layers * MODEL_SITES)

/* A matrix of the model: what it is multiplied with. */
struct compile_matrix {
  const struct sits_utd *source;
  int32_t site;                      /* -1: no matrix product reads it (an embedding that is no head) */
  bool is_outer;                     /* embedding or head */
  struct quant_tensor made;          /* data is in the spool while is_spooled, and mapped only to write the file */
  double output_error;               /* relative: of the product on sampled inputs, both sides rounded; negative: not measured */
  bool is_done, is_spooled, has_minimum;
  uint64_t at[3];                    /* data, scales and minimums in the spool */
};

/* Finished matrices on disk (compile_journal.c). */
struct compile_journal {
  char spool_path[4096], journal_path[4096]; /* journal "": none */
  FILE *spool, *lines;
  uint64_t n_bytes;                  /* of the spool */
  int64_t n_resumed;                 /* matrices of an earlier run */
  json_t *done;                      /* {tensor: row} of that run */
  struct mapfile map;
};
/* What a model and a calibration text (NULL: none) hold, whatever their files are called: part of the keys under which work goes on. */
enum sits_status compile_fingerprint(const struct source *source, const char *text_path, uint64_t *out, struct sits_error *err)
    SITS_MUST_CHECK;
/* folder: where a cut run can be taken up; NULL: a temporary file. key: hex. */
enum sits_status compile_journal_open(struct compile_journal *journal, const char *folder, const char *key, struct sits_error *err)
    SITS_MUST_CHECK;
enum sits_status compile_journal_put(struct compile_journal *journal, struct compile_matrix *matrix, struct sits_error *err)
    SITS_MUST_CHECK;
bool compile_journal_take(const struct compile_journal *journal, struct compile_matrix *matrix); /* false: not there */
enum sits_status compile_journal_map(struct compile_journal *journal, struct compile_matrix *matrices, int64_t n, struct sits_error *err)
    SITS_MUST_CHECK;
void compile_journal_close(struct compile_journal *journal, bool is_finished);

#define COMPILE_SAMPLE 64            /* inputs of a site that are kept, to measure output errors on */

/* Input statistics of sites. */
struct compile_stats {
  int32_t n_sites;
  double **energy;                   /* [n_sites] [width]: sum of squares of each channel; NULL beside Hessians */
  int64_t *n_tokens;                 /* [n_sites] */
  float **sample;                    /* [n_sites] [COMPILE_SAMPLE][width] inputs spread over the text; NULL as energy */
  int32_t *n_sampled, *stride;       /* [n_sites] kept; tokens between two */
  float **hessian;                   /* [n_sites] [width][width] upper triangle of the sum of x x^T; only those asked for */
};

/* Run calibration text through the model, layer by layer, and gather energies and samples of all sites. */
enum sits_status compile_calibrate(const struct compile_options *options, const struct model *model, struct compile_stats *out,
                                   struct sits_error *err) SITS_MUST_CHECK;
/* The same walk, for Hessians of the sites first..last-1 of one layer at a time, in ascending order of layers; out holds only those. */
struct calibration;
enum sits_status calibration_open(const struct compile_options *options, const struct model *model, struct calibration **out,
                                  struct sits_error *err) SITS_MUST_CHECK;
enum sits_status calibration_hessians(struct calibration *calibration, int32_t first_site, int32_t last_site, struct compile_stats *out,
                                      struct sits_error *err) SITS_MUST_CHECK;
void calibration_close(struct calibration *calibration); /* NULL is fine */
void compile_stats_fini(struct compile_stats *stats);

/* AWQ (arXiv:2306.00978): a factor for each input channel of a site, by which its matrices' columns are multiplied and what makes the input
 * (a norm's gain, rows of v or up) is divided. column: [n_sites + 1][width], NULL where a site stays as it is. */
struct compile_scales { int32_t n_sites; float **column; int32_t n_scaled; };
enum sits_status compile_scales_make(const struct quant_recipe *recipe, const struct model *model, struct compile_stats *stats,
                                     struct compile_scales *out, struct sits_error *err) SITS_MUST_CHECK;
void compile_scales_fini(struct compile_scales *scales);
/* Factors for the rows of a matrix that makes a scaled site's input; NULL when it makes none. Caller frees with mem_free. *failed: no
 * memory. */
float *compile_row_scale(const struct model *model, const struct compile_scales *scales, const struct sits_utd *w, bool *failed);

/* Files that travel along (compile_blobs.c); the writer borrows them until it has finished. */
struct compile_blobs { struct buf *list; int n; };
enum sits_status compile_blobs_add(struct compile_blobs *blobs, const struct source *source, struct engine_writer *writer,
                                   struct sits_error *err) SITS_MUST_CHECK;
void compile_blobs_fini(struct compile_blobs *blobs);

/* How the recipe rounds a matrix, scales aside, and how a site's input. */
struct quant_spec compile_spec(const struct quant_recipe *recipe, const struct sits_utd *source, bool is_outer);
enum act_kind compile_site_kind(const struct quant_recipe *recipe, const struct model *model, int32_t site);

/* Relative error of the matrix's product on the sampled inputs, with the made weights and rounded inputs, over at most 128 rows; scale: the
 * factors of the site's columns, or NULL. Negative where there is no sample. */
double compile_output_error(const struct compile_matrix *matrix, const struct act_format *act, const struct compile_stats *stats,
                            const float *scale, const float *row_scale);

/* What one site reads: its activation format after recipe and statistics. outliers are allocated into out (mem_free). */
enum sits_status compile_site_act(const struct quant_recipe *recipe, const struct model *model, int32_t site,
                                  const struct compile_stats *stats, struct act_format *out, struct sits_error *err) SITS_MUST_CHECK;
int32_t compile_site_width(const struct model *model, int32_t site);

/* What a compilation came to. */
struct compile_result {
  char recipe[64];
  uint64_t weight_bytes;             /* integers, scales and minimums of all matrices */
  double share_4x4;                  /* of the layers' multiply-adds */
  int64_t n_resumed;                 /* matrices taken over from a cut run */
  int32_t n_scaled;                  /* sites whose channels were scaled */
  double seconds;
};
/* The file of options->output, and, unless options->quiet, the report on stdout. */
enum sits_status compile_run(const struct compile_options *options, struct compile_result *out, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status compile_inspect(const char *path, struct sits_error *err) SITS_MUST_CHECK;

/* Text to stdout, and JSON to path where it is not NULL. group: what the recipe asks for; matrices of the layers with smaller ones are
 * named. */
enum sits_status compile_report(const struct compile_matrix *matrices, int64_t n, int32_t group, const char *path, bool is_quiet,
                                struct sits_error *err) SITS_MUST_CHECK;

#endif
