#!/usr/bin/env python3
"""A model that computes what stories260K computes, with a few channels of every matrix input scaled up and the weights that read them
scaled down: the outliers that large models grow by themselves, on which plain rounding fails.

usage: outlier_model.py STORIES_FOLDER OUT_FOLDER [SCALE]
STORIES_FOLDER holds stories260K.gguf and hf/. Gains of the norms (inputs of q, k, v and of gate, up), rows of v (input of o) and rows of
up (input of down) are multiplied by SCALE (50) in every 16th channel; the columns behind them are divided by it. The tokenizer is copied.
"""
import pathlib
import shutil
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "tools"))
import make_gguf  # noqa: E402


def scale_channels(spec, weights, factor):
    out = {name: np.array(value, dtype=np.float32) for name, value in weights.items()}
    head = spec.head_dim
    for layer in range(spec.n_layers):
        p = f"model.layers.{layer}."
        for gain, readers in ((p + "input_layernorm.weight", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                              (p + "post_attention_layernorm.weight", ("mlp.gate_proj", "mlp.up_proj"))):
            out[gain][3::16] *= factor
            for reader in readers:
                out[p + reader + ".weight"][:, 3::16] /= factor
        out[p + "mlp.up_proj.weight"][5::16] *= factor
        out[p + "mlp.down_proj.weight"][:, 5::16] /= factor
        rows = np.arange(1, spec.n_kv_heads * head, 16)
        out[p + "self_attn.v_proj.weight"][rows] *= factor
        group = spec.n_heads // spec.n_kv_heads
        columns = [(h * head) + r % head for r in rows for h in range(spec.n_heads) if h // group == r // head]
        out[p + "self_attn.o_proj.weight"][:, columns] /= factor
    return out


def main():
    stories, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    factor = float(sys.argv[3]) if len(sys.argv) > 3 else 50.0
    spec, weights, _ = make_gguf.load_stories(stories / "stories260K.gguf")
    target.mkdir(parents=True, exist_ok=True)
    make_gguf.write_hf(target, spec, scale_channels(spec, weights, factor))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (stories / "hf" / file).exists():
            shutil.copy(stories / "hf" / file, target / file)


if __name__ == "__main__":
    main()
