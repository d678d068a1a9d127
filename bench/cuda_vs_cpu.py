#!/usr/bin/env python3
"""The same files on both backends: perplexity by cache codec, and greedy answers with the gap at which they part.

usage: cuda_vs_cpu.py FILE... --text FILE --prompts FILE [--ctx N] [--windows N] [--codecs f16,int8,int4,fp4] [--out FILE.json]
                      [--most-percent P] [--most-gap G]
FILE: engine files or models. --prompts: a list of {"ids": [...]} or {"prompt": "..."} (sits2026-eval greedy). Programs come from SITS_BIN
(default build/release/bin). A parting says after how many tokens, and how far apart the CPU's best two logits were there: where that gap
is small, both answers are as good. With --most-percent and --most-gap: exit status 1 where perplexities differ by more, or answers part at
a wider gap.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(os.environ.get("SITS_BIN", ROOT / "build/release/bin"))


def evaluate(*arguments):
    done = subprocess.run([BIN / "sits2026-eval", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def perplexity(given, path, device, codec):
    return evaluate("perplexity", "--model", path, "--device", device, "--kv-cache-dtype", codec, "--text", given.text, "--ctx", given.ctx,
                    "--windows", given.windows, "--json")


def greedy(given, path, device):
    return evaluate("greedy", "--model", path, "--device", device, "--kv-cache-dtype", "f16", "--prompts", given.prompts,
                    "--max-tokens", 128, "--parse-special")


def partings(cpu, cuda):
    """(tokens before, gap) for each answer that differs."""
    found = []
    for a, b in zip(cpu, cuda):
        if a["ids"] == b["ids"]:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"])) if x != y), min(len(a["ids"]), len(b["ids"])))
        found.append({"tokens": at, "gap": round(a["gap"][at], 4) if at < len(a["gap"]) else None})
    return found


def measure(given, path):
    row = {"file": path.name, "perplexity": {}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # the device's run beside the processor's
        for codec in given.codecs.split(","):
            cpu, cuda = pool.map(lambda device: perplexity(given, path, device, codec)["perplexity"], ("cpu", "cuda"))
            percent = round(100 * (cuda / cpu - 1), 3)
            row["perplexity"][codec] = {"cpu": round(cpu, 4), "cuda": round(cuda, 4), "difference_percent": percent}
            print(f"{path.name:18} {codec:5} cpu {cpu:.4f}  cuda {cuda:.4f}  {percent:+.3f} %", flush=True)
        cpu, cuda = pool.map(lambda device: greedy(given, path, device), ("cpu", "cuda"))
    row["greedy"] = {"prompts": len(cpu), "equal": len(cpu) - len(partings(cpu, cuda)), "partings": partings(cpu, cuda)}
    print(f"{path.name:18} greedy {row['greedy']['equal']} of {len(cpu)} equal", flush=True)
    return row


def breaches(given, row):
    """What of a file's row is beyond the bounds, in words."""
    for codec, both in row["perplexity"].items():
        if given.most_percent is not None and not abs(both["difference_percent"]) <= given.most_percent:
            yield f"{row['file']} {codec}: perplexity differs by {both['difference_percent']} %, at most {given.most_percent} was asked"
    for at in row["greedy"]["partings"]:
        if given.most_gap is not None and not (at["gap"] is not None and at["gap"] <= given.most_gap):
            yield f"{row['file']}: an answer parts after {at['tokens']} tokens at a gap of {at['gap']}, at most {given.most_gap} was asked"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--codecs", default="f16,int8,int4,fp4")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--most-percent", type=float)
    parser.add_argument("--most-gap", type=float)
    given = parser.parse_args()
    rows = [measure(given, path) for path in given.files]
    result = {"bench": "cuda_vs_cpu", "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "ctx": given.ctx,
              "windows": given.windows, "files": rows}
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    bad = [words for row in rows for words in breaches(given, row)]
    print(*bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
