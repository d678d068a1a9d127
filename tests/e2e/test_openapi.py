"""The description of the API at /openapi.json: it names every route, and schemathesis finds nothing that contradicts it.

The run here takes a minute and is the same each time; SITS_SCHEMATHESIS_SECONDS=600 makes it a long, random one. schemathesis lives in an
environment of its own (scripts/setup --tests), without which its test is skipped.
"""
import json
import os
import re
import subprocess

import pytest
from conftest import CACHE, ROOT, SLOW, TINY, start

SCHEMATHESIS = CACHE / "schemathesis/bin/schemathesis"
KEY = "a-key-of-enough-letters"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start(tmp_path_factory, TINY, "--api-key", KEY, "--max-num-seqs", 128, wait=False)
    server.wait_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def document(server):
    status, headers, data = server.get("/openapi.json", {"Authorization": f"Bearer {KEY}"})
    assert status == 200 and headers["content-type"] == "application/json"
    return json.loads(data)


def references(value):
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else [])
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references(one)


def test_it_names_every_route(document):
    routes = re.findall(r'^  \{"(/[^"]*)"(.*)', (ROOT / "src/front/http/http_routes.c").read_text(), re.M)
    want = {(path + ("{model}" if path.endswith("/") else ""), "post" if "is_post" in rest else "get") for path, rest in routes}
    assert want == {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert document["openapi"].startswith("3.1") and len(want) > 12
    for reference in references(document):
        at = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def test_it_names_every_field_and_limit(document):
    """Against the field table's source: each row of a kind is a property, and the caps that a client may meet are written out."""
    def body(path):
        return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    rows = re.findall(r'^  \{"(\w+)", ([A-Z_ |]+), FIELD', (ROOT / "src/front/api/api_request.c").read_text(), re.M)
    assert len(rows) > 40
    kinds = {"GENERATE": {"CHAT", "COMPLETION"}, "PROMPTED": {"CHAT", "COMPLETION", "TOKENIZE"},
             "EVERY": {"CHAT", "COMPLETION", "TOKENIZE", "DETOKENIZE"}}
    paths = {"CHAT": "/v1/chat/completions", "COMPLETION": "/v1/completions", "TOKENIZE": "/tokenize", "DETOKENIZE": "/detokenize"}
    for kind, path in paths.items():
        properties = body(path)["properties"]
        for name, sets in rows:
            known = set().union(*(kinds.get(s, {s.removeprefix("API_")}) for s in sets.split(" | ")))
            if kind in known:
                assert name in properties, (kind, name)
        assert properties["tools"] == {"enum": [None, []]} and properties["model"] == {"enum": [None, "tiny"]}
    chat, text = body(paths["CHAT"])["properties"], body(paths["COMPLETION"])["properties"]
    assert chat["n"]["maximum"] == 128 and chat["temperature"] == {"type": ["number", "null"], "minimum": 0, "maximum": 2}
    assert chat["top_logprobs"]["maximum"] == text["logprobs"]["maximum"] == 20 and chat["echo"] == {"enum": [None, False]}
    assert chat["messages"]["maxItems"] == 4096 and chat["max_tokens"]["minimum"] == 1 and text["max_tokens"]["minimum"] == 0
    pattern = re.compile(chat["logit_bias"]["propertyNames"]["pattern"])
    assert [i for i in range(2000) if pattern.match(str(i))] == list(range(512)) and not pattern.match("07") and not pattern.match("1 ")


def test_schemathesis_finds_nothing(server, tmp_path):
    if not SCHEMATHESIS.exists():
        pytest.skip(f"no schemathesis in {SCHEMATHESIS.parent.parent}; scripts/setup --tests installs it")
    seconds = int(os.environ.get("SITS_SCHEMATHESIS_SECONDS", "45"))
    how = ["--generation-deterministic", "--seed", "1", "-n", "20"] if seconds <= 60 else ["-n", "1000000"]
    command = [SCHEMATHESIS, "--config-file", ROOT / "tests/e2e/schemathesis.toml", "run", f"{server.url}/openapi.json", "--no-color",
               "--max-time", str(seconds), "--request-timeout", str(60 * SLOW), "--header", f"Authorization: Bearer {KEY}",
               "--report", "ndjson", "--report-dir", tmp_path, *how]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=seconds + 240 * SLOW, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    print(done.stdout[-1500:])
    server.wait_ready()
    assert server.process.poll() is None
