/* Counters and histograms that are fed by whole requests (front/api/api_record.h): by tenant, by service class, by stage.
 *
 * Tenants are bounded: the first METRICS_MAX_TENANTS that are seen have rows of their own, all others share the row "other" (a tenant
 * of that name too), so that a scrape stays small whatever clients call themselves. Requests without a tenant (no keys in use, refused
 * keys) count under "none".
 *
 * Thread-safe. One short mutex per request, never held while rendering text. */
#ifndef SITS_FRONT_METRICS_METRICS_REQUEST_H
#define SITS_FRONT_METRICS_METRICS_REQUEST_H

#include "base/buf.h"
#include "front/api/api_record.h"

enum { METRICS_MAX_TENANTS = 64 };

struct metrics_requests;

/* NULL when out of memory. */
struct metrics_requests *metrics_requests_create(void);
void metrics_requests_destroy(struct metrics_requests *requests);
/* Public routes and requests that are no calls of the api count by nothing here. */
void metrics_requests_take(struct metrics_requests *requests, const struct api_record *record);
/* label: model_name="..." */
void metrics_requests_render(struct metrics_requests *requests, const char *label, struct buf *out);

#endif
