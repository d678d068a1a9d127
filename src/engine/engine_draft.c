/* Speculation, and its cheapest kind, without a second model: what followed the last few tokens the last time they stood in the sequence
 * is guessed to follow again (prompt lookup; Saxena 2023, "Prompt lookup decoding"). Summaries and edits of a text repeat much of it.
 *
 * A draft lies behind the known tokens of a choice and is verified by the next step: one row of logits per drafted token, each drawn as
 * it would be without speculation (engine_output.c, draw_rows), so the answer is the same token for token, sampled or greedy.
 *
 * Where nothing can be looked up, the draft model guesses, if there is one (engine_draft_model.c).
 *
 * Off is free: no draft is looked for when the option is 0 or spec_max_running or more sequences run. What a choice's drafts are worth is
 * learned per choice and kind: long matches are right far more often than short ones. The planner takes as many tokens as pay, and a kind
 * whose drafts mostly fail pauses for a few. */
#include "engine/engine_internal.h"

enum { LONGEST_MATCH = 8, LONG_MATCH = 4, SHORTEST_MATCH = 2, LOOK_BACK = 16384, POOR_WAIT = 4, FAILED_WAIT = 16 };

static const float ACCEPT_START[DRAFT_KINDS] = {[DRAFT_SHORT_MATCH] = 0.6f, [DRAFT_LONG_MATCH] = 0.8f, [DRAFT_MODEL] = 0.6f};
static const float ACCEPT_RATE = 0.15f, ACCEPT_POOR = 0.2f;

static int32_t match_length(const int32_t *tokens, int32_t end, int32_t known)
{
  int32_t n = 0;
  while (n < LONGEST_MATCH && n < end && tokens[end - 1 - n] == tokens[known - 1 - n]) n++;
  return n;
}

/* Where the last tokens stood before: the newest place with the longest match, its end; 0 when there is none. *length: of the match. */
static int32_t look_up(const int32_t *tokens, int32_t known, int32_t *length)
{
  int32_t best_at = 0, best = SHORTEST_MATCH - 1, oldest = known > LOOK_BACK ? known - LOOK_BACK : 0;
  for (int32_t end = known - 1; end > oldest && best < LONGEST_MATCH; end--) {
    if (tokens[end - 1] != tokens[known - 1]) continue;
    int32_t n = match_length(tokens, end, known);
    if (n <= best) continue;
    best = n;
    best_at = end;
  }
  *length = best;
  return best_at;
}

bool engine_may_guess(struct engine_choice *choice, enum engine_draft_kind kind, float *accept)
{
  struct engine_guesses *guesses = &choice->guesses[kind];
  if (guesses->accept == 0) guesses->accept = ACCEPT_START[kind];
  *accept = guesses->accept;
  if (guesses->wait == 0) return true;
  guesses->wait--;
  return false;
}

static bool may_draft(const struct engine_choice *choice)
{
  return engine_known(choice) - choice->n_computed == 1 && choice->n_out > 0;
}

/* False: nothing to look up, or it is not worth trying. */
static bool draft_for(struct sits_engine *engine, struct engine_choice *choice)
{
  int32_t known = engine_known(choice), most = engine->options.spec_max_tokens, length = 0, n = 0;
  int32_t left = choice->request->params.sampling.max_tokens - choice->n_out - 1; /* the step draws one token beyond the draft */
  float accept;
  if (most > left) most = left;
  int32_t from = look_up(choice->tokens, known, &length);
  enum engine_draft_kind kind = length >= LONG_MATCH ? DRAFT_LONG_MATCH : DRAFT_SHORT_MATCH;
  if (from == 0 || !engine_may_guess(choice, kind, &accept)) return false;
  for (; n < most; n++) choice->tokens[known + n] = choice->tokens[from + n]; /* may run on into the draft itself: a period */
  choice->draft_kind = kind;
  if (n > 0) alps_offer(engine->alps, choice->id, n, accept);
  return true;
}

void engine_draft(struct sits_engine *engine)
{
  const int32_t *ids;
  int32_t n = alps_running(engine->alps, &ids), n_to_draft = 0;
  engine->draft_us = 0;
  if (engine->options.spec_max_tokens == 0 || n >= engine->options.spec_max_running) return;
  for (int32_t i = 0; i < n; i++) {
    struct engine_choice *choice = engine->by_id[ids[i]];
    if (may_draft(choice) && !draft_for(engine, choice)) engine->to_draft[n_to_draft++] = choice;
  }
  if (engine->drafter) engine_drafter_run(engine, engine->to_draft, n_to_draft);
}

void engine_draft_result(struct engine_choice *choice, int32_t n_draft, int32_t n_accepted)
{
  struct engine_guesses *guesses = &choice->guesses[choice->draft_kind];
  for (int32_t i = 0; i < n_accepted; i++) guesses->accept += ACCEPT_RATE * (1 - guesses->accept);
  if (n_accepted < n_draft) guesses->accept -= ACCEPT_RATE * guesses->accept;
  if (guesses->accept >= ACCEPT_POOR) return;
  guesses->accept = ACCEPT_POOR; /* it is asked again after a while */
  guesses->wait = n_accepted > 0 ? POOR_WAIT : FAILED_WAIT;
}
