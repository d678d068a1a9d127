/* Log lines: one event a line, fixed key order, to stderr: time level subsystem message key=value...
 * Thread-safe; a line is written by one write(2). No secret and no prompt text is ever logged. */
#ifndef SITS_BASE_LOG_H
#define SITS_BASE_LOG_H

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR, LOG_OFF };

void log_set_level(enum log_level level);
int log_enabled(enum log_level level);
/* subsystem: a short constant word ("http", "engine"). Control characters in the message are escaped. */
void log_write(enum log_level level, const char *subsystem, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define log_debug(...) do { if (log_enabled(LOG_DEBUG)) log_write(LOG_DEBUG, __VA_ARGS__); } while (0)
#define log_info(...) log_write(LOG_INFO, __VA_ARGS__)
#define log_warn(...) log_write(LOG_WARN, __VA_ARGS__)
#define log_error(...) log_write(LOG_ERROR, __VA_ARGS__)

#endif
