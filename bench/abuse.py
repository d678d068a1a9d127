#!/usr/bin/env python3
"""Abuse of both front ends: how much memory each pattern costs the daemon, and what other clients notice. Prints and writes JSON.

For each pattern: a bystander sends a short completion every few milliseconds and notes how long it takes, first alone, then beside the
attack; the daemon's resident memory is read all the while. Clients run on the same machine (the attacker at nice 19), so times are upper
bounds. Usage: bench/abuse.py DAEMON MODEL OUT.json [pattern...] (a pattern named n times runs n times, on the same daemon)
"""
import datetime
import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 5          # of each attack, and of the quiet before it
CONNECTIONS = 200


class Daemon:
    def __init__(self, program, model, options=("--max-num-seqs", "64")):
        self.log = pathlib.Path(tempfile.mkdtemp()) / "log"
        template = self.log.with_name("t.jinja")
        template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.grpc = probe.getsockname()[1]
        self.options = ["--port", "0", "--grpc-port", str(self.grpc), "--threads", "1", "--chat-template", str(template), *options]
        self.process = subprocess.Popen([program, "--model", model, *self.options], stderr=open(self.log, "w"))
        while not (found := re.search(r"listening on http://[^:]+:(\d+)", self.log.read_text())):
            time.sleep(0.05)
        self.port = int(found.group(1))
        while "ready model" not in self.log.read_text():
            time.sleep(0.05)

    def rss_mb(self):
        return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{self.process.pid}/status").read_text()).group(1)) / 1024

    def cpu_s(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self, port=None, timeout=10):
        sock = socket.create_connection(("127.0.0.1", port or self.port), timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def post(body, path="/v1/completions", extra=b""):
    return (b"POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n" %
            (path.encode(), extra, len(body)) + body)


def read_answer(file):
    line = file.readline()
    if not line:
        return 0
    length = 0
    while (header := file.readline().strip()):
        if header.lower().startswith(b"content-length:"):
            length = int(header.split(b":")[1])
    file.read(length)
    return int(line.split()[1])


def bystander(daemon, stop, times):
    request = post(json.dumps({"prompt": "Once", "max_tokens": 4, "ignore_eos": True}).encode())
    with daemon.connect(timeout=60) as sock:
        file = sock.makefile("rb")
        while not stop.is_set():
            start = time.perf_counter()
            sock.sendall(request)
            status = read_answer(file)
            times.append((time.perf_counter() - start) * 1000 if status == 200 else float("inf"))
            time.sleep(0.004)


# ---- patterns: each runs until `end`, in the attacker's process, and returns how often it did what it does ----


def many(daemon, end, data, port=None):
    """Send bytes on a fresh connection, wait for the answer or the close, again."""
    n, statuses = 0, {}
    while time.time() < end:
        try:
            with daemon.connect(port) as sock:
                sock.sendall(data)
                answer = sock.recv(65536)
        except OSError:
            answer = b""
        key = answer[9:12].decode() if answer.startswith(b"HTTP") else "closed"
        statuses[key] = statuses.get(key, 0) + 1
        n += 1
    return n, statuses


GET = b"GET /health HTTP/1.1\r\nHost: t\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"


def two_lengths(d, end): return many(d, end, HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd")
def length_and_chunked(d, end): return many(d, end, HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
def folded_length(d, end): return many(d, end, HEAD + b"Content-Length:\r\n 4\r\n\r\nabcd")
def large_header(d, end): return many(d, end, GET + b"X: " + b"a" * 60000 + b"\r\n\r\n")
def many_headers(d, end): return many(d, end, GET + b"".join(b"X-%d: a\r\n" % i for i in range(3000)) + b"\r\n")
def deep_json(d, end): return many(d, end, post(b"[" * 1000000))
def many_values(d, end): return many(d, end, post(b'{"prompt": "a", "x": [' + b"0," * 2000000 + b"0]}"))
def empty_objects(d, end): return many(d, end, post(b'{"prompt": "a", "x": [' + b"{}," * 180000 + b"0]}"))


def special_text(d, end):
    """4 MB of a special token's first byte in a chat: marked, rendered and tokenized before it is refused as too long."""
    return many(d, end, post(json.dumps({"messages": [{"role": "user", "content": "<" * 4000000}]}).encode(), "/v1/chat/completions"))


def trickle(daemon, end, first, byte):
    socks, n = [], 0
    for _ in range(CONNECTIONS):
        try:
            socks.append(daemon.connect())
            socks[-1].sendall(first)
        except OSError:
            pass
    while time.time() < end:
        for sock in socks:
            try:
                sock.sendall(byte)
                n += 1
            except OSError:
                pass
        time.sleep(0.5)
    for sock in socks:
        sock.close()
    return n, {"connections": len(socks)}


def slow_headers(d, end): return trickle(d, end, b"GET /health HTTP/1.1\r\nHost: t\r\nX: ", b"a")
def slow_body(d, end): return trickle(d, end, HEAD + b"Content-Length: 1000000\r\n\r\n", b" ")


def unread_streams(daemon, end):
    body = json.dumps({"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}).encode()
    socks = []
    for _ in range(32):
        sock = daemon.connect()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(post(body))
        socks.append(sock)
    time.sleep(max(0, end - time.time()))
    for sock in socks:
        sock.close()
    return len(socks), {}


def idle_connections(daemon, end):
    socks = [daemon.connect() for _ in range(1000)]
    time.sleep(max(0, end - time.time()))
    for sock in socks:
        sock.close()
    return len(socks), {}


# ---- HTTP/2 by hand ----

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    def text(t):
        assert len(t) < 127
        return bytes([len(t)]) + t
    return b"\x00" + text(name) + text(value)


def call_headers(path):
    return (b"\x83\x86" + literal(b":path", path) + literal(b":authority", b"t") + literal(b"te", b"trailers") +
            literal(b"content-type", b"application/grpc"))


GENERATE = b"/sits2026.v1.Inference/Generate"


def h2(daemon):
    sock = daemon.connect(daemon.grpc)
    sock.sendall(PREFACE + frame(4, 0, 0))
    threading.Thread(target=swallow, args=(sock,), daemon=True).start()
    return sock


def swallow(sock):
    try:
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass


def rapid_reset(daemon, end):
    """CVE-2023-44487's pattern: open a call, take it back, on and on."""
    n = 0
    while time.time() < end:
        sock, stream = h2(daemon), 1
        try:
            while time.time() < end and stream < 20000:
                sock.sendall(b"".join(frame(1, 4, at, call_headers(GENERATE)) + frame(3, 0, at, struct.pack(">I", 8))
                                      for at in range(stream, stream + 100, 2)))
                stream += 100
                n += 50
                time.sleep(0.001)
        except OSError:
            pass
        sock.close()
    return n, {}


def large_hpack(daemon, end):
    """A header block of 1 MB over CONTINUATION frames, never finished; the library looks at its limit when a header is whole."""
    n = 0
    while time.time() < end:
        sock = h2(daemon)
        try:
            value = b"\x00\x01x\x7f\x81\xff\x3f"  # a literal header "x" whose value is to have 1 MB
            sock.sendall(frame(1, 0, 1, call_headers(GENERATE) + value))
            for _ in range(64):
                sock.sendall(frame(9, 0, 1, b"a" * 16384))
                n += 1
        except OSError:
            pass
        sock.close()
    return n, {}


def large_message(daemon, end):
    """A message that says it has 4 GB."""
    n = 0
    while time.time() < end:
        sock = h2(daemon)
        try:
            sock.sendall(frame(1, 4, 1, call_headers(GENERATE)) + frame(0, 0, 1, b"\x00\xff\xff\xff\xff" + b"a" * 1000))
            time.sleep(0.01)
            n += 1
        except OSError:
            pass
        sock.close()
    return n, {}


def pings(daemon, end):
    n, sock = 0, h2(daemon)
    while time.time() < end:
        try:
            sock.sendall(frame(6, 0, 0, b"12345678") * 100)
            n += 100
            time.sleep(0.001)
        except OSError:
            sock = h2(daemon)
    sock.close()
    return n, {}


def settings(daemon, end):
    n, sock = 0, h2(daemon)
    while time.time() < end:
        try:
            sock.sendall(frame(4, 0, 0, struct.pack(">HI", 4, 65535)) * 100)
            n += 100
            time.sleep(0.001)
        except OSError:
            sock = h2(daemon)
    sock.close()
    return n, {}


def silent_grpc(daemon, end):
    socks = [daemon.connect(daemon.grpc) for _ in range(500)]
    time.sleep(max(0, end - time.time()))
    for sock in socks:
        sock.close()
    return len(socks), {}


PATTERNS = [two_lengths, length_and_chunked, folded_length, large_header, many_headers, slow_headers, slow_body, deep_json, many_values,
            empty_objects, special_text, unread_streams, idle_connections, rapid_reset, large_hpack, large_message, pings, settings,
            silent_grpc]


def percentile(times, q):
    return round(sorted(times)[min(len(times) - 1, int(q * len(times)))], 2) if times else None


def measure(daemon, pattern, seconds):
    """p50 and p99 of the bystander, peak memory; with a pattern, in a process of its own at nice 19."""
    times, stop, peak, out = [], threading.Event(), daemon.rss_mb(), None
    before = daemon.cpu_s()
    thread = threading.Thread(target=bystander, args=(daemon, stop, times))
    thread.start()
    start = time.time()
    if pattern:
        command = ["nice", "-n", "19", sys.executable, __file__, "--attack", pattern.__name__, str(daemon.port), str(daemon.grpc),
                   str(seconds)]
        attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while time.time() - start < seconds or (pattern and attacker.poll() is None):
        peak = max(peak, daemon.rss_mb())
        time.sleep(0.02)
    stop.set()
    thread.join()
    if pattern:
        out = json.loads(attacker.communicate()[0] or "null")
    return {"requests": len(times), "p50_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99),
            "failed": sum(t == float("inf") for t in times), "peak_rss_mb": round(peak, 1), "cpu_s": round(daemon.cpu_s() - before, 2),
            "attack": out}


class Target:
    """What an attacker knows."""
    def __init__(self, port, grpc):
        self.port, self.grpc = port, grpc
    connect = Daemon.connect


def main():
    if sys.argv[1] == "--attack":
        pattern = next(p for p in PATTERNS if p.__name__ == sys.argv[2])
        print(json.dumps(pattern(Target(int(sys.argv[3]), int(sys.argv[4])), time.time() + float(sys.argv[5]))))
        return
    program, model, out, *names = sys.argv[1:]
    daemon = Daemon(program, model)
    rows = []
    measure(daemon, None, 1)
    by_name = {pattern.__name__: pattern for pattern in PATTERNS}
    for pattern in [by_name[name] for name in names] or PATTERNS:
        alone = measure(daemon, None, 2)
        beside = measure(daemon, pattern, SECONDS)
        time.sleep(0.5)
        rows.append({"pattern": pattern.__name__, "alone": alone, "beside": beside, "rss_after_mb": round(daemon.rss_mb(), 1)})
        print(f"{pattern.__name__:20} p99 {alone['p99_ms']} -> {beside['p99_ms']} ms, memory {alone['peak_rss_mb']} -> "
              f"{beside['peak_rss_mb']} -> {rows[-1]['rss_after_mb']} MB, cpu {beside['cpu_s']} s, {beside['attack']}", flush=True)
    daemon.process.terminate()
    status = daemon.process.wait(60)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()).group(1)
    pathlib.Path(out).write_text(json.dumps({
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "bench": "abuse", "commit": commit, "cpu": cpu,
        "cores": os.cpu_count(), "command": f"bench/abuse.py build/release/bin/sits2026d {pathlib.Path(model).name} "
        f"OUT.json {' '.join(names)}".rstrip(),
        "malloc_arena_max": os.environ.get("MALLOC_ARENA_MAX"),
        "daemon_options": " ".join(daemon.options[4:6] + daemon.options[8:]), "seconds_each": SECONDS,
        "exit_status": status,
        "patterns": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
