#!/usr/bin/env python3
"""Time from start to ready of the daemon, with what reading and repacking took of it, as its own log says. Best of several starts, so that
the file is in the page cache.

usage: load_time.py FILE... [--runs N] [--out FILE.json]   (programs: SITS_BIN, default build/release/bin)
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import time

BIN = pathlib.Path(os.environ.get("SITS_BIN", pathlib.Path(__file__).resolve().parent.parent / "build/release/bin"))


def start(model):
    process = subprocess.Popen([str(BIN / "sits2026d"), "--model", model, "--port", "0"], stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
                               text=True)
    began = time.monotonic()
    found = None
    for line in process.stdout:
        found = re.search(r"ready model=.* open_ms=(\d+) pack_ms=(\d+) ms=(\d+)", line)
        if found:
            break
    seconds = time.monotonic() - began
    process.terminate()
    process.stdout.read()
    process.wait()
    return dict(zip(("open_ms", "pack_ms", "ready_ms"), map(int, found.groups())), process_ms=round(1000 * seconds))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    for file in options.files:
        best = min((start(file) for _ in range(options.runs)), key=lambda row: row["ready_ms"])
        rows.append({"file": pathlib.Path(file).name, "mb": round(os.path.getsize(file) / 1e6, 1), **best})
        print(rows[-1], flush=True)
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps({"runs": options.runs, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
