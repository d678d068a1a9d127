/* sits2026-eval COMMAND [options]: measures and dumps what a model computes. The commands lie in eval_*.c; options in the table here. */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "config/option.h"
#include "eval.h"

#define AT(field) offsetof(struct eval_options, field)
#define STR(name, field, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", 0, NULL, "Options", help}
#define INT(name, field, def, min, max, unit, help) {name, OPTION_INT, AT(field), def, min, max, unit, 0, NULL, "Options", help}
#define BOOL(name, field, help) {name, OPTION_BOOL, AT(field), "false", 0, 0, "", 0, NULL, "Options", help}
#define ENUM(name, field, def, choices, help) {name, OPTION_ENUM, AT(field), def, 0, 0, "", 0, choices, "Options", help}

static const struct option_spec specs[] = {
    STR("model", model, "The model: a GGUF file or a Hugging Face directory."),
    STR("models", models,
        "ITEM[@KV],... side by side; an ITEM is an engine file, a model, or a recipe (its name or YAML file) by which --model is compiled; "
        "KV: how its cache is stored. The first is the reference (compare, choice)."),
    STR("calibration", calibration, "UTF-8 text for recipes of --models that need one (compare, choice)."),
    INT("calibration-windows", calibration_windows, "3", 1, 1 << 20, "windows", "Windows of --ctx tokens that calibrate."),
    STR("text", text, "UTF-8 text file (perplexity, compare, tokenize, forced)."),
    STR("tasks", tasks, "JSON lines, {\"prompt\": \"...\", \"choices\": [\"...\", ...], \"answer\": 0} each (choice)."),
    STR("ids", ids, "Token ids as a JSON list (forced)."),
    STR("prompts", prompts, "JSON file: a list of {\"ids\": [...]} or {\"prompt\": \"...\"} (greedy)."),
    STR("parts", parts, "FILE,FILE,...: what compare wrote by --out for different windows of one text (join)."),
    STR("out", out,
        "File for results: float32 logits [position][vocabulary] (forced), int32 ids (tokenize), JSON (compare, join, choice)."),
    INT("ctx", ctx, "512", 4, 1 << 24, "tokens", "Window (perplexity, compare); longest task (choice)."),
    INT("windows", windows, "0", 0, 1e9, "windows", "Windows to score; 0: all whole ones (perplexity, compare)."),
    INT("skip-windows", skip_windows, "0", 0, 1e9, "windows", "Windows to leave out at the text's start (perplexity, compare)."),
    INT("top", top, "8", 1, 64, "ids", "Best ids to print at each position (forced)."),
    INT("max-tokens", max_tokens, "128", 1, 1 << 20, "tokens", "Longest continuation (greedy)."),
    INT("batch-tokens", batch_tokens, "512", 1, 65536, "tokens", "Most tokens in one step."),
    BOOL("ignore-eos", ignore_eos, "Go on past end tokens (greedy)."),
    BOOL("add-special", add_special, "Add what the tokenizer's post-processor adds (BOS)."),
    BOOL("parse-special", parse_special, "Take special tokens written out in the text as such."),
    BOOL("json", json, "Print JSON (perplexity, compare, choice; the others always do)."),
    BOOL("unfused", unfused, "Run plain ops only."),
    BOOL("by-layer", by_layer, "On the CPU with one layer in memory at a time: for models that do not fit (perplexity)."),
    ENUM("device", device, "auto", "auto|cpu|cuda", "Where the model runs."),
    ENUM("isa", isa, "auto", "auto|scalar|avx2|avx512", "CPU instruction set."),
    INT("threads", threads, "0", 0, 1024, "threads", "CPU worker threads. 0: one per core."),
    INT("tensor-parallel-size", tensor_parallel_size, "1", 1, 8, "devices", "Devices that share the model."),
    BOOL("tensor-parallel-compress", tensor_parallel_compress, "They sum the activations of more than 256 tokens a step in 8 bits."),
    BOOL("one-device", one_device, "All of them are device 0, for comparison."),
    ENUM("kv-cache-dtype", kv_cache_dtype, "auto", "auto|f16|f32|int8|int4|fp4|fp4-sparse", "How keys and values are stored."),
    INT("kv-page-budget", kv_page_budget, "0", 0, 1 << 24, "pages", "fp4-sparse: pages that a sequence keeps; 0: all."),
};

static const struct {
  const char *name;
  enum sits_status (*run)(const struct eval_options *, struct sits_error *);
  const char *help;
} commands[] = {
    {"perplexity", eval_perplexity, "perplexity of a text, with llama.cpp's windowing"},
    {"compare", eval_compare, "several models or recipes on the same windows, one table"},
    {"join", eval_join, "several results of compare, over different windows, as one"},
    {"choice", eval_choice, "multiple choice by log-likelihood"},
    {"forced", eval_forced, "logits over given ids"},
    {"greedy", eval_greedy, "most likely continuations of prompts"},
    {"tokenize", eval_tokenize, "token ids of a text"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0], N_SPECS = sizeof specs / sizeof specs[0] };

static int print_help(const struct option_set *set)
{
  struct buf help;
  buf_init(&help, 1 << 20);
  printf("usage: sits2026-eval COMMAND [options]\n\nCommands:\n");
  for (int i = 0; i < N_COMMANDS; i++) printf("  %-12s %s\n", commands[i].name, commands[i].help);
  if (option_write_help(set, &help)) printf("\n%s", help.data);
  buf_fini(&help);
  return 0;
}

static int run(int argc, char **argv, struct option_set *set, struct eval_options *options)
{
  const char *command = NULL;
  struct sits_error err = {0};
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return print_help(set);
  enum sits_status status = option_parse_args(set, argc, argv, 1, &command, &err);
  if (!status && !command) status = sits_fail(&err, SITS_CONFIG, "no command: see sits2026-eval --help");
  if (!status && !options->model && !options->models && !options->parts)
    status = sits_fail_param(&err, SITS_CONFIG, "model", "no model: give --model PATH");
  if (!status && options->one_device && options->tensor_parallel_size == 1)
    status = sits_fail_param(&err, SITS_CONFIG, "one-device", "one-device goes with tensor-parallel-size: one device shares nothing");
  int found = 0;
  while (!status && found < N_COMMANDS && strcmp(commands[found].name, command) != 0) found++;
  if (!status && found == N_COMMANDS) status = sits_fail(&err, SITS_CONFIG, "unknown command '%.32s': see sits2026-eval --help", command);
  if (!status) status = commands[found].run(options, &err);
  if (!status) return 0;
  fprintf(stderr, "sits2026-eval: %s\n", err.text);
  return status == SITS_CONFIG || status == SITS_INVALID_ARGUMENT ? 2 : 1;
}

int main(int argc, char **argv)
{
  struct eval_options options = {0};
  struct option_set set;
  struct sits_error err = {0};
  if (option_set_init(&set, specs, N_SPECS, &options, &err)) {
    fprintf(stderr, "sits2026-eval: %s\n", err.text);
    return 1;
  }
  int code = run(argc, argv, &set, &options);
  option_set_fini(&set);
  return code;
}
