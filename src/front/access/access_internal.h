/* Shared by the files of front/access. */
#ifndef SITS_FRONT_ACCESS_ACCESS_INTERNAL_H
#define SITS_FRONT_ACCESS_ACCESS_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/arena.h"
#include "base/sha256.h"
#include "front/access/access.h"

#define ACCESS_SALT_BYTES 16
#define ACCESS_ID_BYTES 65
#define ACCESS_MAX_KEYS 4096
#define ACCESS_CACHE_SLOTS 1024 /* keys seen lately */

/* level flows back to limit within a minute; it may be negative. */
struct access_bucket { double level; int64_t at_us; };

/* What a key has used. Outlives reloads: entries of the same hash share it. */
struct access_account {
  atomic_int n_refs;
  pthread_mutex_t mutex;
  struct access_bucket requests, tokens; /* [mutex] */
  int64_t n_calls;                       /* [mutex] running */
  int64_t wanted_tokens;                 /* [mutex] what the last call that was refused for tokens needed */
};

struct access_grant {
  atomic_int n_refs;
  struct arena arena;                    /* [init] its strings */
  unsigned char salt[ACCESS_SALT_BYTES], digest[SHA256_BYTES]; /* [init] */
  const char *tenant;                    /* [init] "" for the single key */
  char id[ACCESS_ID_BYTES];              /* [init] */
  unsigned roles;                        /* [init] of enum access_role */
  int64_t requests_per_minute, tokens_per_minute, max_calls; /* [init] 0: no limit */
  int64_t max_tokens;                    /* [init] -1: no limit */
  const char *const *models;             /* [init] [n_models]; NULL: every one */
  int32_t n_models;
  unsigned classes;                      /* [init] bit per enum sits_class */
  struct access_account *account;        /* [init] one reference */
};

struct access_cached { unsigned char digest[SHA256_BYTES]; struct access_grant *grant; }; /* grant borrowed from the table */

struct access_table {
  struct access_grant **grants;          /* [n] one reference each */
  int32_t n;
  struct access_cached cache[ACCESS_CACHE_SLOTS]; /* [access.cache_mutex] */
};

/* An empty grant with every default and a fresh account; NULL: no memory. */
struct access_grant *access_grant_create(void);
bool access_table_add(struct access_table *table, struct access_grant *grant); /* takes the grant over in every case */
void access_table_destroy(struct access_table *table);
void access_digest(const unsigned char *salt, size_t n_salt, const char *key, size_t n_key, unsigned char out[SHA256_BYTES]);
bool access_bytes_equal(const unsigned char *a, const unsigned char *b, size_t n); /* in constant time */

/* access_file.c: read the file's entries into the table. */
enum sits_status access_file_read(const char *path, struct access_table *table, struct sits_error *err) SITS_MUST_CHECK;

#endif
