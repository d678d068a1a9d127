"""CPU speed beside llama-cpp-python on the same GGUF, same threads, alternating in one run.

Usage: cpu_vs_llama_cpp.py MODEL.gguf [--ours FILE.bin] [--threads 2] [--rounds 3] [--json OUT]
--ours: an engine file that sits2026-compile made of that model, which our side runs instead; without it both run the GGUF file.
Measures prefill of 512 tokens, decode at batch 1, and 8 parallel decodes (total tokens/s). Each round runs ours, then theirs; the figures
and the ratio are medians over rounds, the ratio taken pair by pair so that a machine whose speed drifts does not bend it. Needs
llama-cpp-python (built with native flags; without AMX where its AMX kernels crash) and build/release/bin. An interrupt ends it with the
rounds that are complete. The read bandwidth of the machine and the peak of its int8 dot products are measured in every round too
(bench_cpu_matmul): decode of one sequence is given as a share of the first (bytes of a token: the file's), prefill as one of the second
(two operations for each weight of the layers and token).
"""
import argparse
import ctypes
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PREFILL, STEPS, PARALLEL, CONTEXT = 512, 64, 8, 128


class Theirs:
    """llama.cpp through its C interface, so that Python costs nothing per token."""

    def __init__(self, path, threads):
        import llama_cpp as l
        self.l = l
        l.llama_backend_init()
        quiet = l.llama_log_callback(lambda *_: None)
        self.keep = quiet
        l.llama_log_set(quiet, ctypes.c_void_p(0))
        model_params = l.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = l.llama_model_load_from_file(path.encode(), model_params)
        params = l.llama_context_default_params()
        params.n_ctx = PARALLEL * 512
        params.n_batch = params.n_ubatch = PREFILL
        params.n_seq_max = PARALLEL
        params.n_threads = params.n_threads_batch = threads
        self.context = l.llama_init_from_model(self.model, params)
        self.vocab = l.llama_vocab_n_tokens(l.llama_model_get_vocab(self.model))
        self.batch = l.llama_batch_init(PREFILL, 0, PARALLEL)

    def step(self, rows):
        """rows: (token, position, sequence, wants logits). Seconds taken."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token % self.vocab, position, 1, wants
            b.seq_id[i][0] = sequence
        start = time.perf_counter()
        if self.l.llama_decode(self.context, b) != 0:
            sys.exit("llama_decode failed")
        self.l.llama_synchronize(self.context)
        return time.perf_counter() - start

    def clear(self):
        self.l.llama_memory_clear(self.l.llama_get_memory(self.context), True)

    def run(self):
        times = []
        for _ in range(4):
            self.clear()
            times.append(self.step([(7 * i + 1, i, 0, i == PREFILL - 1) for i in range(PREFILL)]))
        out = {"prefill": PREFILL / statistics.median(times[1:])}
        for n in (1, PARALLEL):
            self.clear()
            for s in range(n):
                self.step([(7 * i + s, i, s, i == CONTEXT - 1) for i in range(CONTEXT)])
            times = [self.step([(11 * i + s, CONTEXT + i, s, True) for s in range(n)]) for i in range(STEPS)]
            out[f"decode_{n}"] = n / statistics.median(times)
        return out


def binary(name):
    return pathlib.Path(os.environ.get("SITS_BIN", ROOT / "build/release/bin")) / name


def machine(threads):
    """Bytes per second that `threads` cores read from memory, and int8 operations per second of their dot products."""
    said = subprocess.run([binary("bench_cpu_matmul"), "--threads", str(threads), "--types", "none", "--percentile", "50"], check=True,
                          capture_output=True, text=True).stdout
    return float(said.split("read ")[1].split()[0]) * 1e9, float(said.split("dot products ")[1].split()[0]) * 1e9


def layer_weights(path):
    """Weights of the layers' matrices in an engine file; None for another file, which the compiler does not list."""
    said = subprocess.run([binary("sits2026-compile"), "--inspect", path], capture_output=True, text=True)
    rows = re.findall(r"^ +(\S+) +\S+ +\[(\d+)\]\[(\d+)\]", said.stdout, re.M)
    return sum(int(n) * int(k) for name, n, k in rows if "embd" not in name and name != "output.weight") if said.returncode == 0 else None


def ours(path, threads):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([binary("sits2026-bench"), "throughput", "--model", path, "--device", "cpu", "--threads", str(threads),
                        "--prefill", str(PREFILL), "--batch", f"1,{PARALLEL}", "--context", str(CONTEXT), "--steps", str(STEPS),
                        "--max-batch-tokens", str(PREFILL),
                        "--json", out.name], check=True, stderr=subprocess.DEVNULL)
        got = json.load(open(out.name))
    return {"prefill": got["prefill"][0]["tokens_per_s"], **{f"decode_{d['batch']}": d["tokens_per_s"] for d in got["decode"]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--ours")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    theirs, rounds = Theirs(given.model, given.threads), []
    while len(rounds) < given.rounds:
        try:
            figures = {"sits2026": ours(given.ours or given.model, given.threads), "llama_cpp": theirs.run()}
            figures["read_bytes_per_s"], figures["int8_ops_per_s"] = machine(given.threads)
        except KeyboardInterrupt:
            if not rounds:
                raise
            break
        rounds.append(figures)
        print(f"round {len(rounds)}: {json.dumps(figures)}", file=sys.stderr)
    table = {}
    for key in ("prefill", "decode_1", f"decode_{PARALLEL}"):
        a, b = (statistics.median(r[side][key] for r in rounds) for side in ("sits2026", "llama_cpp"))
        ratio = statistics.median(r["sits2026"][key] / r["llama_cpp"][key] for r in rounds)
        table[key] = {"sits2026_tokens_per_s": round(a, 1), "llama_cpp_tokens_per_s": round(b, 1), "ratio": round(ratio, 3)}
        print(f"{key:10}  sits2026 {a:9.1f}  llama.cpp {b:9.1f} tokens/s  ratio {ratio:.2f}")
    bytes_a_token = {"sits2026": os.path.getsize(given.ours or given.model), "llama_cpp": os.path.getsize(given.model)}
    for side in ("sits2026", "llama_cpp"):
        share = statistics.median(r[side]["decode_1"] * bytes_a_token[side] / r["read_bytes_per_s"] for r in rounds)
        table["decode_1"][f"{side}_share_of_read"] = round(share, 3)
        print(f"{side}: one sequence reads {100 * share:.0f} % of the measured read bandwidth")
    weights = layer_weights(given.ours) if given.ours else None
    if weights:
        for side in ("sits2026", "llama_cpp"):
            share = statistics.median(r[side]["prefill"] * 2 * weights / r["int8_ops_per_s"] for r in rounds)
            table["prefill"][f"{side}_share_of_int8_peak"] = round(share, 3)
            print(f"{side}: a prompt of {PREFILL} takes {100 * share:.0f} % of the measured int8 peak")
    if given.json:
        import llama_cpp
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
        json.dump({"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "commit": commit, "cpu": cpu,
                   "threads": given.threads, "model": pathlib.Path(given.model).name, "llama_cpp_python": llama_cpp.__version__,
                   "llama_cpp_system": llama_cpp.llama_print_system_info().decode(), "bytes_a_token": bytes_a_token,
                   "command": " ".join(["bench/cpu_vs_llama_cpp.py", pathlib.Path(given.model).name] +
                                       (["--ours", pathlib.Path(given.ours).name] if given.ours else [])),
                   "layer_weights": weights, "median": table, "rounds": rounds},
                  open(given.json, "w"), indent=1)


if __name__ == "__main__":
    main()
