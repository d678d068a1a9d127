/* A whole file mapped read-only. Not thread-safe to open or close; reading the bytes is. */
#ifndef SITS_BASE_MAPFILE_H
#define SITS_BASE_MAPFILE_H

#include <stddef.h>

#include "sits2026/status.h"

struct mapfile { const unsigned char *data; size_t n_bytes; };

/* SITS_NOT_FOUND, SITS_IO (named, with errno's text). An empty file maps to data == NULL, n_bytes == 0. */
enum sits_status mapfile_open(struct mapfile *file, const char *path, struct sits_error *err) SITS_MUST_CHECK;
void mapfile_close(struct mapfile *file);
/* Tell the kernel that the pages of this range are not needed soon (their copy has been made); rounded inward to pages. `file` may
 * also describe a part of a mapping. */
void mapfile_drop(const struct mapfile *file, size_t offset, size_t n_bytes);

#endif
