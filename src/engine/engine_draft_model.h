/* Drafts by a second, smaller model: it reads what the sequence holds and goes on for a few tokens, which the next step verifies.
 *
 * The guess for a position is drawn from the draft model's logits exactly as the target's token will be drawn from its own: the same
 * sampling parameters, the same uniform number. So where the two distributions are alike the two draws agree, greedy or sampled; and since
 * the answer is what the target draws (engine_output.c, draw_rows), its distribution is the target's, whatever the draft model says.
 *
 * The draft model has pages of its own, a table for each sequence that may be drafted for at once. What it has read of a sequence is kept
 * up to the first token that was refused. A prompt is read in pieces of at most CATCH_UP tokens a step, beside the target's steps.
 *
 * How long: the length that promises most tokens for its time, from the share of guesses that were right for this sequence and the measured
 * cost of a draft step against the target's; 0 when none beats no draft. Then, or when guesses fail, the sequence pauses.
 * Threads: the engine's. Nothing allocates after creation. A device error turns the drafter off, not the engine. */
#ifndef SITS_ENGINE_ENGINE_DRAFT_MODEL_H
#define SITS_ENGINE_ENGINE_DRAFT_MODEL_H

#include "engine/engine_core.h"

struct sits_engine;
struct engine_choice;
struct engine_drafter;

enum sits_status engine_drafter_create(const struct engine_options *options, struct engine_drafter **out) SITS_MUST_CHECK;
void engine_drafter_destroy(struct engine_drafter *drafter); /* NULL is fine */

/* Draft for these choices, each of which has exactly one token that is not in the target's cache; offers go to the planner. */
void engine_drafter_run(struct sits_engine *engine, struct engine_choice *const *choices, int32_t n);
/* After the verification: tokens up to n_known are right, of the choice's drafted ones too. */
void engine_drafter_verified(struct engine_choice *choice, int32_t n_known);
/* The choice lost its place: forget what was read of it. */
void engine_drafter_drop(struct sits_engine *engine, struct engine_choice *choice);

/* The draft length that pays best: accept is the chance of a guess, cost what a guess costs (its draft step and its
 * verification) in target steps. Pure. */
int32_t engine_draft_length(float accept, double cost, int32_t most);

#endif
