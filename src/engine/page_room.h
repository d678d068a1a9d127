/* How a device's memory is shared between pages and what goes with them (backend.h: kv_beside). */
#ifndef SITS_ENGINE_PAGE_ROOM_H
#define SITS_ENGINE_PAGE_ROOM_H

#include <stdint.h>

#include "backend/backend.h"

struct page_room {
  uint64_t bytes;                    /* for pages and all that goes with them */
  uint64_t page_bytes;               /* more than 0 */
  uint64_t most_pages;
  uint64_t wanted_pages;             /* 0: as many as fit, up to most_pages; else so many, whether or not they fit */
};

/* Pages; geometry->spare_bytes is set to what they leave of the room, where the backend has a use for that. geometry: all but n_pages. */
uint64_t page_room_divide(const struct page_room *room, const struct backend_vtable *vtable, const struct backend_program *program,
                          struct kv_geometry *geometry);

#endif
