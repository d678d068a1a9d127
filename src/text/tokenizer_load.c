/* tokenizer_load: the tokenizer of a model, whatever its form. A Hugging Face directory gives tokenizer.json, and from
 * tokenizer_config.json, generation_config.json and config.json the ids of BOS, EOS and all tokens that end a turn. */
#include <string.h>

#include "base/json.h"
#include "text/tokenizer_internal.h"

/* A token by name: a string, or an object with "content" (AddedToken). -1 when absent or unknown. */
static int32_t named_token(const struct tokenizer *tokenizer, const json_t *value)
{
  if (json_is_object(value)) value = json_object_get(value, "content");
  return json_is_string(value) ? tokenizer_find(tokenizer, json_string_value(value), json_string_length(value)) : -1;
}

/* One id or a list of them. The first becomes EOS when none is known yet. */
static bool take_ends(struct tokenizer *tokenizer, const json_t *value)
{
  size_t n = json_is_array(value) ? json_array_size(value) : 1;
  for (size_t i = 0; i < n; i++) {
    const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
    if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= tokenizer->n_vocab) continue;
    if (tokenizer->eos < 0) tokenizer->eos = (int32_t)json_integer_value(id);
    if (!tokenizer_add_end(tokenizer, (int32_t)json_integer_value(id))) return false;
  }
  return true;
}

static bool take_config(struct tokenizer *tokenizer, const json_t *config)
{
  const json_t *bos = json_object_get(config, "bos_token_id");
  if (tokenizer->bos < 0 && json_is_integer(bos) && json_integer_value(bos) >= 0 && json_integer_value(bos) < tokenizer->n_vocab)
    tokenizer->bos = (int32_t)json_integer_value(bos);
  return take_ends(tokenizer, json_object_get(config, "eos_token_id"));
}

static bool take_tokenizer_config(struct tokenizer *tokenizer, const json_t *config)
{
  int32_t bos = named_token(tokenizer, json_object_get(config, "bos_token"));
  int32_t eos = named_token(tokenizer, json_object_get(config, "eos_token"));
  if (bos >= 0) tokenizer->bos = bos;
  if (eos >= 0) tokenizer->eos = eos;
  return tokenizer_add_end(tokenizer, eos);
}

static enum sits_status parse_named(const char *name, const struct buf *text, json_t **out, struct sits_error *err)
{
  struct sits_error inner = {0};
  enum sits_status status = json_parse(text->data, text->size, &json_limits_file, out, &inner);
  return status ? sits_fail(err, status, "%s: %s", name, inner.text) : SITS_OK;
}

static enum sits_status load_hf(const struct source *source, struct tokenizer **out, struct sits_error *err)
{
  static const char *const files[] = {"tokenizer_config.json", "generation_config.json"};
  static const char tokenizer_file[] = "tokenizer.json";
  bool has_file = source_hf_has(source, tokenizer_file);
  if (!has_file && source_hf_has(source, "tokenizer.model"))
    return sits_fail(err, SITS_UNSUPPORTED, "%s: tokenizer.model alone is not supported, tokenizer.json is needed", source_path(source));
  if (!has_file) return sits_fail(err, SITS_NOT_FOUND, "%s: no tokenizer.json", source_path(source));
  struct tokenizer *tokenizer = NULL;
  struct buf text;
  buf_init(&text, json_limits_file.max_bytes);
  enum sits_status status = source_hf_read(source, tokenizer_file, &text, err);
  if (!status) status = tokenizer_parse_json(text.data, text.size, tokenizer_file, &tokenizer, err);
  for (int i = 0; i < 2 && !status; i++) {
    json_t *config = NULL;
    if (!source_hf_has(source, files[i])) continue;
    buf_clear(&text);
    status = source_hf_read(source, files[i], &text, err);
    if (!status) status = parse_named(files[i], &text, &config, err);
    if (!status && !(i == 0 ? take_tokenizer_config(tokenizer, config) : take_config(tokenizer, config))) status = SITS_NOMEM;
    json_decref(config);
  }
  buf_fini(&text);
  if (!status && !take_config(tokenizer, source_hf_config(source))) status = SITS_NOMEM;
  if (status) tokenizer_destroy(tokenizer);
  else *out = tokenizer;
  return status;
}

enum sits_status tokenizer_load(const struct source *source, struct tokenizer **out, struct sits_error *err)
{
  if (source == NULL) return sits_fail(err, SITS_UNSUPPORTED, "this model has no tokenizer");
  return source_kind(source) == SOURCE_GGUF ? tokenizer_load_gguf(source_gguf(source), out, err) : load_hf(source, out, err);
}
