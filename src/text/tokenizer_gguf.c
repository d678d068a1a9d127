/* tokenizer_load_gguf: a vocabulary in GGUF metadata. tokenizer.ggml.model "llama" is SentencePiece-style BPE whose merges are not listed:
 * any two neighbours whose joined text is a token may merge, the best score first. "gpt2" is byte-level BPE with a merge list and a
 * pre-tokenizer by name (tokenizer.ggml.pre). Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "tensor/gguf.h"
#include "text/tokenizer_gguf_pre.h"
#include "text/tokenizer_internal.h"

enum { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED, TYPE_UNUSED, TYPE_BYTE };

/* The vocabulary while it is read. */
struct reading {
  struct tokenizer *tokenizer;
  const struct gguf *gguf;
  unsigned char *types;          /* [n_vocab] */
  struct bpe_merge *merges;
  size_t n_merges, merge_capacity;
  struct sits_error *err;
};

static enum sits_status read_tokens(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  enum gguf_type type;
  uint64_t n, n_types = 0;
  size_t total = 0, at = 0;
  struct gguf_string text;
  if (!gguf_get_array(r->gguf, "tokenizer.ggml.tokens", &type, &n) || type != GGUF_STRING || n == 0 || n > TOKENIZER_MAX_VOCAB)
    return sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.tokens is missing or no list of 1 to %d strings", TOKENIZER_MAX_VOCAB);
  bool has_types = gguf_get_array(r->gguf, "tokenizer.ggml.token_type", &type, &n_types);
  if (has_types && n_types != n) return sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.token_type is not as long as tokens");
  tokenizer->n_vocab = (int32_t)n;
  tokenizer->flags = mem_calloc(n, 1);
  r->types = mem_calloc(n, 1);
  for (uint64_t i = 0; i < n; i++) {
    if (!gguf_array_string(r->gguf, "tokenizer.ggml.tokens", i, &text)) return sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.tokens");
    total += text.size;
  }
  if (!tokenizer->flags || !r->types || !bpe_strings_init(&tokenizer->pieces, (int32_t)n, total)) return SITS_NOMEM;
  for (uint64_t i = 0; i < n; i++) {
    int64_t kind = TYPE_NORMAL;
    if (!gguf_array_string(r->gguf, "tokenizer.ggml.tokens", i, &text)) return SITS_INTERNAL;
    if (has_types && !gguf_array_i64(r->gguf, "tokenizer.ggml.token_type", i, &kind)) kind = 0;
    if (kind < 0 || kind > TYPE_BYTE)
      return sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.token_type: entry %llu is unknown", (unsigned long long)i);
    if (!utf8_is_valid(text.data, text.size)) return sits_fail(r->err, SITS_FORMAT, "token %llu is not UTF-8", (unsigned long long)i);
    if (text.size) memcpy(tokenizer->pieces.bytes + at, text.data, text.size);
    at += text.size;
    tokenizer->pieces.start[i + 1] = (uint32_t)at;
    r->types[i] = (unsigned char)(kind ? kind : TYPE_NORMAL);
    tokenizer->flags[i] = TOKEN_EXISTS;
    if (kind == TYPE_CONTROL || kind == TYPE_UNKNOWN) tokenizer->flags[i] |= TOKEN_SPECIAL;
    else if (kind != TYPE_BYTE && kind != TYPE_UNUSED) tokenizer->flags[i] |= TOKEN_IN_MODEL;
  }
  return SITS_OK;
}

/* What one token decodes to. */
static bool decode_token(const struct reading *r, int32_t id, struct buf *out)
{
  size_t n, n_raw;
  const char *piece = bpe_string(&r->tokenizer->pieces, id, &n);
  int byte;
  if (r->types[id] == TYPE_CONTROL || r->types[id] == TYPE_UNKNOWN || r->types[id] == TYPE_USER_DEFINED) return buf_append(out, piece, n);
  if (r->tokenizer->bpe.is_byte_level) {
    if (!buf_reserve(out, n)) return false;
    if (!tokenizer_alphabet_decode(piece, n, out->data + out->size, &n_raw)) return buf_append(out, piece, n);
    out->size += n_raw;
    return true;
  }
  if (r->types[id] == TYPE_BYTE && (byte = tokenizer_byte_piece(piece, n)) >= 0) return buf_append_char(out, (char)byte);
  for (size_t i = 0; i < n; i++) {
    bool is_space = n - i >= 3 && memcmp(piece + i, "\xE2\x96\x81", 3) == 0;
    if (!buf_append_char(out, is_space ? ' ' : piece[i])) return false;
    if (is_space) i += 2;
  }
  return true;
}

static enum sits_status build_decoded(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  struct buf all;
  buf_init(&all, UINT32_MAX - 1);
  tokenizer->decoded.start = mem_calloc((size_t)tokenizer->n_vocab + 1, sizeof *tokenizer->decoded.start);
  tokenizer->decoded.n = tokenizer->n_vocab;
  bool ok = tokenizer->decoded.start && buf_reserve(&all, tokenizer->pieces.start[tokenizer->n_vocab]);
  for (int32_t id = 0; id < tokenizer->n_vocab && ok; id++) {
    ok = decode_token(r, id, &all);
    tokenizer->decoded.start[id + 1] = (uint32_t)all.size;
  }
  if (ok) tokenizer->decoded.bytes = buf_take(&all, NULL);
  buf_fini(&all);
  return ok && tokenizer_index_pieces(tokenizer) ? SITS_OK : SITS_NOMEM;
}

/* Control and user-defined tokens are cut out of the text; only the first need TOKENIZER_PARSE_SPECIAL. */
static enum sits_status build_added(struct reading *r)
{
  for (int32_t id = 0; id < r->tokenizer->n_vocab; id++) {
    size_t n;
    const char *piece = bpe_string(&r->tokenizer->pieces, id, &n);
    bool is_special = r->tokenizer->flags[id] & TOKEN_SPECIAL;
    if (!is_special && r->types[id] != TYPE_USER_DEFINED) continue;
    if (!added_set_add(&r->tokenizer->added, piece, n, id, is_special ? ADDED_SPECIAL : 0)) return SITS_NOMEM;
  }
  return SITS_OK;
}

static bool push_merge(struct reading *r, int32_t left, int32_t right, int32_t id, uint32_t rank)
{
  if (r->n_merges == r->merge_capacity) {
    size_t capacity = r->merge_capacity ? r->merge_capacity * 2 : 1024;
    struct bpe_merge *grown = mem_realloc(r->merges, capacity * sizeof *grown);
    if (!grown) return false;
    r->merges = grown;
    r->merge_capacity = capacity;
  }
  r->merges[r->n_merges++] = (struct bpe_merge){left, right, id, rank};
  return true;
}

/* "left right" lines of tokenizer.ggml.merges; the space that parts them is the first one behind the first character. */
static enum sits_status read_merge_list(struct reading *r)
{
  enum gguf_type type;
  uint64_t n;
  struct gguf_string text;
  const struct bpe_map *map = &r->tokenizer->piece_map;
  struct buf joined;
  enum sits_status status = SITS_NOMEM;
  buf_init(&joined, SIZE_MAX / 4);
  if (!gguf_get_array(r->gguf, "tokenizer.ggml.merges", &type, &n) || type != GGUF_STRING || n > UINT32_MAX - 1) {
    status = sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.merges is missing or no list of strings");
    goto out;
  }
  for (uint64_t i = 0; i < n; i++) {
    const char *space = NULL;
    if (gguf_array_string(r->gguf, "tokenizer.ggml.merges", i, &text) && text.size > 2) space = memchr(text.data + 1, ' ', text.size - 1);
    if (!space) {
      status = sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.merges: entry %llu is no pair", (unsigned long long)i);
      goto out;
    }
    size_t n_left = (size_t)(space - text.data), n_right = text.size - n_left - 1;
    buf_clear(&joined);
    if (!buf_append(&joined, text.data, n_left) || !buf_append(&joined, space + 1, n_right)) goto out;
    int32_t left = bpe_map_get(map, text.data, n_left), right = bpe_map_get(map, space + 1, n_right);
    int32_t id = bpe_map_get(map, joined.data, joined.size);
    if (left < 0 || right < 0 || id < 0 || r->tokenizer->flags[id] & TOKEN_SPECIAL) continue; /* can never happen in text, or must not */
    if (!push_merge(r, left, right, id, (uint32_t)i)) goto out;
  }
  status = SITS_OK;
out:
  buf_fini(&joined);
  return status;
}

struct scored { float score; int32_t id; };

static int by_score_down(const void *a, const void *b)
{
  const struct scored *x = a, *y = b;
  if (x->score != y->score) return x->score > y->score ? -1 : 1;
  return x->id < y->id ? -1 : x->id > y->id;
}

/* Ranks from scores: equal scores share a rank, so that position alone decides between them. */
static enum sits_status rank_scores(struct reading *r, uint32_t *rank)
{
  enum gguf_type type;
  uint64_t n;
  int32_t n_vocab = r->tokenizer->n_vocab;
  if (!gguf_get_array(r->gguf, "tokenizer.ggml.scores", &type, &n) || n != (uint64_t)n_vocab)
    return sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.scores is missing or not as long as tokens");
  struct scored *list = mem_alloc(n * sizeof *list);
  if (!list) return SITS_NOMEM;
  enum sits_status status = SITS_OK;
  for (int32_t id = 0; id < n_vocab && !status; id++) {
    double score;
    if (!gguf_array_f64(r->gguf, "tokenizer.ggml.scores", (uint64_t)id, &score) || isnan(score))
      status = sits_fail(r->err, SITS_FORMAT, "tokenizer.ggml.scores: entry %d is no number", id);
    else list[id] = (struct scored){(float)score, id};
  }
  if (!status) {
    uint32_t now = 0;
    qsort(list, (size_t)n_vocab, sizeof *list, by_score_down);
    for (int32_t i = 0; i < n_vocab; i++) {
      if (i && list[i].score != list[i - 1].score) now++;
      rank[list[i].id] = now;
    }
  }
  mem_free(list);
  return status;
}

/* Characters that occur in pieces without being tokens get ids behind the vocabulary, so that merges can name them. */
static enum sits_status find_extra(struct reading *r, const struct bpe_map *map)
{
  struct bpe *bpe = &r->tokenizer->bpe;
  struct buf bytes;
  struct token_list starts = {0};
  size_t length;
  buf_init(&bytes, UINT32_MAX - 1);
  bool ok = token_list_push(&starts, 0);
  for (int32_t id = 0; id < r->tokenizer->n_vocab && ok; id++) {
    size_t n;
    const char *piece = bpe_string(&r->tokenizer->pieces, id, &n);
    if (!(r->tokenizer->flags[id] & TOKEN_IN_MODEL) || r->types[id] == TYPE_USER_DEFINED) continue;
    for (size_t i = 0; i < n && ok; i += length) {
      utf8_sequence(piece + i, n - i, &length);
      if (bpe_map_get(map, piece + i, length) >= 0) continue;
      bool is_known = false; /* characters without a token are a handful in real vocabularies */
      for (int64_t k = 0; k + 1 < starts.n && k < 4096 && !is_known; k++)
        is_known = (size_t)(starts.ids[k + 1] - starts.ids[k]) == length && memcmp(bytes.data + starts.ids[k], piece + i, length) == 0;
      if (!is_known) ok = buf_append(&bytes, piece + i, length) && token_list_push(&starts, (int32_t)bytes.size);
    }
  }
  ok = ok && bpe_strings_init(&bpe->extra, (int32_t)starts.n - 1, bytes.size);
  if (ok) {
    if (bytes.size) memcpy(bpe->extra.bytes, bytes.data, bytes.size);
    for (int64_t i = 0; i < starts.n; i++) bpe->extra.start[i] = (uint32_t)starts.ids[i];
    ok = bpe_map_init(&bpe->extra_map, &bpe->extra, NULL);
  }
  token_list_fini(&starts);
  buf_fini(&bytes);
  return ok ? SITS_OK : SITS_NOMEM;
}

static int32_t symbol_of(const struct reading *r, const struct bpe_map *map, const char *text, size_t n)
{
  int32_t id = bpe_map_get(map, text, n);
  if (id >= 0) return id;
  id = bpe_map_get(&r->tokenizer->bpe.extra_map, text, n);
  return id < 0 ? -1 : r->tokenizer->n_vocab + id;
}

/* All pairs of symbols whose joined text is an ordinary token. */
static enum sits_status derive_merges(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  int32_t n_vocab = tokenizer->n_vocab;
  struct bpe_map map = {0};
  bool *wants = mem_calloc((size_t)n_vocab, sizeof *wants);
  uint32_t *rank = mem_calloc((size_t)n_vocab, sizeof *rank);
  enum sits_status status = wants && rank ? rank_scores(r, rank) : SITS_NOMEM;
  size_t n, length;
  for (int32_t id = 0; id < n_vocab && !status; id++) {
    bpe_string(&tokenizer->pieces, id, &n);
    if (r->types[id] == TYPE_USER_DEFINED) tokenizer->flags[id] &= (unsigned char)~TOKEN_IN_MODEL; /* cut out of the text, never merged */
    wants[id] = tokenizer->flags[id] & TOKEN_IN_MODEL && n > 0;
  }
  if (!status && !bpe_map_init(&map, &tokenizer->pieces, wants)) status = SITS_NOMEM;
  if (!status) status = find_extra(r, &map);
  for (int32_t id = 0; id < n_vocab && !status; id++) {
    const char *piece = bpe_string(&tokenizer->pieces, id, &n);
    if (!wants[id] || bpe_map_get(&map, piece, n) != id) continue;
    for (size_t i = 0; i < n && !status; i += length) {
      utf8_sequence(piece + i, n - i, &length);
      int32_t left = i ? symbol_of(r, &map, piece, i) : -1, right = left < 0 ? -1 : symbol_of(r, &map, piece + i, n - i);
      if (right >= 0 && !push_merge(r, left, right, id, rank[id])) status = SITS_NOMEM;
    }
  }
  bpe_map_fini(&map);
  mem_free(wants);
  mem_free(rank);
  return status;
}

/* An id under a key; out of range counts as absent (files write 0xFFFFFFFF for "none"). */
static int32_t id_at(const struct reading *r, const char *key)
{
  uint64_t id;
  return gguf_get_u64(r->gguf, key, &id) && id < (uint64_t)r->tokenizer->n_vocab ? (int32_t)id : -1;
}

static enum sits_status read_special_ids(struct reading *r, bool adds_bos)
{
  static const char *const more_ends[] = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
  struct tokenizer *tokenizer = r->tokenizer;
  bool adds_eos = false;
  tokenizer->bos = id_at(r, "tokenizer.ggml.bos_token_id");
  tokenizer->eos = id_at(r, "tokenizer.ggml.eos_token_id");
  if (!tokenizer->bpe.is_byte_level) {
    if (tokenizer->bos < 0) tokenizer->bos = tokenizer_find(tokenizer, "<s>", 3);
    if (tokenizer->eos < 0) tokenizer->eos = tokenizer_find(tokenizer, "</s>", 4);
  }
  gguf_get_bool(r->gguf, "tokenizer.ggml.add_bos_token", &adds_bos);
  gguf_get_bool(r->gguf, "tokenizer.ggml.add_eos_token", &adds_eos);
  tokenizer->adds_bos = adds_bos && tokenizer->bos >= 0;
  if (tokenizer->adds_bos && !token_list_push(&tokenizer->prefix, tokenizer->bos)) return SITS_NOMEM;
  if (adds_eos && tokenizer->eos >= 0 && !token_list_push(&tokenizer->suffix, tokenizer->eos)) return SITS_NOMEM;
  if (!tokenizer_add_end(tokenizer, tokenizer->eos)) return SITS_NOMEM;
  for (int i = 0; i < 2; i++)
    if (!tokenizer_add_end(tokenizer, id_at(r, more_ends[i]))) return SITS_NOMEM;
  return tokenizer_add_known_ends(tokenizer) ? SITS_OK : SITS_NOMEM;
}

static enum sits_status load_sentencepiece(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  bool adds_space = true;
  gguf_get_bool(r->gguf, "tokenizer.ggml.add_space_prefix", &adds_space);
  tokenizer->bpe.byte_fallback = tokenizer->bpe.fuse_unk = true;
  tokenizer->strip_start = adds_space ? 1 : 0;
  enum sits_status status = build_decoded(r);
  if (!status && adds_space) status = norm_add(&tokenizer->norm, NORM_PREPEND, NULL, 0, "\xE2\x96\x81", 3, r->err);
  if (!status) status = norm_add(&tokenizer->norm, NORM_REPLACE, " ", 1, "\xE2\x96\x81", 3, r->err);
  if (!status) status = derive_merges(r);
  if (!status) status = tokenizer_seal(tokenizer, r->merges, r->n_merges, r->err);
  tokenizer->bpe.unk = id_at(r, "tokenizer.ggml.unknown_token_id");
  if (!status) status = build_added(r);
  return status ? status : read_special_ids(r, true);
}

static enum sits_status load_byte_level(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  struct gguf_string pre = {"default", 7};
  bool adds_bos = false;
  gguf_get_string(r->gguf, "tokenizer.ggml.pre", &pre);
  tokenizer->bpe.is_byte_level = true;
  enum sits_status status = tokenizer_gguf_pre(tokenizer, pre.data, pre.size, &adds_bos, r->err);
  if (!status) status = build_decoded(r);
  if (!status) status = read_merge_list(r);
  if (!status) status = tokenizer_seal(tokenizer, r->merges, r->n_merges, r->err);
  /* A byte that is no token keeps its neighbours apart and leaves nothing, as in llama.cpp. */
  for (int byte = 0; byte < 256 && !status; byte++)
    if (tokenizer->bpe.byte_id[byte] < 0) tokenizer->bpe.byte_id[byte] = tokenizer->n_vocab + byte;
  if (!status) status = build_added(r);
  return status ? status : read_special_ids(r, adds_bos);
}

enum sits_status tokenizer_load_gguf(const struct gguf *gguf, struct tokenizer **out, struct sits_error *err)
{
  struct sits_error inner = {0};
  struct reading r = {.gguf = gguf, .err = &inner, .tokenizer = tokenizer_new()};
  struct gguf_string model = {"", 0};
  enum sits_status status = r.tokenizer ? SITS_OK : SITS_NOMEM;
  bool has_model = gguf_get_string(gguf, "tokenizer.ggml.model", &model);
  bool is_llama = model.size == 5 && memcmp(model.data, "llama", 5) == 0, is_gpt2 = model.size == 4 && memcmp(model.data, "gpt2", 4) == 0;
  if (!status && !has_model) status = sits_fail(&inner, SITS_FORMAT, "tokenizer.ggml.model is missing");
  if (!status && !is_llama && !is_gpt2)
    status = sits_fail(&inner, SITS_UNSUPPORTED, "tokenizer.ggml.model %.*s is not supported, only gpt2 and llama are",
                       model.size < 64 ? (int)model.size : 64, model.data);
  if (!status) status = read_tokens(&r);
  if (!status) status = is_llama ? load_sentencepiece(&r) : load_byte_level(&r);
  if (!status) {
    *out = r.tokenizer;
    r.tokenizer = NULL;
  } else {
    sits_fail(err, status, "GGUF vocabulary: %s", inner.text[0] ? inner.text : "out of memory");
  }
  tokenizer_destroy(r.tokenizer);
  mem_free(r.types);
  mem_free(r.merges);
  return status;
}
