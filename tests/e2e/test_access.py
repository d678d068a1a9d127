"""API keys over both front ends: every route against the table in src/front/README.md, quotas, tenants in the engine, reloading."""
import hashlib
import json
import os
import re
import signal
import subprocess
import threading
import time

import pytest
from conftest import BIN, ROOT, SLOW, SMOL, TINY, events, make_certificate, wait_for
from grpc_client import channel, grpc, pb, start_both, stubs
from grpc_health.v1 import health_pb2

KEYS = {name: f"{name}-key-{'0123456789' * 2}" for name in
        ("worker", "scraper", "admin", "spent", "tokens", "calls", "short", "narrow", "alpha", "beta", "late",
         "guess0", "guess1", "guess2", "guess3")}
COLUMNS = ("no key", "unknown key", "key without the role", "over its quota")


def entry(name, salt=None, **fields):
    """What sits2026d --hash-key would print, made by another implementation."""
    salt = salt or os.urandom(16)
    digest = hashlib.sha256(salt + KEYS[name].encode()).hexdigest()
    return {"hash": f"sha256:{salt.hex()}:{digest}", "tenant": name, "roles": ["inference"], **fields}


ENTRIES = {"worker": entry("worker"), "scraper": entry("scraper", roles=["metrics"]), "admin": entry("admin", roles=["admin"]),
           "spent": entry("spent", roles=["inference", "metrics"], requests_per_minute=1), "tokens": entry("tokens", tokens_per_minute=60),
           "calls": entry("calls", concurrent_calls=1), "short": entry("short", max_tokens=5),
           "narrow": entry("narrow", models=["other"], classes=["low"]), "alpha": entry("alpha"), "beta": entry("beta"),
           **{f"guess{i}": entry(f"guess{i}", requests_per_minute=2) for i in range(4)}}


def write(path, entries):
    """YAML is a superset of JSON."""
    path.write_text(json.dumps({"keys": entries}))


def bearer(name):
    return {"Authorization": f"Bearer {KEYS[name]}"}


def metadata(name):
    return [("authorization", f"Bearer {KEYS[name]}")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, list(ENTRIES.values()))
    server = start_both(tmp_path_factory, TINY, "--api-key-file", path, "--log-level", "debug", "--served-model-name", "tiny, other")
    server.keys = path
    yield server
    assert server.stop() == 0
    for name, key in KEYS.items():
        assert key not in server.text()
        assert name not in ENTRIES or ENTRIES[name]["hash"][-64:] not in server.text()


def table():
    text = (ROOT / "src/front/README.md").read_text().split("## Who may ask what", 1)[1].split("\n## ", 1)[0]
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert tuple(head[1:]) == COLUMNS
    return {row[0]: dict(zip(COLUMNS, row[1:])) for row in rows}


TABLE = table()
BODIES = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
          "/v1/completions": {"prompt": "a", "max_tokens": 1}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
MESSAGES = {"Generate": pb.GenerateRequest(prompt=["a"], max_tokens=1), "Tokenize": pb.TokenizeRequest(prompt="a"),
            "Chat": pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], max_tokens=1),
            "Detokenize": pb.DetokenizeRequest(tokens=[5]), "GetModel": pb.GetModelRequest(model="tiny"),
            "Abort": pb.AbortRequest(request_id="none"), "ListModels": pb.ListModelsRequest(), "Check": health_pb2.HealthCheckRequest()}
MESSAGES |= {"GenerateStream": MESSAGES["Generate"], "ChatStream": MESSAGES["Chat"], "Watch": MESSAGES["Check"]}


def ask_http(server, route, headers):
    method, path = route.split(" ")
    path = path.replace("{id}", "tiny")
    answer = server.get(path, headers) if method == "GET" else server.post(path, BODIES[path], headers)
    if answer[0] == 401:
        assert answer[1]["www-authenticate"] == "Bearer"
    return str(answer[0])


def ask_grpc(server, route, headers):
    with channel(server) as ch:
        name, md = route.split("/")[1], [(k.lower(), v) for k, v in headers.items()]
        message = MESSAGES.get(name)
        try:
            if "reflection" in route:  # an empty request is an answer with an error inside: the stream itself is fine
                next(ch.stream_stream("/" + route)(iter([b""]), metadata=md, timeout=20))
            else:
                call = ch.unary_stream("/" + route)(message.SerializeToString() if message else b"", metadata=md, timeout=20)
                next(call)
            return "OK"
        except grpc.RpcError as error:
            return error.code().name


def ask(server, route, headers):
    return (ask_http if " " in route else ask_grpc)(server, route, headers)


def spend(server):
    while server.get("/version", bearer("spent"))[0] == 200:
        pass


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("route", TABLE)
def test_every_route_answers_as_the_table_says(server, route, column):
    if column == "over its quota":
        spend(server)
    without = "worker" if route == "GET /metrics" else "scraper"
    headers = {"no key": {}, "unknown key": {"Authorization": "Bearer " + "x" * 30}, "key without the role": bearer(without),
               "over its quota": bearer("spent")}[column]
    assert ask(server, route, headers) == TABLE[route][column]


@pytest.mark.parametrize("route", TABLE)
def test_every_route_answers_the_right_key(server, route):
    name = "scraper" if route == "GET /metrics" else "worker"
    want = {"GET /any/other": "404", "any.Other/Method": "UNIMPLEMENTED", "sits2026.v1.Inference/Abort": "NOT_FOUND"}
    for key in (name, "admin"):
        assert ask(server, route, bearer(key)) == want.get(route, "200" if " " in route else "OK")


def test_several_keys_in_one_request_are_refused(server):
    """A proxy may have checked another one of them than this server would."""
    name, value = next(iter(bearer("worker").items()))
    for path in ("/v1/models", "/health"):
        line = f"{name}: {value}\r\n"
        status, _, data = server.raw(f"GET {path} HTTP/1.1\r\nHost: t\r\n{line}{line}Connection: close\r\n\r\n".encode())
        assert status == 400 and "more than one Authorization" in json.loads(data)["error"]["message"]
    with channel(server) as ch:
        with pytest.raises(grpc.RpcError) as caught:
            stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), metadata=[("authorization", value), ("authorization", value)])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "authorization" in caught.value.details()


def test_the_table_has_every_route():
    routes = re.findall(r'^  \{"(/[^"]*)"', (ROOT / "src/front/http/http_routes.c").read_text(), re.M)
    assert len(routes) > 10
    listed = {route.split(" ")[1].replace("{id}", "") for route in TABLE if " " in route}
    assert set(routes) | {"/any/other"} == listed
    text = (ROOT / "src/front/grpc/rpc_methods.c").read_text()
    methods = {("sits2026.v1.Inference/" if a else "") + b.lstrip("/") for a, b in re.findall(r'^  \{(INFERENCE )?"([\w./]+)"', text, re.M)}
    assert len(methods) > 10
    assert methods | {"any.Other/Method"} == {route for route in TABLE if " " not in route}


# ---- quotas ----


@pytest.mark.parametrize("key,ask_wrongly,want", [
    ("guess0", lambda server, headers: server.get("/any/other", headers)[0], [404, 404, 429]),
    ("guess1", lambda server, headers: server.post("/version", {}, headers)[0], [405, 405, 429]),
    ("guess2", lambda server, headers: server.get("/metrics", headers)[0], [403, 403, 429]),
    ("guess3", lambda server, headers: ask_grpc(server, "any.Other/Method", headers), ["UNIMPLEMENTED"] * 2 + ["RESOURCE_EXHAUSTED"])])
def test_what_is_asked_wrongly_counts_too(server, key, ask_wrongly, want):
    """Whoever guesses routes with a key pays for it as for anything else."""
    assert [ask_wrongly(server, bearer(key)) for _ in range(3)] == want
    assert server.get("/version", bearer(key))[0] == 429


def check_limited(status, headers, data, text):
    error = json.loads(data)["error"]
    assert status == 429 and error["code"] == "rate_limit_exceeded" and error["type"] == "rate_limit_error" and text in error["message"]
    assert int(headers["retry-after"]) >= 1


def failure(call):
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        for _ in answer if hasattr(answer, "__next__") else ():
            pass
    return caught.value.code().name, dict(caught.value.trailing_metadata()), caught.value.details()


def test_grpc_keys_are_looked_at_before_a_message_is_sent(server):
    """A client whose message never comes is told at once that its key is none; before, the call waited for the message."""
    never = threading.Event()

    def messages():
        never.wait(120)
        yield from ()
    for key, want in (("nobody", "UNAUTHENTICATED"), ("scraper", "PERMISSION_DENIED")):
        headers = [("authorization", f"Bearer {KEYS.get(key, 'x' * 30)}")]
        with channel(server) as ch:
            for method in ("Generate", "ChatStream", "GetModel"):
                call = ch.stream_stream(f"/sits2026.v1.Inference/{method}")(messages(), metadata=headers, timeout=60)
                with pytest.raises(grpc.RpcError) as caught:
                    next(call)
                assert caught.value.code().name == want
    never.set()


def rejections(server):
    text = server.get("/metrics", bearer("scraper"))[2].decode()
    return [int(re.search(rf'admission_rejections_total{{.*reason="{reason}"}} (\d+)', text).group(1))
            for reason in ("rate_limit", "queue_full")]


def test_requests_per_minute_and_the_headers(server):
    spend(server)
    before = rejections(server)
    status, headers, data = server.get("/v1/models", bearer("spent"))
    check_limited(status, headers, data, "1 requests per minute")
    assert headers["x-ratelimit-limit-requests"] == "1" and headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < float(headers["x-ratelimit-reset-requests"].rstrip("s")) <= 60 and int(headers["retry-after"]) <= 60
    with channel(server) as ch:
        name, trailer, text = failure(lambda: stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), metadata=metadata("spent")))
    assert name == "RESOURCE_EXHAUSTED" and "1 requests per minute" in text and 1 <= int(trailer["retry-after"]) <= 60
    assert trailer["sits-error-code"] == "rate_limit_exceeded" and trailer["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-requests" not in server.get("/v1/models", bearer("worker"))[1]
    assert rejections(server) == [before[0] + 2, before[1]], "a key's quota says nothing of the server's load"


def test_tokens_per_minute(server):
    """Prompt tokens are paid first, generated ones after; a prompt over a whole minute's is never possible."""
    body = {"prompt": [5] * 20, "max_tokens": 200, "ignore_eos": True}
    status, headers, _ = server.post("/v1/completions", {**body, "prompt": [5] * 61}, bearer("tokens"))
    assert status == 403 and headers["x-ratelimit-limit-tokens"] == "60" and headers["x-ratelimit-remaining-tokens"] == "60"
    status, headers, data = server.post("/v1/completions", body, bearer("tokens"))
    assert status == 200 and json.loads(data)["usage"]["completion_tokens"] == 200
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    for stream in (False, True):
        status, headers, data = server.post("/v1/completions", {**body, "stream": stream}, bearer("tokens"))
        check_limited(status, headers, data, "60 tokens per minute")
        assert 120 < int(headers["retry-after"]) <= 181
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        for call in (stub.Generate, stub.GenerateStream):
            name, trailer, _ = failure(lambda: call(pb.GenerateRequest(prompt=["a"], max_tokens=1), metadata=metadata("tokens")))
            assert name == "RESOURCE_EXHAUSTED" and int(trailer["retry-after"]) > 100
    assert server.post("/tokenize", {"prompt": "a"}, bearer("tokens"))[0] == 200  # costs no tokens


def test_calls_at_once(server):
    """One call at a time: a stream that is not read holds the place, over both front ends, and its end gives it back."""
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        # 64 choices with log probabilities fill the stream's buffers, so it lasts until it is read or cancelled
        stream = stub.GenerateStream(pb.GenerateRequest(prompt=["Once"], max_tokens=500, ignore_eos=True, n=64, logprobs=20),
                                     metadata=metadata("calls"))
        next(stream)
        check_limited(*server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer("calls")), "1 calls at once")
        assert failure(lambda: stub.Generate(pb.GenerateRequest(prompt=["a"]), metadata=metadata("calls")))[0] == "RESOURCE_EXHAUSTED"
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer("worker"))[0] == 200
        stream.cancel()
        end = time.time() + 20 * SLOW
        while server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, bearer("calls"))[0] != 200:
            assert time.time() < end


def test_the_most_tokens_of_an_answer(server):
    status, answer = server.json("/v1/completions", {"prompt": "a", "ignore_eos": True}, bearer("short"))
    assert status == 200 and answer["usage"]["completion_tokens"] == 5  # the default is cut to what the key may have
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"messages": BODIES["/v1/chat/completions"]["messages"], name: 6}
        status, answer = server.json("/v1/chat/completions", body, bearer("short"))
        assert status == 403 and answer["error"]["param"] == name and answer["error"]["code"] == "permission_denied"
    with channel(server) as ch:
        name, trailer, _ = failure(lambda: stubs.InferenceStub(ch).Generate(pb.GenerateRequest(prompt=["a"], max_tokens=6),
                                                                           metadata=metadata("short")))
        assert name == "PERMISSION_DENIED" and trailer["sits-error-param"] == "max_tokens"


def test_models_and_classes(server):
    ids = [m["id"] for m in json.loads(server.get("/v1/models", bearer("narrow"))[2])["data"]]
    assert ids == ["other"] and len(json.loads(server.get("/v1/models", bearer("worker"))[2])["data"]) == 2
    document = server.get("/openapi.json", bearer("narrow"))[2]  # describes what this key may ask for
    assert b'"other"' in document and b'"tiny"' not in document and b'"tiny"' in server.get("/openapi.json", bearer("worker"))[2]
    assert server.get("/v1/models/other", bearer("narrow"))[0] == 200 and server.get("/v1/models/tiny", bearer("narrow"))[0] == 403
    for path, body in BODIES.items():
        for model, want in (("other", 200), ("tiny", 403), ("nobody", 404)):
            status, answer = server.json(path, {**body, "model": model}, bearer("narrow"))
            assert status == want and (want == 200 or answer["error"]["param"] == "model")
        assert server.post(path, body, bearer("narrow"))[0] == 403  # the default model is the first
    body = {**BODIES["/v1/completions"], "model": "other"}
    for level, want in (("low", 200), ("low \t", 200), ("normal", 403), ("high", 403), ("high ", 403), (" ", 400)):
        status, answer = server.json("/v1/completions", body, {**bearer("narrow"), "X-QoS-Level": level})
        assert status == want and (want == 200 or answer["error"]["param"] == "X-QoS-Level")
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        md = metadata("narrow")
        assert [m.id for m in stub.ListModels(pb.ListModelsRequest(), metadata=md).data] == ["other"]
        assert stub.Generate(pb.GenerateRequest(prompt=["a"], model="other", max_tokens=1), metadata=md).choices
        assert failure(lambda: stub.Generate(pb.GenerateRequest(prompt=["a"], model="tiny"), metadata=md))[0] == "PERMISSION_DENIED"
        assert failure(lambda: stub.GetModel(pb.GetModelRequest(model="tiny"), metadata=md))[0] == "PERMISSION_DENIED"
        assert failure(lambda: stub.Generate(pb.GenerateRequest(prompt=["a"], model="other"), metadata=[*md, ("x-qos-level", "high")])
                       )[0] == "PERMISSION_DENIED"


# ---- tenants ----


def cached(server, name, prompt):
    return server.json("/v1/completions", {"prompt": prompt, "max_tokens": 1}, bearer(name))[1]["usage"]["prompt_tokens_details"][
        "cached_tokens"]


def cached_grpc(server, name, prompt):
    with channel(server) as ch:
        usage = stubs.InferenceStub(ch).Generate(pb.GenerateRequest(prompt=[prompt], max_tokens=1), metadata=metadata(name)).usage
        return usage.cached_tokens


def test_tenants_do_not_share_prefixes(server):
    """The tenant reaches the engine over both front ends: the cache answers the same tenant only."""
    prompt = "The quick brown fox jumps over the lazy dog and runs away again. " * 6
    assert cached(server, "alpha", prompt) == 0 and cached(server, "alpha", prompt) > 0
    assert cached(server, "beta", prompt) == 0 and cached_grpc(server, "beta", prompt) > 0
    assert cached_grpc(server, "alpha", prompt) > 0 and cached_grpc(server, "worker", prompt) == 0 and cached(server, "worker", prompt) > 0


def test_only_the_own_tenants_calls_can_be_aborted(server):
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        for by, want in (("beta", "NOT_FOUND"), ("alpha", None), ("admin", None)):
            stream = stub.GenerateStream(pb.GenerateRequest(prompt=["Once"], max_tokens=500, ignore_eos=True, n=64, logprobs=20),
                                         metadata=[*metadata("alpha"), ("x-request-id", f"by-{by}")])
            next(stream)
            abort = pb.AbortRequest(request_id=f"by-{by}")
            if want:
                assert failure(lambda: stub.Abort(abort, metadata=metadata(by)))[0] == want
                stream.cancel()
            else:
                assert stub.Abort(abort, metadata=metadata(by)).aborted == 1
                assert failure(lambda: stream)[0] == "CANCELLED"


# ---- reloading ----


def test_reloading_loses_no_request(tmp_path, tmp_path_factory):
    """SIGHUP again and again under load: streams of a key that goes end as they began, new requests see the new table."""
    path = tmp_path / "keys.jsonl"
    lines = {name: json.dumps(ENTRIES.get(name) or entry(name)) for name in ("alpha", "beta", "late")}
    path.write_text(lines["alpha"] + "\n" + lines["beta"] + "\n")
    server = start_both(tmp_path_factory, SMOL, "--api-key-file", path, "--max-num-seqs", 16, "--max-model-len", 512,
                        "--no-metrics-require-key", wait=False)
    server.wait_ready()
    out = []

    def stream():
        body = json.dumps({"prompt": "Once", "max_tokens": 48, "ignore_eos": True, "stream": True})
        status, _, data = server.post("/v1/completions", body.encode(), bearer("beta"))
        out.append((status, events(data)[-1]))
    threads = [threading.Thread(target=stream) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("num_requests_running") == 12)
    path.write_text(lines["alpha"] + "\n" + lines["late"] + "\n")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: server.get("/v1/models", bearer("late"))[0] == 200)
    assert server.get("/v1/models", bearer("beta"))[0] == 401 and server.get("/v1/models", bearer("alpha"))[0] == 200
    path.write_text(lines["alpha"] + "\n{broken\n")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the API keys stay as they were" in server.text())
    assert "key 2 is not one line of JSON" in server.text()
    assert server.get("/v1/models", bearer("late"))[0] == 200
    for thread in threads:
        thread.join()
    assert out == [(200, "[DONE]")] * 12
    assert server.stop() == 0
    assert not any(key in server.text() for key in KEYS.values())


def test_a_broken_or_missing_key_file_leaves_the_keys_in_force(tmp_path, launch):
    path = tmp_path / "keys.jsonl"
    write(path, [ENTRIES["alpha"]])
    server = launch(TINY, "--api-key-file", path, "--no-metrics-require-key", wait=False)
    wait_for(lambda: "ready model" in server.text())

    def reloads():
        return [server.metric("reloads_total", outcome=outcome) for outcome in ("ok", "refused")]
    assert reloads() == [0, 0]
    for n, (damage, told) in enumerate([(lambda: path.write_text("{broken\n"), "keys.jsonl:2: did not find"),
                                        (lambda: path.write_text(""), "expected a list 'keys'"),
                                        (path.unlink, "No such file or directory")], 1):
        damage()
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.text().count("the API keys stay as they were") == n)
        assert told in server.text().splitlines()[-1]
        assert server.get("/v1/models", bearer("alpha"))[0] == 200 and server.get("/v1/models", bearer("beta"))[0] == 401
        assert reloads() == [0, n]
    write(path, [ENTRIES["beta"]])
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: reloads() == [1, 3])
    assert server.get("/v1/models", bearer("alpha"))[0] == 401 and server.get("/v1/models", bearer("beta"))[0] == 200
    assert server.stop() == 0


def test_the_command_makes_an_entry(tmp_path, launch):
    """What --hash-key prints is a line of a key file as it is; what can be guessed is refused; two hashes of one key differ."""
    key = "made-by-hand-0123456789"

    def hash_key(text):
        return subprocess.run([BIN / "sits2026d", "--hash-key"], input=text, capture_output=True, text=True, timeout=20)
    first, second = hash_key(key + "\n"), hash_key(key)
    assert first.returncode == second.returncode == 0 and first.stdout != second.stdout and key not in first.stdout
    for bad in ("", "\n", "short\n", "with a blank in it\n"):
        assert hash_key(bad).returncode == 1 and not hash_key(bad).stdout
    (tmp_path / "keys").write_text(first.stdout)
    server = launch(TINY, "--api-key-file", tmp_path / "keys", wait=False)
    server.wait_ready()
    assert server.get("/v1/models", {"Authorization": f"Bearer {key}"})[0] == 200
    assert server.get("/v1/models", {"Authorization": f"Bearer {key}x"})[0] == 401


def test_a_bad_file_does_not_start(tmp_path, launch):
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n  - {hash: plain-secret-in-file, tenant: a, roles: [admin]}\n")
    with pytest.raises(AssertionError, match="key 1: hash must be what"):
        launch(TINY, "--api-key-file", path, wait=False)


@pytest.mark.parametrize("text, ok", [
    (b"k" * 16 + b"\n", True), (b"k" * 16 + b"\r\n", True), (b"k" * 1023, True), (b"k" * 1024 + b"\n", False), (b"k" * 5000, False),
    (b"k" * 20 + b"\0rest\n", False), (b"k" * 20 + b"\rrest\n", False), (b"k" * 15 + b"\n", False), (b"", False)],
                         ids=["lf", "crlf", "longest", "over", "far-over", "nul", "cr", "short", "nothing"])
def test_a_key_is_hashed_whole_or_refused(text, ok):
    done = subprocess.run([BIN / "sits2026d", "--hash-key"], input=text, capture_output=True, timeout=60 * SLOW)
    assert (done.returncode == 0) == ok, done.stderr
    if ok:
        _, salt, digest = json.loads(done.stdout)["hash"].split(":")
        assert hashlib.sha256(bytes.fromhex(salt) + text.rstrip(b"\r\n")).hexdigest() == digest
    else:
        assert not done.stdout and b"sits2026d: the key has" in done.stderr or b"a key has printable" in done.stderr


def test_files_of_secrets_that_others_can_read_are_told(tmp_path, launch):
    """One rule for all of them, at the start and on SIGHUP, and the secret itself is not in the log."""
    certificate = dict(zip(*[iter(make_certificate(tmp_path))] * 2))
    files = {"ssl-keyfile": certificate["--ssl-keyfile"], "api-key-file": tmp_path / "keys.yaml", "audit-key-file": tmp_path / "audit.key",
             "config": tmp_path / "config.yaml"}
    write(files["api-key-file"], [ENTRIES["worker"]])
    files["audit-key-file"].write_text("k" * 40)
    files["config"].write_text(f"ssl-certfile: {certificate['--ssl-certfile']}\nssl-keyfile: {files['ssl-keyfile']}\n"
                               f"api-key: {KEYS['admin']}\n")
    for path in files.values():
        path.chmod(0o644)
    files["ssl-keyfile"].chmod(0o600)
    files["api-key-file"].chmod(0o640)
    server = launch(TINY, "--config", files["config"], "--api-key-file", files["api-key-file"], "--audit-log", tmp_path / "audit.log",
                    "--audit-key-file", files["audit-key-file"], wait=False)

    def told():
        return [re.search(r"daemon +(\S+)", line).group(1) for line in server.text().splitlines() if "others than its owner" in line]
    assert told() == ["api-key-file", "audit-key-file", "config"]
    assert "k" * 40 not in server.text() and KEYS["admin"] not in server.text()
    for path in files.values():
        path.chmod(0o600)
    files["ssl-keyfile"].chmod(0o604)
    wait_for(lambda: "ready model" in server.text())
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "API keys read again" in server.text())
    assert told()[3:] == ["ssl-keyfile"]
