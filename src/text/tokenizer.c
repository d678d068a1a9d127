/* See tokenizer.h. tokenizer_encode runs: clean up invalid UTF-8 · cut out added tokens · normalise · pre-tokenise · BPE.
 * tokenizer_decode joins the bytes that the loader worked out per token and repairs invalid UTF-8. */
#include "text/tokenizer.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer_internal.h"

static const char lower_block[] = "\xE2\x96\x81"; /* U+2581, SentencePiece's space */

void token_list_fini(struct token_list *list)
{
  mem_free(list->ids);
  *list = (struct token_list){0};
}

bool token_list_push(struct token_list *list, int32_t id)
{
  if (list->n == list->capacity) {
    int64_t capacity = list->capacity ? list->capacity * 2 : 32;
    int32_t *ids = mem_realloc(list->ids, (size_t)capacity * sizeof *ids);
    if (!ids) return false;
    list->ids = ids;
    list->capacity = capacity;
  }
  list->ids[list->n++] = id;
  return true;
}

struct tokenizer *tokenizer_new(void)
{
  struct tokenizer *tokenizer = mem_calloc(1, sizeof *tokenizer);
  if (!tokenizer) return NULL;
  tokenizer->bos = tokenizer->eos = tokenizer->bpe.unk = -1;
  memset(tokenizer->bpe.byte_id, -1, sizeof tokenizer->bpe.byte_id);
  return tokenizer;
}

void tokenizer_destroy(struct tokenizer *tokenizer)
{
  if (!tokenizer) return;
  bpe_fini(&tokenizer->bpe);
  bpe_map_fini(&tokenizer->piece_map);
  bpe_strings_fini(&tokenizer->pieces);
  bpe_strings_fini(&tokenizer->decoded);
  mem_free(tokenizer->flags);
  norm_fini(&tokenizer->norm);
  pretok_fini(&tokenizer->pretok);
  added_set_fini(&tokenizer->added);
  added_set_fini(&tokenizer->added_normalized);
  added_set_fini(&tokenizer->added_written);
  token_list_fini(&tokenizer->prefix);
  token_list_fini(&tokenizer->suffix);
  token_list_fini(&tokenizer->ends);
  mem_free(tokenizer);
}

/* One call of tokenizer_encode. */
struct encoder {
  const struct tokenizer *tokenizer;
  struct token_list *out;
  bool skips_special;
  const bool *guards;          /* by byte of the text; NULL: none */
  struct buf norm[2];
  struct pretok_scratch pretok;
  struct bpe_scratch bpe;
};

static enum sits_status encode_word(void *context, const char *text, size_t n_bytes)
{
  struct encoder *enc = context;
  return bpe_encode(&enc->tokenizer->bpe, text, n_bytes, &enc->bpe, enc->out);
}

/* Cut before each U+2581 that does not follow another one, where that is exact. */
static enum sits_status encode_span(void *context, const char *text, size_t n_bytes)
{
  struct encoder *enc = context;
  size_t start = 0;
  enum sits_status status = SITS_OK;
  for (size_t at = 1; enc->tokenizer->cuts_before_space && at < n_bytes && !status;) {
    const char *found = memchr(text + at, lower_block[0], n_bytes - at);
    if (!found) break;
    at = (size_t)(found - text);
    bool is_space = at + 3 <= n_bytes && memcmp(found, lower_block, 3) == 0;
    if (is_space && !(at - start >= 3 && memcmp(found - 3, lower_block, 3) == 0)) {
      if (at > start) status = encode_word(enc, text + start, at - start);
      start = at;
    }
    at += is_space ? 3 : 1;
  }
  return status ? status : encode_word(enc, text + start, n_bytes - start);
}

static enum sits_status encode_pretokens(struct encoder *enc, const char *text, size_t n_bytes, bool at_start)
{
  pretok_emit *emit = enc->tokenizer->cuts_before_space ? encode_span : encode_word;
  return pretok_run(&enc->tokenizer->pretok, &enc->pretok, text, n_bytes, at_start, emit, enc);
}

/* Text between the tokens found in the raw input: normalise, then look for those added tokens that live in normalised text. */
static enum sits_status encode_normalized(struct encoder *enc, const char *raw, size_t n_raw, bool skips_special, bool at_start)
{
  const struct tokenizer *tokenizer = enc->tokenizer;
  const char *text;
  size_t n_bytes, done = 0;
  struct added_match match = {0};
  enum sits_status status = norm_run(&tokenizer->norm, raw, n_raw, enc->norm, &text, &n_bytes);
  while (!status && added_set_next(&tokenizer->added_normalized, text, n_bytes, skips_special, NULL, &match)) {
    if (match.start > done) status = encode_pretokens(enc, text + done, match.start - done, at_start && done == 0);
    if (!status && !token_list_push(enc->out, match.token->id)) status = SITS_NOMEM;
    done = match.end;
  }
  if (!status && done < n_bytes) status = encode_pretokens(enc, text + done, n_bytes - done, at_start && done == 0);
  return status;
}

/* Guards do not follow their text through the normaliser: where there are any, special tokens that live in normalised text are looked for
 * as they are written. */
static enum sits_status encode_raw_span(struct encoder *enc, const char *raw, size_t n_raw, const bool *guards, bool at_start)
{
  size_t done = 0;
  struct added_match match = {0};
  enum sits_status status = SITS_OK;
  if (!guards || !memchr(guards, true, n_raw)) return encode_normalized(enc, raw, n_raw, enc->skips_special, at_start);
  while (!status && added_set_next(&enc->tokenizer->added_written, raw, n_raw, enc->skips_special, guards, &match)) {
    if (match.start > done) status = encode_normalized(enc, raw + done, match.start - done, true, at_start && done == 0);
    if (!status && !token_list_push(enc->out, match.token->id)) status = SITS_NOMEM;
    done = match.end;
  }
  if (!status && done < n_raw) status = encode_normalized(enc, raw + done, n_raw - done, true, at_start && done == 0);
  return status;
}

static enum sits_status encode_text(struct encoder *enc, const char *text, size_t n_bytes)
{
  size_t done = 0;
  const bool *guards = enc->guards;
  struct added_match match = {0};
  enum sits_status status = SITS_OK;
  while (!status && added_set_next(&enc->tokenizer->added, text, n_bytes, enc->skips_special, guards, &match)) {
    if (match.start > done) status = encode_raw_span(enc, text + done, match.start - done, guards ? guards + done : NULL, done == 0);
    if (!status && !token_list_push(enc->out, match.token->id)) status = SITS_NOMEM;
    done = match.end;
  }
  if (!status && done < n_bytes) status = encode_raw_span(enc, text + done, n_bytes - done, guards ? guards + done : NULL, done == 0);
  return status;
}

static bool append_list(struct token_list *out, const struct token_list *more)
{
  for (int64_t i = 0; i < more->n; i++)
    if (!token_list_push(out, more->ids[i])) return false;
  return true;
}

bool tokenizer_append_valid(struct buf *out, const char *bytes, size_t n_bytes)
{
  size_t run = 0, length;
  for (size_t i = 0; i < n_bytes; i += length) {
    length = 1;
    if ((unsigned char)bytes[i] < 0x80 || utf8_sequence(bytes + i, n_bytes - i, &length) == UTF8_VALID) continue;
    if (!buf_append(out, bytes + run, i - run) || !buf_append(out, "\xEF\xBF\xBD", 3)) return false;
    run = i + length;
  }
  return buf_append(out, bytes + run, n_bytes - run);
}

enum sits_status tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                                  struct token_list *out)
{
  return tokenizer_encode_guarded(tokenizer, text, n_bytes, flags, NULL, out);
}

enum sits_status tokenizer_encode_guarded(const struct tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                                          const bool *guards, struct token_list *out)
{
  struct encoder enc = {.tokenizer = tokenizer, .out = out, .skips_special = !(flags & TOKENIZER_PARSE_SPECIAL), .guards = guards};
  struct buf repaired;
  int64_t n_before = out->n;
  enum sits_status status = SITS_OK;
  if (guards && !utf8_is_valid(text, n_bytes)) return SITS_INVALID_ARGUMENT;
  buf_init(&repaired, SIZE_MAX / 4);
  buf_init(&enc.norm[0], SIZE_MAX / 4);
  buf_init(&enc.norm[1], SIZE_MAX / 4);
  if (!utf8_is_valid(text, n_bytes)) {
    if (!tokenizer_append_valid(&repaired, text, n_bytes)) status = SITS_NOMEM;
    text = repaired.data;
    n_bytes = repaired.size;
  }
  if (!status && flags & TOKENIZER_ADD_SPECIAL && !append_list(out, &tokenizer->prefix)) status = SITS_NOMEM;
  if (!status) status = encode_text(&enc, text, n_bytes);
  if (!status && flags & TOKENIZER_ADD_SPECIAL && !append_list(out, &tokenizer->suffix)) status = SITS_NOMEM;
  if (status) out->n = n_before;
  pretok_scratch_fini(&enc.pretok);
  bpe_scratch_fini(&enc.bpe);
  buf_fini(&enc.norm[0]);
  buf_fini(&enc.norm[1]);
  buf_fini(&repaired);
  return status;
}

static bool exists(const struct tokenizer *tokenizer, int32_t id)
{
  return id >= 0 && id < tokenizer->n_vocab && tokenizer->flags[id] & TOKEN_EXISTS;
}

bool tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t id, bool skip_special, struct buf *out)
{
  size_t n;
  if (!exists(tokenizer, id) || (skip_special && tokenizer->flags[id] & TOKEN_SPECIAL)) return true;
  const char *bytes = bpe_string(&tokenizer->decoded, id, &n);
  return buf_append(out, bytes, n);
}

bool tokenizer_emit(const struct tokenizer *tokenizer, int32_t id, bool skip_special, struct decode_state *state, struct buf *out)
{
  size_t n;
  if (!exists(tokenizer, id) || (skip_special && tokenizer->flags[id] & TOKEN_SPECIAL)) return true;
  const char *bytes = bpe_string(&tokenizer->decoded, id, &n);
  if (state->has_started) return buf_append(out, bytes, n);
  if (tokenizer->first_drops[0]) {
    size_t width = strlen(tokenizer->first_drops);
    state->has_started = true;
    bytes = bpe_string(&tokenizer->pieces, id, &n);
    for (size_t i = 0; i < n; i++) {
      bool drops = n - i >= width && memcmp(bytes + i, tokenizer->first_drops, width) == 0;
      if (drops) i += width - 1;
      else if (!buf_append_char(out, bytes[i])) return false;
    }
    return true;
  }
  for (; n && *bytes == ' ' && state->n_stripped < tokenizer->strip_start; bytes++, n--) state->n_stripped++;
  state->has_started = n > 0 || state->n_stripped >= tokenizer->strip_start;
  return buf_append(out, bytes, n);
}

enum sits_status tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, int64_t n, bool skip_special, struct buf *out)
{
  struct decode_state state = {0};
  struct buf raw;
  bool ok = true;
  size_t size_before = out->size;
  buf_init(&raw, SIZE_MAX / 4);
  for (int64_t i = 0; i < n && ok; i++) ok = tokenizer_emit(tokenizer, ids[i], skip_special, &state, &raw);
  ok = ok && tokenizer_append_valid(out, raw.data, raw.size);
  if (!ok && out->data) {
    out->size = size_before;
    out->data[size_before] = '\0';
  }
  buf_fini(&raw);
  return ok ? SITS_OK : SITS_NOMEM;
}

int32_t tokenizer_n_vocab(const struct tokenizer *tokenizer) { return tokenizer->n_vocab; }
int32_t tokenizer_bos(const struct tokenizer *tokenizer) { return tokenizer->bos; }
int32_t tokenizer_eos(const struct tokenizer *tokenizer) { return tokenizer->eos; }
bool tokenizer_adds_bos(const struct tokenizer *tokenizer) { return tokenizer->adds_bos; }

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id)
{
  return exists(tokenizer, id) && tokenizer->flags[id] & TOKEN_SPECIAL;
}

const int32_t *tokenizer_end_tokens(const struct tokenizer *tokenizer, int32_t *n)
{
  *n = (int32_t)tokenizer->ends.n;
  return tokenizer->ends.ids;
}

const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id, size_t *n_bytes)
{
  return exists(tokenizer, id) ? bpe_string(&tokenizer->pieces, id, n_bytes) : NULL;
}

int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *piece, size_t n_bytes)
{
  return bpe_map_get(&tokenizer->piece_map, piece, n_bytes);
}

bool tokenizer_same(const struct tokenizer *a, const struct tokenizer *b, int32_t *id)
{
  const int32_t n_a = tokenizer_n_vocab(a), n_b = tokenizer_n_vocab(b);
  for (int32_t i = 0; i < n_a || i < n_b; i++) {
    size_t a_bytes = 0, b_bytes = 0;
    const char *x = i < n_a ? tokenizer_piece(a, i, &a_bytes) : NULL, *y = i < n_b ? tokenizer_piece(b, i, &b_bytes) : NULL;
    const bool is_same = (!x && !y) || (x && y && a_bytes == b_bytes && memcmp(x, y, a_bytes) == 0 &&
                                        tokenizer_is_special(a, i) == tokenizer_is_special(b, i));
    if (is_same) continue;
    *id = i;
    return false;
  }
  return true;
}
