/* See audit_mac.h. */
#include "front/audit/audit_mac.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

struct audit_mac { struct hmac_sha256 hmac; char key_id[AUDIT_KEY_ID_BYTES]; };

/* The file's bytes; -1 when it cannot be read (errno tells). One byte more than a key may have tells a file that is too long. */
static ssize_t read_key(const char *path, unsigned char key[AUDIT_KEY_MOST_BYTES + 2])
{
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t n = 0, got = fd < 0 ? -1 : 1;
  while (got > 0 && n < AUDIT_KEY_MOST_BYTES + 2) {
    got = read(fd, key + n, (size_t)(AUDIT_KEY_MOST_BYTES + 2 - n));
    if (got > 0) n += got;
  }
  int saved = errno;
  if (fd >= 0) close(fd);
  errno = saved;
  return got < 0 ? -1 : n;
}

static enum sits_status create(const unsigned char *key, size_t n_key, struct audit_mac **out, struct sits_error *err)
{
  static const char label[] = "sits2026 audit key id";
  char hex[SHA256_HEX_BYTES];
  struct audit_mac *mac = mem_calloc(1, sizeof *mac);
  if (!mac) return sits_fail(err, SITS_NOMEM, "no memory for the audit log's key");
  hmac_sha256_init(&mac->hmac, key, n_key);
  audit_mac_hex(mac, label, sizeof label - 1, hex);
  memcpy(mac->key_id, hex, AUDIT_KEY_ID_BYTES - 1);
  *out = mac;
  return SITS_OK;
}

enum sits_status audit_mac_open(const char *key_file, struct audit_mac **out, struct sits_error *err)
{
  static const char option[] = "audit-key-file";
  unsigned char key[AUDIT_KEY_MOST_BYTES + 2];
  ssize_t n = read_key(key_file, key);
  enum sits_status status;
  if (n > 0 && key[n - 1] == '\n') n--;
  if (n < 0) status = sits_fail_param(err, SITS_IO, option, "%s: %s", key_file, strerror(errno));
  else if (n < AUDIT_KEY_LEAST_BYTES || n > AUDIT_KEY_MOST_BYTES)
    status = sits_fail_param(err, SITS_CONFIG, option, "%s: a key has %d to %d bytes; openssl rand -hex 32 makes one", key_file,
                             AUDIT_KEY_LEAST_BYTES, AUDIT_KEY_MOST_BYTES);
  else status = create(key, (size_t)n, out, err);
  explicit_bzero(key, sizeof key);
  return status;
}

void audit_mac_close(struct audit_mac *mac)
{
  if (!mac) return;
  explicit_bzero(mac, sizeof *mac);
  mem_free(mac);
}

void audit_mac_hex(struct audit_mac *mac, const void *bytes, size_t n_bytes, char hex[SHA256_HEX_BYTES])
{
  unsigned char digest[SHA256_BYTES];
  if (!mac) {
    sha256_hex(bytes, n_bytes, hex);
    return;
  }
  hmac_sha256(&mac->hmac, bytes, n_bytes, digest);
  sha256_digest_hex(digest, hex);
}

const char *audit_mac_key_id(const struct audit_mac *mac) { return mac ? mac->key_id : ""; }
