#!/usr/bin/env python3
"""Tokenizer throughput beside Hugging Face tokenizers: one thread, CPU time, same text, ids compared. Not part of the tests.

Usage: tokenizer_speed.py --bin build/release/bin/bench_tokenizer_speed --text wikitext2.test.raw [--out bench/results/tokenizer.json]
       NAME=tokenizer.json [NAME=tokenizer.json:vocabulary.gguf ...]
After a colon: a GGUF with the same vocabulary, measured in its place on our side. .json.gz is unpacked to a temporary file.
Needs the Python package tokenizers. Both sides run alternately, the best of --runs counts, for the whole file in one call and
line by line (there with encode_batch_fast, which leaves out offsets and is the quickest call the library has).
"""
import argparse
import datetime
import gzip
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import tokenizers  # noqa: E402  (reads the environment)


def cpu_model():
  with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
    names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
  return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def timed(call):
  start = time.thread_time()
  result = call()
  return time.thread_time() - start, result


def reference(path, text, by_line):
  load_s, tok = timed(lambda: tokenizers.Tokenizer.from_file(path))
  tok.encode_special_tokens = True
  parts = text.splitlines(keepends=True) if by_line else [text]

  def encode():
    ids = []
    encodings = tok.encode_batch_fast(parts, add_special_tokens=False) if by_line else [tok.encode(text, add_special_tokens=False)]
    for encoding in encodings:
      ids += encoding.ids
    return ids

  encode_s, ids = timed(encode)
  decode_s, _ = timed(lambda: tok.decode(ids, skip_special_tokens=False))
  digest = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()
  return {"load_ms": load_s * 1e3, "encode_ms": encode_s * 1e3, "decode_ms": decode_s * 1e3, "n_tokens": len(ids), "ids_sha256": digest}


def ours(binary, path, text_path, by_line):
  command = [binary, path, text_path, "3"] + (["lines"] if by_line else [])
  return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def best(rows):
  return {key: min(row[key] for row in rows) if key.endswith("_ms") else rows[0][key] for key in rows[0] if key != "encode_mb_s"}


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--bin", required=True)
  parser.add_argument("--text", required=True)
  parser.add_argument("--out")
  parser.add_argument("--runs", type=int, default=3)
  parser.add_argument("tokenizers", nargs="+", metavar="NAME=PATH[:GGUF]")
  args = parser.parse_args()
  with open(args.text, encoding="utf-8", newline="") as file:
    text = file.read()
  n_bytes = len(text.encode())
  rows = []
  for item in args.tokenizers:
    name, path = item.split("=", 1)
    path, _, vocabulary = path.partition(":")
    with tempfile.NamedTemporaryFile(suffix=".json") as unpacked:
      if path.endswith(".gz"):
        with gzip.open(path) as packed:
          unpacked.write(packed.read())
        unpacked.flush()
        path = unpacked.name
      for by_line in (False, True):
        pairs = [(ours(args.bin, vocabulary or path, args.text, by_line), reference(path, text, by_line)) for _ in range(args.runs)]
        mine, other = best([a for a, _ in pairs]), best([b for _, b in pairs])
        if by_line and mine["ids_sha256"] != other["ids_sha256"]:
          # str.splitlines cuts at more than "\n"; the ids are compared on the whole file
          other["ids_sha256"] = mine["ids_sha256"] = "not compared"
        row = {"tokenizer": name, "mode": "lines" if by_line else "whole file", "mb_s": round(n_bytes / mine["encode_ms"] / 1e3, 1),
               "hf_mb_s": round(n_bytes / other["encode_ms"] / 1e3, 2), "times_faster": round(other["encode_ms"] / mine["encode_ms"], 1),
               "load_ms": round(mine["load_ms"]), "hf_load_ms": round(other["load_ms"]), "decode_ms": round(mine["decode_ms"], 1),
               "hf_decode_ms": round(other["decode_ms"], 1), "n_tokens": mine["n_tokens"],
               "same_ids": None if by_line else mine["ids_sha256"] == other["ids_sha256"]}
        rows.append(row)
        print(f"{name:14} {row['mode']:10} {row['mb_s']:7.1f} MB/s, tokenizers {row['hf_mb_s']:5.2f} MB/s: {row['times_faster']:5.1f}x   "
              f"load {row['load_ms']} ms, {row['hf_load_ms']} ms   decode {row['decode_ms']} ms, {row['hf_decode_ms']} ms   "
              f"ids {'differ' if row['same_ids'] is False else 'equal' if row['same_ids'] else ''}", flush=True)
  if args.out:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    names = [re.sub(r"(?<![^=:])[^=:]*/", "", argument) for argument in sys.argv]
    result = {"date": datetime.date.today().isoformat(), "commit": commit, "machine": cpu_model(), "command": " ".join(names),
              "tokenizers_version": tokenizers.__version__, "what": "CPU time of one thread, best of the runs", "figures": rows}
    with open(args.out, "w", encoding="utf-8") as file:
      json.dump(result, file, indent=1)
      file.write("\n")


main()
