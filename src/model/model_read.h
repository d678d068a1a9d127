/* Between the files of model_*.c: what a configuration reader finds out about a model file before its weights are bound. */
#ifndef SITS_MODEL_READ_H
#define SITS_MODEL_READ_H

#include "model/model.h"

enum presence { ABSENT, OPTIONAL, REQUIRED };

/* Which weights beyond the common ones the file must or may hold. */
struct model_expect {
  enum presence qkv_bias, o_bias, qk_norm;
  bool ties_head;                  /* the embedding is the head even if the file holds another head */
  enum presence head;              /* OPTIONAL: tied when absent */
};

/* Fill config (zeroed before) and expect. config->n_vocab may stay 0: taken from the embedding then. Errors name the key. */
enum sits_status model_read_gguf(const struct source *source, struct model_config *config, struct model_expect *expect,
                                 struct sits_error *err) SITS_MUST_CHECK;
enum sits_status model_read_hf(const struct source *source, struct model_config *config, struct model_expect *expect,
                               struct sits_error *err) SITS_MUST_CHECK;
/* Bounds and relations that hold for every model; run after either reader. */
enum sits_status model_check_config(const struct source *source, const struct model_config *config, struct sits_error *err) SITS_MUST_CHECK;

/* Activation formats and KV codec from an engine file's meta; nothing happens with other files. Errors name the layer and site. */
enum sits_status model_read_engine(struct model *model, struct sits_error *err) SITS_MUST_CHECK;

/* inv_freq: [rope_dims/2]. factors: [rope_dims/2] divisors that the file brings along, or NULL. Returns the magnitude of cos and sin. */
float model_rope_frequencies(const struct model_config *config, const float *factors, float *inv_freq);
/* 0.1 * ln(factor) * mscale + 1: YaRN's attention temperature (arXiv:2309.00071, section 3.4). */
float model_yarn_magnitude(float factor, float mscale);

#endif
