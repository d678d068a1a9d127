/* UTF-8 by the book: validation, decoding, and the maximal-subpart rule for bad input (Unicode 15, section 3.9, table 3-7). */
#ifndef SITS_BASE_UTF8_H
#define SITS_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum utf8_kind {
  UTF8_VALID,      /* *length bytes (1..4) form a scalar value */
  UTF8_INVALID,    /* *length bytes (1..3) form one maximal subpart: replace with one U+FFFD */
  UTF8_INCOMPLETE, /* the *length bytes left are a proper prefix of some valid sequence */
};

/* Look at the sequence that starts at text[0]; n_bytes >= 1. */
enum utf8_kind utf8_sequence(const char *text, size_t n_bytes, size_t *length);

/* The scalar value at text[0], which must start a valid sequence; *length is set. */
uint32_t utf8_decode(const char *text, size_t n_bytes, size_t *length);

/* Write a scalar value's bytes (1..4) to out and return their number; values that are no scalar become U+FFFD. */
size_t utf8_encode(uint32_t code_point, char out[4]);

/* Scalar values in valid UTF-8. */
size_t utf8_length(const char *text, size_t n_bytes);

bool utf8_is_valid(const char *text, size_t n_bytes);

/* Bytes at the end of text that are the start of an unfinished sequence (0..3). */
size_t utf8_incomplete_tail(const char *text, size_t n_bytes);

#endif
