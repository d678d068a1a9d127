/* Byte-pair encoding: a vocabulary of pieces, a table of merges, and the algorithm that turns one pre-token into ids.
 * Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016; sentencepiece's BPE (Kudo, 2018) differs only in
 * where symbols start (characters, with byte fallback) and in ranks that come from scores.
 *
 * Words: a piece is a token's text in the vocabulary; a word is the string a token stands for inside a pre-token (raw bytes for
 * byte-level models, the piece itself otherwise). Symbols are the pieces of a pre-token while it is merged.
 *
 * Rules: 1. The lowest (rank, position) pair merges first, until none is left; equal to Hugging Face's and llama.cpp's order.
 * 2. Immutable once built, but for a memo of one byte per token that racing threads may write with the same value. 3. n log n in the
 * length of a pre-token. 4. No merge ever makes a special token. */
#ifndef SITS_TEXT_BPE_H
#define SITS_TEXT_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"
#include "text/tokenizer.h"

/* Strings of a blob, by index. */
struct bpe_strings {
  char *bytes;
  uint32_t *start;      /* [n + 1] */
  int32_t n;
};

/* Open-addressing map from a string of a bpe_strings to its index. A slot holds keys of up to BPE_MAP_INLINE bytes whole (two loads
 * that overlap, exact together with the length), so that looking up a usual word touches one cache line. */
enum { BPE_MAP_INLINE = 12, BPE_MAP_LONG = 255, BPE_MAP_MAX = 1 << 24 };
struct bpe_map_key { uint64_t low; uint32_t high, length; }; /* longer keys: low is a hash, high the length, length BPE_MAP_LONG */
struct bpe_map_slot { uint64_t low; uint32_t high, length_index; }; /* length << 24 | index; UINT32_MAX: empty */
struct bpe_map {
  const struct bpe_strings *strings; /* borrowed */
  struct bpe_map_slot *slots;
  uint32_t mask;
  uint32_t longest;     /* bytes of the longest key */
};

struct bpe_merge { int32_t left, right, id; uint32_t rank; };

struct bpe {
  bool is_byte_level;   /* symbols start as bytes, else as characters */
  bool ignore_merges;   /* a pre-token that is in the vocabulary is that token, whatever the merges say */
  bool byte_fallback;   /* characters outside the vocabulary become byte tokens */
  bool fuse_unk;        /* neighbouring unknown characters give one unk */
  int32_t unk;          /* -1: unknown symbols vanish */
  struct bpe_map words; /* ordinary tokens by word */
  int32_t byte_id[256]; /* byte-level: id of the one-byte word; else the byte-fallback token; -1 none */
  bool has_all_bytes;   /* every byte_id is there */
  struct bpe_merge *merges; /* [merge_mask + 1] open addressing by (left, right); left -1: empty */
  uint32_t merge_mask;
  uint64_t *byte_pairs; /* [256 * 256] rank << 32 | id of the merge of two one-byte words, UINT64_MAX none; NULL unless byte-level */
  unsigned char *memo;  /* [n tokens] atomic: 0 unknown, 1 the word encodes to the token itself, 2 it does not */
  int32_t n_vocab;      /* ids from here on are stand-ins, for characters (or, byte-level, bytes) that merges know but that are no tokens */
  struct bpe_strings extra; /* the characters those stand for; they leave as bytes, missing bytes leave as nothing */
  struct bpe_map extra_map;
};

/* Scratch of one encoding thread, reused between pre-tokens; init to {0}. */
struct bpe_scratch { void *block; size_t n_bytes; };

bool bpe_strings_init(struct bpe_strings *strings, int32_t n, size_t n_bytes);
void bpe_strings_fini(struct bpe_strings *strings);
static inline const char *bpe_string(const struct bpe_strings *strings, int32_t index, size_t *n_bytes)
{
  *n_bytes = strings->start[index + 1] - strings->start[index];
  return strings->bytes + strings->start[index];
}

/* Map of at most BPE_MAP_MAX strings: those for which wants[index] (all but empty ones when NULL); the first of
 * equal strings wins. */
bool bpe_map_init(struct bpe_map *map, const struct bpe_strings *strings, const bool *wants);
void bpe_map_fini(struct bpe_map *map);
int32_t bpe_map_get(const struct bpe_map *map, const char *text, size_t n_bytes); /* -1 when absent */

/* Fill the merge table from a list (rank ties allowed; of equal pairs the last wins). Call after byte_id is set. */
bool bpe_set_merges(struct bpe *bpe, const struct bpe_merge *list, size_t n);
void bpe_fini(struct bpe *bpe);

/* Append the ids of one pre-token (valid UTF-8 unless byte-level). */
enum sits_status bpe_encode(const struct bpe *bpe, const char *text, size_t n_bytes, struct bpe_scratch *scratch,
                            struct token_list *out) SITS_MUST_CHECK;
void bpe_scratch_fini(struct bpe_scratch *scratch);

#endif
