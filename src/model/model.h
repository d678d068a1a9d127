/* A language model: its configuration and where its weights lie, the same whether it came from GGUF or Hugging Face.
 * Architectures: llama (Llama 2/3/3.x, SmolLM2, Mistral), qwen2, qwen3. model/arch.h turns it into a graph of ops. */
#ifndef SITS_MODEL_MODEL_H
#define SITS_MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "sits2026/status.h"
#include "sits2026/utd.h"
#include "tensor/act_format.h"
#include "tensor/source.h"

enum model_arch { MODEL_LLAMA, MODEL_QWEN2, MODEL_QWEN3 };

enum rope_style {
  ROPE_HALF_SPLIT,   /* pairs (i, i + D/2): Hugging Face layout */
  ROPE_INTERLEAVED,  /* pairs (2i, 2i + 1): llama.cpp's GGUF layout for llama */
};

enum rope_scaling { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3, ROPE_SCALING_YARN };

struct model_config {
  enum model_arch arch;
  int32_t n_layers;            /* L */
  int32_t n_embd;              /* E */
  int32_t n_heads;             /* H query heads */
  int32_t n_kv_heads;          /* G */
  int32_t head_dim;            /* D */
  int32_t n_ff;                /* F */
  int32_t n_vocab;             /* V rows of the embedding and the head */
  int32_t max_context;         /* positions the model was made for */
  int32_t sliding_window;      /* tokens a query sees, itself included; 0 = all */
  float rms_eps;
  float rope_theta;
  int32_t rope_dims;           /* of D, usually all */
  enum rope_style rope_style;
  enum rope_scaling rope_scaling;
  float rope_factor, rope_low_freq_factor, rope_high_freq_factor; /* linear, llama3, yarn */
  float yarn_attn_factor, yarn_beta_fast, yarn_beta_slow;
  int32_t rope_original_context;
  bool tied_head;              /* output == tok_embd */
  char name[96];               /* general.name or the directory's base name */
};

/* The inputs of a layer's matrix products. */
enum model_site { MODEL_SITE_QKV, MODEL_SITE_O, MODEL_SITE_GATE_UP, MODEL_SITE_DOWN, MODEL_SITES };

struct model_layer {           /* NULL where the architecture has none */
  const struct sits_utd *attn_norm;                /* [E] */
  const struct sits_utd *wq, *wk, *wv, *wo;        /* [H*D][E], [G*D][E], [G*D][E], [E][H*D] */
  const struct sits_utd *bq, *bk, *bv, *bo;        /* [H*D], [G*D], [G*D], [E] */
  const struct sits_utd *q_norm, *k_norm;          /* [D] */
  const struct sits_utd *ffn_norm;                 /* [E] */
  const struct sits_utd *w_gate, *w_up, *w_down;   /* [F][E], [F][E], [E][F] */
  struct act_format act[MODEL_SITES];              /* ACT_BACKEND unless the file is an engine file that says otherwise */
};

struct model {
  struct model_config config;
  struct source *source;                           /* owned */
  const struct sits_utd *tok_embd;                 /* [V][E] */
  const struct sits_utd *output_norm;              /* [E] */
  const struct sits_utd *output;                   /* [V][E]; == tok_embd when tied */
  float *rope_inv_freq;                            /* [rope_dims/2] f32, scaling applied; owned */
  float rope_magnitude;                            /* multiplies cos and sin (yarn); 1 otherwise */
  struct model_layer *layers;                      /* [L], owned */
  struct sits_utd *synthetic;                      /* owned weights without data, of a model without a file; else NULL */
  struct act_format head_act;
  int32_t *outliers;                               /* what all act_formats point into; owned */
  const char *kv_codec;                            /* an engine file's wish ("int4"); NULL: none */
};

/* Open and check shapes and types of every weight. Errors name the key or tensor. */
enum sits_status model_open(const char *path, struct model **out, struct sits_error *err) SITS_MUST_CHECK;
/* A model without a file, named "llama3-8b" and the like: shapes only, weights with data NULL. model_open takes it as "synthetic:NAME". */
enum sits_status model_synthetic(const char *name, struct model **out, struct sits_error *err) SITS_MUST_CHECK;
void model_close(struct model *model);
const char *model_arch_name(enum model_arch arch);
const char *model_site_name(enum model_site site); /* "qkv", "o", "gate_up", "down" */

#endif
