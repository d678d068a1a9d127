/* sits2026-eval: what a model computes, straight from a backend: perplexity, several recipes side by side, multiple choice, teacher-forced
 * logits, greedy continuations, token ids.
 *
 * A session owns an open runner with page memory for a few sequences, the bookkeeping of those pages (kv/kv.h, without sharing), and
 * turns pieces of sequences into backend batches. One thread. */
#ifndef SITS_TOOLS_EVAL_H
#define SITS_TOOLS_EVAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "engine/runner.h"
#include "kv/kv.h"
#include "text/tokenizer.h"

struct eval_session;

struct eval_options {
  const char *model, *models, *text, *ids, *prompts, *tasks, *out, *calibration, *parts;
  const char *device, *isa, *kv_cache_dtype;
  int64_t threads, tensor_parallel_size, ctx, windows, skip_windows, batch_tokens, top, max_tokens, calibration_windows, kv_page_budget;
  bool json, unfused, one_device, by_layer, tensor_parallel_compress, add_special, parse_special, ignore_eos;
  /* NULL, or: told when a session is open, before its first step (for measurements that change the cache). */
  enum sits_status (*on_open)(struct eval_session *session, struct sits_error *err);
};

struct eval_piece {                  /* tokens that one sequence goes on by in one step */
  int32_t slot;                      /* sequence, 0..n_slots-1 */
  const int32_t *tokens;
  int32_t n_tokens;
  int32_t first_row;                 /* logits are wanted for tokens[first_row..]; n_tokens: none */
};

struct eval_session {
  struct runner runner;
  struct tokenizer *tokenizer;
  int32_t n_slots, slot_pages;       /* sequences and pages of each */
  int32_t max_tokens, max_rows;      /* of a step */
  struct kv *pages;                  /* who holds which page */
  int32_t *kv_slots;                 /* [n_slots] of the bookkeeping */
  int32_t *tokens, *positions, *rows;       /* [max_tokens] [max_tokens] [max_rows] */
  int32_t *starts, *kv_lengths, *table;     /* [n_slots+1] [n_slots] [n_slots][slot_pages] */
  int32_t page_budget;               /* pages that a sequence keeps (fp4-sparse), 0 = all */
  struct backend_blocks *blocks;     /* [n_slots] of a step's pieces, with a budget */
};

/* Opens model and tokenizer and reserves pages for n_slots sequences of max_length tokens. max_rows: most logit rows of a step. */
enum sits_status eval_session_open(struct eval_session *session, const struct eval_options *options, int32_t n_slots, int32_t max_length,
                                   int32_t max_rows, struct sits_error *err) SITS_MUST_CHECK;
void eval_session_close(struct eval_session *session); /* half-open is fine */
void eval_session_reset(struct eval_session *session); /* forget all sequences */

/* Most tokens that the slot's next piece may have: no limit but with a page budget. */
int32_t eval_room(const struct eval_session *session, int32_t slot);
/* Run one step; pieces of different slots, at most max_tokens tokens and max_rows rows in all. *logits: [rows][V], rows in the pieces'
 * order, valid until the next step. */
enum sits_status eval_step(struct eval_session *session, const struct eval_piece *pieces, int32_t n_pieces, const float **logits,
                           struct sits_error *err) SITS_MUST_CHECK;

/* log(sum(exp(logits))), accumulated in double. */
double eval_logsumexp(const float *logits, int32_t n);
/* Indexes of the k largest logits, best first, ties by lower index. */
void eval_top(const float *logits, int32_t n, int32_t k, int32_t *out);

/* Mean log(p / q) under p, for p and q given by logits and their logsumexp: the Kullback-Leibler divergence of q from p, in nats. */
double eval_divergence(const float *p, double p_total, const float *q, double q_total, int32_t n);

/* Rows of logits of one window, in the order of positions: fn sees row `index` of ctx-1-ctx/2, [V], and the id that follows there. */
typedef void (*eval_row_fn)(void *user, int32_t index, const float *row, int32_t wanted);
/* Read one window of ctx ids (rule in eval_window.c) and hand out its scored rows. *compute_us grows by the time the backend took. */
enum sits_status eval_window(struct eval_session *session, int32_t *tokens, int32_t ctx, eval_row_fn fn, void *user, int64_t *compute_us,
                             struct sits_error *err) SITS_MUST_CHECK;
static inline int32_t eval_scored(int64_t ctx) { return (int32_t)(ctx - 1 - ctx / 2); } /* rows of a window */
/* Windows of n_ids that the options ask for; SITS_INVALID_ARGUMENT when there is none. */
enum sits_status eval_count_windows(const struct eval_options *options, int64_t n_ids, int64_t *out, struct sits_error *err)
    SITS_MUST_CHECK;

/* A model that stands in a list beside others: an item of --models, opened. */
struct eval_contender {
  char name[96];                     /* as given, without folders */
  char kv[16];                       /* how its cache is stored */
  char path[4096];                   /* of the model or engine file */
  char recipe[4096];                 /* it is compiled by, as given; empty: by none */
  bool is_temporary;                 /* compiled here: removed by eval_contenders_close */
  double compile_s;
  struct eval_session session;       /* open between eval_contender_open and its close */
};
enum { EVAL_MOST_CONTENDERS = 64 };
/* Split options->models, "ITEM[@KV],...": an ITEM that is a built-in recipe or ends in .yaml is compiled from options->model into a
 * temporary file (equal ones once), any other is the path of a model. Sessions stay closed. SITS_CONFIG names the item. */
enum sits_status eval_contenders_list(const struct eval_options *options, struct eval_contender **out, int32_t *n, struct sits_error *err)
    SITS_MUST_CHECK;
enum sits_status eval_contender_open(struct eval_contender *contender, const struct eval_options *options, int32_t max_length,
                                     int32_t max_rows, struct sits_error *err) SITS_MUST_CHECK;
void eval_contenders_close(struct eval_contender *list, int32_t n); /* NULL is fine */
uint64_t eval_weight_bytes(const struct eval_session *session); /* all tensors with their scales and minimums, as stored */

/* The measure behind `perplexity` (rule in eval_window.c); nll is the caller's, mem_free. */
struct eval_score {
  double *nll;                       /* [n_windows] sums over the scored half of each window */
  int64_t n_windows, n_right, n_ids; /* n_right: predictions whose token had the largest logit; n_ids: of the whole text */
  double seconds;
};
enum sits_status eval_score(const struct eval_options *options, struct eval_score *out, struct sits_error *err) SITS_MUST_CHECK;

/* JSON to a file, complete or not there at all. */
enum sits_status eval_write_json(const json_t *value, const char *path, struct sits_error *err) SITS_MUST_CHECK;

/* Commands: each prints its result on stdout. */
enum sits_status eval_perplexity(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_compare(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_join(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_choice(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_forced(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_greedy(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_tokenize(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;

unsigned eval_encode_flags(const struct eval_options *options); /* tokenizer_flags */
/* The ids of a text file under those flags. */
enum sits_status eval_encode_file(const struct tokenizer *tokenizer, const struct eval_options *options, struct token_list *out,
                                  struct sits_error *err) SITS_MUST_CHECK;
/* model: a path; NULL, SITS_CONFIG: none was given. */
enum sits_status eval_load_tokenizer(const char *model, struct tokenizer **out, struct sits_error *err) SITS_MUST_CHECK;

#endif
