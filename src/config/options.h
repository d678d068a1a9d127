/* The daemon's options. Names are vLLM's where it has one. To add one: a field here, a row in options.c, and
 * `scripts/gen_config` for the sample file. */
#ifndef SITS_CONFIG_OPTIONS_H
#define SITS_CONFIG_OPTIONS_H

#include "config/option.h"

struct options {
  /* model */
  const char *model;                /* GGUF file or Hugging Face directory */
  const char *served_model_name;    /* NULL: file or directory name */
  const char *chat_template;        /* file; NULL: the model's own */
  int64_t max_model_len;            /* 0: the model's */
  /* device */
  const char *device;               /* auto|cpu|cuda */
  const char *isa;                  /* auto|scalar|avx2|avx512 */
  int64_t threads;                  /* 0: one per core */
  double gpu_memory_utilization;
  const char *prefill_weights;      /* auto|resident|expand */
  int64_t tensor_parallel_size;     /* devices that the model is cut over */
  const char *tensor_parallel_devices; /* ordinals, comma-separated; NULL: chosen */
  const char *placement;            /* "prefill=A,decode=B"; NULL: none */
  bool tensor_parallel_compress;    /* all-reduces of prompts in 8 bits */
  double collective_timeout_s;
  /* several processes */
  bool multi_node;
  int64_t node_rank, node_count;    /* -1, 0: the launcher's environment */
  const char *leader_address;       /* NULL: likewise */
  int64_t leader_port;              /* 0: likewise */
  const char *node_secret;          /* NULL: none, which multi_node refuses */
  double node_connect_timeout_s;
  /* KV cache */
  const char *kv_cache_dtype;       /* auto|f16|int8|int4|fp4|fp4-sparse */
  int64_t kv_page_budget;           /* 0: half of max_model_len's pages */
  int64_t kv_cache_memory;          /* bytes, 0: sized from what is free */
  bool enable_prefix_caching;
  int64_t swap_space;               /* bytes of host memory for swapped sequences */
  /* scheduling */
  int64_t max_num_seqs, max_num_batched_tokens; /* 0: the device's choice */
  double itl_target_ms, ttft_target_ms; /* 0: none */
  const char *policy;               /* alps|continuous|chunked|static */
  bool enable_chunked_prefill;
  int64_t speculative_tokens, speculative_max_running;
  const char *draft_model;          /* NULL: prompt lookup only */
  int64_t max_queued_requests, max_queued_tokens;
  double request_timeout_s;         /* 0: none */
  /* gRPC */
  const char *grpc_host;
  int64_t grpc_port;                /* 0: off */
  int64_t grpc_max_connections;
  const char *grpc_client_cafile;   /* NULL: clients need no certificate */
  /* HTTP */
  const char *host;
  int64_t port;
  int64_t http_threads, max_connections, max_body_bytes;
  double http_idle_timeout_s, sse_ping_s;
  const char *ssl_certfile, *ssl_keyfile, *ssl_ca_certs;
  const char *cors_allow_origin;
  const char *api_key, *api_key_file;
  bool metrics_require_key;
  double shutdown_timeout_s, liveness_timeout_s;
  /* audit */
  const char *audit_log;            /* file, NULL: none is kept */
  bool audit_log_prompts;
  const char *audit_key_file;       /* NULL: the chain has no key */
  int64_t audit_rotate_size;
  double audit_rotate_s;
  /* traces */
  const char *otlp_endpoint;        /* NULL: no traces */
  const char *otlp_headers;
  double otlp_sampling_ratio;
  int64_t otlp_queue_size;
  /* logging */
  const char *log_level;            /* debug|info|warn|error */
  /* words of the command line */
  char *const *files;               /* [n_files] behind --verify-audit; borrowed from argv */
  int n_files;
  const char *config_path;          /* NULL: none; borrowed from argv or the environment */
  bool config_has_secret;           /* it sets an option that is never printed */
};

extern const struct option_spec options_table[];
extern const int options_table_size;

enum options_action {
  OPTIONS_RUN, OPTIONS_HELP, OPTIONS_VERSION, OPTIONS_PRINT_CONFIG, OPTIONS_PRINT_SAMPLE, OPTIONS_PRINT_MAN, OPTIONS_PRINT_COMPLETION,
  OPTIONS_VERIFY_AUDIT, OPTIONS_HASH_KEY
};

/* Words that are no rows of the table. */
struct options_word { const char *name, *value, *help; enum options_action action; }; /* value: NULL, or what follows the word */
extern const struct options_word options_words[];
extern const int options_n_words;

/* Read --config (if given), the environment and argv, in rising precedence, and check what concerns several options at once.
 * --help, --version, --print-config, --print-sample-config and --hash-key set *action. set must live as long as options. */
enum sits_status options_load(struct options *options, struct option_set *set, int argc, char *const *argv, enum options_action *action,
                              struct sits_error *err) SITS_MUST_CHECK;

/* The words above, then the table. */
bool options_write_help(const struct option_set *set, struct buf *out);
/* The manual page in roff, and bash's completion of the daemon's and the tools' options. */
bool options_write_man(const struct option_set *set, struct buf *out);
bool options_write_completion(const struct option_set *set, struct buf *out);

#endif
