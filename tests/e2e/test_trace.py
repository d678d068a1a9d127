"""Traces as a collector gets them: OTLP/HTTP in JSON, decoded strictly (unknown or mistyped members fail), with ids that join client,
server and stages, over HTTP and gRPC; sampling; a collector that is slow, failing or away costs spans, which are counted, no request."""
import base64
import http.server
import json
import re
import subprocess
import threading
import time

import pytest
from conftest import BIN, SLOW, TINY, start, wait_for

json_format = pytest.importorskip("google.protobuf.json_format")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
from grpc_client import channel, pb, start_both, stubs  # noqa: E402

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
STAGES = ["receive", "prepare", "queue", "prefill", "decode"]


class Collector:
    """A stub of an OpenTelemetry collector."""

    def __init__(self):
        self.bodies, self.headers, self.paths = [], [], []
        self.answer, self.reply, self.delay = 200, b"{}", 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(outer.delay)
                if outer.answer == 200:
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                outer.paths.append(self.path)
                self.send_response(outer.answer)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(outer.reply)))
                self.end_headers()
                self.wfile.write(outer.reply)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self):
        """Every span so far, decoded by OpenTelemetry's own schema; ids are hex in OTLP's JSON, base64 in protobuf's."""
        found = []
        for body in self.bodies:
            text = re.sub(r'"(traceId|spanId|parentSpanId)":"([0-9a-f]+)"',
                          lambda m: f'"{m[1]}":"{base64.b64encode(bytes.fromhex(m[2])).decode()}"', body.decode())
            message = json_format.Parse(text, service.ExportTraceServiceRequest())
            for resource in message.resource_spans:
                assert attributes(resource.resource)["service.name"] == "sits2026d"
                for scope in resource.scope_spans:
                    assert scope.scope.name == "sits2026"
                    found += scope.spans
        return found

    def wait(self, n, seconds=20):
        """Until n requests' spans are here; a request's spans come together."""
        end = time.time() + seconds * SLOW
        while len(roots(self.spans())) < n:
            assert time.time() < end, self.spans()
            time.sleep(0.05)
        return self.spans()


def value_of(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(v) for v in value.array_value.values]
    return getattr(value, kind)


def attributes(holder):
    out = {a.key: value_of(a.value) for a in holder.attributes}
    assert len(out) == len(holder.attributes), "a key comes once"
    return out


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()


def roots(spans):
    return [s for s in spans if s.kind == s.SPAN_KIND_SERVER]


def check_tree(spans, root):
    """The stages hang below the request's span, in order and inside it, without gaps between queue, prefill and decode."""
    stages = sorted((s for s in spans if s.parent_span_id == root.span_id), key=lambda s: STAGES.index(s.name))
    assert all(s.trace_id == root.trace_id and s.kind == s.SPAN_KIND_INTERNAL for s in stages)
    assert len({s.span_id for s in spans}) == len(spans)
    by_name = {s.name: s for s in stages}
    assert [s.name for s in stages][-4:] == STAGES[1:]
    for a, b in zip(stages, stages[1:]):
        assert a.start_time_unix_nano <= a.end_time_unix_nano == b.start_time_unix_nano, (a.name, b.name)
    assert root.start_time_unix_nano <= stages[0].start_time_unix_nano
    assert by_name["decode"].end_time_unix_nano <= root.end_time_unix_nano
    assert abs(root.start_time_unix_nano / 1e9 - time.time()) < 300
    return by_name


def test_ids_join_client_server_and_stages(tmp_path_factory, collector):
    server = start_both(tmp_path_factory, TINY, "--otlp-endpoint", collector.url, "--otlp-headers", "x-team=blue, authorization=Bearer abc")
    body = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0.5}
    assert server.post("/v1/completions", body, {"traceparent": PARENT, "tracestate": "vendor=1"})[0] == 200
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "stream": True,
                                                "ignore_eos": True, "n": 2})[0] == 200
    assert server.get("/health")[0] == 200 and server.get("/metrics")[0] == 200 and server.get("/v1/models")[0] == 200
    with channel(server) as link:
        stubs.InferenceStub(link).Generate(pb.GenerateRequest(prompt=["Once upon a time"], max_tokens=8, ignore_eos=True),
                                           metadata=[("traceparent", PARENT.replace(SPAN, SPAN[::-1])), ("x-request-id", "rpc")])
    spans = collector.wait(4)
    by_name = {s.name: s for s in roots(spans)}
    assert set(by_name) == {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "sits2026.v1.Inference/Generate"}
    first = by_name["POST /v1/completions"]
    assert first.trace_id.hex() == TRACE and first.parent_span_id.hex() == SPAN and first.trace_state == "vendor=1"
    check_tree([s for s in spans if s is first or s.parent_span_id == first.span_id], first)
    said = attributes(first)
    assert {k: v for k, v in said.items() if k not in ("sits2026.request.id", "client.address", "gen_ai.latency.time_to_first_token")} == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "sits2026", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.max_tokens": 8, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 1, "gen_ai.request.stream": False, "gen_ai.usage.input_tokens": said["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 8, "gen_ai.usage.cached_input_tokens": 0, "gen_ai.response.finish_reasons": ["length"]}
    assert 0 < said["gen_ai.latency.time_to_first_token"] < 60 * SLOW
    chat = by_name["POST /v1/chat/completions"]
    assert chat.trace_id.hex() != TRACE and not chat.parent_span_id
    stages = check_tree([s for s in spans if s is chat or s.parent_span_id == chat.span_id], chat)
    decode = stages["decode"]
    assert decode.end_time_unix_nano - decode.start_time_unix_nano > 0.2 * (chat.end_time_unix_nano - chat.start_time_unix_nano)
    rpc = by_name["sits2026.v1.Inference/Generate"]
    assert rpc.trace_id.hex() == TRACE and rpc.parent_span_id.hex() == SPAN[::-1]
    check_tree([s for s in spans if s is rpc or s.parent_span_id == rpc.span_id], rpc)
    said = attributes(rpc)
    assert (said["rpc.system"], said["rpc.grpc.status_code"], said["sits2026.request.id"]) == ("grpc", 0, "rpc")
    assert said["gen_ai.usage.output_tokens"] == 8
    assert collector.paths[0] == "/v1/traces" and collector.headers[0]["x-team"] == "blue"
    assert collector.headers[0]["authorization"] == "Bearer abc"
    wait_for(lambda: server.metric("trace_spans_exported_total") == len(spans))  # counted once the collector has answered
    assert server.stop() == 0
    assert "Bearer abc" not in server.text()


def test_errors_and_refusals_are_told(tmp_path_factory, collector):
    server = start(tmp_path_factory, TINY, "--otlp-endpoint", collector.url + "/custom/path")
    assert server.complete("x", max_tokens=-5)[0] == 400
    assert server.get("/nowhere")[0] == 404
    by_name = {s.name: attributes(s) for s in roots(collector.wait(2))}
    assert by_name["POST /v1/completions"]["http.response.status_code"] == 400
    assert by_name["POST /v1/completions"]["error.type"] == "INVALID_ARGUMENT"
    assert by_name["GET ?"]["error.type"] == "NOT_FOUND"
    assert all(not s.HasField("status") for s in collector.spans()), "a client's fault is no error of the server"
    assert collector.paths[0] == "/custom/path"
    assert server.stop() == 0


def test_sampling_follows_the_parent_then_the_ratio(tmp_path_factory, collector):
    server = start(tmp_path_factory, TINY, "--otlp-endpoint", collector.url, "--otlp-sampling-ratio", 0.25)
    for i in range(200):
        assert server.get("/v1/models", {"traceparent": f"00-{i + 1:032x}-{SPAN}-00"})[0] == 200
    for i in range(10):
        assert server.get("/v1/models", {"traceparent": f"00-{i + 1:032x}-{SPAN}-01"})[0] == 200
    for _ in range(200):
        assert server.get("/v1/models")[0] == 200
    assert server.stop() == 0  # sends what is queued
    spans = collector.spans()
    asked = [s for s in spans if s.parent_span_id.hex() == SPAN]
    assert sorted(int.from_bytes(s.trace_id, "big") for s in asked) == list(range(1, 11))
    assert 20 <= len(spans) - len(asked) <= 85  # 200 at 0.25: beyond 5 sigma on either side


@pytest.mark.parametrize("fault", ["away", "failing", "refusing"])
def test_a_bad_collector_costs_spans_only(tmp_path_factory, collector, fault):
    if fault == "away":
        collector.server.shutdown()
        collector.server.server_close()
    collector.answer = {"failing": 503, "refusing": 400}.get(fault, 200)
    server = start(tmp_path_factory, TINY, "--otlp-endpoint", collector.url)
    began = time.time()
    for _ in range(20):
        assert server.get("/v1/models")[0] == 200
    assert time.time() - began < 5 * SLOW
    end = time.time() + 30 * SLOW
    while server.metric("trace_spans_dropped_total", reason="export_failed") < 20:
        assert time.time() < end
        time.sleep(0.1)
    assert "spans are dropped" in server.text()
    began = time.time()
    assert server.stop() == 0
    assert time.time() - began < 10 * SLOW


def test_a_stuck_collector_fills_the_queue_and_drops_are_counted(tmp_path_factory, collector):
    collector.delay = 8
    server = start(tmp_path_factory, TINY, "--otlp-endpoint", collector.url, "--otlp-queue-size", "64K")
    began = time.time()
    slowest = 0
    while not (dropped := server.metric("trace_spans_dropped_total", reason="queue_full")):
        assert time.time() - began < 60 * SLOW
        asked = time.time()
        assert server.get("/v1/models", {"tracestate": "x" * 400, "traceparent": PARENT})[0] == 200
        slowest = max(slowest, time.time() - asked)
    assert dropped > 0 and slowest < 2 * SLOW
    began = time.time()
    assert server.stop() == 0
    assert time.time() - began < 20 * SLOW


def test_a_post_that_hangs_does_not_hold_the_stop_up(tmp_path_factory, collector):
    collector.delay = 30
    server = start(tmp_path_factory, TINY, "--otlp-endpoint", collector.url)
    assert server.get("/v1/models")[0] == 200
    time.sleep(1.5)  # the post has begun and has ten seconds
    assert server.get("/v1/models")[0] == 200
    began = time.time()
    assert server.stop() == 0
    assert time.time() - began < 6 * SLOW
    assert "spans are dropped" in server.text() and "the daemon stops" in server.text()


def test_an_endpoint_with_a_password_is_refused_and_not_shown(tmp_path):
    for url in ("http://user:swordfish@127.0.0.1:9", "https://swordfish@127.0.0.1/v1/traces"):
        done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--otlp-endpoint", url], capture_output=True,
                              timeout=60 * SLOW)
        assert done.returncode == 1 and b"otlp-headers" in done.stderr and b"swordfish" not in done.stderr


def test_partial_success_is_counted(tmp_path_factory, collector):
    collector.reply = json.dumps({"partialSuccess": {"rejectedSpans": "1", "errorMessage": "no"}}).encode()
    server = start(tmp_path_factory, TINY, "--otlp-endpoint", collector.url)
    for _ in range(3):
        assert server.get("/v1/models")[0] == 200
    collector.wait(3)
    end = time.time() + 20 * SLOW
    while server.metric("trace_spans_exported_total") + server.metric("trace_spans_dropped_total", reason="export_failed") < 3:
        assert time.time() < end
        time.sleep(0.05)
    assert server.metric("trace_spans_dropped_total", reason="export_failed") >= 1
    assert server.stop() == 0
