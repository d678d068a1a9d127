"""A model cut over several ranks (of the CPU): the same answers, sizes that do not divide, and a rank that hangs."""
import os
import subprocess
import time

from conftest import BIN, SLOW, TINY

GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


def test_answers_are_those_of_one_device(tiny, launch):
    server = launch(TINY, "--tensor-parallel-size", 2, "--collective-timeout-s", 60)
    prompts = ["Once upon a time", "Lily and Tom", "The big dog was"]
    want = [tiny.complete(prompt, **GREEDY)[1]["choices"][0]["text"] for prompt in prompts]
    got = [server.complete(prompt, **GREEDY)[1]["choices"][0]["text"] for prompt in prompts]
    assert got == want
    server.wait_quiet()
    assert server.stop() == 0


def test_sizes_that_do_not_divide_are_refused(tmp_path):
    for n, text in [("3", "8 heads do not divide"), ("9", "is outside 1..8")]:
        done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--tensor-parallel-size", n], capture_output=True,
                              timeout=60 * SLOW)
        assert done.returncode == 1 and text in done.stderr.decode(), done.stderr
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--tensor-parallel-size", "2",
                           "--tensor-parallel-devices", "0"], capture_output=True, timeout=60 * SLOW)
    assert done.returncode == 1 and "does not name 2 devices" in done.stderr.decode(), done.stderr


def test_a_hung_rank_ends_requests_and_turns_health_red(launch):
    server = launch(TINY, "--tensor-parallel-size", 2, "--collective-timeout-s", 1, env={**os.environ, "SITS_RANK_FAULT": "1:12"})
    begin = time.monotonic()
    status, answer = server.complete(**GREEDY)
    assert time.monotonic() - begin < 10 * SLOW
    assert status == 503, answer
    assert server.get("/health/ready")[0] == 503
    assert server.complete(max_tokens=1)[0] == 503
    server.stop()
    again = launch(TINY, "--tensor-parallel-size", 2, "--collective-timeout-s", 60)
    assert again.complete(**GREEDY)[0] == 200
