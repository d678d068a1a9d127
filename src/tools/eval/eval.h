/* sits2026-eval: what a model computes, straight from a backend: perplexity, teacher-forced logits, greedy continuations, token ids.
 *
 * A session owns an open runner with page memory for a few sequences, each in a fixed run of pages (no sharing, no pool), and turns
 * pieces of sequences into backend batches. One thread. */
#ifndef SITS_TOOLS_EVAL_H
#define SITS_TOOLS_EVAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "engine/runner.h"
#include "text/tokenizer.h"

struct eval_options {
  const char *model, *text, *ids, *prompts, *out;
  const char *device, *isa, *kv_cache_dtype;
  int64_t threads, ctx, windows, skip_windows, batch_tokens, top, max_tokens;
  bool json, unfused, add_special, parse_special, ignore_eos;
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
  int32_t *lengths;                  /* [n_slots] tokens in the cache */
  int32_t *tokens, *positions, *rows;       /* [max_tokens] [max_tokens] [max_rows] */
  int32_t *starts, *kv_lengths, *table;     /* [n_slots+1] [n_slots] [n_slots][slot_pages] */
};

/* Opens model and tokenizer and reserves pages for n_slots sequences of max_length tokens. max_rows: most logit rows of a step. */
enum sits_status eval_session_open(struct eval_session *session, const struct eval_options *options, int32_t n_slots, int32_t max_length,
                                   int32_t max_rows, struct sits_error *err) SITS_MUST_CHECK;
void eval_session_close(struct eval_session *session); /* half-open is fine */
void eval_session_reset(struct eval_session *session); /* forget all sequences */

/* Run one step; pieces of different slots, at most max_tokens tokens and max_rows rows in all. *logits: [rows][V], rows in the pieces'
 * order, valid until the next step. */
enum sits_status eval_step(struct eval_session *session, const struct eval_piece *pieces, int32_t n_pieces, const float **logits,
                           struct sits_error *err) SITS_MUST_CHECK;

/* log(sum(exp(logits))), accumulated in double. */
double eval_logsumexp(const float *logits, int32_t n);
/* Indexes of the k largest logits, best first, ties by lower index. */
void eval_top(const float *logits, int32_t n, int32_t k, int32_t *out);

/* The measure behind `perplexity` (rule in eval_perplexity.c); nll is the caller's, mem_free. */
struct eval_score {
  double *nll;                       /* [n_windows] sums over the scored half of each window */
  int64_t n_windows, n_right, n_ids; /* n_right: predictions whose token had the largest logit; n_ids: of the whole text */
  double seconds;
};
enum sits_status eval_score(const struct eval_options *options, struct eval_score *out, struct sits_error *err) SITS_MUST_CHECK;

/* Commands: each prints its result on stdout. */
enum sits_status eval_perplexity(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_forced(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_greedy(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_tokenize(const struct eval_options *options, struct sits_error *err) SITS_MUST_CHECK;

unsigned eval_encode_flags(const struct eval_options *options); /* tokenizer_flags */
/* The ids of a text file under those flags. */
enum sits_status eval_encode_file(const struct tokenizer *tokenizer, const struct eval_options *options, struct token_list *out,
                                  struct sits_error *err) SITS_MUST_CHECK;
enum sits_status eval_load_tokenizer(const char *model, struct tokenizer **out, struct sits_error *err) SITS_MUST_CHECK;

#endif
