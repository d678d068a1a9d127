/* tokenizer_load_json: a Hugging Face tokenizer.json with a BPE model. The format has no written specification; the reference is the
 * tokenizers library's own serialisation. Components are read in tokenizer_json_steps.c. */
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/tokenizer_json.h"

/* The file while it is read: token texts by id, borrowed from the JSON. */
struct reading {
  struct tokenizer *tokenizer;
  const json_t *root, *model, *added;
  const char **text;   /* [n_vocab] NULL: no such id */
  uint32_t *n_bytes;   /* [n_vocab] */
  struct bpe_merge *merges;
  size_t n_merges;
  struct decoder decoder;
  struct sits_error *err;
};

static enum sits_status check_model(struct reading *r)
{
  const json_t *model = r->model = json_object_get(r->root, "model");
  struct bpe *bpe = &r->tokenizer->bpe;
  if (!json_is_object(model)) return sits_fail(r->err, SITS_FORMAT, "tokenizer.json: no model");
  const char *type = tokenizer_json_type(model);
  bool is_bpe = strcmp(type, "BPE") == 0 || (!*type && json_object_get(model, "merges")); /* old files have no type */
  if (!is_bpe) return sits_fail(r->err, SITS_UNSUPPORTED, "tokenizer.json: model %.64s is not supported, only BPE is", *type ? type : "?");
  static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
  for (int i = 0; i < 2; i++) {
    const char *affix = json_string_value(json_object_get(model, affixes[i]));
    if (affix && *affix) return sits_fail(r->err, SITS_UNSUPPORTED, "tokenizer.json: model BPE with %s is not supported", affixes[i]);
  }
  if (json_number_value(json_object_get(model, "dropout")) != 0)
    return sits_fail(r->err, SITS_UNSUPPORTED, "tokenizer.json: model BPE with dropout is not supported");
  bpe->ignore_merges = tokenizer_json_bool(model, "ignore_merges", false);
  bpe->byte_fallback = tokenizer_json_bool(model, "byte_fallback", false);
  bpe->fuse_unk = tokenizer_json_bool(model, "fuse_unk", false);
  if (!json_is_object(json_object_get(model, "vocab"))) return sits_fail(r->err, SITS_FORMAT, "tokenizer.json: model without a vocab");
  if (!json_is_array(json_object_get(model, "merges"))) return sits_fail(r->err, SITS_FORMAT, "tokenizer.json: model without merges");
  r->added = json_object_get(r->root, "added_tokens");
  if (r->added && !json_is_null(r->added) && !json_is_array(r->added))
    return sits_fail(r->err, SITS_FORMAT, "tokenizer.json: added_tokens is no list");
  return SITS_OK;
}

static enum sits_status bad_id(struct reading *r, const char *where)
{
  return sits_fail(r->err, SITS_FORMAT, "tokenizer.json: %s: an id is missing, no integer, out of range or taken by another token", where);
}

static bool is_id(const json_t *value)
{
  return json_is_integer(value) && json_integer_value(value) >= 0 && json_integer_value(value) < TOKENIZER_MAX_VOCAB;
}

/* Largest id, then texts by id. */
static enum sits_status read_vocab(struct reading *r)
{
  json_t *vocab = json_object_get(r->model, "vocab");
  json_int_t largest = -1;
  size_t i;
  const json_t *item;
  for (void *at = json_object_iter(vocab); at; at = json_object_iter_next(vocab, at)) {
    const json_t *id = json_object_iter_value(at);
    if (!is_id(id)) return bad_id(r, "vocab");
    if (json_integer_value(id) > largest) largest = json_integer_value(id);
  }
  json_array_foreach(r->added, i, item) {
    const json_t *id = json_object_get(item, "id");
    if (!is_id(id) || !json_is_string(json_object_get(item, "content"))) return bad_id(r, "added_tokens");
    if (json_integer_value(id) > largest) largest = json_integer_value(id);
  }
  int32_t n = r->tokenizer->n_vocab = (int32_t)largest + 1;
  if (n == 0) return sits_fail(r->err, SITS_FORMAT, "tokenizer.json: empty vocab");
  r->text = mem_calloc((size_t)n, sizeof *r->text);
  r->n_bytes = mem_calloc((size_t)n, sizeof *r->n_bytes);
  r->tokenizer->flags = mem_calloc((size_t)n, 1);
  if (!r->text || !r->n_bytes || !r->tokenizer->flags) return SITS_NOMEM;
  for (void *at = json_object_iter(vocab); at; at = json_object_iter_next(vocab, at)) {
    json_int_t id = json_integer_value(json_object_iter_value(at));
    if (r->text[id]) return bad_id(r, "vocab");
    r->text[id] = json_object_iter_key(at);
    r->n_bytes[id] = (uint32_t)json_object_iter_key_len(at);
    r->tokenizer->flags[id] = TOKEN_EXISTS | TOKEN_IN_MODEL;
  }
  return SITS_OK;
}

/* Give added tokens their place; the sets that are searched are built once the normaliser is known. */
static enum sits_status place_added(struct reading *r)
{
  size_t i;
  const json_t *item;
  json_array_foreach(r->added, i, item) {
    const json_t *content = json_object_get(item, "content");
    int32_t id = (int32_t)json_integer_value(json_object_get(item, "id"));
    const char *text = json_string_value(content);
    size_t n = json_string_length(content);
    if (r->text[id] && (r->n_bytes[id] != n || memcmp(r->text[id], text, n) != 0)) return bad_id(r, "added_tokens");
    r->text[id] = text;
    r->n_bytes[id] = (uint32_t)n;
    r->tokenizer->flags[id] |= TOKEN_EXISTS;
    if (tokenizer_json_bool(item, "special", false)) r->tokenizer->flags[id] |= TOKEN_SPECIAL;
  }
  return SITS_OK;
}

static enum sits_status build_strings(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  int32_t n = tokenizer->n_vocab;
  size_t total = 0, at = 0;
  for (int32_t id = 0; id < n; id++) total += r->n_bytes[id];
  if (!bpe_strings_init(&tokenizer->pieces, n, total)) return SITS_NOMEM;
  for (int32_t id = 0; id < n; id++) {
    if (r->text[id]) memcpy(tokenizer->pieces.bytes + at, r->text[id], r->n_bytes[id]);
    at += r->n_bytes[id];
    tokenizer->pieces.start[id + 1] = (uint32_t)at;
  }
  struct buf scratch[2], all;
  buf_init(&scratch[0], SIZE_MAX / 4);
  buf_init(&scratch[1], SIZE_MAX / 4);
  buf_init(&all, UINT32_MAX - 1);
  bool ok = (tokenizer->decoded.start = mem_calloc((size_t)n + 1, sizeof *tokenizer->decoded.start)) != NULL && buf_reserve(&all, total);
  for (int32_t id = 0; id < n && ok; id++) {
    if (r->text[id]) ok = tokenizer_json_decode_token(&r->decoder, r->text[id], r->n_bytes[id], scratch, &all);
    tokenizer->decoded.start[id + 1] = (uint32_t)all.size;
  }
  tokenizer->decoded.n = n;
  if (ok) tokenizer->decoded.bytes = buf_take(&all, NULL);
  buf_fini(&all);
  buf_fini(&scratch[0]);
  buf_fini(&scratch[1]);
  return ok && tokenizer_index_pieces(tokenizer) ? SITS_OK : SITS_NOMEM;
}

/* Both texts of a merge, "a b" or ["a", "b"]. */
static bool merge_texts(const json_t *value, const char *text[2], size_t n[2])
{
  if (json_is_string(value)) {
    size_t total = json_string_length(value);
    text[0] = json_string_value(value);
    const char *space = memchr(text[0], ' ', total);
    if (!space) return false;
    n[0] = (size_t)(space - text[0]);
    text[1] = space + 1;
    n[1] = total - n[0] - 1;
    return memchr(text[1], ' ', n[1]) == NULL;
  }
  if (!json_is_array(value) || json_array_size(value) != 2) return false;
  for (int i = 0; i < 2; i++) {
    const json_t *part = json_array_get(value, (size_t)i);
    if (!json_is_string(part)) return false;
    text[i] = json_string_value(part);
    n[i] = json_string_length(part);
  }
  return true;
}

static enum sits_status read_merges(struct reading *r)
{
  const json_t *list = json_object_get(r->model, "merges"), *item;
  size_t i, rank = 0;
  enum sits_status status = SITS_NOMEM;
  struct buf joined;
  const struct bpe_map *map = &r->tokenizer->piece_map;
  buf_init(&joined, SIZE_MAX / 4);
  r->merges = mem_alloc((json_array_size(list) + 1) * sizeof *r->merges);
  if (!r->merges) goto out;
  json_array_foreach(list, i, item) {
    const char *text[2];
    size_t n[2];
    if (!merge_texts(item, text, n)) {
      status = sits_fail(r->err, SITS_FORMAT, "tokenizer.json: merge %zu is no pair", i);
      goto out;
    }
    buf_clear(&joined);
    if (!buf_append(&joined, text[0], n[0]) || !buf_append(&joined, text[1], n[1])) goto out;
    int32_t left = bpe_map_get(map, text[0], n[0]), right = bpe_map_get(map, text[1], n[1]);
    int32_t id = bpe_map_get(map, joined.data, joined.size);
    if (left < 0 || right < 0 || id < 0) {
      status = sits_fail(r->err, SITS_FORMAT, "tokenizer.json: merge %zu has a token that is not in the vocab", i);
      goto out;
    }
    if (r->tokenizer->flags[id] & TOKEN_SPECIAL) continue; /* plain text never becomes a special token */
    r->merges[r->n_merges++] = (struct bpe_merge){left, right, id, (uint32_t)rank++};
  }
  status = SITS_OK;
out:
  buf_fini(&joined);
  return status;
}

static enum sits_status read_unk(struct reading *r)
{
  const json_t *unk = json_object_get(r->model, "unk_token");
  if (!json_is_string(unk)) return SITS_OK;
  for (int32_t id = 0; id < r->tokenizer->n_vocab; id++) {
    if (!(r->tokenizer->flags[id] & TOKEN_IN_MODEL) || r->n_bytes[id] != json_string_length(unk)) continue;
    if (memcmp(r->text[id], json_string_value(unk), r->n_bytes[id]) == 0) r->tokenizer->bpe.unk = id;
  }
  return r->tokenizer->bpe.unk >= 0 ? SITS_OK : sits_fail(r->err, SITS_FORMAT, "tokenizer.json: unk_token is not in the vocab");
}

static enum sits_status build_added(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  size_t i;
  const json_t *item;
  enum sits_status status = SITS_OK;
  struct buf scratch[2];
  buf_init(&scratch[0], SIZE_MAX / 4);
  buf_init(&scratch[1], SIZE_MAX / 4);
  json_array_foreach(r->added, i, item) {
    const json_t *content = json_object_get(item, "content");
    const char *text = json_string_value(content);
    size_t n = json_string_length(content);
    bool is_special = tokenizer_json_bool(item, "special", false), is_normalized = tokenizer_json_bool(item, "normalized", !is_special);
    unsigned flags = is_special ? ADDED_SPECIAL : 0;
    if (tokenizer_json_bool(item, "lstrip", false)) flags |= ADDED_LSTRIP;
    if (tokenizer_json_bool(item, "rstrip", false)) flags |= ADDED_RSTRIP;
    if (tokenizer_json_bool(item, "single_word", false)) flags |= ADDED_SINGLE_WORD;
    int32_t id = (int32_t)json_integer_value(json_object_get(item, "id"));
    if (is_normalized && is_special && !added_set_add(&tokenizer->added_written, text, n, id, flags)) status = SITS_NOMEM;
    if (!status && is_normalized) status = norm_run(&tokenizer->norm, text, n, scratch, &text, &n);
    if (status) break;
    if (!added_set_add(is_normalized ? &tokenizer->added_normalized : &tokenizer->added, text, n, id, flags)) {
      status = SITS_NOMEM;
      break;
    }
  }
  buf_fini(&scratch[0]);
  buf_fini(&scratch[1]);
  return status;
}

static enum sits_status read_all(struct reading *r)
{
  struct tokenizer *tokenizer = r->tokenizer;
  enum sits_status status = check_model(r);
  if (!status) status = read_vocab(r);
  if (!status) status = place_added(r);
  if (!status) status = read_unk(r);
  if (!status) status = tokenizer_json_normalizer(tokenizer, json_object_get(r->root, "normalizer"), r->err);
  if (!status) status = tokenizer_json_pre_tokenizer(tokenizer, json_object_get(r->root, "pre_tokenizer"), r->err);
  if (!status) status = tokenizer_json_decoder(tokenizer, json_object_get(r->root, "decoder"), &r->decoder, r->err);
  if (!status) status = build_strings(r);
  if (!status) status = read_merges(r);
  if (!status) status = tokenizer_seal(tokenizer, r->merges, r->n_merges, r->err);
  if (!status) status = build_added(r);
  if (!status) status = tokenizer_json_post_processor(tokenizer, json_object_get(r->root, "post_processor"), r->err);
  if (!status && tokenizer->prefix.n) { /* tokenizer_config.json may name another one */
    tokenizer->bos = tokenizer->prefix.ids[0];
    tokenizer->adds_bos = true;
  }
  if (!status && !tokenizer_add_known_ends(tokenizer)) status = SITS_NOMEM;
  return status;
}

static enum sits_status build(const json_t *root, const char *path, struct tokenizer **out, struct sits_error *err)
{
  struct sits_error inner = {0};
  struct reading r = {.err = &inner, .root = root};
  enum sits_status status;
  r.tokenizer = tokenizer_new();
  status = r.tokenizer ? read_all(&r) : SITS_NOMEM;
  if (!status) {
    *out = r.tokenizer;
    r.tokenizer = NULL;
  } else {
    sits_fail(err, status, "%s: %s", path, inner.text[0] ? inner.text : "out of memory");
  }
  tokenizer_destroy(r.tokenizer);
  mem_free(r.text);
  mem_free(r.n_bytes);
  mem_free(r.merges);
  return status;
}

enum sits_status tokenizer_load_json(const char *path, struct tokenizer **out, struct sits_error *err)
{
  json_t *root = NULL;
  enum sits_status status = json_parse_file(path, &json_limits_file, &root, err);
  if (!status) status = build(root, path, out, err);
  json_decref(root);
  return status;
}

enum sits_status tokenizer_parse_json(const char *text, size_t n_bytes, const char *name, struct tokenizer **out, struct sits_error *err)
{
  json_t *root = NULL;
  struct sits_error inner = {0};
  enum sits_status status = json_parse(text, n_bytes, &json_limits_file, &root, &inner);
  if (status) return sits_fail(err, status, "%s: %s", name, inner.text);
  status = build(root, name, out, err);
  json_decref(root);
  return status;
}
