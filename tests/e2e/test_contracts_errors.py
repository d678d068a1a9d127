"""Contracts of errors, limits, messages and templates. One test per line of the list, named after it."""
import json

import pytest
from conftest import TINY

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def check_error(status, data, want_status, code=None, param=None):
    error = (json.loads(data) if isinstance(data, bytes) else data)["error"]
    assert status == want_status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    if code:
        assert error["code"] == code
    if param:
        assert error["param"] == param
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"prompt": "a b c d " * 400}, {"prompt": "Once", "max_tokens": 600}, {"prompt": [5] * 513}])
def test_contract_42_43_44_45_context_overflow(tiny, body, stream):
    for _ in range(3):
        check_error(*tiny.json(TEXT, {**body, "stream": stream}), 400, "context_length_exceeded", "prompt")
    error = check_error(*tiny.json(CHAT, {"messages": [{"role": "user", "content": "a b c d " * 400}], "stream": stream}), 400,
                        "context_length_exceeded", "messages")
    assert "512" in error["message"]


def test_contract_43_413_for_bytes_only(launch):
    server = launch(TINY, "--max-body-bytes", 2000)
    check_error(*server.json(TEXT, {"prompt": "x" * 4000}), 413, "request_too_large")
    assert server.complete(max_tokens=2)[0] == 200


def test_contract_46_no_silent_truncation(tiny):
    _, answer = tiny.complete(prompt=[5] * 500, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 500
    check_error(*tiny.complete(prompt=[5] * 500, max_tokens=1, truncate_prompt_tokens=10), 400, "unsupported_parameter",
                "truncate_prompt_tokens")


def test_contract_47_both_token_limits_the_newer_wins(tiny):
    for fields, want in (({"max_tokens": 4}, 4), ({"max_completion_tokens": 5}, 5), ({"max_tokens": 9, "max_completion_tokens": 3}, 3)):
        _, answer = tiny.chat(**fields, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == want


ERRORS = [(TEXT, b"{", 400, "invalid_json"), (TEXT, b"[]", 400, "invalid_value"), (TEXT, b"{}", 400, "missing_required_parameter"),
          (CHAT, b'{"messages": []}', 400, "invalid_value"), (TEXT, b'{"prompt": "a", "n": 1e9}', 400, "invalid_value"),
          (TEXT, b'{"prompt": "a", "model": "x"}', 404, "model_not_found"), (TEXT, b'{"prompt": "\xff"}', 400, "invalid_json"),
          (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', 400, "unsupported_parameter"),
          ("/v1/nothing", b"{}", 404, "not_found"), ("/v1/models", b"{}", 405, "method_not_allowed")]


@pytest.mark.parametrize("path,body,status,code", ERRORS)
def test_contract_48_nested_error_with_string_code(tiny, path, body, status, code):
    got, headers, data = tiny.post(path, body)
    check_error(got, data, status, code)
    assert headers["content-type"] == "application/json"


def test_contract_49_errors_are_short_and_echo_nothing(tiny):
    secret = "Zq" * 100000
    for body in ({
            "prompt": secret,
            "n": 0
    }, {
            "prompt": "a",
            "model": secret[:250]
    }, {
            "prompt": "a",
            secret: 1,
            "n": -1
    }, {
            "prompt": [secret, 1]
    }, {
            "prompt": "a",
            "stop": [secret]
    }, {
            "prompt": "a",
            "logit_bias": {
                secret: 1
            }
    }):
        status, _, data = tiny.post(TEXT, body)
        assert 400 <= status < 500 and len(data) < 4500 and b"ZqZq" not in data
    status, _, data = tiny.get("/" + secret[:20000])
    assert 400 <= status < 500 and b"ZqZq" not in data


def test_contract_50_headers_are_capped(tiny):
    status, _, _ = tiny.raw(b"GET /health HTTP/1.1\r\nHost: t\r\nX: " + b"a" * 60000 + b"\r\n\r\n")
    assert status in (400, 413, 414, 431)
    many = b"".join(b"X-%d: a\r\n" % i for i in range(3000))
    try:
        status, _, _ = tiny.raw(b"GET /health HTTP/1.1\r\nHost: t\r\n" + many + b"\r\n")
    except ConnectionError:
        status = 431
    assert status in (0, 400, 413, 431)
    some = b"".join(b"X-%d: a\r\n" % i for i in range(150))
    status, _, data = tiny.raw(b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n" + some + b"\r\n")
    check_error(status, data, 400)
    assert tiny.get("/health")[0] == 200


def test_contract_51_chunked_bodies_are_counted_too(launch):
    server = launch(TINY, "--max-body-bytes", 2000)
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")
    body = b'{"prompt": "Once", "max_tokens": 2}'
    status, _, data = server.raw(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert status == 200, data
    status, _, data = server.raw(head + b"".join(b"3e8\r\n" + b"a" * 1000 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n")
    check_error(status, data, 413, "request_too_large")
    try:
        status, _, _ = server.raw(head + b"3e8\r\n" + (b"a" * 1000 + b"\r\n3e8\r\n") * 4000)
    except ConnectionError:
        status = 0
    assert status in (0, 413)


@pytest.mark.parametrize("length", [b"99999999999", b"9" * 40, b"-1", b"5x", b""])
def test_contract_51_bad_lengths_are_refused_before_the_body(tiny, length):
    status, _, _ = tiny.raw(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: " + length +
                            b"\r\nConnection: close\r\n\r\n", half_close=True)
    assert status in (400, 413)


def test_ids_outside_the_vocabulary(tiny):
    check_error(*tiny.complete(max_tokens=2, logit_bias={"512": 1}), 400, "invalid_value", "logit_bias")
    check_error(*tiny.complete(prompt=[512], max_tokens=2), 400, "invalid_value", "prompt")
    assert tiny.complete(max_tokens=2, stop_token_ids=[99999])[0] == 200


HUGE = [{
    "n": 129
}, {
    "n": 10**18
}, {
    "max_tokens": 10**12
}, {
    "logprobs": 21
}, {
    "logprobs": 10**9
}, {
    "stop": ["a"] * 17
}, {
    "stop": "a" * 1025
}, {
    "stop_token_ids": [1] * 129
}, {
    "logit_bias": {
        str(i): 1
        for i in range(1025)
    }
}, {
    "prompt": ["a"] * 257
}, {
    "prompt": ["a"] * 200,
    "n": 100
}, {
    "min_tokens": 10**12
}, {
    "top_k": 10**12
}]


@pytest.mark.parametrize("fields", HUGE)
def test_contract_52_hard_caps_on_every_size(tiny, fields):
    check_error(*tiny.complete(**{"max_tokens": 2, **fields}), 400)


def test_contract_52_deep_and_many_nodes(tiny):
    for body in (b"[" * 100000, b'{"prompt": ' + b"[" * 80 + b"]" * 80 + b"}", b'{"prompt": "a", "x": [' + b"0," * 300000 + b"0]}"):
        check_error(*tiny.post(TEXT, body)[::2], 400, "invalid_json")


def test_contract_53_deny_by_default(launch):
    server = launch(TINY, "--api-key", "sesame", wait=False)
    server.wait_ready()
    public = ["/health", "/health/live", "/health/ready", "/v1/health/model", "/ping"]
    for path in public:
        assert server.get(path)[0] == 200, path
    for path in ("/v1/models", "/v1/models/tiny", "/version", "/metrics", "/invocations", "/", "/docs", "/openapi.json"):
        status, headers, data = server.get(path)
        check_error(status, data, 401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}, {"Authorization": "Bearer sesam"},
                        {"Authorization": "Bearer sesame2"}, {"Authorization": "Bearer "}):
            check_error(*server.json(path, {"prompt": "a"}, headers), 401, "invalid_api_key")
    assert server.json(TEXT, {"prompt": "Once", "max_tokens": 2}, {"Authorization": "Bearer sesame"})[0] == 200
    assert server.get("/v1/models", {"Authorization": "bearer sesame"})[0] == 200
    assert "sesame" not in server.text()


def test_contract_53_metrics_by_option(launch):
    for option, want in (("--metrics-require-key", 401), ("--no-metrics-require-key", 200)):
        server = launch(TINY, "--api-key", "sesame", option, wait=False)
        server.wait_ready()
        assert server.get("/metrics")[0] == want
        assert server.get("/metrics", {"Authorization": "Bearer sesame"})[0] == 200


UNSUPPORTED = [{
    "tools": [{
        "type": "function",
        "function": {
            "name": "f"
        }
    }]
}, {
    "tool_choice": "required"
}, {
    "response_format": {
        "type": "json_object"
    }
}, {
    "response_format": {
        "type": "json_schema",
        "json_schema": {}
    }
}, {
    "functions": [{
        "name": "f"
    }]
}, {
    "function_call": {
        "name": "f"
    }
}, {
    "modalities": ["audio"]
}, {
    "audio": {
        "voice": "x"
    }
}, {
    "guided_json": {}
}, {
    "guided_regex": "a"
}, {
    "best_of": 2
}, {
    "prompt_logprobs": 1
}, {
    "use_beam_search": True
}, {
    "length_penalty": 2
}, {
    "structured_outputs": {}
}, {
    "web_search_options": {}
}, {
    "reasoning_effort": "low"
}]


@pytest.mark.parametrize("fields", UNSUPPORTED)
def test_contract_54_unsupported_parameters_are_refused_by_name(tiny, fields):
    check_error(*tiny.chat(**fields), 400, "unsupported_parameter", next(iter(fields)))


def test_contract_54_n_and_logit_bias_do_something(tiny):
    _, answer = tiny.chat(n=3, max_tokens=4, seed=1, temperature=1.5)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2] and len({c["message"]["content"] for c in answer["choices"]}) > 1
    _, answer = tiny.complete(max_tokens=3, logit_bias={"400": 100}, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [400, 400, 400]


def test_contract_55_the_templates_own_message(tiny):
    status, answer = tiny.json(CHAT, {"messages": [*USER, {"role": "system", "content": "x"}]})
    error = check_error(status, answer, 400, "invalid_messages", "messages")
    assert "System role not supported here" in error["message"]


def rendered(server, messages):
    return server.json("/tokenize", {"messages": messages})[1]["tokens"]


def test_contract_56_parts_are_joined_for_string_templates(tiny):
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    assert rendered(tiny, [{"role": "user", "content": parts}]) == rendered(tiny, [{"role": "user", "content": "Once upon\na time"}])
    assert tiny.json(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2})[0] == 200
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio", "input_audio": {}}):
        check_error(*tiny.json(CHAT, {"messages": [{
            "role": "user",
            "content": [part]
        }]}), 400, "unsupported_parameter", "messages[0].content")


def test_contract_37_38_assistant_turns_without_content(tiny):
    want = rendered(tiny, [*USER, {"role": "assistant", "content": ""}, *USER])
    for turn in ({"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "assistant", "content": []}):
        assert rendered(tiny, [*USER, turn, *USER]) == want
    check_error(*tiny.json(CHAT, {"messages": [{
        "role": "user",
        "content": None
    }]}), 400, "missing_required_parameter", "messages[0].content")


@pytest.mark.parametrize("message,param", [({
    "content": "x"
}, "role"), ({
    "role": "wizard",
    "content": "x"
}, "role"), ({
    "role": 5,
    "content": "x"
}, "role"), ({
    "role": "user",
    "content": 5
}, "content"), ({
    "role": "tool",
    "content": "x"
}, "role"), ({
    "role": "user",
    "content": [{
        "text": "x"
    }]
}, "content"), ({
    "role": "user",
    "content": "x",
    "name": 1
}, "name")])
def test_malformed_messages_name_the_field(tiny, message, param):
    check_error(*tiny.json(CHAT, {"messages": [*USER, message]}), 400, param=f"messages[1].{param}")


SMUGGLING = [
    b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd", b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"Transfer-Encoding: gzip\r\n\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"
]


@pytest.mark.parametrize("tail", SMUGGLING)
def test_ambiguous_framing_is_refused_and_the_connection_closed(tiny, tail):
    with tiny.connect(10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" + tail +
                     b"GET /version HTTP/1.1\r\nHost: t\r\n\r\n")
        data = b""
        while True:
            try:
                more = sock.recv(65536)
            except ConnectionError:
                break
            if not more:
                break
            data += more
    assert data.startswith(b"HTTP/1.1 400") and data.count(b"HTTP/1.1") == 1, data


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "GET"])
def test_wrong_methods_get_405_with_allow(tiny, method):
    status, headers, _ = tiny.raw(f"{method} /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
    assert status == 405 and headers["allow"] == "POST"
    if method != "GET":
        status, headers, _ = tiny.raw(f"{method} /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
        assert status == 405 and headers["allow"] == "GET, HEAD"


def test_content_type_has_to_be_json(tiny):
    for kind, want in (("application/json", 200), ("application/json; charset=utf-8", 200), ("text/plain", 415), ("application/jsonx", 415),
                       ("application/x-www-form-urlencoded", 415)):
        assert tiny.post(TEXT, {"prompt": "Once", "max_tokens": 1}, {"Content-Type": kind})[0] == want


def test_request_ids_come_back(tiny):
    for given, back in (("abc-1.2_3:4", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("<script>", False)):
        _, headers, _ = tiny.get("/version", {"X-Request-Id": given})
        assert (headers["x-request-id"] == given) == back and len(headers["x-request-id"]) >= 11
