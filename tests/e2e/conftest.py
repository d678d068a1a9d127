"""The real daemon for end-to-end tests: started on a free port, waited for, stopped by its process id.

SITS_BIN: folder of the programs (default build/release/bin). SITS_SHARED_DATA: test data (default ../shared/data); without it the tests
that need the tiny model are skipped. SITS_TEST_MODEL: a SmolLM2 GGUF file (default in the user's cache); without it the tests that need
it are skipped.
"""
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time

import pytest

SLOW = float(os.environ.get("SITS_TEST_SLOWNESS", "1"))  # how much longer everything may take: sanitizers, a busy machine
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(os.environ.get("SITS_BIN", ROOT / "build/release/bin"))
DATA = pathlib.Path(os.environ.get("SITS_SHARED_DATA", ROOT.parent / "shared/data"))
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "sits2026"
TINY = DATA / "models/stories260K/hf"
SMOL = pathlib.Path(os.environ.get("SITS_TEST_MODEL", CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"))
TEMPLATE = ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System role not supported here') }}"
            "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")


class Server:
    """One running daemon. bare: with env alone for its environment."""

    def __init__(self, model, log_path, *options, env=None, wait=True, program=BIN / "sits2026d", bare=False):
        self.log_path = log_path
        self.log = open(log_path, "wb")
        command = [str(program), "--model", str(model), "--port", "0", *map(str, options)]
        self.process = subprocess.Popen(command, stderr=self.log, stdout=self.log, env={**({} if bare else os.environ), **(env or {})})
        self.port = self._find_port()
        self.url = f"http://127.0.0.1:{self.port}"
        if wait:
            self.wait_ready()

    def text(self):
        return self.log_path.read_text(errors="replace")

    def _find_port(self):
        end = time.time() + 60
        while time.time() < end:
            found = re.search(r"listening on https?://[^:]+:(\d+)", self.text())
            if found:
                return int(found.group(1))
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the daemon does not listen:\n{self.text()}")

    def wait_ready(self, seconds=120):
        end = time.time() + seconds * SLOW
        while time.time() < end:
            if self.process.poll() is not None:
                break
            if self.get("/health/ready")[0] == 200:
                return
            time.sleep(0.02)
        raise AssertionError(f"the daemon is not ready:\n{self.text()}")

    def stop(self, seconds=60 * SLOW):
        """SIGTERM, wait, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the daemon does not stop:\n{self.text()[-4000:]}")
        self.log.close()
        return self.process.returncode

    # -- raw HTTP, so that nothing is hidden by a client library --

    def connect(self, timeout=60, receive_bytes=None):
        """receive_bytes: what the kernel keeps for a client that does not read."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(timeout * SLOW)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def raw(self, data, timeout=60, half_close=False):
        """Send bytes, read until the server closes or the first answer is complete; (status, headers, body)."""
        with self.connect(timeout) as sock:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            return read_response(sock.makefile("rb"))

    def get(self, path, headers=()):
        head = "".join(f"{k}: {v}\r\n" for k, v in dict(headers).items())
        return self.raw(f"GET {path} HTTP/1.1\r\nHost: t\r\n{head}Connection: close\r\n\r\n".encode())

    def post(self, path, body, headers=(), timeout=120):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = "".join(f"{k}: {v}\r\n" for k, v in {"Content-Type": "application/json", **dict(headers)}.items())
        return self.raw(
            f"POST {path} HTTP/1.1\r\nHost: t\r\n{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data, timeout)

    def json(self, path, body, headers=()):
        status, _, data = self.post(path, body, headers)
        return status, json.loads(data)

    def chat(self, text="Once upon a time", **fields):
        return self.json("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt="Once upon a time", **fields):
        return self.json("/v1/completions", {"prompt": prompt, **fields})

    def stream(self, path, body):
        """(status, list of data payloads as text, raw body)"""
        status, _, data = self.post(path, {**body, "stream": True})
        return status, events(data), data

    def metric(self, name, **labels):
        for line in self.get("/metrics")[2].decode().splitlines():
            found = re.match(r"sits2026:(\w+)\{(.*)\} (\S+)$", line)
            if found and found.group(1) == name and all(f'{k}="{v}"' in found.group(2) for k, v in labels.items()):
                return float(found.group(3))
        raise AssertionError(f"no metric {name} {labels}")

    def wait_ended(self, n):
        """Until the engine's figures tell of n choices that have ended: they are published behind the answers."""
        def ended():
            return sum(float(x) for x in re.findall(r"^sits2026:request_success_total{.*} (\S+)$", self.get("/metrics")[2].decode(), re.M))
        wait_for(lambda: ended() >= n)

    def wait_quiet(self, seconds=30 * SLOW):
        """Until nothing runs, waits or holds a page; fails with what is left."""
        end = time.time() + seconds
        names = ("num_requests_running", "num_requests_waiting", "kv_pages_used")
        while True:
            left = {name: self.metric(name) for name in names}
            if not any(left.values()):
                return
            assert time.time() < end, left
            time.sleep(0.05)


def _ports():
    first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(2048, first_given) or range(2048, 65536)
    return iter(random.sample(ports, len(ports)))


PORTS = _ports()


def free_port():
    """A port that was free just now, for what must be told it before it listens. None of those that the kernel gives out by itself: one of
    the many clients of a test beside could be given it meanwhile, and who connects before somebody listens could meet itself."""
    for port in PORTS:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


def wait_for(condition, seconds=20):
    """Until condition() holds; fails after that many seconds."""
    end = time.time() + seconds * SLOW
    while not condition():
        assert time.time() < end
        time.sleep(0.005)


def read_response(file):
    """Read one response from a file object: status, headers (lower-case names), body with chunked coding taken off."""
    line = file.readline()
    if not line:
        return 0, {}, b""
    status, headers = int(line.split()[1]), {}
    while True:
        line = file.readline().strip()
        if not line:
            break
        name, _, value = line.decode("latin1").partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size = int(file.readline() or b"0", 16)
            if size == 0:
                file.readline()
                return status, headers, body
            body += file.read(size)
            file.readline()
    if "content-length" in headers:
        return status, headers, file.read(int(headers["content-length"]))
    return status, headers, file.read()


def events(data):
    """The payloads of server-sent events, comments left out; checks the framing."""
    text = data.decode("utf-8")
    assert text.endswith("\n\n"), text[-100:]
    out = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        out.append(block[6:])
    return out


def joined(payloads, choice=0):
    """The text of one choice from a stream's payloads."""
    text = ""
    for payload in payloads:
        if payload == "[DONE]":
            continue
        for c in json.loads(payload).get("choices", []):
            if c["index"] == choice:
                text += c["text"] if "text" in c else c["delta"].get("content") or ""
    return text


def make_certificate(folder, name="localhost"):
    """Key and self-signed certificate in a folder; the options that name them."""
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "key.pem", "-out",
                           folder / "cert.pem", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
                          capture_output=True)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    return "--ssl-certfile", folder / "cert.pem", "--ssl-keyfile", folder / "key.pem"


def start(tmp_path_factory, model, *options, **more):
    if not (BIN / "sits2026d").exists():
        pytest.skip(f"no daemon in {BIN}")
    if not pathlib.Path(model).exists():
        pytest.skip(f"no model at {model}")
    folder = tmp_path_factory.mktemp("server")
    if str(model) == str(TINY):
        (folder / "template.jinja").write_text(TEMPLATE)
        options = ("--chat-template", folder / "template.jinja", "--served-model-name", "tiny", "--threads", 1, *options)
    return Server(model, folder / "log", *options, **more)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    server = start(tmp_path_factory, TINY)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def smol(tmp_path_factory):
    server = start(tmp_path_factory, SMOL, "--served-model-name", "smol", "--max-model-len", 2048, "--max-num-seqs", 64,
                   "--kv-cache-memory", "600M")
    yield server
    assert server.stop() == 0


@pytest.fixture
def launch(tmp_path_factory):
    """Start further daemons with options of their own; they are stopped at the end."""
    servers = []

    def make(model, *options, **more):
        servers.append(start(tmp_path_factory, model, *options, **more))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
