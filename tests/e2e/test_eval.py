"""sits2026-eval compare and choice against numpy on raw logits: perplexity, divergence, agreement, log-likelihoods of choices."""
import json
import os
import subprocess

import numpy as np
import pytest

from conftest import BIN, DATA

STORIES = DATA / "models" / "stories260K" / "hf"
TEXT = DATA / "text" / "pride_and_prejudice.txt"
WIKITEXT = DATA / "text" / "wikitext2.test.raw"
CTX, WINDOWS = 128, 3

pytestmark = pytest.mark.skipif(not STORIES.exists() or not TEXT.exists(), reason="shared test data absent")


def run(tool, *args, code=0):
    done = subprocess.run([str(BIN / f"sits2026-{tool}"), *map(str, args)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def forced(model, ids, folder):
    run("eval", "forced", "--model", model, "--ids", json.dumps(ids), "--out", folder / "logits.bin")
    rows = np.fromfile(folder / "logits.bin", dtype=np.float32).reshape(len(ids), -1).astype(np.float64)
    return rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "w4a8.bin"
    run("compile", STORIES, "-o", path, "--recipe", "w4a8", "--quiet")
    return path


def test_compare_is_what_numpy_says(engine, tmp_path):
    run("eval", "compare", "--models", f"{STORIES},{engine}", "--text", TEXT, "--ctx", CTX, "--windows", WINDOWS, "--skip-windows", 1,
        "--out", tmp_path / "c.json")
    result = json.loads((tmp_path / "c.json").read_text())
    run("eval", "tokenize", "--model", STORIES, "--text", TEXT, "--out", tmp_path / "ids.bin")
    ids = np.fromfile(tmp_path / "ids.bin", dtype=np.int32)
    first = CTX // 2
    nll, right, divergence, agree = np.zeros((2, WINDOWS)), np.zeros(2), np.zeros(WINDOWS), 0
    for w in range(WINDOWS):
        window = ids[(w + 1) * CTX:(w + 2) * CTX].tolist()
        window[0] = 1  # BOS in place of the first token
        logp = [forced(model, window[:-1], tmp_path)[first:] for model in (STORIES, engine)]
        wanted = window[first + 1:]
        for k in range(2):
            nll[k, w] = -logp[k][np.arange(len(wanted)), wanted].mean()
            right[k] += (logp[k].argmax(1) == wanted).sum()
        divergence[w] = (np.exp(logp[0]) * (logp[0] - logp[1])).sum(1).mean()
        agree += (logp[0].argmax(1) == logp[1].argmax(1)).sum()
    total = WINDOWS * (CTX - 1 - first)
    reference, row = result["rows"]
    assert result["windows"] == WINDOWS and reference["kl"] == 0 and reference["top1_agreement"] == 1
    for k, found in enumerate((reference, row)):
        assert np.allclose(found["window_nll"], nll[k], rtol=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(nll[k].mean()), rel=1e-5)
        assert found["accuracy"] == pytest.approx(right[k] / total)
    assert np.allclose(row["window_kl"], divergence, rtol=1e-3)
    assert row["kl"] == pytest.approx(divergence.mean(), rel=1e-3) and row["kl"] > 1e-3
    assert row["top1_agreement"] == pytest.approx(agree / total)
    difference = nll[1] - nll[0]
    assert row["delta_percent"] == pytest.approx(100 * np.expm1(difference.mean()), rel=1e-3)
    assert row["delta_error_percent"] == pytest.approx(100 * difference.std(ddof=1) / np.sqrt(WINDOWS), rel=1e-3)
    inspected = run("compile", "--inspect", engine).stdout
    assert row["weight_bytes"] < reference["weight_bytes"] / 3 and "w4a8" in inspected


def test_compare_compiles_recipes_and_stores_caches(engine, tmp_path):
    """A recipe of the list is the engine file that the compiler makes of it; @KV decides the cache; temporary files go."""
    (tmp_path / "t").mkdir()
    done = subprocess.run([str(BIN / "sits2026-eval"), "compare", "--model", str(STORIES), "--models", f"w16a16,w4a8,{engine},w4a8@int4",
                           "--text", str(TEXT), "--ctx", str(CTX), "--windows", "2"], capture_output=True, text=True,
                          env={"TMPDIR": str(tmp_path / "t")})
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[3:]]
    assert [row[0] for row in rows] == ["w16a16", "w4a8", "w4a8.bin", "w4a8@int4"]
    assert rows[1][1:9] == rows[2][1:9] and rows[3][2] != rows[1][2]
    assert not list((tmp_path / "t").iterdir())


def test_parts_join_to_the_whole(engine, tmp_path):
    """Windows compared in three runs, joined in any order, are the table of one run over all of them."""
    def compare(out, skip, n):
        run("eval", "compare", "--models", f"{STORIES},{engine}", "--text", TEXT, "--ctx", CTX, "--windows", n, "--skip-windows", skip,
            "--out", tmp_path / out)
        return json.loads((tmp_path / out).read_text())

    whole = compare("whole.json", 2, 6)
    compare("a.json", 2, 2), compare("b.json", 4, 1), compare("c.json", 5, 3)
    parts = ",".join(str(tmp_path / name) for name in ("c.json", "a.json", "b.json"))
    done = run("eval", "join", "--parts", parts, "--out", tmp_path / "joined.json")
    joined = json.loads((tmp_path / "joined.json").read_text())
    assert joined["spans"] == [[2, 2], [4, 1], [5, 3]] and joined["windows"] == 6 and joined["skip_windows"] == 2
    for found, want in zip(joined["rows"], whole["rows"], strict=True):
        rate = found.pop("tokens_per_s")
        assert 0 < rate and want.pop("tokens_per_s") > 0
        assert set(found) == set(want)
        for key, value in want.items():
            assert found[key] == (pytest.approx(value, rel=1e-12, abs=1e-12) if isinstance(value, (float, list)) else value), key
    assert "6 windows of 128 tokens" in done.stdout and "w4a8.bin" in done.stdout


@pytest.mark.parametrize("change,text", [
    (None, "is in two parts"),                                    # the same windows twice
    (lambda r: r.update(ctx=256), "'ctx'"),
    (lambda r: r.update(text="other.txt"), "'text'"),
    (lambda r: r["rows"][1].update(name="other.bin"), "'name'"),
    (lambda r: r["rows"].pop(), "'rows'"),
    (lambda r: r["rows"][0]["window_nll"].pop(), "no result"),
    (lambda r: r["rows"][0]["window_kl"].__setitem__(0, "x"), "no result"),
    (lambda r: r.pop("skip_windows"), "no result"),
    (lambda r: r.update(windows=-1), "no result"),
    (lambda r: r["rows"][1].pop("accuracy"), "'accuracy'"),
    (lambda r: r["rows"][0]["window_nll"].__setitem__(0, -1), "'window_nll'"),
    (lambda r: r["rows"][1]["window_nll"].__setitem__(0, 1e308), "'window_nll'"),
    (lambda r: r["rows"][0]["window_kl"].__setitem__(0, -1), "'window_kl'"),
    (lambda r: r["rows"][0].update(accuracy=1.5), "'accuracy'"),
    (lambda r: r["rows"][0].update(weight_bytes=-1), "'weight_bytes'"),
    (lambda r: r["rows"][1].update(tokens_per_s=-1), "'tokens_per_s'"),
    (lambda r: r["rows"][1].update(tokens_per_s=0), "'tokens_per_s'"),
    (lambda r: r["rows"][1].update(share_4x4=2), "'share_4x4'"),
    (lambda r: r.update(ids="many"), "'ids'"),
])
def test_join_refuses(change, text, engine, tmp_path):
    run("eval", "compare", "--models", f"{STORIES},{engine}", "--text", TEXT, "--ctx", CTX, "--windows", 1, "--out", tmp_path / "a.json")
    result = json.loads((tmp_path / "a.json").read_text())
    if change:
        result["skip_windows"] = 1
        change(result)
    (tmp_path / "b.json").write_text(json.dumps(result))
    done = subprocess.run([str(BIN / "sits2026-eval"), "join", "--parts", f"{tmp_path}/a.json,{tmp_path}/b.json"], capture_output=True,
                          text=True)
    assert done.returncode in (1, 2) and text in done.stderr, done.stderr


@pytest.mark.parametrize("recipe,kv", [("w16a16", "f16"), ("w4a8", "int8"), ("w4a4", "f16")])
def test_layer_by_layer_is_the_whole_model(recipe, kv, tmp_path):
    """The same likelihoods to the bit, when both take the text in steps of as many tokens."""
    run("compile", STORIES, "-o", tmp_path / "m.bin", "--recipe", recipe, "--calibration", TEXT, "--calibration-ctx", 256, "--quiet")
    args = ("--model", tmp_path / "m.bin", "--text", TEXT, "--ctx", 256, "--windows", 3, "--skip-windows", 1, "--kv-cache-dtype", kv,
            "--json")
    whole = json.loads(run("eval", "perplexity", *args, "--batch-tokens", 64).stdout)
    layers = json.loads(run("eval", "perplexity", *args, "--by-layer").stdout)
    assert layers["window_nll"] == whole["window_nll"] and layers["accuracy"] == whole["accuracy"]
    assert "CPU only" in run("eval", "perplexity", *args, "--by-layer", "--device", "cuda", code=1).stderr


def test_recipes_of_one_name_are_two(tmp_path):
    """Files of the same name in two folders are two recipes."""
    for folder, weights in (("a", "int8"), ("b", "int4")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.yaml").write_text(f"weights: {weights}\n")
    first, second = json.loads(run("eval", "compare", "--model", STORIES, "--models", f"{tmp_path}/a/r.yaml,{tmp_path}/b/r.yaml", "--text",
                                   TEXT, "--ctx", CTX, "--windows", 1, "--json").stdout)["rows"]
    assert first["name"] == second["name"] == "r.yaml" and second["weight_bytes"] < 0.9 * first["weight_bytes"]


def test_a_pipe_is_not_replaced(tmp_path):
    """Results are renamed into place: what is no plain file there stays."""
    os.mkfifo(tmp_path / "pipe")
    for args in (("eval", "compare", "--models", STORIES, "--text", TEXT, "--ctx", CTX, "--windows", 1, "--out"),
                 ("compile", STORIES, "--recipe", "w8a8", "-o")):
        assert "not a regular file" in run(*args, tmp_path / "pipe", code=1).stderr
        assert [file.name for file in tmp_path.iterdir()] == ["pipe"] and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("args,code,text", [
    (("--models", "w16a16,nothing.bin", "--model", STORIES), 1, "nothing.bin"),
    (("--models", "w16a16"), 2, "give --model"),
    (("--models", "w16a16,,w4a8", "--model", STORIES), 2, "empty"),
    (("--models", f"{STORIES}@int3"), 1, "int3"),
    (("--models", "w4a4", "--model", STORIES), 2, "--calibration"),
    (("--model", STORIES), 2, "--models"),
    (("--models", STORIES, "--one-device"), 2, "one-device goes with tensor-parallel-size"),
    (("--models", "empty.yaml", "--model", STORIES), 2, "no field of a recipe"),
])
def test_compare_refuses(args, code, text, tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    args = [tmp_path / a if a == "empty.yaml" else a for a in args]
    assert text in run("eval", "compare", "--text", TEXT, "--ctx", CTX, "--windows", 1, *args, code=code).stderr


@pytest.mark.parametrize("args", [
    ("forced", "--ids", "[1]"), ("greedy", "--prompts", "prompts.json"), ("tokenize", "--text", TEXT),
])
def test_commands_of_one_model_say_that_they_need_it(args):
    assert "no model: give --model" in run("eval", *args, "--models", STORIES, code=2).stderr


TASKS = [
    {"prompt": "Once upon a time, there was a little", "choices": [" girl", " xqzk"], "answer": 0},
    {"prompt": "Lily was sad because her", "choices": [" of the of", " toy", " mom was sad and she"], "answer": 1, "source": "ours"},
    {"prompt": "The end", "choices": [".", " zebra of"], "answer": 1},
]


def test_choice_is_what_numpy_says(engine, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n\n".join(json.dumps(task) for task in TASKS) + "\n \n")
    result = json.loads(run("eval", "choice", "--models", f"{STORIES},{engine}", "--tasks", tasks, "--ctx", CTX, "--json").stdout)
    assert result["tasks"] == 3
    for model, row in zip((STORIES, engine), result["rows"]):
        n_raw = n_normalised = 0
        for task, item in zip(TASKS, row["items"]):
            scores = []
            for choice in task["choices"]:
                (tmp_path / "t.txt").write_text(task["prompt"])
                prompt = json.loads(run("eval", "tokenize", "--model", STORIES, "--text", tmp_path / "t.txt").stdout)
                (tmp_path / "t.txt").write_text(task["prompt"] + choice)
                ids = json.loads(run("eval", "tokenize", "--model", STORIES, "--text", tmp_path / "t.txt").stdout)
                assert ids[:len(prompt)] == prompt  # so that the choice's ids are those after it
                logp = forced(model, ids, tmp_path)
                scores.append(sum(logp[i - 1, ids[i]] for i in range(len(prompt), len(ids))))
            assert np.allclose(item["log_likelihood"], scores, rtol=1e-4, atol=1e-3)
            normalised = [score / len(choice.encode()) for score, choice in zip(scores, task["choices"])]
            assert item["raw"] == int(np.argmax(scores)) and item["normalised"] == int(np.argmax(normalised))
            n_raw += item["raw"] == task["answer"]
            n_normalised += item["normalised"] == task["answer"]
        assert row["accuracy"] == pytest.approx(n_raw / 3) and row["accuracy_normalised"] == pytest.approx(n_normalised / 3)


@pytest.mark.parametrize("line,text", [
    ("[1]", "no JSON object"),
    ('{"prompt": "a", "choices": ["b"], "answer": 0}', "two or more"),
    ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', "empty"),
    ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "'answer'"),
    ('{"choices": ["b", "c"], "answer": 1}', "'prompt'"),
    ('{"prompt": "a", "choices": ["b", "c"], "answer"', "line 2"),
])
def test_choice_refuses(line, text, tmp_path):
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASKS[0]) + "\n" + line)
    done = run("eval", "choice", "--model", STORIES, "--tasks", tmp_path / "tasks.jsonl", "--ctx", CTX, code=2)
    assert text in done.stderr and "line 2" in done.stderr
    assert "longer than" in run("eval", "choice", "--model", STORIES, "--tasks", long_task(tmp_path), "--ctx", 16, code=1).stderr


def long_task(folder):
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "Once upon a time " * 9, "choices": ["a", "b"], "answer": 0}))
    return folder / "long.jsonl"
