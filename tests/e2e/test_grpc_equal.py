"""One table of requests through HTTP and gRPC, whole and streamed: the same text, token ids, log probabilities, usage and reasons; and the
same refusals, by the server's one status table."""
import json
import re

import pytest
from conftest import TINY
from grpc_client import (HTTP_OF, channel, choice_of_grpc, grpc, joined_stream, message, pb, start_both, stubs, usage_of_grpc)

GREEDY = {"temperature": 0, "max_tokens": 24}
USER = [{"role": "user", "content": "Once upon a time"}]


def generate(**fields):
    return "Generate", {"prompt": "Once upon a time", **GREEDY, **fields}


def chat(**fields):
    return "Chat", {"messages": USER, **GREEDY, **fields}


GOOD = [
    generate(),
    generate(max_tokens=1),
    generate(max_tokens=200),
    generate(prompt=""),
    generate(prompt="é 日本 \U0001F600 text"),
    generate(prompt=[403, 407, 261]),
    generate(prompt=["Once", "Lily went", "The dog"]),
    generate(prompt=[[403, 407], [261, 378, 432]]),
    generate(prompt=["Once", "The dog"], n=2, seed=3, temperature=1),
    generate(n=3, seed=5, temperature=0.9),
    generate(temperature=1, seed=1),
    generate(temperature=1, seed=-1),
    generate(temperature=2, seed=9223372036854775807),
    generate(temperature=1, seed=2, top_p=0.5),
    generate(temperature=1, seed=2, top_k=5),
    generate(temperature=1, seed=2, top_k=-1),
    generate(temperature=1, seed=2, min_p=0.2),
    generate(repetition_penalty=1.3),
    generate(presence_penalty=1.5),
    generate(frequency_penalty=-1.5),
    generate(stop="Lily"),
    generate(stop=["zzz", ", there", "girl"], max_tokens=60),
    generate(stop=["Lily"], include_stop_str_in_output=True),
    generate(stop_token_ids=[261, 432, 405]),
    generate(logit_bias={"403": 100}),
    generate(logit_bias={"403": -100, "407": 2.5}),
    generate(ignore_eos=True, max_tokens=300),
    generate(min_tokens=10, max_tokens=300),
    generate(logprobs=0),
    generate(logprobs=5),
    generate(logprobs=20, temperature=1, seed=4),
    generate(return_token_ids=True),
    generate(return_token_ids=True, prompt=["a", "b"], n=2, seed=1),
    generate(return_token_ids=True, logprobs=2, stop="time"),
    generate(echo=True),
    generate(echo=True, logprobs=1),
    generate(echo=True, max_tokens=0, logprobs=1),
    generate(add_special_tokens=False),
    generate(parse_special=False, prompt="<s>Once</s> upon"),
    generate(prompt="<s>Once</s> upon"),
    generate(skip_special_tokens=False, max_tokens=300),
    generate(priority=-3),
    generate(cache_salt="tenant a"),
    generate(model="tiny"),
    chat(),
    chat(max_completion_tokens=7),
    chat(max_completion_tokens=9, max_tokens=300),
    chat(n=2, seed=8, temperature=1),
    chat(messages=[{"role": "system", "content": "Be short."}, *USER]),
    chat(messages=[*USER, {"role": "assistant", "content": "there was"}, {"role": "user", "content": "and then?"}]),
    chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]}]),
    chat(messages=[{"role": "user", "content": "x", "name": "ann"}]),
    chat(messages=[{"role": "user", "content": "the end </s> token"}]),
    chat(messages=[*USER, {"role": "assistant", "content": None}]),
    chat(logprobs=True),
    chat(logprobs=True, top_logprobs=4),
    chat(logprobs=True, top_logprobs=20, temperature=1, seed=11, n=2),
    chat(return_token_ids=True, stop="."),
    chat(add_generation_prompt=False),
    chat(stop=["\n", "the"], max_tokens=100),
    chat(top_p=0.1, temperature=1.5, seed=6, min_tokens=3),
    chat(max_tokens=150, ignore_eos=True),
]

BAD = [
    generate(temperature=2.5),
    generate(temperature=-0.1),
    generate(temperature=float("nan")),
    generate(top_p=0.0),
    generate(top_p=1.5),
    generate(min_p=float("inf")),
    generate(top_k=-2),
    generate(n=0),
    generate(n=1000000),
    generate(max_tokens=0),
    generate(max_tokens=-1),
    generate(min_tokens=50, max_tokens=10),
    generate(stop=[""]),
    generate(stop=["x"] * 17),
    generate(stop=["y" * 2000]),
    generate(stop_token_ids=[-1]),
    generate(logit_bias={"5": 101}),
    generate(logit_bias={"-5": 1}),
    generate(logprobs=21),
    generate(repetition_penalty=0),
    generate(presence_penalty=2.1),
    generate(prompt=[512000]),
    generate(prompt="word " * 2000),
    generate(prompt=["a"] * 300),
    generate(model="nobody"),
    generate(cache_salt="s" * 300),
    ("Generate", {}),
    ("Chat", {}),
    chat(messages=[{"role": "", "content": "x"}]),
    chat(messages=[{"role": "wizard", "content": "x"}]),
    chat(messages=[{"role": "user"}]),
    chat(messages=[*USER, {"role": "system", "content": "late"}]),
    chat(messages=[{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]),
    chat(top_logprobs=3),
    chat(logprobs=True, top_logprobs=21),
    chat(model="nobody"),
    ("Tokenize", {}),
    ("Tokenize", {"prompt": "x", "messages": USER}),
    ("Tokenize", {"prompt": "x", "model": "nobody"}),
    ("Detokenize", {"tokens": [512000]}),
]

GRPC_OF_CODE = {
    "invalid_value": "INVALID_ARGUMENT",
    "missing_required_parameter": "INVALID_ARGUMENT",
    "invalid_messages": "INVALID_ARGUMENT",
    "context_length_exceeded": "INVALID_ARGUMENT",
    "unsupported_parameter": "INVALID_ARGUMENT",
    "model_not_found": "NOT_FOUND",
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    server = start_both(tmp_path_factory, TINY)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def stub(both):
    with channel(both) as ch:
        yield stubs.InferenceStub(ch)


def choice_of_http(c, answer):
    chat_log = (c.get("logprobs") or {}).get("content")
    legacy = c.get("logprobs") if chat_log is None else None
    out = {"index": c["index"], "text": c["message"]["content"] if "message" in c else c["text"], "finish": c["finish_reason"],
           "stop": c["stop_reason"], "ids": c.get("token_ids", []),
           "prompt_ids": c.get("prompt_token_ids", answer.get("prompt_token_ids", []))}
    if chat_log is not None:
        out["logprobs"] = [round(t["logprob"], 4) for t in chat_log]
        out["tokens"] = [bytes(t["bytes"]) for t in chat_log]
        out["tops"] = [sorted((bytes(x["bytes"]), round(x["logprob"], 4)) for x in t["top_logprobs"]) for t in chat_log]
    elif legacy:
        out["logprobs"] = [None if p is None else round(p, 4) for p in legacy["token_logprobs"]]
    else:
        out["logprobs"] = out["tokens"] = out["tops"] = []
    return out


def same(http, rpc):
    assert len(http) == len(rpc)
    for h, g in zip(http, rpc):
        for key, value in h.items():
            if key == "logprobs":
                assert [p is None for p in value] == [p is None for p in g[key]]
                assert all(p is None or abs(p - q) <= 2e-4 for p, q in zip(value, g[key])), (value, g[key])
            elif key == "tops":
                assert [[b for b, _ in row] for row in value] == [[b for b, _ in row] for row in g[key]]
            else:
                assert g[key] == value, (key, g[key], value)


def test_the_table_is_long_enough():
    assert len(GOOD) >= 60 and len(BAD) >= 30


def test_timing_on_request(both, stub):
    """As over HTTP: only when asked for, and the stages add up."""
    for method in ("Generate", "Chat"):
        body = next(b for m, b in GOOD if m == method)
        assert not getattr(stub, method)(message(method, body), timeout=60).usage.HasField("timing")
        asked = message(method, {**body, "return_timing": True})
        for answer in (getattr(stub, method)(asked, timeout=60), list(getattr(stub, method + "Stream")(asked, timeout=60))[-1]):
            t = answer.usage.timing
            assert t.total_ms >= t.time_to_first_token_ms > 0 and t.prefill_ms > 0
            assert abs(t.queue_ms + t.prefill_ms + t.decode_ms + t.scheduling_ms + t.delivery_ms - t.total_ms) < 0.01
    assert re.search(r"method=\S+ status=0 .* queue_ms=.* prefill_ms=.* decode_ms=.* scheduling_ms=.* delivery_ms=", both.text())


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_contract_66_whole_and_streamed_answers_equal_http(both, stub, number):
    """smg#1524: sampling, stop strings and all else mean the same on both front ends."""
    method, body = GOOD[number]
    status, answer = both.json(HTTP_OF[method], body)
    assert status == 200, answer
    wanted = [choice_of_http(c, answer) for c in answer["choices"]]
    usage = {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
    whole = getattr(stub, method)(message(method, body), timeout=60)
    same(wanted, [choice_of_grpc(c) for c in whole.choices])
    assert usage_of_grpc(whole.usage) == usage and whole.model == answer["model"]
    assert whole.id.split("-")[0] == answer["id"].split("-")[0] and abs(whole.created - answer["created"]) <= 60
    choices, streamed_usage = joined_stream(getattr(stub, method + "Stream")(message(method, body), timeout=60))
    same(wanted, choices)
    assert streamed_usage == usage
    assert [c["tokens"] for c in choices] == [choice_of_grpc(c)["tokens"] for c in whole.choices]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_refusals_equal_http(both, stub, number):
    method, body = BAD[number]
    status, _, data = both.post(HTTP_OF[method], json.dumps(body).encode())
    is_json = not any(word in json.dumps(body) for word in ("NaN", "Infinity"))  # numbers that JSON does not have
    for name in (method, method + "Stream") if method in ("Generate", "Chat") else (method,):
        with pytest.raises(grpc.RpcError) as caught:
            answer = getattr(stub, name)(message(method, body), timeout=60)
            list(answer) if name.endswith("Stream") else None
        trailer = dict(caught.value.trailing_metadata())
        if not is_json:
            assert status == 400 and caught.value.code().name == "INVALID_ARGUMENT" and "finite" in caught.value.details()
            continue
        error = json.loads(data)["error"]
        assert 400 <= status < 500, error
        assert trailer["sits-error-code"] == error["code"] and caught.value.code().name == GRPC_OF_CODE[error["code"]]
        assert caught.value.details() == error["message"]
        assert trailer.get("sits-error-param") == error["param"]


def test_tokenize_and_detokenize_equal_http(both, stub):
    for body in ({"prompt": "Once upon a time"}, {"prompt": ""}, {"prompt": "a", "add_special_tokens": False}, {"messages": USER},
                 {"prompt": "</s>", "parse_special": False}, {"messages": USER, "add_generation_prompt": False},
                 {"prompt": "é 日本", "return_token_strs": True}):
        status, answer = both.json("/tokenize", body)
        got = stub.Tokenize(message("Tokenize", body))
        assert status == 200 and list(got.tokens) == answer["tokens"] and got.count == answer["count"]
        assert got.max_model_len == answer["max_model_len"] and list(got.token_strs) == (answer["token_strs"] or [])
        back = both.json("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
        assert stub.Detokenize(pb.DetokenizeRequest(tokens=answer["tokens"])).prompt == back


def test_models_equal_http(both, stub):
    wanted = json.loads(both.get("/v1/models")[2])["data"]
    got = stub.ListModels(pb.ListModelsRequest()).data
    assert [(m.id, m.created, m.owned_by, m.root, m.max_model_len) for m in got] == [
        (m["id"], m["created"], m["owned_by"], m["root"], m["max_model_len"]) for m in wanted]
    assert stub.GetModel(pb.GetModelRequest(model="tiny")) == got[0]
    for name, code in (("nobody", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModel(pb.GetModelRequest(model=name))
        assert caught.value.code() == code


def test_template_variables(tmp_path_factory):
    """chat_template_kwargs_json reaches the template; what is no JSON object is refused by name."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "t.jinja").write_text("{{ mood }}: {% for m in messages %}{{ m.content }}{% endfor %}")
    server = start_both(tmp_path_factory, TINY, "--chat-template", folder / "t.jinja")
    with channel(server) as ch:
        s = stubs.InferenceStub(ch)
        request = pb.TokenizeRequest(chat_template_kwargs_json='{"mood": "happy"}')
        request.messages.add(role="user", content="Once")
        wanted = server.json("/tokenize", {"messages": [{"role": "user", "content": "Once"}], "chat_template_kwargs": {"mood": "happy"}})[1]
        assert list(s.Tokenize(request).tokens) == wanted["tokens"]
        for text in ("[1]", "{", "7"):
            request.chat_template_kwargs_json = text
            with pytest.raises(grpc.RpcError) as caught:
                s.Tokenize(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert server.stop() == 0
