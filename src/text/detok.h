/* Streaming detokeniser and stop-string matcher for one generated sequence.
 *
 * Tokens go in one at a time; text comes out in pieces that are always whole characters: an unfinished UTF-8 tail is held back (at most
 * 3 bytes; longer runs of bad bytes come out as U+FFFD, one per maximal subpart), and so is any end of the text that could still become
 * a stop string. Ids and text are held together: each piece says how many tokens it completes. The joined pieces are byte for byte what
 * tokenizer_decode gives for the whole sequence (after a prompt, as its continuation). Not thread-safe; one per sequence. */
#ifndef SITS_TEXT_DETOK_H
#define SITS_TEXT_DETOK_H

#include "text/tokenizer.h"

struct detok;

struct detok_options {
  bool skip_special;               /* special tokens give no text */
  bool include_stop;               /* keep the matched stop string in the text */
  const char *const *stops;        /* [n_stops] terminated UTF-8, copied; empty strings are not allowed */
  int32_t n_stops;
  int32_t min_tokens;              /* a stop string that is whole within the first so many tokens ends nothing */
  bool at_text_start;              /* true: the sequence starts a text (leading space stripped where the model does so) */
};

struct detok_piece {
  const char *text; size_t n_bytes; /* borrowed until the next call; may be empty */
  int32_t n_tokens;                 /* tokens whose text is now fully out (their logprobs may be sent with this piece); at a stop string,
                                       also those with text before the cut. Tokens wholly behind the cut are never counted */
  int32_t stop_index;               /* >= 0: this stop string matched, the sequence is over; -1 otherwise */
};

/* Of several stop strings the one whose match ends first wins, then the longest, then the first in the list. After a match every further
 * call gives an empty piece. SITS_INVALID_ARGUMENT: a stop string that is empty or no valid UTF-8. */
enum sits_status detok_create(const struct tokenizer *tokenizer, const struct detok_options *options, struct detok **out) SITS_MUST_CHECK;
void detok_destroy(struct detok *detok);
enum sits_status detok_push(struct detok *detok, int32_t token, struct detok_piece *piece) SITS_MUST_CHECK;
/* The sequence ended without a stop string: everything held comes out. */
enum sits_status detok_finish(struct detok *detok, struct detok_piece *piece) SITS_MUST_CHECK;

#endif
