/* TLS for libmicrohttpd: every handshake asks for the certificate in force, so that a reload needs no restart; with authorities every
 * client must show a certificate that one of them signed.
 *
 * GnuTLS gives these callbacks no pointer of ours, so the listener's certificates are known here by a variable: one HTTPS server a
 * process. */
#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdatomic.h>
#include <string.h>

#include "base/log.h"
#include "front/http/http_internal.h"
#include "front/net/net_tls.h"

#define MAX_CLIENT_CHAIN 8

static _Atomic(struct net_tls *) listener;

/* 0 accepts the peer. */
static int verify_client(gnutls_session_t session)
{
  const struct net_tls_set *set = net_tls_now(atomic_load(&listener));
  unsigned n = 0, n_read = 0, wrong = 1;
  const gnutls_datum_t *peers = gnutls_certificate_get_peers(session, &n);
  gnutls_x509_crt_t chain[MAX_CLIENT_CHAIN];
  if (!peers || n > MAX_CLIENT_CHAIN || !set->trust) return GNUTLS_E_CERTIFICATE_ERROR;
  int code = 0;
  for (; code >= 0 && n_read < n; n_read += code >= 0) {
    code = gnutls_x509_crt_init(&chain[n_read]);
    if (code < 0) break;
    code = gnutls_x509_crt_import(chain[n_read], &peers[n_read], GNUTLS_X509_FMT_DER);
    if (code < 0) gnutls_x509_crt_deinit(chain[n_read]);
  }
  if (code >= 0) code = gnutls_x509_trust_list_verify_crt(set->trust, chain, n_read, 0, &wrong, NULL);
  for (unsigned i = 0; i < n_read; i++) gnutls_x509_crt_deinit(chain[i]);
  if (code < 0 || wrong) log_info("http", "a client's certificate was refused");
  return code < 0 || wrong ? GNUTLS_E_CERTIFICATE_ERROR : 0;
}

/* GnuTLS asks for our certificate before it asks the client for its own. What is returned is not freed by it. */
static int choose_certificate(gnutls_session_t session, const gnutls_datum_t *authorities, int n_authorities,
                              const gnutls_pk_algorithm_t *algorithms, int n_algorithms, gnutls_pcert_st **chain, unsigned *n_chain,
                              gnutls_privkey_t *key)
{
  const struct net_tls_set *set = net_tls_now(atomic_load(&listener));
  if (set->trust) {
    gnutls_certificate_server_set_request(session, GNUTLS_CERT_REQUIRE);
    gnutls_session_set_verify_function(session, verify_client);
  }
  *chain = (gnutls_pcert_st *)set->chain;
  *n_chain = set->n_chain;
  *key = set->private_key;
  return 0;
}

int http_tls_options(struct net_tls *tls, struct MHD_OptionItem *out)
{
  gnutls_certificate_retrieve_function2 *choose = choose_certificate;
  atomic_store(&listener, tls);
  memcpy(&out[0], &(struct MHD_OptionItem){.option = MHD_OPTION_HTTPS_CERT_CALLBACK}, sizeof out[0]);
  memcpy(&out[0].ptr_value, &choose, sizeof choose); /* a pointer to a function in a pointer's place, as the library wants it */
  return 1;
}
