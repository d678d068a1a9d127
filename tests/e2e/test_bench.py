"""sits2026-bench: what it cannot measure is refused, not reported."""
import subprocess

import pytest
from conftest import BIN, DATA, SLOW, TINY

TEXT = DATA / "text" / "pride_and_prejudice.txt"


@pytest.mark.skipif(not TINY.exists() or not TEXT.exists(), reason="shared test data absent")
@pytest.mark.parametrize("args,text", [
    (("prefix", "--prompt", "500", "--chats", "2"), "more than the 512"),
    (("stall", "--prompt", "3000"), "more than the 512"),
    (("speculation", "--text", TEXT, "--texts", "1", "--output", "2000"), "more than the 512"),
    (("stall", "--prompt", "100", "--targets", "fast"), "--targets"),
])
def test_engine_refuses(args, text):
    done = subprocess.run([str(BIN / "sits2026-bench"), "engine", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--scenario",
                           *map(str, args)], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode == 1 and text in done.stderr, (done.returncode, done.stderr)
    assert "LeakSanitizer" not in done.stderr, done.stderr
    assert not done.stdout


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
@pytest.mark.parametrize("args,text", [
    (("--prefill", "513", "--batch", ""), "--prefill 513 is more than the model's context of 512"),
    (("--prefill", "", "--context", "500", "--steps", "13"), "--context 500 and --steps 13 are together more"),
    (("--prefill", "512", "--batch", "", "--context", "500", "--steps", "20", "--repeat", "1"), None),
    (("--prefill", "", "--batch", "1", "--context", "500", "--steps", "12"), None),
    (("--prefill", "4", "--batch", "", "--one-device"), "--one-device goes with --tensor-parallel-size"),
])
def test_throughput_keeps_to_the_models_context(args, text):
    done = subprocess.run([str(BIN / "sits2026-bench"), "throughput", "--model", str(TINY), "--device", "cpu", "--threads", "1", *args],
                          capture_output=True, text=True, timeout=60 * SLOW)
    assert (done.returncode in (1, 2) and text in done.stderr and not done.stdout) if text else done.returncode == 0, done.stderr


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
@pytest.mark.parametrize("args,text", [
    (("--context", "512"), "--context 512 and the token after it are more than the model's context of 512"),
    (("--context", "1000000"), "--context 1000000 and the token after it"),
    (("--depths", "1,500", "--chunks", "1,13"), "--depths 500 and --chunks 13 are together more than the model's context of 512"),
    (("--context", "511", "--depths", "500", "--chunks", "12"), None),
    (("--context", "512", "--decodes", "0"), None),
])
def test_steps_keep_to_the_models_context(args, text):
    done = subprocess.run([str(BIN / "sits2026-bench"), "steps", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--rounds", "1",
                           "--depths", "1", "--chunks", "1", *args], capture_output=True, text=True, timeout=60 * SLOW)
    assert (done.returncode == 1 and text in done.stderr and not done.stdout) if text else done.returncode == 0, done.stderr


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
@pytest.mark.parametrize("sizes", ["4294967297", "1,99999999999", "0", "8,,1", "x"])
def test_lists_hold_sizes(sizes):
    done = subprocess.run([str(BIN / "sits2026-bench"), "steps", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--rounds", "1",
                           "--depths", "1", "--chunks", sizes], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode == 2 and "lists such as" in done.stderr and not done.stdout, (done.returncode, done.stderr)
