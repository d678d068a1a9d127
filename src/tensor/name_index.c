/* See name_index.h. Linear probing at a load of one half or less. */
#include "tensor/name_index.h"

#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"

bool name_index_init(struct name_index *index, uint64_t capacity)
{
  uint64_t n_slots = 16;
  while (n_slots < capacity * 2) n_slots *= 2;
  struct name_slot *slots = mem_calloc(n_slots, sizeof *slots);
  if (!slots) return false;
  *index = (struct name_index){.slots = slots, .mask = n_slots - 1, .seed = hash_mix((uint64_t)clock_monotonic_ns(), (uintptr_t)slots)};
  return true;
}

void name_index_fini(struct name_index *index)
{
  mem_free(index->slots);
  *index = (struct name_index){0};
}

static struct name_slot *probe(const struct name_index *index, const char *text, size_t size)
{
  uint64_t at = hash_bytes(index->seed, text, size) & index->mask;
  for (;; at = (at + 1) & index->mask) {
    struct name_slot *slot = &index->slots[at];
    if (slot->number_plus_1 == 0 || (slot->size == size && memcmp(slot->text, text, size) == 0)) return slot;
  }
}

bool name_index_add(struct name_index *index, const char *text, size_t size, uint32_t number)
{
  struct name_slot *slot = probe(index, text, size);
  if (slot->number_plus_1 != 0) return false;
  *slot = (struct name_slot){.text = text, .size = (uint32_t)size, .number_plus_1 = number + 1};
  return true;
}

int64_t name_index_find(const struct name_index *index, const char *text, size_t size)
{
  if (!index->slots) return -1;
  return (int64_t)probe(index, text, size)->number_plus_1 - 1;
}

const char *name_printable(char out[NAME_INDEX_MAX_PRINTED], const char *text, size_t size)
{
  size_t n = size < NAME_INDEX_MAX_PRINTED - 1 ? size : NAME_INDEX_MAX_PRINTED - 1;
  for (size_t i = 0; i < n; i++) out[i] = text[i] >= 0x20 && text[i] < 0x7f ? text[i] : '?';
  out[n] = '\0';
  return out;
}

const char *name_path_tail(const char *path)
{
  size_t size = strlen(path), limit = 90;
  if (size <= limit) return path;
  const char *tail = path + size - limit;
  while ((*tail & 0xC0) == 0x80) tail++; /* never start within a UTF-8 character */
  return tail;
}
