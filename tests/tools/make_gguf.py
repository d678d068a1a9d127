#!/usr/bin/env python3
"""Test models: GGUF files of every element type, tiny models of every architecture in both forms, and hostile files.

As a module: write_gguf, write_hf, load_stories, pad_to_super_blocks, quantise, dequantise. As a program:
  make_gguf.py types STORIES.gguf DIR     stories260K in every type, DIR/<type>.gguf
  make_gguf.py seeds DIR                  small seeds for the fuzz targets, DIR/gguf and DIR/safetensors

stories260K has rows of 64 and 172, and the K formats need rows of 256. pad_to_super_blocks widens it with zeros to width 256, head size 32
and 256 hidden units so that it computes the same function: RMSNorm's mean falls to a quarter, so gains are halved and epsilon divided by
four; the softmax scale falls to one half, so the q weights are doubled; rotation keeps its 8 dimensions.
The `gguf` package encodes the simple formats; for the K formats it has only decoders, so plain least-squares encoders stand here.
"""
import json
import pathlib
import struct
import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

import numpy_llama
from numpy_llama import Spec

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]

GGUF_NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
              "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


# ---- encoders of the K formats ----

def _half(x):
    return x.astype(np.float16)


def _safe_inverse(x):
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)


def _fit(x, levels):
    """Step and minimum (>= 0, subtracted) of each row of x[..., n] with the least squared error: candidate steps, each with its least
    squares solution for the integers it rounds to."""
    low = np.maximum(-x.min(-1), 0)
    full = (x.max(-1) + low) / levels
    best_step, best_low, best_error = full, low, np.full(full.shape, np.inf)
    for shrink in np.linspace(0.5, 1.1, 25):
        q = np.clip(np.rint((x + low[..., None]) * _safe_inverse(full * shrink)[..., None]), 0, levels)
        mean_q, mean_x = q.mean(-1), x.mean(-1)
        variance = (q * q).mean(-1) - mean_q**2
        step = np.where(variance > 0, ((q * x).mean(-1) - mean_q * mean_x) * _safe_inverse(variance), full)
        minimum = np.maximum(mean_q * step - mean_x, 0)
        step = np.where(minimum > 0, step, (q * x).sum(-1) * _safe_inverse((q * q).sum(-1)))
        error = ((step[..., None] * q - minimum[..., None] - x)**2).sum(-1)
        better = (error < best_error) & (step >= 0)
        best_step, best_low = np.where(better, step, best_step), np.where(better, minimum, best_low)
        best_error = np.where(better, error, best_error)
    return best_step, best_low


def _scales_and_mins(x, levels, grid):
    """x: [N][sub-blocks][n]. Per sub-block scale and minimum on a grid of `grid` steps; returns d, dmin, sc, mn, q."""
    step, low = _fit(x, levels)
    d, dmin = _half(step.max(-1, keepdims=True) / grid), _half(low.max(-1, keepdims=True) / grid)
    sc = np.clip(np.rint(step * _safe_inverse(d.astype(np.float64))), 0, grid)
    mn = np.clip(np.rint(low * _safe_inverse(dmin.astype(np.float64))), 0, grid)
    scale, minimum = d.astype(np.float64) * sc, dmin.astype(np.float64) * mn
    q = np.clip(np.rint((x + minimum[..., None]) * _safe_inverse(scale)[..., None]), 0, levels)
    return d, dmin, sc.astype(np.uint8), mn.astype(np.uint8), q.astype(np.uint8)


def _symmetric(x, most, grid):
    """x: [N][16][16]. q in -most..most-1 or so, signed scales up to `grid`; returns d, sc, q."""
    step = np.abs(x).max(-1) / most
    d = _half(step.max(-1, keepdims=True) / grid)
    sc = np.clip(np.rint(step * _safe_inverse(d.astype(np.float64))), 0, grid)
    scale = d.astype(np.float64) * sc
    q = np.clip(np.rint(x * _safe_inverse(scale)[..., None]), -most - 1, most)
    return d, sc.astype(np.int8), q.astype(np.int8)


def _bytes_of(half):
    return half.reshape(len(half), 1).view(np.uint8)


def _pack_6bit(sc, mn):
    """The 12 bytes of Q4_K and Q5_K from 8 scales and 8 minimums."""
    out = np.zeros((len(sc), 12), dtype=np.uint8)
    out[:, 0:4] = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    out[:, 4:8] = mn[:, :4] | (mn[:, 4:] >> 4) << 6
    out[:, 8:12] = (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4
    return out


def _two_bits(q):
    """[N][256] of 0..3 to 64 bytes: byte 32h+i holds elements 128h+i, +32, +64, +96."""
    q = q.reshape(len(q), 2, 4, 32)
    return (q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).reshape(len(q), 64)


def _nibbles(q):
    q = q.reshape(len(q), 4, 2, 32)
    return (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(q), 128)


def _encode_k(x, name):
    x = x.astype(np.float64).reshape(-1, 256)
    n = len(x)
    if name == "Q2_K":
        d, dmin, sc, mn, q = _scales_and_mins(x.reshape(n, 16, 16), 3, 15)
        return np.concatenate([sc | mn << 4, _two_bits(q.reshape(n, 256)), _bytes_of(d), _bytes_of(dmin)], axis=1)
    if name in ("Q4_K", "Q5_K"):
        d, dmin, sc, mn, q = _scales_and_mins(x.reshape(n, 8, 32), 15 if name == "Q4_K" else 31, 63)
        head = [_bytes_of(d), _bytes_of(dmin), _pack_6bit(sc, mn)]
        if name == "Q5_K":
            head.append(np.packbits((q >> 4).transpose(0, 2, 1), axis=-1, bitorder="little").reshape(n, 32))
        return np.concatenate(head + [_nibbles((q & 15).reshape(n, 256))], axis=1)
    if name == "Q3_K":
        d, sc, q = _symmetric(x.reshape(n, 16, 16), 3, 31)
        s, q = (sc + 32).astype(np.uint8), (q + 4).astype(np.uint8).reshape(n, 256)
        high = np.packbits((q >> 2).reshape(n, 8, 32).transpose(0, 2, 1), axis=-1, bitorder="little").reshape(n, 32)
        packed = np.zeros((n, 12), dtype=np.uint8)
        packed[:, :8] = (s[:, :8] & 15) | (s[:, 8:] & 15) << 4
        for k in range(4):
            packed[:, 8:] |= (s[:, 4 * k:4 * k + 4] >> 4) << (2 * k)
        return np.concatenate([high, _two_bits(q & 3), packed, _bytes_of(d)], axis=1)
    assert name == "Q6_K"
    d, sc, q = _symmetric(x.reshape(n, 16, 16), 31, 127)
    q = (q + 32).astype(np.uint8).reshape(n, 2, 2, 64)
    low = (q[:, :, 0] & 15) | (q[:, :, 1] & 15) << 4
    high = _two_bits((q >> 4).reshape(n, 256))
    return np.concatenate([low.reshape(n, 128), high, sc.view(np.uint8).reshape(n, 16), _bytes_of(d)], axis=1)


def quantise(x, name):
    """Bytes (or plain values) of x, the last dimension in rows of the type's block."""
    qtype = GGMLQuantizationType[name]
    if name.endswith("_K"):
        data = _encode_k(x, name).reshape(*x.shape[:-1], -1)
        error = np.linalg.norm(quants.dequantize(data, qtype) - x) / np.linalg.norm(x)  # the encoder and the package's decoder agree
        assert error < {"Q2_K": 0.3, "Q3_K": 0.25, "Q4_K": 0.08, "Q5_K": 0.04, "Q6_K": 0.03}[name], (name, error)
        return data
    return quants.quantize(x.astype(np.float32), qtype)


def dequantise(data, name):
    return quants.dequantize(data, GGMLQuantizationType[name])


# ---- writers ----

def _interleave(w, n_heads, head_dim, dims):
    """Rows of q or k from pairs (i, i + dims/2) to pairs (2i, 2i + 1)."""
    order = np.arange(head_dim)
    order[:dims] = np.arange(dims).reshape(2, dims // 2).T.ravel()
    return w.reshape(n_heads, head_dim, *w.shape[1:])[:, order].reshape(w.shape)


def write_gguf(path, spec, weights, types=None, tokens=None):
    """weights: Hugging Face names, half-split pairs. types: GGUF type of a matrix by its Hugging Face name, a function; None: F32.
    tokens: (list of tokens, scores, kinds) for the vocabulary, or None. Returns the weights as a decoder gets them back."""
    arch = "llama" if spec.arch in ("llama", "mistral") else spec.arch
    writer = GGUFWriter(path, arch)
    writer.add_name(f"test {spec.arch}")
    writer.add_block_count(spec.n_layers)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_context_length(spec.context)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_freq_base(spec.theta)
    writer.add_rope_dimension_count(spec.rotated())
    if spec.window:
        writer.add_sliding_window(spec.window)
    if spec.scaling and spec.scaling["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", spec.scaling["rope_type"])
        writer.add_float32(f"{arch}.rope.scaling.factor", spec.scaling["factor"])
        if "original_max_position_embeddings" in spec.scaling:
            writer.add_uint32(f"{arch}.rope.scaling.original_context_length", spec.scaling["original_max_position_embeddings"])
    if spec.scaling and spec.scaling["rope_type"] == "llama3":
        plain = Spec(**{**spec.__dict__, "scaling": None})
        writer.add_tensor("rope_freqs.weight", (numpy_llama.inv_freq(plain)[0] / numpy_llama.inv_freq(spec)[0]).astype(np.float32))
    texts, scores, kinds = tokens or byte_vocabulary(spec.n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    back = {}
    for name, w in weights.items():
        if spec.tied and name == "lm_head.weight":
            continue
        kind = types(name) if types and w.ndim == 2 else "F32"
        heads = {"q_proj": spec.n_heads, "k_proj": spec.n_kv_heads}.get(name.split(".")[-2])
        stored = _interleave(w, heads, spec.head_dim, spec.rotated()) if heads and arch == "llama" else w
        data = np.ascontiguousarray(quantise(stored, kind))
        raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name(name), data, raw_dtype=raw)
        value = dequantise(data, kind) if kind not in ("F32", "F16") else data.astype(np.float32)
        if heads and arch == "llama":
            order = np.empty(value.shape[0], dtype=int)
            order[_interleave(np.arange(len(value)), heads, spec.head_dim, spec.rotated())] = np.arange(len(value))
            value = value[order]
        back[name] = value.reshape(w.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def byte_vocabulary(n_vocab):
    texts = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(n_vocab - 3)][:256]
    texts += [f"tok{i}" for i in range(len(texts), n_vocab)]
    kinds = [2, 3, 3] + [6] * min(256, n_vocab - 3)
    return texts, [0.0] * n_vocab, kinds + [1] * (n_vocab - len(kinds))


def write_hf(directory, spec, weights, dtype="F32", n_shards=1):
    """A Hugging Face directory with the tokenizer left out. Returns the weights as a reader gets them back."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    cls = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[spec.arch] + "ForCausalLM"
    config = {"architectures": [cls], "hidden_size": spec.width, "intermediate_size": spec.n_ff, "num_hidden_layers": spec.n_layers,
              "num_attention_heads": spec.n_heads, "num_key_value_heads": spec.n_kv_heads, "head_dim": spec.head_dim,
              "vocab_size": spec.n_vocab, "max_position_embeddings": spec.context, "rms_norm_eps": spec.eps, "rope_theta": spec.theta,
              "tie_word_embeddings": spec.tied, "sliding_window": spec.window or None, "rope_scaling": spec.scaling}
    if spec.rotated() != spec.head_dim:
        config["partial_rotary_factor"] = spec.rotated() / spec.head_dim
    (directory / "config.json").write_text(json.dumps(config))
    names = [n for n in weights if not (spec.tied and n == "lm_head.weight")]
    back, index = {}, {}
    for shard in range(n_shards):
        header, blob = {}, b""
        for name in names[shard::n_shards]:
            data = quants.quantize(weights[name], GGMLQuantizationType[dtype])
            back[name] = (dequantise(data, dtype) if dtype == "BF16" else data.astype(np.float32)).reshape(weights[name].shape)
            header[name] = {"dtype": dtype, "shape": list(weights[name].shape), "data_offsets": [len(blob), len(blob) + data.nbytes]}
            blob += data.tobytes()
        file = "model.safetensors" if n_shards == 1 else f"model-{shard + 1:05}-of-{n_shards:05}.safetensors"
        index |= {name: file for name in header}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text + blob)
    if n_shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return back


# ---- stories260K ----

def load_stories(path):
    """Spec, weights under Hugging Face names with half-split pairs, and the vocabulary of the GGUF file."""
    reader = GGUFReader(path)
    spec = Spec(n_layers=5, width=64, n_heads=8, n_kv_heads=4, head_dim=8, n_ff=172, n_vocab=512, context=2048)
    stored = {t.name: np.array(t.data, dtype=np.float32) for t in reader.tensors}
    weights = {}
    for name, shape in numpy_llama.weight_shapes(spec).items():
        w = stored[gguf_name(name)].reshape(shape)
        heads = {"q_proj": spec.n_heads, "k_proj": spec.n_kv_heads}.get(name.split(".")[-2])
        if heads:
            w = w.reshape(heads, 4, 2, 64).transpose(0, 2, 1, 3).reshape(shape)
        weights[name] = w
    field = lambda key: reader.fields[key].contents()
    return spec, weights, (field("tokenizer.ggml.tokens"), field("tokenizer.ggml.scores"), field("tokenizer.ggml.token_type"))


def pad_to_super_blocks(spec, weights):
    wide = Spec(**{**spec.__dict__, "width": 256, "head_dim": 32, "n_ff": 256, "rope_dims": spec.rotated(), "eps": spec.eps / 4})
    out = {}
    for name, shape in numpy_llama.weight_shapes(wide).items():
        w = weights[name]
        if "q_proj" in name or "k_proj" in name or "v_proj" in name:  # rows are heads
            heads = shape[0] // 32
            w = np.pad(w.reshape(heads, spec.head_dim, -1), ((0, 0), (0, 32 - spec.head_dim), (0, shape[1] - w.shape[1]))).reshape(shape)
            if "q_proj" in name:
                w = w * 2
        elif "o_proj" in name:        # columns are heads
            w = np.pad(w.reshape(len(w), 8, spec.head_dim), ((0, shape[0] - len(w)), (0, 0), (0, 32 - spec.head_dim))).reshape(shape)
        else:
            w = np.pad(w, [(0, want - have) for want, have in zip(shape, w.shape)])
        out[name] = (w * 0.5 if w.ndim == 1 else w).astype(np.float32)
    return wide, out


# ---- as a program ----

def make_types(stories, directory):
    spec, weights, tokens = load_stories(stories)
    wide, padded = pad_to_super_blocks(spec, weights)
    for kind in TYPES:
        write_gguf(pathlib.Path(directory) / f"{kind}.gguf", wide, padded, lambda name: kind, tokens)


def make_seeds(directory):
    directory = pathlib.Path(directory)
    (directory / "gguf").mkdir(parents=True, exist_ok=True)
    (directory / "safetensors").mkdir(parents=True, exist_ok=True)
    small = Spec(n_layers=1, width=32, n_heads=1, n_kv_heads=1, head_dim=32, n_ff=32, n_vocab=8, context=64)
    for kind in ("F16", "Q4_0", "Q5_1", "Q8_0"):
        write_gguf(directory / "gguf" / f"{kind.lower()}.gguf", small, numpy_llama.random_weights(small, 1), lambda name: kind)
    wide = Spec(n_layers=1, width=256, n_heads=1, n_kv_heads=1, head_dim=2, n_ff=2, n_vocab=4, context=64, tied=True, arch="qwen2")
    super_block = lambda name: "Q4_K" if "embed" in name else "F16"
    write_gguf(directory / "gguf" / "q4_k.gguf", wide, numpy_llama.random_weights(wide, 1), super_block)
    write_hf(directory / "hf", small, {n: w for n, w in numpy_llama.random_weights(small, 1).items() if w.ndim == 1}, "BF16")
    (directory / "hf" / "model.safetensors").rename(directory / "safetensors" / "norms.safetensors")
    (directory / "hf" / "config.json").unlink()
    (directory / "hf").rmdir()


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "types":
        make_types(sys.argv[2], sys.argv[3])
    elif len(sys.argv) == 3 and sys.argv[1] == "seeds":
        make_seeds(sys.argv[2])
    else:
        sys.exit(__doc__)
