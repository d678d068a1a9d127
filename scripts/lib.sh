# Shared by the scripts beside it: where things lie, messages, Debian packages, the Python environment. Sourced, never run.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/sits2026
MODEL_FILE=$CACHE/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
BUILD_PACKAGES=(build-essential cmake ninja-build pkg-config ccache git ca-certificates curl python3 python3-venv
  libmicrohttpd-dev libgnutls28-dev libjansson-dev libyaml-dev libpcre2-dev
  libcurl4-gnutls-dev libgrpc-dev libprotobuf-c-dev protobuf-c-compiler)
TEST_PACKAGES=(libcmocka-dev)

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# install_packages NAME...: those that dpkg does not know yet, through apt-get (with sudo where we are not root).
install_packages() {
  local missing=() name as_root=()
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "no apt-get here; expecting these to be installed: $*"
    return 0
  fi
  for name in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "not root and no sudo: install ${missing[*]} and run this again"
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# python_env [PACKAGE==VERSION...]: .venv in the project, holding at least those packages.
python_env() {
  if [ ! -x "$ROOT/.venv/bin/python" ] || ! "$ROOT/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$ROOT/.venv"
    python3 -m venv "$ROOT/.venv"
  fi
  [ $# -eq 0 ] || "$ROOT/.venv/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

# build PRESET [TARGET...]
build() {
  local preset=$1
  shift
  (cd "$ROOT" && cmake --preset "$preset" >"$ROOT/build/$preset.configure.log" 2>&1) || {
    tail -30 "$ROOT/build/$preset.configure.log" >&2
    die "configuring the preset $preset failed"
  }
  (cd "$ROOT" && cmake --build "build/$preset" ${1:+--target "$@"})
}
mkdir -p "$ROOT/build"
