/* Cross-origin requests of browsers (https://fetch.spec.whatwg.org/#http-cors-protocol): preflights are answered without a key, for
 * browsers send none with them, and say only what any page may know. Without cors-allow-origin none of it exists. */
#include <string.h>

#include "front/http/http_internal.h"

#define ANY "*"

static bool is_allowed(const char *origins, const char *origin)
{
  size_t n = strlen(origin);
  if (!strcmp(origins, ANY)) return true;
  for (const char *at = origins; *at;) {
    size_t n_word = strcspn(at, ",");
    if (n_word == n && !strncmp(at, origin, n)) return true;
    at += n_word + (at[n_word] == ',');
    at += strspn(at, " ");
  }
  return false;
}

static const char *header_of(const struct http_request *request, const char *name)
{
  return MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, name);
}

/* On the pool's thread, before anything is answered: the request's origin, when it may be told the answer. */
static void note_origin(struct http_request *request)
{
  const char *origins = request->server->options.cors_origins, *origin = header_of(request, "Origin");
  if (!origins || !origin || strlen(origin) >= sizeof request->origin || !is_allowed(origins, origin)) return;
  memcpy(request->origin, origin, strlen(origin) + 1);
}

void http_cors_add_headers(struct http_request *request, struct MHD_Response *response)
{
  const char *origins = request->server->options.cors_origins;
  if (!origins) return;
  bool is_any = !strcmp(origins, ANY);
  if (!is_any) MHD_add_response_header(response, "Vary", "Origin"); /* also where it is not allowed: caches keep the answers apart */
  if (!request->origin[0]) return;
  MHD_add_response_header(response, "Access-Control-Allow-Origin", is_any ? ANY : request->origin);
  MHD_add_response_header(response, "Access-Control-Expose-Headers",
                          "X-Request-Id, Retry-After, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
                          "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens");
}

bool http_cors_preflight(struct http_request *request, const char *method)
{
  note_origin(request);
  if (!request->origin[0] || strcmp(method, "OPTIONS") || !header_of(request, "Access-Control-Request-Method") || request->route < 0)
    return false;
  struct MHD_Response *response = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
  if (!response) return false;
  MHD_add_response_header(response, "Access-Control-Allow-Methods", http_routes[request->route].is_post ? "POST" : "GET, HEAD");
  /* Client libraries add headers of their own (OpenAI's a dozen X-Stainless-*); the asterisk stands for all but Authorization. */
  MHD_add_response_header(response, "Access-Control-Allow-Headers",
                          "Authorization, Content-Type, X-Request-Id, X-QoS-Level, traceparent, tracestate, *");
  MHD_add_response_header(response, "Access-Control-Max-Age", "600");
  http_add_headers(request, response);
  pthread_mutex_lock(&request->mutex);
  request->response = response;
  request->status = MHD_HTTP_NO_CONTENT;
  pthread_mutex_unlock(&request->mutex);
  return true;
}
