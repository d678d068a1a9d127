/* From a call's deltas to the messages of Generate and Chat: pieces for streams, one message for whole answers.
 *
 * Texts are UTF-8 already; a NUL character, which protobuf-c's strings cannot hold, is shown as U+FFFD. One thread at a time. */
#ifndef SITS_FRONT_GRPC_RPC_REPLY_H
#define SITS_FRONT_GRPC_RPC_REPLY_H

#include <protobuf-c/protobuf-c.h>

#include "base/buf.h"
#include "front/api/api_call.h"

struct rpc_choice;

struct rpc_reply {
  const struct tokenizer *tokenizer;   /* borrowed */
  const struct api_call *call;         /* borrowed; set before the first delta */
  enum api_kind kind;
  bool is_stream, wants_token_ids, wants_timing;
  int32_t logprobs;                    /* -1: none */
  char id[80];
  char *model;                         /* the name shown, owned */
  int64_t created;
  struct rpc_choice *choices;          /* [n_choices] */
  int32_t n_choices;
  struct arena arena;                  /* the message made last */
  struct buf scratch;
  bool has_failed;                     /* out of memory or over a limit */
};

enum sits_status rpc_reply_init(struct rpc_reply *reply, const struct api_request *request, const struct tokenizer *tokenizer,
                                const char *model, const char *id, int64_t created, int32_t n_choices) SITS_MUST_CHECK;
void rpc_reply_fini(struct rpc_reply *reply);

/* Streams: the message of a delta, NULL when it says nothing. Whole answers: gather it, NULL. Valid until the next call. */
const ProtobufCMessage *rpc_reply_delta(struct rpc_reply *reply, const struct api_delta *delta);
/* The last message: usage, and in whole answers the choices. NULL only when has_failed. */
const ProtobufCMessage *rpc_reply_done(struct rpc_reply *reply, const struct api_result *result);

/* Text of n bytes as a string for a message: NUL becomes U+FFFD. NULL without memory. */
char *rpc_reply_text(struct arena *arena, const char *text, size_t n_bytes);

#endif
