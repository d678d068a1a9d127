#!/usr/bin/env python3
"""What each step of a 4-bit recipe buys: recipes that differ by one step, on the same windows, in one table (sits2026-eval compare).

usage: ablation.py MODEL --text FILE --calibration FILE --out FILE.json [--source grid|float] [--ctx N] [--windows N] [--part N]
                   [--calibration-windows N] [--threads N] [--keep FOLDER]
--source grid: a model that comes in 4 bits (its grid can be kept); float: rounding, scales, GPTQ, and rotations by sits2026-opt, all of
them and by its own choice. FOLDER keeps recipes, models and the results of each --part windows; a run that was cut goes on there.
Programs: SITS_BIN, default build/release/bin.
"""
import argparse
import json
import os
import pathlib
import subprocess
import tempfile

BIN = pathlib.Path(os.environ.get("SITS_BIN", pathlib.Path(__file__).resolve().parent.parent / "build/release/bin"))

PLAIN = {"weights": "int4", "weight-group": 0, "weight-minimum": "false", "clip": "false", "keep-grid": "false", "scaling": "none",
         "activations": "int4", "outliers": 0}
GRID = [("plain", {}), ("groups of 32", {"weight-group": 32}), ("minimums", {"weight-minimum": "true"}), ("best range", {"clip": "true"}),
        ("awq", {"scaling": "awq"}), ("gptq", {"method": "gptq"}), ("grid kept", {"keep-grid": "true", "scaling": "none", "method": "rtn"}),
        ("128 outliers", {"outliers": 128}), ("down 8 bits", {"down-activations": "int8"}),
        ("7 layers 8 bits", {"int8-first-layers": 2, "int8-last-layers": 5})]
FLOAT = [("plain", {}), ("groups of 32", {"weight-group": 32}), ("minimums", {"weight-minimum": "true"}), ("best range", {"clip": "true"}),
         ("outliers", {"outliers": 128}), ("down 8 bits", {"down-activations": "int8"}), ("awq", {"scaling": "awq"}),
         ("gptq", {"scaling": "none", "method": "gptq"}), ("awq and gptq", {"scaling": "awq"})]
ROTATED = {"down 8 bits", "gptq", "awq and gptq"}  # also made with rotations


def run(tool, *args, **how):
    subprocess.run([BIN / f"sits2026-{tool}", *map(str, args)], check=True, **how)


def make(model, recipe, out, common, ctx):
    if not out.exists():
        run("compile", model, "-o", out, "--recipe", recipe, "--calibration-ctx", ctx, "--quiet", *common)
    return out


def optimise(o, recipe, rotate, common):
    made = recipe.parent / f"{recipe.stem}-rotate-{rotate}"
    out = made.with_suffix(".bin")
    if not out.exists():
        run("opt", o.model, "-o", made, "--recipe", recipe, "--rotate", rotate, "--windows", 4, "--ctx", o.ctx, *common,
            stdout=made.with_suffix(".log").open("w"), stderr=subprocess.DEVNULL)
        (made / "model.bin").rename(out)
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--source", choices=["grid", "float"], default="grid")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--part", type=int, default=5)
    parser.add_argument("--calibration-windows", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--keep")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(o.keep or temporary)
        folder.mkdir(exist_ok=True)
        common = ["--calibration", o.calibration, "--calibration-windows", o.calibration_windows, "--threads", o.threads]
        models, recipe = [make(o.model, "w16a16", folder / "w16a16.bin", common, o.ctx)], dict(PLAIN)
        for name, step in GRID if o.source == "grid" else FLOAT:
            recipe.update(step)
            path = folder / f"{name.replace(' ', '-')}.yaml"
            path.write_text("".join(f"{key}: {value}\n" for key, value in recipe.items()))
            models.append(make(o.model, path, path.with_suffix(".bin"), common, o.ctx))
            for rotate in ("all", "auto") if o.source == "float" and name in ROTATED else ():
                models.append(optimise(o, path, rotate, common))
        parts = []
        for skip in range(0, o.windows, o.part):
            parts.append(folder / f"windows-{skip}.json")
            if not parts[-1].exists():
                run("eval", "compare", "--models", ",".join(map(str, models)), "--text", o.text, "--ctx", o.ctx, "--skip-windows", skip,
                    "--windows", min(o.part, o.windows - skip), "--threads", o.threads, "--out", f"{parts[-1]}.cut")
                pathlib.Path(f"{parts[-1]}.cut").rename(parts[-1])
        run("eval", "join", "--parts", ",".join(map(str, parts)), "--out", o.out)
    result = json.loads(pathlib.Path(o.out).read_text())
    for row in result["rows"]:
        del row["window_nll"], row["window_kl"]
    result = {"model": pathlib.Path(o.model).name, "calibration": f"{pathlib.Path(o.calibration).name}, {o.calibration_windows} windows of "
              f"{o.ctx}", **result}
    pathlib.Path(o.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
