/* See hash.h. */
#include "base/hash.h"

#include <string.h>

uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t n_bytes)
{
  const unsigned char *at = bytes;
  uint64_t h = hash_mix(seed, n_bytes);
  for (; n_bytes >= 8; n_bytes -= 8, at += 8) {
    uint64_t word;
    memcpy(&word, at, 8);
    h = hash_mix(h, word);
  }
  uint64_t last = 0;
  memcpy(&last, at, n_bytes);
  return hash_mix(h, last);
}
