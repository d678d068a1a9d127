/* See access.h. The key table, who a key is, and grants. Quotas are in access_quota.c, the key file in access_file.c. */
#include "front/access/access.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "base/hash.h"
#include "base/mem.h"
#include "front/access/access_internal.h"
#include "sits2026/engine.h"

struct access {
  const char *key, *key_file;            /* [init] borrowed */
  unsigned char pepper[SHA256_BYTES];    /* [init] random: what the cache of good keys is keyed with */
  pthread_rwlock_t lock;
  struct access_table *table;            /* [lock] */
  pthread_mutex_t cache_mutex;           /* taken inside lock */
};

/* ---- digests ---- */

bool access_bytes_equal(const unsigned char *a, const unsigned char *b, size_t n)
{
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < n; i++) difference |= (unsigned char)(a[i] ^ b[i]);
  return difference == 0;
}

void access_digest(const unsigned char *salt, size_t n_salt, const char *key, size_t n_key, unsigned char out[SHA256_BYTES])
{
  struct sha256 sha;
  sha256_init(&sha);
  sha256_update(&sha, salt, n_salt);
  sha256_update(&sha, key, n_key);
  sha256_final(&sha, out);
}

static bool draw(unsigned char *bytes, size_t n) { return getrandom(bytes, n, 0) == (ssize_t)n; }

static char *put_hex(char *out, const unsigned char *bytes, size_t n)
{
  static const char digits[] = "0123456789abcdef";
  for (size_t i = 0; i < n; i++) {
    *out++ = digits[bytes[i] >> 4];
    *out++ = digits[bytes[i] & 15];
  }
  return out;
}

enum sits_status access_hash_key(const char *key, size_t n_bytes, char out[ACCESS_HASH_BYTES], struct sits_error *err)
{
  unsigned char salt[ACCESS_SALT_BYTES], digest[SHA256_BYTES];
  if (n_bytes < ACCESS_MIN_KEY_BYTES)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "the key has under %d characters; make a random one", ACCESS_MIN_KEY_BYTES);
  for (size_t i = 0; i < n_bytes; i++)
    if (key[i] <= ' ' || key[i] > '~')
      return sits_fail(err, SITS_INVALID_ARGUMENT, "a key has printable ASCII characters only, and no blank");
  if (!draw(salt, sizeof salt)) return sits_fail(err, SITS_INTERNAL, "no random salt could be drawn");
  access_digest(salt, sizeof salt, key, n_bytes, digest);
  memcpy(out, "sha256:", 7);
  char *at = put_hex(out + 7, salt, sizeof salt);
  *at++ = ':';
  *put_hex(at, digest, sizeof digest) = '\0';
  return SITS_OK;
}

void access_choose_id(const char *given, uint64_t number, char *out, size_t capacity)
{
  size_t n = given ? strspn(given, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.:") : 0;
  if (n > 0 && n <= 64 && n < capacity && !given[n]) {
    memcpy(out, given, n + 1);
    return;
  }
  unsigned char bytes[16] = {0};
  if (!draw(bytes, sizeof bytes)) memcpy(bytes, &number, sizeof number);
  *put_hex(out, bytes, sizeof bytes) = '\0';
}

/* ---- grants ---- */

static struct access_account *account_create(void)
{
  struct access_account *account = mem_calloc(1, sizeof *account);
  if (!account) return NULL;
  atomic_init(&account->n_refs, 1);
  pthread_mutex_init(&account->mutex, NULL);
  return account;
}

static void account_release(struct access_account *account)
{
  if (!account || atomic_fetch_sub(&account->n_refs, 1) != 1) return;
  pthread_mutex_destroy(&account->mutex);
  mem_free(account);
}

struct access_grant *access_grant_create(void)
{
  struct access_grant *grant = mem_calloc(1, sizeof *grant);
  if (!grant) return NULL;
  atomic_init(&grant->n_refs, 1);
  arena_init(&grant->arena, 1u << 20);
  grant->tenant = "";
  grant->max_tokens = -1;
  grant->classes = (1u << SITS_CLASS_COUNT) - 1;
  grant->account = account_create();
  if (grant->account) return grant;
  access_release(grant);
  return NULL;
}

struct access_grant *access_hold(struct access_grant *grant)
{
  if (grant) atomic_fetch_add(&grant->n_refs, 1);
  return grant;
}

void access_release(struct access_grant *grant)
{
  if (!grant || atomic_fetch_sub(&grant->n_refs, 1) != 1) return;
  account_release(grant->account);
  arena_fini(&grant->arena);
  mem_free(grant);
}

uint64_t access_tenant(const struct access_grant *grant)
{
  return grant && grant->tenant[0] ? hash_bytes(1, grant->tenant, strlen(grant->tenant)) | 1 : 0;
}

const char *access_tenant_name(const struct access_grant *grant) { return grant ? grant->tenant : ""; }

const char *access_key_id(const struct access_grant *grant) { return grant ? grant->id : ""; }

bool access_has_role(const struct access_grant *grant, unsigned roles)
{
  return !grant || (grant->roles & (roles | ACCESS_ADMIN)) != 0;
}

bool access_allows_model(const struct access_grant *grant, const char *name)
{
  if (!grant || !grant->models) return true;
  for (int32_t i = 0; i < grant->n_models; i++)
    if (!strcmp(grant->models[i], name)) return true;
  return false;
}

bool access_allows_class(const struct access_grant *grant, int service_class) { return !grant || (grant->classes >> service_class & 1); }

int64_t access_max_tokens(const struct access_grant *grant) { return grant ? grant->max_tokens : -1; }

/* ---- table ---- */

bool access_table_add(struct access_table *table, struct access_grant *grant)
{
  struct access_grant **grants = mem_realloc(table->grants, ((size_t)table->n + 1) * sizeof(struct access_grant *));
  if (!grants) {
    access_release(grant);
    return false;
  }
  table->grants = grants;
  table->grants[table->n++] = grant;
  return true;
}

void access_table_destroy(struct access_table *table)
{
  if (!table) return;
  for (int32_t i = 0; i < table->n; i++) access_release(table->grants[i]);
  mem_free(table->grants);
  mem_free(table);
}

static enum sits_status add_single_key(struct access_table *table, const char *key, struct sits_error *err)
{
  struct access_grant *grant = access_grant_create();
  if (!grant) return sits_fail(err, SITS_NOMEM, "no memory for the API key");
  grant->roles = ACCESS_ANY_ROLE;
  memcpy(grant->id, "api-key", sizeof "api-key");
  if (!draw(grant->salt, sizeof grant->salt)) {
    access_release(grant);
    return sits_fail(err, SITS_INTERNAL, "no random salt could be drawn");
  }
  access_digest(grant->salt, sizeof grant->salt, key, strlen(key), grant->digest);
  return access_table_add(table, grant) ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for the API key");
}

static enum sits_status table_create(const struct access *access, struct access_table **out, struct sits_error *err)
{
  struct access_table *table = mem_calloc(1, sizeof *table);
  if (!table) return sits_fail(err, SITS_NOMEM, "no memory for the API keys");
  enum sits_status status = access->key ? add_single_key(table, access->key, err) : SITS_OK;
  if (!status && access->key_file) status = access_file_read(access->key_file, table, err);
  if (status) access_table_destroy(table);
  else *out = table;
  return status;
}

enum sits_status access_create(const char *key, const char *key_file, struct access **out, struct sits_error *err)
{
  struct access *access = mem_calloc(1, sizeof *access);
  if (!access) return sits_fail(err, SITS_NOMEM, "no memory for the API keys");
  access->key = key;
  access->key_file = key_file;
  enum sits_status status = draw(access->pepper, sizeof access->pepper) ? SITS_OK : sits_fail(err, SITS_INTERNAL, "no randomness");
  if (!status) status = table_create(access, &access->table, err);
  if (status) {
    mem_free(access);
    return status;
  }
  pthread_rwlock_init(&access->lock, NULL);
  pthread_mutex_init(&access->cache_mutex, NULL);
  *out = access;
  return SITS_OK;
}

void access_destroy(struct access *access)
{
  if (!access) return;
  access_table_destroy(access->table);
  pthread_rwlock_destroy(&access->lock);
  pthread_mutex_destroy(&access->cache_mutex);
  mem_free(access);
}

bool access_is_open(const struct access *access) { return !access->key && !access->key_file; }

/* Entries that were there before go on with their accounts. The new table is not public yet. */
static void keep_accounts(struct access_table *table, const struct access_table *old)
{
  for (int32_t i = 0; i < table->n; i++)
    for (int32_t k = 0; k < old->n; k++) {
      if (memcmp(table->grants[i]->digest, old->grants[k]->digest, SHA256_BYTES)) continue;
      atomic_fetch_add(&old->grants[k]->account->n_refs, 1);
      account_release(table->grants[i]->account);
      table->grants[i]->account = old->grants[k]->account;
      break;
    }
}

enum sits_status access_reload(struct access *access, int32_t *n_keys, struct sits_error *err)
{
  struct access_table *table = NULL;
  enum sits_status status = table_create(access, &table, err);
  if (status) return status;
  if (n_keys) *n_keys = table->n;
  struct access_table *old = access->table; /* only we change it */
  keep_accounts(table, old);
  pthread_rwlock_wrlock(&access->lock);
  access->table = table;
  pthread_rwlock_unlock(&access->lock);
  access_table_destroy(old);
  return SITS_OK;
}

/* ---- who is it ---- */

static const char *bearer_of(const char *authorization)
{
  if (!authorization || strncasecmp(authorization, "Bearer ", 7)) return NULL;
  authorization += 7;
  while (*authorization == ' ' || *authorization == '\t') authorization++;
  return *authorization ? authorization : NULL;
}

/* Every entry is tried, whichever matches, so that the time tells nothing of the table. */
static struct access_grant *search(const struct access_table *table, const char *key, size_t n_key)
{
  struct access_grant *found = NULL;
  unsigned char digest[SHA256_BYTES];
  for (int32_t i = 0; i < table->n; i++) {
    struct access_grant *grant = table->grants[i];
    access_digest(grant->salt, sizeof grant->salt, key, n_key, digest);
    if (access_bytes_equal(digest, grant->digest, sizeof digest)) found = grant;
  }
  return found;
}

enum sits_status access_identify(struct access *access, const char *authorization, struct access_grant **out)
{
  *out = NULL;
  if (access_is_open(access)) return SITS_OK;
  const char *key = bearer_of(authorization);
  if (!key) return SITS_UNAUTHENTICATED;
  size_t n_key = strlen(key);
  while (key[n_key - 1] == ' ' || key[n_key - 1] == '\t') n_key--; /* no part of a header's value (RFC 9110, 5.5) */
  unsigned char digest[SHA256_BYTES];
  access_digest(access->pepper, sizeof access->pepper, key, n_key, digest);
  unsigned slot = (unsigned)(digest[0] | digest[1] << 8) % ACCESS_CACHE_SLOTS;
  pthread_rwlock_rdlock(&access->lock);
  struct access_cached *cached = &access->table->cache[slot];
  pthread_mutex_lock(&access->cache_mutex);
  struct access_grant *grant = cached->grant && access_bytes_equal(cached->digest, digest, sizeof digest) ? cached->grant : NULL;
  pthread_mutex_unlock(&access->cache_mutex);
  if (!grant && (grant = search(access->table, key, n_key))) {
    pthread_mutex_lock(&access->cache_mutex);
    memcpy(cached->digest, digest, sizeof digest);
    cached->grant = grant;
    pthread_mutex_unlock(&access->cache_mutex);
  }
  *out = access_hold(grant);
  pthread_rwlock_unlock(&access->lock);
  return grant ? SITS_OK : SITS_UNAUTHENTICATED;
}
