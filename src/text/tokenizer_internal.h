/* What a tokenizer is made of; only files named tokenizer* and detok* in this folder include this.
 *
 * A loader (tokenizer_json.c, tokenizer_gguf.c) fills a struct tokenizer in this order: pieces, flags, steps of the normaliser and the
 * pre-tokenizer, decoded bytes, merges, added tokens; then tokenizer_seal builds the tables. Nothing changes afterwards. */
#ifndef SITS_TEXT_TOKENIZER_INTERNAL_H
#define SITS_TEXT_TOKENIZER_INTERNAL_H

#include "text/bpe.h"
#include "text/pretok.h"
#include "text/tokenizer.h"

enum { TOKENIZER_MAX_VOCAB = 8 << 20, TOKENIZER_MAX_NORMS = 8 };

enum token_flags {
  TOKEN_EXISTS = 1,
  TOKEN_SPECIAL = 2,     /* control and unknown tokens: never made from plain text, skipped by skip_special */
  TOKEN_IN_MODEL = 4,    /* part of the BPE vocabulary (added tokens may not be) */
};

/* Added tokens: found in the text before anything else happens to it. */
enum added_flags { ADDED_LSTRIP = 1, ADDED_RSTRIP = 2, ADDED_SINGLE_WORD = 4, ADDED_SPECIAL = 8 };
struct added_token { int32_t id; unsigned flags; };
struct added_node { int32_t child, sibling, token; unsigned char byte; }; /* child, sibling, token: -1 none */
struct added_set {
  struct added_token *tokens;
  int32_t n, capacity;
  struct added_node *nodes;
  int32_t n_nodes, node_capacity;
  int32_t root[256];     /* node by first byte, -1 none; valid when n > 0 */
};
bool added_set_add(struct added_set *set, const char *content, size_t n_bytes, int32_t id, unsigned flags);
void added_set_fini(struct added_set *set);
struct added_match {
  size_t start, end;     /* span, widened by the token's flags over white space, but not to the left of the end of the match before */
  size_t next;           /* where the search goes on: the end of the token itself. A token that is found inside the white space that the
                            one before it took still counts, as in Hugging Face's library */
  const struct added_token *token;
};
/* The token after *match (start with {0}), leftmost then longest; with skips_special, special ones are passed over as plain text, and where
 * guards ([n_bytes], or NULL) is true none of them begins. */
bool added_set_next(const struct added_set *set, const char *text, size_t n_bytes, bool skips_special, const bool *guards,
                    struct added_match *match);

enum norm_kind { NORM_NFC, NORM_NFD, NORM_PREPEND, NORM_REPLACE, NORM_STRIP };
struct norm_step {
  enum norm_kind kind;
  char *pattern, *content; /* REPLACE: pattern (never empty) and content; PREPEND: content. Owned, terminated */
  size_t pattern_bytes, content_bytes;
  bool left, right;        /* STRIP */
};
struct norm { struct norm_step steps[TOKENIZER_MAX_NORMS]; int n; };
/* Run all steps. The result is text itself or one of the two buffers, which are cleared and reused. */
enum sits_status norm_run(const struct norm *norm, const char *text, size_t n_bytes, struct buf scratch[2], const char **out,
                          size_t *n_out) SITS_MUST_CHECK;
enum sits_status norm_add(struct norm *norm, enum norm_kind kind, const char *pattern, size_t pattern_bytes, const char *content,
                          size_t content_bytes, struct sits_error *err) SITS_MUST_CHECK;
void norm_fini(struct norm *norm);

struct tokenizer {
  int32_t n_vocab;               /* 1 + largest id */
  struct bpe_strings pieces;     /* [n_vocab] text in the vocabulary */
  struct bpe_strings decoded;    /* [n_vocab] bytes in the middle of a decoded text */
  unsigned char *flags;          /* [n_vocab] enum token_flags */
  struct bpe_map piece_map;
  struct bpe bpe;
  bool cuts_before_space;        /* no merge joins anything to a U+2581 that follows it: text may be cut there, exactly */
  struct norm norm;
  struct pretok pretok;
  struct added_set added;        /* looked for in the raw text */
  struct added_set added_normalized; /* looked for after normalising */
  struct added_set added_written;    /* the special ones of these as they are written, for text with guards */
  struct token_list prefix, suffix;  /* what the post-processor adds */
  struct token_list ends;
  int32_t bos, eos;
  bool adds_bos;
  int32_t strip_start;           /* that many spaces at most vanish from the start of a decoded text */
  char first_drops[5];           /* the first decoded token is its piece without this character (the Metaspace decoder's rule); "" none */
};

/* Empty tokenizer with ids set to "none"; NULL: out of memory. */
struct tokenizer *tokenizer_new(void);
/* Map the pieces; call once they are set. */
bool tokenizer_index_pieces(struct tokenizer *tokenizer);
/* Build the other tables; merges: [n] (rank ascending is first). tokenizer->pieces, decoded, flags, bpe options are set. */
enum sits_status tokenizer_seal(struct tokenizer *tokenizer, const struct bpe_merge *merges, size_t n_merges, struct sits_error *err)
    SITS_MUST_CHECK;
/* Add an end-of-turn id once; ids out of range are left out. */
bool tokenizer_add_end(struct tokenizer *tokenizer, int32_t id);
/* Add special tokens whose text is a well-known end of a turn (<|im_end|>, <|eot_id|>, ...). */
bool tokenizer_add_known_ends(struct tokenizer *tokenizer);

/* GPT-2's byte alphabet: bytes as printable characters. Decode a piece to raw bytes; false when a character is outside the alphabet.
 * out: room for n_bytes. */
bool tokenizer_alphabet_decode(const char *piece, size_t n_bytes, char *out, size_t *n_out);
/* Value of a byte-fallback piece "<0xAB>", -1 when it is none. */
int tokenizer_byte_piece(const char *piece, size_t n_bytes);

/* Decoding token by token. Start with {0}, or with has_started for the continuation of a text. */
struct decode_state { bool has_started; int32_t n_stripped; };
/* Append the raw bytes of the next token of a sequence. */
bool tokenizer_emit(const struct tokenizer *tokenizer, int32_t id, bool skip_special, struct decode_state *state, struct buf *out);
/* Append bytes as valid UTF-8: U+FFFD for each maximal subpart of what is invalid. */
bool tokenizer_append_valid(struct buf *out, const char *bytes, size_t n_bytes);

#endif
