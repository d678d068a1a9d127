/* A backend without a model: pages hold token ids, and a row's logits are a hash of the whole context, read through the block table.
 * Each column of a page (layer and kv head) has its own ids, and what a sequence has dropped of them (codec KV_FP4_SPARSE) is no part of
 * its context: a position's ids are hashed column by column. Any wrong table, slot, copy or swap gives another hash and so another token;
 * every batch is checked for shape and for two sequences writing one place. Delays and a device error can be injected.
 * One engine thread calls, as with any backend; the knobs are atomic. */
#ifndef SITS_TESTS_REF_FAKE_BACKEND_H
#define SITS_TESTS_REF_FAKE_BACKEND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"

struct fake_options {
  int32_t n_vocab;
  int32_t max_batch_tokens, max_rows;
  int32_t n_pages;
  int32_t n_columns;             /* 0: one */
};

struct fake_rig {
  struct fake_options options;
  struct backend_program *program;
  struct backend_kv *kv;
  struct kv_geometry geometry;
  atomic_int step_delay_us;      /* sleep per batch */
  atomic_int token_delay_us;     /* and per token of it */
  atomic_int capture_delay_us;   /* and the first time that a batch has so many sequences, all of one token; told in its stats */
  atomic_bool refuses_lanes;     /* lane_begin returns SITS_DEVICE, batches go on */
  atomic_int hold_at_step;       /* batch number (from 1) that computes until this is another; 0 = none */
  atomic_int fail_at_step;       /* batch number (from 1) from which on everything returns SITS_DEVICE; 0 = never */
  atomic_int period;             /* > 0: the token of that many places before is likely next (a text that repeats) */
  atomic_int disagree;           /* > 0: one row in so many is a stranger's (a draft model that is often wrong) */
  atomic_int n_sampled;          /* batches whose tokens were drawn here */
  void (*during_slice)(void *user); /* called before each token of a slice; NULL: nothing */
  void *during_user;
  atomic_bool tells_ends;        /* lanes say when pieces (of a token) end, leave the last one running, and begin ahead when asked to */
  int64_t busy_until_us;         /* tells_ends: by what lanes were left to run */
  atomic_int n_ahead;            /* pieces begun ahead */
  atomic_int n_lanes_begun, n_slices; /* chunks read in slices; slices that did not end one */
  atomic_int n_lanes_dropped;    /* chunks given up */
  atomic_int n_steps;
  atomic_int n_reads, n_writes;  /* pages, to and from host memory */
  atomic_int fail_at_page;       /* of those the one (from 1) that returns SITS_INTERNAL; 0 = none */
  atomic_long n_tokens;          /* computed so far */
  atomic_int largest_batch, largest_seqs;
};

const struct backend_vtable *fake_vtable(void);
/* The same, drawing tokens itself when asked (greedy, or the whole distribution). */
const struct backend_vtable *fake_sampling_vtable(void);
/* The same with lanes: a slice writes a token each time that it is told to go on. */
const struct backend_vtable *fake_slicing_vtable(void);
/* 0 on success. */
int fake_rig_init(struct fake_rig *rig, const struct fake_options *options);
void fake_rig_fini(struct fake_rig *rig);

/* The logits that follow tokens[0..n), computed from the array itself. */
void fake_logits(int32_t n_vocab, const int32_t *tokens, int32_t n, float *logits);
/* With blocks in the batch: what the query of this token at this position gives to a column of a page. */
uint64_t fake_given(int32_t token, int32_t position, int32_t page, int32_t column);
/* The greedy token that follows. */
int32_t fake_next(int32_t n_vocab, const int32_t *tokens, int32_t n);

#endif
