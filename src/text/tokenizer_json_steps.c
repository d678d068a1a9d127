/* Normalizer, pre_tokenizer, decoder and post_processor of a tokenizer.json. Each component is either understood exactly or refused by its
 * name; nothing is skipped in silence. To add one: a branch in the reader here, the work in tokenizer_normalize.c or pretok.c. */
#include <string.h>

#include "base/utf8.h"
#include "text/tokenizer_json.h"

enum { MAX_DEPTH = 8 };

const char *tokenizer_json_type(const json_t *value)
{
  const char *type = json_string_value(json_object_get(value, "type"));
  return type ? type : "";
}

bool tokenizer_json_bool(const json_t *value, const char *key, bool fallback)
{
  const json_t *member = json_object_get(value, key);
  return json_is_boolean(member) ? json_is_true(member) : fallback;
}

static enum sits_status refuse(struct sits_error *err, const char *what, const char *type)
{
  if (!*type) return sits_fail(err, SITS_FORMAT, "tokenizer.json: %s without a type", what);
  return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: %s %.64s is not supported", what, type);
}

/* {"String": s} or {"Regex": s}. */
static const json_t *pattern_of(const json_t *value, bool *is_literal)
{
  const json_t *pattern = json_object_get(value, "pattern");
  const json_t *literal = json_object_get(pattern, "String"), *regex = json_object_get(pattern, "Regex");
  *is_literal = literal != NULL;
  return json_is_string(literal) ? literal : json_is_string(regex) ? regex : NULL;
}

static enum sits_status read_normalizer(struct tokenizer *tokenizer, const json_t *value, int depth, struct sits_error *err)
{
  const char *type = tokenizer_json_type(value);
  struct norm *norm = &tokenizer->norm;
  enum sits_status status = SITS_OK;
  if (!value || json_is_null(value)) return SITS_OK;
  if (strcmp(type, "Sequence") == 0) {
    size_t i;
    const json_t *item, *list = json_object_get(value, "normalizers");
    if (!json_is_array(list) || depth >= MAX_DEPTH) return sits_fail(err, SITS_FORMAT, "tokenizer.json: normalizer Sequence");
    json_array_foreach(list, i, item) {
      if ((status = read_normalizer(tokenizer, item, depth + 1, err))) break;
    }
    return status;
  }
  if (strcmp(type, "NFC") == 0) return norm_add(norm, NORM_NFC, NULL, 0, NULL, 0, err);
  if (strcmp(type, "NFD") == 0) return norm_add(norm, NORM_NFD, NULL, 0, NULL, 0, err);
  if (strcmp(type, "Strip") == 0) {
    status = norm_add(norm, NORM_STRIP, NULL, 0, NULL, 0, err);
    if (status) return status;
    norm->steps[norm->n - 1].left = tokenizer_json_bool(value, "strip_left", true);
    norm->steps[norm->n - 1].right = tokenizer_json_bool(value, "strip_right", true);
    return SITS_OK;
  }
  if (strcmp(type, "Prepend") == 0) {
    const json_t *text = json_object_get(value, "prepend");
    if (!json_is_string(text)) return sits_fail(err, SITS_FORMAT, "tokenizer.json: normalizer Prepend without a text");
    return norm_add(norm, NORM_PREPEND, NULL, 0, json_string_value(text), json_string_length(text), err);
  }
  if (strcmp(type, "Replace") == 0) {
    bool is_literal;
    const json_t *pattern = pattern_of(value, &is_literal), *content = json_object_get(value, "content");
    if (!pattern || !json_is_string(content)) return sits_fail(err, SITS_FORMAT, "tokenizer.json: normalizer Replace: pattern or content");
    if (!is_literal || json_string_length(pattern) == 0)
      return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: normalizer Replace by a regular expression is not supported");
    return norm_add(norm, NORM_REPLACE, json_string_value(pattern), json_string_length(pattern), json_string_value(content),
                    json_string_length(content), err);
  }
  return refuse(err, "normalizer", type);
}

enum sits_status tokenizer_json_normalizer(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err)
{
  return read_normalizer(tokenizer, value, 0, err);
}

static enum sits_status read_behavior(const json_t *value, enum pretok_behavior *out, struct sits_error *err)
{
  static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  const char *name = json_string_value(json_object_get(value, "behavior"));
  for (int i = 0; name && i < 5; i++) {
    if (strcmp(name, names[i]) != 0) continue;
    *out = (enum pretok_behavior)i;
    return SITS_OK;
  }
  return sits_fail(err, SITS_FORMAT, "tokenizer.json: pre_tokenizer %.32s: bad behavior", tokenizer_json_type(value));
}

/* The replacement character and prepend scheme of a Metaspace; older files have add_prefix_space instead of the scheme. */
static enum sits_status read_metaspace(const json_t *value, struct pretok_step *step, struct sits_error *err)
{
  const char *replacement = json_string_value(json_object_get(value, "replacement"));
  const char *scheme = json_string_value(json_object_get(value, "prepend_scheme"));
  size_t length = 0;
  if (!replacement) replacement = "\xE2\x96\x81";
  if (!*replacement || utf8_sequence(replacement, strlen(replacement), &length) != UTF8_VALID || replacement[length])
    return sits_fail(err, SITS_FORMAT, "tokenizer.json: Metaspace replacement is not one character");
  *step = (struct pretok_step){.kind = PRETOK_METASPACE, .prepend = PRETOK_ALWAYS, .splits = tokenizer_json_bool(value, "split", true)};
  memcpy(step->replacement, replacement, length);
  if (!tokenizer_json_bool(value, "add_prefix_space", true)) step->prepend = PRETOK_NEVER;
  if (scheme && strcmp(scheme, "always") == 0) step->prepend = PRETOK_ALWAYS;
  else if (scheme && strcmp(scheme, "first") == 0) step->prepend = PRETOK_FIRST;
  else if (scheme && strcmp(scheme, "never") == 0) step->prepend = PRETOK_NEVER;
  else if (scheme) return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: Metaspace prepend_scheme %.32s is not supported", scheme);
  return SITS_OK;
}

static enum sits_status read_split(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err)
{
  enum pretok_behavior behavior = PRETOK_ISOLATED;
  bool is_literal;
  const json_t *pattern = pattern_of(value, &is_literal);
  if (!pattern) return sits_fail(err, SITS_FORMAT, "tokenizer.json: pre_tokenizer Split without a pattern");
  enum sits_status status = read_behavior(value, &behavior, err);
  if (status) return status;
  return pretok_add_split(&tokenizer->pretok, json_string_value(pattern), json_string_length(pattern), is_literal, behavior,
                          tokenizer_json_bool(value, "invert", false), false, err);
}

static enum sits_status read_byte_level(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  tokenizer->bpe.is_byte_level = true;
  if (tokenizer_json_bool(value, "add_prefix_space", true))
    status = pretok_add(&tokenizer->pretok, &(struct pretok_step){.kind = PRETOK_PREFIX_SPACE}, err);
  if (status || !tokenizer_json_bool(value, "use_regex", true)) return status;
  return pretok_add_split(&tokenizer->pretok, pretok_gpt2_pattern, strlen(pretok_gpt2_pattern), false, PRETOK_ISOLATED, false, false, err);
}

static enum sits_status read_pre_tokenizer(struct tokenizer *tokenizer, const json_t *value, int depth, struct sits_error *err)
{
  const char *type = tokenizer_json_type(value);
  struct pretok_step step = {0};
  enum sits_status status = SITS_OK;
  if (!value || json_is_null(value)) return SITS_OK;
  if (strcmp(type, "Sequence") == 0) {
    size_t i;
    const json_t *item, *list = json_object_get(value, "pretokenizers");
    if (!json_is_array(list) || depth >= MAX_DEPTH) return sits_fail(err, SITS_FORMAT, "tokenizer.json: pre_tokenizer Sequence");
    json_array_foreach(list, i, item) {
      if ((status = read_pre_tokenizer(tokenizer, item, depth + 1, err))) break;
    }
    return status;
  }
  if (tokenizer->bpe.is_byte_level) /* it would see the byte alphabet, not the text */
    return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: pre_tokenizer %.64s after ByteLevel is not supported", type);
  if (strcmp(type, "ByteLevel") == 0) return read_byte_level(tokenizer, value, err);
  if (strcmp(type, "Split") == 0) return read_split(tokenizer, value, err);
  if (strcmp(type, "Metaspace") == 0) {
    status = read_metaspace(value, &step, err);
    return status ? status : pretok_add(&tokenizer->pretok, &step, err);
  }
  if (strcmp(type, "Digits") == 0) {
    step = (struct pretok_step){.kind = PRETOK_NUMBERS, .behavior = PRETOK_ISOLATED};
    step.max_digits = tokenizer_json_bool(value, "individual_digits", false) ? 1 : 0;
    return pretok_add(&tokenizer->pretok, &step, err);
  }
  if (strcmp(type, "Punctuation") == 0) {
    step = (struct pretok_step){.kind = PRETOK_PUNCTUATION, .behavior = PRETOK_ISOLATED};
    if (json_object_get(value, "behavior")) status = read_behavior(value, &step.behavior, err);
    return status ? status : pretok_add(&tokenizer->pretok, &step, err);
  }
  if (strcmp(type, "WhitespaceSplit") == 0)
    return pretok_add(&tokenizer->pretok, &(struct pretok_step){.kind = PRETOK_SPACES, .behavior = PRETOK_REMOVED}, err);
  return refuse(err, "pre_tokenizer", type);
}

enum sits_status tokenizer_json_pre_tokenizer(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err)
{
  return read_pre_tokenizer(tokenizer, value, 0, err);
}

static enum sits_status add_op(struct decoder *decoder, const struct decode_op *op, const char *type, struct sits_error *err)
{
  if (decoder->is_fused) return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: decoder %.64s after Fuse is not supported", type);
  if (decoder->n == 8) return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: decoder of more than 8 steps");
  decoder->ops[decoder->n++] = *op;
  return SITS_OK;
}

static enum sits_status read_strip(struct tokenizer *tokenizer, const json_t *value, struct decoder *decoder, struct sits_error *err)
{
  const char *content = json_string_value(json_object_get(value, "content"));
  json_int_t start = json_integer_value(json_object_get(value, "start")), stop = json_integer_value(json_object_get(value, "stop"));
  if (!content || start < 0 || stop < 0 || start > 1 << 20 || stop > 1 << 20)
    return sits_fail(err, SITS_FORMAT, "tokenizer.json: decoder Strip");
  if (!decoder->is_fused) {
    if (strlen(content) != 1)
      return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: decoder Strip of a non-ASCII character is not supported");
    struct decode_op op = {.kind = DECODE_STRIP, .content = content, .start = (int)start, .stop = (int)stop};
    return add_op(decoder, &op, "Strip", err);
  }
  if (strcmp(content, " ") != 0 || stop != 0 || tokenizer->strip_start)
    return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: decoder Strip, other than of leading spaces, is not supported after Fuse");
  tokenizer->strip_start = (int32_t)start;
  return SITS_OK;
}

static enum sits_status read_decoder(struct tokenizer *tokenizer, const json_t *value, struct decoder *decoder, int depth,
                                     struct sits_error *err)
{
  const char *type = tokenizer_json_type(value);
  enum sits_status status = SITS_OK;
  if (strcmp(type, "Sequence") == 0) {
    size_t i;
    const json_t *item, *list = json_object_get(value, "decoders");
    if (!json_is_array(list) || depth >= MAX_DEPTH) return sits_fail(err, SITS_FORMAT, "tokenizer.json: decoder Sequence");
    json_array_foreach(list, i, item) {
      if ((status = read_decoder(tokenizer, item, decoder, depth + 1, err))) break;
    }
    return status;
  }
  if (strcmp(type, "ByteLevel") == 0) return add_op(decoder, &(struct decode_op){.kind = DECODE_BYTE_LEVEL}, type, err);
  if (strcmp(type, "ByteFallback") == 0) return add_op(decoder, &(struct decode_op){.kind = DECODE_BYTE_FALLBACK}, type, err);
  if (strcmp(type, "Fuse") == 0) {
    decoder->is_fused = true;
    return SITS_OK;
  }
  if (strcmp(type, "Strip") == 0) return read_strip(tokenizer, value, decoder, err);
  if (strcmp(type, "Metaspace") == 0) {
    const char *replacement = json_string_value(json_object_get(value, "replacement"));
    struct pretok_step step;
    status = read_metaspace(value, &step, err);
    if (status) return status;
    if (!replacement) replacement = "\xE2\x96\x81";
    if (step.prepend != PRETOK_NEVER && depth > 0) /* its rule for the first token is kept for it alone */
      return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: decoder Metaspace in a Sequence is not supported");
    if (step.prepend != PRETOK_NEVER) memcpy(tokenizer->first_drops, step.replacement, sizeof step.replacement);
    return add_op(decoder, &(struct decode_op){.kind = DECODE_REPLACE, .pattern = replacement, .pattern_bytes = strlen(replacement),
                                               .content = " ", .content_bytes = 1}, type, err);
  }
  if (strcmp(type, "Replace") == 0) {
    bool is_literal;
    const json_t *pattern = pattern_of(value, &is_literal), *content = json_object_get(value, "content");
    if (!pattern || !json_is_string(content)) return sits_fail(err, SITS_FORMAT, "tokenizer.json: decoder Replace: pattern or content");
    if (!is_literal || json_string_length(pattern) == 0)
      return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: decoder Replace by a regular expression is not supported");
    struct decode_op op = {.kind = DECODE_REPLACE, .pattern = json_string_value(pattern), .pattern_bytes = json_string_length(pattern),
                           .content = json_string_value(content), .content_bytes = json_string_length(content)};
    return add_op(decoder, &op, type, err);
  }
  return refuse(err, "decoder", type);
}

enum sits_status tokenizer_json_decoder(struct tokenizer *tokenizer, const json_t *value, struct decoder *decoder, struct sits_error *err)
{
  *decoder = (struct decoder){0};
  if (!value || json_is_null(value))
    return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.json: a tokenizer without a decoder is not supported");
  return read_decoder(tokenizer, value, decoder, 0, err);
}

static bool apply_op(const struct decode_op *op, const char *text, size_t n, struct buf *out)
{
  size_t done = 0, n_raw;
  int byte;
  switch (op->kind) {
  case DECODE_REPLACE:
    while (done < n) {
      const char *found = memmem(text + done, n - done, op->pattern, op->pattern_bytes);
      size_t at = found ? (size_t)(found - text) : n;
      if (!buf_append(out, text + done, at - done) || (found && !buf_append(out, op->content, op->content_bytes))) return false;
      done = found ? at + op->pattern_bytes : n;
    }
    return true;
  case DECODE_BYTE_FALLBACK:
    byte = tokenizer_byte_piece(text, n);
    return byte >= 0 ? buf_append_char(out, (char)byte) : buf_append(out, text, n);
  case DECODE_BYTE_LEVEL:
    if (!buf_reserve(out, n)) return false;
    if (!tokenizer_alphabet_decode(text, n, out->data + out->size, &n_raw)) return buf_append(out, text, n);
    out->size += n_raw;
    return true;
  case DECODE_STRIP:
    for (int i = 0; i < op->start && n && *text == *op->content; i++, n--) text++;
    for (int i = 0; i < op->stop && n && text[n - 1] == *op->content; i++) n--;
    return buf_append(out, text, n);
  }
  return false;
}

bool tokenizer_json_decode_token(const struct decoder *decoder, const char *piece, size_t n_bytes, struct buf scratch[2], struct buf *out)
{
  if (decoder->n == 0) return buf_append(out, piece, n_bytes);
  for (int i = 0; i < decoder->n; i++) {
    struct buf *to = i + 1 == decoder->n ? out : &scratch[i % 2];
    if (to != out) buf_clear(to);
    if (!apply_op(&decoder->ops[i], piece, n_bytes, to)) return false;
    piece = to->data ? to->data : "";
    n_bytes = to->size;
  }
  return true;
}

/* "single" of a TemplateProcessing: special tokens before and after the one sequence. */
static enum sits_status read_template(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err)
{
  size_t i, k;
  const json_t *item, *id, *list = json_object_get(value, "single"), *tokens = json_object_get(value, "special_tokens");
  bool seen = false;
  if (!json_is_array(list)) return sits_fail(err, SITS_FORMAT, "tokenizer.json: post_processor TemplateProcessing without single");
  json_array_foreach(list, i, item) {
    const json_t *special = json_object_get(item, "SpecialToken");
    if (json_object_get(item, "Sequence") && !seen) {
      seen = true;
      continue;
    }
    const char *name = json_string_value(json_object_get(special, "id"));
    const json_t *ids = name ? json_object_get(json_object_get(tokens, name), "ids") : NULL;
    if (!json_is_array(ids)) return sits_fail(err, SITS_FORMAT, "tokenizer.json: post_processor TemplateProcessing: bad part %zu", i);
    json_array_foreach(ids, k, id) {
      json_int_t number = json_integer_value(id);
      if (!json_is_integer(id) || number < 0 || number >= tokenizer->n_vocab)
        return sits_fail(err, SITS_FORMAT, "tokenizer.json: post_processor TemplateProcessing: bad id of %.64s", name);
      if (!token_list_push(seen ? &tokenizer->suffix : &tokenizer->prefix, (int32_t)number)) return SITS_NOMEM;
    }
  }
  return seen ? SITS_OK : sits_fail(err, SITS_FORMAT, "tokenizer.json: post_processor TemplateProcessing without a sequence");
}

static enum sits_status read_post_processor(struct tokenizer *tokenizer, const json_t *value, int depth, struct sits_error *err)
{
  const char *type = tokenizer_json_type(value);
  if (!value || json_is_null(value) || strcmp(type, "ByteLevel") == 0) return SITS_OK; /* ByteLevel only moves offsets */
  if (strcmp(type, "TemplateProcessing") == 0) return read_template(tokenizer, value, err);
  if (strcmp(type, "Sequence") == 0) {
    size_t i;
    const json_t *item, *list = json_object_get(value, "processors");
    enum sits_status status = SITS_OK;
    if (!json_is_array(list) || depth >= MAX_DEPTH) return sits_fail(err, SITS_FORMAT, "tokenizer.json: post_processor Sequence");
    json_array_foreach(list, i, item) {
      if ((status = read_post_processor(tokenizer, item, depth + 1, err))) break;
    }
    return status;
  }
  return refuse(err, "post_processor", type);
}

enum sits_status tokenizer_json_post_processor(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err)
{
  return read_post_processor(tokenizer, value, 0, err);
}
