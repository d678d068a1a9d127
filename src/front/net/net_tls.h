/* A listener's certificate, key and authorities, which may change while it serves.
 *
 * Rules
 *  1. net_tls_reload reads all files again and takes them only when they are whole: the key fits the certificate, the authorities can be
 *     read. Otherwise what was in force stays.
 *  2. Handshakes that begin afterwards see the new files; connections that are open go on.
 *  3. A set that was replaced is kept for ten minutes, longer than any handshake takes, and freed by a later reload or at the end.
 * Thread-safe but open and close. */
#ifndef SITS_FRONT_NET_NET_TLS_H
#define SITS_FRONT_NET_NET_TLS_H

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdint.h>

#include "sits2026/status.h"

#define NET_TLS_MAX_CHAIN 16

struct net_tls;

/* One set of files. Constant once made. */
struct net_tls_set {
  char *certificates, *key, *authorities;   /* PEM texts; authorities NULL: clients need no certificate */
  gnutls_pcert_st chain[NET_TLS_MAX_CHAIN]; /* [n_chain] */
  unsigned n_chain;
  gnutls_privkey_t private_key;
  gnutls_x509_trust_list_t trust;           /* of authorities, NULL without */
  uint64_t version;                         /* rises with every reload */
  int64_t retired_us;                       /* 0: in force */
  struct net_tls_set *next;                 /* older ones */
};

/* The paths are borrowed. cafile NULL: clients need no certificate. SITS_CONFIG and SITS_IO name the file. */
enum sits_status net_tls_open(const char *certfile, const char *keyfile, const char *cafile, struct net_tls **out, struct sits_error *err)
    SITS_MUST_CHECK;
void net_tls_close(struct net_tls *tls); /* NULL is fine; no handshake may run */
enum sits_status net_tls_reload(struct net_tls *tls, struct sits_error *err) SITS_MUST_CHECK;
/* The set in force, usable for NET_TLS_KEEP_US at least after it is replaced. */
const struct net_tls_set *net_tls_now(struct net_tls *tls);
#define NET_TLS_KEEP_US (600 * 1000000LL)

#endif
