/* From a checked request to prompt tokens: message normalisation, chat template, tokenization, context check.
 *
 * Special tokens. What the template writes may become special tokens, what a client wrote in a message never does. The text is rendered
 * with the real contents, so that templates which trim, split or test them work as they do elsewhere. Only where a client's string holds
 * the text of a special token (or ends in the beginning of one) a marker is put before that place: a Unicode noncharacter that occurs in
 * none of the client's strings. After rendering the markers are taken out, and no special token is recognised where one stood. All
 * other ids are those of the plain rendering.
 *
 * A prompt of /v1/completions or /tokenize is the client's own rendering: special tokens in it are recognised unless parse_special is
 * false. All functions are thread-safe. */
#ifndef SITS_FRONT_API_PROMPT_H
#define SITS_FRONT_API_PROMPT_H

#include "front/api/api.h"

struct api_specials;

/* The texts of a tokenizer's special tokens, for finding them in clients' strings. */
enum sits_status api_specials_create(const struct tokenizer *tokenizer, struct api_specials **out) SITS_MUST_CHECK;
void api_specials_destroy(struct api_specials *specials);

/* Messages as templates take them: roles checked, text parts joined (or strings made parts when wants_parts), null contents "". *out is a
 * new reference to an array of objects. Errors name messages[i].field. */
enum sits_status api_messages_normalise(const json_t *messages, const struct api_limits *limits, bool wants_parts,
                                        bool knows_developer_role, json_t **out, struct sits_error *err) SITS_MUST_CHECK;

/* Append the ids of a chat request's rendered messages. */
enum sits_status api_prompt_chat(const struct api_model *model, const struct api_specials *specials, const struct api_limits *limits,
                                 const struct api_request *request, struct token_list *out, struct sits_error *err) SITS_MUST_CHECK;

/* The same with the api's own model and tables, which must be there. */
enum sits_status api_prompt_messages(struct api *api, const struct api_request *request, struct token_list *out, struct sits_error *err)
    SITS_MUST_CHECK;

/* Append the ids of prompt `index`. Ids given by the client are checked against the vocabulary. */
enum sits_status api_prompt_text(const struct api_model *model, const struct api_request *request, int64_t index, struct token_list *out,
                                 struct sits_error *err) SITS_MUST_CHECK;

/* Tokens a choice may have, given its prompt's length: the request's wish, or what fits. SITS_CONTEXT_LENGTH when it does not fit,
 * SITS_PERMISSION_DENIED when it is more than the key may ask for. */
enum sits_status api_prompt_budget(const struct api_model *model, const struct api_request *request, int64_t n_prompt, int32_t *max_tokens,
                                   struct sits_error *err) SITS_MUST_CHECK;

#endif
