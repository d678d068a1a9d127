#!/usr/bin/env python3
"""Recipes side by side: compiles a model in each, measures perplexity and next-token accuracy, and prints one table.

usage: recipes.py MODEL --text FILE [--calibration FILE] [--recipes a,b,...] [--ctx N] [--windows N] [--chunk N] [--kv DTYPE]
                  [--lock COMMAND] [--out FILE.json]
A recipe is a name or a YAML file. The first one is the reference of the deltas. --chunk: windows of one run of the evaluator, so that each
run is short; --lock: a command that each run is put behind ("flock /tmp/lock"). Deltas are paired: the standard error is that of the mean
over windows of the difference of the windows' log-likelihoods. Programs come from SITS_BIN (default build/release/bin).
"""
import argparse
import json
import math
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import tempfile

BIN = pathlib.Path(os.environ.get("SITS_BIN", pathlib.Path(__file__).resolve().parent.parent / "build/release/bin"))


def compile_recipe(options, recipe, path):
    command = [BIN / "sits2026-compile", options.model, "-o", path, "--recipe", recipe, "--quiet"]
    if options.calibration:
        command += ["--calibration", options.calibration, "--calibration-ctx", str(min(options.ctx, 2048)),
                    "--calibration-windows", str(options.calibration_windows)]
    done = subprocess.run([*shlex.split(options.lock), *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    size, share, seconds, memory = re.search(r"([\d.]+) MB of weights, ([\d.]+) %.*, ([\d.]+) s, peak memory ([\d.]+)",
                                             done.stdout).groups()
    return {"weights_mb": float(size), "share_4x4": float(share) / 100, "compile_s": float(seconds), "peak_mb": float(memory)}


def evaluate(options, path):
    nll, right, scored, seconds = [], 0.0, 0, 0.0
    for skip in range(0, options.windows, options.chunk):
        command = [BIN / "sits2026-eval", "perplexity", "--model", path, "--text", options.text, "--ctx", options.ctx, "--json",
                   "--windows",
                   min(options.chunk, options.windows - skip), "--skip-windows", skip, "--kv-cache-dtype", options.kv]
        done = subprocess.run([*shlex.split(options.lock), *map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        part = json.loads(done.stdout)
        nll += part["window_nll"]
        right += part["accuracy"] * part["scored"]
        scored += part["scored"]
        seconds += part["seconds"]
    return {"window_nll": nll, "perplexity": math.exp(statistics.fmean(nll)), "accuracy": right / scored,
            "tokens_per_s": len(nll) * (options.ctx - 1) / seconds}


def compare(row, reference):
    differences = [a - b for a, b in zip(row["window_nll"], reference["window_nll"])]
    row["delta_percent"] = 100 * (math.exp(statistics.fmean(differences)) - 1)
    row["delta_error_percent"] = 100 * statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    row["delta_accuracy_points"] = 100 * (row["accuracy"] - reference["accuracy"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration")
    parser.add_argument("--calibration-windows", type=int, default=3)
    parser.add_argument("--recipes", default="w16a16,w8a8,w4a16,w4a8,w4a4,w4a4-mixed")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--lock", default="")
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    print("| recipe | MB | perplexity | delta % | accuracy, points | 4x4 % | compile s | peak MB | tokens/s |\n" + "|---" * 9 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes.split(","):
            path = pathlib.Path(folder) / "model.bin"
            row = {"recipe": pathlib.Path(recipe).stem, **compile_recipe(options, recipe, path), **evaluate(options, path)}
            rows.append(row)
            compare(row, rows[0])
            print(f"| {row['recipe']} | {row['weights_mb']:.1f} | {row['perplexity']:.4f} | {row['delta_percent']:+.2f} "
                  f"±{row['delta_error_percent']:.2f} | {row['delta_accuracy_points']:+.2f} | {100 * row['share_4x4']:.1f} | "
                  f"{row['compile_s']:.1f} | {row['peak_mb']:.0f} | {row['tokens_per_s']:.0f} |", flush=True)
    if options.out:
        result = {"model": pathlib.Path(options.model).name, "text": pathlib.Path(options.text).name, "ctx": options.ctx,
                  "windows": options.windows, "kv": options.kv,
                  "recipes": [{k: v for k, v in row.items() if k != "window_nll"} for row in rows]}
        pathlib.Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
