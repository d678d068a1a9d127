/* Insertion-ordered dicts keyed by any hashable value, with Python's rule that 1, 1.0 and True are one key.
 * Up to eight pairs are searched in order; beyond that an open-addressed index of positions is kept at most half full. */
#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "text/jinja_internal.h"

enum { LINEAR_PAIRS = 8 };

/* Where the program was loaded salts the hash, so that a client cannot prepare colliding keys. */
static const char salt_anchor;
static uint64_t text_hash(const char *text, size_t n_bytes) { return hash_bytes((uint64_t)(uintptr_t)&salt_anchor, text, n_bytes); }

static bool is_hashable_tuple(const struct jinja_seq *seq, int depth)
{
  for (size_t i = 0; i < seq->n; i++) {
    struct jv item = seq->items[i];
    if (item.type == JV_TUPLE ? depth > 16 || !is_hashable_tuple(item.seq, depth + 1) : !jinja_is_hashable(item)) return false;
  }
  return true;
}

bool jinja_is_hashable(struct jv key)
{
  switch ((enum jinja_type)key.type) {
  case JV_LIST: case JV_DICT: case JV_SLICE: case JV_VIEW: return false;
  case JV_TUPLE: return key.seq->n == 0 || is_hashable_tuple(key.seq, 0);
  default: return true;
  }
}

bool jinja_hash(struct jinja_run *run, struct jv key, uint64_t *hash)
{
  double whole;
  uint64_t part;
  if (!jinja_is_hashable(key)) return jinja_fail(run, "TypeError", "unhashable type: '%s'", jinja_type_name(key));
  switch ((enum jinja_type)key.type) {
  case JV_NONE: *hash = 1; return true;
  case JV_UNDEFINED: *hash = 2; return true;
  case JV_BOOL: case JV_INT: *hash = hash_mix(3, (uint64_t)jv_as_int(key)); return true;
  case JV_FLOAT: /* a whole number hashes as the equal int */
    if (modf(key.f, &whole) == 0 && fabs(whole) < 9.2e18) *hash = hash_mix(3, (uint64_t)(int64_t)whole);
    else *hash = hash_bytes(4, &key.f, sizeof key.f);
    return true;
  case JV_STR: *hash = text_hash(key.s->data, key.s->n_bytes); return jinja_charge(run, key.s->n_bytes / 32);
  case JV_TUPLE:
    *hash = 6;
    if (!jinja_enter(run)) return false;
    for (size_t i = 0; i < key.seq->n; i++) {
      if (!jinja_charge(run, 1) || !jinja_hash(run, key.seq->items[i], &part)) return false;
      *hash = hash_mix(*hash, part);
    }
    jinja_leave(run);
    return true;
  default: *hash = hash_mix(7, (uint64_t)(uintptr_t)key.s); return true; /* by identity */
  }
}

bool jinja_dict_new(struct jinja_run *run, struct jv *out)
{
  struct jinja_dict *dict = jinja_alloc(run, 1, sizeof *dict);
  if (!dict) return false;
  *out = (struct jv){.type = JV_DICT, .dict = dict};
  return true;
}

/* ---- Storage: everything below works on hashes already computed, so that the parser can use it without a run ---- */

static bool grow(struct arena *arena, struct jinja_dict *dict)
{
  if (dict->n == dict->capacity) {
    size_t capacity = dict->capacity ? dict->capacity * 2 : 4;
    struct jinja_pair *pairs = arena_calloc(arena, capacity, sizeof *pairs);
    if (!pairs) return false;
    if (dict->n) memcpy(pairs, dict->pairs, dict->n * sizeof *pairs);
    dict->pairs = pairs;
    dict->capacity = capacity;
  }
  if (dict->n + 1 <= LINEAR_PAIRS || (dict->n + 1) * 2 <= dict->n_slots) return true;
  size_t n_slots = dict->n_slots ? dict->n_slots * 2 : 32;
  uint32_t *slots = arena_calloc(arena, n_slots, sizeof *slots);
  if (!slots) return false;
  for (size_t i = 0; i < dict->n; i++) {
    size_t at = dict->pairs[i].hash & (n_slots - 1);
    while (slots[at]) at = (at + 1) & (n_slots - 1);
    slots[at] = (uint32_t)i + 1;
  }
  dict->slots = slots;
  dict->n_slots = n_slots;
  return true;
}

static bool append(struct arena *arena, struct jinja_dict *dict, struct jv key, struct jv value, uint64_t hash)
{
  if (!grow(arena, dict)) return false;
  if (dict->slots) {
    size_t at = hash & (dict->n_slots - 1);
    while (dict->slots[at]) at = (at + 1) & (dict->n_slots - 1);
    dict->slots[at] = (uint32_t)dict->n + 1;
  }
  dict->pairs[dict->n++] = (struct jinja_pair){.key = key, .value = value, .hash = hash};
  return true;
}

/* Walks the candidates for a hash. *cursor starts at 0; returns positions until none is left (SIZE_MAX). */
static size_t candidate(const struct jinja_dict *dict, uint64_t hash, size_t *cursor)
{
  if (!dict->slots) {
    while (*cursor < dict->n) {
      size_t i = (*cursor)++;
      if (dict->pairs[i].hash == hash) return i;
    }
    return SIZE_MAX;
  }
  while (*cursor < dict->n_slots) {
    uint32_t slot = dict->slots[(hash + (*cursor)++) & (dict->n_slots - 1)];
    if (!slot) return SIZE_MAX;
    if (dict->pairs[slot - 1].hash == hash) return slot - 1;
  }
  return SIZE_MAX;
}

static bool locate(struct jinja_run *run, const struct jinja_dict *dict, struct jv key, uint64_t hash, size_t *position)
{
  size_t cursor = 0;
  while ((*position = candidate(dict, hash, &cursor)) != SIZE_MAX) {
    bool is_equal;
    if (!jinja_charge(run, cursor)) return false;
    if (!jinja_equal(run, dict->pairs[*position].key, key, &is_equal)) return false;
    if (is_equal) return true;
  }
  return jinja_charge(run, cursor);
}

bool jinja_dict_find(struct jinja_run *run, const struct jinja_dict *dict, struct jv key, struct jv *out)
{
  uint64_t hash;
  size_t position;
  if (!jinja_hash(run, key, &hash) || !locate(run, dict, key, hash, &position)) return false;
  *out = position == SIZE_MAX ? jv_absent() : dict->pairs[position].value;
  return true;
}

bool jinja_dict_set(struct jinja_run *run, struct jinja_dict *dict, struct jv key, struct jv value)
{
  uint64_t hash;
  size_t position;
  if (!jinja_charge(run, 1) || !jinja_hash(run, key, &hash) || !locate(run, dict, key, hash, &position)) return false;
  if (position != SIZE_MAX) {
    dict->pairs[position].value = value;
    return true;
  }
  return append(&run->arena, dict, key, value, hash) || jinja_no_memory(run, 2 * dict->n * sizeof(struct jinja_pair));
}

struct jv jinja_dict_get_text(const struct jinja_dict *dict, const char *text, size_t n_bytes)
{
  uint64_t hash = text_hash(text, n_bytes);
  for (size_t cursor = 0, i; (i = candidate(dict, hash, &cursor)) != SIZE_MAX;) {
    struct jv key = dict->pairs[i].key;
    if (key.type == JV_STR && key.s->n_bytes == n_bytes && memcmp(key.s->data, text, n_bytes) == 0) return dict->pairs[i].value;
  }
  return jv_absent();
}

bool jinja_dict_put_str(struct arena *arena, struct jinja_dict *dict, const struct jinja_str *key, struct jv value)
{
  return append(arena, dict, jv_str(key), value, text_hash(key->data, key->n_bytes));
}
