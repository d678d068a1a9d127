/* Arena: allocations that die together. A request's strings and a file's parsed tables live in one each.
 * Not thread-safe. Blocks are 16-byte aligned and never move. */
#ifndef SITS_BASE_ARENA_H
#define SITS_BASE_ARENA_H

#include <stddef.h>

struct arena_block;
struct arena {
  struct arena_block *head;
  size_t n_bytes;       /* handed out */
  size_t limit_bytes;   /* 0 = none; beyond it arena_alloc returns NULL */
};

void arena_init(struct arena *arena, size_t limit_bytes);
void *arena_alloc(struct arena *arena, size_t n_bytes);                /* NULL when over the limit or out of memory */
void *arena_calloc(struct arena *arena, size_t count, size_t n_bytes); /* zeroed, overflow-checked */
char *arena_strndup(struct arena *arena, const char *text, size_t n_bytes);
void arena_fini(struct arena *arena); /* frees everything; the arena may be used again */

#endif
