/* See page_room.h. */
#include "engine/page_room.h"

enum { SPARE_SHARE = 16 };           /* of the room: most that is kept from the pages for what only saves time */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

uint64_t page_room_divide(const struct page_room *room, const struct backend_vtable *vtable, const struct backend_program *program,
                          struct kv_geometry *geometry)
{
  uint64_t n_pages = room->wanted_pages > 0 ? room->wanted_pages : least(room->bytes / room->page_bytes, room->most_pages);
  if (!vtable->kv_beside) return n_pages;
  struct kv_geometry most = *geometry; /* what goes with pages grows with them: never too little is set aside */
  struct kv_beside beside;
  most.n_pages = (int32_t)n_pages;
  vtable->kv_beside(program, &most, &beside);
  const uint64_t bytes = less(room->bytes, beside.fixed_bytes);
  if (room->wanted_pages == 0)
    n_pages = least(less(bytes, least(beside.spare_bytes, bytes / SPARE_SHARE)) / room->page_bytes, room->most_pages);
  geometry->spare_bytes = less(bytes, n_pages * room->page_bytes);
  if (geometry->spare_bytes == 0) geometry->spare_bytes = 1; /* nothing; 0 would leave it to the backend */
  return n_pages;
}
