"""Patterns of abuse against both front ends (bench/abuse.py has them, and measures): refused, bounded in memory, and others are served."""
import os
import pathlib
import sys
import threading
import time

import pytest
from conftest import ROOT, SLOW, TINY, wait_for
from grpc_client import begin, channel, pb, start_both, stubs

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


def cuts(server, why):
    return sum("a connection was cut" in line and why in line for line in server.text().splitlines())


def test_a_connection_that_takes_its_calls_back_is_cut(server):
    """20,000 calls on one connection, each opened and reset: no more of them are begun than a connection could have open, and some."""
    begun = server.metric("grpc_requests_in_flight")
    opened = b"".join(abuse.frame(1, 4, at, abuse.call_headers(abuse.GENERATE)) + abuse.frame(3, 0, at, b"\0\0\0\x08")
                      for at in range(1, 40000, 2))
    before, sock = memory_mb(server), abuse.h2(server.target)
    try:
        sock.sendall(opened)
    except OSError:
        pass  # cut while it sends
    wait_for(lambda: cuts(server, "takes them back") + cuts(server, "more calls than streams"), 30)
    wait_for(lambda: server.metric("grpc_requests_in_flight") <= begun, 60)
    assert memory_mb(server) - before < 200
    sock.close()
    server.wait_quiet()


def test_a_call_is_taken_back_once(server):
    """700 calls opened and reset are fewer than the 1,024 that a connection may take back in a second, however fast they come."""
    n_cuts, sock = cuts(server, ""), server.target.connect(server.target.grpc)
    begun = server.metric("grpc_requests_in_flight")
    calls = b"".join(abuse.frame(1, 4, at, abuse.call_headers(abuse.GENERATE)) + abuse.frame(3, 0, at, b"\0\0\0\x08")
                     for at in range(1, 1401, 2))
    sock.sendall(abuse.PREFACE + abuse.frame(4, 0, 0) + calls)
    sock.settimeout(60 * SLOW)
    sock.sendall(abuse.frame(6, 0, 0, b"01234567"))
    received = b""
    while abuse.frame(6, 1, 0, b"01234567") not in received:  # answered in order: all of them have come
        more = sock.recv(65536)
        assert more, "the connection was closed"
        received += more
    wait_for(lambda: server.metric("grpc_requests_in_flight") <= begun, 60)
    sock.close()
    assert cuts(server, "") == n_cuts
    server.wait_quiet()


def test_calls_that_are_left_are_not_taken_for_abuse(server):
    """A client may leave as many calls at once as it may have open on a connection."""
    n_cuts = cuts(server, "")
    with channel(server) as ch:
        for _ in range(3):
            request = pb.GenerateRequest(prompt=["Once"], max_tokens=400, ignore_eos=True)
            calls = [stubs.InferenceStub(ch).GenerateStream(request, timeout=60 * SLOW) for _ in range(100)]
            for call in calls:
                call.cancel()
        request = pb.GenerateRequest(prompt=["Once"], max_tokens=3, ignore_eos=True)
        assert list(stubs.InferenceStub(ch).GenerateStream(request, timeout=60 * SLOW))[-1].usage.completion_tokens == 3
    assert cuts(server, "") == n_cuts, [line for line in server.text().splitlines() if "was cut" in line][n_cuts:]
    server.wait_quiet()


HEADER_START = b"\x00\x01x\x7f\x81\xff\x3f"  # a literal header whose value is to have 1 MB


def send_header(sock, stream, before=b""):
    """A header block of 1 MB that does not end. The connection may be cut meanwhile."""
    try:
        sock.sendall(before + abuse.frame(1, 0, stream, abuse.call_headers(abuse.GENERATE) + HEADER_START) +
                     abuse.frame(9, 0, stream, b"a" * 16384) * 62)
    except OSError:
        pass


def test_headers_without_end_are_cut(server):
    """100 connections send 1 MB of a header each and hold it: all together may have sent 16 MB."""
    n_cuts, before, socks = cuts(server, "a call that is let in"), memory_mb(server), []
    for _ in range(100):
        sock = abuse.h2(server.target)
        socks.append(sock)
        send_header(sock, 1)
    wait_for(lambda: cuts(server, "a call that is let in") - n_cuts >= 25, 60)
    assert memory_mb(server) - before < 300
    for sock in socks:
        sock.close()


def refused_call(target):
    """A connection on which a call without a key was answered."""
    sock = target.connect(target.grpc)
    sock.sendall(abuse.PREFACE + abuse.frame(4, 0, 0) + abuse.frame(1, 5, 1, abuse.call_headers(abuse.GENERATE)))
    file, kind = sock.makefile("rb"), None
    while kind != 1:  # the trailers
        head = file.read(9)
        assert len(head) == 9, "the connection was closed"
        kind = head[3]
        file.read(int.from_bytes(head[:3], "big"))
    return sock


def keyed(begin):
    server = begin(TINY, "--api-key", "a-secret-of-the-test")
    return server, abuse.Target(server.port, int(server.grpc.split(":")[1]))


def test_a_refused_call_does_not_end_the_limit(begin):
    """Where keys are asked: a call without one is answered, and what the connection sends after it is limited as before its first call."""
    server, target = keyed(begin)
    socks = [refused_call(target) for _ in range(100)]
    assert cuts(server, "") == 0
    for sock in socks:
        threading.Thread(target=abuse.swallow, args=(sock,), daemon=True).start()
        send_header(sock, 3)
    wait_for(lambda: cuts(server, "a call that is let in") >= 25, 60)
    for sock in socks:
        sock.close()


def test_refused_calls_do_not_hide_what_is_sent_behind_them(begin):
    """Calls without a key and the header that does not end in one go: it was received before the server looked at the calls."""
    server, target = keyed(begin)
    headers = abuse.call_headers(abuse.GENERATE)
    calls = abuse.PREFACE + abuse.frame(4, 0, 0) + b"".join(abuse.frame(1, 5, i, headers) for i in range(1, 17, 2))
    socks = []
    for _ in range(100):
        sock = target.connect(target.grpc)
        socks.append(sock)
        threading.Thread(target=abuse.swallow, args=(sock,), daemon=True).start()
        send_header(sock, 17, calls)
    wait_for(lambda: cuts(server, "a call that is let in") >= 80, 60)  # those that are left may have sent 16 MB together
    for sock in socks:
        sock.close()
