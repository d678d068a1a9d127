"""sits2026-compile: engine files compute what the models they were made from compute, to the bit where a recipe keeps the weights; equal
input gives equal bytes; damage and wrong requests are refused by name; servers and tools take an engine file as any model."""
import hashlib
import json
import shutil
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from conftest import BIN, DATA, ROOT, SMOL, Server

STORIES = DATA / "models" / "stories260K"
TEXT = DATA / "text" / "pride_and_prejudice.txt"
WIKITEXT = DATA / "text" / "wikitext2.test.raw"

needs_stories = pytest.mark.skipif(not STORIES.exists() or not TEXT.exists(), reason="shared test data absent")
needs_smol = pytest.mark.skipif(not SMOL.exists() or not TEXT.exists(), reason="SmolLM2 or the shared test data is absent")


def run(tool, *args):
    return subprocess.run([str(BIN / f"sits2026-{tool}"), *map(str, args)], capture_output=True, text=True)


def compile_model(model, out, *args):
    done = run("compile", model, "-o", out, "--quiet", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def logits(model, ids, tmp_path, *args):
    out = tmp_path / "logits.bin"
    done = run("eval", "forced", "--model", model, "--ids", json.dumps(ids), "--out", out, *args)
    assert done.returncode == 0, done.stderr
    return np.fromfile(out, dtype=np.float32).reshape(len(ids), -1)


def perplexity(model, *args):
    done = run("eval", "perplexity", "--model", model, "--json", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IDS = [1, 120, 5, 77, 301, 12, 12, 400, 9, 33, 250, 8]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """SmolLM2 in the recipes that need no calibration."""
    if not SMOL.exists():
        pytest.skip("SmolLM2 is absent")
    folder = tmp_path_factory.mktemp("engine")
    for recipe in ("w4a8", "w4a16", "w16a16"):
        compile_model(SMOL, folder / f"{recipe}.bin", "--recipe", recipe)
    return folder


# ---- the same bits ----

@needs_smol
def test_kept_grid_gives_the_same_bits(files, tmp_path):
    want = logits(SMOL, IDS, tmp_path)
    assert np.array_equal(want.view(np.uint32), logits(files / "w4a8.bin", IDS, tmp_path).view(np.uint32))


@needs_stories
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_round_trip_of_four_bit_files(kind, tmp_path):
    """A trained model in either form: every matrix is kept, and perplexity is the same, window by window."""
    sys.path.insert(0, str(ROOT / "tests" / "tools"))
    import make_gguf
    spec, weights, tokens = make_gguf.load_stories(STORIES / "stories260K.gguf")
    wide, padded = make_gguf.pad_to_super_blocks(spec, weights)
    make_gguf.write_gguf(tmp_path / "m.gguf", wide, padded, lambda name: kind, tokens)
    compile_model(tmp_path / "m.gguf", tmp_path / "s.bin", "--recipe", "w4a8", "--report", tmp_path / "report.json")
    assert all(row["kept"] for row in json.loads((tmp_path / "report.json").read_text())["matrices"])
    args = ("--text", TEXT, "--ctx", 256, "--windows", 4)
    want, got = perplexity(tmp_path / "m.gguf", *args), perplexity(tmp_path / "s.bin", *args)
    assert got["window_nll"] == want["window_nll"]


@needs_smol
def test_eight_bits_hold_the_four_bit_grid(files, tmp_path):
    """The same values and the same 8-bit activations: only the sums of a group's integers are larger, and they are exact."""
    compile_model(SMOL, tmp_path / "s.bin", "--recipe", "w8a8")
    assert np.array_equal(logits(tmp_path / "s.bin", IDS, tmp_path), logits(files / "w4a8.bin", IDS, tmp_path))


@needs_smol
def test_four_bits_with_float_activations_are_the_float_model(files, tmp_path):
    """w16a16 rounds the weights to f16, w4a16 keeps their grid: they differ by that rounding only, and the backend adds nothing to it."""
    a, b = logits(files / "w4a16.bin", IDS, tmp_path), logits(files / "w16a16.bin", IDS, tmp_path)
    eight = logits(SMOL, IDS, tmp_path)
    assert 0 < np.abs(a - b).mean() < 0.02  # of logits of about 20
    assert np.abs(eight - b).mean() > 3 * np.abs(a - b).mean()


@needs_smol
@pytest.mark.parametrize("recipe", ["w16a16", "w4a16", "w4a8"])
def test_fused_and_plain_ops_agree(recipe, files, tmp_path):
    """What the stitcher took leaves the logits, which are up to 34, as they are."""
    fused = logits(files / f"{recipe}.bin", IDS, tmp_path)
    assert np.abs(fused - logits(files / f"{recipe}.bin", IDS, tmp_path, "--unfused")).max() < 1e-3


@needs_stories
def test_hugging_face_directory(tmp_path):
    """Floats of 16 bits and vectors travel; config, tokenizer and generation config too."""
    model = STORIES / "hf"
    compile_model(model, tmp_path / "s.bin", "--recipe", "w16a16")
    want, got = logits(model, IDS, tmp_path), logits(tmp_path / "s.bin", IDS, tmp_path)
    assert np.abs(want - got).max() < 0.02  # f32 weights became f16
    text = "Once upon a time, there was a little dog."
    (tmp_path / "t.txt").write_text(text)
    ids = [run("eval", "tokenize", "--model", m, "--text", tmp_path / "t.txt").stdout for m in (model, tmp_path / "s.bin")]
    assert ids[0] and ids[0] == ids[1]


@needs_stories
@pytest.mark.parametrize("recipe,most", [("w8a8", 0.004), ("w4a8", 0.1), ("w4a16", 0.1), ("w4a4", 0.25)])
def test_float_source(recipe, most, tmp_path):
    """A model of 260,000 parameters: what a recipe may cost is bounded, and more bits never cost more."""
    compile_model(STORIES / "hf", tmp_path / "s.bin", "--recipe", recipe, "--calibration", TEXT, "--calibration-ctx", 256,
                  "--calibration-windows", 16)
    args = ("--text", TEXT, "--ctx", 256, "--windows", 8)
    want, got = perplexity(STORIES / "hf", *args), perplexity(tmp_path / "s.bin", *args)
    assert abs(got["perplexity"] / want["perplexity"] - 1) < most


@needs_stories
def test_gptq_beats_rounding_to_nearest(tmp_path):
    recipe = "weights: int4\nweight-group: 0\nactivations: float\nhead-activations: float\nscaling: none\n"
    (tmp_path / "rtn.yaml").write_text(recipe)
    (tmp_path / "gptq.yaml").write_text(recipe + "method: gptq\n")
    found = {}
    for name in ("rtn", "gptq"):
        compile_model(STORIES / "hf", tmp_path / f"{name}.bin", "--recipe", tmp_path / f"{name}.yaml", "--calibration", TEXT,
                      "--calibration-ctx", 512, "--calibration-windows", 16)
        found[name] = perplexity(tmp_path / f"{name}.bin", "--text", TEXT, "--ctx", 256, "--windows", 16)["perplexity"]
    assert found["gptq"] < found["rtn"]


@needs_stories
@pytest.mark.parametrize("kind,allowed", [("multiples", set(range(1, 17))), ("powers", {1, 2, 4, 8, 16})])
def test_group_scales_are_multiples_of_one(kind, allowed, tmp_path):
    """Every row's scales are whole multiples of one f16, the file runs like any other, and costs little beside free scales."""
    found = {}
    for scales in ("f16", kind):
        (tmp_path / "r.yaml").write_text(f"weights: int4\nactivations: int8\nscaling: none\nweight-scales: {scales}\nmethod: gptq\n")
        compile_model(STORIES / "hf", tmp_path / f"{scales}.bin", "--recipe", tmp_path / "r.yaml", "--calibration", TEXT,
                      "--calibration-ctx", 256)
        found[scales] = perplexity(tmp_path / f"{scales}.bin", "--text", TEXT, "--ctx", 256, "--windows", 16)["perplexity"]
    assert found[kind] != found["f16"] and found[kind] < 1.1 * found["f16"]
    assert scale_multiples(tmp_path / f"{kind}.bin") <= allowed
    assert not scale_multiples(tmp_path / "f16.bin") <= allowed


def scale_multiples(path):
    """What all scales of a row are times the largest number of which they are whole multiples up to 16; 0: no such number."""
    data = path.read_bytes()
    found = set()
    for tensor in json.loads(data[40:40 + int.from_bytes(data[16:24], "little")])["tensors"]:
        if tensor["dtype"] != "i4":
            continue
        rows, width = tensor["dims"]
        scales = np.frombuffer(data, np.float16, rows * width // tensor["group_size"], tensor["scales"][0]).astype(np.float64)
        for row in scales.reshape(rows, -1):
            for n in range(1, 17):
                multiples = row / (row.min() / n)
                if np.array_equal(multiples, np.rint(multiples)) and multiples.max() <= 16:
                    found |= set(multiples.astype(int).tolist())
                    break
            else:
                found.add(0)
    return found


def write_wide_model(path):
    """Random weights, rows of multiples of 128, groups of very different size; speaks no language."""
    sys.path.insert(0, str(ROOT / "tests" / "tools"))
    import make_gguf
    import numpy_llama
    spec = numpy_llama.Spec(width=256, n_heads=4, n_kv_heads=2, head_dim=64, n_ff=640, n_vocab=300)
    rng = np.random.default_rng(1)
    weights = numpy_llama.random_weights(spec, 1)
    for name, w in weights.items():
        if "_proj" in name:
            sizes = 2.0 ** rng.uniform(-1.5, 1.5, (w.shape[0], w.shape[1] // 128))
            weights[name] = (w * np.repeat(sizes, 128, axis=1)).astype(np.float32)
    make_gguf.write_gguf(path, spec, weights)
    return [int(i) for i in rng.integers(0, 300, 40)]


def test_the_recipe_for_a_gpu(tmp_path):
    """Groups of 128 without minimums, whose scales are powers of two times one of the row; inputs are left to the device: on a CPU int8."""
    ids = write_wide_model(tmp_path / "m.gguf")
    done = run("compile", tmp_path / "m.gguf", "-o", tmp_path / "gpu.bin", "--recipe", "w4a8-g128")
    assert done.returncode == 0 and "not in groups" not in done.stdout, done.stderr
    said = run("compile", "--inspect", tmp_path / "gpu.bin").stdout
    assert said.count("groups of 128") == 14 and "minimums" not in said and re.search(r"layer 1 +down +backend\n", said)
    assert re.search(r"head +float\n", said)  # its weights are floats
    assert {1, 2, 4} <= scale_multiples(tmp_path / "gpu.bin") <= {1, 2, 4, 8, 16}
    text = (ROOT / "configs" / "recipes" / "w4a8-g128.yaml").read_text()
    (tmp_path / "int8.yaml").write_text(text.replace("\nactivations: backend", "\nactivations: int8"))
    compile_model(tmp_path / "m.gguf", tmp_path / "int8.bin", "--recipe", tmp_path / "int8.yaml")
    assert np.array_equal(logits(tmp_path / "gpu.bin", ids, tmp_path), logits(tmp_path / "int8.bin", ids, tmp_path))


@needs_stories
def test_what_has_no_long_groups_is_named(tmp_path):
    """Rows of 64 and 172 columns in the recipe for a GPU."""
    done = run("compile", STORIES / "hf", "-o", tmp_path / "s.bin", "--recipe", "w4a8-g128")
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("not in groups of 128")[1].splitlines()[1:]
    narrow = [line for line in listed if "groups of" in line]
    assert len(narrow) == 5 * 6 and all("groups of 64, for its rows" in line for line in narrow)
    assert any("model.layers.4.mlp.up_proj.weight" in line for line in narrow)


@needs_smol
def test_a_kept_grid_has_no_long_groups(tmp_path):
    done = run("compile", SMOL, "-o", tmp_path / "s.bin", "--recipe", "w4a8-g128")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("groups of 32, the source's") == 30 * 7


@needs_stories
def test_outlier_channels(tmp_path):
    """Channels scaled 50 times: plain rounding to 4 bits fails, scales moved into the weights, GPTQ and a few 8-bit channels hold."""
    model = tmp_path / "model"
    subprocess.run([sys.executable, ROOT / "bench" / "outlier_model.py", STORIES, model], check=True)
    (tmp_path / "plain.yaml").write_text("weights: int4\nweight-group: 0\nweight-minimum: false\nclip: false\nactivations: int4\n"
                                         "outliers: 0\nscaling: none\n")
    (tmp_path / "ours.yaml").write_text("weights: int4\nactivations: int4\ndown-activations: int8\nmethod: gptq\n")
    args = ("--text", TEXT, "--ctx", 512, "--windows", 16)
    want = perplexity(model, *args)["perplexity"]
    assert abs(want / perplexity(STORIES / "hf", *args)["perplexity"] - 1) < 1e-3  # the same function
    found = {}
    for name in ("plain", "ours"):
        compile_model(model, tmp_path / "s.bin", "--recipe", tmp_path / f"{name}.yaml", "--calibration", WIKITEXT, "--calibration-ctx", 512,
                      "--calibration-windows", 16)
        found[name] = perplexity(tmp_path / "s.bin", *args)["perplexity"]
    assert found["plain"] > 10 * want
    assert found["ours"] < 1.1 * want


# ---- the file ----

@needs_stories
def test_equal_input_gives_equal_bytes(tmp_path):
    """Also with calibration, and with another number of threads."""
    digests = set()
    for threads in (1, 2, 3):
        compile_model(STORIES / "hf", tmp_path / "s.bin", "--recipe", "w4a4", "--calibration", TEXT, "--calibration-ctx", 256,
                      "--threads", threads)
        digests.add(hashlib.sha256((tmp_path / "s.bin").read_bytes()).hexdigest())
    assert len(digests) == 1


@needs_stories
def test_damage_is_found_and_named(tmp_path):
    path = tmp_path / "s.bin"
    compile_model(STORIES / "hf", path, "--recipe", "w8a8")
    good = bytearray(path.read_bytes())
    header = json.loads(good[40:40 + int.from_bytes(good[16:24], "little")])
    tensor = header["tensors"][3]

    def refused(data, *texts):
        path.write_bytes(data)
        done = run("eval", "forced", "--model", path, "--ids", "[1]")
        assert done.returncode == 1
        for text in texts:
            assert text in done.stderr, done.stderr

    flipped = bytearray(good)
    flipped[tensor["data"][0] + 7] ^= 16
    refused(flipped, tensor["name"], "checksum")
    flipped = bytearray(good)
    flipped[header["blobs"][0]["data"][0] + 3] ^= 1
    refused(flipped, header["blobs"][0]["name"], "checksum")
    refused(good[:-4096], "truncated", header["blobs"][-1]["name"])
    refused(good[:tensor["scales"][0] + 1], "truncated", tensor["name"])
    refused(good[:200], "truncated", "header")
    refused(good[:8] + (2).to_bytes(4, "little") + good[12:], "version 2")
    refused(good[:12] + good[12:16][::-1] + good[16:], "byte order")


@needs_stories
def test_inspect(tmp_path):
    compile_model(STORIES / "hf", tmp_path / "s.bin", "--recipe", "w4a4", "--calibration", TEXT, "--calibration-ctx", 256)
    done = run("compile", "--inspect", tmp_path / "s.bin")
    assert done.returncode == 0
    for text in ('recipe: "w4a4"', 'origin: "hf"', "model.layers.0.self_attn.q_proj.weight", "groups of 32, minimums", "tokenizer.json",
                 "checksums: good", "layer 0    qkv      int4, 16 channels in 8 bits"):
        assert text in done.stdout
    assert run("compile", "--inspect", TEXT).returncode == 1


@needs_stories
def test_report_holds_its_bound_at_eight_bits(tmp_path):
    compile_model(STORIES / "hf", tmp_path / "s.bin", "--recipe", "w8a8", "--report", tmp_path / "report.json")
    rows = json.loads((tmp_path / "report.json").read_text())["matrices"]
    assert len(rows) == 5 * 7 + 1
    for row in rows:
        assert row["relative_error"] < 0.008 and not row["above_bound"], row


@needs_smol
def test_report_of_a_real_model_at_eight_bits(tmp_path):
    """Every matrix rounded anew, none kept."""
    (tmp_path / "anew.yaml").write_text("weights: int8\nkeep-grid: false\n")
    compile_model(SMOL, tmp_path / "s.bin", "--recipe", tmp_path / "anew.yaml", "--report", tmp_path / "report.json")
    rows = json.loads((tmp_path / "report.json").read_text())["matrices"]
    assert len(rows) == 30 * 7 + 1 and sum(row["kept"] for row in rows) == 1  # the head
    for row in rows:
        assert row["relative_error"] < 0.008 and not row["above_bound"], row


# ---- what is asked for ----

@needs_stories
@pytest.mark.parametrize("args,code,text", [
    (["--recipe", "w5a5"], 2, "w5a5"),
    (["--recipe", "w4a4"], 2, "--calibration"),
    (["--target", "cuda-sm80"], 1, "cuda-sm80"),
    (["--target", "tpu"], 2, "target"),
    (["--kv-cache-compress", "int3"], 2, "int3"),
    (["--calibration", "/nonexistent", "--recipe", "w4a4"], 1, "nonexistent"),
])
def test_refusals(args, code, text, tmp_path):
    done = run("compile", STORIES / "hf", "-o", tmp_path / "s.bin", *args)
    assert done.returncode == code and text in done.stderr, done.stderr
    assert not (tmp_path / "s.bin").exists() and not (tmp_path / "s.bin.part").exists()


@needs_stories
def test_a_file_that_asks_for_sparse_pages(tmp_path):
    """A page budget is taken for such a file alone; within it the cache is fp4's to the bit."""
    compile_model(STORIES / "hf", tmp_path / "s.bin", "--kv-cache-compress", "fp4-sparse")
    budget = ("--kv-page-budget", 8)
    assert np.array_equal(logits(tmp_path / "s.bin", IDS[:8], tmp_path, *budget),
                          logits(tmp_path / "s.bin", IDS[:8], tmp_path, "--kv-cache-dtype", "fp4"))
    done = run("eval", "forced", "--model", STORIES / "hf", "--ids", "[1, 2]", *budget)
    assert done.returncode != 0 and "kv-page-budget" in done.stderr


@needs_stories
def test_an_engine_file_is_no_source(tmp_path):
    compile_model(STORIES / "hf", tmp_path / "s.bin")
    done = run("compile", tmp_path / "s.bin", "-o", tmp_path / "t.bin")
    assert done.returncode == 1 and "engine file already" in done.stderr


# ---- serving ----

@needs_smol
def test_the_daemon_serves_an_engine_file(files, tmp_path):
    """With the chat template and tokenizer from the file, and the answer of the source model."""
    answers = []
    for model in (SMOL, files / "w4a8.bin"):
        server = Server(model, tmp_path / "log", "--served-model-name", "m")
        try:
            answers.append(chat(server))
            assert re.search(r"ready model=m .* open_ms=\d+ pack_ms=\d+ ms=\d+", server.text())  # what repacking cost
        finally:
            assert server.stop() == 0
    assert answers[0] and answers[0] == answers[1]


def chat(server):
    import urllib.request
    body = {"model": "m", "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


@needs_smol
def test_the_file_decides_the_cache_unless_told(tmp_path):
    compile_model(SMOL, tmp_path / "kv.bin", "--kv-cache-compress", "int8")
    own = logits(tmp_path / "kv.bin", IDS, tmp_path)
    assert np.array_equal(own, logits(SMOL, IDS, tmp_path, "--kv-cache-dtype", "int8"))
    assert np.array_equal(logits(tmp_path / "kv.bin", IDS, tmp_path, "--kv-cache-dtype", "f16"), logits(SMOL, IDS, tmp_path))


def hash_bulk(data):
    """The header's checksum (src/base/hash.c)."""
    mask = (1 << 64) - 1

    def mix(a, b):
        h = (a * 0x9E3779B97F4A7C15 + b) & mask
        h = ((h ^ h >> 33) * 0xFF51AFD7ED558CCD) & mask
        h = ((h ^ h >> 33) * 0xC4CEB9FE1A85EC53) & mask
        return h ^ h >> 33

    def step(lane, word):
        lane = (lane + word * 0xC2B2AE3D27D4EB4F) & mask
        return ((lane << 31 | lane >> 33) & mask) * 0x9E3779B185EBCA87 & mask
    lanes, whole = [0, 0x9E3779B97F4A7C15, mask, 0xFF51AFD7ED558CCD], len(data) // 32 * 32
    for at in range(0, whole, 32):
        lanes = [step(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at), strict=True)]
    rest, h = data[whole:], mix(mix(*lanes[:2]), mix(*lanes[2:]))
    h = mix(h, len(rest))
    for at in range(0, len(rest) // 8 * 8, 8):
        h = mix(h, int.from_bytes(rest[at:at + 8], "little"))
    return mix(mix(h, int.from_bytes(rest[len(rest) // 8 * 8:], "little")), len(data))


@needs_stories
def test_inspect_prints_no_control_characters(tmp_path):
    path = tmp_path / "s.bin"
    compile_model(STORIES / "hf", path, "--recipe", "w8a8")
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:24], "little")
    assert hash_bulk(bytes(data[40:40 + size])) == int.from_bytes(data[32:40], "little")
    header = json.loads(data[40:40 + size])
    header["meta"] |= {"a\x1b[2J": "b\x7f"}
    header["meta"]["sites"][0] |= {"site": "\x1b]0;x", "act": "\x9b1m"}
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= (40 + size + 4095) // 4096 * 4096 - 40
    data[40:40 + len(text)] = text
    data[16:24], data[32:40] = len(text).to_bytes(8, "little"), hash_bulk(text).to_bytes(8, "little")
    path.write_bytes(data)
    done = run("compile", "--inspect", path)
    assert done.returncode == 0 and "checksums: good" in done.stdout, done.stderr
    assert all(c == "\n" or " " <= c <= "~" for c in done.stdout), ascii(done.stdout[:600])


# ---- runs that are cut ----

@needs_stories
@pytest.mark.parametrize("n_kept", [1, 9, 30])
def test_a_cut_run_goes_on(n_kept, tmp_path):
    """The folder of a run that died: some matrices are there, the last line is torn; the file comes out the same."""
    args = ("--recipe", "w4a4", "--calibration", TEXT, "--calibration-ctx", 256)
    compile_model(STORIES / "hf", tmp_path / "whole.bin", *args)
    work = tmp_path / "work"
    # a run that fails at its end: everything is made, the output's folder is missing
    done = run("compile", STORIES / "hf", "-o", tmp_path / "none" / "s.bin", "--quiet", "--work", work, *args)
    assert done.returncode == 1 and (work / "journal.jsonl").exists()
    lines = (work / "journal.jsonl").read_text().splitlines(keepends=True)
    (work / "journal.jsonl").write_text("".join(lines[:1 + n_kept]) + lines[1 + n_kept][:40])
    made = compile_model(STORIES / "hf", tmp_path / "s.bin", "--work", work, *args)
    assert f"{n_kept} matrices of an earlier run" in made
    assert (tmp_path / "s.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert not (work / "journal.jsonl").exists() and not (work / "spool.bin").exists()
    # another recipe does not take the matrices of this one
    run("compile", STORIES / "hf", "-o", tmp_path / "none" / "s.bin", "--quiet", "--work", work, *args)
    assert "earlier" not in compile_model(STORIES / "hf", tmp_path / "s.bin", "--work", work, "--recipe", "w8a8")


@needs_stories
@pytest.mark.parametrize("changed", ["nothing", "weights", "one weight", "text"])
def test_a_cut_run_is_not_taken_up_with_other_contents(changed, tmp_path):
    """Files of the same name and length, with other weights or another text in them."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(STORIES / "hf", model)
    text.write_bytes(TEXT.read_bytes()[:60000])
    args = ("--recipe", "w4a4", "--calibration", text, "--calibration-ctx", 256, "--work", tmp_path / "work")
    run("compile", model, "-o", tmp_path / "none" / "s.bin", "--quiet", *args)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if changed == "weights":
        at = 8 + int.from_bytes(data[:8], "little")  # where tensors begin: signs turn round
        data[at:] = (np.frombuffer(bytes(data[at:]), dtype=np.float32) * np.float32(-0.5)).tobytes()
        weights.write_bytes(data)
    if changed == "one weight":
        at = 8 + int.from_bytes(data[:8], "little")  # the last one of the largest tensor
        data[at + json.loads(data[8:at])["model.embed_tokens.weight"]["data_offsets"][1] - 1] ^= 1
        weights.write_bytes(data)
    if changed == "text":
        text.write_bytes(TEXT.read_bytes()[60000:120000])
    made = compile_model(model, tmp_path / "s.bin", *args)
    assert ("earlier run" in made) == (changed == "nothing")


@needs_stories
def test_a_report_that_cannot_be_written_costs_no_run(tmp_path):
    done = run("compile", STORIES / "hf", "-o", tmp_path / "s.bin", "--recipe", "w8a8", "--report", tmp_path)
    assert done.returncode == 1 and "not a regular file" in done.stderr and not (tmp_path / "s.bin").exists()


@pytest.mark.parametrize("tool,args", [("compile", ()), ("opt", ("--calibration", __file__))])
def test_a_model_without_weights_is_refused(tool, args, tmp_path):
    done = run(tool, "synthetic:tiny", "-o", tmp_path / "out", *args)
    assert done.returncode == 1 and "has no weights" in done.stderr, (done.returncode, done.stderr)


@needs_stories
@pytest.mark.parametrize("sites,text", [("0.qkv,9.down", "1 name a site"), ("0.q", "0 name a site"), ("0.qkv,,1.o", "2 name a site")])
def test_sites_of_recipes_are_checked(sites, text, tmp_path):
    (tmp_path / "r.yaml").write_text(f"activations: int4\noutliers: 0\nint8-sites: {sites}\n")
    done = run("compile", STORIES / "hf", "-o", tmp_path / "s.bin", "--recipe", tmp_path / "r.yaml")
    assert done.returncode == 2 and "int8-sites" in done.stderr and text in done.stderr, done.stderr
