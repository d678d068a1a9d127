"""Patterns of abuse against both front ends (bench/abuse.py has them, and measures): refused, bounded in memory, and others are served."""
import os
import pathlib
import sys
import threading
import time

import pytest
from conftest import ROOT, SLOW, TINY
from grpc_client import channel, pb, start_both, stubs

sys.path.insert(0, str(ROOT / "bench"))
import abuse  # noqa: E402

SECONDS = 1
# What each pattern may be answered with, and the most memory that it may add, in MB. Patterns without statuses are cut or outlived.
LIMITS = {"two_lengths": ({"400"}, 20), "length_and_chunked": ({"400"}, 20), "folded_length": ({"400"}, 20), "large_header": ({"431"}, 20),
          "many_headers": ({"431"}, 20), "slow_headers": (None, 20), "slow_body": (None, 20), "deep_json": ({"400"}, 40),
          "many_values": ({"400", "413"}, 40), "empty_objects": ({"400"}, 100), "special_text": ({"400", "413"}, 400),
          "unread_streams": (None, 100), "idle_connections": (None, 60), "rapid_reset": (None, 200), "large_hpack": (None, 200),
          "large_message": (None, 100), "pings": (None, 100), "settings": (None, 60), "silent_grpc": (None, 60)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_both(tmp_path_factory, TINY, "--max-num-seqs", 64)
    server.target = abuse.Target(server.port, int(server.grpc.split(":")[1]))
    yield server
    assert server.stop() == 0


def memory_mb(server):
    text = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def test_every_pattern_has_limits():
    assert {p.__name__ for p in abuse.PATTERNS} == set(LIMITS)


@pytest.mark.parametrize("pattern", abuse.PATTERNS, ids=lambda p: p.__name__)
def test_others_are_served_and_memory_is_bounded(server, pattern):
    statuses, most_mb = LIMITS[pattern.__name__]
    before, peak, answers, out = memory_mb(server), 0, [], []

    def attack():
        out.append(pattern(server.target, time.time() + SECONDS))
    attacker = threading.Thread(target=attack)
    attacker.start()
    while attacker.is_alive():
        answers.append(server.complete(max_tokens=2)[0])
        peak = max(peak, memory_mb(server))
        time.sleep(0.01)
    attacker.join()
    n, seen = out[0]
    print(f"\n{pattern.__name__}: {n} {seen}, memory {before:.0f} -> {peak:.0f} MB, {len(answers)} others")
    assert n > 0 and answers and set(answers) == {200}
    if statuses:  # a client that is cut before it reads its answer is refused too
        assert set(seen) <= statuses | {"closed"} and set(seen) & statuses
    assert peak - before < most_mb
    assert server.get("/health")[0] == 200
    with channel(server) as ch:
        request = pb.GenerateRequest(prompt=["Once"], max_tokens=3, ignore_eos=True)
        stream = stubs.InferenceStub(ch).GenerateStream(request, timeout=30 * SLOW)
        assert list(stream)[-1].usage.completion_tokens == 3
    server.wait_quiet()


def test_nothing_is_left(server):
    end = time.time() + 30 * SLOW
    while server.metric("grpc_requests_in_flight") > 0 or server.metric("http_requests_in_flight") > 1:
        assert time.time() < end
        time.sleep(0.05)
    while len(os.listdir(f"/proc/{server.process.pid}/fd")) > 120:
        assert time.time() < end
        time.sleep(0.05)
