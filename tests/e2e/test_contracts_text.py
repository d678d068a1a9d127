"""Contracts of text integrity, stop strings, finish reasons and log probabilities. One test per line of the list, named after it."""
import json
import math

import pytest
from conftest import joined

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = [
    "Once upon a time", "The 日本語 story", "小さな猫が", "한국어 이야기", "😀 👩‍👩‍👧 party", "naïve café", "Привет", "עברית", "العربية", "a\tb\nc"
] * 5
# Byte tokens of the tiny model's vocabulary: <0x00> is id 3.
BYTE = {b: b + 3 for b in range(256)}


def force(*ids):
    """Bias that makes the model draw among these ids only."""
    return {str(i): 100 for i in ids}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_contract_12_21_streamed_equals_whole_on_50_prompts(tiny, path):
    different = 0
    for i, prompt in enumerate(PROMPTS):
        body = {"max_tokens": 40, "seed": i, "temperature": 2 if i % 2 else 1, "n": 1 + i % 3}
        body |= {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
        if i % 3 == 2:
            body["stop"] = ["the", " a"]
        if i % 4 == 1:  # bytes of characters of two to four bytes, in any order: many valid ones and many that are not
            body["logit_bias"] = force(*[BYTE[b] for b in "é日😀".encode()])
        status, whole = tiny.json(path, body)
        assert status == 200, whole
        status, payloads, _ = tiny.stream(path, body)
        for choice in whole["choices"]:
            text = choice["text"] if path == TEXT else choice["message"]["content"]
            assert joined(payloads, choice["index"]) == text
            different += any(ord(c) > 127 for c in text)
    assert different > 10, "the sample has to hold text beyond ASCII"


def test_contract_14_characters_are_never_split(tiny):
    """Bytes of one three-byte character in any order: the joined deltas are what those bytes decode to, bad ones replaced one by one."""
    body = {"prompt": "Once", "max_tokens": 200, "logit_bias": force(*[BYTE[b] for b in "€".encode()]), "temperature": 2, "seed": 3,
            "return_token_ids": True}
    _, payloads, _ = tiny.stream(TEXT, body)
    ids = [i for p in payloads[:-1] for c in json.loads(p)["choices"] for i in c["token_ids"]]
    assert len(ids) == 200
    want = bytes(i - 3 for i in ids).decode("utf-8", "replace")
    assert joined(payloads) == want and "€" in want and "\ufffd" in want
    _, whole = tiny.json(TEXT, body)
    assert whole["choices"][0]["text"] == want and whole["choices"][0]["token_ids"] == ids


def test_contract_15_stream_bytes_are_valid_utf8_in_every_read(tiny):
    """HTTP chunks end at character boundaries."""
    body = json.dumps({"prompt": "Once", "max_tokens": 200, "n": 8, "temperature": 2, "stream": True, "seed": 1,
                       "logit_bias": force(*[BYTE[b] for b in "é€😀".encode()])}).encode()
    with tiny.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" %
                     len(body) + body)
        file = sock.makefile("rb")
        while file.readline().strip():
            pass
        while True:
            size = int(file.readline(), 16)
            if size == 0:
                break
            file.read(size).decode("utf-8")
            file.readline()


def test_contract_16_19_bad_bytes_become_replacement_characters(tiny):
    body = {"prompt": "Once", "max_tokens": 100, "logit_bias": {str(BYTE[0xFF]): 100}, "temperature": 0}
    status, whole = tiny.json(TEXT, body)
    assert status == 200 and whole["choices"][0]["text"] == "\ufffd" * 100
    _, payloads, _ = tiny.stream(TEXT, body)
    pieces = [c["text"] for p in payloads[:-1] for c in json.loads(p)["choices"]]
    assert "".join(pieces) == "\ufffd" * 100 and max(map(len, pieces)) <= 4, "a run must not be held back"


def test_contract_17_lone_partial_bytes_in_a_prompt(tiny):
    status, answer = tiny.json(TEXT, {"prompt": [[1, BYTE[0xE2], BYTE[0x82]]], "max_tokens": 4})
    assert status == 200 and isinstance(answer["choices"][0]["text"], str)


def test_contract_18_prompt_ending_in_half_a_character(tiny):
    """The first delta must not hold the prompt."""
    body = {"prompt": [1, BYTE[0xE2], BYTE[0x82]], "max_tokens": 1, "logit_bias": {str(BYTE[0xAC]): 100}, "temperature": 0}
    _, payloads, _ = tiny.stream(TEXT, body)
    assert joined(payloads) == "\ufffd", "the answer is one stray continuation byte, whatever the prompt ended with"


def greedy(server, **more):
    status, answer = server.complete(temperature=0, max_tokens=40, **more)
    assert status == 200, answer
    return answer["choices"][0]


def test_contract_22_no_part_of_a_stop_string_is_streamed(tiny):
    text = greedy(tiny)["text"]
    stop = text[10:18]
    _, payloads, _ = tiny.stream(TEXT, {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": stop})
    assert joined(payloads) == text[:text.index(stop)]


def test_contract_23_held_text_is_flushed_at_the_end(tiny):
    """The text ends in the beginning of a stop string that never completes."""
    text = greedy(tiny)["text"]
    _, payloads, _ = tiny.stream(TEXT, {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": text[-3:] + "@@"})
    assert joined(payloads) == text


def test_contract_24_text_ids_and_logprobs_stay_together(tiny):
    body = {
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": 0,
        "return_token_ids": True,
        "stop": ["zzzz", " little"]
    }
    _, payloads, _ = tiny.stream(TEXT, body)
    text = ""
    for payload in payloads[:-1]:
        for choice in json.loads(payload)["choices"]:
            text += choice["text"]
            if choice["logprobs"]:
                assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
                assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    assert " little" not in text


def test_contract_25_end_token_by_id_and_never_in_the_text(tiny):
    """Id 2 is </s> in the tiny model; forcing it ends the answer with nothing in it."""
    status, answer = tiny.complete(max_tokens=10, temperature=0, logit_bias={"2": 100})
    choice = answer["choices"][0]
    assert status == 200 and choice["text"] == "" and choice["finish_reason"] == "stop" and choice["stop_reason"] is None
    status, answer = tiny.complete(max_tokens=5, temperature=0, logit_bias={"2": 100}, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("where", range(0, 30, 3))
def test_contract_26_stop_inside_a_token(tiny, where):
    text = greedy(tiny)["text"]
    stop = text[where + 1:where + 3]
    choice = greedy(tiny, stop=stop)
    assert choice["text"] == text[:text.index(stop)] and choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


def test_contract_27_stop_string_left_out_unless_asked_for(tiny):
    text = greedy(tiny)["text"]
    stop = text[12:16]
    cut = text[:text.index(stop)]
    assert greedy(tiny, stop=stop)["text"] == cut
    assert greedy(tiny, stop=stop, include_stop_str_in_output=True)["text"] == cut + stop


def test_contract_28_stop_word_over_several_tokens_and_characters(tiny):
    stop = "€€"
    status, answer = tiny.complete(prompt="Once",
                                   max_tokens=300,
                                   temperature=2,
                                   seed=5,
                                   stop=stop,
                                   logit_bias=force(*[BYTE[b] for b in "€".encode()]))
    choice = answer["choices"][0]
    assert stop not in choice["text"] and (choice["finish_reason"] == "length" or choice["stop_reason"] == stop)


def test_contract_29_only_the_reasons_of_the_specification(tiny):
    for body in ({"max_tokens": 3}, {"stop": " a"}, {"logit_bias": {"2": 100}}, {"stop_token_ids": list(range(3, 131))}):
        _, answer = tiny.complete(**{"max_tokens": 20, **body})
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_contract_29_detail_in_stop_reason(tiny):
    ids = tiny.complete(max_tokens=3, temperature=0, return_token_ids=True)[1]["choices"][0]["token_ids"]
    choice = tiny.complete(max_tokens=9, temperature=0, stop_token_ids=[ids[1]])[1]["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[1]


def test_contract_30_the_cap_is_length(tiny):
    assert greedy(tiny)["finish_reason"] == "length"
    _, answer = tiny.chat(max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_contract_39_logprobs_without_top(tiny, stream):
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 4}
    if stream:
        _, payloads, _ = tiny.stream(CHAT, body)
        entries = [e for p in payloads[:-1] for c in json.loads(p)["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        entries = tiny.json(CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert entry["top_logprobs"] == [] and entry["logprob"] <= 0 and bytes(entry["bytes"]).decode("utf-8", "replace") is not None


def test_contract_40_log_probabilities_are_finite(tiny):
    """A token that all others are biased against has a probability of nearly nothing."""
    status, answer = tiny.chat(max_tokens=3, temperature=0, logprobs=True, top_logprobs=20, logit_bias={"400": 100})
    assert status == 200
    for entry in answer["choices"][0]["logprobs"]["content"]:
        for e in [entry, *entry["top_logprobs"]]:
            assert math.isfinite(e["logprob"]) and -9999.0 <= e["logprob"] <= 0


def test_contract_41_logprobs_need_no_switch(tiny):
    status, answer = tiny.complete(max_tokens=3, temperature=0, logprobs=3)
    lists = answer["choices"][0]["logprobs"]
    assert status == 200 and len(lists["tokens"]) == len(lists["token_logprobs"]) == len(lists["text_offset"]) == len(
        lists["top_logprobs"]) == 3
    text = answer["choices"][0]["text"]
    for token, offset, top in zip(lists["tokens"], lists["text_offset"], lists["top_logprobs"]):
        assert text[offset:offset + len(token)] == token and 3 <= len(top) <= 4


def test_min_tokens_holds_for_stop_strings_too(tiny):
    ask = dict(prompt="Once upon a time", stop=["a", "e"], temperature=0, max_tokens=60)
    short, long = (tiny.complete(min_tokens=n, **ask)[1] for n in (0, 30))
    assert short["usage"]["completion_tokens"] < 30 < long["usage"]["completion_tokens"] < 60
    assert long["choices"][0]["finish_reason"] == "stop" and long["choices"][0]["stop_reason"] in ask["stop"]


def test_echo_with_the_prompts_own_logprobs(tiny):
    _, plain = tiny.complete(prompt="Once upon a time", max_tokens=5, temperature=0, logprobs=1)
    _, answer = tiny.complete(prompt="Once upon a time", max_tokens=5, temperature=0, logprobs=1, echo=True)
    choice, lists = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == "Once upon a time" + plain["choices"][0]["text"]
    n_prompt = answer["usage"]["prompt_tokens"]
    assert len(lists["tokens"]) == n_prompt + 5 and lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert all(v < 0 for v in lists["token_logprobs"][1:])
    assert lists["tokens"][:2] == ["<s>", " Once"] and lists["text_offset"][:2] == [0, 0]  # neither <s> nor the space is in the text
    for token, offset in zip(lists["tokens"][2:], lists["text_offset"][2:]):
        assert choice["text"][offset:offset + len(token)] == token
    lists_written = tiny.complete(prompt="a<s> b\u00e9", max_tokens=1, logprobs=1, echo=True)[1]["choices"][0]["logprobs"]
    assert lists_written["tokens"][:6] == ["<s>", " a", "<s>", " ", " b", "\u00e9"]
    assert lists_written["text_offset"] == [0, 0, 1, 4, 5, 6, 7]  # the second <s> is in the text, the tokenizer's own spaces are not
    assert lists["token_logprobs"][n_prompt:] == plain["choices"][0]["logprobs"]["token_logprobs"]
    _, scored = tiny.complete(prompt="Once upon a time", max_tokens=0, logprobs=1, echo=True)
    assert scored["choices"][0]["text"] == "Once upon a time" and scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == lists["token_logprobs"][:n_prompt]


def test_seed_gives_the_same_whatever_else_runs(tiny):
    import concurrent.futures
    alone = [tiny.complete(max_tokens=30, seed=s, temperature=1)[1]["choices"][0]["text"] for s in range(6)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        noise = [pool.submit(tiny.complete, max_tokens=60) for _ in range(6)]
        again = list(pool.map(lambda s: tiny.complete(max_tokens=30, seed=s, temperature=1)[1]["choices"][0]["text"], range(6)))
        [n.result() for n in noise]
    assert again == alone and len(set(alone)) > 3
