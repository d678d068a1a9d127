"""The simulation's policies on a real server: does a live replay of a trace put them in the same order?

  costs     what steps take on this machine (sits2026-bench steps), as a cost file for sits2026-bench simulate
  search    goodput of each policy in the simulation, on those costs and the scaled trace, for several targets
  replay    the scaled trace at rising speeds on a live server under each policy, beside the simulation of the very same requests

The trace is scaled to fit a small machine: --minutes of it, prompts divided by --prompt-by, answers by --output-by. A policy carries a
speed when P99 of the time to the first token and between tokens keep their targets. replay adds its runs to those that --json has
already, so that a long comparison can be made in pieces; the file says what the whole of them carries at each of --itl-targets-ms."""
import argparse, csv, datetime, json, os, pathlib, subprocess, sys, tempfile

from live_server import ROOT, Server, brief, header, load

POLICIES = ["static", "continuous", "chunked", "alps"]
PAIR_CHUNK, DEEP, SHALLOW = 256, 1024, 128


def steps(a, decodes, chunks, depths, context):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([str(a.bin / "sits2026-bench"), "steps", "--model", a.model, "--device", "cpu", "--decodes", str(decodes),
                        "--chunks", chunks, "--depths", depths, "--context", str(context), "--rounds", str(a.rounds), "--json", out.name],
                       check=True, stderr=subprocess.DEVNULL)
        return {(s["depth"], s["chunk"]): s["p50_us"] for s in json.load(open(out.name))["steps"]}


def costs(a):
    """Decoding steps and steps with a chunk, freed of what the cache's length adds; straight lines between them are the model."""
    chunks = [16, 64, 128, 256, 512]
    mixed = steps(a, 4, ",".join(map(str, chunks)), f"1,{DEEP}", SHALLOW)
    pair_us = (mixed[DEEP, PAIR_CHUNK] - mixed[1, PAIR_CHUNK]) / (PAIR_CHUNK * (DEEP - 1))
    base = {n: steps(a, n, "16", "1", SHALLOW)[0, 0] for n in (1, 2, 4, 8, 16, 32)}
    kv_us = max(1e-3, (steps(a, 16, "16", "1", DEEP)[0, 0] - base[16]) / (16 * (DEEP - SHALLOW)))
    points = [[n, us - n * SHALLOW * kv_us] for n, us in base.items()]
    points += [[4 + n, mixed[1, n] - 4 * SHALLOW * kv_us - n * n / 2 * pair_us] for n in chunks if 4 + n > points[-1][0]]
    (n0, us0), (n1, us1) = points[-2:]
    points.append([4096, us1 + (4096 - n1) * (us1 - us0) / (n1 - n0)])
    unused = ["weight_bytes", "head_bytes", "linear_flops_per_token", "head_flops_per_row", "weight_read_share", "head_read_share",
              "kv_read_share", "small_batch_tokens", "small_batch_flops", "large_batch_flops", "fixed_us"]
    return {"name": pathlib.Path(a.model).name + " as measured by live_policies.py costs; points stand for all keys that are 1",
            "kv_bytes_per_token": a.kv_bytes, "read_bytes_per_s": a.kv_bytes / kv_us * 1e6, "attention_flops_per_pair": 1,
            "attention_flops": 1e6 / pair_us, "kv_memory_bytes": 2**30, "max_batch_tokens": a.max_num_batched_tokens,
            "points": [[n, round(us, 1)] for n, us in points]} | {key: 1 for key in unused}


def scaled(a, path):
    """Write the scaled part of the trace; its times in seconds from its first row."""
    times = []
    with open(a.trace, newline="") as source, open(path, "w") as out:
        out.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        start = None
        for row in csv.DictReader(source):
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            minute = (at - start).total_seconds() / 60
            if not a.minutes[0] <= minute < a.minutes[1]:
                continue
            sizes = [max(1, round(int(row[key]) / by)) for key, by in (("ContextTokens", a.prompt_by), ("GeneratedTokens", a.output_by))]
            out.write(f"{row['TIMESTAMP']},{sizes[0]},{sizes[1]}\n")
            times.append(minute * 60)
    return [t - times[0] for t in times]


def simulate(a, trace, *options):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([str(a.bin / "sits2026-bench"), "simulate", "--trace", trace, "--cost", a.cost, "--max-seqs", str(a.max_num_seqs),
                        "--chunk-tokens", str(a.chunk_tokens), "--ttft-target-ms", str(a.ttft_target_ms), *[str(o) for o in options],
                        "--out", out.name], check=True, stderr=subprocess.DEVNULL)
        return json.load(open(out.name))


def setting(a):
    return {key: getattr(a, key) for key in ("minutes", "prompt_by", "output_by", "ttft_target_ms", "chunk_tokens", "max_num_seqs")}


def search(a):
    with tempfile.NamedTemporaryFile(suffix=".csv") as trace:
        scaled(a, trace.name)
        found = simulate(a, trace.name, "--itl-targets-ms", ",".join(map(str, a.itl_targets_ms)), "--static-batches", "4,8,16",
                         "--lowest-speed", 0.1)
    for target in sorted({row["itl_target_ms"] for row in found["goodput"]}):
        print(f"{target:5} ms:", *(f"{row['policy']} {row['goodput']:.2f}" for row in found["goodput"] if row["itl_target_ms"] == target),
              file=sys.stderr)
    return {"setting": setting(a), "goodput": found["goodput"]}


def simulated(a, trace, policy, target_ms, speed, n):
    point, = simulate(a, trace, "--policy", policy, "--speed", speed, "--requests", n, "--itl-targets-ms", target_ms or 1000,
                      "--static-batches", a.static_batch)["points"]
    return {"ttft_p99_ms": point["ttft_p99_ms"], "itl_p99_ms": point["itl_p99_ms"]}


def server_options(a, policy, target_ms):
    options = ["--policy", policy, "--max-num-seqs", a.static_batch if policy == "static" else a.max_num_seqs, "--max-num-batched-tokens",
               a.chunk_tokens if policy == "chunked" else a.max_num_batched_tokens, "--speculative-tokens", 0,
               "--no-enable-prefix-caching", "--max-queued-requests", 100000]
    return options + (["--itl-target-ms", target_ms, "--ttft-target-ms", a.ttft_target_ms] if target_ms else [])


def carried(a, runs, where):
    """By target and policy, the highest speed up to which nothing broke."""
    best = {}
    for target_ms in a.itl_targets_ms:
        best[target_ms] = {}
        for policy in POLICIES:
            mine = sorted((r["speedup"], r[where]["ttft_p99_ms"] <= a.ttft_target_ms and r[where]["itl_p99_ms"] <= target_ms)
                          for r in runs if r["policy"] == policy and r["itl_target_ms"] in (0, target_ms))
            broken = min((speed for speed, holds in mine if not holds), default=1e9)
            best[target_ms][policy] = max((speed for speed, holds in mine if holds and speed < broken), default=0)
    return best


def say(run):
    live, model = run["live"], run["simulated"]
    print(f"{run['policy']:10} target {run['itl_target_ms']:4} ms speed {run['speedup']:5.2f}: p99 of the first token "
          f"{live['ttft_p99_ms']:6.0f} ({model['ttft_p99_ms']:6.0f} simulated), between tokens {live['itl_p99_ms']:5.0f} "
          f"({model['itl_p99_ms']:5.0f}) ms", file=sys.stderr, flush=True)


def replay_policy(a, trace, times, policy, target_ms, runs):
    server = Server(a.bin, a.model, *server_options(a, policy, target_ms))
    load(a.bin, server, "--concurrency", 4, "--requests", 40, "--n-vocab", 400)  # warm: pages touched, costs learned
    for speed in a.speeds:
        live = load(a.bin, server, "--trace", trace, "--speedup", speed, "--duration-s", a.duration_s, "--requests", 100000, "--n-vocab",
                    400)
        runs.append({"policy": policy, "itl_target_ms": target_ms, "speedup": speed,
                     "live": {"ttft_p99_ms": live["ttft_ms"]["p99"], "itl_p99_ms": live["itl_ms"]["p99"]} | brief(live),
                     "simulated": simulated(a, trace, policy, target_ms, speed, sum(t <= a.duration_s * speed for t in times))})
        say(runs[-1])
    server.stop()


def replay(a, runs):
    with tempfile.NamedTemporaryFile(suffix=".csv") as trace:
        times = scaled(a, trace.name)
        for policy in a.policies:
            for target_ms in a.itl_targets_ms if policy == "alps" else [0]:
                replay_policy(a, trace.name, times, policy, target_ms, runs)
    return {"setting": setting(a) | {key: getattr(a, key) for key in ("static_batch", "duration_s")}, "cost": json.load(open(a.cost)),
            "carried_live": carried(a, runs, "live"), "carried_simulated": carried(a, runs, "simulated"), "runs": runs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["costs", "search", "replay"])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--model", help="costs, replay")
    parser.add_argument("--kv-bytes", type=int, default=23040, help="costs: of a token in the cache; SmolLM2-135M in f16 has 23040")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cost", help="search, replay: file that costs wrote")
    parser.add_argument("--trace", help="CSV of TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--minutes", type=float, nargs=2, default=[10, 15], help="of the trace, from and to")
    parser.add_argument("--prompt-by", type=float, default=8)
    parser.add_argument("--output-by", type=float, default=3)
    parser.add_argument("--itl-targets-ms", type=int, nargs="*", default=[145, 240], help="replay: alps runs with each")
    parser.add_argument("--ttft-target-ms", type=float, default=1200)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--static-batch", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--speeds", type=float, nargs="*", default=[0.6, 0.9, 1.05, 1.2])
    parser.add_argument("--duration-s", type=float, default=30, help="of each run")
    parser.add_argument("--json")
    a = parser.parse_args()
    out = header("live_policies")
    before = json.load(open(a.json)) if a.what == "replay" and a.json and os.path.exists(a.json) else {}
    if a.what == "costs":
        out |= costs(a)
    elif a.what == "search":
        out |= search(a)
    else:
        out["commands"] = before.get("commands", []) + [out.pop("command")]
        out |= replay(a, before.get("runs", []))
    text = json.dumps(out, indent=1)
    open(a.json, "w").write(text + "\n") if a.json else print(text)


if __name__ == "__main__":
    main()
