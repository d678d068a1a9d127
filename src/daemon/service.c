/* See service.h. */
#include "daemon/service.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "daemon/ranks.h"
#include "daemon/secrets.h"
#include "tensor/gguf.h"

#define AUDIT_QUEUE_BYTES (64 << 20)      /* lines that may wait for a slow disk */
#define AUDIT_PROMPT_BYTES (512 << 10)    /* longest prompt that is kept, as JSON */
#define TRACE_INTERVAL_US 1000000
#define FLUSH_US 2000000                  /* time for last bytes to leave after the last request has ended */

static enum sits_status open_grpc(struct service *service, const struct options *options, struct sits_error *err)
{
  struct rpc_options rpc = {.host = options->grpc_host, .port = (int)options->grpc_port,
                            .max_connections = (int)options->grpc_max_connections, .access = service->access};
  if (!rpc.port) return SITS_OK;
  enum sits_status status = SITS_OK;
  if (options->ssl_certfile)
    status = net_tls_open(options->ssl_certfile, options->ssl_keyfile, options->grpc_client_cafile, &service->grpc_tls, err);
  if (status) return status;
  rpc.tls = service->grpc_tls;
  status = rpc_server_start(&rpc, service->api, &service->health, service->metrics, &service->rpc, err);
  if (!status) log_info("daemon", "gRPC on %s:%d%s", rpc.host, rpc_server_port(service->rpc), rpc.tls ? " with TLS" : "");
  return status;
}

/* Every request that is over passes here. What the log or a span tells is in the metrics. */
static void observe(void *context, const struct api_record *record)
{
  struct service *service = context;
  metrics_request(service->metrics, record);
  if (service->audit) audit_record(service->audit, record);
  if (service->trace) trace_record(service->trace, record);
}

static enum sits_status open_observers(struct service *service, const struct options *options, struct sits_error *err)
{
  struct audit_options audit = {.path = options->audit_log, .key_file = options->audit_key_file, .rotate_bytes = options->audit_rotate_size,
                                .rotate_us = (int64_t)(options->audit_rotate_s * 1e6), .queue_bytes = AUDIT_QUEUE_BYTES};
  enum sits_status status = options->audit_log ? audit_open(&audit, service->metrics, &service->audit, err) : SITS_OK;
  struct trace_options trace = {.endpoint = options->otlp_endpoint, .headers = options->otlp_headers,
                                .ratio = options->otlp_sampling_ratio, .queue_bytes = options->otlp_queue_size,
                                .interval_us = TRACE_INTERVAL_US};
  if (!status && trace.endpoint) status = trace_open(&trace, service->metrics, &service->trace, err);
  if (service->audit && options->audit_log_prompts) api_set_prompt_bytes(service->api, AUDIT_PROMPT_BYTES);
  api_set_observer(service->api, observe, service);
  return status;
}

/* Names: --served-model-name's comma-separated list, or the last part of the path without ".gguf". */
static enum sits_status choose_names(struct service *service, struct sits_error *err)
{
  struct api_model *model = &service->served;
  const char *given = service->options->served_model_name, *path = service->options->model, *slash;
  if (!given) {
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    slash = memrchr(path, '/', n);
    const char *base = slash && slash + 1 < path + n ? slash + 1 : path;
    n -= (size_t)(base - path);
    if (n > 5 && !strncmp(base + n - 5, ".gguf", 5)) n -= 5;
    service->model_name = mem_strndup(base, n);
  } else {
    service->model_name = mem_strdup(given);
  }
  if (!service->model_name) return sits_fail(err, SITS_NOMEM, "no memory for the model's name");
  char *at = service->model_name, *part;
  while ((part = strsep(&at, given ? "," : ""))) {
    size_t n = strlen(part);
    for (; given && n && part[n - 1] == ' '; n--) part[n - 1] = '\0';
    if (given) part += strspn(part, " ");
    if (!*part) continue;
    if (model->n_names == API_MAX_MODEL_NAMES)
      return sits_fail_param(err, SITS_CONFIG, "served-model-name", "served-model-name has over %d names", API_MAX_MODEL_NAMES);
    model->names[model->n_names++] = part;
  }
  if (!model->n_names) return sits_fail_param(err, SITS_CONFIG, "served-model-name", "served-model-name is empty");
  return SITS_OK;
}

enum sits_status service_open(struct service *service, const struct options *options, struct sits_error *err)
{
  *service = (struct service){.options = options};
  health_init(&service->health, (int64_t)(options->liveness_timeout_s * 1e6));
  service->has_wedge = getenv("SITS_TEST_WEDGE") != NULL;
  enum sits_status status = metrics_create(&service->metrics);
  if (status) return sits_fail(err, status, "no memory for the metrics");
  status = access_create(options->api_key, options->api_key_file, &service->access, err);
  if (status) return status;
  status = choose_names(service, err);
  if (status) return status;
  metrics_set_model(service->metrics, service->served.names[0]); /* before the first scrape, which may come while the model loads */
  metrics_watch_gpus(service->metrics);
  struct api_limits limits = api_limits_default;
  limits.max_body_bytes = options->max_body_bytes;
  status = api_create(&limits, &service->api, err);
  if (status) return status;
  api_set_timeout(service->api, (int64_t)(options->request_timeout_s * 1e6));
  status = open_observers(service, options, err);
  if (status) return status;
  if (options->ssl_certfile)
    status = net_tls_open(options->ssl_certfile, options->ssl_keyfile, options->ssl_ca_certs, &service->http_tls, err);
  if (status) return status;
  struct http_options http = {.host = options->host, .port = (int)options->port, .n_threads = (int)options->http_threads, .n_workers = 2,
                              .max_connections = (int)options->max_connections, .idle_timeout_s = (int64_t)options->http_idle_timeout_s,
                              .ping_us = (int64_t)(options->sse_ping_s * 1e6), .access = service->access,
                              .metrics_require_key = options->metrics_require_key, .tls = service->http_tls,
                              .cors_origins = options->cors_allow_origin};
  status = http_server_start(&http, service->api, &service->health, service->metrics, &service->http, err);
  if (status) return status;
  log_info("daemon", "listening on %s://%s:%d", options->ssl_certfile ? "https" : "http", options->host, http_server_port(service->http));
  return open_grpc(service, options, err);
}

/* ---- chat template ---- */

/* tokenizer_config.json's chat_template: a string, or a list of named ones of which "default" counts. */
static const json_t *template_of_config(const json_t *config)
{
  const json_t *value = json_object_get(config, "chat_template");
  if (!json_is_array(value)) return value;
  for (size_t i = 0; i < json_array_size(value); i++) {
    const json_t *entry = json_array_get(value, i);
    const char *name = json_string_value(json_object_get(entry, "name"));
    if (name && !strcmp(name, "default")) return json_object_get(entry, "template");
  }
  return NULL;
}

static enum sits_status read_file(const char *path, struct buf *out, struct sits_error *err)
{
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  if (!buf_append(out, file.data, file.n_bytes)) status = sits_fail(err, SITS_TOO_LARGE, "%s: too large for a chat template", path);
  mapfile_close(&file);
  return status;
}

/* The template's source into out; empty when the model has none. */
static enum sits_status read_template(const struct service *service, const struct source *source, struct buf *out, struct sits_error *err)
{
  const char *given = service->options->chat_template;
  if (given) {
    enum sits_status status = read_file(given, out, err);
    return status || out->size ? status : sits_fail_param(err, SITS_CONFIG, "chat-template", "chat-template %s is empty", given);
  }
  if (source == NULL) return SITS_OK;
  if (source_kind(source) == SOURCE_GGUF) {
    struct gguf_string text;
    if (gguf_get_string(source_gguf(source), "tokenizer.chat_template", &text) && !buf_append(out, text.data, text.size))
      return sits_fail(err, SITS_FORMAT, "tokenizer.chat_template is too large");
    return SITS_OK;
  }
  static const char template_file[] = "chat_template.jinja", config_file[] = "tokenizer_config.json";
  if (source_hf_has(source, template_file)) return source_hf_read(source, template_file, out, err);
  if (!source_hf_has(source, config_file)) return SITS_OK;
  json_t *config = NULL;
  struct buf file;
  buf_init(&file, json_limits_file.max_bytes);
  enum sits_status status = source_hf_read(source, config_file, &file, err);
  if (!status) status = json_parse(file.data, file.size, &json_limits_file, &config, err);
  buf_fini(&file);
  if (status) return status;
  const json_t *text = template_of_config(config);
  if (json_is_string(text) && !buf_append(out, json_string_value(text), json_string_length(text)))
    status = sits_fail(err, SITS_FORMAT, "%s: chat_template is too large", config_file);
  json_decref(config);
  return status;
}

/* A template that cannot be used is not fatal unless it was asked for: completions work without one. */
static enum sits_status load_template(struct service *service, const struct source *source, bool *knows_developer, struct sits_error *err)
{
  struct buf text;
  buf_init(&text, 4u << 20);
  enum sits_status status = read_template(service, source, &text, err);
  if (!status && text.size) {
    *knows_developer = memmem(text.data, text.size, "developer", 9) != NULL;
    status = chat_template_create(text.data, text.size, &service->chat_template, err);
  }
  buf_fini(&text);
  if (status && !service->options->chat_template) {
    log_warn("daemon", "the model's chat template cannot be used, chat completions are refused: %s", err->text);
    status = SITS_OK;
  } else if (!status && !service->chat_template) {
    log_warn("daemon", "the model has no chat template, chat completions are refused; give one with --chat-template");
  }
  return status;
}

/* ---- loading ---- */

/* "prefill=0,decode=1" */
static enum sits_status read_placement(const struct options *o, struct instance_options *out, struct sits_error *err)
{
  int end = 0;
  if (o->placement == NULL) return SITS_OK;
  if (sscanf(o->placement, "prefill=%3d,decode=%3d%n", &out->prefill_device, &out->decode_device, &end) != 2 ||
      o->placement[end] != '\0' || out->prefill_device < 0 || out->decode_device < 0)
    return sits_fail_param(err, SITS_CONFIG, "placement", "placement: '%.64s' is not of the form prefill=0,decode=1", o->placement);
  out->has_placement = true;
  return SITS_OK;
}

/* Stands between engine and api in tests only: while the hook is on, the engine's thread does not come back from its callback. */
static void wedge_on_events(void *context, struct sits_request *const *requests, int32_t n_requests)
{
  struct service *service = context;
  while (atomic_load(&service->is_wedged)) usleep(10000);
  api_on_events(service->api, requests, n_requests);
}

void service_wedge(struct service *service)
{
  if (!service->has_wedge) return;
  log_warn("daemon", "test hook: the engine stands still until the stop");
  atomic_store(&service->is_wedged, true);
}

static enum sits_status open_instance(struct service *service, struct sits_error *err)
{
  const struct options *o = service->options;
  struct instance_options options = {.model_path = o->model,
                                     .device = o->device,
                                     .n_threads = (int32_t)o->threads,
                                     .isa = o->isa,
                                     .prefill_weights = o->prefill_weights,
                                     .max_model_len = (int32_t)o->max_model_len,
                                     .max_num_seqs = (int32_t)o->max_num_seqs,
                                     .max_num_batched_tokens = (int32_t)o->max_num_batched_tokens,
                                     .kv_cache_bytes = (uint64_t)o->kv_cache_memory,
                                     .gpu_memory_utilization = o->gpu_memory_utilization,
                                     .kv_codec = o->kv_cache_dtype,
                                     .kv_page_budget = (int32_t)o->kv_page_budget,
                                     .prefix_caching = o->enable_prefix_caching,
                                     .swap_bytes = (uint64_t)o->swap_space,
                                     .policy = o->enable_chunked_prefill ? o->policy : "continuous",
                                     .spec_max_tokens = (int32_t)o->speculative_tokens,
                                     .spec_max_running = (int32_t)o->speculative_max_running,
                                     .draft_model_path = o->draft_model,
                                     .itl_target_us = (int64_t)(o->itl_target_ms * 1000),
                                     .ttft_target_us = (int64_t)(o->ttft_target_ms * 1000),
                                     .max_waiting_requests = (int32_t)o->max_queued_requests,
                                     .max_waiting_tokens = o->max_queued_tokens,
                                     .on_events = service->has_wedge ? wedge_on_events : api_on_events,
                                     .events_user = service->has_wedge ? (void *)service : (void *)service->api};
  struct nodes_options nodes;
  enum sits_status status = ranks_read(o, &nodes, &options, err);
  if (!status) status = read_placement(o, &options, err);
  return status ? status : instance_open(&options, &service->instance, err);
}

static void read_stats(void *context, struct engine_stats *out) { engine_stats(instance_engine(context), out); }
static int32_t read_retry_after_s(void *context) { return engine_retry_after_s(instance_engine(context)); }

static int64_t read_heartbeat_age_us(void *context)
{
  struct sits_engine *engine = instance_engine(context);
  if (engine_state(engine) == ENGINE_FAILED || instance_is_lost(context)) return -1;
  int64_t age_us = clock_monotonic_us() - engine_heartbeat_us(engine);
  return age_us > 0 ? age_us : 0;
}

static void publish(struct service *service, const struct instance_info *info)
{
  service->http_engine = (struct http_engine){.stats = read_stats, .retry_after_s = read_retry_after_s, .context = service->instance,
                                              .page_tokens = info->n_pages ? KV_PAGE_TOKENS : 0};
  health_watch(&service->health, read_heartbeat_age_us, service->instance);
  http_server_set_engine(service->http, &service->http_engine);
  health_set(&service->health, HEALTH_READY);
}

/* A draft model's guesses are token ids, so its tokenizer must be the model's own. */
static enum sits_status check_draft(const struct service *service, struct sits_error *err)
{
  const struct model *draft = instance_draft_model(service->instance);
  struct tokenizer *tokenizer = NULL;
  int32_t id = 0;
  if (!draft) return SITS_OK;
  enum sits_status status = draft->source ? tokenizer_load(draft->source, &tokenizer, err)
                                          : tokenizer_numbered(draft->config.n_vocab, &tokenizer, err);
  if (!status && !tokenizer_same(service->tokenizer, tokenizer, &id))
    status = sits_fail_param(err, SITS_CONFIG, "draft-model", "draft-model %s has another tokenizer: token %d is not the model's",
                             service->options->draft_model, id);
  tokenizer_destroy(tokenizer);
  return status;
}

enum sits_status service_load(struct service *service, struct sits_error *err)
{
  int64_t start_us = clock_monotonic_us();
  struct api_model served = service->served;
  served.loaded_unix_s = clock_unix_s();
  enum sits_status status = open_instance(service, err);
  if (status) return status;
  const struct source *source = instance_model(service->instance)->source;
  status = source ? tokenizer_load(source, &service->tokenizer, err)
                  : tokenizer_numbered(instance_model(service->instance)->config.n_vocab, &service->tokenizer, err); /* synthetic:... */
  if (!status) status = check_draft(service, err);
  if (!status) status = load_template(service, source, &served.knows_developer_role, err);
  if (status) return status;
  int32_t n_ends = 0;
  const int32_t *ends = tokenizer_end_tokens(service->tokenizer, &n_ends);
  status = instance_set_end_ids(service->instance, ends, n_ends);
  if (status) return sits_fail(err, status, "no memory for the end tokens");
  status = instance_start(service->instance, err);
  if (status) return status;
  struct instance_info info;
  instance_info(service->instance, &info);
  served.engine = instance_engine(service->instance);
  served.tokenizer = service->tokenizer;
  served.chat_template = service->chat_template;
  served.max_model_len = info.max_model_len;
  served.loaded_bytes = info.weight_bytes;
  metrics_set_memory(service->metrics, &(struct metrics_memory){.codec = kv_codec_name(info.kv_codec), .page_bytes = info.page_bytes,
                                                                .weight_bytes = info.weight_bytes, .kv_bytes = info.kv_bytes,
                                                                .draft_weight_bytes = info.draft_weight_bytes,
                                                                .draft_kv_bytes = info.draft_kv_bytes});
  status = api_model_set(service->api, &served, err);
  if (status) return status;
  publish(service, &info);
  log_info("daemon",
           "ready model=%s device=%s max_model_len=%d max_num_seqs=%d max_num_batched_tokens=%d weights_mb=%.1f kv_pages=%d kv_mb=%.1f "
           "draft_kv_mb=%.1f open_ms=%.0f pack_ms=%.0f ms=%.0f",
           served.names[0], info.device_name, info.max_model_len, info.max_num_seqs, info.max_num_batched_tokens,
           (double)info.weight_bytes / 1048576, info.n_pages, (double)info.kv_bytes / 1048576, (double)info.draft_kv_bytes / 1048576,
           (double)info.open_us / 1000, (double)info.compile_us / 1000, (double)(clock_monotonic_us() - start_us) / 1000);
  return SITS_OK;
}

/* ---- changing while serving ---- */

static void reload_tls(struct service *service, struct net_tls *tls, const char *what)
{
  struct sits_error err = {0};
  if (!tls) return;
  enum sits_status status = net_tls_reload(tls, &err);
  metrics_add(service->metrics, status ? METRICS_RELOAD_REFUSED : METRICS_RELOADED, 1);
  if (status) log_error("daemon", "the certificates of %s stay as they were: %s", what, err.text);
  else log_info("daemon", "certificates of %s read again", what);
}

void service_reload(struct service *service)
{
  struct sits_error err = {0};
  int32_t n_keys = 0;
  secrets_check(service->options);
  reload_tls(service, service->http_tls, "HTTP");
  reload_tls(service, service->grpc_tls, "gRPC");
  if (!service->options->api_key_file) return;
  enum sits_status status = access_reload(service->access, &n_keys, &err);
  metrics_add(service->metrics, status ? METRICS_RELOAD_REFUSED : METRICS_RELOADED, 1);
  if (status) log_error("daemon", "the API keys stay as they were: %s", err.text);
  else log_info("daemon", "API keys read again: %d in force", n_keys);
}

/* ---- stopping ---- */

void service_drain(struct service *service)
{
  atomic_store(&service->is_wedged, false);
  health_set(&service->health, HEALTH_DRAINING);
  api_stop_admission(service->api);
  http_server_drain(service->http);
  rpc_server_drain(service->rpc);
}

bool service_wait_idle(struct service *service, int64_t timeout_us)
{
  return api_wait_idle(service->api, timeout_us) && api_wait_delivered(service->api, timeout_us);
}

void service_leave(struct service *service) { audit_finish(service->audit); }

bool service_close(struct service *service)
{
  if (service->http) {
    service_drain(service);
    http_server_quiesce(service->http);
    rpc_server_quiesce(service->rpc);
    api_abort_all(service->api, SITS_UNAVAILABLE);
    api_wait_idle(service->api, FLUSH_US);
    http_server_wait_idle(service->http, FLUSH_US);
    rpc_server_wait_idle(service->rpc, FLUSH_US);
    if (!rpc_server_stop(service->rpc)) return false;
    http_server_set_engine(service->http, NULL);
    http_server_stop(service->http);
  }
  health_unwatch(&service->health);
  instance_close(service->instance);
  api_destroy(service->api);
  audit_close(service->audit);
  trace_close(service->trace);
  metrics_destroy(service->metrics);
  access_destroy(service->access);
  net_tls_close(service->http_tls);
  net_tls_close(service->grpc_tls);
  chat_template_destroy(service->chat_template);
  tokenizer_destroy(service->tokenizer);
  mem_free(service->model_name);
  *service = (struct service){0};
  return true;
}
