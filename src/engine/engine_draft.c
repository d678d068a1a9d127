/* Speculation, and its cheapest kind, without a second model: what followed the last few tokens when they stood in the sequence before is
 * guessed to follow again (prompt lookup; Saxena 2023, "Prompt lookup decoding"). Summaries and edits of a text repeat much of it.
 *
 * Places are those with the longest match of up to ENGINE_LONGEST_MATCH tokens. The draft follows them token by token: what most of them
 * went on with, the newest deciding among equals, and those that went on otherwise are left behind. Where the newest token has no match, or
 * a match of it alone, but the tokens before it have a long one, that place is resumed behind the token that stood there instead: an edit
 * replaces a word and goes on. How likely a token is right depends on how long its match is, the drafted tokens included, and on how
 * many of its places agree, or on its distance from a replaced token; shares of right tokens of each kind are learned from all sequences
 * together. The planner takes as many tokens as pay at those chances.
 *
 * A draft lies behind the known tokens of a choice and is verified by the next step: one row of logits per drafted token, each drawn as
 * it would be without speculation (engine_output.c, draw_rows), so the answer is the same token for token, sampled or greedy.
 *
 * Where no match of two tokens is found, the draft model guesses, if there is one (engine_draft_model.c).
 *
 * Off is free: no draft is looked for when the option is 0 or spec_max_running or more sequences run. */
#include "engine/engine_internal.h"

enum { MOST_PLACES = 64, LOOK_BACK = 16384, POOR_WAIT = 4, FAILED_WAIT = 16 };
enum { SURE_MATCH = 5 };  /* before a strange token: from here on its place is resumed */
enum { HALF_AGREE, MOST_AGREE, ALL_AGREE }; /* half of a match's places at most, more, all */
enum { FIRST_RESUMED = ENGINE_LOOKUP_KINDS - ENGINE_RESUMED };

static const float START[ENGINE_LONGEST_MATCH + 1] = {0, 0.25f, 0.45f, 0.55f, 0.65f, 0.75f, 0.75f, 0.8f, 0.8f}, START_DISPUTED = 0.7f,
                   START_RESUMED = 0.5f;
static const float LOOKUP_RATE = 0.05f; /* of what is learned from a verified token */
static const float LOOKUP_HOPE = 0.003f; /* back to the start with each look-up, so that a kind that never paid is tried again */
static const float ACCEPT_START = 0.6f, ACCEPT_RATE = 0.15f, ACCEPT_POOR = 0.2f;

/* Where the tokens to come may have stood before, newest first: ends of the places of the longest match. */
struct places { int32_t end[MOST_PLACES], n, length; bool is_resumed; };

static float start_of(int32_t kind)
{
  if (kind >= FIRST_RESUMED) return START_RESUMED;
  return START[kind / ENGINE_AGREEMENTS] * (kind % ENGINE_AGREEMENTS == ALL_AGREE ? 1 : START_DISPUTED);
}

void engine_draft_init(struct sits_engine *engine)
{
  for (int32_t k = 0; k < ENGINE_LOOKUP_KINDS; k++) engine->lookup_right[k] = start_of(k);
}

static int32_t match_length(const int32_t *tokens, int32_t end, int32_t known)
{
  int32_t n = 0;
  while (n < ENGINE_LONGEST_MATCH && n < end && tokens[end - 1 - n] == tokens[known - 1 - n]) n++;
  return n;
}

static void look_up(const int32_t *tokens, int32_t known, struct places *out)
{
  int32_t oldest = known > LOOK_BACK ? known - LOOK_BACK : 0;
  *out = (struct places){.n = 0};
  for (int32_t end = known - 1; end > oldest; end--) {
    if (tokens[end - 1] != tokens[known - 1]) continue;
    int32_t n = match_length(tokens, end, known);
    if (n > out->length) {
      out->length = n;
      out->n = 0;
    }
    if (n == out->length && out->n < MOST_PLACES) out->end[out->n++] = end;
  }
}

/* The longest match, or a place that is resumed. */
static void find_places(const int32_t *tokens, int32_t known, struct places *out)
{
  struct places before;
  look_up(tokens, known, out);
  if (out->length > 1) return;
  look_up(tokens, known - 1, &before);
  if (before.length < SURE_MATCH + out->length) return;
  for (int32_t i = 0; i < before.n; i++) before.end[i]++;
  before.is_resumed = true;
  *out = before;
}

/* Kind of the n-th drafted token. */
static int32_t kind_of(const struct places *places, int32_t n, int32_t agreement)
{
  if (places->is_resumed) return FIRST_RESUMED + (n < ENGINE_RESUMED ? n : ENGINE_RESUMED - 1);
  return ENGINE_AGREEMENTS * (places->length + n < ENGINE_LONGEST_MATCH ? places->length + n : ENGINE_LONGEST_MATCH) + agreement;
}

/* What most places went on with after `ahead` tokens; the others are dropped. A place may run on into the draft
 * itself: a period. */
static int32_t vote(const int32_t *tokens, int32_t ahead, struct places *places, int32_t *agreement)
{
  int32_t best = 0, most = 0, n = 0;
  for (int32_t i = 0; i < places->n && most <= places->n - i; i++) {
    int32_t votes = 0, token = tokens[places->end[i] + ahead];
    for (int32_t k = 0; k < places->n; k++) votes += tokens[places->end[k] + ahead] == token;
    if (votes <= most) continue;
    most = votes;
    best = token;
  }
  *agreement = most == places->n ? ALL_AGREE : 2 * most > places->n ? MOST_AGREE : HALF_AGREE;
  for (int32_t i = 0; i < places->n; i++) {
    if (tokens[places->end[i] + ahead] == best) places->end[n++] = places->end[i];
  }
  places->n = n;
  return best;
}

bool engine_may_guess(struct engine_choice *choice, float *accept)
{
  struct engine_guesses *guesses = &choice->guesses;
  if (guesses->accept == 0) guesses->accept = ACCEPT_START;
  *accept = guesses->accept;
  if (guesses->wait == 0) return true;
  guesses->wait--;
  return false;
}

static bool may_draft(const struct engine_choice *choice)
{
  return engine_known(choice) - choice->n_computed == 1 && choice->n_out > 0;
}

/* False: nothing to look up, or a draft model does better. */
static bool draft_for(struct sits_engine *engine, struct engine_choice *choice)
{
  struct places places;
  int32_t known = engine_known(choice), most = engine->options.spec_max_tokens;
  int32_t left = choice->request->params.sampling.max_tokens - choice->n_out - 1; /* the step draws one token beyond the draft */
  if (most > left) most = left;
  find_places(choice->tokens, known, &places);
  if (places.n == 0 || (engine->drafter && places.length < 2)) return false;
  for (int32_t n = 0; n < most; n++) {
    int32_t agreement;
    choice->tokens[known + n] = vote(choice->tokens, n, &places, &agreement);
    const int32_t kind = kind_of(&places, n, agreement);
    engine->lookup_right[kind] += LOOKUP_HOPE * (start_of(kind) - engine->lookup_right[kind]);
    choice->draft_lookup[n] = (uint8_t)kind;
    choice->draft_chance[n] = engine->lookup_right[kind];
  }
  choice->draft_kind = DRAFT_LOOKUP;
  if (most > 0) alps_offer(engine->alps, choice->id, most, choice->draft_chance);
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

void engine_draft_result(struct sits_engine *engine, struct engine_choice *choice, int32_t n_draft, int32_t n_accepted)
{
  struct engine_guesses *guesses = &choice->guesses;
  if (choice->draft_kind == DRAFT_LOOKUP) {
    for (int32_t i = 0; i < n_draft && i <= n_accepted; i++) {
      float *right = &engine->lookup_right[choice->draft_lookup[i]];
      *right += LOOKUP_RATE * ((i < n_accepted ? 1.0f : 0.0f) - *right);
    }
    return;
  }
  for (int32_t i = 0; i < n_accepted; i++) guesses->accept += ACCEPT_RATE * (1 - guesses->accept);
  if (n_accepted < n_draft) guesses->accept -= ACCEPT_RATE * guesses->accept;
  if (guesses->accept >= ACCEPT_POOR) return;
  guesses->accept = ACCEPT_POOR; /* it is asked again after a while */
  guesses->wait = n_accepted > 0 ? POOR_WAIT : FAILED_WAIT;
}
