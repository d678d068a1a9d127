/* Who may do what, and how much of it: API keys, their roles and their quotas, the same for every transport.
 *
 * Words: a key is the secret that a client sends. A grant is what one key's entry allows, held by each request that came with it. A
 * tenant is who the key belongs to; several keys may have one tenant. A route names the roles of which a key needs one.
 *
 * Life of a request: access_identify (which key is it?) -> access_admit (requests a minute, role) -> for generation also
 * access_start_call (tokens a minute, calls at once) and access_end_call -> access_release.
 *
 * Rules
 *  1. With neither a key nor a key file everything is allowed and the grant is NULL, which every function takes for "no limits".
 *  2. With keys everything is refused that no key allows.
 *  3. Keys are kept as salted SHA-256 digests only, and compared in a time that does not depend on where they differ. None is logged.
 *  4. A quota is a key's own. Minutes are token buckets: a full minute's worth can be used at once and flows back evenly.
 *  5. Prompt tokens are paid before a call starts, generated ones when it ends, which may leave a debt that later calls wait for.
 *  6. access_reload replaces the table or, when the file is bad, changes nothing. Requests that run keep their grant; a key that is in
 *     the new file too keeps its account.
 * Threads: everything is thread-safe but create and destroy. */
#ifndef SITS_FRONT_ACCESS_ACCESS_H
#define SITS_FRONT_ACCESS_ACCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"

struct access;
struct access_grant;

enum access_role {
  ACCESS_INFERENCE = 1, /* generate, tokenize, list models; abort one's own tenant's calls */
  ACCESS_METRICS = 2,   /* read /metrics */
  ACCESS_ADMIN = 4,     /* everything, other tenants' calls included */
};
#define ACCESS_ANY_ROLE (ACCESS_INFERENCE | ACCESS_METRICS | ACCESS_ADMIN)

/* key: one key with every role and no quota, NULL when there is none. key_file: access_file.c says what is in it; NULL when there is none.
 * Both may be given. The strings are borrowed. Errors name the file and the entry, never a key. */
enum sits_status access_create(const char *key, const char *key_file, struct access **out, struct sits_error *err) SITS_MUST_CHECK;
void access_destroy(struct access *access); /* NULL is fine; grants may outlive it */
/* Read the key file again; one caller at a time. On failure what was in force stays. *n_keys (may be NULL): keys now in force. */
enum sits_status access_reload(struct access *access, int32_t *n_keys, struct sits_error *err) SITS_MUST_CHECK;
bool access_is_open(const struct access *access); /* no keys: everyone may do everything */

/* The grant of an authorization value ("Bearer KEY", the scheme in any case; NULL: none was sent). SITS_UNAUTHENTICATED when it is none of
 * ours; *out is NULL then, and also when access is open. Costs one digest for a key that was seen lately, one per entry otherwise. */
enum sits_status access_identify(struct access *access, const char *authorization, struct access_grant **out) SITS_MUST_CHECK;
/* Whether a route that needs one of these roles may be used now. Counts as a request, whatever comes of it. SITS_RATE_LIMITED,
 * SITS_PERMISSION_DENIED. */
enum sits_status access_admit(struct access_grant *grant, unsigned roles, struct sits_error *err) SITS_MUST_CHECK;

/* A call's share. SITS_RATE_LIMITED: too many calls or tokens for now; SITS_PERMISSION_DENIED: more tokens than a minute can ever give. */
enum sits_status access_start_call(struct access_grant *grant, int64_t n_prompt_tokens, struct sits_error *err) SITS_MUST_CHECK;
/* What it used beside its prompt. was_started false: it never ran, and its prompt tokens are given back. */
void access_end_call(struct access_grant *grant, int64_t n_prompt_tokens, int64_t n_output_tokens, bool was_started);

struct access_grant *access_hold(struct access_grant *grant);
void access_release(struct access_grant *grant);

/* ---- what a grant says; constant ---- */

uint64_t access_tenant(const struct access_grant *grant);           /* of the tenant's name; 0: anonymous, or the single key */
const char *access_tenant_name(const struct access_grant *grant);   /* letters, digits, "-_."; "" when anonymous */
const char *access_key_id(const struct access_grant *grant);        /* names the key in logs: its entry's id, or the salt's beginning */
bool access_has_role(const struct access_grant *grant, unsigned roles);
bool access_allows_model(const struct access_grant *grant, const char *name);
bool access_allows_class(const struct access_grant *grant, int service_class);
int64_t access_max_tokens(const struct access_grant *grant);        /* a choice may have; -1: no limit */

/* What the X-RateLimit headers tell. */
struct access_window { int64_t limit, remaining, reset_us; };       /* limit 0: none; reset: until all of it is there again */
struct access_usage { struct access_window requests, tokens; };
void access_usage(struct access_grant *grant, struct access_usage *out);
/* Whole seconds after which what was refused may be tried again, at least 1. */
int32_t access_retry_after_s(struct access_grant *grant);
/* The X-RateLimit headers of a grant as text, one call of `add` each; none for a grant without quotas. */
void access_write_headers(struct access_grant *grant, void (*add)(void *context, const char *name, const char *value), void *context);

/* ---- keys and ids ---- */

#define ACCESS_MIN_KEY_BYTES 16   /* of keys that are hashed for a file: what people think of is shorter, and can be guessed */
#define ACCESS_HASH_BYTES 128
/* An entry's hash of a key with a fresh random salt: "sha256:SALT:DIGEST" in hex digits. */
enum sits_status access_hash_key(const char *key, size_t n_bytes, char out[ACCESS_HASH_BYTES], struct sits_error *err) SITS_MUST_CHECK;

/* A client's own request id when it is harmless in headers and logs (1 to 64 letters, digits, "-_.:"), else 32 random hex digits; number
 * serves where there is no randomness. capacity: at least 65. */
void access_choose_id(const char *given, uint64_t number, char *out, size_t capacity);

#endif
