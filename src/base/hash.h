/* Small non-cryptographic hashing for tables and prefix chains. */
#ifndef SITS_BASE_HASH_H
#define SITS_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Mix two words well (the finaliser of MurmurHash3 over their sum with a golden-ratio step). */
static inline uint64_t hash_mix(uint64_t a, uint64_t b)
{
  uint64_t h = a * 0x9E3779B97F4A7C15u + b;
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDu;
  h ^= h >> 33;
  h *= 0xC4CEB9FE1A85EC53u;
  return h ^ h >> 33;
}

uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t n_bytes);

/* A checksum for large data: four independent lanes of multiply, rotate and multiply, so that it runs at memory speed. Not the same
 * value as hash_bytes. */
uint64_t hash_bulk(uint64_t seed, const void *bytes, size_t n_bytes);

#endif
