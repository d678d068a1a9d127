/* The audit log: one JSON line a request, hash-chained, in files that rotate by size and age.
 *
 * audit_record makes the line's text on the caller's thread and queues it; one writer thread numbers, chains and writes. Nothing here ever
 * waits for a disk but that thread: when the queue is full a line is lost, counted, and the loss itself becomes a line.
 *
 * Line: {"seq":N,"prev":"<hash of line N-1>","kind":...,...,"hash":"<SHA-256 of all bytes of this line before ,\"hash\">"}; with a key
 * the hash is HMAC-SHA-256 under it.
 * Kinds: begin (first line of a file), request, lost (lines that the queue had no room for), end (last line of a file that was rotated or
 * closed). README.md lists the members. audit_verify.h reads it back.
 *
 * Files: PATH is written to; a full one is renamed PATH.<number of its first line, 12 digits>, so names sort in order. PATH.head holds
 * number and hash of the newest line, so that a cut tail shows. All are made with mode 0600. Lines are in the kernel's hands within
 * 0.1 s and on the disk within about a second.
 *
 * Threads: audit_open, audit_finish, audit_close: one owner; audit_record: any. */
#ifndef SITS_FRONT_AUDIT_AUDIT_H
#define SITS_FRONT_AUDIT_AUDIT_H

#include "front/api/api_record.h"
#include "front/metrics/metrics.h"

struct audit;

struct audit_options {
  const char *path;          /* copied */
  const char *key_file;      /* of the chain's key; NULL: hashes without a key, which who edits the files can make anew */
  int64_t rotate_bytes;      /* a file is closed once it holds that many */
  int64_t rotate_us;         /* or was begun that long ago */
  int64_t queue_bytes;       /* of lines that wait for the writer; beyond it they are lost */
};

/* SITS_IO, SITS_FORMAT (PATH is there and its last line is no audit line, or made under another key), SITS_CONFIG (another process writes
 * it, or no key in key_file). metrics is borrowed. */
enum sits_status audit_open(const struct audit_options *options, struct metrics *metrics, struct audit **out, struct sits_error *err)
    SITS_MUST_CHECK;
/* Public records (answered probes and scrapes) are left out. Never waits. */
void audit_record(struct audit *audit, const struct api_record *record);
/* Write what is queued and an end line. What is recorded from now on is lost and counted. Once; NULL is fine. */
void audit_finish(struct audit *audit);
/* Finish it if that was not done, and free it: nobody may record any more. NULL is fine. */
void audit_close(struct audit *audit);

#endif
