/* Stop strings on a stream of bytes: Knuth-Morris-Pratt states side by side, one per string, so each byte costs O(n_stops) and no text is
 * ever looked at twice. Since stop strings are whole characters, a match in valid UTF-8 is a match of characters. Not thread-safe. */
#ifndef SITS_TEXT_STOP_H
#define SITS_TEXT_STOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"

struct stop_string { char *text; int32_t *border; size_t n_bytes, matched; }; /* matched: bytes of text that end the stream so far */
struct stop_matcher { struct stop_string *strings; int32_t n; };

/* SITS_INVALID_ARGUMENT (empty or invalid UTF-8), SITS_NOMEM. Copies the strings. */
enum sits_status stop_init(struct stop_matcher *matcher, const char *const *stops, int32_t n) SITS_MUST_CHECK;
void stop_fini(struct stop_matcher *matcher);

/* Take one more byte. Index of the string that is complete with it (the longest, then the first), -1 when none. */
int32_t stop_push(struct stop_matcher *matcher, char byte);
/* Bytes at the end of the stream that may still become a stop string. */
size_t stop_held(const struct stop_matcher *matcher);

#endif
