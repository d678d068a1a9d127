"""Contracts of server-sent events and usage: framing, chunks, the end of a stream, ids. One test per line of the list, named after it."""
import json
import threading

import pytest
from conftest import TINY, joined, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "Once upon a time"}]}
BOTH = [(CHAT, MESSAGES), (TEXT, {"prompt": "Once upon a time"})]


def chunks(payloads):
    assert payloads[-1] == "[DONE]"
    return [json.loads(p) for p in payloads[:-1]]


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_01_exactly_one_done_then_close(tiny, path, body):
    status, payloads, _ = tiny.stream(path, {**body, "max_tokens": 8})
    assert status == 200 and payloads.count("[DONE]") == 1 and payloads[-1] == "[DONE]"


def test_contract_01_done_after_an_error_in_the_stream(launch):
    server = launch(TINY, "--request-timeout-s", "0.05")
    status, payloads, _ = server.stream(TEXT, {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "n": 64})
    assert status == 200 and payloads.count("[DONE]") == 1 and payloads[-1] == "[DONE]"
    error = json.loads(payloads[-2])["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path,body", BOTH)
@pytest.mark.parametrize("bad", [{"n": 0}, {"temperature": 9}, {"max_tokens": 100000}, {"stop": ""}, {"model": "nobody"}])
def test_contract_02_errors_before_the_first_byte_are_plain_json(tiny, path, body, bad):
    status, headers, data = tiny.post(path, {**body, **bad, "stream": True})
    assert 400 <= status < 500 and headers["content-type"] == "application/json"
    assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_03_usage_in_a_chunk_of_its_own(tiny, path, body):
    _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 6, "stream_options": {"include_usage": True}})
    last = chunks(payloads)[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 6


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_04_usage_null_on_other_chunks_when_opted_in(tiny, path, body):
    _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 6, "stream_options": {"include_usage": True}})
    for chunk in chunks(payloads)[:-1]:
        assert "usage" in chunk and chunk["usage"] is None


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_05_choices_key_always_present(tiny, path, body):
    _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 6, "stream_options": {"include_usage": True}})
    assert all("choices" in chunk for chunk in chunks(payloads))


def test_contract_06_same_usage_chunk_on_both_endpoints(tiny):
    keys = []
    for path, body in BOTH:
        _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 3, "stream_options": {"include_usage": True}})
        last = chunks(payloads)[-1]
        keys.append((set(last), set(last["usage"])))
    assert keys[0] == keys[1]


@pytest.mark.parametrize("path,body", BOTH)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}])
def test_contract_07_no_usage_without_opting_in(tiny, path, body, options):
    _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 4, **options})
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks(payloads))


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_08_finish_reason_null_until_the_last(tiny, path, body):
    _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 6})
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks(payloads)]
    assert reasons[-1] == "length" and all(r is None for r in reasons[:-1]) and len(reasons) >= 6


@pytest.mark.parametrize("path,body", BOTH)
@pytest.mark.parametrize("n", [1, 3])
def test_contract_09_10_one_reason_per_choice(tiny, path, body, n):
    for seed in range(5):
        _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 20, "n": n, "seed": seed, "stop": "e"})
        reasons = {}
        for chunk in chunks(payloads):
            for choice in chunk["choices"]:
                assert choice["index"] not in reasons, "a chunk after the finish"
                if choice["finish_reason"] is not None:
                    reasons[choice["index"]] = choice["finish_reason"]
        assert sorted(reasons) == list(range(n)) and set(reasons.values()) <= {"stop", "length"}


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_11_explicit_final_chunk(tiny, path, body):
    _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 3})
    assert json.loads(payloads[-2])["choices"][0]["finish_reason"] == "length" and payloads[-1] == "[DONE]"


@pytest.mark.parametrize("path,body", BOTH)
def test_contract_12_deltas_only(tiny, path, body):
    body = {**body, "max_tokens": 30, "temperature": 0}
    _, payloads, _ = tiny.stream(path, body)
    _, whole = tiny.json(path, body)
    choice = whole["choices"][0]
    assert joined(payloads) == (choice["text"] if path == TEXT else choice["message"]["content"])


@pytest.mark.parametrize("path,body,prefix", [(*BOTH[0], "chatcmpl-"), (*BOTH[1], "cmpl-")])
def test_contract_13_one_id_per_stream(tiny, path, body, prefix):
    seen = set()
    for _ in range(3):
        _, payloads, _ = tiny.stream(path, {**body, "max_tokens": 3})
        ids = {chunk["id"] for chunk in chunks(payloads)}
        assert len(ids) == 1
        seen |= ids
    assert len(seen) == 3 and all(i.startswith(prefix) and len(i) > len(prefix) + 16 for i in seen)


def test_chat_stream_opens_with_the_role(tiny):
    _, payloads, _ = tiny.stream(CHAT, {**MESSAGES, "max_tokens": 3, "n": 2})
    first = {}
    for chunk in chunks(payloads):
        for choice in chunk["choices"]:
            first.setdefault(choice["index"], choice["delta"])
    assert first == {0: {"role": "assistant", "content": ""}, 1: {"role": "assistant", "content": ""}}


def test_continuous_usage_counts_up(tiny):
    _, payloads, _ = tiny.stream(TEXT, {"prompt": "Once", "max_tokens": 5,
                                        "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(payloads)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 5


def test_ping_comments_while_a_stream_is_silent(launch):
    """A stream that waits behind others gets comments, which parsers skip."""
    server = launch(TINY, "--sse-ping-s", "0.05", "--max-num-seqs", "1")
    ahead = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True}
    threads = [threading.Thread(target=server.complete, kwargs=ahead) for _ in range(80)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("num_requests_waiting") >= 40)
    status, payloads, data = server.stream(TEXT, {"prompt": "Once", "max_tokens": 3})
    for thread in threads:
        thread.join()
    assert status == 200 and payloads[-1] == "[DONE]"
    assert b": ping\n\n" in data
