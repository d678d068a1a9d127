/* See arena.h. Chained blocks, doubling from 4 KiB to 1 MiB; a larger request gets a block of its own. */
#include "base/arena.h"

#include <stdint.h>
#include <string.h>

#include "base/mem.h"

enum { ARENA_FIRST_BYTES = 4096, ARENA_MAX_BYTES = 1 << 20, ARENA_ALIGN = 16 };

struct arena_block {
  struct arena_block *next;
  size_t used, size;
  _Alignas(ARENA_ALIGN) unsigned char bytes[];
};

void arena_init(struct arena *arena, size_t limit_bytes)
{
  *arena = (struct arena){.limit_bytes = limit_bytes};
}

static struct arena_block *grow(struct arena *arena, size_t n_bytes)
{
  size_t size = arena->head ? arena->head->size * 2 : ARENA_FIRST_BYTES;
  if (size > ARENA_MAX_BYTES) size = ARENA_MAX_BYTES;
  if (size < n_bytes) size = n_bytes;
  struct arena_block *block = mem_alloc(sizeof *block + size);
  if (!block) return NULL;
  block->next = arena->head;
  block->used = 0;
  block->size = size;
  arena->head = block;
  return block;
}

void *arena_alloc(struct arena *arena, size_t n_bytes)
{
  if (n_bytes > SIZE_MAX / 2) return NULL;
  size_t rounded = (n_bytes + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
  if (rounded == 0) rounded = ARENA_ALIGN;
  if (arena->limit_bytes && (rounded > arena->limit_bytes || arena->n_bytes > arena->limit_bytes - rounded)) return NULL;
  struct arena_block *block = arena->head;
  if (!block || block->size - block->used < rounded) {
    block = grow(arena, rounded);
    if (!block) return NULL;
  }
  void *at = block->bytes + block->used;
  block->used += rounded;
  arena->n_bytes += rounded;
  return at;
}

void *arena_calloc(struct arena *arena, size_t count, size_t n_bytes)
{
  size_t total;
  if (__builtin_mul_overflow(count, n_bytes, &total)) return NULL;
  void *at = arena_alloc(arena, total);
  if (at) memset(at, 0, total);
  return at;
}

char *arena_strndup(struct arena *arena, const char *text, size_t n_bytes)
{
  if (n_bytes == SIZE_MAX) return NULL;
  char *copy = arena_alloc(arena, n_bytes + 1);
  if (!copy) return NULL;
  if (n_bytes) memcpy(copy, text, n_bytes);
  copy[n_bytes] = '\0';
  return copy;
}

void arena_fini(struct arena *arena)
{
  while (arena->head) {
    struct arena_block *next = arena->head->next;
    mem_free(arena->head);
    arena->head = next;
  }
  arena->n_bytes = 0;
}
