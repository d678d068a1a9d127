/* See secrets.h. A warning, not a refusal: an orchestrator's volume of secrets may have no narrower modes. */
#include "daemon/secrets.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

static void check(const char *option, const char *path)
{
  struct stat info;
  if (!path || stat(path, &info)) return; /* whoever reads it tells */
  const bool is_handed = info.st_uid == 0 && geteuid() != 0;
  if (info.st_mode & (is_handed ? S_IRWXO | S_IWGRP : S_IRWXO | S_IRGRP | S_IWGRP))
    log_warn("daemon", "%s %s may be read or changed by others than its owner (mode %03o): chmod 600", option, path,
             (unsigned)(info.st_mode & 0777));
}

void secrets_check(const struct options *options)
{
  check("ssl-keyfile", options->ssl_keyfile);
  check("api-key-file", options->api_key_file);
  check("audit-key-file", options->audit_key_file);
  if (options->config_has_secret) check("config", options->config_path);
}
