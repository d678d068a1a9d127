"""sits2026-opt: rotations leave the function as it is and are chosen where they pay; the search keeps the loss with the fewest 8-bit
inputs; cut runs go on."""
import json
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from conftest import BIN, DATA, ROOT

sys.path.insert(0, str(ROOT / "tests" / "tools"))
import make_gguf  # noqa: E402
import numpy_llama  # noqa: E402

STORIES = DATA / "models" / "stories260K" / "hf"
TEXT = DATA / "text" / "pride_and_prejudice.txt"
WIKITEXT = DATA / "text" / "wikitext2.test.raw"
OPT = ("--calibration", WIKITEXT, "--ctx", 512, "--windows", 8, "--calibration-windows", 8, "--rotation-seeds", 2)

pytestmark = pytest.mark.skipif(not STORIES.exists() or not TEXT.exists(), reason="shared test data absent")


def run(tool, *args, code=0):
    done = subprocess.run([str(BIN / f"sits2026-{tool}"), *map(str, args)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def logits(model, folder):
    ids = [1, 120, 5, 77, 101, 12, 12, 140, 9, 33, 50, 8] * 3
    run("eval", "forced", "--model", model, "--ids", json.dumps(ids), "--out", folder / "logits.bin")
    return np.fromfile(folder / "logits.bin", dtype=np.float32).reshape(len(ids), -1)


def perplexity(model, *args):
    return json.loads(run("eval", "perplexity", "--model", model, "--json", *args).stdout)["perplexity"]


SPECS = {
    "llama": numpy_llama.Spec(width=96, n_heads=4, n_kv_heads=2, head_dim=24, n_ff=256, tied=True, n_vocab=512),  # 96 = 12 x 8
    "qwen2": numpy_llama.Spec(arch="qwen2", width=64, n_heads=4, n_kv_heads=1, n_ff=128, n_vocab=512),            # biases of q, k, v
    "qwen3": numpy_llama.Spec(arch="qwen3", width=72, n_heads=3, n_kv_heads=3, n_ff=128, n_vocab=512),            # norms of q, k; 36 x 2
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_rotations_leave_the_function_as_it_is(name, form, tmp_path):
    spec = SPECS[name]
    weights = numpy_llama.random_weights(spec, seed=3)
    if form == "gguf":
        model = tmp_path / "m.gguf"
        make_gguf.write_gguf(model, spec, weights)
    else:
        model = tmp_path / "m"
        make_gguf.write_hf(model, spec, weights)
        shutil.copy(STORIES / "tokenizer.json", model)
    run("compile", model, "-o", tmp_path / "w16.bin", "--recipe", "w16a16", "--quiet")
    run("opt", model, "-o", tmp_path / "o", "--recipe", "w16a16", "--rotate", "all", "--calibration", TEXT, "--ctx", 64,
        "--sensitivity-ctx", 64, "--windows", 1, "--calibration-windows", 1)
    inspected = run("compile", "--inspect", tmp_path / "o" / "prepared.bin").stdout
    assert 'stage: "prepared"' in inspected and "residual_seed: 1" in inspected
    norm = "blk.0.attn_norm.weight" if form == "gguf" else "model.layers.0.input_layernorm.weight"
    assert norm in inspected
    exact, plain = logits(model, tmp_path), logits(tmp_path / "w16.bin", tmp_path)
    rotated, made = logits(tmp_path / "o" / "prepared.bin", tmp_path), logits(tmp_path / "o" / "model.bin", tmp_path)
    scale = np.abs(exact).max()
    assert np.abs(plain - exact).max() < 0.01 * scale
    assert 0 < np.abs(rotated - exact).max() < 0.01 * scale  # weights in 16-bit floats, as in w16a16
    assert np.abs(made - exact).max() < 0.01 * scale
    # and rounded: with 8 bits the rotated model is as near as the plain one
    for source, out in ((model, "plain8.bin"), (tmp_path / "o" / "prepared.bin", "rotated8.bin")):
        run("compile", source, "-o", tmp_path / out, "--recipe", "w8a8", "--quiet")
    plain, rotated = (np.abs(logits(tmp_path / out, tmp_path) - exact).mean() for out in ("plain8.bin", "rotated8.bin"))
    assert rotated < 2 * plain < 0.1 * scale


@pytest.fixture(scope="module")
def outlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outlier") / "model"
    subprocess.run([sys.executable, ROOT / "bench" / "outlier_model.py", STORIES.parent, folder], check=True)
    return folder


def test_rotation_is_chosen_where_it_pays(outlier, tmp_path):
    """Channels scaled 50 times, and no scales moved out of them: rotation is what holds, and opt finds that out."""
    (tmp_path / "r.yaml").write_text("weights: int4\nactivations: int4\ndown-activations: int8\nscaling: none\nmethod: gptq\n")
    done = run("opt", outlier, "-o", tmp_path / "o", "--recipe", tmp_path / "r.yaml", *OPT)
    assert "residual stream: rotated" in done.stdout and "peak memory" in done.stdout
    search = json.loads((tmp_path / "o" / "search.json").read_text())
    assert search["rotation"]["residual_seed"] in (1, 2)
    run("compile", outlier, "-o", tmp_path / "plain.bin", "--recipe", tmp_path / "r.yaml", "--calibration", WIKITEXT, "--quiet",
        "--calibration-ctx", 512, "--calibration-windows", 8)
    run("compile", tmp_path / "o", "-o", tmp_path / "again.bin", "--calibration", WIKITEXT, "--quiet", "--calibration-ctx", 512,
        "--calibration-windows", 8)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "o" / "model.bin").read_bytes()
    args = ("--text", TEXT, "--ctx", 512, "--windows", 8)
    want, plain, rotated = (perplexity(m, *args) for m in (outlier, tmp_path / "plain.bin", tmp_path / "o" / "model.bin"))
    assert plain > 1.35 * want
    assert rotated - want < (plain - want) / 2


def test_scales_are_taken_where_they_pay(outlier, tmp_path):
    """With GPTQ, a model without outliers is better off without scales; one with outliers needs them."""
    (tmp_path / "r.yaml").write_text("weights: int4\nactivations: int4\ndown-activations: int8\nmethod: gptq\n")
    for model, want in ((STORIES, "none"), (outlier, "awq")):
        done = run("opt", model, "-o", tmp_path / "o", "--recipe", tmp_path / "r.yaml", "--rotate", "none", *OPT)
        assert f"scaling: {want}" in done.stdout
        assert ("scaling: none" in (tmp_path / "o" / "recipe.yaml").read_text()) == (want == "none")


def test_grids_that_come_along_are_kept(tmp_path):
    """A second rounding of 4-bit weights costs more than rotation gains."""
    model = tmp_path / "m.gguf"
    make_gguf.write_gguf(model, SPECS["llama"], numpy_llama.random_weights(SPECS["llama"], seed=3), lambda name: "Q4_1")
    done = run("opt", model, "-o", tmp_path / "o", "--calibration", TEXT, "--ctx", 64, "--sensitivity-ctx", 64, "--windows", 2,
               "--calibration-windows", 2, "--rotation-seeds", 1, "--recipe", "w4a8", "--down-rotation", 64)
    assert "residual stream: as it is" in done.stdout and not (tmp_path / "o" / "prepared.bin").exists()
    rows = json.loads((tmp_path / "o" / "report.json").read_text())["matrices"]
    assert all(row["kept"] for row in rows if "embd" not in row["tensor"])
    run("compile", model, "-o", tmp_path / "again.bin", "--recipe", tmp_path / "o" / "recipe.yaml", "--calibration", TEXT, "--quiet",
        "--calibration-ctx", 64, "--calibration-windows", 2)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "o" / "model.bin").read_bytes()


INPUTS = "weights: int8\nactivations: int4\noutliers: 0\ndown-activations: int8\n"  # what is lost is lost by 4-bit inputs


def test_search_keeps_the_loss_with_the_fewest_sites(tmp_path):
    (tmp_path / "r.yaml").write_text(INPUTS)
    done = run("opt", STORIES, "-o", tmp_path / "o", *OPT, "--calibration", TEXT, "--rotate", "none",
               "--max-ppl-loss", 1, "--recipe", tmp_path / "r.yaml")
    search = json.loads((tmp_path / "o" / "search.json").read_text())
    tried = {t["int4_sites"]: t["loss_percent"] for t in search["tries"] if "loss_percent" in t}
    judged = {t["int4_sites"]: t["held_out_loss_percent"] for t in search["tries"] if "held_out_loss_percent" in t}
    chosen, n_found = search["chosen"], max(judged)
    assert tried[max(tried)] > 1 >= tried[n_found] and 0 < n_found < max(tried)
    assert tried[n_found + 1] > 1  # one site more does not hold
    # what was found was judged on other windows, and sites were given up until it held there
    assert judged[chosen] <= 1 and chosen == min(judged) and all(judged[n] > 1 for n in judged if n != chosen)
    held_out = perplexity(tmp_path / "o" / "model.bin", "--text", TEXT, "--ctx", 512, "--windows", 8, "--skip-windows", 16)
    assert held_out == pytest.approx(search["held_out_perplexity"], rel=1e-6)
    assert search["held_out_loss_percent"] == pytest.approx(judged[chosen], abs=1e-6) and "on windows held out" in done.stdout
    # the least sensitive sites have 4 bits
    quotient = {site: row["divergence"] / row["products"] for site, row in search["sensitivity"].items()}
    recipe = (tmp_path / "o" / "recipe.yaml").read_text()
    eight = next(line for line in recipe.splitlines() if line.startswith("int8-sites")).split(":")[1].strip(' "').split(",")
    assert len(eight) == max(tried) - chosen == len(set(eight))
    assert max(q for site, q in quotient.items() if site not in eight) <= min(quotient[site] for site in eight)
    # the recipe alone gives the same file, and the file the same perplexity
    run("compile", tmp_path / "o", "-o", tmp_path / "again.bin", "--calibration", TEXT, "--calibration-ctx", 512,
        "--calibration-windows", 8, "--quiet")
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "o" / "model.bin").read_bytes()
    measured = perplexity(tmp_path / "o" / "model.bin", "--text", TEXT, "--ctx", 512, "--windows", 8, "--skip-windows", 8)
    assert measured == pytest.approx(search["perplexity"], rel=1e-6)
    rows = json.loads((tmp_path / "o" / "report.json").read_text())["matrices"]
    assert sum("output_error" in row for row in rows) >= 5 * 7
    assert "above the bound" in done.stdout and "of output" in done.stdout


def read_png(path):
    """Rows of colours of a picture with a palette."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        n, kind = struct.unpack(">I4s", data[at:at + 8])
        assert zlib.crc32(data[at + 4:at + 8 + n]) == struct.unpack(">I", data[at + 8 + n:at + 12 + n])[0]
        parts[kind] = data[at + 8:at + 8 + n]
        at += 12 + n
    width, height, *form = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert form == [8, 3, 0, 0, 0] and list(parts)[-1] == b"IEND"
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()  # no filters
    return np.frombuffer(parts[b"PLTE"], np.uint8).reshape(-1, 3)[rows[:, 1:]]


def test_the_report_is_drawn(tmp_path):
    """report.png: a curve for every kind of matrix on both sides; the one of the largest output error reaches highest."""
    run("opt", STORIES, "-o", tmp_path / "o", *OPT, "--calibration", TEXT, "--rotate", "none", "--recipe", "w4a4")
    picture = read_png(tmp_path / "o" / "report.png")
    rows = json.loads((tmp_path / "o" / "report.json").read_text())["matrices"]
    colors = {"q_proj": (0x1F, 0x77, 0xB4), "k_proj": (0xFF, 0x7F, 0x0E), "v_proj": (0x2C, 0xA0, 0x2C), "o_proj": (0x94, 0x67, 0xBD),
              "gate_proj": (0x8C, 0x56, 0x4B), "up_proj": (0xE3, 0x77, 0xC2), "down_proj": (0x17, 0xA2, 0xB8)}
    top = {}
    for half, key in ((0, "relative_error"), (1, "output_error")):
        panel = picture[60:495, 700 * half:700 * (half + 1)]
        for kind, color in colors.items():
            where = np.argwhere((panel == color).all(2))
            assert len(where) > 5 * 30, (kind, key)  # five layers' marks
            top[key, kind] = where[:, 0].min()
        worst = {kind: max(row[key] for row in rows if kind in row["tensor"]) for kind in colors}
        highest = min(top[key, kind] for kind in colors)
        assert top[key, max(worst, key=worst.get)] <= highest + 1
    assert (tmp_path / "o" / "report.png").stat().st_size < 60000


def fits(megabytes, tool, *args):
    """Does it run with so much memory of its own (files that are mapped do not count)?"""
    limit = megabytes * 1000000
    done = subprocess.run([str(BIN / f"sits2026-{tool}"), *map(str, args)], capture_output=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
    return done.returncode == 0


def test_memory_is_that_of_a_layer(tmp_path):
    """In what a model of 2 layers takes and 24 MB one of 48 layers is calibrated, rounded by GPTQ, measured and scored too; its 28 million
    weights take 57 MB in 16 bits, so the whole model does not fit there."""
    (tmp_path / "r.yaml").write_text("weights: int4\nactivations: int4\nscaling: none\nmethod: gptq\nclip: false\n")

    def optimises(n_layers, megabytes):
        shutil.rmtree(tmp_path / "o", ignore_errors=True)
        return fits(megabytes, "opt", tmp_path / f"m{n_layers}.gguf", "-o", tmp_path / "o", "--recipe", tmp_path / "r.yaml",
                    "--calibration", TEXT, "--ctx", 128, "--sensitivity-ctx", 64, "--windows", 1, "--calibration-windows", 4, "--rotate",
                    "none", "--threads", 2, "--hessian-memory", "1M")

    for n_layers in (2, 48):
        spec = numpy_llama.Spec(n_layers=n_layers, width=256, n_heads=4, n_kv_heads=2, head_dim=64, n_ff=512, n_vocab=512)
        make_gguf.write_gguf(tmp_path / f"m{n_layers}.gguf", spec, numpy_llama.random_weights(spec, seed=1))
    least = next(megabytes for megabytes in range(56, 400, 8) if optimises(2, megabytes))
    assert optimises(48, least + 24), least
    run("compile", tmp_path / "m48.gguf", "-o", tmp_path / "w16.bin", "--recipe", "w16a16", "--quiet")
    score = ("perplexity", "--model", tmp_path / "w16.bin", "--text", TEXT, "--ctx", 128, "--windows", 2, "--threads", 2)
    assert fits(least + 24, "eval", *score, "--by-layer") and not fits(least + 24, "eval", *score)


def test_a_cut_search_goes_on(tmp_path):
    """Killed after some sites were measured: the second run measures the others and finds what a whole run finds."""
    (tmp_path / "r.yaml").write_text(INPUTS)
    args = [str(BIN / "sits2026-opt"), str(STORIES), "-o", str(tmp_path / "o"), *map(str, OPT), "--calibration", str(TEXT),
            "--max-ppl-loss", "1", "--recipe", str(tmp_path / "r.yaml")]
    process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path, known = tmp_path / "o" / "search.json", {}
    end = time.time() + 300
    while time.time() < end and process.poll() is None and len(known) < 3:
        if path.exists():
            known = json.loads(path.read_text()).get("sensitivity", {})
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = json.loads(path.read_text())
    assert len(before["sensitivity"]) >= 3
    args[3] = str(tmp_path / "whole")
    subprocess.run(args, check=True, capture_output=True)
    args[3] = str(tmp_path / "o")
    subprocess.run(args, check=True, capture_output=True)
    after, whole = (json.loads((tmp_path / folder / "search.json").read_text()) for folder in ("o", "whole"))
    assert after == whole and after["sensitivity"].items() >= before["sensitivity"].items()
    assert (tmp_path / "o" / "model.bin").read_bytes() == (tmp_path / "whole" / "model.bin").read_bytes()


def test_another_text_of_the_same_name_starts_anew(tmp_path):
    """What was measured on one text is not taken for another."""
    text, args = tmp_path / "text.txt", ("--ctx", 256, "--windows", 2, "--calibration-windows", 2, "--rotate", "none", "--recipe", "w8a8")
    measured = []
    for at, folder in ((0, "o"), (0, "o"), (50000, "o"), (50000, "fresh")):
        text.write_bytes(TEXT.read_bytes()[at:at + 50000])
        run("opt", STORIES, "-o", tmp_path / folder, "--calibration", text, *args)
        measured.append(json.loads((tmp_path / folder / "search.json").read_text()))
    assert measured[0] == measured[1] and measured[2] == measured[3]
    assert measured[0]["key"] != measured[2]["key"] and measured[0]["perplexity"] != measured[2]["perplexity"]


@pytest.mark.parametrize("args,code,text", [
    (("--rotate", "some", *OPT), 2, "rotate"),
    (("--down-rotation", 96, *OPT), 2, "power of two"),
    (("--windows", 2), 2, "--calibration"),
    ((*OPT, "--recipe", "w5a5"), 2, "w5a5"),
    ((*OPT, "--recipe", "empty.yaml"), 2, "empty.yaml: no field of a recipe"),
    ((*OPT, "--ctx", 4096), 2, "ctx 4096 is more than"),
    ((*OPT, "--sensitivity-ctx", 4096), 2, "sensitivity-ctx 4096 is more than"),
    ((*OPT, "--windows", 100000, "--max-ppl-loss", 1), 2, "needs 200008 windows of text"),
    ((*OPT, "--rotate", "none", "--windows", 2, "--max-ppl-loss", 1e-9, "--recipe", "worse.yaml"), 2, "even with 8-bit inputs everywhere"),
])
def test_refusals(args, code, text, tmp_path):
    (tmp_path / "worse.yaml").write_text("weights: int4\nweight-group: 0\nweight-minimum: false\nclip: false\nscaling: none\n"
                                         "activations: int4\noutliers: 0\n")
    (tmp_path / "empty.yaml").write_text("")
    args = [tmp_path / a if a in ("worse.yaml", "empty.yaml") else a for a in args]
    assert text in run("opt", STORIES, "-o", tmp_path / "o", *args, code=code).stderr
