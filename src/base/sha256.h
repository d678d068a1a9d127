/* SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104). Plain C, about 200 MB/s: for checksums of files and corpora, not for bulk traffic. */
#ifndef SITS_BASE_SHA256_H
#define SITS_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32, SHA256_HEX_BYTES = 65 };

struct sha256 {
  uint32_t state[8];
  uint64_t n_bytes;         /* taken so far */
  unsigned char block[64];  /* the unfinished block, n_bytes % 64 bytes of it */
};

void sha256_init(struct sha256 *sha);
void sha256_update(struct sha256 *sha, const void *bytes, size_t n_bytes);
void sha256_final(struct sha256 *sha, unsigned char digest[SHA256_BYTES]); /* sha must be initialised again afterwards */
/* One call: 64 lower-case hex digits and a terminator. */
void sha256_hex(const void *bytes, size_t n_bytes, char hex[SHA256_HEX_BYTES]);
void sha256_digest_hex(const unsigned char digest[SHA256_BYTES], char hex[SHA256_HEX_BYTES]);

/* A key, taken in once: as secret as the key itself. */
struct hmac_sha256 { struct sha256 inner, outer; };

void hmac_sha256_init(struct hmac_sha256 *hmac, const void *key, size_t n_key);
/* One call, as often as wanted. */
void hmac_sha256(const struct hmac_sha256 *hmac, const void *bytes, size_t n_bytes, unsigned char digest[SHA256_BYTES]);

#endif
