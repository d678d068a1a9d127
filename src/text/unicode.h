/* Unicode character classes and canonical normalisation (version 16.0; UAX #15 for NFC and NFD). Pure functions, any thread. */
#ifndef SITS_TEXT_UNICODE_H
#define SITS_TEXT_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

enum unicode_class { /* White_Space wins over the general category */
  UNICODE_OTHER, UNICODE_SPACE, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_MARK, UNICODE_PUNCTUATION, UNICODE_SYMBOL
};

/* Class of a code point below 0x110000. */
enum unicode_class unicode_class(uint32_t code_point);

/* Append the NFC (compose) or NFD form of valid UTF-8 to out. Linear in n_bytes, whatever the combining marks. False: out of memory. */
bool unicode_normalize(const char *text, size_t n_bytes, bool compose, struct buf *out);

/* True when text is certainly in NFC already (a quick check; false may be a false alarm). */
bool unicode_is_surely_nfc(const char *text, size_t n_bytes);

#endif
