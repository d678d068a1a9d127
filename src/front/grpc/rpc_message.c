/* Bytes to messages, and messages to requests. A message is walked before protobuf-c unpacks it, because protobuf-c checks no UTF-8, cuts
 * strings at NUL, and takes 19 bytes of memory per byte of unknown field. A request then becomes the JSON object that an HTTP client would
 * have sent, by the names of its fields, and goes through api_request_parse_json: one validation for both front ends.
 * Wire format: https://protobuf.dev/programming-guides/encoding/. */
#include <grpc/byte_buffer_reader.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "front/grpc/rpc_internal.h"

#define MAX_UNKNOWN_FIELDS 256

static void *allocate(void *context, size_t n_bytes) { return mem_alloc(n_bytes); }
static void release(void *context, void *block) { mem_free(block); }
ProtobufCAllocator rpc_allocator = {.alloc = allocate, .free = release};

/* ---- the walk ---- */

struct reader { const uint8_t *at, *end; };

static bool read_varint(struct reader *reader, uint64_t *out)
{
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 70 && reader->at < reader->end; shift += 7) {
    uint8_t byte = *reader->at++;
    value |= shift < 64 ? (uint64_t)(byte & 0x7f) << shift : 0;
    if (byte < 0x80) {
      *out = value;
      return true;
    }
  }
  return false;
}

static bool skip(struct reader *reader, uint64_t n_bytes)
{
  if (n_bytes > (uint64_t)(reader->end - reader->at)) return false;
  reader->at += n_bytes;
  return true;
}

static enum sits_status check_string(const char *name, const char *text, size_t n_bytes, struct sits_error *err)
{
  if (!utf8_is_valid(text, n_bytes)) return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' is not valid UTF-8", name);
  if (n_bytes && memchr(text, 0, n_bytes))
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, name, "'%s' must not hold a NUL character", name);
  return SITS_OK;
}

static enum sits_status malformed(const ProtobufCMessageDescriptor *type, struct sits_error *err)
{
  return sits_fail(err, SITS_INVALID_ARGUMENT, "the request is no well-formed %s message", type->name);
}

/* Our schemas nest without recursion, so the depth is theirs. */
static enum sits_status walk(const ProtobufCMessageDescriptor *type, struct reader reader, int *n_unknown, struct sits_error *err)
{
  while (reader.at < reader.end) {
    uint64_t tag, n = 0;
    if (!read_varint(&reader, &tag) || tag >> 3 == 0 || tag >> 3 > 536870911) return malformed(type, err);
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(type, (unsigned)(tag >> 3));
    if (!field && ++*n_unknown > MAX_UNKNOWN_FIELDS)
      return sits_fail(err, SITS_INVALID_ARGUMENT, "the request has over %d unknown fields", MAX_UNKNOWN_FIELDS);
    bool is_good = false;
    switch (tag & 7) {
    case 0: is_good = read_varint(&reader, &n); break;
    case 1: is_good = skip(&reader, 8); break;
    case 2: is_good = read_varint(&reader, &n) && skip(&reader, n); break;
    case 5: is_good = skip(&reader, 4); break;
    }
    if (!is_good) return malformed(type, err);
    enum sits_status status = SITS_OK;
    if (field && (tag & 7) == 2 && field->type == PROTOBUF_C_TYPE_STRING)
      status = check_string(field->name, (const char *)reader.at - n, (size_t)n, err);
    if (field && (tag & 7) == 2 && field->type == PROTOBUF_C_TYPE_MESSAGE)
      status = walk(field->descriptor, (struct reader){reader.at - n, reader.at}, n_unknown, err);
    if (status) return status;
  }
  return SITS_OK;
}

enum sits_status rpc_wire_check(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t n_bytes, struct sits_error *err)
{
  int n_unknown = 0;
  return walk(type, (struct reader){bytes, bytes + n_bytes}, &n_unknown, err);
}

enum sits_status rpc_unpack(grpc_byte_buffer *payload, const ProtobufCMessageDescriptor *type, ProtobufCMessage **out,
                            struct sits_error *err)
{
  grpc_byte_buffer_reader reader;
  if (!payload) return sits_fail(err, SITS_INVALID_ARGUMENT, "the call holds no message");
  if (!grpc_byte_buffer_reader_init(&reader, payload)) return malformed(type, err);
  grpc_slice bytes = grpc_byte_buffer_reader_readall(&reader);
  grpc_byte_buffer_reader_destroy(&reader);
  enum sits_status status = rpc_wire_check(type, GRPC_SLICE_START_PTR(bytes), GRPC_SLICE_LENGTH(bytes), err);
  if (!status) {
    ProtobufCMessage *message =
      protobuf_c_message_unpack(type, &rpc_allocator, GRPC_SLICE_LENGTH(bytes), GRPC_SLICE_START_PTR(bytes));
    if (message) *out = message;
    else status = malformed(type, err); /* a field with another wire type, or no memory */
  }
  grpc_slice_unref(bytes);
  return status;
}

/* ---- messages to JSON ---- */

static json_t *message_json(const ProtobufCMessage *message, int64_t *n_left, struct sits_error *err);

/* One value at this address; NULL with err filled when it has no JSON form. */
static json_t *value_json(const ProtobufCFieldDescriptor *field, const char *at, int64_t *n_left, struct sits_error *err)
{
  json_t *value = NULL;
  if (--*n_left < 0) {
    (void)sits_fail(err, SITS_INVALID_ARGUMENT, "the request holds over %zu values", json_limits_request.max_nodes);
    return NULL;
  }
  switch (field->type) {
  case PROTOBUF_C_TYPE_INT32: value = json_integer(*(const int32_t *)at); break;
  case PROTOBUF_C_TYPE_INT64: value = json_integer(*(const int64_t *)at); break;
  case PROTOBUF_C_TYPE_BOOL: value = json_boolean(*(const protobuf_c_boolean *)at); break;
  case PROTOBUF_C_TYPE_DOUBLE:
    if (!isfinite(*(const double *)at)) {
      (void)sits_fail_param(err, SITS_INVALID_ARGUMENT, field->name, "'%s' must be a finite number", field->name);
      return NULL;
    }
    value = json_real(*(const double *)at);
    break;
  case PROTOBUF_C_TYPE_STRING: value = json_string_nocheck(*(const char *const *)at); break; /* checked by the walk */
  case PROTOBUF_C_TYPE_MESSAGE: return message_json(*(const ProtobufCMessage *const *)at, n_left, err);
  default: (void)sits_fail(err, SITS_INTERNAL, "the type of '%s' has no JSON form", field->name); return NULL;
  }
  if (!value) (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
  return value;
}

static size_t size_of(ProtobufCType type)
{
  switch (type) {
  case PROTOBUF_C_TYPE_INT32: return sizeof(int32_t);
  case PROTOBUF_C_TYPE_INT64: return sizeof(int64_t);
  case PROTOBUF_C_TYPE_BOOL: return sizeof(protobuf_c_boolean);
  case PROTOBUF_C_TYPE_DOUBLE: return sizeof(double);
  default: return sizeof(void *);
  }
}

static json_t *array_json(const ProtobufCFieldDescriptor *field, size_t n, const char *at, int64_t *n_left, struct sits_error *err)
{
  json_t *array = json_array();
  for (size_t i = 0; array && i < n; i++) {
    json_t *value = value_json(field, at + i * size_of(field->type), n_left, err);
    if (value && !json_array_append_new(array, value)) continue;
    if (value) (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
    json_decref(array);
    return NULL;
  }
  if (!array) (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
  return array;
}

/* [{"key": 5, "value": 1.5}, ...] as {"5": 1.5, ...}. */
static json_t *map_json(json_t *entries, struct sits_error *err)
{
  json_t *map = json_object(), *entry;
  size_t i;
  bool has_failed = !map;
  json_array_foreach(entries, i, entry) {
    char key[32];
    snprintf(key, sizeof key, "%lld", (long long)json_integer_value(json_object_get(entry, "key")));
    json_t *value = json_object_get(entry, "value");
    has_failed |= json_object_set_new_nocheck(map, key, value ? json_incref(value) : json_real(0)) != 0;
  }
  json_decref(entries);
  if (!has_failed) return map;
  json_decref(map);
  (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
  return NULL;
}

/* [{"ids": [..]}, ...] as [[..], ...]. */
static json_t *lists_json(json_t *entries, struct sits_error *err)
{
  json_t *lists = json_array(), *entry;
  size_t i;
  bool has_failed = !lists;
  json_array_foreach(entries, i, entry) {
    json_t *ids = json_object_get(entry, "ids");
    has_failed |= json_array_append_new(lists, ids ? json_incref(ids) : json_array()) != 0;
  }
  json_decref(entries);
  if (!has_failed) return lists;
  json_decref(lists);
  (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
  return NULL;
}

/* Fields whose JSON form has another name or shape: the name that HTTP knows, or NULL for the field's own. */
static enum sits_status reshape(const ProtobufCFieldDescriptor *field, json_t **value, const char **name, struct sits_error *err)
{
  *name = field->name;
  if (!strcmp(field->name, "logit_bias")) {
    *value = map_json(*value, err);
  } else if (!strcmp(field->name, "prompt_ids")) {
    *name = "prompt";
    *value = lists_json(*value, err);
  } else if (!strcmp(field->name, "content_parts")) {
    *name = "content";
  } else if (!strcmp(field->name, "chat_template_kwargs_json")) {
    *name = "chat_template_kwargs";
    json_t *text = *value;
    *value = NULL;
    enum sits_status status = json_parse(json_string_value(text), json_string_length(text), &json_limits_request, value, err);
    json_decref(text);
    return status;
  }
  return *value ? SITS_OK : err->status;
}

static json_t *field_json(const ProtobufCFieldDescriptor *field, const ProtobufCMessage *message, int64_t *n_left, struct sits_error *err)
{
  const char *at = (const char *)message + field->offset;
  if (field->label != PROTOBUF_C_LABEL_REPEATED) return value_json(field, at, n_left, err);
  return array_json(field, *(const size_t *)((const char *)message + field->quantifier_offset), *(const char *const *)at, n_left, err);
}

static bool is_present(const ProtobufCFieldDescriptor *field, const ProtobufCMessage *message)
{
  const char *quantifier = (const char *)message + field->quantifier_offset;
  if (field->label == PROTOBUF_C_LABEL_REPEATED) return *(const size_t *)quantifier > 0;
  if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_MESSAGE)
    return *(const void *const *)((const char *)message + field->offset) != NULL;
  return *(const protobuf_c_boolean *)quantifier;
}

static json_t *message_json(const ProtobufCMessage *message, int64_t *n_left, struct sits_error *err)
{
  json_t *object = json_object();
  if (!object) (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
  for (unsigned i = 0; object && i < message->descriptor->n_fields; i++) {
    const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
    if (!is_present(field, message)) continue;
    const char *name = field->name;
    json_t *value = field_json(field, message, n_left, err);
    if (value && reshape(field, &value, &name, err)) value = NULL;
    if (value && json_object_get(object, name)) {
      (void)sits_fail_param(err, SITS_INVALID_ARGUMENT, field->name, "'%s' and '%s' exclude each other", name, field->name);
      json_decref(value);
      value = NULL;
    }
    if (value && !json_object_set_new_nocheck(object, name, value)) continue;
    if (value) (void)sits_fail(err, SITS_NOMEM, "no memory for the request");
    json_decref(object);
    return NULL;
  }
  return object;
}

enum sits_status rpc_request_parse(const ProtobufCMessage *message, enum api_kind kind, bool is_stream, const struct api_limits *limits,
                                   struct api_request **out, struct sits_error *err)
{
  int64_t n_left = (int64_t)json_limits_request.max_nodes;
  json_t *body = message_json(message, &n_left, err);
  if (!body) return err->status;
  if (is_stream && json_object_set_new(body, "stream", json_true())) {
    json_decref(body);
    return sits_fail(err, SITS_NOMEM, "no memory for the request");
  }
  json_t *prompt = json_object_get(body, "prompt");
  if (kind == API_COMPLETION && json_array_size(prompt) == 1) { /* one prompt is a plain one */
    if (json_object_set(body, "prompt", json_array_get(prompt, 0))) {
      json_decref(body);
      return sits_fail(err, SITS_NOMEM, "no memory for the request");
    }
  }
  return api_request_parse_json(kind, body, limits, out, err);
}
