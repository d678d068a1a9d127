/* What an engine file says beyond its weights: the activation format of every site and the KV codec it was made for. Entry point:
 * model_read_engine.
 *
 * meta: {"sites": [{"layer": 0, "site": "qkv", "act": "int4", "outliers": [3, 17]},
 *        {"layer": 0, "site": "down", "act": "int4", "rotation": 128}, ..., {"layer": -1, "site": "head", "act": "int8"}],
 *        "kv_cache": "int4"}; sites that are not listed keep ACT_BACKEND. */
#include <string.h>

#include "base/mem.h"
#include "model/model_read.h"
#include "tensor/name_index.h"

static const char *const site_names[MODEL_SITES] = {"qkv", "o", "gate_up", "down"};

const char *model_site_name(enum model_site site) { return site_names[site]; }

static enum sits_status bad_site(const struct model *m, json_int_t layer, const char *site, const char *what, struct sits_error *err)
{
  char printable[NAME_INDEX_MAX_PRINTED];
  name_printable(printable, site, strlen(site));
  return sits_fail_param(err, SITS_FORMAT, "sites", "%s: site '%s' of layer %lld: %s", name_path_tail(source_path(m->source)), printable,
                         (long long)layer, what);
}

/* The format that a row of "sites" belongs to, and the width of its input; NULL when there is no such site. */
static struct act_format *find_site(struct model *m, json_int_t layer, const char *name, int64_t *width)
{
  const struct model_config *c = &m->config;
  const int64_t widths[MODEL_SITES] = {c->n_embd, (int64_t)c->n_heads * c->head_dim, c->n_embd, c->n_ff};
  if (layer == -1 && strcmp(name, "head") == 0) {
    *width = c->n_embd;
    return &m->head_act;
  }
  for (int i = 0; i < MODEL_SITES && layer >= 0 && layer < c->n_layers; i++) {
    if (strcmp(name, site_names[i]) != 0) continue;
    *width = widths[i];
    return &m->layers[layer].act[i];
  }
  return NULL;
}

static bool find_kind(const char *name, enum act_kind *out)
{
  for (int i = 0; name && i < ACT_KINDS; i++) {
    if (strcmp(name, act_kind_name((enum act_kind)i)) != 0) continue;
    *out = (enum act_kind)i;
    return true;
  }
  return false;
}

static size_t count_outliers(const json_t *sites)
{
  const json_t *row;
  size_t n = 0, index;
  json_array_foreach(sites, index, row) n += json_array_size(json_object_get(row, "outliers"));
  return n;
}

/* at: where the site's outliers go. */
static enum sits_status read_site(struct model *m, const json_t *row, int32_t *at, struct sits_error *err)
{
  const json_t *layer = json_object_get(row, "layer"), *list = json_object_get(row, "outliers");
  const char *name = json_string_value(json_object_get(row, "site"));
  const json_int_t number = json_integer_value(layer);
  int64_t width = 0, last = -1;
  enum act_kind kind;
  if (!name || !json_is_integer(layer)) return bad_site(m, -1, "?", "no name or layer", err);
  struct act_format *format = find_site(m, number, name, &width);
  if (!format) return bad_site(m, number, name, "the model has no such site", err);
  if (format->kind != ACT_BACKEND) return bad_site(m, number, name, "given twice", err);
  if (!find_kind(json_string_value(json_object_get(row, "act")), &kind)) return bad_site(m, number, name, "unknown kind of activation",
                                                                                         err);
  if (list && !json_is_array(list)) return bad_site(m, number, name, "outliers are no list of ascending channels", err);
  if (json_array_size(list) && kind != ACT_INT4) return bad_site(m, number, name, "outliers without 4-bit activations", err);
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *channel = json_array_get(list, i);
    if (!json_is_integer(channel) || json_integer_value(channel) <= last || json_integer_value(channel) >= width)
      return bad_site(m, number, name, "outliers are no ascending channels of its input", err);
    last = json_integer_value(channel);
    at[i] = (int32_t)last;
  }
  const json_t *rotation = json_object_get(row, "rotation");
  const json_int_t block = rotation ? json_integer_value(rotation) : 0;
  if (rotation && (block < 2 || (block & (block - 1)) != 0 || width % block != 0))
    return bad_site(m, number, name, "its rotation is no power of two that divides its input", err);
  *format = (struct act_format){.kind = kind, .n_outliers = (int32_t)json_array_size(list), .outliers = at, .rotation = (int32_t)block};
  return SITS_OK;
}

enum sits_status model_read_engine(struct model *m, struct sits_error *err)
{
  const json_t *meta = source_engine_meta(m->source), *sites = json_object_get(meta, "sites"), *row;
  const json_t *kv_cache = json_object_get(meta, "kv_cache");
  const char *path = name_path_tail(source_path(m->source));
  size_t index;
  if (!meta) return SITS_OK;
  if (sites && !json_is_array(sites)) return sits_fail_param(err, SITS_FORMAT, "sites", "%s: 'sites' is no list", path);
  if (kv_cache && !json_is_string(kv_cache)) return sits_fail_param(err, SITS_FORMAT, "kv_cache", "%s: 'kv_cache' is no text", path);
  m->kv_codec = json_string_value(kv_cache);
  m->outliers = mem_calloc(count_outliers(sites) + 1, sizeof *m->outliers);
  if (!m->outliers) return sits_fail(err, SITS_NOMEM, "out of memory for the model's sites");
  int32_t *at = m->outliers;
  json_array_foreach(sites, index, row) {
    enum sits_status status = read_site(m, row, at, err);
    if (status) return status;
    at += json_array_size(json_object_get(row, "outliers"));
  }
  return SITS_OK;
}
