#!/usr/bin/env python3
"""500 gRPC streams at once: what delivering adds to the engine's own time. Prints and writes JSON.

The figure is the daemon's delivery_latency_seconds: from the engine handing over a token to its bytes being handed to the socket's writer.
The clients (grpcio, processes at nice 19) run on the same machine. Usage: bench/grpc_streams.py DAEMON MODEL OUT.json [streams] [tokens]
"""
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from abuse import Daemon  # noqa: E402

PROCESSES, CONNECTIONS = 4, 48


def metrics(daemon):
    return urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics").read().decode()


def histogram(text, name):
    rows = re.findall(rf'sits2026:{name}_bucket{{[^}}]*le="([^"]+)"}} (\d+)', text)
    total = int(rows[-1][1])
    bounds = {q: next(float(bound) for bound, n in rows if int(n) >= q * total) * 1000 for q in (0.5, 0.9, 0.99, 0.999)}
    return {"count": total, "buckets": {bound: int(n) for bound, n in rows}, **{f"p{q * 100:g}_ms_at_most": b for q, b in bounds.items()}}


def clients(port, n_streams, n_tokens):
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    from grpc_client import grpc, pb, stubs
    n_channels = CONNECTIONS // PROCESSES
    channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(n_channels)]
    calls = [stubs.InferenceStub(channels[i % n_channels]).GenerateStream(
        pb.GenerateRequest(prompt=["Once upon a time"], max_tokens=n_tokens, ignore_eos=True, seed=i)) for i in range(n_streams)]
    done = sum(list(call)[-1].usage.completion_tokens == n_tokens for call in calls)
    print(done)


def main():
    if sys.argv[1] == "--clients":
        return clients(*map(int, sys.argv[2:]))
    program, model, out = sys.argv[1:4]
    n_streams, n_tokens = int((sys.argv[4:5] or [500])[0]), int((sys.argv[5:6] or [200])[0])
    daemon = Daemon(program, model, ["--max-num-seqs", "512", "--max-queued-requests", "2000"])
    command = ["nice", "-n", "19", sys.executable, __file__, "--clients", str(daemon.grpc), str(n_streams // PROCESSES), str(n_tokens)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    n_done = sum(int(run.communicate()[0] or 0) for run in runs)
    text = metrics(daemon)
    steps = histogram(text, "inter_token_latency_seconds")
    daemon.process.terminate()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()).group(1)
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "bench": "grpc_streams",
              "commit": commit, "cpu": cpu, "cores": os.cpu_count(),
              "command": f"bench/grpc_streams.py build/release/bin/sits2026d {pathlib.Path(model).name} OUT.json {n_streams} {n_tokens}",
              "streams": n_streams, "connections": CONNECTIONS, "tokens_each": n_tokens, "streams_done": n_done,
              "exit_status": daemon.process.wait(60), "inter_token_latency": steps,
              "delivery_latency": histogram(text, "delivery_latency_seconds")}
    pathlib.Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result["delivery_latency"].items() if k != "buckets"}), n_done)


if __name__ == "__main__":
    main()
