/* See api_record.h. */
#include "front/api/api_record.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "front/api/api_internal.h"

static int hex_value(char c)
{
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1; /* upper case is not allowed in a traceparent */
}

/* n bytes of lower-case hex digits; false for anything else, and, unless may_be_zero, for all zeros. */
static bool read_hex(const char *text, unsigned char *out, int n, bool may_be_zero)
{
  bool has_bit = may_be_zero;
  for (int i = 0; i < n; i++) {
    int high = hex_value(text[2 * i]), low = high < 0 ? -1 : hex_value(text[2 * i + 1]);
    if (low < 0) return false;
    out[i] = (unsigned char)(high << 4 | low);
    has_bit |= out[i] != 0;
  }
  return has_bit;
}

/* version "-" trace-id "-" parent-id "-" flags; a version above 00 may have more after a further dash, ff is invalid. */
void api_trace_parent_parse(const char *traceparent, const char *tracestate, struct api_trace_parent *out)
{
  enum { LENGTH = 55, TRACE_AT = 3, SPAN_AT = 36, FLAGS_AT = 53 };
  unsigned char version, flags;
  *out = (struct api_trace_parent){0};
  if (!traceparent) return;
  size_t n = strnlen(traceparent, LENGTH + 1);
  if (n < LENGTH || traceparent[2] != '-' || traceparent[35] != '-' || traceparent[52] != '-') return;
  if (!read_hex(traceparent, &version, 1, true) || version == 0xff) return;
  if (traceparent[LENGTH] && (!version || traceparent[LENGTH] != '-')) return;
  struct api_trace_parent parent = {0};
  if (!read_hex(traceparent + TRACE_AT, parent.trace_id, 16, false) || !read_hex(traceparent + SPAN_AT, parent.span_id, 8, false) ||
      !read_hex(traceparent + FLAGS_AT, &flags, 1, true))
    return;
  *out = parent;
  out->is_set = true;
  out->is_sampled = flags & 1;
  if (tracestate && strnlen(tracestate, sizeof out->state) < sizeof out->state) snprintf(out->state, sizeof out->state, "%s", tracestate);
}

void api_peer_name(const struct sockaddr *address, char out[API_PEER_BYTES])
{
  char text[INET6_ADDRSTRLEN] = "";
  out[0] = '\0';
  if (address && address->sa_family == AF_INET) {
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text);
    snprintf(out, API_PEER_BYTES, "%s:%d", text, ntohs(v4->sin_port));
  } else if (address && address->sa_family == AF_INET6) {
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;
    inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    snprintf(out, API_PEER_BYTES, "[%s]:%d", text, ntohs(v6->sin6_port));
  }
}

void api_set_observer(struct api *api, api_observer *observer, void *context)
{
  api->observer = observer;
  api->observer_context = context;
}

void api_set_prompt_bytes(struct api *api, size_t max_bytes) { api->prompt_bytes = max_bytes; }

void api_observe(const struct api *api, const struct api_record *record)
{
  if (api->observer) api->observer(api->observer_context, record);
}

void api_record_call(struct api_record *record, const struct api_call *call)
{
  const struct api_model *model = api_model(call->api);
  record->request = call->request;
  record->model = call->request->model ? call->request->model : model ? model->names[0] : NULL;
  record->prompt = call->prompt.failed ? NULL : call->prompt.data;
  record->is_prompt_omitted = call->prompt.failed;
  record->usage = call->usage;
}
