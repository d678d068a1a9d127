"""Hostile and odd input found to break the daemon once. Each test names what went wrong."""
import concurrent.futures
import json
import os
import subprocess

import pytest

from conftest import BIN, TINY, start

BODY = b'{"prompt":"a","max_tokens":1}'
NEXT = b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("line", [
    b"Content-Length : %d",        # a space before the colon: the length was not seen and the body was read as the next request
    b"Content-Length:\r\n %d",     # a folded line: its end was glued to the name, with the same effect
    b"Content-Length: 0\r\n %d",
    b"X: 1\r\n Content-Length: %d",
    b"X: 1\rContent-Length: %d",   # a bare CR ends a line for some proxies
    b"Transfer-Encoding:\r\n chunked",
    b"Transfer-Encoding\t: chunked",
    b"X Y: 1",
])
def test_malformed_header_line_ends_the_connection(tiny, line):
    if b"%d" in line:
        line = line % len(BODY)
    with tiny.connect(10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" + line + b"\r\n\r\n" + BODY + NEXT)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1, "bytes of the body were taken for another request"
    assert "malformed header" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("fields", [{"echo": True}, {"parse_special": True}])
def test_a_field_of_completions_is_not_ignored_in_a_chat(tiny, fields):
    status, answer = tiny.chat(max_tokens=1, **fields)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", next(iter(fields)))
    assert tiny.chat(max_tokens=1, echo=False)[0] == 200


def test_completions_honour_max_completion_tokens(tiny):
    _, answer = tiny.complete(max_completion_tokens=3, max_tokens=9, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


def test_a_fifo_as_model_is_refused(tmp_path):
    """Opening it waited for a writer, without a word."""
    os.mkfifo(tmp_path / "model.gguf")
    done = subprocess.run([BIN / "sits2026d", "--model", tmp_path / "model.gguf", "--port", "0"], capture_output=True, timeout=20)
    assert done.returncode == 1 and b"not a regular file" in done.stderr


def test_int4_answers_do_not_depend_on_room_or_swapping(tmp_path_factory):
    """A group of a page's former owner was folded over the page's new contents; half-filled pages were rounded by a swap."""
    bodies = [{"prompt": [1] + [3 + (i * 37 + k * k * 11) % 509 for k in range(60 + 13 * i)], "max_tokens": 60 + 10 * i, "n": 10, "seed": i,
               "temperature": 1, "ignore_eos": True} for i in range(8)]
    texts = []
    for options in (("--kv-cache-memory", "32M"), ("--kv-cache-memory", "400K", "--swap-space", "1M")):
        server = start(tmp_path_factory, TINY, "--kv-cache-dtype", "int4", "--max-num-seqs", 32, *options)
        try:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                for _ in range(2):
                    answers = list(pool.map(lambda body: server.json("/v1/completions", body), bodies))
                    texts.append([[choice["text"] for choice in answer["choices"]] for _, answer in answers])
            assert server.metric("num_preemptions_total") > 0 or "32M" in options
        finally:
            server.stop()
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_an_empty_chat_template_is_refused(tmp_path):
    """It counted as none: the daemon served, refused every chat, and asked for --chat-template."""
    (tmp_path / "t.jinja").touch()
    done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", "--chat-template", tmp_path / "t.jinja"],
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "t.jinja is empty" in done.stderr, done.stderr
