"""/metrics: what the official parser of Prometheus reads, names, types and units as operators' dashboards want them, figures that agree
with what was asked for, by tenant, class and stage, bounded; and GPUs through NVML, with a library made here in its place."""
import os
import subprocess
import time

import pytest
from conftest import SMOL, TINY, start, wait_for

parser = pytest.importorskip("prometheus_client.parser")

# vLLM's names that have a meaning here, with their types; `_total` is the suffix of counters in the text format.
VLLM = {
    "gauge": ["num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc", "cache_config_info"],
    "counter": ["prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "generation_tokens", "request_success",
                "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "admission_rejections", "spec_decode_num_drafts",
                "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"],
    "histogram": ["time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
                  "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
                  "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
                  "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
                  "request_prefill_kv_computed_tokens", "request_num_preemptions", "iteration_tokens_total"],
}
OURS = {
    "gauge": ["num_requests_waiting_by_class", "waiting_prompt_tokens", "kv_pages_used", "kv_pages_cached", "kv_pages_free",
              "kv_pool_pages", "kv_page_bytes", "device_memory_bytes", "batch_queue_depth", "engine_heartbeat_age_seconds", "step_seconds",
              "step_serial_seconds",
              "swap_pages_used", "swap_pages_total", "inter_token_latency_p99_seconds", "http_requests_in_flight"],
    "counter": ["engine_steps", "client_disconnects", "slow_reader_stalls", "http_requests", "class_requests", "class_prompt_tokens",
                "class_prompt_tokens_cached", "class_generation_tokens", "tenant_requests", "tenant_prompt_tokens",
                "tenant_prompt_tokens_cached", "tenant_generation_tokens", "audit_lines", "audit_lines_lost", "audit_write_errors",
                "trace_spans_exported", "trace_spans_dropped", "submissions_refused", "prompt_tokens_computed", "num_preemptions_swapped",
                "reloads"],
    "histogram": ["request_stage_seconds", "delivery_latency_seconds", "cancellation_steps"],
}
STAGES = ["receive", "prepare", "queue", "prefill", "decode", "delivery"]
FAKE_NVML = r"""
#include <string.h>
struct utilization { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) { *out = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned n) { strncpy(out, gpu == (void *)1 ? "GPU-one" : "MIG-two", n); return 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, struct utilization *out) { out->gpu = 37; return gpu == (void *)1 ? 0 : 3; }
int nvmlDeviceGetMemoryInfo(void *gpu, struct memory *out) { out->total = 143ull << 30; out->used = 12345678912; return 0; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out) { *out = 41; return sensor; }
"""


def families(server):
    """Name (without prefix) to family, by the official parser; a name comes once."""
    text = server.get("/metrics")[2].decode()
    found = list(parser.text_string_to_metric_families(text))
    names = [f.name for f in found]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return {f.name.removeprefix("sits2026:"): f for f in found}


def values(family, *labels):
    """Label values to value, for a family's plain samples."""
    return {tuple(s.labels.get(name) for name in labels): s.value for s in family.samples if not s.name.endswith("_created")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start(tmp_path_factory, TINY)
    for i in range(3):
        assert server.complete("Once upon a time " * 20, max_tokens=6, ignore_eos=True)[0] == 200
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "n": 2}, {"X-QoS-Level": "high"})[0] == 200
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "ignore_eos": True}, {"X-QoS-Level": "low"})[0] == 200
    assert server.complete("x", max_tokens=-1)[0] == 400
    assert server.json("/tokenize", {"prompt": "hello"})[0] == 200
    server.wait_ended(6)
    wait_for(lambda: sum(values(families(server)["tenant_requests"], "tenant", "outcome").values()) == 7)  # told when nothing holds them
    yield server
    assert server.stop() == 0


def test_names_types_and_units(server):
    found = families(server)
    for wanted in (VLLM, OURS):
        for kind, names in wanted.items():
            for name in names:
                assert name in found, name
                assert found[name].type == kind, (name, found[name].type)
                assert found[name].documentation
    for name, family in found.items():
        if name.startswith("process_"):
            continue
        assert family.samples or family.type == "counter", name
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny", name
        if family.type == "histogram":
            check_histogram(family)
    for name in ("process_resident_memory_bytes", "process_cpu_seconds", "process_start_time_seconds"):
        assert name in found
    assert abs(found["process_start_time_seconds"].samples[0].value - time.time()) < 3600
    assert found["process_resident_memory_bytes"].samples[0].value > 1e6


def check_histogram(family):
    """Buckets rise, end in +Inf, and agree with the count, for every set of labels."""
    rows = {}
    for s in family.samples:
        key = tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))
        rows.setdefault(key, {"buckets": []})
        if s.name.endswith("_bucket"):
            rows[key]["buckets"].append((float(s.labels["le"]), s.value))
        else:
            rows[key][s.name.rsplit("_", 1)[1]] = s.value
    for row in rows.values():
        bounds, counts = zip(*row["buckets"])
        assert list(bounds) == sorted(set(bounds)) and bounds[-1] == float("inf"), family.name
        assert list(counts) == sorted(counts) and counts[-1] == row["count"], family.name
        assert row["sum"] >= 0


def count_of(family, **labels):
    return next(s.value for s in family.samples if s.name.endswith("_count") and labels.items() <= s.labels.items())


def test_classes_tenants_and_stages_agree_with_what_was_asked(server):
    found = families(server)
    assert values(found["class_requests"], "class", "outcome") == {
        ("normal", "ok"): 3, ("high", "ok"): 1, ("low", "ok"): 1}  # the refused one was never parsed, so it has no class
    assert values(found["class_generation_tokens"], "class") == {("normal",): 18, ("high",): 8, ("low",): 4}
    assert values(found["tenant_requests"], "tenant", "outcome") == {("none", "ok"): 6, ("none", "client_error"): 1}
    assert values(found["tenant_generation_tokens"], "tenant") == {("none",): 30}
    assert values(found["tenant_prompt_tokens"], "tenant")[("none",)] == sum(values(found["class_prompt_tokens"], "class").values())
    cached = values(found["class_prompt_tokens_cached"], "class")
    assert cached[("normal",)] > 0 and cached[("high",)] == 0
    assert sum(cached.values()) == values(found["prompt_tokens_cached"], "model_name")[("tiny",)]
    sources = values(found["prompt_tokens_by_source"], "source")
    assert sources[("local_cache_hit",)] == sum(cached.values())
    assert sum(sources.values()) == values(found["prompt_tokens"], "model_name")[("tiny",)]
    for stage in STAGES:
        assert count_of(found["request_stage_seconds"], stage=stage) == 5, stage
    for name in ("request_prefill_kv_computed_tokens", "request_max_num_generation_tokens", "request_num_preemptions"):
        assert count_of(found[name]) == 5
    longest = next(s.value for s in found["request_max_num_generation_tokens"].samples if s.name.endswith("_sum"))
    assert longest == 3 * 6 + 4 + 4  # of n = 2 choices the longest counts


def test_drafts_by_position(server):
    text = "one two three one two three one two three one two three"
    assert server.complete(text, max_tokens=60, ignore_eos=True, temperature=0)[0] == 200
    server.wait_ended(7)
    found = families(server)
    at = values(found["spec_decode_num_accepted_tokens_per_pos"], "position")
    assert list(at) == [(str(i),) for i in range(16)] and list(at.values()) == sorted(at.values(), reverse=True)
    assert sum(at.values()) == values(found["spec_decode_num_accepted_tokens"], "model_name")[("tiny",)]
    assert at[("0",)] <= values(found["spec_decode_num_drafts"], "model_name")[("tiny",)]


def test_page_pool_by_codec(server, tmp_path_factory):
    other = start(tmp_path_factory, TINY, "--kv-cache-dtype", "int8")
    for daemon, codec in ((server, "f16"), (other, "int8")):
        found = families(daemon)
        pages = values(found["kv_pool_pages"], "codec", "state")
        assert {key[0] for key in pages} == {codec} and {key[1] for key in pages} == {"used", "cached", "free"}
        total = int(found["cache_config_info"].samples[0].labels["num_gpu_blocks"])
        assert sum(pages.values()) == total > 0
        page_bytes = values(found["kv_page_bytes"], "codec")[(codec,)]
        memory = values(found["device_memory_bytes"], "use")
        assert memory[("kv_pages",)] >= total * page_bytes > 0 and memory[("weights",)] > 1e5
    assert values(families(other)["kv_page_bytes"], "codec")[("int8",)] < values(families(server)["kv_page_bytes"], "codec")[("f16",)]
    assert other.stop() == 0


def test_no_gpu_no_gpu_figures(server):
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU")
    assert not [name for name in families(server) if name.startswith("gpu_")]


def test_gpu_figures_come_from_nvml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(FAKE_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    server = start(tmp_path_factory, TINY, env={"LD_LIBRARY_PATH": str(folder)})
    wait_for(lambda: "gpu_utilization_ratio" in families(server), 10)
    found = families(server)
    assert values(found["gpu_utilization_ratio"], "gpu", "uuid") == {("0", "GPU-one"): 0.37}  # a MIG slice has none
    assert values(found["gpu_memory_total_bytes"], "gpu") == {("0",): 143 << 30, ("1",): 143 << 30}
    assert values(found["gpu_memory_used_bytes"], "uuid") == {("GPU-one",): 12345678912, ("MIG-two",): 12345678912}
    assert values(found["gpu_temperature_celsius"], "gpu") == {("0",): 41, ("1",): 41}
    assert "gpu_power_watts" not in found  # this library has no such function
    assert server.stop() == 0


def test_a_broken_nvml_is_done_without(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(FAKE_NVML.replace("nvmlInit_v2(void) { return 0; }", "nvmlInit_v2(void) { return 9; }"))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    server = start(tmp_path_factory, TINY, env={"LD_LIBRARY_PATH": str(folder)})
    assert not [name for name in families(server) if name.startswith("gpu_")]
    assert server.stop() == 0


def test_the_model_has_its_name_while_it_loads(tmp_path_factory):
    server = start(tmp_path_factory, SMOL, "--served-model-name", "smol", "--kv-cache-memory", "64M", wait=False)
    while True:
        is_ready = server.get("/health/ready")[0] == 200
        text = server.get("/metrics")[2].decode()
        assert 'num_requests_running{model_name="smol"} 0\n' in text and 'model_name=""' not in text
        if is_ready:
            break
    assert server.stop() == 0
