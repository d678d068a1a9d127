/* The daemon's option table and how its sources combine. See options.h. */
#include "config/options.h"

#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct options, field)
#define STR(name, field, section, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", 0, NULL, section, help}
#define SECRET(name, field, section, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", OPTION_SECRET, NULL, section, help}
#define INT(name, field, def, min, max, unit, section, help) {name, OPTION_INT, AT(field), def, min, max, unit, 0, NULL, section, help}
#define FLT(name, field, def, min, max, unit, section, help) {name, OPTION_FLOAT, AT(field), def, min, max, unit, 0, NULL, section, help}
#define SIZE(name, field, def, min, max, section, help) {name, OPTION_BYTES, AT(field), def, min, max, "bytes", 0, NULL, section, help}
#define BOOL(name, field, def, section, help) {name, OPTION_BOOL, AT(field), def, 0, 0, "", 0, NULL, section, help}
#define ENUM(name, field, def, choices, section, help) {name, OPTION_ENUM, AT(field), def, 0, 0, "", 0, choices, section, help}

static const char default_host[] = "127.0.0.1";

#define GRPC_CONNECTIONS "1024"

const struct option_spec options_table[] = {
    STR("model", model, "Model",
        "The model: a GGUF file, a Hugging Face directory (config.json, tokenizer.json, *.safetensors), or a file of sits2026-compile."),
    STR("served-model-name", served_model_name, "Model",
        "Name that clients give in `model`. Default: the file's or directory's name."),
    STR("chat-template", chat_template, "Model", "File with a Jinja chat template to use instead of the model's own."),
    INT("max-model-len", max_model_len, "0", 0, 16777216, "tokens", "Model",
        "Longest prompt plus answer. 0: what the model was made for."),

    ENUM("device", device, "auto", "auto|cpu|cuda", "Device",
         "Where the model runs. auto takes a GPU where this build and machine have one."),
    ENUM("isa", isa, "auto", "auto|scalar|avx2|avx512", "Device",
         "CPU instruction set; auto finds the best that the processor has."),
    INT("threads", threads, "0", 0, 1024, "threads", "Device", "CPU worker threads. 0: one per core that this process may use."),
    FLT("gpu-memory-utilization", gpu_memory_utilization, "0.9", 0.05, 0.99, "fraction", "Device",
        "Share of the GPU's memory for weights, KV cache and workspaces together."),
    ENUM("prefill-weights", prefill_weights, "auto", "auto|resident|expand", "Device",
         "4-bit weights on a GPU, for steps of many tokens. resident: also kept in 8 or 16 bits, which takes two or four times as "
         "much memory again and makes chunks of prompts faster. expand: widened in each step. auto: resident for as many layers as "
         "a quarter of the memory holds that is free beside weights and workspaces."),
    INT("tensor-parallel-size", tensor_parallel_size, "1", 1, 8, "devices", "Device",
        "Devices of this machine that share the model: each holds a part of every layer's heads and channels. The sizes of the model "
        "must divide by it. On a CPU it only splits the threads, for comparison."),
    STR("tensor-parallel-devices", tensor_parallel_devices, "Device",
        "Which GPUs, comma-separated, one for each rank; one may be named twice. With multi-node exactly one, this process's. Default: the "
        "first ones, ordered by their links."),
    STR("placement", placement, "Device",
        "prefill=A,decode=B: prompts are read on GPU A, answers made on GPU B; both hold the whole model, and pages move from one to the "
        "other. A prompt is read on B where handing it over does not pay. Default: one GPU does both."),
    BOOL("tensor-parallel-compress", tensor_parallel_compress, "false", "Device",
         "Devices exchange the activations of steps of more than 256 tokens in 8 bits with a scale for each 128 channels: half the bytes "
         "between GPUs, at a small cost in accuracy. For prompts; needs tensor-parallel-size above 1."),
    FLT("collective-timeout-s", collective_timeout_s, "5", 0.1, 600, "s", "Device",
        "Devices that share a model wait so long for each other; then the model is out of service and its requests end."),

    BOOL("multi-node", multi_node, "false", "Multi-node",
         "This process is one of several that share the model, a device each, on one machine or many. The first one serves, the others "
         "follow it. Which of how many this is, and where the first one listens, say the options below or a launcher: RANK, WORLD_SIZE, "
         "MASTER_ADDR, MASTER_PORT and LOCAL_RANK of torchrun and its like, or LWS_WORKER_INDEX, LWS_GROUP_SIZE and LWS_LEADER_ADDRESS "
         "of a LeaderWorkerSet."),
    INT("node-rank", node_rank, "-1", -1, 7, "rank", "Multi-node", "This process, from 0, the first one. -1: the launcher says."),
    INT("node-count", node_count, "0", 0, 8, "processes", "Multi-node", "All processes. 0: the launcher says."),
    STR("leader-address", leader_address, "Multi-node",
        "Name or number of the address where the first process listens for the others. Default: the launcher's."),
    INT("leader-port", leader_port, "0", 0, 65535, "port", "Multi-node", "Its TCP port. 0: the launcher's, else 29400."),
    SECRET("node-secret", node_secret, "Multi-node",
           "16 to 256 bytes that all processes know; they prove it to each other when they connect. What follows is not encrypted: keep "
           "the port inside your own network."),
    FLT("node-connect-timeout-s", node_connect_timeout_s, "300", 1, 86400, "s", "Multi-node",
        "Time for all processes to come, and for their names to be known."),

    ENUM("kv-cache-dtype", kv_cache_dtype, "auto", "auto|f16|int8|int4|fp4|fp4-sparse", "KV cache",
         "How keys and values are stored. auto: what a file of sits2026-compile asks for, else f16. int4 and fp4 take about 0.3 of "
         "f16's bytes at a small cost in quality; fp4-sparse is fp4 whose sequences drop what heads look at least."),
    INT("kv-page-budget", kv_page_budget, "0", 0, 16777216, "pages", "KV cache",
        "With fp4-sparse: most pages of 64 tokens that a sequence keeps, at least 8. The first and the newest four stay; of the others "
        "each attention head keeps what it looks at. A page is 0.29 of f16's bytes. 0: half of the pages of max-model-len, so 15 % "
        "of f16's bytes. Prefix caching, swapping and speculation are off with fp4-sparse."),
    SIZE("kv-cache-memory", kv_cache_memory, "0", 0, 1e15, "KV cache",
         "Memory for KV pages, a draft model's among them. 0: enough for max-num-seqs sequences of full length, "
         "but at most half of the free memory, or what gpu-memory-utilization leaves on a GPU."),
    BOOL("enable-prefix-caching", enable_prefix_caching, "true", "KV cache",
         "Keep the pages of finished prompts, so that a request with the same beginning does not read it again."),
    SIZE("swap-space", swap_space, "0", 0, 1e15, "KV cache",
         "Host memory for sequences that lose their pages to others. 0: they are computed again, which is often as fast."),

    INT("max-num-seqs", max_num_seqs, "0", 0, 4096, "sequences", "Scheduling",
        "Most sequences that are decoded together. 0: 64 on a CPU, 256 on a GPU."),
    INT("max-num-batched-tokens", max_num_batched_tokens, "0", 0, 65536, "tokens", "Scheduling",
        "Most tokens in one step; also the largest prefill chunk. 0: 512 on a CPU, 8192 on a GPU, and never less than max-num-seqs."),
    FLT("itl-target-ms", itl_target_ms, "0", 0, 60000, "ms", "Scheduling",
        "Inter-token latency that running streams keep while prompts are read; prefill chunks shrink to hold it. 0: about 100 ms a step."),
    FLT("ttft-target-ms", ttft_target_ms, "0", 0, 3600000, "ms", "Scheduling",
        "Time to the first token that as many requests as possible keep when more come than can be served: the longest prompts wait then. "
        "0: prompts in order of arrival."),
    ENUM("policy", policy, "alps", "alps|continuous|chunked|static", "Scheduling",
         "How steps are planned. The others are there for comparison: whole prompts before decodes; 2048 tokens a step; a batch run to "
         "its end."),
    BOOL("enable-chunked-prefill", enable_chunked_prefill, "true", "Scheduling",
         "Read prompts in chunks beside running streams. Off: whole prompts, during which all streams wait; for comparison."),
    INT("speculative-tokens", speculative_tokens, "6", 0, 64, "tokens", "Scheduling",
        "Longest draft of prompt lookup, which is verified in one step and never changes an answer. 0: none. Nor are there any "
        "with int4 and fp4 pages."),
    STR("draft-model", draft_model, "Scheduling",
        "A smaller model with the same tokenizer, which guesses tokens where prompt lookup finds nothing; they are verified as its are. "
        "CPU only, on one device, with f16 or int8 pages."),
    INT("speculative-max-running", speculative_max_running, "8", 1, 4096, "sequences", "Scheduling",
        "Speculate while fewer sequences than that run."),
    INT("max-queued-requests", max_queued_requests, "1024", 1, 1000000, "requests", "Scheduling",
        "Requests that may wait; beyond them clients get 429 with Retry-After."),
    INT("max-queued-tokens", max_queued_tokens, "4194304", 64, 1e12, "tokens", "Scheduling",
        "Prompt tokens that may wait; beyond them clients get 429 with Retry-After."),
    FLT("request-timeout-s", request_timeout_s, "0", 0, 86400, "s", "Scheduling", "Time after which a request is ended. 0: no limit."),

    STR("host", host, "HTTP", "Address to listen on. Default: 127.0.0.1; 0.0.0.0 for every interface."),
    INT("port", port, "8000", 0, 65535, "port", "HTTP", "TCP port. 0: any free one, printed in the log line `listening`."),
    INT("http-threads", http_threads, "2", 1, 64, "threads", "HTTP", "Threads that serve connections."),
    INT("max-connections", max_connections, "4096", 8, 1000000, "connections", "HTTP",
        "Open connections; keep it well above the number of streams, for beyond it new clients wait in the backlog."),
    SIZE("max-body-bytes", max_body_bytes, "4M", 1024, 268435456, "HTTP", "Largest request body; beyond it 413."),
    FLT("http-idle-timeout-s", http_idle_timeout_s, "60", 1, 86400, "s", "HTTP",
        "Time after which an idle keep-alive connection is closed."),
    FLT("sse-ping-s", sse_ping_s, "10", 0, 3600, "s", "HTTP",
        "A comment line is sent on a stream that has been silent this long. 0: never."),
    STR("ssl-certfile", ssl_certfile, "HTTP",
        "PEM certificate chain; with ssl-keyfile it turns TLS on. Read again on SIGHUP, as the next two."),
    STR("ssl-keyfile", ssl_keyfile, "HTTP", "PEM private key."),
    STR("ssl-ca-certs", ssl_ca_certs, "HTTP",
        "PEM certificates of authorities: HTTP clients must then show a certificate that one of them signed, "
        "those that ask for health too."),
    STR("cors-allow-origin", cors_allow_origin, "HTTP",
        "Origins whose pages browsers may let talk to this server, with commas between them, or *. Default: none."),
    SECRET("api-key", api_key, "HTTP",
           "Key that clients must send as `Authorization: Bearer KEY` on every route but health. It has every role and no quota."),
    STR("api-key-file", api_key_file, "HTTP",
        "File of hashed keys with tenants, roles and quotas (src/front/access/README.md); sits2026d --hash-key makes an entry. "
        "Read again on SIGHUP."),
    BOOL("metrics-require-key", metrics_require_key, "true", "HTTP", "Where there are keys, ask for one on /metrics too."),
    FLT("shutdown-timeout-s", shutdown_timeout_s, "30", 0, 86400, "s", "HTTP",
        "On SIGTERM, time that running requests get to finish; a second signal ends them at once."),
    FLT("liveness-timeout-s", liveness_timeout_s, "120", 1, 86400, "s", "HTTP",
        "Liveness turns red when the engine's loop has not turned for that long. No step takes that long; a loop that stands still does "
        "not come back."),

    INT("grpc-port", grpc_port, "0", 0, 65535, "port", "gRPC", "TCP port of the gRPC front end. 0: off."),
    STR("grpc-host", grpc_host, "gRPC",
        "Address for gRPC. Default: 127.0.0.1. Its library takes no hostile peers well: elsewhere put a proxy in front."),
    INT("grpc-max-connections", grpc_max_connections, GRPC_CONNECTIONS, 1, 1000000, "connections", "gRPC",
        "Open connections without TLS; each may carry 1024 calls. Beyond it new ones are closed at once."),
    STR("grpc-client-cafile", grpc_client_cafile, "gRPC",
        "PEM certificates of authorities: with TLS, gRPC clients must then show a certificate that one of them signed."),

    STR("audit-log", audit_log, "Audit",
        "File that gets one hash-chained JSON line for each request but probes and scrapes: who, what, when, how much, outcome. "
        "Default: none. Check it with --verify-audit."),
    BOOL("audit-log-prompts", audit_log_prompts, "false", "Audit", "Write the prompts of generation calls into the audit log too."),
    STR("audit-key-file", audit_key_file, "Audit",
        "File with a secret of 32 bytes or more (openssl rand -hex 32), under which the log's hashes are made: who edits the log cannot "
        "make them anew without it. Give it before --verify-audit too. Default: hashes without a key."),
    SIZE("audit-rotate-size", audit_rotate_size, "100M", 4096, 1e13, "Audit",
         "Size at which the audit log is closed, renamed with the number of its first line, and begun anew."),
    FLT("audit-rotate-s", audit_rotate_s, "86400", 1, 1e9, "s", "Audit", "Age at which the same is done."),

    STR("otlp-endpoint", otlp_endpoint, "Traces",
        "OpenTelemetry collector for a span per request and stage, by OTLP/HTTP: http://host:4318 (to which /v1/traces is added) or a "
        "whole URL. Default: no traces."),
    SECRET("otlp-headers", otlp_headers, "Traces", "Headers for the collector: name=value,name=value."),
    FLT("otlp-sampling-ratio", otlp_sampling_ratio, "1", 0, 1, "fraction", "Traces",
        "Share of requests that are traced when the client's traceparent does not decide."),
    SIZE("otlp-queue-size", otlp_queue_size, "16M", 65536, 1e10, "Traces",
         "Spans that may wait for the collector; beyond it they are dropped."),

    ENUM("log-level", log_level, "info", "debug|info|warn|error", "Logging", "Least severe lines that are written to stderr."),
};
const int options_table_size = sizeof options_table / sizeof options_table[0];

const struct options_word options_words[] = {
    {"config", "FILE", "Read options from this YAML file; the environment and the command line win over it.", OPTIONS_RUN},
    {"help", NULL, "List all options.", OPTIONS_HELP},
    {"version", NULL, "Print the version.", OPTIONS_VERSION},
    {"print-config", NULL, "Print the options in force as YAML, secrets masked.", OPTIONS_PRINT_CONFIG},
    {"print-sample-config", NULL, "Print a YAML file with every option commented.", OPTIONS_PRINT_SAMPLE},
    {"hash-key", NULL, "Read a key from the standard input and print an entry for api-key-file.", OPTIONS_HASH_KEY},
    {"print-man", NULL, "Print the manual page, for man -l.", OPTIONS_PRINT_MAN},
    {"print-completion", NULL, "Print a file for bash's completion.", OPTIONS_PRINT_COMPLETION},
    {"verify-audit", "FILE...",
     "Check audit logs, oldest first (PATH.* PATH), and name the first bad line; after --audit-key-file FILE under that key.",
     OPTIONS_VERIFY_AUDIT},
};
const int options_n_words = sizeof options_words / sizeof options_words[0];

struct early { const char *config_path; enum options_action action; };

static const struct options_word *find_word(const char *text)
{
  for (int w = 0; w < options_n_words; w++)
    if (!strncmp(text, "--", 2) && !strcmp(text + 2, options_words[w].name)) return &options_words[w];
  return NULL;
}

/* Pick out the words that are no table rows (--config, --help, ...) and leave the others in rest (argc pointers). */
static enum sits_status split_args(int argc, char *const *argv, struct early *early, char **rest, int *n_rest, struct options *options,
                                   struct sits_error *err)
{
  *n_rest = 0;
  for (int i = 1; i < argc; i++) {
    const struct options_word *word = strcmp(argv[i], "-h") ? find_word(argv[i]) : find_word("--help");
    if (word && word->action != OPTIONS_RUN) {
      early->action = word->action;
      if (word->action != OPTIONS_VERIFY_AUDIT) continue;
      options->files = argv + i + 1; /* the rest of the line */
      options->n_files = argc - i - 1;
      return options->n_files ? SITS_OK : sits_fail_param(err, SITS_CONFIG, word->name, "command line: --%s needs files", word->name);
    }
    if (strncmp(argv[i], "--config=", 9) == 0) {
      early->config_path = argv[i] + 9;
    } else if (strcmp(argv[i], "--config") == 0) {
      if (i + 1 >= argc) return sits_fail_param(err, SITS_CONFIG, "config", "command line: --config needs a file");
      early->config_path = argv[++i];
    } else {
      rest[(*n_rest)++] = argv[i];
    }
  }
  return SITS_OK;
}

/* An option of multi-node that has a value; NULL: none. Without multi-node it would start a server of its own where a rank was meant. */
static const char *named_of_nodes(const struct options *options)
{
  if (options->node_rank >= 0) return "node-rank";
  if (options->node_count > 0) return "node-count";
  if (options->leader_address) return "leader-address";
  if (options->leader_port > 0) return "leader-port";
  return options->node_secret ? "node-secret" : NULL;
}

static enum sits_status check_together(struct options *options, enum options_action action, struct sits_error *err)
{
  if (!options->host) options->host = default_host;
  if (!options->grpc_host) options->grpc_host = default_host;
  if (!options->ssl_certfile != !options->ssl_keyfile)
    return sits_fail_param(err, SITS_CONFIG, "ssl-keyfile", "ssl-certfile and ssl-keyfile go together: give both or none");
  if (options->grpc_port && options->ssl_certfile && options->grpc_max_connections != strtoll(GRPC_CONNECTIONS, NULL, 10))
    return sits_fail_param(err, SITS_CONFIG, "grpc-max-connections",
                           "grpc-max-connections cannot be kept with TLS, where the gRPC library itself accepts");
  if (options->ssl_ca_certs && !options->ssl_certfile)
    return sits_fail_param(err, SITS_CONFIG, "ssl-ca-certs", "ssl-ca-certs needs ssl-certfile and ssl-keyfile");
  if (options->grpc_client_cafile && (!options->ssl_certfile || !options->grpc_port))
    return sits_fail_param(err, SITS_CONFIG, "grpc-client-cafile", "grpc-client-cafile needs grpc-port, ssl-certfile and ssl-keyfile");
  if (options->audit_log_prompts && !options->audit_log)
    return sits_fail_param(err, SITS_CONFIG, "audit-log-prompts", "audit-log-prompts needs audit-log");
  if (action == OPTIONS_RUN && options->audit_key_file && !options->audit_log)
    return sits_fail_param(err, SITS_CONFIG, "audit-key-file", "audit-key-file needs audit-log");
  const char *of_nodes = named_of_nodes(options);
  if (!options->multi_node && of_nodes) return sits_fail_param(err, SITS_CONFIG, of_nodes, "%s needs multi-node", of_nodes);
  if (!options->enable_chunked_prefill && strcmp(options->policy, "alps") && strcmp(options->policy, "continuous"))
    return sits_fail_param(err, SITS_CONFIG, "enable-chunked-prefill", "enable-chunked-prefill: off is the policy continuous, not %s",
                           options->policy);
  if (options->max_num_batched_tokens > 0 && options->max_num_batched_tokens < options->max_num_seqs)
    return sits_fail_param(err, SITS_CONFIG, "max-num-batched-tokens", "max-num-batched-tokens (%lld) must be at least max-num-seqs (%lld)",
                           (long long)options->max_num_batched_tokens, (long long)options->max_num_seqs);
  if (action == OPTIONS_RUN && !options->model)
    return sits_fail_param(err, SITS_CONFIG, "model", "no model: give --model PATH (a GGUF file or a Hugging Face directory)");
  return SITS_OK;
}

enum sits_status options_load(struct options *options, struct option_set *set, int argc, char *const *argv, enum options_action *action,
                              struct sits_error *err)
{
  enum { MOST_ARGS = 512 };
  char *rest[MOST_ARGS];
  int n_rest = 0;
  struct early early = {.config_path = getenv("SITS_CONFIG"), .action = OPTIONS_RUN};
  if (argc > MOST_ARGS) return sits_fail(err, SITS_CONFIG, "command line: more than %d words", MOST_ARGS);
  *options = (struct options){0};
  enum sits_status status = option_set_init(set, options_table, options_table_size, options, err);
  if (status) return status;
  status = split_args(argc, argv, &early, rest, &n_rest, options, err);
  if (!status && early.config_path) status = option_load_yaml(set, early.config_path, err);
  options->config_path = early.config_path;
  options->config_has_secret = !status && (options->api_key || options->node_secret || options->otlp_headers);
  if (!status) status = option_load_env(set, err);
  if (!status) status = option_parse_args(set, n_rest, rest, 0, NULL, err);
  bool is_checked = early.action == OPTIONS_RUN || early.action == OPTIONS_PRINT_CONFIG || early.action == OPTIONS_PRINT_SAMPLE;
  if (!status && is_checked) status = check_together(options, early.action, err);
  if (status) option_set_fini(set);
  else *action = early.action;
  return status;
}

bool options_write_help(const struct option_set *set, struct buf *out)
{
  buf_append_text(out, "Usage: sits2026d --model PATH [options]\n\n");
  for (int w = 0; w < options_n_words; w++) {
    const struct options_word *word = &options_words[w];
    buf_printf(out, "  --%s%s%s\n      %s\n", word->name, word->value ? " " : "", word->value ? word->value : "", word->help);
  }
  buf_append_char(out, '\n');
  return option_write_help(set, out);
}
