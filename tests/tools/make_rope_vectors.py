#!/usr/bin/env python3
"""Write tests/unit/model/rope_vectors.inc: RoPE frequencies for configurations of every scaling, computed in float64 from the papers'
formulas in their published closed form. Usage: make_rope_vectors.py > tests/unit/model/rope_vectors.inc
"""
import json
import math

import numpy as np


def plain(dim, base):
    return 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def llama3(inv, factor, low, high, context):
    wavelen = 2 * math.pi / inv
    smooth = (context / wavelen - low) / (high - low)
    mixed = (1 - smooth) * inv / factor + smooth * inv
    return np.where(wavelen < context / high, inv, np.where(wavelen > context / low, inv / factor, mixed))


def yarn(dim, base, factor, context, fast=32.0, slow=1.0):
    def index(rotations):
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(index(fast)), 0), min(math.ceil(index(slow)), dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    inv = plain(dim, base)
    return inv / factor * (1 - keep) + inv * keep


def temperature(factor, mscale=1.0):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


D = 32
L3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES = [  # changes to config.json, frequencies, magnitude, context
    ({"rope_theta": 500000.0}, plain(D, 5e5), 1, 2048),
    ({"rope_scaling": None}, plain(D, 1e4), 1, 2048),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, plain(D, 1e4) / 4, 1, 2048),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, plain(D, 1e6), 1, 2048),
    ({"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": L3}, llama3(plain(D, 5e5), 8, 1, 4, 8192), 1, 131072),
    ({"max_position_embeddings": 131072, "rope_parameters": dict(L3, factor=32.0, rope_theta=500000.0)},
     llama3(plain(D, 5e5), 32, 1, 4, 8192), 1, 131072),
    ({"rope_theta": 1e6, "max_position_embeddings": 32768,
      "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
     yarn(D, 1e6, 4, 32768), temperature(4), 131072),
    ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512,
                                                        "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}},
     yarn(D, 1e4, 16, 512, 16, 2), 1.5, 8192),
    ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096,
                                                        "mscale": 2.0, "mscale_all_dim": 1.0}},
     yarn(D, 1e4, 2, 4096), temperature(2, 2) / temperature(2, 1), 8192),
    ({"partial_rotary_factor": 0.5}, plain(D // 2, 1e4), 1, 2048),
]


def main():
    print("/* Made by tests/tools/make_rope_vectors.py; do not edit. */")
    for change, inv, magnitude, context in CASES:
        text = json.dumps(change, separators=(",", ":")).replace('"', '\\"')
        print(f'{{"{text}",\n {context}, {magnitude:.9g}, {len(inv)},\n {{', end="")
        print(", ".join(f"{v:.12g}" for v in inv) + "}},")


main()
