"""fp4-sparse behind the daemon: a long prompt keeps to its pages and is answered the same again; a budget without such pages is refused."""
import subprocess

import pytest
from conftest import BIN, SMOL, TINY, Server


@pytest.mark.skipif(not SMOL.exists(), reason="no SmolLM2")
def test_a_long_prompt_keeps_to_its_budget(tmp_path):
    server = Server(SMOL, tmp_path / "log", "--device", "cpu", "--kv-cache-dtype", "fp4-sparse", "--kv-page-budget", 8, "--max-num-seqs", 1,
                    "--max-model-len", 2048)
    assert server.metric("kv_pages_free") == 8  # all that one sequence may ever hold
    prompt = " ".join(f"The number {i} is followed by {i + 1}." for i in range(60))
    answers = [server.complete(prompt, max_tokens=8, temperature=0, return_token_ids=True) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200]
    usage, n_pages = answers[0][1]["usage"], 8
    assert usage["prompt_tokens"] > 64 * n_pages and usage["completion_tokens"] > 0
    assert answers[0][1]["choices"][0]["token_ids"] == answers[1][1]["choices"][0]["token_ids"]
    computed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    dropped = (computed + 63) // 64 - n_pages  # a page is given up when the next one is begun
    server.wait_ended(2)
    assert server.metric("kv_pages_dropped_total") == 2 * dropped
    assert server.stop() == 0


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model")
@pytest.mark.parametrize("options,texts", [
    (["--kv-page-budget", "16"], ["kv-page-budget", "fp4-sparse"]),
    (["--kv-cache-dtype", "fp4-sparse", "--kv-page-budget", "5"], ["kv-page-budget", "below 8 pages"]),
    (["--kv-cache-dtype", "fp4-sparse", "--tensor-parallel-size", "2"], ["as fp4-sparse over several ranks"])])
def test_refusals(options, texts):
    run = subprocess.run([BIN / "sits2026d", "--model", TINY, "--device", "cpu", "--port", "0", *options], capture_output=True, text=True,
                         timeout=120)
    assert run.returncode != 0 and all(text in run.stderr for text in texts), run.stderr[-500:]
