/* See utf8.h. */
#include "base/utf8.h"

#include <string.h>

static unsigned char at(const char *text, size_t i) { return (unsigned char)text[i]; }

/* Number of bytes a lead byte announces and the allowed range of the second byte; 0 for a byte that cannot lead. */
static int lead_info(unsigned char lead, unsigned char *low, unsigned char *high)
{
  *low = 0x80;
  *high = 0xBF;
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (lead == 0xE0) *low = 0xA0;
    if (lead == 0xED) *high = 0x9F;
    return 3;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (lead == 0xF0) *low = 0x90;
    if (lead == 0xF4) *high = 0x8F;
    return 4;
  }
  return 0;
}

enum utf8_kind utf8_sequence(const char *text, size_t n_bytes, size_t *length)
{
  unsigned char low, high;
  int need = lead_info(at(text, 0), &low, &high);
  *length = 1;
  if (need == 0) return UTF8_INVALID;
  for (int i = 1; i < need; i++) {
    if ((size_t)i >= n_bytes) {
      *length = (size_t)i;
      return UTF8_INCOMPLETE;
    }
    unsigned char c = at(text, (size_t)i);
    if (c < low || c > high) {
      *length = (size_t)i;
      return UTF8_INVALID;
    }
    low = 0x80;
    high = 0xBF;
  }
  *length = (size_t)need;
  return UTF8_VALID;
}

uint32_t utf8_decode(const char *text, size_t n_bytes, size_t *length)
{
  if (utf8_sequence(text, n_bytes, length) != UTF8_VALID) return 0xFFFD;
  uint32_t lead = at(text, 0);
  if (*length == 1) return lead;
  uint32_t value = lead & (0x7Fu >> *length);
  for (size_t i = 1; i < *length; i++) value = value << 6 | (at(text, i) & 0x3Fu);
  return value;
}

size_t utf8_encode(uint32_t c, char out[4])
{
  if (c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) c = 0xFFFD;
  if (c < 0x80) {
    out[0] = (char)c;
    return 1;
  }
  if (c < 0x800) {
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
  }
  if (c < 0x10000) {
    out[0] = (char)(0xE0 | c >> 12);
    out[1] = (char)(0x80 | (c >> 6 & 0x3F));
    out[2] = (char)(0x80 | (c & 0x3F));
    return 3;
  }
  out[0] = (char)(0xF0 | c >> 18);
  out[1] = (char)(0x80 | (c >> 12 & 0x3F));
  out[2] = (char)(0x80 | (c >> 6 & 0x3F));
  out[3] = (char)(0x80 | (c & 0x3F));
  return 4;
}

bool utf8_is_valid(const char *text, size_t n_bytes)
{
  size_t length;
  for (size_t i = 0; i < n_bytes; i += length) {
    uint64_t word;
    if (n_bytes - i >= sizeof word) { /* eight ASCII bytes at a time */
      memcpy(&word, text + i, sizeof word);
      length = sizeof word;
      if (!(word & 0x8080808080808080u)) continue;
    }
    if (at(text, i) < 0x80) length = 1;
    else if (utf8_sequence(text + i, n_bytes - i, &length) != UTF8_VALID) return false;
  }
  return true;
}

size_t utf8_incomplete_tail(const char *text, size_t n_bytes)
{
  for (size_t back = 1; back <= 3 && back <= n_bytes; back++) {
    unsigned char c = at(text, n_bytes - back);
    if ((c & 0xC0) == 0x80) continue;
    size_t length;
    return c >= 0xC2 && utf8_sequence(text + n_bytes - back, back, &length) == UTF8_INCOMPLETE ? back : 0;
  }
  return 0;
}

size_t utf8_length(const char *text, size_t n_bytes)
{
  size_t n = 0;
  for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xC0) != 0x80;
  return n;
}
