"""Write a GGUF model of real shapes with random weights, for speed measurements only.

Usage: make_synthetic_gguf.py OUT [--shape 1b|135m] [--type q4_0|q4_1|q8_0]. Needs the packages gguf and numpy.
The vocabulary is a stand-in of numbered tokens: benchmarks send token ids.
"""
import argparse

import gguf
import numpy as np

SHAPES = {  # Llama-3.2-1B and SmolLM2-135M
    "1b": dict(layers=16, embd=2048, heads=32, kv_heads=8, head_dim=64, ff=8192, vocab=128256, theta=500000.0, context=8192),
    "135m": dict(layers=30, embd=576, heads=9, kv_heads=3, head_dim=64, ff=1536, vocab=49152, theta=100000.0, context=8192),
}
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q4_1": gguf.GGMLQuantizationType.Q4_1, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--type", choices=TYPES, default="q4_0")
    given = parser.parse_args()
    s, rng = SHAPES[given.shape], np.random.default_rng(1)
    writer = gguf.GGUFWriter(given.out, "llama")
    writer.add_name(f"synthetic-{given.shape}-{given.type}")
    writer.add_context_length(s["context"])
    writer.add_embedding_length(s["embd"])
    writer.add_block_count(s["layers"])
    writer.add_feed_forward_length(s["ff"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv_heads"])
    writer.add_rope_dimension_count(s["head_dim"])
    writer.add_rope_freq_base(s["theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(s["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"t{i}" for i in range(s["vocab"])])
    writer.add_token_types([1] * s["vocab"])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def quantised(name, rows, columns):
        weights = (rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)).astype(np.float32)
        kind = TYPES[given.type]
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    def gain(name):
        writer.add_tensor(name, np.ones(s["embd"], dtype=np.float32))

    q_width, kv_width = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    quantised("token_embd.weight", s["vocab"], s["embd"])
    for i in range(s["layers"]):
        gain(f"blk.{i}.attn_norm.weight")
        quantised(f"blk.{i}.attn_q.weight", q_width, s["embd"])
        quantised(f"blk.{i}.attn_k.weight", kv_width, s["embd"])
        quantised(f"blk.{i}.attn_v.weight", kv_width, s["embd"])
        quantised(f"blk.{i}.attn_output.weight", s["embd"], q_width)
        gain(f"blk.{i}.ffn_norm.weight")
        quantised(f"blk.{i}.ffn_gate.weight", s["ff"], s["embd"])
        quantised(f"blk.{i}.ffn_up.weight", s["ff"], s["embd"])
        quantised(f"blk.{i}.ffn_down.weight", s["embd"], s["ff"])
    gain("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
