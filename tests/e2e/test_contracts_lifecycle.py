"""Contracts of a request's and the daemon's life: disconnects, leaks, draining, health. One test per line of the list, named after it."""
import json
import re
import signal
import socket
import struct
import threading
import time

import pytest
from conftest import SLOW, SMOL, TINY, events, read_response, wait_for

TEXT = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 8}


def open_request(server, body, path=TEXT, receive_bytes=None):
    """receive_bytes: what the client's kernel keeps of the answer, so that a stream waits for its reader."""
    data = json.dumps(body).encode()
    sock = server.connect(receive_bytes=receive_bytes)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() +
                 data)
    return sock


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Slow enough for requests to be caught in the middle."""
    from conftest import start
    server = start(tmp_path_factory, SMOL, "--served-model-name", "smol", "--max-model-len", 4096, "--max-num-seqs", 16,
                   "--max-queued-requests", 4, "--max-num-batched-tokens", 128)
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("how,stream", [("close", True), ("close", False), ("reset", True), ("reset", False), ("half-close", False)])
def test_contract_57_a_client_that_leaves_ends_its_work(slow, stream, how):
    sock = open_request(slow, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 4, "stream": stream})
    wait_for(lambda: slow.metric("num_requests_running") > 0)
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()
    start = time.time()
    slow.wait_quiet(5 * SLOW)
    assert time.time() - start < 3 * SLOW
    sock.close()


@pytest.mark.parametrize("when", ["at once", "in the queue", "while it runs"])
def test_contract_57_a_client_that_reads_on_gets_its_stream(tiny, slow, when):
    """Who ends its sending side behind the request of a stream, as nc -N does, has not left. Who then leaves is seen."""
    server, busy, body = tiny, [], {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
    if when == "in the queue":
        server = slow
    else:
        body.update(n=24, logprobs=20)  # more than is kept for a client that does not read: its stream cannot end before
    before, stalls = server.metric("client_disconnects_total"), server.metric("slow_reader_stalls_total")
    if when == "in the queue":
        busy = [open_request(server, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 16, "stream": True})]
        wait_for(lambda: server.metric("num_requests_running") > 0)
    with open_request(server, body, receive_bytes=4096) as sock:
        if when == "in the queue":
            wait_for(lambda: server.metric("num_requests_waiting") > 0)
        if when == "while it runs":
            wait_for(lambda: server.metric("slow_reader_stalls_total") > stalls)
        sock.shutdown(socket.SHUT_WR)
        for other in busy:
            time.sleep(0.05)
            assert server.metric("num_requests_waiting") > 0
            other.shutdown(socket.SHUT_WR)
            time.sleep(0.05)
            other.close()
        answer = sock.makefile("rb").read()
    assert answer.count(b"data: ") >= 20 and b"data: [DONE]" in answer and b": ping" in answer, answer
    server.wait_quiet(5 * SLOW)
    assert server.metric("client_disconnects_total") == before + len(busy)


@pytest.mark.parametrize("path,body", [("/tokenize", {"prompt": "Once"}), (TEXT, {"prompt": "Once", "max_tokens": 2, "stream": True})])
def test_contract_57_many_clients_that_read_on_are_answered(tiny, path, body):
    """On a busy server the end of the sending side is there before the request is read."""
    statuses = []

    def ask():
        for _ in range(20):
            with open_request(tiny, body, path) as sock:
                sock.shutdown(socket.SHUT_WR)
                statuses.append(read_response(sock.makefile("rb"))[0])
    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 320


def test_contract_57_a_client_that_reads_on_and_leaves_while_it_waits(slow):
    """Nothing is said at its second end, and its stream is silent in the queue: it is seen all the same, long before a comment is due."""
    busy = open_request(slow, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 16, "stream": True})
    wait_for(lambda: slow.metric("num_requests_running") > 0)
    sock = open_request(slow, {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True})
    wait_for(lambda: slow.metric("num_requests_waiting") > 0)
    sock.shutdown(socket.SHUT_WR)
    got = b""
    while b": ping" not in got:
        got += sock.recv(4096)
    sock.close()
    wait_for(lambda: slow.metric("num_requests_waiting") == 0, 5)
    assert slow.metric("num_requests_running") > 0
    busy.close()
    slow.wait_quiet(5 * SLOW)


def test_contract_57_a_client_that_leaves_while_it_waits(slow):
    """Requests in the queue go too, without having run."""
    busy = [open_request(slow, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 16, "stream": False})]
    wait_for(lambda: slow.metric("num_requests_running") > 0)
    waiting = [open_request(slow, {"prompt": "Once", "max_tokens": 4, "stream": i % 2 == 0}) for i in range(3)]
    wait_for(lambda: slow.metric("num_requests_waiting") >= 3)
    for sock in waiting:
        sock.close()
    wait_for(lambda: slow.metric("num_requests_waiting") == 0)
    assert slow.metric("num_requests_running") > 0
    busy[0].close()
    slow.wait_quiet()


def test_contract_58_aborting_twice_and_late(tiny):
    """Clients that leave at every point of a request's life, some after its end."""
    for i in range(60):
        sock = open_request(tiny, {"prompt": "Once", "max_tokens": 30, "stream": i % 2 == 0, "n": 1 + i % 3})
        time.sleep(i * 0.0005)
        sock.close()
    tiny.wait_quiet()
    assert tiny.complete(max_tokens=2)[0] == 200


def test_contract_59_nothing_is_left_after_any_way_out(tiny):
    for body in ({}, {"stop": "a"}, {"n": 3}, {"echo": True, "logprobs": 2}, {"logit_bias": {"2": 100}}, {"max_tokens": 1}):
        assert tiny.complete(**{"max_tokens": 20, **body})[0] == 200
        tiny.stream(TEXT, {"prompt": "Once", "max_tokens": 20, **body})
    for body in ({"n": 0}, {"max_tokens": 1000}, {"model": "x"}):
        assert tiny.complete(**body)[0] >= 400
    tiny.wait_quiet()
    wait_for(lambda: tiny.metric("http_requests_in_flight") == 1)  # the scrape itself


def collect(sock, out):
    with sock:
        status, headers, body = read_response(sock.makefile("rb"))
        out.append((status, events(body) if status == 200 else body))


def test_contract_60_sigterm_lets_requests_finish(launch):
    server = launch(SMOL, "--max-num-seqs", 32, "--max-model-len", 4096, "--shutdown-timeout-s", 60 * SLOW)
    out = []
    lasting = open_request(server, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True})  # until all was looked at
    keep = server.connect()   # an open connection sees the red readiness
    keep.sendall(b"GET /health/ready HTTP/1.1\r\nHost: t\r\n\r\n")
    file = keep.makefile("rb")
    assert read_response(file)[0] == 200
    socks = [open_request(server, {"prompt": "Once", "max_tokens": 32, "ignore_eos": True, "stream": True}) for _ in range(20)]
    threads = [threading.Thread(target=collect, args=(sock, out)) for sock in socks]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("request_success_total", finished_reason="length") + server.metric("num_requests_running") == 21)
    server.process.send_signal(signal.SIGTERM)
    status = 200
    while status == 200:
        keep.sendall(b"GET /health/ready HTTP/1.1\r\nHost: t\r\n\r\n")
        status, headers, data = read_response(file)
    assert status == 503 and json.loads(data)["status"] == "draining" and headers["connection"] == "close"
    status, headers, data = server.get("/health/ready")  # and so does a fresh one, as a kubelet's probe makes it
    assert status == 503 and json.loads(data)["status"] == "draining" and headers["connection"] == "close"
    assert server.get("/health/live")[0] == 200
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        status, headers, data = server.post(path, json.dumps(body).encode())
        assert status == 503 and json.loads(data)["error"]["code"] == "unavailable" and headers["connection"] == "close"
    assert server.metric("num_requests_running") > 0
    for thread in threads:
        thread.join()
    assert server.process.poll() is None
    lasting.close()
    assert server.process.wait(20 * SLOW) == 0
    with pytest.raises(ConnectionRefusedError):
        server.connect()
    assert len(out) == 20
    for status, payloads in out:
        assert status == 200 and payloads[-1] == "[DONE]" and json.loads(payloads[-2])["choices"][0]["finish_reason"] == "length"


def test_contract_60_a_slow_reader_gets_all_of_its_answer(launch):
    """Its request has ended when the drain begins, and most of the answer waits for the client to read."""
    server = launch(TINY, "--max-num-seqs", 16, "--shutdown-timeout-s", 60 * SLOW)
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": 16, "logprobs": 5}
    with open_request(server, body, receive_bytes=4096) as sock:
        wait_for(lambda: server.metric("request_success_total", finished_reason="length") == 16)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(5)
        assert server.process.poll() is None
        status, headers, data = read_response(sock.makefile("rb"))
    assert status == 200 and int(headers["content-length"]) == len(data) > 500000
    assert [len(choice["logprobs"]["tokens"]) for choice in json.loads(data)["choices"]] == [400] * 16
    assert server.process.wait(20 * SLOW) == 0


@pytest.mark.parametrize("second_signal", [False, True])
def test_contract_60_past_the_grace_an_error_chunk(launch, second_signal):
    server = launch(SMOL, "--max-num-seqs", 8, "--max-model-len", 4096, "--shutdown-timeout-s", 60 if second_signal else 0.3)
    out = []
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 4}
    threads = [threading.Thread(target=collect, args=(open_request(server, {**body, "stream": i == 0}), out)) for i in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("num_requests_running") > 0)
    start = time.time()
    server.process.send_signal(signal.SIGTERM)
    if second_signal:
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert server.process.wait(20 * SLOW) == 0 and time.time() - start < 5 * SLOW
    for status, body in out:
        if status == 200:
            assert body[-1] == "[DONE]" and json.loads(body[-2])["error"]["code"] == "unavailable"
        else:
            assert status == 503 and json.loads(body)["error"]["code"] == "unavailable"


def test_contract_61_live_and_ready_are_apart(launch):
    """While a model loads the daemon is alive and not ready, and says so; a broken model ends it with status 1."""
    server = launch(SMOL, wait=False)
    status, _, data = server.get("/health/ready")
    if status == 503:
        assert json.loads(data)["status"] == "loading"
        assert server.get("/health/live")[0] == 200
        status, headers, data = server.post(TEXT, {"prompt": "a"})
        assert status in (200, 503)
        if status == 503:
            assert headers["retry-after"] and json.loads(data)["error"]["code"] == "unavailable"
    server.wait_ready()
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        status, _, data = server.get(path)
        assert status == 200 and json.loads(data) == {"status": "ready"}
    model = json.loads(server.get("/v1/health/model")[2])["models"][0]
    assert model["ready"] is True and model["state"] == "ready" and model["loaded_bytes"] > 10**7 and 0 <= model["last_step_age_us"] < 10**6
    assert server.raw(b"HEAD /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")[0] == 200


def test_contract_61_a_model_that_cannot_be_read_ends_the_daemon(launch, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    server = launch(tmp_path / "broken.gguf", wait=False)
    assert server.process.wait(10) == 1
    assert "cannot load the model" in server.text() and "broken.gguf" in server.text()


def test_contract_62_health_answers_at_once_while_busy(slow):
    sock = open_request(slow, {"prompt": "word " * 2000, "max_tokens": 50, "stream": True, "n": 8})
    times = []
    for _ in range(50):
        start = time.time()
        assert slow.get("/health/live")[0] == 200
        times.append(time.time() - start)
        time.sleep(0.01)
    sock.close()
    slow.wait_quiet()
    assert sorted(times)[len(times) // 2] < 0.05 * SLOW, times


def test_more_prompts_than_can_ever_wait_is_the_clients_fault(slow):
    """Trying again would be in vain, so it is no 429."""
    status, error = slow.json(TEXT, {"prompt": ["Once"] * 5, "max_tokens": 1})[:2]
    assert status == 400 and error["error"]["param"] == "prompt"
    assert slow.json(TEXT, {"prompt": ["Once"] * 4, "max_tokens": 1})[0] == 200


def test_a_stop_string_is_no_abort(tiny):
    def count(reason):
        return tiny.metric("request_success_total", finished_reason=reason)
    before = count("stop"), count("abort")
    for _ in range(3):
        assert tiny.json(TEXT, {"prompt": "Once", "max_tokens": 200, "stop": [" "], "temperature": 0})[0] == 200
    wait_for(lambda: count("stop") == before[0] + 3)
    assert count("abort") == before[1]


def test_overload_gives_429_with_retry_after(slow):
    socks = [open_request(slow, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "n": 16, "stream": True})]
    wait_for(lambda: slow.metric("num_requests_running") >= 16)
    socks += [open_request(slow, {"prompt": "Once", "max_tokens": 4, "stream": True}) for _ in range(4)]
    wait_for(lambda: slow.metric("num_requests_waiting") >= 4)
    for stream in (False, True):
        status, headers, data = slow.post(TEXT, {"prompt": "Once", "max_tokens": 4, "stream": stream})
        error = json.loads(data)["error"]
        assert status == 429 and int(headers["retry-after"]) >= 1 and error["code"] == "queue_full" and error["type"] == "rate_limit_error"
    assert slow.metric("admission_rejections_total", reason="queue_full") >= 2
    for sock in socks:
        sock.close()
    slow.wait_quiet()
    assert slow.complete(max_tokens=2)[0] == 200


def test_qos_levels(tiny):
    for level in ("high", "Normal", "LOW"):
        assert tiny.json(TEXT, {"prompt": "Once", "max_tokens": 2}, {"X-QoS-Level": level})[0] == 200
    status, answer = tiny.json(TEXT, {"prompt": "Once", "max_tokens": 2}, {"X-QoS-Level": "urgent"})
    assert status == 400 and answer["error"]["param"] == "X-QoS-Level"


def test_a_high_class_request_passes_waiting_low_ones(launch):
    server = launch(SMOL, "--max-num-seqs", "1", "--max-model-len", 4096)
    lasting = open_request(server, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True})  # until all others wait
    wait_for(lambda: server.metric("num_requests_running") == 1)

    def send(level, number):
        body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True}
        assert server.json(TEXT, body, {"X-QoS-Level": level, "X-Request-Id": f"{level}-{number}"})[0] == 200
    threads = [threading.Thread(target=send, args=("low", number)) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("num_requests_waiting_by_class", **{"class": "low"}) == 8)
    send("high", 0)
    lasting.close()
    for thread in threads:
        thread.join()
    ended = re.findall(r"id=(low|high)-\d route", server.text())  # in the server's order
    assert len(ended) == 9 and ended.index("high") <= 3, ended


def test_two_daemons_cannot_share_a_port(tiny, launch):
    import subprocess
    from conftest import BIN
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", str(tiny.port)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "cannot listen" in done.stderr


def test_keep_alive_and_pipelining(tiny):
    body = json.dumps({"prompt": "Once", "max_tokens": 3, "temperature": 0}).encode()
    streamed = json.dumps({"prompt": "Once", "max_tokens": 3, "temperature": 0, "stream": True}).encode()

    def head(data):
        return b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            data) + data
    with tiny.connect() as sock:
        file = sock.makefile("rb")
        sock.sendall(head(body) + head(streamed) + head(body))
        first, second, third = read_response(file), read_response(file), read_response(file)
        assert first[0] == second[0] == third[0] == 200 and events(second[2])[-1] == "[DONE]"
        assert json.loads(first[2])["choices"] == json.loads(third[2])["choices"]


def test_http_1_0(tiny):
    body = json.dumps({"prompt": "Once", "max_tokens": 3, "stream": True}).encode()
    status, headers, data = tiny.raw(
        b"POST /v1/completions HTTP/1.0\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert status == 200 and "transfer-encoding" not in headers and events(data)[-1] == "[DONE]"


def test_tls(tmp_path, launch):
    """HTTPS from the same port, with the official client's transport."""
    import ssl
    import subprocess
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", tmp_path / "key.pem", "-out",
                           tmp_path / "cert.pem", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                          capture_output=True)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    server = launch(TINY, "--ssl-certfile", tmp_path / "cert.pem", "--ssl-keyfile", tmp_path / "key.pem", wait=False)
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")

    def ask(head, body=b""):
        with server.connect() as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            sock.sendall(head + b"Host: t\r\nConnection: close\r\n" + (b"Content-Length: %d\r\n" % len(body) if body else b"") + b"\r\n" +
                         body)
            return read_response(sock.makefile("rb"))
    wait_for(lambda: ask(b"GET /health/ready HTTP/1.1\r\n")[0] == 200)
    body = json.dumps({"prompt": "Once", "max_tokens": 30, "stream": True}).encode()
    status, _, data = ask(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n", body)
    assert status == 200 and events(data)[-1] == "[DONE]"
    with server.connect() as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:  # leaves in the middle
        body = json.dumps({"prompt": "Once", "max_tokens": 450, "stream": True, "n": 8, "ignore_eos": True}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" %
                     len(body) + body)
        sock.recv(100)

    def quiet():
        text = ask(b"GET /metrics HTTP/1.1\r\n")[2].decode()
        return 'num_requests_running{model_name="tiny"} 0\n' in text
    wait_for(quiet)
