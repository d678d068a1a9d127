"""Prompts read on one device (here a second CPU backend), answers made on another: the same answers, nothing left behind, refusals."""
import concurrent.futures
import json
import random
import subprocess

from conftest import BIN, SLOW, SMOL, TINY

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
STORY = ("Once upon a time there was a little girl who lived in a house near the wood. She had a red ball, a blue car and a big brown dog "
         "whose name was Tim. One day the dog ran away and ")


def answers(server, prompts):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda prompt: server.complete(prompt, **GREEDY), prompts))
    assert all(status == 200 for status, _ in replies), replies
    return [reply["choices"][0]["text"] for _, reply in replies]


def test_answers_are_those_of_one_device(tiny, launch):
    prompts = [STORY + name + " said" for name in ("Lily", "Tom", "Anna", "the cat")] + ["Hello", STORY * 2, STORY * 2 + "Then"]
    want = answers(tiny, prompts)
    server = launch(TINY, "--placement", "prefill=0,decode=1")
    assert answers(server, prompts) == want
    assert server.metric("placement_handed_over_total") > 0
    assert server.metric("placement_pages_total") > 0
    server.wait_quiet()
    assert server.stop() == 0


def test_a_real_model(smol, launch):
    prompts = [STORY * 3 + "What is the name of the dog?", STORY + "List the colours.", STORY * 5 + "The end."]
    want = answers(smol, prompts)
    server = launch(SMOL, "--served-model-name", "smol", "--max-model-len", 2048, "--max-num-seqs", 16, "--kv-cache-memory", "300M",
                    "--placement", "prefill=0,decode=1")
    assert answers(server, prompts) == want
    assert server.metric("placement_handed_over_total") > 0
    server.wait_quiet()
    assert server.stop() == 0


def test_clients_that_leave(launch):
    server = launch(TINY, "--placement", "prefill=0,decode=1", "--max-num-seqs", 8)
    draw = random.Random(3)

    def leave(i):
        body = json.dumps({"prompt": STORY * 3 + str(i), "stream": True, **GREEDY}).encode()
        with server.connect() as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)
            sock.settimeout(0.001 + draw.random() * 0.2)
            try:
                sock.recv(100)
            except TimeoutError:
                pass

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(60)))
    server.wait_quiet()
    assert server.complete("Once", **GREEDY)[0] == 200
    assert server.stop() == 0


def test_refusals():
    for options, text in [(("--placement", "prefill=0"), "is not of the form"),
                          (("--placement", "prefill=1,decode=1"), "both on device 1"),
                          (("--placement", "prefill=0,decode=1", "--tensor-parallel-size", "2"), "tensor-parallel-size"),
                          (("--placement", "prefill=0,decode=1", "--speculative-tokens", "3", "--draft-model", TINY), "draft-model"),
                          (("--placement", "prefill=0,decode=1", "--no-enable-prefix-caching"), "enable-prefix-caching"),
                          (("--placement", "prefill=0,decode=1", "--kv-cache-dtype", "fp4-sparse"), "fp4-sparse")]:
        done = subprocess.run([BIN / "sits2026d", "--model", TINY, "--port", "0", *options], capture_output=True, timeout=60 * SLOW)
        assert done.returncode == 1 and text in done.stderr.decode(), (options, done.stderr)
