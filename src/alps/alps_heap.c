/* See alps_heap.h. */
#include "alps/alps_heap.h"

static int32_t meld(const struct alps_order *order, int32_t a, int32_t b)
{
  if (a < 0) return b;
  if (b < 0) return a;
  if (order->before(order->user, b, a)) {
    int32_t t = a;
    a = b;
    b = t;
  }
  struct alps_link *links = order->links;
  links[b].prev = a;
  links[b].next = links[a].child;
  if (links[a].child >= 0) links[links[a].child].prev = b;
  links[a].child = b;
  links[a].next = links[a].prev = -1;
  return a;
}

/* Two passes: meld siblings pairwise from the left, then the pairs from the right. The pairs wait in a list through `next`. */
static int32_t meld_siblings(const struct alps_order *order, int32_t first)
{
  struct alps_link *links = order->links;
  int32_t pairs = -1;
  while (first >= 0) {
    int32_t a = first, b = links[a].next;
    int32_t rest = b >= 0 ? links[b].next : -1;
    links[a].next = links[a].prev = -1;
    if (b >= 0) links[b].next = links[b].prev = -1;
    int32_t pair = meld(order, a, b);
    links[pair].next = pairs;
    pairs = pair;
    first = rest;
  }
  int32_t root = -1;
  while (pairs >= 0) {
    int32_t next = links[pairs].next;
    links[pairs].next = links[pairs].prev = -1;
    root = meld(order, root, pairs);
    pairs = next;
  }
  return root;
}

int32_t alps_heap_insert(const struct alps_order *order, int32_t root, int32_t id)
{
  order->links[id] = (struct alps_link){-1, -1, -1};
  return meld(order, root, id);
}

int32_t alps_heap_remove(const struct alps_order *order, int32_t root, int32_t id)
{
  struct alps_link *links = order->links;
  int32_t below = meld_siblings(order, links[id].child);
  if (id == root) {
    links[id] = (struct alps_link){-1, -1, -1};
    return below;
  }
  int32_t prev = links[id].prev, next = links[id].next;
  if (links[prev].child == id) links[prev].child = next;
  else links[prev].next = next;
  if (next >= 0) links[next].prev = prev;
  links[id] = (struct alps_link){-1, -1, -1};
  return meld(order, root, below);
}
