"""A real server under many times the load that it can carry: refusals with Retry-After, latency of what is accepted, memory, health.

sits2026-bench serve is the client. Prints one JSON object; --json FILE writes it. live_policies.py uses the server and the client."""
import argparse, datetime, json, os, pathlib, signal, socket, subprocess, sys, tempfile, threading, time, urllib.error, urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, bin_dir, model, *options):
        self.port, self.options = free_port(), [str(o) for o in options]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen([str(bin_dir / "sits2026d"), "--model", str(model), "--port", str(self.port), "--log-level", "warn",
                                         *self.options], stderr=self.log)
        end = time.time() + 120
        while self.get("/health/ready") != 200:
            if self.process.poll() is not None or time.time() > end:
                sys.exit(open(self.log.name).read())
            time.sleep(0.1)

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def text(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return answer.read().decode()

    def rss_mb(self):
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def load(bin_dir, server, *options):
    """One run of the client; its JSON."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        done = subprocess.run([str(bin_dir / "sits2026-bench"), "serve", "--url", f"http://127.0.0.1:{server.port}", "--json", out.name,
                               *[str(o) for o in options]], stderr=subprocess.PIPE, text=True)
        if not os.path.getsize(out.name):
            sys.exit(done.stderr)
        return json.load(open(out.name))


def brief(run):
    keep = {k: run[k] for k in ("sent", "done", "refused", "refused_without_retry_after", "failed", "seconds", "output_tokens_per_s")}
    return keep | {k: {q: run[k][q] for q in ("p50", "p99", "max")} for k in ("ttft_ms", "itl_ms")}


def header(name):
    """What every results file says of its origin."""
    machine = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "bench": name, "cpu": machine,
            "cores": os.cpu_count(), "commit": commit, "command": [pathlib.Path(w).name if os.path.isabs(w) else w for w in sys.argv]}


def overload(a):
    options = ["--max-num-seqs", a.max_num_seqs, "--max-queued-requests", a.max_queued, "--itl-target-ms", a.itl_target_ms,
               "--max-model-len", a.max_model_len, "--no-enable-prefix-caching", "--speculative-tokens", 0]
    server = Server(a.bin, a.model, *options)
    shape = ["--prompt-tokens", a.prompt_tokens, "--output-tokens", a.output_tokens, "--n-vocab", 400]
    at_once = min(a.max_num_seqs, a.max_queued)
    full = load(a.bin, server, "--concurrency", at_once, "--duration-s", a.calibrate_s, "--requests", 100000, *shape)
    can_do = full["done"] / full["seconds"]
    samples, stop = [], threading.Event()

    def watch():
        start = time.time()
        while not stop.wait(1):
            samples.append((time.time() - start, server.rss_mb(), server.get("/health/live"), server.get("/health/ready")))
    watcher = threading.Thread(target=watch)
    watcher.start()
    rate = a.times * can_do
    print(f"can do {can_do:.1f} requests/s; sending {rate:.1f}/s for {a.duration_s} s", file=sys.stderr, flush=True)
    run = load(a.bin, server, "--rate", rate, "--duration-s", a.duration_s, "--requests", int(rate * a.duration_s * 1.1) + 100, *shape)
    stop.set()
    watcher.join()
    left = {line.split("{")[0]: float(line.split()[-1]) for line in server.text("/metrics").splitlines()
            if line.startswith(("sits2026:num_requests_", "sits2026:kv_pages_used"))}
    at = lambda share: samples[int(share * (len(samples) - 1))][1]
    # Draining must show: a request is running while SIGTERM arrives.
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", body, {"Content-Type": "application/json"})
    busy = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=60).read())
    busy.start()
    time.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    draining = {"live": server.get("/health/live"), "ready": server.get("/health/ready")}
    busy.join()
    code = server.process.wait(120)
    return {"server": [str(o) for o in options], "can_do_requests_per_s": can_do, "rate": rate, "calibration": brief(full),
            "served_requests_per_s": run["done"] / run["seconds"], "offered_over_served": run["sent"] / max(1, run["done"]),
            "overload": brief(run), "rss_mb": {"at_20_percent": at(0.2), "at_60_percent": at(0.6), "at_end": at(1)},
            "health_live": sorted({s[2] for s in samples}), "health_ready": sorted({s[3] for s in samples}), "samples": len(samples),
            "left_after": left, "draining": draining, "exit_code": code}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--model", required=True)
    parser.add_argument("--json")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--itl-target-ms", type=float, default=50)
    parser.add_argument("--duration-s", type=float, default=12)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--times", type=float, default=20)
    parser.add_argument("--max-queued", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--calibrate-s", type=float, default=15)
    a = parser.parse_args()
    out = header("live_overload") | overload(a)
    text = json.dumps(out, indent=1)
    open(a.json, "w").write(text + "\n") if a.json else print(text)


if __name__ == "__main__":
    main()
