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

/* One lane step: multiply-rotate-multiply, as in the round of XXH64. */
static inline uint64_t lane_step(uint64_t lane, uint64_t word)
{
  lane += word * 0xC2B2AE3D27D4EB4Fu;
  lane = lane << 31 | lane >> 33;
  return lane * 0x9E3779B185EBCA87u;
}

uint64_t hash_bulk(uint64_t seed, const void *bytes, size_t n_bytes)
{
  const unsigned char *at = bytes;
  size_t left = n_bytes;
  uint64_t lanes[4] = {seed, seed ^ 0x9E3779B97F4A7C15u, ~seed, seed + 0xFF51AFD7ED558CCDu};
  for (; left >= 32; left -= 32, at += 32) {
    uint64_t words[4];
    memcpy(words, at, 32);
    for (int i = 0; i < 4; i++) lanes[i] = lane_step(lanes[i], words[i]);
  }
  uint64_t h = hash_mix(hash_mix(lanes[0], lanes[1]), hash_mix(lanes[2], lanes[3]));
  return hash_mix(hash_bytes(h, at, left), n_bytes);
}
