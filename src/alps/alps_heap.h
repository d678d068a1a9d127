/* Pairing heap over small ids, links in a caller's array: insert O(1), pop and remove O(log n) amortised, no allocation.
 * Fredman, Sedgewick, Sleator, Tarjan, "The pairing heap", 1986. */
#ifndef SITS_ALPS_ALPS_HEAP_H
#define SITS_ALPS_ALPS_HEAP_H

#include <stdbool.h>
#include <stdint.h>

struct alps_link { int32_t child, next, prev; }; /* prev: the sibling before, or the parent of a first child; -1 none */

/* Whether id a comes out before id b. Must be a strict total order. */
typedef bool (*alps_before_fn)(const void *user, int32_t a, int32_t b);

struct alps_order {
  alps_before_fn before;
  const void *user;
  struct alps_link *links;
};

/* All take the root's id (-1: empty) and return the new root. */
int32_t alps_heap_insert(const struct alps_order *order, int32_t root, int32_t id);
int32_t alps_heap_remove(const struct alps_order *order, int32_t root, int32_t id);

#endif
