/* See detok.h. Bytes go through two waiting rooms: `tail` (at most 3 bytes, an unfinished character) and `text` (valid UTF-8 that
 * could still become part of a stop string). A queue of token ends, measured in bytes of the whole text, says when a token's text is
 * out. */
#include "text/detok.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/stop.h"
#include "text/tokenizer_internal.h"

struct token_span { size_t start, end; bool is_open; }; /* in the text; open: its last bytes still wait in the tail */

struct detok {
  const struct tokenizer *tokenizer; /* borrowed */
  bool skip_special, include_stop;
  struct stop_matcher stops;
  struct decode_state state;
  struct buf tail;                   /* raw bytes not yet text */
  struct buf text;                   /* text not yet out, from offset n_out on */
  struct buf piece;                  /* what the last call gave */
  size_t n_out, n_text;              /* bytes of text given out; bytes of text made */
  struct token_span *spans;          /* queue [first, first + n) */
  int32_t first, n, capacity;
  int32_t stop_index;                /* >= 0: over */
  int64_t n_pushed, min_tokens;      /* tokens; of stop strings, those whole by then are passed over */
};

enum { DETOK_LIMIT_BYTES = 1 << 30 };

enum sits_status detok_create(const struct tokenizer *tokenizer, const struct detok_options *options, struct detok **out)
{
  struct detok *detok = mem_calloc(1, sizeof *detok);
  if (!detok) return SITS_NOMEM;
  *detok = (struct detok){.tokenizer = tokenizer, .skip_special = options->skip_special, .include_stop = options->include_stop,
                           .min_tokens = options->min_tokens};
  detok->state.has_started = !options->at_text_start;
  detok->stop_index = -1;
  buf_init(&detok->tail, DETOK_LIMIT_BYTES);
  buf_init(&detok->text, DETOK_LIMIT_BYTES);
  buf_init(&detok->piece, DETOK_LIMIT_BYTES);
  enum sits_status status = stop_init(&detok->stops, options->stops, options->n_stops);
  if (status) detok_destroy(detok);
  else *out = detok;
  return status;
}

void detok_destroy(struct detok *detok)
{
  if (!detok) return;
  stop_fini(&detok->stops);
  buf_fini(&detok->tail);
  buf_fini(&detok->text);
  buf_fini(&detok->piece);
  mem_free(detok->spans);
  mem_free(detok);
}

/* Room for one more span, so that a push that fails changes nothing visible. */
static bool reserve_span(struct detok *detok)
{
  if (detok->first + detok->n < detok->capacity) return true;
  if (detok->first > detok->capacity / 2) {
    memmove(detok->spans, detok->spans + detok->first, (size_t)detok->n * sizeof *detok->spans);
    detok->first = 0;
    return true;
  }
  int32_t capacity = detok->capacity ? detok->capacity * 2 : 16;
  struct token_span *spans = mem_realloc(detok->spans, (size_t)capacity * sizeof *spans);
  if (!spans) return false;
  detok->spans = spans;
  detok->capacity = capacity;
  return true;
}

/* Move finished characters from the tail to the text and through the stop matcher. *cut: where the text ends at a match. *n_first: bytes
 * of the first character that became text, 0 when none did; it holds whatever was in the tail before this call. *is_bad: it is a U+FFFD. */
static bool settle(struct detok *detok, bool is_last, size_t *cut, size_t *n_first, bool *is_bad)
{
  size_t usable = detok->tail.size - (is_last ? 0 : utf8_incomplete_tail(detok->tail.data, detok->tail.size));
  size_t before = detok->text.size;
  *n_first = 0;
  *is_bad = false;
  if (usable == 0) return true;
  if (!tokenizer_append_valid(&detok->text, detok->tail.data, usable)) return false;
  buf_drop_front(&detok->tail, usable);
  utf8_sequence(detok->text.data + before, detok->text.size - before, n_first);
  *is_bad = *n_first == 3 && memcmp(detok->text.data + before, "\xEF\xBF\xBD", 3) == 0;
  for (size_t i = before; i < detok->text.size; i++) {
    int32_t found = stop_push(&detok->stops, detok->text.data[i]);
    if (found < 0 || detok->n_pushed <= detok->min_tokens) continue;
    detok->stop_index = found;
    detok->n_text += i + 1 - before;
    *cut = detok->n_text - (detok->include_stop ? 0 : detok->stops.strings[found].n_bytes);
    return true;
  }
  detok->n_text += detok->text.size - before;
  return true;
}

/* Give out everything up to `end` and count the tokens done with it. */
static enum sits_status give(struct detok *detok, size_t end, bool is_cut, struct detok_piece *piece)
{
  size_t n = end - detok->n_out;
  buf_clear(&detok->piece);
  if (!buf_append(&detok->piece, detok->text.data, n)) return SITS_NOMEM;
  buf_drop_front(&detok->text, n);
  detok->n_out = end;
  *piece = (struct detok_piece){.text = detok->piece.data, .n_bytes = n, .stop_index = detok->stop_index};
  while (detok->n) {
    const struct token_span *span = &detok->spans[detok->first];
    bool is_done = is_cut ? span->start < end : !span->is_open && span->end <= end;
    if (!is_done) break;
    piece->n_tokens++;
    detok->first++;
    detok->n--;
  }
  if (detok->n == 0) detok->first = 0;
  return SITS_OK;
}

/* Tokens that waited for the tail end with the first character made of it. */
static void close_open_spans(struct detok *detok, size_t end)
{
  for (int32_t i = 0; i < detok->n; i++) {
    struct token_span *span = &detok->spans[detok->first + i];
    if (!span->is_open) continue;
    span->is_open = false;
    span->end = end;
  }
}

static enum sits_status give_settled(struct detok *detok, size_t cut, struct detok_piece *piece)
{
  bool is_cut = detok->stop_index >= 0;
  return give(detok, is_cut ? cut : detok->n_text - stop_held(&detok->stops), is_cut, piece);
}

enum sits_status detok_push(struct detok *detok, int32_t token, struct detok_piece *piece)
{
  size_t cut = 0, n_first, n_waiting = detok->tail.size, n_text = detok->n_text;
  bool is_bad;
  if (detok->stop_index >= 0) return give(detok, detok->n_out, true, piece);
  if (!reserve_span(detok) || !tokenizer_emit(detok->tokenizer, token, detok->skip_special, &detok->state, &detok->tail)) return SITS_NOMEM;
  size_t n_raw = detok->tail.size - n_waiting;
  detok->n_pushed++;
  if (!settle(detok, false, &cut, &n_first, &is_bad)) return SITS_NOMEM;
  if (n_first) close_open_spans(detok, n_text + n_first);
  /* The tail that waited was either completed by this token, sharing its character, or given up as one U+FFFD. */
  struct token_span span = {.start = n_text + (n_waiting && is_bad ? n_first : 0), .end = detok->n_text};
  span.is_open = n_raw > 0 && detok->tail.size > 0;
  detok->spans[detok->first + detok->n++] = span;
  return give_settled(detok, cut, piece);
}

enum sits_status detok_finish(struct detok *detok, struct detok_piece *piece)
{
  size_t cut = 0, n_first;
  bool is_bad;
  if (detok->stop_index >= 0) return give(detok, detok->n_out, true, piece);
  if (!settle(detok, true, &cut, &n_first, &is_bad)) return SITS_NOMEM;
  close_open_spans(detok, detok->n_text);
  if (detok->stop_index >= 0) return give_settled(detok, cut, piece);
  return give(detok, detok->n_text, false, piece);
}
