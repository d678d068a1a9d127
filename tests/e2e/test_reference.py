"""What the models compute, through sits2026-eval, against independent references: the shared reference.json files (stories260K by a
float64 numpy program, SmolLM2 by transformers) and tests/tools/numpy_llama.py for every architecture and every GGUF element type.
"""
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))
import make_gguf  # noqa: E402
import numpy_llama  # noqa: E402
from numpy_llama import Spec  # noqa: E402

SHARED = pathlib.Path(os.environ.get("SITS_SHARED_DATA", ROOT.parent / "shared" / "data"))
EVAL = pathlib.Path(os.environ.get("SITS_BIN", ROOT / "build" / "release" / "bin")) / "sits2026-eval"
STORIES = SHARED / "models" / "stories260K"
WIKITEXT = SHARED / "text" / "wikitext2.test.raw"
EXACT = ["--kv-cache-dtype", "f32"]
CPU_FLAGS = pathlib.Path("/proc/cpuinfo").read_text().split()
LEVELS = ["scalar"] + [level for level, flag in (("avx2", "avx2"), ("avx512", "avx512_vnni")) if flag in CPU_FLAGS]

needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="shared test data absent")


def smollm2():
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "sits2026"
    path = pathlib.Path(os.environ.get("SITS_TEST_MODEL", cache / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.exists() or not WIKITEXT.exists():
        pytest.skip("SmolLM2 or the shared test data is absent")
    return path


def run(*args):
    done = subprocess.run([str(EVAL), *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logits(model, ids, tmp_path, *args):
    out = tmp_path / "logits.bin"
    run("forced", "--model", model, "--ids", json.dumps(ids), "--out", out, *args)
    return np.fromfile(out, dtype=np.float32).reshape(len(ids), -1).astype(np.float64)


def greedy(model, prompts, tmp_path, *args):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(prompts))
    return run("greedy", "--model", model, "--prompts", path, *args)


# ---- stories260K: both layouts, every figure ----

@pytest.fixture(scope="module")
def stories():
    return json.loads((STORIES / "reference.json").read_text())


LAYOUTS = ["stories260K.gguf", "hf"]


@needs_stories
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("isa", LEVELS)
def test_stories_logits(stories, layout, isa, tmp_path):
    forced = stories["teacher_forced"]
    got = logits(STORIES / layout, forced["ids"], tmp_path, *EXACT, "--isa", isa)
    assert np.abs(got[-1] - forced["last_logits"]).max() < 1e-3
    total = np.log(np.exp(got).sum(axis=1))
    for at, (ids, want, logprobs) in enumerate(zip(forced["top8_ids"], forced["top8_logits"], forced["top8_logprobs"])):
        assert np.abs(got[at, ids] - want).max() < 1e-3
        assert np.abs(got[at, ids] - total[at] - logprobs).max() < 1e-3
        assert got[at].argmax() == ids[0]


@needs_stories
def test_forced_report(stories, tmp_path):
    """What `forced` prints is what its raw logits say."""
    ids, out = stories["teacher_forced"]["ids"], tmp_path / "logits.bin"
    report = run("forced", "--model", STORIES / "hf", "--ids", json.dumps(ids), "--out", out, "--top", 5)
    raw = np.fromfile(out, dtype=np.float32).reshape(len(ids), -1).astype(np.float64)
    for at, position in enumerate(report["positions"]):
        total = np.log(np.exp(raw[at]).sum())
        assert position["id"] == ids[at] and abs(position["logsumexp"] - total) < 2e-6
        assert position["top_ids"] == list(np.argsort(-raw[at], kind="stable")[:5])
        assert np.abs(np.array(position["top_logits"]) - raw[at][position["top_ids"]]).max() < 1e-6
        if at + 1 < len(ids):
            assert abs(position["next_logprob"] - (raw[at][ids[at + 1]] - total)) < 2e-6


@needs_stories
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stories_logits_with_the_serving_cache(stories, layout, tmp_path):
    """f16 pages round keys and values to 11 bits: logits of magnitude 17 move by under two hundredths."""
    forced = stories["teacher_forced"]
    got = logits(STORIES / layout, forced["ids"], tmp_path)
    assert max(np.abs(got[at, ids] - want).max() for at, (ids, want) in
               enumerate(zip(forced["top8_ids"], forced["top8_logits"]))) < 0.03


@needs_stories
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stories_greedy(stories, layout, tmp_path):
    cases = stories["greedy"]
    length = max(len(c["greedy_ids"]) for c in cases)
    got = greedy(STORIES / layout, [{"ids": c["prompt_ids"]} for c in cases], tmp_path, "--max-tokens", length, "--ignore-eos", *EXACT)
    for case, answer in zip(cases, got):
        want = case["greedy_ids"]
        assert answer["ids"][:len(want)] == want
        assert abs(min(answer["gap"][:len(want)]) - case["min_top2_logit_gap"]) < 2e-3


@needs_stories
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stories_perplexity(stories, layout, tmp_path):
    for item in stories["perplexity"]["items"]:
        name = item["text"]
        text = tmp_path / "text"
        if name.startswith("inline:"):
            text.write_text(name[len("inline:"):])
        else:                        # "<file> first <n> characters"
            text.write_text((SHARED / name.split()[0]).read_text()[:item["n_chars"]])
        ids = run("tokenize", "--model", STORIES / layout, "--text", text)
        assert len(ids) == item["n_tokens"]
        step = item["window"] - 1
        for at, want in zip(range(0, len(ids), step), item["windows_nll"]):
            forced = run("forced", "--model", STORIES / layout, "--ids", json.dumps([1] + ids[at:at + step]), *EXACT)
            nll = [-p["next_logprob"] for p in forced["positions"][:-1]]
            assert abs(sum(nll) - want) < 1e-4 * len(nll)


# ---- every GGUF element type ----

@needs_stories
@pytest.mark.parametrize("kind", make_gguf.TYPES)
def test_gguf_type(stories, kind, tmp_path):
    """Against the float64 run of the weights as the `gguf` package decodes them, at every dispatch level that this processor has."""
    spec, weights, tokens = make_gguf.load_stories(STORIES / "stories260K.gguf")
    spec, weights = make_gguf.pad_to_super_blocks(spec, weights)
    back = make_gguf.write_gguf(tmp_path / "m.gguf", spec, weights, lambda name: kind, tokens)
    ids = stories["teacher_forced"]["ids"]
    want = numpy_llama.forward(spec, back, ids)
    for isa in LEVELS:
        got = logits(tmp_path / "m.gguf", ids, tmp_path, *EXACT, "--isa", isa)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < (1e-5 if kind in ("F32", "F16", "BF16") else 1e-2), isa


# ---- every architecture, both forms ----

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ARCHITECTURES = {
    "llama": Spec(),
    "llama_tied": Spec(tied=True, n_heads=2, head_dim=32),
    "llama3_rope": Spec(scaling=LLAMA3, theta=5e5, context=512),
    "linear_rope": Spec(scaling={"rope_type": "linear", "factor": 4.0}),
    "yarn_rope": Spec(arch="qwen2", scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, context=256),
    "partial_rope": Spec(rope_dims=8),
    "mistral_window": Spec(arch="mistral", window=17),
    "qwen2": Spec(arch="qwen2", tied=True),
    "qwen3": Spec(arch="qwen3", n_heads=4, n_kv_heads=1, head_dim=32),
    "odd_sizes": Spec(width=96, n_heads=3, n_kv_heads=3, head_dim=20, n_ff=72, n_vocab=301),
}


@pytest.mark.parametrize("form", ["gguf", "hf", "hf_sharded", "hf_bf16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, form, tmp_path):
    spec = ARCHITECTURES[name]
    weights = numpy_llama.random_weights(spec, seed=len(name))
    if form == "gguf":
        model = tmp_path / "m.gguf"
        back = make_gguf.write_gguf(model, spec, weights)
    else:
        model = tmp_path / "m"
        back = make_gguf.write_hf(model, spec, weights, "BF16" if form == "hf_bf16" else "F32", 3 if form == "hf_sharded" else 1)
        (model / "tokenizer.json").write_text(json.dumps(tiny_tokenizer(spec.n_vocab)))
    ids = [int(i) for i in np.random.default_rng(7).integers(3, spec.n_vocab, 150)]
    want = numpy_llama.forward(spec, back, ids)
    got = logits(model, ids, tmp_path, *EXACT, "--batch-tokens", 41)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-5


def tiny_tokenizer(n_vocab):
    texts, _, _ = make_gguf.byte_vocabulary(n_vocab)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
            "post_processor": None, "decoder": {"type": "ByteFallback"},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": [],
                      "vocab": {text: i for i, text in enumerate(texts)}}}


# ---- SmolLM2 ----

def reference(part):
    return json.loads((SHARED / "models" / "smollm2" / "reference.json").read_text())[part]


def test_smollm2_corpus_ids(tmp_path):
    model = smollm2()
    corpus = reference("corpus")
    out = tmp_path / "ids"
    subprocess.run([EVAL, "tokenize", "--model", model, "--text", WIKITEXT, "--out", out], check=True, capture_output=True)
    assert out.stat().st_size == 4 * corpus["n_ids"]
    assert hashlib.sha256(out.read_bytes()).hexdigest() == corpus["sha256_le_u32"]


@pytest.mark.parametrize("which", [0, 1])
def test_smollm2_perplexity(which):
    model = smollm2()
    want = reference("perplexity")[which]
    got = run("perplexity", "--model", model, "--text", WIKITEXT, "--ctx", want["ctx"], "--windows", want["windows"], "--json")
    print(f"ctx {want['ctx']}: {got['perplexity']:.4f}, reference {want['ppl']:.4f}, {got['tokens_per_s']:.0f} tokens/s")
    assert got["windows"] == want["windows"] and got["ids"] == 303415
    assert abs(got["perplexity"] / want["ppl"] - 1) < 0.003
    assert np.abs(np.array(got["window_nll"]) - want["window_nll"]).max() < 0.03


def test_smollm2_forced(tmp_path):
    model = smollm2()
    forced = reference("forced")
    got = logits(model, forced["ids"], tmp_path)
    errors = []
    for at, (ids, want) in enumerate(zip(forced["top8_ids"], forced["top8_logits"])):
        errors += list(np.abs(got[at, ids] - want))
        if want[0] - want[1] > 0.25:
            assert got[at].argmax() == ids[0], f"position {at}: gap {want[0] - want[1]:.3f}"
    print(f"mean absolute error of {len(errors)} logits: {np.mean(errors):.4f}")
    assert np.mean(errors) <= 0.14


def test_smollm2_greedy(tmp_path):
    """Each continuation is the reference's, or parts from it first where the reference's best two are less than 0.25 apart."""
    model = smollm2()
    cases = reference("greedy")
    got = greedy(model, [{"prompt": c["prompt"]} for c in cases], tmp_path, "--parse-special", "--max-tokens", 128)
    n_equal = 0
    for case, answer in zip(cases, got):
        assert answer["prompt_ids"] == case["prompt_ids"]
        n = next((i for i, (a, b) in enumerate(zip(answer["ids"], case["ids"])) if a != b), None)
        if n is None:
            assert len(answer["ids"]) == len(case["ids"])
            n_equal += 1
        else:
            assert case["gap"][n] < 0.25, f"{case['prompt'][-60:]!r} parts at token {n}, gap {case['gap'][n]}"
    print(f"{n_equal} of {len(cases)} continuations equal")


# ---- refusals ----

HOSTILE = {  # bytes to overwrite in a good file: a function of the bytes, what the message must hold
    "truncated": (lambda b: b[:-1000], "tensor '"),
    "big_endian": (lambda b: b[:4] + bytes(reversed(b[4:8])) + b[8:], "big-endian"),
    "huge_count": (lambda b: b[:8] + b"\xff" * 8 + b[16:], "tensors"),
    "unknown_architecture": (lambda b: b.replace(b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
                                                 b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0gemma"), "architecture 'gemma'"),
    "missing_key": (lambda b: b.replace(b"llama.block_count", b"llama.block_cOunt"), "'llama.block_count' is missing"),
    "missing_tensor": (lambda b: b.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uP.weight"), "'blk.1.ffn_up.weight' is missing"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_file_is_refused_by_name(how, tmp_path):
    change, text = HOSTILE[how]
    good = tmp_path / "good.gguf"
    make_gguf.write_gguf(good, Spec(), numpy_llama.random_weights(Spec(), 1))
    (tmp_path / "bad.gguf").write_bytes(change(good.read_bytes()))
    done = subprocess.run([EVAL, "forced", "--model", tmp_path / "bad.gguf", "--ids", "[1]"], capture_output=True, text=True)
    assert done.returncode == 1 and text in done.stderr, done.stderr
