/* The hash of the audit log's chain: SHA-256, or HMAC-SHA-256 (RFC 2104) under a key from a file, which who edits the log does not have.
 * One owner, not thread-safe. */
#ifndef SITS_FRONT_AUDIT_AUDIT_MAC_H
#define SITS_FRONT_AUDIT_AUDIT_MAC_H

#include <stddef.h>

#include "base/sha256.h"
#include "sits2026/status.h"

enum { AUDIT_KEY_LEAST_BYTES = 32, AUDIT_KEY_MOST_BYTES = 4096, AUDIT_KEY_ID_BYTES = 17 };

struct audit_mac;

/* The key is the file's bytes without a newline at their end. SITS_IO, SITS_CONFIG (too short, too long), SITS_NOMEM. */
enum sits_status audit_mac_open(const char *key_file, struct audit_mac **out, struct sits_error *err) SITS_MUST_CHECK;
/* NULL is fine. */
void audit_mac_close(struct audit_mac *mac);
/* The chain's hash of these bytes in hex; mac NULL: SHA-256. */
void audit_mac_hex(struct audit_mac *mac, const void *bytes, size_t n_bytes, char hex[SHA256_HEX_BYTES]);
/* 16 hex digits that name the key and tell nothing of it; "" for NULL. */
const char *audit_mac_key_id(const struct audit_mac *mac);

#endif
