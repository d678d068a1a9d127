/* See sha256.h. */
#include "base/sha256.h"

#include <string.h>

/* First 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t k[64] = {
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
  0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
  0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
  0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
  0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
  0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress(uint32_t state[8], const unsigned char *p)
{
  uint32_t w[64], s[8];
  for (int i = 0; i < 16; i++) w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; i++) {
    uint32_t e1 = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
    uint32_t t1 = s[7] + e1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
    uint32_t e0 = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
    uint32_t t2 = e0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += t1;
    s[0] = t1 + t2;
  }
  for (int i = 0; i < 8; i++) state[i] += s[i];
}

void sha256_init(struct sha256 *sha)
{
  *sha = (struct sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void sha256_update(struct sha256 *sha, const void *bytes, size_t n_bytes)
{
  const unsigned char *at = bytes;
  size_t held = sha->n_bytes % 64;
  sha->n_bytes += n_bytes;
  if (held) {
    size_t n = n_bytes < 64 - held ? n_bytes : 64 - held;
    memcpy(sha->block + held, at, n);
    if (held + n < 64) return;
    compress(sha->state, sha->block);
    at += n;
    n_bytes -= n;
  }
  for (; n_bytes >= 64; n_bytes -= 64, at += 64) compress(sha->state, at);
  if (n_bytes) memcpy(sha->block, at, n_bytes);
}

void sha256_final(struct sha256 *sha, unsigned char digest[SHA256_BYTES])
{
  static const unsigned char padding[64] = {0x80};
  unsigned char length[8];
  uint64_t n_bits = sha->n_bytes * 8;
  for (int i = 0; i < 8; i++) length[i] = (unsigned char)(n_bits >> (56 - 8 * i));
  sha256_update(sha, padding, 1 + (119 - sha->n_bytes % 64) % 64);
  sha256_update(sha, length, 8);
  for (int i = 0; i < SHA256_BYTES; i++) digest[i] = (unsigned char)(sha->state[i / 4] >> (24 - i % 4 * 8));
}

void sha256_hex(const void *bytes, size_t n_bytes, char hex[SHA256_HEX_BYTES])
{
  struct sha256 sha;
  unsigned char digest[SHA256_BYTES];
  sha256_init(&sha);
  sha256_update(&sha, bytes, n_bytes);
  sha256_final(&sha, digest);
  sha256_digest_hex(digest, hex);
}

void sha256_digest_hex(const unsigned char digest[SHA256_BYTES], char hex[SHA256_HEX_BYTES])
{
  for (int i = 0; i < SHA256_BYTES; i++) {
    hex[2 * i] = "0123456789abcdef"[digest[i] >> 4];
    hex[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
  }
  hex[64] = '\0';
}

/* ---- HMAC: hash of (key ^ 0x5c..) and of the hash of (key ^ 0x36..) and the text; longer keys than a block are hashed first ---- */

void hmac_sha256_init(struct hmac_sha256 *hmac, const void *key, size_t n_key)
{
  unsigned char block[64] = {0}, pad[64];
  sha256_init(&hmac->inner);
  sha256_init(&hmac->outer);
  if (n_key > sizeof block) {
    struct sha256 sha;
    sha256_init(&sha);
    sha256_update(&sha, key, n_key);
    sha256_final(&sha, block);
  } else {
    memcpy(block, key, n_key);
  }
  for (size_t i = 0; i < sizeof pad; i++) pad[i] = block[i] ^ 0x36;
  sha256_update(&hmac->inner, pad, sizeof pad);
  for (size_t i = 0; i < sizeof pad; i++) pad[i] = block[i] ^ 0x5c;
  sha256_update(&hmac->outer, pad, sizeof pad);
  explicit_bzero(block, sizeof block);
  explicit_bzero(pad, sizeof pad);
}

void hmac_sha256(const struct hmac_sha256 *hmac, const void *bytes, size_t n_bytes, unsigned char digest[SHA256_BYTES])
{
  struct sha256 sha = hmac->inner;
  sha256_update(&sha, bytes, n_bytes);
  sha256_final(&sha, digest);
  sha = hmac->outer;
  sha256_update(&sha, digest, SHA256_BYTES);
  sha256_final(&sha, digest);
}
