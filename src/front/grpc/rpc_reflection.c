/* grpc.reflection v1 and v1alpha (the same messages under two package names), from the descriptors that protoc wrote at build time.
 *
 * A bidirectional stream: read a request, queue its answer, read the next. Files have no imports, so a file's answer is that file alone.
 * Which file declares a symbol is found by walking the descriptors (google/protobuf/descriptor.proto): names of messages, fields, enums,
 * values, services and methods. */
#include <string.h>

#include "front/grpc/rpc_descriptors.h"
#include "front/grpc/rpc_internal.h"
#include "grpc/reflection/v1/reflection.pb-c.h"

#define MAX_UNSENT_MESSAGES 64 /* a client that asks and never reads is cut */

typedef Grpc__Reflection__V1__ServerReflectionRequest request_message;
typedef Grpc__Reflection__V1__ServerReflectionResponse response_message;

static void read_next(struct rpc *rpc);

/* ---- descriptors ---- */

struct span { const uint8_t *at, *end; };
struct entry { unsigned field; struct span bytes; };

static bool varint(struct span *span, uint64_t *out)
{
  *out = 0;
  for (unsigned shift = 0; shift < 64 && span->at < span->end; shift += 7) {
    uint8_t byte = *span->at++;
    *out |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

/* The next field of a descriptor; varints have empty bytes. Descriptors hold nothing else. */
static bool next_entry(struct span *span, struct entry *out)
{
  uint64_t tag, n;
  if (span->at >= span->end || !varint(span, &tag) || !varint(span, &n)) return false;
  out->field = (unsigned)(tag >> 3);
  out->bytes = (struct span){span->at, span->at};
  if ((tag & 7) == 2) {
    if (n > (uint64_t)(span->end - span->at)) return false;
    out->bytes.end = span->at += n;
  }
  return true;
}

/* The FileDescriptorProto inside a FileDescriptorSet of one file. */
static struct span file_of(const struct rpc_descriptor *descriptor)
{
  struct span set = {descriptor->bytes, descriptor->bytes + descriptor->n_bytes};
  struct entry entry;
  return next_entry(&set, &entry) ? entry.bytes : (struct span){set.end, set.end};
}

static struct span find_entry(struct span in, unsigned field)
{
  struct entry entry;
  while (next_entry(&in, &entry))
    if (entry.field == field) return entry.bytes;
  return (struct span){in.end, in.end};
}

/* What follows prefix and a dot in the symbol; "" when it is the whole symbol, NULL when it is no prefix. */
static const char *after(const char *symbol, struct span prefix)
{
  size_t n = (size_t)(prefix.end - prefix.at);
  if (strncmp(symbol, (const char *)prefix.at, n)) return NULL;
  if (!symbol[n]) return symbol + n;
  return symbol[n] == '.' && symbol[n + 1] ? symbol + n + 1 : NULL;
}

enum kind { NOTHING, FILE_KIND, MESSAGE, ENUM, SERVICE, LEAF };

/* What a field of a descriptor of this kind declares. */
static enum kind member_kind(enum kind parent, unsigned field)
{
  switch (parent) {
  case FILE_KIND: return field == 4 ? MESSAGE : field == 5 ? ENUM : field == 6 ? SERVICE : NOTHING;
  case MESSAGE: return field == 3 ? MESSAGE : field == 4 ? ENUM : field == 2 || field == 8 ? LEAF : NOTHING;
  case ENUM:
  case SERVICE: return field == 2 ? LEAF : NOTHING;
  default: return NOTHING;
  }
}

/* Whether a declaration, or one within it, is the symbol. A file is named by its package (field 2) and is no symbol itself. */
static bool declares(struct span declaration, enum kind kind, const char *symbol)
{
  const char *rest = after(symbol, find_entry(declaration, kind == FILE_KIND ? 2 : 1));
  if (!rest) return false;
  if (!*rest) return kind != FILE_KIND;
  struct entry entry;
  while (next_entry(&declaration, &entry)) {
    enum kind inner = member_kind(kind, entry.field);
    if (inner && declares(entry.bytes, inner, rest)) return true;
  }
  return false;
}

/* ---- answers ---- */

static const char *const services[] = {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                                       "grpc.reflection.v1alpha.ServerReflection", "sits2026.v1.Inference"};
#define N_SERVICES (sizeof services / sizeof *services)

static const struct rpc_descriptor *find_file(const request_message *request)
{
  for (int i = 0; i < rpc_n_descriptors; i++) {
    bool is_it = request->message_request_case == GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME
      ? !strcmp(rpc_descriptors[i].name, request->file_by_filename)
      : declares(file_of(&rpc_descriptors[i]), FILE_KIND, request->file_containing_symbol);
    if (is_it) return &rpc_descriptors[i];
  }
  return NULL;
}

static bool send_services(struct rpc *rpc, response_message *out)
{
  Grpc__Reflection__V1__ListServiceResponse list = GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
  Grpc__Reflection__V1__ServiceResponse items[N_SERVICES], *pointers[N_SERVICES];
  for (size_t i = 0; i < N_SERVICES; i++) {
    grpc__reflection__v1__service_response__init(&items[i]);
    items[i].name = (char *)services[i];
    pointers[i] = &items[i];
  }
  list.service = pointers;
  list.n_service = N_SERVICES;
  out->message_response_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
  out->list_services_response = &list;
  return rpc_send_locked(rpc, &out->base, 0);
}

static bool send_file(struct rpc *rpc, const struct rpc_descriptor *descriptor, response_message *out)
{
  Grpc__Reflection__V1__FileDescriptorResponse file = GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
  struct span bytes = file_of(descriptor);
  ProtobufCBinaryData data = {.len = (size_t)(bytes.end - bytes.at), .data = (uint8_t *)bytes.at}; /* packing only reads */
  file.file_descriptor_proto = &data;
  file.n_file_descriptor_proto = 1;
  out->message_response_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
  out->file_descriptor_response = &file;
  return rpc_send_locked(rpc, &out->base, 0);
}

static bool send_error(struct rpc *rpc, grpc_status_code code, const char *text, response_message *out)
{
  Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
  error.error_code = (int32_t)code;
  error.error_message = (char *)text;
  out->message_response_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
  out->error_response = &error;
  return rpc_send_locked(rpc, &out->base, 0);
}

static bool answer_locked(struct rpc *rpc, request_message *request)
{
  response_message out = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
  out.valid_host = request->host;
  out.original_request = request;
  const struct rpc_descriptor *file;
  switch (request->message_request_case) {
  case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES: return send_services(rpc, &out);
  case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
  case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
    file = find_file(request);
    return file ? send_file(rpc, file, &out) : send_error(rpc, GRPC_STATUS_NOT_FOUND, "no file here has it", &out);
  case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
  case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
    return send_error(rpc, GRPC_STATUS_NOT_FOUND, "no message here has extensions", &out);
  default: return send_error(rpc, GRPC_STATUS_INVALID_ARGUMENT, "the request asks for nothing", &out);
  }
}

/* ---- the stream ---- */

static void on_read(struct rpc *rpc, bool ok)
{
  struct sits_error err = {0};
  ProtobufCMessage *message = NULL;
  enum sits_status status = SITS_OK;
  grpc_byte_buffer *received = rpc->received;
  rpc->received = NULL;
  bool is_end = !ok || !received;
  if (!is_end) status = rpc_unpack(received, &grpc__reflection__v1__server_reflection_request__descriptor, &message, &err);
  if (received) grpc_byte_buffer_destroy(received);
  pthread_mutex_lock(&rpc->mutex);
  if (message && rpc->n_messages >= MAX_UNSENT_MESSAGES)
    status = sits_fail(&err, SITS_TOO_LARGE, "too many reflection requests without reading the answers");
  else if (message && !answer_locked(rpc, (request_message *)message)) status = sits_fail(&err, SITS_NOMEM, "no memory for the answer");
  if (status || is_end) rpc_end_locked(rpc, status, err.text, err.param);
  rpc_kick_locked(rpc);
  if (!status && !is_end && !rpc->is_closed && !rpc->wants_status) read_next(rpc);
  pthread_mutex_unlock(&rpc->mutex);
  if (message) protobuf_c_message_free_unpacked(message, &rpc_allocator);
  rpc_unref(rpc);
}

static void read_next(struct rpc *rpc)
{
  grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
  op.data.recv_message.recv_message = &rpc->received;
  rpc->read_tag = (struct rpc_tag){on_read, rpc};
  rpc_ref(rpc);
  RPC_TAG_OUT(&rpc->read_tag);
  if (!grpc_call_start_batch(rpc->call, &op, 1, &rpc->read_tag, NULL)) return;
  atomic_fetch_sub(&rpc->n_refs, 1); /* not the last: the caller's tag holds one */
  rpc_end_locked(rpc, SITS_INTERNAL, NULL, NULL);
  rpc_kick_locked(rpc);
}

enum sits_status rpc_answer_reflection(struct rpc *rpc, const ProtobufCMessage *message, struct sits_error *err)
{
  pthread_mutex_lock(&rpc->mutex);
  read_next(rpc);
  pthread_mutex_unlock(&rpc->mutex);
  return SITS_OK;
}
