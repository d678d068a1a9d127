/* Pictures with a palette, as PNG files. */
#ifndef SITS_BASE_PNG_H
#define SITS_BASE_PNG_H

#include <stdint.h>

#include "sits2026/status.h"

/* pixels: [height][width] indexes below n_colors; palette: [n_colors] 0xRRGGBB. width < 32,768. The file appears when it is complete;
 * errors name it. */
enum sits_status png_write(const char *path, const uint8_t *pixels, int32_t width, int32_t height, const uint32_t *palette,
                           int32_t n_colors, struct sits_error *err) SITS_MUST_CHECK;

#endif
