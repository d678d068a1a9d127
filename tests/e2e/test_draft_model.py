"""A draft model behind the daemon: answers do not change, whoever guesses; another tokenizer is refused by name."""
import json
import re
import subprocess

import pytest
from conftest import BIN, SMOL, TINY, Server

PROMPTS = ["Once upon a time", "The little dog ran", "One day, a girl named Lily", "Tom and Sam were", "In the big forest"]


def answers(server):
    out = []
    for i, prompt in enumerate(PROMPTS):
        for temperature in (0, 0.8):
            status, answer = server.complete(prompt, max_tokens=60, temperature=temperature, seed=i, return_token_ids=True)
            assert status == 200, answer
            out.append(answer["choices"][0]["token_ids"])
    return out


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model")
def test_same_answers(tmp_path):
    plain = Server(TINY, tmp_path / "plain", "--device", "cpu", "--speculative-tokens", 0)
    wanted = answers(plain)
    assert plain.stop() == 0
    drafted = Server(TINY, tmp_path / "drafted", "--device", "cpu", "--draft-model", TINY)
    assert answers(drafted) == wanted
    guessed = drafted.metric("spec_decode_num_model_tokens_total")
    drafts, accepted = (drafted.metric(f"spec_decode_num_{x}_total") for x in ("draft_tokens", "accepted_tokens"))
    assert guessed > 0 and drafts >= accepted > 0
    assert drafted.stop() == 0


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model")
def test_its_pages_come_out_of_the_cache_memory(tmp_path):
    def memory(server, use):
        return server.metric("device_memory_bytes", use=use)
    limit = 16 << 20
    plain = Server(TINY, tmp_path / "plain", "--device", "cpu", "--kv-cache-memory", limit)
    page, alone = plain.metric("kv_page_bytes"), memory(plain, "kv_pages")
    assert limit - page < alone <= limit and 'use="draft' not in plain.get("/metrics")[2].decode()
    assert plain.stop() == 0
    drafted = Server(TINY, tmp_path / "drafted", "--device", "cpu", "--draft-model", TINY, "--kv-cache-memory", limit)
    draft = memory(drafted, "draft_kv_pages")
    assert draft >= 8 * page and memory(drafted, "draft_weights") > 0
    assert limit - page < memory(drafted, "kv_pages") + draft <= limit
    assert drafted.stop() == 0
    run = subprocess.run([BIN / "sits2026d", "--model", TINY, "--draft-model", TINY, "--device", "cpu", "--port", "0",
                          "--max-model-len", "512", "--kv-cache-memory", str(int(draft))], capture_output=True, text=True)
    assert run.returncode == 1 and f"0 are there beside {int(draft)} for a draft model" in run.stderr, run.stderr[-500:]


@pytest.mark.skipif(not (TINY.exists() and SMOL.exists()), reason="no two models")
def test_another_tokenizer_is_refused(tmp_path):
    run = subprocess.run([BIN / "sits2026d", "--model", TINY, "--draft-model", SMOL, "--device", "cpu", "--port", "0"], capture_output=True,
                         text=True, timeout=120)
    assert run.returncode != 0 and "draft-model" in run.stderr and "vocabulary" in run.stderr, run.stderr[-500:]


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model")
def test_several_ranks_are_refused():
    run = subprocess.run([BIN / "sits2026d", "--model", TINY, "--draft-model", TINY, "--tensor-parallel-size", "2", "--device", "cpu",
                          "--port", "0"], capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and "draft-model does not go with tensor-parallel-size" in run.stderr, run.stderr[-500:]


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model")
def test_same_size_other_tokens_is_refused(tmp_path):
    """The same number of tokens, two of them exchanged."""
    other = tmp_path / "other"
    other.mkdir()
    for file in TINY.iterdir():
        (other / file.name).symlink_to(file)
    path = other / "tokenizer.json"
    text = json.loads(path.read_text())
    path.unlink()
    vocab = text["model"]["vocab"]
    by_id = {i: piece for piece, i in vocab.items()}
    a, b = by_id[300], by_id[301]
    vocab[a], vocab[b] = 301, 300
    path.write_text(json.dumps(text))
    run = subprocess.run([BIN / "sits2026d", "--model", TINY, "--draft-model", other, "--device", "cpu", "--port", "0"],
                         capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and re.search(r"draft-model .* has another tokenizer: token 300 ", run.stderr), run.stderr[-500:]
