/* The chained file under the audit log: numbering, hashing, writing, rotation, going on after a stop or a crash. Used by the writer thread
 * only, and by audit_verify.c for the form of a line. One owner, not thread-safe. */
#ifndef SITS_FRONT_AUDIT_AUDIT_FILE_H
#define SITS_FRONT_AUDIT_AUDIT_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "front/audit/audit_mac.h"
#include "sits2026/status.h"

#define AUDIT_MAX_LINE_BYTES (1u << 20) /* longer bodies are refused; readers may rely on it */

/* Where a chain stands: the number and hash of its newest line. */
struct audit_link { uint64_t seq; char hash[SHA256_HEX_BYTES]; };

struct audit_file {
  char *path, *head_path, *name;  /* owned; name: the last part of path */
  struct audit_mac *mac;          /* the chain's key, borrowed; NULL: none */
  int fd, head_fd;                /* -1: closed */
  int64_t n_bytes;                /* on the disk, whole lines */
  int64_t begun_us;               /* unix: of its begin line */
  uint64_t first_seq;             /* of this file */
  bool has_link;                  /* the chain has a line */
  struct audit_link link;         /* newest line written */
  struct audit_link next_link;    /* newest line in `out` */
  bool has_next_link;
  struct buf out;                 /* lines that are not written yet */
};

/* Open or make the file and write its begin line if it is new. What a crash left of a torn last line is removed; the next begin line says
 * how many bytes. When PATH.head knows a later line than the file holds, the chain goes on from there, so that verification finds the gap.
 */
enum sits_status audit_file_open(struct audit_file *file, const char *path, struct audit_mac *mac, struct sits_error *err)
    SITS_MUST_CHECK;
/* Chain a line with these members ("\"kind\":\"request\",...") behind the others in `out`. False: too long or no memory, nothing changed.
 */
bool audit_file_add(struct audit_file *file, const char *members, size_t n_bytes);
/* Write `out`. On failure (a full disk) nothing of it stays in the file, `out` is kept, and errno tells; call again later. */
bool audit_file_flush(struct audit_file *file);
/* Forget what is in `out`. */
void audit_file_discard(struct audit_file *file);
/* Onto the disk. */
bool audit_file_sync(struct audit_file *file);
/* Write an end line, rename the file and begin the next. False: the old one goes on (errno tells). */
bool audit_file_rotate(struct audit_file *file);
/* Write an end line if it can be, and close. */
void audit_file_close(struct audit_file *file);

/* Take a line apart (n_bytes without its newline): its number, prev and hash, and whether the hash is right. False: no audit line. */
bool audit_line_parse(struct audit_mac *mac, const char *line, size_t n_bytes, uint64_t *seq, char prev[SHA256_HEX_BYTES],
                      char hash[SHA256_HEX_BYTES], bool *is_intact);
/* Read "PATH.head". SITS_NOT_FOUND, SITS_FORMAT (also: made under another key), SITS_IO. */
enum sits_status audit_head_read(struct audit_mac *mac, const char *head_path, struct audit_link *out, struct sits_error *err)
    SITS_MUST_CHECK;

#endif
