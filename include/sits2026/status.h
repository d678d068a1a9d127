/* Status codes: one table for the whole program, both front ends print from it, so they cannot disagree.
 *
 * Functions that can fail return enum sits_status and leave their out parameters untouched on failure. Cold paths also fill a
 * caller-owned struct sits_error with text that names the file, tensor, key or field. SITS_AGAIN ("not now": no page, queue full)
 * is an ordinary value, never an exception.
 */
#ifndef SITS2026_STATUS_H
#define SITS2026_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* X(NAME, text, http status, OpenAI error type, OpenAI error code (NULL: null), gRPC status, retryable) */
#define SITS_STATUS_MAP(X) \
  X(OK,                  "ok",                              200, "",                      0,                          0, 0) \
  X(AGAIN,               "try again later",                 503, "overloaded_error",      "overloaded",              14, 1) \
  X(INVALID_ARGUMENT,    "invalid argument",                400, "invalid_request_error", "invalid_value",            3, 0) \
  X(MISSING_PARAMETER,   "missing parameter",               400, "invalid_request_error", "missing_required_parameter", 3, 0) \
  X(UNSUPPORTED_PARAMETER, "unsupported parameter",         400, "invalid_request_error", "unsupported_parameter",    3, 0) \
  X(INVALID_JSON,        "request body is not valid JSON",  400, "invalid_request_error", "invalid_json",             3, 0) \
  X(TEMPLATE,            "chat template refused messages",  400, "invalid_request_error", "invalid_messages",         3, 0) \
  X(CONTEXT_LENGTH,      "context length exceeded",         400, "invalid_request_error", "context_length_exceeded",  3, 0) \
  X(UNAUTHENTICATED,     "missing or wrong API key",        401, "authentication_error",  "invalid_api_key",         16, 0) \
  X(PERMISSION_DENIED,   "not allowed for this key",        403, "permission_error",      "permission_denied",        7, 0) \
  X(NOT_FOUND,           "not found",                       404, "invalid_request_error", "not_found",                5, 0) \
  X(MODEL_NOT_FOUND,     "model does not exist",            404, "invalid_request_error", "model_not_found",          5, 0) \
  X(METHOD_NOT_ALLOWED,  "method not allowed",              405, "invalid_request_error", "method_not_allowed",      12, 0) \
  X(TOO_LARGE,           "request too large",               413, "invalid_request_error", "request_too_large",        8, 0) \
  X(UNSUPPORTED_MEDIA,   "unsupported content type",        415, "invalid_request_error", "unsupported_media_type",   3, 0) \
  X(QUEUE_FULL,          "queue is full",                   429, "rate_limit_error",      "queue_full",               8, 1) \
  X(RATE_LIMITED,        "rate limit reached",              429, "rate_limit_error",      "rate_limit_exceeded",      8, 1) \
  X(CANCELLED,           "cancelled by the client",         499, "cancelled",             "cancelled",                1, 0) \
  X(INTERNAL,            "internal error",                  500, "server_error",          "internal_error",          13, 0) \
  X(NOMEM,               "out of memory",                   503, "server_error",          "out_of_memory",            8, 1) \
  X(UNAVAILABLE,         "not ready",                       503, "server_error",          "unavailable",             14, 1) \
  X(DEVICE,              "device failed",                   503, "server_error",          "device_failed",           14, 1) \
  X(DEADLINE,            "deadline exceeded",               504, "server_error",          "deadline_exceeded",        4, 1) \
  X(IO,                  "input/output error",              500, "server_error",          "io_error",                13, 0) \
  X(FORMAT,              "malformed file",                  500, "server_error",          "malformed_file",          13, 0) \
  X(UNSUPPORTED,         "not supported",                   500, "server_error",          "not_supported",           12, 0) \
  X(CONFIG,              "bad configuration",               500, "server_error",          "bad_configuration",        9, 0)

enum sits_status {
#define SITS_STATUS_ENUM(name, text, http, type, code, grpc, retry) SITS_##name,
  SITS_STATUS_MAP(SITS_STATUS_ENUM)
#undef SITS_STATUS_ENUM
  SITS_STATUS_COUNT
};

#define SITS_ERROR_TEXT_BYTES 256
#define SITS_ERROR_PARAM_BYTES 64

/* Filled on cold paths only. text is UTF-8, always terminated, never echoes client input beyond a short name. */
struct sits_error {
  enum sits_status status;
  char text[SITS_ERROR_TEXT_BYTES];
  char param[SITS_ERROR_PARAM_BYTES]; /* request field, option, key or tensor at fault; "" when none */
};

struct sits_status_info {
  const char *name;      /* "QUEUE_FULL" */
  const char *text;      /* default message */
  int http;
  const char *type;      /* OpenAI error.type */
  const char *code;      /* OpenAI error.code, NULL means JSON null */
  int grpc;
  int retryable;
};

#define SITS_MUST_CHECK __attribute__((warn_unused_result))

/* Never NULL; an unknown value gives the row of SITS_INTERNAL. */
const struct sits_status_info *sits_status_info(enum sits_status status);

/* Fill err (may be NULL) and return status, so that a failure is one line: return sits_fail(err, SITS_FORMAT, "%s: ...", path). */
enum sits_status sits_fail(struct sits_error *err, enum sits_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same, naming the request field or key at fault. */
enum sits_status sits_fail_param(struct sits_error *err, enum sits_status status, const char *param, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#ifdef __cplusplus
}
#endif
#endif
