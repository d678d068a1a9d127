#!/usr/bin/env python3
"""Plot a report of sits2026-compile or sits2026-opt: measured Frobenius errors of every matrix beside the expected ones, and, where it was
measured, the error of its output.

Usage: plot_report.py REPORT.json OUT.png   (needs matplotlib; the programs themselves carry no drawing library for one picture)
"""
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = {"q": ("attn_q.", "q_proj"), "k": ("attn_k.", "k_proj"), "v": ("attn_v.", "v_proj"), "o": ("attn_output", "o_proj"),
         "gate": ("ffn_gate", "gate_proj"), "up": ("ffn_up", "up_proj"), "down": ("ffn_down", "down_proj")}


def kind_of(name):
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def layer_of(name):
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def main():
    rows = json.load(open(sys.argv[1]))["matrices"]
    figure, (weights, outputs) = plt.subplots(1, 2, figsize=(12, 4.6))
    for i, kind in enumerate(KINDS):
        color = f"C{i}"
        mine = sorted((layer_of(r["tensor"]), r) for r in rows if kind_of(r["tensor"]) == kind)
        rounded = [(layer, r) for layer, r in mine if not r["kept"]]
        weights.plot([a for a, _ in rounded], [100 * r["relative_error"] for _, r in rounded], ".-", color=color, label=kind, linewidth=1)
        weights.plot([a for a, _ in rounded], [100 * r["expected"] for _, r in rounded], ":", color=color, linewidth=1)
        broken = [(layer, r) for layer, r in rounded if r["above_bound"]]
        weights.plot([a for a, _ in broken], [100 * r["relative_error"] for _, r in broken], "x", color="red", markersize=8)
        seen = [(layer, r["output_error"]) for layer, r in mine if "output_error" in r]
        outputs.plot([a for a, _ in seen], [100 * e for _, e in seen], ".-", color=color, label=kind, linewidth=1)
    kept = sum(r["kept"] for r in rows)
    weights.set_title(f"weights: measured, and expected (dotted); {kept} of {len(rows)} kept, {sum(r['above_bound'] for r in rows)} above "
                      "the bound (red)", fontsize=9)
    outputs.set_title("products, weights and inputs rounded", fontsize=9)
    for axes in (weights, outputs):
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error, %")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=4)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=130)


if __name__ == "__main__":
    main()
