"""What lies under the API: certificates that change while serving, clients' certificates, cross-origin requests, a restart under load,
and an engine that stands still."""
import concurrent.futures
import json
import re
import shutil
import signal
import ssl
import threading
import time

import pytest
from conftest import SLOW, TINY, events, make_certificate, read_response, wait_for
from grpc_client import begin, channel, grpc, pb, start_both, stubs
from grpc_health.v1 import health_pb2, health_pb2_grpc

METRICS = b"GET /metrics HTTP/1.1\r\n"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# ---- TLS ----


def pair(folder, name):
    (folder / name).mkdir(exist_ok=True)
    make_certificate(folder / name, name)
    return folder / name


def take(made, folder):
    for name in ("key.pem", "cert.pem"):
        shutil.copy(made / name, folder / name)


def shown(server):
    """The certificate that HTTPS shows."""
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=20)


def pem(folder):
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text()))


def ask(server, context, head=b"GET /version HTTP/1.1\r\n"):
    with server.connect(10) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
        sock.sendall(head + b"Host: t\r\nConnection: close\r\n\r\n")
        return read_response(sock.makefile("rb"))


def ask_grpc(server, root, *client):
    with grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials((root / "cert.pem").read_bytes(), *client)) as ch:
        try:
            return stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), timeout=5).data[0].id
        except grpc.RpcError as error:
            assert error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
            return None


def test_certificates_change_without_a_restart(tmp_path, begin):
    first, second, live = pair(tmp_path, "first"), pair(tmp_path, "second"), tmp_path / "live"
    live.mkdir()
    take(first, live)
    server = begin(TINY, "--ssl-certfile", live / "cert.pem", "--ssl-keyfile", live / "key.pem", wait=False)
    wait_for(lambda: "ready model" in server.text())
    assert shown(server) == pem(first) and ask_grpc(server, first) == "tiny"
    context = ssl.create_default_context(cafile=first / "cert.pem")
    with server.connect() as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
        body = json.dumps({"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 4}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" %
                     len(body) + body)
        head = sock.recv(100)
        take(second, live)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.text().count("read again") == 2)
        assert shown(server) == pem(second) and ask_grpc(server, second) == "tiny" and ask_grpc(server, first) is None
        data = head
        while not data.endswith(b"0\r\n\r\n"):  # what was open goes on
            more = sock.recv(65536)
            assert more
            data += more
        assert b"data: [DONE]" in data
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n")
        assert sock.recv(15).startswith(b"HTTP/1.1 200")
    shutil.copy(first / "key.pem", live / "key.pem")  # a key that is not the certificate's
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: server.text().count("stay as they were") == 2)
    assert shown(server) == pem(second) and ask_grpc(server, second) == "tiny"
    (live / "cert.pem").unlink()
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: server.text().count("stay as they were") == 4)
    context = ssl.create_default_context(cafile=second / "cert.pem")
    assert ask(server, context)[0] == 200
    assert re.findall(r'reloads_total\{.*outcome="(\w+)"\} (\d+)', ask(server, context, METRICS)[2].decode()) == [
        ("ok", "2"), ("refused", "4")]
    assert "PRIVATE" not in server.text()


def client_context(root, client=None):
    context = ssl.create_default_context(cafile=root / "cert.pem")
    if client:
        context.load_cert_chain(client / "cert.pem", client / "key.pem")
    return context


def refused(server, context):
    try:
        return not ask(server, context)[0]
    except (ssl.SSLError, ConnectionError):
        return True


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_certificates_over_https(tmp_path, begin, version):
    """Only clients whose certificate an authority signed get through; the authorities change on SIGHUP too."""
    server_pair, ours, theirs = pair(tmp_path, "server"), pair(tmp_path, "ours"), pair(tmp_path, "theirs")
    shutil.copy(ours / "cert.pem", tmp_path / "ca.pem")
    server = begin(TINY, "--ssl-certfile", server_pair / "cert.pem", "--ssl-keyfile", server_pair / "key.pem",
                   "--ssl-ca-certs", tmp_path / "ca.pem", wait=False)
    wait_for(lambda: "ready model" in server.text())

    def with_version(client=None):
        context = client_context(server_pair, client)
        context.minimum_version = context.maximum_version = version
        return context
    assert ask(server, with_version(ours))[0] == 200
    assert refused(server, with_version()) and refused(server, with_version(theirs))
    assert ask_grpc(server, server_pair) == "tiny"  # its own option
    shutil.copy(theirs / "cert.pem", tmp_path / "ca.pem")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "certificates of HTTP read again" in server.text())
    assert ask(server, with_version(theirs))[0] == 200 and refused(server, with_version(ours))


# ---- browsers ----


@pytest.fixture(scope="module")
def cors(tmp_path_factory):
    server = start_both(tmp_path_factory, TINY, "--cors-allow-origin", "https://a.example, https://b.example:8443", "--api-key",
                        "a-key-of-enough-letters", wait=False)
    server.wait_ready()
    yield server
    assert server.stop() == 0


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def preflight(server, origin, path="/v1/chat/completions", **more):
    head = "".join(f"{k}: {v}\r\n" for k, v in {**PREFLIGHT, **({"Origin": origin} if origin else {}), **more}.items())
    return server.raw(f"OPTIONS {path} HTTP/1.1\r\nHost: t\r\n{head}Connection: close\r\n\r\n".encode())


@pytest.mark.parametrize("origin", ["https://a.example", "https://b.example:8443"])
def test_preflights_of_allowed_origins(cors, origin):
    status, headers, body = preflight(cors, origin)
    assert status == 204 and body == b"" and headers["access-control-allow-origin"] == origin and "Origin" in headers["vary"]
    assert headers["access-control-allow-methods"] == "POST" and "authorization" in headers["access-control-allow-headers"].lower()
    allowed = [h.strip().lower() for h in headers["access-control-allow-headers"].split(",")]
    assert "authorization" in allowed and "*" in allowed  # x-stainless-lang and the like; the asterisk never means Authorization
    status, headers, _ = preflight(cors, origin, "/v1/models")
    assert status == 204 and headers["access-control-allow-methods"] == "GET, HEAD"
    body = {"prompt": "a", "max_tokens": 1}
    for stream in (False, True):
        status, headers, _ = cors.post("/v1/completions", {**body, "stream": stream},
                                       {"Origin": origin, "Authorization": "Bearer a-key-of-enough-letters"})
        assert status == 200 and headers["access-control-allow-origin"] == origin and "Retry-After" in headers[
            "access-control-expose-headers"]
    status, headers, _ = cors.post("/v1/completions", body, {"Origin": origin})
    assert status == 401 and headers["access-control-allow-origin"] == origin  # the page may read the error


@pytest.mark.parametrize("origin", ["https://c.example", "https://a.example.evil", "https://a.exampl", "http://a.example", "null", None])
def test_other_origins_are_told_nothing(cors, origin):
    status, headers, _ = preflight(cors, origin)
    assert status == 401 and not any(name.startswith("access-control") for name in headers)
    status, headers, _ = cors.get("/health", {"Origin": origin} if origin else {})
    assert status == 200 and not any(name.startswith("access-control") for name in headers) and headers["vary"] == "Origin"


def test_without_the_option_nothing_is_said(tiny):
    status, headers, _ = preflight(tiny, "https://a.example")
    assert status == 405 and "vary" not in headers and not any(name.startswith("access-control") for name in headers)


def test_any_origin(begin):
    server = begin(TINY, "--cors-allow-origin", "*")
    status, headers, _ = preflight(server, "https://anything.example")
    assert status == 204 and headers["access-control-allow-origin"] == "*" and "vary" not in headers


# ---- a restart under load ----


def test_rolling_restart_loses_none_of_200_streams(begin):
    """SIGTERM with 200 streams in flight: readiness turns red first, new calls are sent away, all 200 end well, the exit status is 0; a
    second daemon takes what comes after."""
    options = ("--max-num-seqs", 64, "--max-queued-requests", 1000, "--shutdown-timeout-s", 120 * SLOW)
    old, new = begin(TINY, *options), begin(TINY, *options)
    n_tokens, n_each = 450, 100
    channels = [channel(old) for _ in range(10)]
    watch = health_pb2_grpc.HealthStub(channels[0]).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status != NOT_SERVING
    keep = old.connect()
    file = keep.makefile("rb")
    keep.sendall(b"GET /health/ready HTTP/1.1\r\nHost: t\r\n\r\n")
    assert read_response(file)[0] == 200
    body = json.dumps({"prompt": "Once", "max_tokens": n_tokens, "ignore_eos": True, "stream": True}).encode()

    def over_http(_):
        status, _, data = old.post("/v1/completions", body, timeout=300)
        payloads = events(data)
        return status, payloads[-1], len([p for p in payloads if '"finish_reason":"length"' in p])

    def over_grpc(i):
        request = pb.GenerateRequest(prompt=["Once"], max_tokens=n_tokens, ignore_eos=True)
        return list(stubs.InferenceStub(channels[i % 10]).GenerateStream(request))[-1].usage.completion_tokens
    with concurrent.futures.ThreadPoolExecutor(2 * n_each) as pool:
        http = [pool.submit(over_http, i) for i in range(n_each)]
        rpcs = [pool.submit(over_grpc, i) for i in range(n_each)]
        wait_for(lambda: old.metric("request_success_total", finished_reason="length") + old.metric("num_requests_running") +
                 old.metric("num_requests_waiting") == 2 * n_each, 120)  # in this order none is counted twice
        old.process.send_signal(signal.SIGTERM)
        wait_for(lambda: next(watch).status == NOT_SERVING)
        keep.sendall(b"GET /health/ready HTTP/1.1\r\nHost: t\r\n\r\n")
        status, headers, _ = read_response(file)
        assert status == 503 and headers["connection"] == "close"
        assert old.process.poll() is None  # it still works on what it has
        late = grpc_code(channels[1])
        assert late == "UNAVAILABLE"
        for _ in range(5):  # fresh connections too
            status, headers, data = old.get("/health/ready")
            assert status == 503 and json.loads(data)["status"] == "draining" and headers["connection"] == "close"
            assert old.post("/v1/completions", body)[0] == 503
        with channel(old) as fresh:
            assert health_pb2_grpc.HealthStub(fresh).Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
            assert grpc_code(fresh) == "UNAVAILABLE"
        assert new.complete(max_tokens=2)[0] == 200
        assert [f.result() for f in http] == [(200, "[DONE]", 1)] * n_each
        assert [f.result() for f in rpcs] == [n_tokens] * n_each
    for ch in channels:
        ch.close()
    assert old.process.wait(30 * SLOW) == 0


def grpc_code(ch):
    try:
        stubs.InferenceStub(ch).Generate(pb.GenerateRequest(prompt=["a"], max_tokens=1), timeout=20)
        return "OK"
    except grpc.RpcError as error:
        return error.code().name


# ---- an engine that stands still ----


def test_a_wedged_engine_turns_liveness_red(begin):
    """Within its limit; and health answers from memory all the while."""
    limit = 3
    server = begin(TINY, "--liveness-timeout-s", limit, env={"SITS_TEST_WEDGE": "1"})
    assert server.get("/health/live")[0] == 200
    with channel(server) as ch:
        health = health_pb2_grpc.HealthStub(ch)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status != NOT_SERVING
        server.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: "test hook" in server.text())
        asker = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "Once", "max_tokens": 100}))
        asker.start()
        start, times = time.time(), []
        while True:
            before = time.time()
            status = server.get("/health/live")[0]
            times.append(time.time() - before)
            if status == 503:
                break
            assert time.time() - start < limit + 3 * SLOW
            time.sleep(0.02)
        assert time.time() - start > limit - 1
        for path in ("/health", "/health/ready"):
            assert server.get(path)[0] == 503
        assert json.loads(server.get("/health")[2]) == {"status": "wedged"}
        assert next(watch).status == NOT_SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == NOT_SERVING
        assert sorted(times)[len(times) // 2] < 0.01 * SLOW, times
    assert server.stop() == 0
    asker.join()


def test_a_busy_engine_never_does(begin):
    """Long prompts and full batches for a while, with the shortest limit that there is: always live."""
    server = begin(TINY, "--liveness-timeout-s", 1 if SLOW == 1 else 10, "--max-num-seqs", 64)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(server.complete, prompt=[5] * 400, max_tokens=100, ignore_eos=True, n=4) for _ in range(32)]
        while not all(f.done() for f in futures):
            assert server.get("/health/live")[0] == 200 and server.get("/health/ready")[0] == 200
            time.sleep(0.02)
        assert {f.result()[0] for f in futures} == {200}


def test_the_hook_is_off_without_its_variable(begin):
    server = begin(TINY)
    server.process.send_signal(signal.SIGUSR2)
    time.sleep(0.1)
    assert server.complete(max_tokens=5)[0] == 200 and "test hook" not in server.text()
