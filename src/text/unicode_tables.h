/* Generated Unicode 16.0.0 data behind unicode.c; no one else includes this. */
#ifndef SITS_TEXT_UNICODE_TABLES_H
#define SITS_TEXT_UNICODE_TABLES_H

#include <stdint.h>

struct unicode_decomposition { uint32_t code, first, second; }; /* canonical, one step; second 0: a singleton. Sorted by code. */
struct unicode_composition { uint32_t first, second, code; };   /* primary composites, sorted by (first, second) */
struct unicode_ccc_run { uint32_t low, high; int32_t ccc; };    /* canonical combining class, sorted; 0 elsewhere */

/* Two-stage table: unicode_stage1[c >> 8] names a block of 256 four-bit values in unicode_stage2, low half of a byte first:
 * bits 0-2 enum unicode_class, bit 3 set when NFC may change the character or join it to the one before. */
extern const uint8_t unicode_stage1[];
extern const uint8_t unicode_stage2[];
extern const struct unicode_decomposition unicode_decompositions[];
extern const struct unicode_composition unicode_compositions[];
extern const struct unicode_ccc_run unicode_ccc_runs[];
extern const int32_t unicode_n_decompositions, unicode_n_compositions, unicode_n_ccc_runs;

#endif
