#!/usr/bin/env python3
"""Plot the results of `sits2026-bench simulate`: goodput against the inter-token target, and throughput against latency.

Usage: plot_simulate.py RESULTS.json OUT_PREFIX   (writes OUT_PREFIX_goodput.png and OUT_PREFIX_curves.png; needs matplotlib)
"""
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"static": "static batches (best of 8 to 128)", "continuous": "whole prompts", "chunked": "2,048-token chunks", "alps": "ALPS"}
COLORS = {"static": "#888888", "continuous": "#d98032", "chunked": "#3a7fc1", "alps": "#2a9d5c"}


def plot_goodput(results, path):
    rows = results.get("goodput")
    if not rows:
        return
    targets = sorted({row["itl_target_ms"] for row in rows})
    figure, axes = plt.subplots(figsize=(7, 4.2))
    width = 0.8 / len(NAMES)
    for i, policy in enumerate(NAMES):
        heights = [next((r["goodput"] for r in rows if r["policy"] == policy and r["itl_target_ms"] == t), 0) for t in targets]
        bars = axes.bar([k + (i - 1.5) * width for k in range(len(targets))], heights, width, label=NAMES[policy], color=COLORS[policy])
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(targets)), [f"{t:g} ms" for t in targets])
    axes.set_xlabel("P99 inter-token target")
    axes.set_ylabel("goodput: arrivals, times the trace's own rate")
    axes.set_title(f"P99 first token within {rows[0]['ttft_target_ms'] / 1000:g} s; {results['trace_requests']:,} requests", fontsize=10)
    lines = (("prompts_only", "--", "no scheduler passes this, decoding free"), ("prompts_and_decodes", ":", "with decoding in the target"))
    for key, style, text in lines if "bounds" in results else ():
        axes.axhline(results["bounds"][key], color="#444444", linewidth=0.8, linestyle=style, label=text)
    axes.set_ylim(top=1.5 * max(r["goodput"] for r in rows))
    axes.legend(fontsize=8, ncols=2, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def plot_curves(results, path):
    figure, (first, gap) = plt.subplots(1, 2, figsize=(10, 4.2))
    for policy in NAMES:
        points = [p for p in results["points"] if p["policy"] == policy and not p["given_up"] and p["ttft_p99_ms"] > 0]
        series = sorted({(p["max_seqs"], p["itl_target_ms"]) for p in points})
        for k, key in enumerate(series):
            line = sorted((p["total_tokens_per_s"], p["ttft_p99_ms"], p["itl_p99_ms"]) for p in points
                          if (p["max_seqs"], p["itl_target_ms"]) == key)
            label = NAMES[policy] if k == 0 else None
            style = {"marker": ".", "linewidth": 1, "color": COLORS[policy], "alpha": 0.9 - 0.6 * k / len(series), "label": label}
            first.plot([x for x, _, _ in line], [y for _, y, _ in line], **style)
            gap.plot([x for x, _, _ in line], [y for _, _, y in line], **style)
    for axes, name in ((first, "P99 first token, ms"), (gap, "P99 inter-token, ms")):
        axes.set_yscale("log")
        axes.set_xlabel("tokens per second, prompts and answers")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    first.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    plot_goodput(results, sys.argv[2] + "_goodput.png")
    plot_curves(results, sys.argv[2] + "_curves.png")


if __name__ == "__main__":
    main()
