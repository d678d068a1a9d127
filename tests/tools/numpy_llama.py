"""An independent float64 forward pass of the llama family, for tests: plain numpy, one sequence, no cache, written from the papers.

A model is a Spec (sizes and switches) and a dict of weights under Hugging Face's names, rotation pairs (i, i + dims/2).
"""
import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Spec:
    arch: str = "llama"            # llama, mistral, qwen2, qwen3
    n_layers: int = 2
    width: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    n_ff: int = 96
    n_vocab: int = 160
    eps: float = 1e-5
    theta: float = 10000.0
    rope_dims: int = 0             # 0: head_dim
    window: int = 0                # 0: none
    tied: bool = False
    context: int = 512
    scaling: dict | None = None    # config.json's rope_scaling

    def rotated(self):
        return self.rope_dims or self.head_dim


def inv_freq(spec):
    """Frequencies and the magnitude of cos and sin."""
    dims = spec.rotated()
    inv = 1.0 / spec.theta ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    s = spec.scaling
    if not s:
        return inv, 1.0
    kind, factor = s["rope_type"], s["factor"]
    if kind == "linear":
        return inv / factor, 1.0
    context = s["original_max_position_embeddings"]
    if kind == "llama3":
        wavelen = 2 * math.pi / inv
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        smooth = (context / wavelen - low) / (high - low)
        mixed = (1 - smooth) * inv / factor + smooth * inv
        return np.where(wavelen < context / high, inv, np.where(wavelen > context / low, inv / factor, mixed)), 1.0
    assert kind == "yarn"
    index = lambda turns: dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
    low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), dims - 1)
    keep = 1 - np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    return inv / factor * (1 - keep) + inv * keep, 0.1 * math.log(factor) + 1


def weight_shapes(spec):
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes = {"model.embed_tokens.weight": (spec.n_vocab, spec.width), "model.norm.weight": (spec.width,)}
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.n_vocab, spec.width)
    for i in range(spec.n_layers):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (spec.width,), p + "self_attn.q_proj.weight": (q, spec.width),
                   p + "self_attn.k_proj.weight": (kv, spec.width), p + "self_attn.v_proj.weight": (kv, spec.width),
                   p + "self_attn.o_proj.weight": (spec.width, q), p + "post_attention_layernorm.weight": (spec.width,),
                   p + "mlp.gate_proj.weight": (spec.n_ff, spec.width), p + "mlp.up_proj.weight": (spec.n_ff, spec.width),
                   p + "mlp.down_proj.weight": (spec.width, spec.n_ff)}
        if spec.arch == "qwen2":
            shapes |= {p + "self_attn.q_proj.bias": (q,), p + "self_attn.k_proj.bias": (kv,), p + "self_attn.v_proj.bias": (kv,)}
        if spec.arch == "qwen3":
            shapes |= {p + "self_attn.q_norm.weight": (spec.head_dim,), p + "self_attn.k_norm.weight": (spec.head_dim,)}
    return shapes


def random_weights(spec, seed):
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 1:
            w = 0.3 * rng.standard_normal(shape) + (0 if name.endswith("bias") else 1)
        else:
            w = rng.standard_normal(shape) * (1.0 if "embed" in name else 1.5 / math.sqrt(shape[1]))
        weights[name] = w.astype(np.float32)
    return weights


def rmsnorm(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rotate(x, spec):
    """x: [T][heads][D]"""
    inv, magnitude = inv_freq(spec)
    angle = np.arange(x.shape[0])[:, None, None] * inv
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    half = spec.rotated() // 2
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def forward(spec, weights, ids):
    """Logits [T][V] in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    n, group = len(ids), spec.n_heads // spec.n_kv_heads
    seen = np.tril(np.ones((n, n), dtype=bool))
    if spec.window:
        seen &= ~np.tril(np.ones((n, n), dtype=bool), -spec.window)
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for i in range(spec.n_layers):
        p = f"model.layers.{i}."
        h = rmsnorm(x, w[p + "input_layernorm.weight"], spec.eps)
        q, k, v = ((h @ w[f"{p}self_attn.{c}_proj.weight"].T + w.get(f"{p}self_attn.{c}_proj.bias", 0)).reshape(n, -1, spec.head_dim)
                   for c in "qkv")
        if spec.arch == "qwen3":
            q = rmsnorm(q, w[p + "self_attn.q_norm.weight"], spec.eps)
            k = rmsnorm(k, w[p + "self_attn.k_norm.weight"], spec.eps)
        q, k = rotate(q, spec), rotate(k, spec)
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(spec.head_dim)
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", scores, v).reshape(n, -1)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        h = rmsnorm(x, w[p + "post_attention_layernorm.weight"], spec.eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    x = rmsnorm(x, w["model.norm.weight"], spec.eps)
    return x @ w["model.embed_tokens.weight" if spec.tied else "lm_head.weight"].T
