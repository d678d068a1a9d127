/* Pages from one CUDA backend's memory into another's (kv_send), beside nothing: on one device, and on two where there are two. What
 * arrives must be what was sent, to the pages that were named, and no other page may change; prints the speed for pages of an 8B model. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/clock.h"
#include "gpu_test.h"

enum { PAGES = 300, SENT = 256, ROUNDS = 8 };

struct end { struct backend *backend; struct backend_kv *kv; };

static struct end open_end(const struct backend_vtable *v, int32_t device, const struct kv_geometry *geometry)
{
  const struct backend_options options = {.device = device, .max_batch_tokens = 64, .max_seqs = 4};
  struct end end = {0};
  struct sits_error err = {0};
  if (v->open(&options, &end.backend, &err) != SITS_OK || v->kv_create(end.backend, geometry, &end.kv, &err) != SITS_OK) {
    verdict(false, "open device %d: %s", device, err.text);
    exit(1);
  }
  return end;
}

static void fill(uint8_t *page, size_t n, uint32_t seed)
{
  for (size_t i = 0; i < n; i++) page[i] = (uint8_t)((seed * 2654435761u + (uint32_t)i) >> 13);
}

/* Page i goes to page PAGES - 1 - i; the first pages there keep what they held. */
static void run(const struct backend_vtable *v, int32_t from_device, int32_t to_device, enum kv_codec codec)
{
  const struct kv_geometry geometry = {.n_layers = 32, .n_kv_heads = 8, .head_dim = 128, .n_pages = PAGES, .codec = codec};
  const size_t bytes = (size_t)v->kv_page_bytes(&geometry);
  struct end from = open_end(v, from_device, &geometry), to = open_end(v, to_device, &geometry);
  struct kv_copy copies[SENT];
  int32_t targets[SENT];
  uint8_t *page = malloc(bytes), *want = malloc(bytes);
  bool is_good = page && want;
  for (int32_t i = 0; i < PAGES && is_good; i++) {
    fill(page, bytes, (uint32_t)i + 1);
    is_good = v->kv_write_page(from.kv, i, page) == SITS_OK;
    fill(page, bytes, (uint32_t)i + 5000);
    is_good = is_good && v->kv_write_page(to.kv, i, page) == SITS_OK;
  }
  for (int32_t i = 0; i < SENT; i++) copies[i] = (struct kv_copy){i, targets[i] = PAGES - 1 - i};
  v->kv_expect(to.kv, targets, SENT);
  int64_t best_us = INT64_MAX, issue_us = 0;
  for (int r = 0; r < ROUNDS && is_good; r++) {
    const int64_t start_us = clock_monotonic_us();
    is_good = v->kv_send(from.kv, to.kv, copies, SENT) == SITS_OK;
    issue_us = clock_monotonic_us() - start_us;
    is_good = is_good && v->kv_sent(from.kv) == SITS_OK;
    const int64_t us = clock_monotonic_us() - start_us;
    if (us < best_us) best_us = us;
  }
  for (int32_t i = 0; i < PAGES && is_good; i++) {
    fill(want, bytes, i >= PAGES - SENT ? (uint32_t)(PAGES - 1 - i) + 1 : (uint32_t)i + 5000);
    is_good = v->kv_read_page(to.kv, i, page) == SITS_OK && memcmp(page, want, bytes) == 0;
  }
  const struct kv_copy wild = {PAGES, 0};
  is_good = is_good && v->kv_send(from.kv, to.kv, &wild, 1) == SITS_INVALID_ARGUMENT;
  verdict(is_good, "%s pages of %zu bytes, device %d to %d: %.1f GB/s (%d at once, %lld us to begin)", kv_codec_name(codec), bytes,
          from_device, to_device, (double)bytes * SENT / (double)best_us * 1e-3, SENT, (long long)issue_us);
  free(page);
  free(want);
  v->kv_destroy(from.kv);
  v->kv_destroy(to.kv);
  v->close(from.backend);
  v->close(to.backend);
}

int main(void)
{
  int n_devices = 0;
  (void)gpu_open();
  gpu_check_call(cudaGetDeviceCount(&n_devices), "cudaGetDeviceCount");
  const struct backend_vtable *v = backend_find("cuda");
  for (int32_t to = 0; to < n_devices && to < 2; to++) {
    run(v, 0, to, KV_INT4);
    run(v, 0, to, KV_F16);
  }
  if (n_devices > 1) run(v, 1, 0, KV_INT4);
  gpu_check_call(cudaSetDevice(0), "cudaSetDevice");
  return gpu_finish();
}
