"""gRPC calls' and the front end's life: health, reflection, deadlines, cancellation, limits, keys, keepalive, load, draining, TLS."""
import concurrent.futures
import json
import os
import re
import resource
import signal
import socket
import subprocess
import time

import pytest
from conftest import BIN, ROOT, SLOW, SMOL, TINY, free_port, make_certificate, wait_for
from google.protobuf import descriptor_pb2
from grpc_client import begin, channel, grpc, joined_stream, pb, start_both, stubs
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
            "sits2026.v1.Inference"]
LONG = {"prompt": ["Once"], "max_tokens": 1500, "ignore_eos": True, "n": 4}


def failure(call):
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        for _ in answer if hasattr(answer, "__next__") else ():
            pass
    return caught.value


def code(call):
    return failure(call).code().name


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_both(tmp_path_factory, TINY, "--max-num-seqs", 512, "--max-queued-requests", 2000, "--max-body-bytes", "1M")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A model whose answers take seconds, so that clients can leave in the middle."""
    server = start_both(tmp_path_factory, SMOL, "--served-model-name", "smol", "--max-model-len", 8192, "--max-num-seqs", 16,
                        "--kv-cache-memory", "600M")
    yield server
    assert server.stop() == 0


@pytest.fixture
def stub(server):
    with channel(server) as ch:
        yield stubs.InferenceStub(ch)


# ---- health and reflection ----


def test_contract_65_health_is_standard_and_mirrors_readiness(server):
    """vLLM#48033: grpc.health.v1 is registered, by name and for the whole server."""
    with channel(server) as ch:
        health = health_pb2_grpc.HealthStub(ch)
        for name in ("", *SERVICES):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
            assert next(health.Watch(health_pb2.HealthCheckRequest(service=name))).status == SERVING
        assert code(lambda: health.Check(health_pb2.HealthCheckRequest(service="nobody"))) == "NOT_FOUND"
        watch = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert watch.is_active()
        watch.cancel()


def test_contract_65_not_serving_while_loading_then_serving(begin):
    server = begin(SMOL, wait=False)
    wait_for(lambda: "gRPC on" in server.text())
    with channel(server) as ch:
        watch = health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest())
        seen = [next(watch).status]
        if seen[0] == NOT_SERVING:
            assert "UNAVAILABLE" in (code(lambda: stubs.InferenceStub(ch).Generate(pb.GenerateRequest(prompt=["a"], max_tokens=1))), )
            seen.append(next(watch).status)
        assert seen[-1] == SERVING and server.get("/health/ready")[0] == 200
        watch.cancel()


def without_json_names(file):
    """protoc writes them, the Python compiler leaves them out."""
    def strip(message):
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            strip(nested)
    for message in file.message_type:
        strip(message)
    return file


def test_reflection_lists_services_and_files(server):
    with channel(server) as ch:
        base = ProtoReflectionDescriptorDatabase(ch)
        assert sorted(base.get_services()) == SERVICES
        for symbol, name in (("sits2026.v1.Inference", "sits2026/v1/inference.proto"),
                             ("sits2026.v1.Inference.Chat", "sits2026/v1/inference.proto"),
                             ("sits2026.v1.GenerateRequest.temperature", "sits2026/v1/inference.proto"),
                             ("sits2026.v1.GenerateRequest.LogitBiasEntry", "sits2026/v1/inference.proto"),
                             ("grpc.health.v1.HealthCheckResponse.ServingStatus", "grpc/health/v1/health.proto"),
                             ("grpc.reflection.v1.ServerReflection", "grpc/reflection/v1/reflection.proto"),
                             ("grpc.reflection.v1alpha.ServerReflection", "grpc/reflection/v1alpha/reflection.proto")):
            assert base.FindFileContainingSymbol(symbol).name == name
        got, wanted = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
        got.CopyFrom(base.FindFileByName("sits2026/v1/inference.proto"))
        pb.DESCRIPTOR.CopyToProto(wanted)
        assert without_json_names(got) == without_json_names(wanted)
        for missing in ("sits2026.v1", "sits2026.v1.Nobody", "sits2026.v1.Inference.Nobody", "sits2026"):
            with pytest.raises(KeyError):
                ProtoReflectionDescriptorDatabase(ch).FindFileContainingSymbol(missing)  # a new one: they guess from what they know
        with pytest.raises(KeyError):
            base.FindFileByName("nobody.proto")


def test_reflection_v1(server):
    """The same bytes under the newer name: v1alpha's messages serve as v1's."""
    from grpc_reflection.v1alpha import reflection_pb2
    with channel(server) as ch:
        call = ch.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString)
        asked = [reflection_pb2.ServerReflectionRequest(host="h", list_services=""),
                 reflection_pb2.ServerReflectionRequest(file_by_filename="nobody"),
                 reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="sits2026.v1.Usage"),
                 reflection_pb2.ServerReflectionRequest()]
        got = list(call(iter(asked), timeout=20))
        assert sorted(s.name for s in got[0].list_services_response.service) == SERVICES
        assert got[0].valid_host == "h" and [g.original_request for g in got] == asked
        assert [g.error_response.error_code for g in got[1:]] == [5, 5, 3]


# ---- limits, bytes, keys ----


def test_contract_64_messages_over_the_limit_are_refused_with_text(server, stub):
    """TRT-LLM#13519: message size is finite; at the limit calls work, beyond it RESOURCE_EXHAUSTED says why."""
    small = pb.TokenizeRequest(prompt="a " * 300000)
    assert stub.Tokenize(small).count > 10000
    error = failure(lambda: stub.Tokenize(pb.TokenizeRequest(prompt="a " * 600000)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in error.details()
    assert stub.Tokenize(pb.TokenizeRequest(prompt="a")).count > 0


def raw(server, method, data, metadata=None):
    with channel(server) as ch:
        return ch.unary_unary(f"/sits2026.v1.Inference/{method}")(data, timeout=20, metadata=metadata)


@pytest.mark.parametrize("data, text", [
    (b"\x12\x02\xff\xfe", "'prompt' is not valid UTF-8"),
    (b"\x12\x03a\x00b", "'prompt' must not hold a NUL character"),
    (b"\x0a\x02\xc3(", "'model' is not valid UTF-8"),
    (b"\x12\x05abc", "well-formed"),
    (b"\x10\x05", "well-formed"),
    (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "well-formed"),
    (b"\x13\x14", "well-formed"),
    (b"\x00\x01", "well-formed"),
    (b"".join(b"\xd2\x0f\x00" for _ in range(300)), "unknown fields"),
])
def test_bytes_that_are_no_message(server, data, text):
    error = failure(lambda: raw(server, "Generate", data))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and text in error.details()
    assert dict(error.trailing_metadata())["sits-error-code"] == "invalid_value"


def test_unknown_fields_are_ignored(server):
    request = pb.GenerateRequest(prompt=["Once"], max_tokens=3, temperature=0)
    data = request.SerializeToString()
    assert pb.GenerateResponse.FromString(raw(server, "Generate", data + b"\xd2\x0f\x03abc" * 10)).choices[0].text == \
        pb.GenerateResponse.FromString(raw(server, "Generate", data)).choices[0].text


def test_unknown_methods_and_compression(server):
    with channel(server) as ch:
        for path in ("/sits2026.v1.Inference/Nothing", "/nobody.Service/Call", "/sits2026.v1.Inference"):
            assert code(lambda p=path: ch.unary_unary(p)(b"", timeout=10)) == "UNIMPLEMENTED"
        stub = stubs.InferenceStub(ch)
        request = pb.TokenizeRequest(prompt="a" * 100000)
        assert code(lambda: stub.Tokenize(request, compression=grpc.Compression.Gzip, timeout=10)) == "UNIMPLEMENTED"


def test_too_much_metadata(server, stub):
    with channel(server) as ch:
        greedy = stubs.InferenceStub(ch)
        big = [("x-big", "a" * 60000)]
        assert code(lambda: greedy.ListModels(pb.ListModelsRequest(), metadata=big, timeout=20)) == "RESOURCE_EXHAUSTED"
    assert stub.ListModels(pb.ListModelsRequest()).data


def test_keys(begin):
    server = begin(TINY, "--api-key", "secret key 7", wait=False)
    wait_for(lambda: server.get("/health/ready")[0] == 200)
    with channel(server) as ch:
        stub, health = stubs.InferenceStub(ch), health_pb2_grpc.HealthStub(ch)
        calls = [lambda m: stub.ListModels(pb.ListModelsRequest(), metadata=m),
                 lambda m: stub.Generate(pb.GenerateRequest(prompt=["a"], max_tokens=1), metadata=m),
                 lambda m: stub.GenerateStream(pb.GenerateRequest(prompt=["a"], max_tokens=1), metadata=m),
                 lambda m: ch.unary_unary("/nobody.Service/Call")(b"", metadata=m, timeout=10)]
        for call in calls:
            for key in (None, "", "Bearer ", "Bearer secret key", "Bearer secret key 77", "Basic secret key 7", "secret key 7"):
                error = failure(lambda: call([("authorization", key)] if key is not None else None))
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
                assert dict(error.trailing_metadata())["sits-error-code"] == "invalid_api_key"
        good = [("authorization", "bearer secret key 7")]
        assert stub.ListModels(pb.ListModelsRequest(), metadata=good).data and calls[1](good).usage.completion_tokens == 1
        assert list(calls[2](good)) and code(lambda: calls[3](good)) == "UNIMPLEMENTED"
        assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING
        assert code(lambda: ProtoReflectionDescriptorDatabase(ch).get_services()) == "UNAUTHENTICATED"
    assert "secret" not in server.text()


def test_request_ids_and_classes(server, stub):
    request = pb.GenerateRequest(prompt=["a"], max_tokens=1)
    answer, call = stub.Generate.with_call(request, metadata=[("x-request-id", "job-17"), ("x-qos-level", "High")])
    assert dict(call.initial_metadata())["x-request-id"] == "job-17" and answer.id == "cmpl-job-17"
    answer, call = stub.Generate.with_call(request, metadata=[("x-request-id", "no spaces")])
    assert len(dict(call.initial_metadata())["x-request-id"]) == 32
    for level in ("urgent", "as urgent as can be", ""):
        error = failure(lambda: stub.Generate(request, metadata=[("x-qos-level", level)]))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and dict(error.trailing_metadata())["sits-error-param"] == "X-QoS-Level"


def test_metrics_count_calls_by_method_and_status(server, stub):
    def count(method, status):
        try:
            return server.metric("grpc_requests_total", method=method, status=status)
        except AssertionError:
            return 0
    path = "/sits2026.v1.Inference/Generate"
    good, bad, other = count(path, 0), count(path, 3), count("other", 12)
    stub.Generate(pb.GenerateRequest(prompt=["a"], max_tokens=1))
    assert code(lambda: stub.Generate(pb.GenerateRequest(prompt=["a"], temperature=9))) == "INVALID_ARGUMENT"
    with channel(server) as ch:
        assert code(lambda: ch.unary_unary("/a.B/C")(b"", timeout=10)) == "UNIMPLEMENTED"
    wait_for(lambda: (count(path, 0), count(path, 3), count("other", 12)) == (good + 1, bad + 1, other + 1))
    wait_for(lambda: server.metric("grpc_requests_in_flight") == 0)


# ---- leaving ----


def test_cancel_frees_pages(slow):
    before = slow.metric("client_disconnects_total")
    with channel(slow) as ch:
        stub = stubs.InferenceStub(ch)
        stream = stub.GenerateStream(pb.GenerateRequest(**LONG))
        next(stream)
        unary = stub.Generate.future(pb.GenerateRequest(**LONG))
        wait_for(lambda: slow.metric("num_requests_running") >= 5)
        start = time.time()
        stream.cancel()
        unary.cancel()
        slow.wait_quiet(5 * SLOW)
        assert time.time() - start < 3 * SLOW
    assert slow.metric("client_disconnects_total") >= before + 2


def test_cancel_frees_pages_within_one_step(slow):
    """The step under way when the news come may end; no further one is begun for a call that was cancelled, and its pages are free."""
    extra = []
    with channel(slow) as ch:
        for _ in range(5):
            stream = stubs.InferenceStub(ch).GenerateStream(pb.GenerateRequest(**LONG))
            next(stream)
            before = slow.metric("engine_steps_total")
            stream.cancel()
            slow.wait_quiet(5 * SLOW)
            extra.append(slow.metric("engine_steps_total") - before)
    assert sorted(extra)[2] <= 2, extra  # one that ran when the counter was read, one when the cancellation arrived


def leave_http(server):
    body = json.dumps({"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 4}).encode()
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b"data: " in sock.recv(65536) + sock.recv(65536)


def leave_grpc(server):
    with channel(server) as ch:
        stream = stubs.InferenceStub(ch).GenerateStream(pb.GenerateRequest(**LONG))
        next(stream)
        stream.cancel()


def abort(server):
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        stream = stub.GenerateStream(pb.GenerateRequest(**LONG), metadata=[("x-request-id", "to-abort")])
        next(stream)
        assert stub.Abort(pb.AbortRequest(request_id="to-abort")).aborted == 1


@pytest.mark.parametrize("leave", [leave_grpc, leave_http, abort])
def test_a_cancellation_takes_effect_before_the_next_plan(slow, leave):
    """As the engine itself counts: from being told, which the front end does at once, to the call's pages being free, no step begins. One
    may, where the news come between the look at them and the start of the step that was planned meanwhile."""
    def counts():
        return [slow.metric("cancellation_steps_count"), *(slow.metric("cancellation_steps_bucket", le=le) for le in "01")]
    n, before = 12, counts()
    for _ in range(n):
        leave(slow)
    slow.wait_quiet(5 * SLOW)
    total, none, one = (after - first for after, first in zip(counts(), before))
    assert total == n == one and none >= n - 2, (total, none, one)


def test_deadlines_end_the_work(slow):
    with channel(slow) as ch:
        stub = stubs.InferenceStub(ch)
        start = time.time()
        assert code(lambda: stub.Generate(pb.GenerateRequest(**LONG), timeout=0.5)) == "DEADLINE_EXCEEDED"
        assert code(lambda: stub.ChatStream(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Tell a long story")],
                                                           max_tokens=4000, ignore_eos=True), timeout=0.5)) == "DEADLINE_EXCEEDED"
        assert time.time() - start < 5 * SLOW
        slow.wait_quiet(5 * SLOW)


def test_a_client_that_dies_frees_pages(slow):
    ch = channel(slow)
    stream = stubs.InferenceStub(ch).GenerateStream(pb.GenerateRequest(**LONG))
    next(stream)
    ch.close()
    slow.wait_quiet(5 * SLOW)


def test_abort_by_request_id(slow):
    with channel(slow) as ch:
        stub = stubs.InferenceStub(ch)
        stream = stub.GenerateStream(pb.GenerateRequest(**LONG), metadata=[("x-request-id", "to-stop")])
        next(stream)
        assert code(lambda: stub.Abort(pb.AbortRequest(request_id="other"))) == "NOT_FOUND"
        assert code(lambda: stub.Abort(pb.AbortRequest())) == "INVALID_ARGUMENT"
        assert stub.Abort(pb.AbortRequest(request_id="to-stop")).aborted == 1
        error = failure(lambda: stream)
        assert error.code() == grpc.StatusCode.CANCELLED and dict(error.trailing_metadata())["sits-error-code"] == "cancelled"
        slow.wait_quiet(5 * SLOW)


def test_contract_63_keepalive_every_second_during_a_long_wait(begin):
    """vLLM#55102: a client that pings each second while nothing is sent is not cut off with Too many pings."""
    server = begin(SMOL, "--max-num-seqs", 1, "--max-model-len", 4096, "--served-model-name", "smol")
    with channel(server) as other, channel(server, **{"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 2000,
                                                      "grpc.keepalive_permit_without_calls": 1, "grpc.http2.max_pings_without_data": 0,
                                                      "grpc.http2.min_time_between_pings_ms": 500}) as ch:
        blocking = stubs.InferenceStub(other).GenerateStream(pb.GenerateRequest(prompt=["Once"], max_tokens=3900, ignore_eos=True))
        next(blocking)  # the only place is taken: the next call is silent until it is free
        waiting = stubs.InferenceStub(ch).Generate.future(pb.GenerateRequest(prompt=["Once"], max_tokens=3))
        with pytest.raises(grpc.FutureTimeoutError):
            waiting.result(timeout=8)
        blocking.cancel()
        assert waiting.result(timeout=60).usage.completion_tokens == 3


# ---- load ----


def test_500_streams_all_finish(server):
    n_streams, n_tokens, n_connections = 500, 60, 50
    channels = [channel(server) for _ in range(n_connections)]
    calls = [stubs.InferenceStub(channels[i % n_connections]).GenerateStream(
        pb.GenerateRequest(prompt=["Once upon a time"], max_tokens=n_tokens, ignore_eos=True, seed=i)) for i in range(n_streams)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for choices, usage in pool.map(joined_stream, calls):
            assert usage["completion_tokens"] == n_tokens and choices[0]["finish"] == "length"
    for ch in channels:
        ch.close()
    server.wait_quiet()
    rows = re.findall(r'sits2026:delivery_latency_seconds_bucket{[^}]*le="([^"]+)"} (\d+)', server.get("/metrics")[2].decode())
    p50, p99 = (next(bound for bound, count in rows if int(count) >= q * int(rows[-1][1])) for q in (0.5, 0.99))
    print(f"\n{n_streams} streams x {n_tokens} tokens: from the step's end to the writer p50 <= {p50} s, p99 <= {p99} s")


def test_500_streams_on_one_connection_half_of_them_leaving(server):
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        calls = [stub.GenerateStream(pb.GenerateRequest(prompt=["Once upon a time"], max_tokens=100, ignore_eos=True, n=1 + i % 2))
                 for i in range(500)]
        for call in calls[::2]:
            call.cancel()
        for call in calls[1::2]:
            choices, usage = joined_stream(call)
            assert usage["completion_tokens"] == 200 and len(choices) == 2
    server.wait_quiet()
    wait_for(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) < 100)


def test_a_client_that_does_not_read_is_bounded(server):
    """Its stream stalls, others go on, and nothing is kept of it when it leaves."""
    before = server.metric("slow_reader_stalls_total")
    with channel(server, **{"grpc.http2.lookahead_bytes": 1024, "grpc.http2.bdp_probe": 0}) as ch:
        stub = stubs.InferenceStub(ch)
        stream = stub.GenerateStream(pb.GenerateRequest(prompt=["Once"], max_tokens=500, ignore_eos=True, n=64, logprobs=20))
        wait_for(lambda: server.metric("slow_reader_stalls_total") > before, 60)
        with channel(server) as another:
            assert stubs.InferenceStub(another).Generate(pb.GenerateRequest(prompt=["a"], max_tokens=5, ignore_eos=True),
                                                         timeout=30).usage.completion_tokens == 5
        n_tokens = {}
        for response in stream:  # and when it reads again it gets all
            for choice in response.choices:
                n_tokens[choice.index] = n_tokens.get(choice.index, 0) + len(choice.logprobs)
        assert n_tokens == {i: 500 for i in range(64)}
    server.wait_quiet()


def test_connections_over_the_cap_are_refused_and_the_rest_goes_on(begin):
    server = begin(TINY, "--grpc-max-connections", 4)
    first = [channel(server) for _ in range(4)]
    for ch in first:
        assert stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), timeout=20).data
    with channel(server) as extra:
        assert code(lambda: stubs.InferenceStub(extra).ListModels(pb.ListModelsRequest(), timeout=20)) == "UNAVAILABLE"
    for ch in first:
        assert stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), timeout=20).data
        ch.close()

    def has_room():
        with channel(server) as ch:
            try:
                return bool(stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), timeout=5).data)
            except grpc.RpcError:
                return False
    wait_for(has_room)


def test_running_out_of_descriptors_is_outlived(begin):
    """CVE-2023-4785: the library's own listener never accepts again after accept has failed once; ours does."""
    server = begin(TINY)
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        assert stub.ListModels(pb.ListModelsRequest()).data
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 3, hard))
        socks = [socket.create_connection(server.grpc.split(":")) for _ in range(20)]
        wait_for(lambda: "could not be accepted" in server.text())
        assert stub.ListModels(pb.ListModelsRequest(), timeout=20).data  # open connections go on
        for sock in socks:
            sock.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(5):
        with channel(server) as ch:
            assert stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), timeout=20).data


# ---- stopping ----


def test_sigterm_drains(begin):
    """Readiness turns red and is told to watchers, what runs ends well, new calls are refused."""
    server = begin(SMOL, "--max-num-seqs", 16, "--max-model-len", 4096, "--shutdown-timeout-s", 60 * SLOW)
    with channel(server) as ch, channel(server) as other:
        lasting = stubs.InferenceStub(other).GenerateStream(pb.GenerateRequest(prompt=["Once"], max_tokens=4000, ignore_eos=True))
        stub = stubs.InferenceStub(ch)
        watch = health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        request = pb.GenerateRequest(prompt=["Once"], max_tokens=60, ignore_eos=True)
        streams = [stub.GenerateStream(request) for _ in range(8)]
        whole = [stub.Generate.future(request, timeout=60 * SLOW) for _ in range(4)]
        wait_for(lambda: server.metric("request_success_total", finished_reason="length") + server.metric("num_requests_running") == 13)
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        for _ in range(20):
            error = failure(lambda: stub.Generate(request, timeout=20))
            assert error.code().name == "UNAVAILABLE" and dict(error.trailing_metadata())["sits-error-code"] == "unavailable"
        with channel(server) as late:
            assert code(lambda: stubs.InferenceStub(late).Generate(request, timeout=20)) == "UNAVAILABLE"
        for stream in streams:
            rest = list(stream)
            assert rest[-1].usage.completion_tokens == 60 and rest[-2].choices[0].finish_reason == "length"
        assert all(call.result(timeout=60 * SLOW).usage.completion_tokens == 60 for call in whole)
        assert server.process.poll() is None
        lasting.cancel()
        assert failure(lambda: watch).code() == grpc.StatusCode.UNAVAILABLE
    assert server.process.wait(20 * SLOW) == 0


@pytest.mark.parametrize("second_signal", [False, True])
def test_past_the_grace_calls_end_with_unavailable(begin, second_signal):
    server = begin(SMOL, "--max-num-seqs", 16, "--max-model-len", 8192, "--shutdown-timeout-s", 60 if second_signal else 0.3)
    with channel(server) as ch:
        stub = stubs.InferenceStub(ch)
        streams = [stub.GenerateStream(pb.GenerateRequest(**LONG)) for _ in range(2)]
        whole = stub.Generate.future(pb.GenerateRequest(**LONG))
        for stream in streams:
            next(stream)
        start = time.time()
        server.process.send_signal(signal.SIGTERM)
        if second_signal:
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            error = failure(lambda s=stream: s)
            assert error.code() == grpc.StatusCode.UNAVAILABLE and dict(error.trailing_metadata())["sits-error-code"] == "unavailable"
        assert whole.exception(timeout=20).code() == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(20 * SLOW) == 0 and time.time() - start < 6 * SLOW


def test_a_library_that_does_not_stop_ends_the_process_with_status_1(tmp_path, begin):
    """The library promises that its shutdown ends. Here one in front of it keeps that to itself: nothing is freed under its hands, and
    after half a minute the process ends by itself and says why."""
    (tmp_path / "shim.c").write_text("void grpc_server_shutdown_and_notify(void *server, void *queue, void *tag) {}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c"], check=True)
    env = {"LD_PRELOAD": str(tmp_path / "shim.so"), "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
    server = begin(TINY, "--shutdown-timeout-s", 1, env=env)
    with channel(server) as ch:
        assert stubs.InferenceStub(ch).Generate(pb.GenerateRequest(prompt=["a"], max_tokens=1)).usage.completion_tokens == 1
        watch = health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        assert failure(lambda: watch).code() == grpc.StatusCode.UNAVAILABLE  # its clients were told all the same
    assert server.process.wait(60 * SLOW) == 1
    assert "the library is up" in server.text() and "not everything could be stopped" in server.text()


def test_two_daemons_cannot_share_a_port(server):
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--grpc-port", server.grpc.split(":")[1]],
                          capture_output=True, text=True, timeout=20 * SLOW)
    assert done.returncode == 1 and "cannot listen" in done.stderr


def test_client_certificates(tmp_path, begin):
    """With authorities given, only a client that shows a certificate of theirs is served."""
    pairs = {}
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        make_certificate(tmp_path / name, name)
        pairs[name] = [(tmp_path / name / f).read_bytes() for f in ("key.pem", "cert.pem")]
    server = begin(TINY, *make_certificate(tmp_path), "--grpc-client-cafile", tmp_path / "ours/cert.pem", wait=False)
    wait_for(lambda: "ready model" in server.text())
    root = (tmp_path / "cert.pem").read_bytes()

    def ask(*pair):
        with grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(root, *pair)) as ch:
            return stubs.InferenceStub(ch).ListModels(pb.ListModelsRequest(), timeout=5).data[0].id
    assert ask(*pairs["ours"]) == "tiny"
    assert code(lambda: ask()) in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert code(lambda: ask(*pairs["theirs"])) in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert ask(*pairs["ours"]) == "tiny"


def test_authorities_without_tls_are_refused():
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--grpc-port", "1", "--grpc-client-cafile", "x"],
                          capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "grpc-client-cafile needs" in done.stderr


def test_tls(tmp_path, begin):
    server = begin(TINY, *make_certificate(tmp_path), wait=False)
    credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
    wait_for(lambda: "ready model" in server.text())
    with grpc.secure_channel(server.grpc, credentials) as ch:
        stub = stubs.InferenceStub(ch)
        choices, usage = joined_stream(stub.GenerateStream(pb.GenerateRequest(prompt=["Once"], max_tokens=30, ignore_eos=True), timeout=30))
        assert usage["completion_tokens"] == 30
        watch = health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        with channel(server) as plain:
            assert code(lambda: stubs.InferenceStub(plain).ListModels(pb.ListModelsRequest(), timeout=5)) in ("UNAVAILABLE",
                                                                                                            "DEADLINE_EXCEEDED")
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
    assert server.process.wait(20 * SLOW) == 0


def test_tls_with_a_bad_key_is_an_error_with_a_text(tmp_path):
    options = make_certificate(tmp_path)
    (tmp_path / "key.pem").write_text("no key")
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--grpc-port", str(free_port()), *map(str, options)],
                          capture_output=True, text=True, timeout=20 * SLOW)
    assert done.returncode == 1 and ("certificate" in done.stderr)


def test_schema_is_read_by_the_reference_compiler(tmp_path):
    """All four files compile for Python too, and hold no import, on which reflection relies."""
    from grpc_tools import protoc
    files = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    assert len(files) == 4
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", *files]) == 0
    assert not any("import" in (ROOT / "proto" / f).read_text().split() for f in files)
