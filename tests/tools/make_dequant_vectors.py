#!/usr/bin/env python3
"""Write tests/unit/tensor/dequant_vectors.inc: what the `gguf` package makes of pseudo-random blocks of every quantised type.

The blocks come from a 64-bit linear congruential generator that the C test repeats; their scales are finite halves of both signs. The
header holds the first values and an FNV-1a hash of all output bytes. Usage: make_dequant_vectors.py > tests/unit/tensor/dequant_vectors.inc
"""
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208]}
N_BLOCKS = 64


def lcg_bytes(seed, n):
    out = bytearray(n)
    x = seed
    for i in range(n):
        x = (x * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        out[i] = x >> 56
    return np.frombuffer(bytes(out), dtype=np.uint8).copy()


def fnv(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & (2**64 - 1)
    return h


def main():
    print("/* Made by tests/tools/make_dequant_vectors.py from the `gguf` Python package; do not edit. */")
    for seed, (name, halves) in enumerate(HALVES.items(), 1):
        qtype = GGMLQuantizationType[name]
        _, n_bytes = GGML_QUANT_SIZES[qtype]
        blocks = lcg_bytes(seed, N_BLOCKS * n_bytes).reshape(N_BLOCKS, n_bytes)
        for at in halves:
            blocks[:, at + 1] = (blocks[:, at + 1] & 0x8F) | 0x10  # exponent 4 to 7: small, finite
        values = quants.dequantize(blocks, qtype).astype(np.float32).ravel()
        firsts = ", ".join("0x%08xu" % v for v in values[:4].view(np.uint32))
        spots = ", ".join(str(h) for h in halves + [-1] * (2 - len(halves)))
        print(f"{{SITS_DTYPE_{name}, {seed}, {{{spots}}}, 0x{fnv(values.tobytes()):016x}u, {{{firsts}}}}},")


main()
