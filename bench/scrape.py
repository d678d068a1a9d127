"""Time of a scrape of /metrics while many streams run: sits2026d on a model, a process that holds the streams, one scrape after the other.

The clock runs from before the connect to the last byte, so it holds what a Prometheus server would wait for; the same is measured idle.
usage: scrape.py MODEL --json OUT [--bin DIR] [--streams 1000] [--scrapes 100] [--threads 1]
"""
import argparse
import datetime
import http.client
import json
import multiprocessing
import os
import pathlib
import platform
import re
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def hold_streams(port, n, n_tokens):
    """Opens n streams; reads and drops their bytes. A process of its own, behind all others: threads of one would wait for each other."""
    os.nice(19)
    selector = selectors.DefaultSelector()
    body = json.dumps({"prompt": "Once", "max_tokens": n_tokens, "ignore_eos": True, "stream": True}).encode()
    request = (b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\n"
               b"Content-Length: %d\r\n\r\n" % len(body)) + body
    for _ in range(n):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select(0.2):
            if not key.fileobj.recv(65536):
                selector.unregister(key.fileobj)
                key.fileobj.close()
        time.sleep(0.02)  # in batches, so that the client leaves the processor to the server


def scrape(port):
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    took_ms = (time.perf_counter() - began) * 1000
    connection.close()
    running = float(re.search(r"^sits2026:num_requests_running\{.*\} (\S+)$", text, re.M).group(1))
    return took_ms, len(text), running


def summary(rows):
    times = sorted(ms for ms, _, _ in rows)
    return {"scrapes": len(times), "p50_ms": round(times[len(times) // 2], 3), "p90_ms": round(times[len(times) * 9 // 10], 3),
            "p99_ms": round(times[min(len(times) - 1, len(times) * 99 // 100)], 3), "max_ms": round(times[-1], 3),
            "bytes": rows[-1][1], "least_running": min(r for _, _, r in rows)}


def measure(port, n, wanted=0):
    rows = []
    while len(rows) < n:
        row = scrape(port)
        if row[2] >= wanted:
            rows.append(row)
        time.sleep(0.05)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", required=True)
    parser.add_argument("--bin", default=ROOT / "build/release/bin")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.NamedTemporaryFile() as log:
        command = [str(pathlib.Path(options.bin) / "sits2026d"), "--model", options.model, "--port", "0", "--threads", str(options.threads),
                   "--max-num-seqs", str(options.streams), "--max-num-batched-tokens", "4096", "--max-model-len", "512",
                   "--max-queued-requests", str(2 * options.streams), "--kv-cache-memory", "4G",
                   "--itl-target-ms", "60000"]  # else prompts wait for streams that are this many, and they never run together
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
        port, streams = None, None
        try:
            while not port or b" ready model=" not in pathlib.Path(log.name).read_bytes():
                found = re.search(rb"listening on http://[^:]+:(\d+)", pathlib.Path(log.name).read_bytes())
                port = int(found.group(1)) if found else None
                assert daemon.poll() is None, pathlib.Path(log.name).read_text()
                time.sleep(0.05)
            idle = measure(port, options.scrapes)
            streams = multiprocessing.Process(target=hold_streams, args=(port, options.streams, 120))
            streams.start()
            while scrape(port)[2] < options.streams:
                time.sleep(0.2)
            busy = measure(port, options.scrapes, options.streams)
        finally:
            if streams:
                streams.terminate()
                streams.join()
            daemon.terminate()
            daemon.wait()
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "bench": "scrape", "commit": commit,
              "cpu": cpu, "cores": len(os.sched_getaffinity(0)),
              "command": ["bench/scrape.py", *(os.path.basename(word) for word in sys.argv[1:])],
              "model": pathlib.Path(options.model).name, "streams": options.streams, "server_threads": options.threads,
              "idle": summary(idle), "with_streams": summary(busy)}
    pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
