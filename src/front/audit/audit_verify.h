/* Reads audit files back and names the first line that is not as it was written. */
#ifndef SITS_FRONT_AUDIT_AUDIT_VERIFY_H
#define SITS_FRONT_AUDIT_AUDIT_VERIFY_H

#include <stdint.h>

#include "front/audit/audit_mac.h"
#include "sits2026/status.h"

struct audit_report {
  int64_t n_files, n_lines;      /* read and right */
  uint64_t first_seq, last_seq;
  char last_hash[65];            /* of the newest line */
  uint64_t n_lost;               /* lines that never were: the sum of what the chain's own `lost` lines tell */
  int64_t n_not_closed;          /* begin lines without an end line before them: after a crash, or a stop with a full disk, lines may be
                                    missing that nobody counted */
};

/* Verify files in the order in which they were written: a file's first line must follow the last one of the file before. Checked: every
 * line's own hash, its predecessor's hash and number, that each file begins with a begin line, and that the last file is whole: PATH.head
 * beside it names a line in it, or, when there is no head (a rotated file), it closes with an end line. mac: the key that the chain was
 * made under, NULL: none. SITS_FORMAT: err names file, line and what is wrong. SITS_IO, SITS_NOT_FOUND, SITS_NOMEM. *report is filled in
 * every case. */
enum sits_status audit_verify(const char *const *paths, int n_paths, struct audit_mac *mac, struct audit_report *report,
                              struct sits_error *err) SITS_MUST_CHECK;

#endif
