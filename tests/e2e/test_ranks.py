"""A model cut over ranks of the CPU, threads of one process or processes: the same answers, what is refused, ranks that are lost."""
import concurrent.futures
import os
import signal
import socket
import subprocess
import time

import pytest

from conftest import BIN, SLOW, TINY, free_port, wait_for

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
    assert server.metric("engine_heartbeat_age_seconds") == float("inf")  # what the alert for a stuck engine looks at
    assert server.complete(max_tokens=1)[0] == 503
    server.stop()
    again = launch(TINY, "--tensor-parallel-size", 2, "--collective-timeout-s", 60)
    assert again.complete(**GREEDY)[0] == 200


def test_compressed_shares(launch):
    server = launch(TINY, "--tensor-parallel-size", 2, "--tensor-parallel-compress", "--collective-timeout-s", 60)
    assert server.complete(prompt="Once upon a time, " * 80, **GREEDY)[0] == 200
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--tensor-parallel-compress"], capture_output=True,
                          timeout=60 * SLOW)
    assert done.returncode == 1 and "tensor-parallel-size is 1" in done.stderr.decode(), done.stderr


# ---- processes ----

SECRET = "a secret of the tests"


@pytest.fixture
def follow():
    """Start followers; they are killed at the end if they still run."""
    processes = []

    def make(port, rank=1, count=2, secret=SECRET, **env):
        launcher = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen([BIN / "sits2026d", "--model", TINY, "--multi-node", "--threads", "1",
                                           "--node-connect-timeout-s", str(60 * SLOW)], stderr=subprocess.PIPE,
                                          env={**os.environ, **launcher, "SITS_NODE_SECRET": secret, **env}))
        return processes[-1]

    yield make
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()


def leader(launch, port, *options, count=2, **more):
    return launch(TINY, "--multi-node", "--node-rank", 0, "--node-count", count, "--leader-address", "127.0.0.1", "--leader-port",
                  port, "--threads", 1, *options, env={**os.environ, "SITS_NODE_SECRET": SECRET}, **more)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["1x", "-1", "65536", " 1", "99999999999999999999"])
def test_a_malformed_variable_of_a_launcher_is_refused(name, value):
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0", name: value}
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--multi-node"], capture_output=True, timeout=60 * SLOW,
                          env={**os.environ, **launcher, "SITS_NODE_SECRET": SECRET})
    assert done.returncode == 1 and f"the environment's {name}: '{value}" in done.stderr.decode(), done.stderr


def test_two_processes_answer_as_one(tiny, launch, follow):
    port = free_port()
    follower = follow(port)
    server = leader(launch, port, "--collective-timeout-s", 60, "--swap-space", "1MiB")
    for prompt in ["Once upon a time", "Lily and Tom", "The big dog was"]:
        want, got = (s.complete(prompt, **GREEDY)[1]["choices"][0]["text"] for s in (tiny, server))
        assert got == want
    server.wait_quiet()
    assert server.stop() == 0
    assert follower.wait(30 * SLOW) == 0
    assert b"the leader has stopped" in follower.stderr.read()


def test_a_signal_to_all_lets_the_leader_drain(launch, follow):
    port = free_port()
    alone = follow(port)
    time.sleep(0.5)
    alone.terminate()
    assert alone.wait(30 * SLOW) == -signal.SIGTERM  # nobody leads it yet
    follower = follow(port)
    server = leader(launch, port, "--collective-timeout-s", 60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.complete, "Once upon a time", **{**GREEDY, "max_tokens": 400})
        while server.metric("num_requests_running") == 0 and not reply.done():
            time.sleep(0.01)
        follower.terminate()
        server.process.terminate()
        status, answer = reply.result()
    assert status == 200 and answer["usage"]["completion_tokens"] == 400, answer
    assert server.process.wait(30 * SLOW) == 0
    assert follower.wait(30 * SLOW) == 0


def test_a_reload_of_a_follower_changes_nothing(launch, follow, tmp_path):
    """As systemctl reload sends it; systemd is told when the follower has joined, and that its watchdog is not fed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60 * SLOW)
        port = free_port()
        follower = follow(port, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="200000")
        server = leader(launch, port)
        assert manager.recv(4096).decode().split("\n") == ["READY=1", "STATUS=following the leader", "WATCHDOG_USEC=0"]
    follower.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert follower.poll() is None
    assert server.complete("Once upon a time", **GREEDY)[0] == 200
    assert server.stop() == 0
    assert follower.wait(30 * SLOW) == 0


def test_a_stop_while_followers_are_awaited_closes_the_audit_log(launch, tmp_path):
    log = tmp_path / "audit.log"
    for _ in range(2):
        server = leader(launch, free_port(), "--audit-log", log, wait=False)
        assert server.complete("Once upon a time")[0] == 503
        assert server.stop() == 0
    done = subprocess.run([BIN / "sits2026d", "--verify-audit", log], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode == 0 and done.stdout.startswith("ok: 6 lines") and "gaps" not in done.stdout, done.stdout + done.stderr


def test_a_second_signal_ends_a_follower(launch, follow):
    port = free_port()
    follower = follow(port)
    server = leader(launch, port)
    for _ in range(2):
        assert follower.poll() is None
        follower.terminate()
        time.sleep(0.5)
    assert follower.wait(30 * SLOW) == -signal.SIGTERM
    server.stop()


def test_a_killed_process_ends_requests_and_turns_health_red(launch, follow):
    port = free_port()
    follower = follow(port)
    server = leader(launch, port, "--collective-timeout-s", 4)
    assert server.complete(max_tokens=3)[0] == 200
    follower.kill()
    end = time.monotonic() + 10 * SLOW
    while server.get("/health/ready")[0] == 200:  # idle: no request tells
        assert time.monotonic() < end
        time.sleep(0.05)
    assert server.get("/health/live")[0] == 503
    begin = time.monotonic()
    assert server.complete(**GREEDY)[0] == 503
    assert time.monotonic() - begin < 10 * SLOW
    server.stop()


def test_a_process_that_stands_still_ends_requests(launch, follow):
    port = free_port()
    follower = follow(port)
    server = leader(launch, port, "--collective-timeout-s", 4)
    follower.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert server.complete(**GREEDY)[0] == 503
    assert time.monotonic() - begin < 10 * SLOW
    assert server.get("/health/ready")[0] == 503
    server.stop()
    follower.send_signal(signal.SIGCONT)
    assert follower.wait(30 * SLOW) == 1


def test_a_follower_that_ends_too_soon_may_come_back(launch, follow):
    """While the leader waits for others, its place is free again."""
    port = free_port()
    server = leader(launch, port, count=4, wait=False)
    first = follow(port, rank=1, count=4)
    wait_for(lambda: "rank 1 of 4 is here" in server.text(), 60)
    first.kill()
    wait_for(lambda: "rank 1 has left before all were here" in server.text(), 60)
    for rank in (1, 2, 3):
        follow(port, rank=rank, count=4)
    server.wait_ready()
    assert server.complete(max_tokens=3, ignore_eos=True)[0] == 200


def test_a_killed_leader_ends_its_followers(launch, follow):
    port = free_port()
    follower = follow(port)
    server = leader(launch, port)
    server.process.kill()
    assert follower.wait(10 * SLOW) == 1
    assert b"a process is lost" in follower.stderr.read()


def test_a_wrong_secret_is_turned_away(launch, follow):
    port = free_port()
    stranger = follow(port, secret="another secret, as long")
    server = leader(launch, port, wait=False)
    assert stranger.wait(60 * SLOW) == 1
    assert b"does not know the secret" in stranger.stderr.read()
    assert server.get("/health/ready")[0] == 503
    follow(port)
    server.wait_ready()
    assert server.complete(max_tokens=3)[0] == 200


@pytest.mark.parametrize("options,text", [
    (["--node-rank", "0", "--node-count", "2", "--node-secret", SECRET], "needs leader-address"),
    (["--node-rank", "0", "--node-count", "2", "--leader-address", "127.0.0.1"], "needs node-secret"),
    (["--node-rank", "2", "--node-count", "2", "--leader-address", "127.0.0.1", "--node-secret", SECRET], "process 2 of 2"),
    (["--node-secret", SECRET, "--leader-address", "127.0.0.1"], "must say which"),
    (["--node-rank", "0", "--node-count", "2", "--leader-address", "127.0.0.1", "--node-secret", "short"], "16 to 256 bytes"),
    (["--node-rank", "0", "--node-count", "2", "--leader-address", "127.0.0.1", "--node-secret", SECRET, "--tensor-parallel-size", "4"],
     "the number of processes"),
])
def test_what_multi_node_wants(options, text):
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--multi-node", "--node-connect-timeout-s", "1",
                           *options], capture_output=True, timeout=60 * SLOW)
    assert done.returncode == 1 and text in done.stderr.decode(), done.stderr
