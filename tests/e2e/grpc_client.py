"""What the gRPC tests share: stubs made from proto/ at test time, a server with both front ends, and requests that say the same on both."""
import importlib
import pathlib
import sys
import tempfile

import pytest

grpc = pytest.importorskip("grpc")
protoc = pytest.importorskip("grpc_tools.protoc")
pytest.importorskip("grpc_health.v1")
pytest.importorskip("grpc_reflection.v1alpha")
from conftest import ROOT, free_port, start  # noqa: E402

_folder = tempfile.TemporaryDirectory(prefix="sits-stubs")
assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={_folder.name}", f"--grpc_python_out={_folder.name}",
                    "sits2026/v1/inference.proto"]) == 0
sys.path.insert(0, _folder.name)
pb = importlib.import_module("sits2026.v1.inference_pb2")
stubs = importlib.import_module("sits2026.v1.inference_pb2_grpc")

HTTP_OF = {"Generate": "/v1/completions", "Chat": "/v1/chat/completions", "Tokenize": "/tokenize", "Detokenize": "/detokenize"}


def start_both(tmp_path_factory, model, *options, **more):
    """A daemon with both front ends; server.grpc is the target of the second."""
    port = free_port()
    server = start(tmp_path_factory, model, "--grpc-port", port, *options, **more)
    server.grpc = f"127.0.0.1:{port}"
    return server


@pytest.fixture
def begin(tmp_path_factory):
    """As `launch` of conftest, with both front ends. A test file imports it to use it."""
    servers = []

    def make(model, *options, **more):
        servers.append(start_both(tmp_path_factory, model, *options, **more))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def channel(server, **options):
    """A connection of its own, so that tests do not share state."""
    options = {"grpc.use_local_subchannel_pool": 1, "grpc.max_receive_message_length": -1, **options}
    return grpc.insecure_channel(server.grpc, options=list(options.items()))


def message(method, body):
    """The protobuf message of an HTTP body."""
    body = dict(body)
    out = getattr(pb, method + "Request")()
    prompt = body.pop("prompt", None)
    if method == "Generate" and prompt is not None:
        many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        for one in many:
            if isinstance(one, str):
                out.prompt.append(one)
            else:
                out.prompt_ids.add().ids.extend(one)
    elif prompt is not None:
        out.prompt = prompt
    for m in body.pop("messages", []):
        new = out.messages.add(role=m["role"])
        if isinstance(m.get("content"), list):
            for part in m["content"]:
                new.content_parts.add(**part)
        elif m.get("content") is not None:
            new.content = m["content"]
        if "name" in m:
            new.name = m["name"]
    stop = body.pop("stop", None)
    if stop is not None:
        out.stop.extend([stop] if isinstance(stop, str) else stop)
    for key, value in body.pop("logit_bias", {}).items():
        out.logit_bias[int(key)] = value
    for key, value in body.items():
        if isinstance(value, list):
            getattr(out, key).extend(value)
        else:
            setattr(out, key, value)
    return out


def choice_of_grpc(c):
    """A choice in the shape that both front ends are compared in."""
    reason = c.WhichOneof("stop_reason")
    text = c.message.content if hasattr(c, "message") else c.text
    return {"index": c.index, "text": text, "finish": c.finish_reason, "stop": getattr(c, reason) if reason else None,
            "ids": list(c.token_ids), "prompt_ids": list(c.prompt_token_ids),
            "logprobs": [round(p.logprob, 4) if p.HasField("logprob") else None for p in c.logprobs],
            "tokens": [bytes(p.bytes) for p in c.logprobs],
            "tops": [sorted((bytes(t.bytes), round(t.logprob, 4)) for t in p.top_logprobs) for p in c.logprobs]}


def usage_of_grpc(usage):
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens}


def joined_stream(responses):
    """The whole answer of a stream's messages: choices by index, and the usage; checks what a stream promises."""
    choices, usage, head = {}, None, None
    for r in responses:
        assert usage is None, "nothing comes after the usage"
        head = head or (r.id, r.model, r.created)
        assert (r.id, r.model, r.created) == head
        if r.HasField("usage"):
            usage = usage_of_grpc(r.usage)
            assert not r.choices
        for c in r.choices:
            new = choice_of_grpc(c)
            if c.index not in choices:
                choices[c.index] = new
                if hasattr(c, "message"):
                    assert c.message.role == "assistant"
                continue
            old = choices[c.index]
            assert not old["finish"], "nothing comes after the finish reason"
            for key in ("text", "finish", "ids", "prompt_ids", "logprobs", "tokens", "tops"):
                old[key] += new[key]
            old["stop"] = new["stop"]
    return [choices[i] for i in sorted(choices)], usage
