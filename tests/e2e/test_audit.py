"""The audit log of the running daemon: a line for each request that asks for a key, over HTTP and gRPC, with what it took and how it ended;
prompts only by option; the chain verifies over restarts and rotations, and damage is named."""
import hashlib
import json
import os
import resource
import subprocess
import time

import pytest
from conftest import BIN, SLOW, TINY, start, wait_for
from grpc_client import channel, grpc, pb, start_both, stubs

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LONG = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "n": 64}


def lines(path):
    """Those that have an end: the writer may be at the last one."""
    text = path.read_text()
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def requests(path, n, seconds=20):
    """The request lines once there are n."""
    end = time.time() + seconds * SLOW
    while True:
        found = [x for x in lines(path) if x["kind"] == "request"] if path.exists() else []
        if len(found) >= n:
            assert len(found) == n, found
            return found
        assert time.time() < end, found
        time.sleep(0.02)


def verify(*paths):
    return subprocess.run([BIN / "sits2026d", "--verify-audit", *paths], capture_output=True, text=True)


def test_http_and_grpc_requests_are_told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    path = folder / "audit.log"
    server = start_both(tmp_path_factory, TINY, "--api-key", "top-secret", "--audit-log", path, "--no-metrics-require-key")
    key = {"Authorization": "Bearer top-secret"}
    assert server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True},
                       {**key, "X-Request-Id": "one", "X-QoS-Level": "high", "traceparent": TRACE})[0] == 200
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True,
                                                "stream": True}, {**key, "X-Request-Id": "two"})[0] == 200
    assert server.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "three"})[0] == 401
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": -5}, {**key, "X-Request-Id": "four"})[0] == 400
    assert server.get("/nowhere", {**key, "X-Request-Id": "five"})[0] == 404
    for public in ("/health", "/health/live", "/metrics"):
        assert server.get(public)[0] == 200
    with channel(server) as link:
        stub = stubs.InferenceStub(link)
        metadata = [("authorization", "Bearer top-secret"), ("x-request-id", "six"), ("traceparent", TRACE)]
        stub.Generate(pb.GenerateRequest(prompt=["Once upon a time"], max_tokens=5, ignore_eos=True), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            stub.Generate(pb.GenerateRequest(prompt=["x"]), metadata=[("x-request-id", "seven")])
    found = {line["id"]: line for line in requests(path, 7)}
    one = found["one"]
    assert {k: one[k] for k in ("transport", "route", "verb", "status", "outcome", "client_left", "model", "class", "stream", "n",
                                "max_tokens", "output_tokens", "cut", "stopped", "trace")} == {
        "transport": "http", "route": "/v1/completions", "verb": "POST", "status": 200, "outcome": "OK", "client_left": False,
        "model": "tiny", "class": "high", "stream": False, "n": 1, "max_tokens": 5, "output_tokens": 5, "cut": 1, "stopped": 0,
        "trace": TRACE.split("-")[1]}
    assert one["prompt_tokens"] > 3 and one["peer"].startswith("127.0.0.1:") and one["ms"] > 0
    assert found["two"]["stream"] is True and found["two"]["output_tokens"] == 3
    assert (found["three"]["status"], found["three"]["outcome"], "model" in found["three"]) == (401, "UNAUTHENTICATED", False)
    assert (found["four"]["status"], found["five"]["status"], found["five"]["route"]) == (400, 404, "?")
    six = found["six"]
    assert (six["transport"], six["route"], six["status"], six["output_tokens"], six["prompt_tokens"]) == (
        "grpc", "/sits2026.v1.Inference/Generate", 0, 5, one["prompt_tokens"])
    assert six["trace"] == one["trace"] and "127.0.0.1" in six["peer"]
    assert (found["seven"]["status"], found["seven"]["outcome"]) == (16, "UNAUTHENTICATED")
    wait_for(lambda: server.metric("audit_lines_total") == 7)  # counted behind the write
    assert server.metric("audit_lines_lost_total") == 0
    assert server.stop() == 0
    text = path.read_text()
    assert "top-secret" not in text and "Once upon" not in text and "prompt\"" not in text
    assert verify(path).returncode == 0


def test_refused_scrapes_are_told(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    server = start(tmp_path_factory, TINY, "--api-key", "k" * 20, "--audit-log", path)
    assert server.get("/metrics", {"Authorization": "Bearer " + "k" * 20})[0] == 200
    assert server.get("/metrics", {"X-Request-Id": "refused"})[0] == 401
    assert [(line["id"], line["route"], line["status"]) for line in requests(path, 1)] == [("refused", "/metrics", 401)]
    assert server.stop() == 0


def test_who_is_tenant_and_key_id_and_counts_by_tenant(tmp_path_factory):
    """Over both front ends; a refused key is nobody; quotas show as outcomes. No key and no hash is ever written."""
    folder = tmp_path_factory.mktemp("audit")
    path, keys, entries = folder / "audit.log", {"a": "a" * 30, "b": "b" * 30}, []
    for name, key in keys.items():
        salt = os.urandom(16)
        digest = hashlib.sha256(salt + key.encode()).hexdigest()
        entries.append({"hash": f"sha256:{salt.hex()}:{digest}", "tenant": f"team-{name}", "id": f"{name}-2026", "roles": ["inference"],
                        "requests_per_minute": 2})
    (folder / "keys.yaml").write_text(json.dumps({"keys": entries}))
    server = start_both(tmp_path_factory, TINY, "--api-key-file", folder / "keys.yaml", "--audit-log", path, "--no-metrics-require-key")
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    statuses = [server.post("/v1/completions", body, {"Authorization": f"Bearer {keys[name]}", "X-Request-Id": f"h-{name}-{i}"})[0]
                for name, n in (("a", 3), ("b", 1)) for i in range(n)]
    assert statuses == [200, 200, 429, 200]
    assert server.post("/v1/completions", body, {"Authorization": "Bearer wrong", "X-Request-Id": "h-nobody"})[0] == 401
    with channel(server) as link:
        stubs.InferenceStub(link).Generate(pb.GenerateRequest(prompt=["x"], max_tokens=3, ignore_eos=True),
                                           metadata=[("authorization", f"Bearer {keys['b']}"), ("x-request-id", "g-b")])
    found = {line["id"]: (line["tenant"], line["key"], line["outcome"]) for line in requests(path, 6)}
    assert found == {"h-a-0": ("team-a", "a-2026", "OK"), "h-a-1": ("team-a", "a-2026", "OK"),
                     "h-a-2": ("team-a", "a-2026", "RATE_LIMITED"), "h-b-0": ("team-b", "b-2026", "OK"),
                     "h-nobody": ("", "", "UNAUTHENTICATED"), "g-b": ("team-b", "b-2026", "OK")}
    for tenant, outcome, n in (("team-a", "ok", 2), ("team-a", "refused", 1), ("team-b", "ok", 2), ("none", "client_error", 1)):
        assert server.metric("tenant_requests_total", tenant=tenant, outcome=outcome) == n
    assert server.metric("tenant_generation_tokens_total", tenant="team-b") == 6
    assert server.stop() == 0
    text = path.read_text()
    assert not any(secret in text for secret in [*keys.values(), *(e["hash"][-64:] for e in entries)])


def test_client_that_leaves_is_told_with_what_it_took(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    server = start(tmp_path_factory, TINY, "--audit-log", path)
    body = json.dumps({**LONG, "stream": True}).encode()
    with server.connect() as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        got = b""
        while got.count(b"data: ") < 3:  # tokens, not only the headers
            got += sock.recv(1000)
        assert got.startswith(b"HTTP/1.1 200")
    line = requests(path, 1)[0]
    assert line["client_left"] is True and line["outcome"] == "CANCELLED" and line["output_tokens"] >= 1
    assert server.stop() == 0


def test_prompts_only_by_option_and_the_chain_over_restarts(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    for run in range(2):
        server = start(tmp_path_factory, TINY, "--audit-log", path, "--audit-log-prompts", "--audit-rotate-size", 4096)
        assert server.chat(f"secret {run}", max_tokens=2)[0] == 200
        for i in range(8):
            assert server.complete(["a", "b"], max_tokens=1)[0] == 200
        assert server.stop() == 0
    files = sorted(path.parent.glob("audit.log.0*")) + [path]
    assert len(files) > 2
    found = [line for file in files for line in lines(file) if line["kind"] == "request"]
    assert len(found) == 18
    assert found[0]["prompt"] == [{"role": "user", "content": "secret 0"}] and found[1]["prompt"] == ["a", "b"]
    done = verify(*files)
    assert done.returncode == 0 and "ok: " in done.stdout, done.stderr
    text = files[0].read_text()
    files[0].write_text(text.replace("secret 0", "secret 1"))
    done = verify(*files)
    assert done.returncode == 1 and f"{files[0]}: line 2 was changed" in done.stderr
    files[0].write_text(text)
    files[1].write_text("".join(files[1].read_text().splitlines(keepends=True)[:-1]))
    assert f"{files[2]}: line 1" in verify(*files).stderr


def test_under_a_key(tmp_path_factory):
    """The chain verifies with the key only; a start with another one is refused; forged hashes and heads are found."""
    folder = tmp_path_factory.mktemp("audit")
    path, key = folder / "audit.log", folder / "key"
    key.write_text("5b" * 32 + "\n")
    for _ in range(2):
        server = start(tmp_path_factory, TINY, "--audit-log", path, "--audit-key-file", key)
        assert server.complete("a", max_tokens=1)[0] == 200
        assert server.stop() == 0
    assert len(lines(path)[0]["mac_key"]) == 16 and "5b" * 8 not in path.read_text() + server.text()

    def verify_keyed(key):
        return subprocess.run([BIN / "sits2026d", "--audit-key-file", key, "--verify-audit", path], capture_output=True, text=True)
    done = verify_keyed(key)
    assert done.returncode == 0 and "ok: " in done.stdout, done.stderr
    assert verify(path).returncode == 1 and "audit-key-file" in verify(path).stderr
    other = folder / "other"
    other.write_text("5c" * 32)
    assert verify_keyed(other).returncode == 1 and verify_keyed(folder / "none").returncode == 1
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--audit-log", path, "--audit-key-file", other],
                          capture_output=True, text=True)
    assert done.returncode == 1 and "under this key" in done.stderr
    line = path.read_text().splitlines()[1]
    forged = line.replace('"tenant":""', '"tenant":"x"')
    forged = forged[:-66] + hashlib.sha256(forged[:-75].encode()).hexdigest() + '"}'
    path.write_text(path.read_text().replace(line, forged))
    assert "line 2 was changed" in verify_keyed(key).stderr


def test_a_full_disk_holds_nothing_up_and_the_gap_is_told(tmp_path_factory):
    """A file-size limit, which the running daemon is given, stands for a full disk: it serves on, metrics and log say so, what waited is
    written when there is room again; and a stop without room leaves a gap of which verification tells."""
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    server = start(tmp_path_factory, TINY, "--audit-log", path)
    hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)[1]

    def ask(n):  # routes that write no line of the daemon's own log, which has the same limit
        assert all(server.get("/version")[0] == 200 for _ in range(n))

    def fill():
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    ask(100)
    requests(path, 100)
    assert server.metric("audit_writing") == 1 and len(server.text()) < path.stat().st_size - 4096
    fill()
    ask(50)
    wait_for(lambda: server.metric("audit_writing") == 0)
    assert server.metric("audit_write_errors_total") > 0 and server.metric("audit_lines_lost_total") == 0
    assert "cannot write" in server.text() and server.complete("a", max_tokens=1)[0] == 200 and server.get("/health")[0] == 200
    assert verify(path).returncode == 0  # whole lines only
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    requests(path, 151)
    wait_for(lambda: server.metric("audit_writing") == 1)
    assert "gaps" not in verify(path).stdout
    fill()
    ask(50)
    wait_for(lambda: server.metric("audit_writing") == 0)
    assert server.stop() == 0 and "50 lines could not be written" in server.text()
    server = start(tmp_path_factory, TINY, "--audit-log", path)
    ask(1)
    requests(path, 152)
    assert server.stop() == 0
    done = verify(path)
    assert done.returncode == 0 and "gaps: 1 times the log was begun again without having been closed" in done.stdout, done


def test_wrong_use_is_refused(tmp_path):
    (tmp_path / "alien").write_text("hello\n")
    for options, text in (([("--audit-log"), tmp_path / "alien"], "no line of an audit log"),
                          (["--audit-log", tmp_path / "no/where"], "No such file"), (["--audit-log-prompts"], "needs audit-log"),
                          (["--audit-key-file", tmp_path / "alien"], "needs audit-log"),
                          (["--audit-log", tmp_path / "new", "--audit-key-file", tmp_path / "alien"], "32 to 4096 bytes")):
        done = subprocess.run([BIN / "sits2026d", "--model", str(TINY), "--port", "0", *map(str, options)], capture_output=True, text=True)
        assert done.returncode == 1 and text in done.stderr, done.stderr
    assert "needs files" in verify().stderr
