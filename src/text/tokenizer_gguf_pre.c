/* See tokenizer_gguf_pre.h. */
#include "text/tokenizer_gguf_pre.h"

#include <string.h>

/* Letters with case, as DeepSeek's first tokenizers list them (Unicode 11, without the Georgian small letters). */
#define DEEPSEEK_LETTERS \
  "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}\\x{1C4}-\\x{293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}" \
  "\\x{376}\\x{377}\\x{37B}-\\x{37D}\\x{37F}\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}\\x{3A3}-\\x{3F5}\\x{3F7}-\\x{481}" \
  "\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}" \
  "\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}\\x{1F18}-\\x{1F1D}\\x{1F20}-\\x{1F45}" \
  "\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}\\x{1F59}\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}\\x{1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}" \
  "\\x{1FBE}\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}\\x{1FD0}-\\x{1FD3}\\x{1FD6}-\\x{1FDB}\\x{1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}" \
  "\\x{1FF6}-\\x{1FFC}\\x{2102}\\x{2107}\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}\\x{2124}\\x{2126}\\x{2128}\\x{212A}-\\x{212D}" \
  "\\x{212F}-\\x{2134}\\x{2139}\\x{213C}-\\x{213F}\\x{2145}-\\x{2149}\\x{214E}\\x{2183}\\x{2184}\\x{2C00}-\\x{2C7B}" \
  "\\x{2C7E}-\\x{2CE4}\\x{2CEB}-\\x{2CEE}\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}\\x{A680}-\\x{A69B}\\x{A722}-\\x{A76F}" \
  "\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}\\x{AB70}-\\x{ABBF}\\x{FB00}-\\x{FB06}\\x{FB13}-\\x{FB17}\\x{FF21}-\\x{FF3A}" \
  "\\x{FF41}-\\x{FF5A}\\x{10400}-\\x{1044F}\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}\\x{10C80}-\\x{10CB2}\\x{10CC0}-\\x{10CF2}" \
  "\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}"
#define CJK "[\\x{4E00}-\\x{9FA5}\\x{800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]+"
#define O200K_TAIL "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define O200K_FIRST "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
#define O200K_SECOND "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
#define SPACE_TAIL "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const char *const gpt2[] = {pretok_gpt2_pattern, NULL};
static const char *const gpt2_digits[] = {"\\p{N}", pretok_gpt2_pattern, NULL};
static const char *const llama3[] = {pretok_llama3_pattern, NULL};
static const char *const qwen2[] = {pretok_qwen2_pattern, NULL};
static const char *const fallback[] = {"[\\p{P}\\$\\+<=>\\^~\\|]+", pretok_gpt2_pattern, "\\p{N}+", "[0-9][0-9][0-9]", NULL};
static const char *const falcon[] = {"[\\p{P}\\$\\+<=>\\^~\\|`]+", pretok_gpt2_pattern, "[0-9][0-9][0-9]", NULL};
#define DEEPSEEK_PUNCTUATION "[!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}]+"
static const char *const deepseek_llm[] = {
  "[\\r\\n]", "\\s?[" DEEPSEEK_LETTERS "]+", "\\s?" DEEPSEEK_PUNCTUATION, "\\s+$", CJK, "\\p{N}+", NULL};
static const char *const deepseek_coder[] = {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", CJK, "\\p{N}", NULL};
static const char *const deepseek_v3[] = {
  "\\p{N}{1,3}", "[\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{309F}\\x{30A0}-\\x{30FF}]+",
  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*"
  SPACE_TAIL, NULL};
static const char *const tekken[] = {O200K_FIRST "|" O200K_SECOND "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" SPACE_TAIL, NULL};
static const char *const o200k[] = {
  O200K_FIRST O200K_TAIL "|" O200K_SECOND O200K_TAIL "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" SPACE_TAIL, NULL};

enum { IGNORES_MERGES = 1, ADDS_BOS = 2, ASCII_CASE = 4, LLAMA3 = IGNORES_MERGES | ADDS_BOS | ASCII_CASE };

static const struct pre { const char *name; const char *const *splits; unsigned flags; } table[] = {
  {"default", fallback, 0}, {"gpt-2", gpt2, 0}, {"phi-2", gpt2, 0}, {"mpt", gpt2, 0}, {"olmo", gpt2, 0}, {"falcon", falcon, 0},
  {"starcoder", gpt2_digits, 0}, {"refact", gpt2_digits, 0}, {"command-r", gpt2_digits, 0}, {"smollm", gpt2_digits, 0},
  {"codeshell", gpt2_digits, 0}, {"exaone", gpt2_digits, 0},
  {"llama3", llama3, LLAMA3}, {"llama-v3", llama3, LLAMA3}, {"llama-bpe", llama3, LLAMA3},
  {"dbrx", llama3, ASCII_CASE}, {"smaug-bpe", llama3, ASCII_CASE}, {"glm4", llama3, ASCII_CASE}, {"chatglm-bpe", llama3, ASCII_CASE},
  {"qwen2", qwen2, ASCII_CASE}, {"stablelm2", qwen2, ASCII_CASE}, {"deepseek-r1-qwen", qwen2, ASCII_CASE},
  {"deepseek-llm", deepseek_llm, 0}, {"deepseek-coder", deepseek_coder, 0}, {"deepseek-v3", deepseek_v3, 0},
  {"tekken", tekken, IGNORES_MERGES | ADDS_BOS}, {"gpt-4o", o200k, 0}, {"llama4", o200k, 0},
};

enum sits_status tokenizer_gguf_pre(struct tokenizer *tokenizer, const char *name, size_t n_bytes, bool *adds_bos, struct sits_error *err)
{
  const struct pre *found = NULL;
  for (size_t i = 0; i < sizeof table / sizeof *table && !found; i++)
    if (strlen(table[i].name) == n_bytes && memcmp(table[i].name, name, n_bytes) == 0) found = &table[i];
  if (!found)
    return sits_fail(err, SITS_UNSUPPORTED, "tokenizer.ggml.pre %.*s is not supported", n_bytes < 64 ? (int)n_bytes : 64, name);
  for (const char *const *split = found->splits; *split; split++) {
    enum sits_status status =
        pretok_add_split(&tokenizer->pretok, *split, strlen(*split), false, PRETOK_ISOLATED, false, false, err);
    if (status) return status;
    /* llama.cpp spells contractions as '[sS] and so on, which leaves out the long s that (?i:'s) takes. */
    if (found->flags & ASCII_CASE) tokenizer->pretok.steps[tokenizer->pretok.n - 1].folds_long_s = false;
  }
  tokenizer->bpe.ignore_merges = (found->flags & IGNORES_MERGES) != 0;
  *adds_bos = (found->flags & ADDS_BOS) != 0;
  return SITS_OK;
}
