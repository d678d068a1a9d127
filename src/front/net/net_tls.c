/* See net_tls.h. GnuTLS reads and checks the files; the gRPC library gets the same texts once they are known to be good. */
#include "front/net/net_tls.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/mapfile.h"
#include "base/mem.h"

#define MAX_FILE_BYTES (4u << 20)

struct net_tls {
  const char *certfile, *keyfile, *cafile;  /* [init] borrowed */
  pthread_mutex_t mutex;                    /* one reload at a time */
  _Atomic(struct net_tls_set *) now;        /* [atomic] its list of older ones: [mutex] */
  uint64_t n_versions;                      /* [mutex] */
};

static enum sits_status read_text(const char *path, char **out, struct sits_error *err)
{
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  if (!file.n_bytes || file.n_bytes > MAX_FILE_BYTES) {
    status = sits_fail(err, SITS_CONFIG, "%.200s: empty, or larger than 4 MiB", path);
  } else {
    *out = mem_strndup((const char *)file.data, file.n_bytes);
    if (!*out) status = sits_fail(err, SITS_NOMEM, "%.200s: no memory", path);
  }
  mapfile_close(&file);
  return status;
}

static void set_destroy(struct net_tls_set *set)
{
  if (!set) return;
  for (unsigned i = 0; i < set->n_chain; i++) gnutls_pcert_deinit(&set->chain[i]);
  if (set->private_key) gnutls_privkey_deinit(set->private_key);
  if (set->trust) gnutls_x509_trust_list_deinit(set->trust, 1);
  mem_free(set->certificates);
  mem_free(set->key);
  mem_free(set->authorities);
  mem_free(set);
}

static gnutls_datum_t datum(char *text, size_t n) { return (gnutls_datum_t){.data = (unsigned char *)text, .size = (unsigned)n}; }

/* Whether key and certificate belong together: GnuTLS's credentials refuse what does not. */
static int check_pair(const gnutls_datum_t *certificates, const gnutls_datum_t *key)
{
  gnutls_certificate_credentials_t credentials;
  int code = gnutls_certificate_allocate_credentials(&credentials);
  if (code < 0) return code;
  code = gnutls_certificate_set_x509_key_mem2(credentials, certificates, key, GNUTLS_X509_FMT_PEM, NULL, 0);
  gnutls_certificate_free_credentials(credentials);
  return code;
}

static enum sits_status fill(struct net_tls_set *set, const struct net_tls *tls, struct sits_error *err)
{
  enum sits_status status = read_text(tls->certfile, &set->certificates, err);
  if (!status) status = read_text(tls->keyfile, &set->key, err);
  if (!status && tls->cafile) status = read_text(tls->cafile, &set->authorities, err);
  if (status) return status;
  gnutls_datum_t certificates = datum(set->certificates, strlen(set->certificates)), key = datum(set->key, strlen(set->key));
  unsigned n_chain = NET_TLS_MAX_CHAIN;
  int code = check_pair(&certificates, &key);
  if (code >= 0) code = gnutls_pcert_list_import_x509_raw(set->chain, &n_chain, &certificates, GNUTLS_X509_FMT_PEM, 0);
  if (code >= 0) set->n_chain = n_chain;
  if (code >= 0) code = gnutls_privkey_init(&set->private_key);
  if (code >= 0) code = gnutls_privkey_import_x509_raw(set->private_key, &key, GNUTLS_X509_FMT_PEM, NULL, 0);
  if (code < 0)
    return sits_fail(err, SITS_CONFIG, "%.100s and %.100s: %s (are certificate and key right?)", tls->certfile, tls->keyfile,
                     gnutls_strerror(code));
  if (!set->authorities) return SITS_OK;
  gnutls_datum_t authorities = datum(set->authorities, strlen(set->authorities));
  code = gnutls_x509_trust_list_init(&set->trust, 0);
  if (code >= 0) code = gnutls_x509_trust_list_add_trust_mem(set->trust, &authorities, NULL, GNUTLS_X509_FMT_PEM, 0, 0);
  return code > 0 ? SITS_OK : sits_fail(err, SITS_CONFIG, "%.200s: no certificate of an authority can be read", tls->cafile);
}

static enum sits_status set_create(const struct net_tls *tls, struct net_tls_set **out, struct sits_error *err)
{
  struct net_tls_set *set = mem_calloc(1, sizeof *set);
  if (!set) return sits_fail(err, SITS_NOMEM, "no memory for the certificates");
  enum sits_status status = fill(set, tls, err);
  if (status) set_destroy(set);
  else *out = set;
  return status;
}

/* Free those that were replaced long ago. */
static void drop_old(struct net_tls_set *newest, int64_t now_us)
{
  struct net_tls_set **link = &newest->next;
  while (*link) {
    struct net_tls_set *set = *link;
    if (now_us - set->retired_us < NET_TLS_KEEP_US) {
      link = &set->next;
      continue;
    }
    *link = set->next;
    set_destroy(set);
  }
}

enum sits_status net_tls_reload(struct net_tls *tls, struct sits_error *err)
{
  struct net_tls_set *set = NULL;
  pthread_mutex_lock(&tls->mutex);
  enum sits_status status = set_create(tls, &set, err);
  if (!status) {
    int64_t now_us = clock_monotonic_us();
    struct net_tls_set *old = atomic_load(&tls->now);
    set->version = ++tls->n_versions;
    set->next = old;
    if (old) old->retired_us = now_us;
    atomic_store(&tls->now, set);
    drop_old(set, now_us);
  }
  pthread_mutex_unlock(&tls->mutex);
  return status;
}

enum sits_status net_tls_open(const char *certfile, const char *keyfile, const char *cafile, struct net_tls **out, struct sits_error *err)
{
  struct net_tls *tls = mem_calloc(1, sizeof *tls);
  if (!tls) return sits_fail(err, SITS_NOMEM, "no memory for the certificates");
  *tls = (struct net_tls){.certfile = certfile, .keyfile = keyfile, .cafile = cafile};
  atomic_init(&tls->now, NULL);
  pthread_mutex_init(&tls->mutex, NULL);
  enum sits_status status = net_tls_reload(tls, err);
  if (status) net_tls_close(tls);
  else *out = tls;
  return status;
}

void net_tls_close(struct net_tls *tls)
{
  if (!tls) return;
  for (struct net_tls_set *set = atomic_load(&tls->now), *next; set; set = next) {
    next = set->next;
    set_destroy(set);
  }
  pthread_mutex_destroy(&tls->mutex);
  mem_free(tls);
}

const struct net_tls_set *net_tls_now(struct net_tls *tls) { return atomic_load(&tls->now); }
