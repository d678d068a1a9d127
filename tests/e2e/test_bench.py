"""sits2026-bench: what it cannot measure is refused, not reported."""
import json
import subprocess
import sys

import pytest
from conftest import BIN, DATA, ROOT, SLOW, TINY

TEXT = DATA / "text" / "pride_and_prejudice.txt"


@pytest.mark.skipif(not TINY.exists() or not TEXT.exists(), reason="shared test data absent")
@pytest.mark.parametrize("args,text", [
    (("prefix", "--prompt", "500", "--chats", "2"), "more than the 512"),
    (("stall", "--prompt", "3000"), "more than the 512"),
    (("stall", "--prompt", "100", "--stream-prompt", "512"), "more than the 512"),
    (("stall", "--prompt", "100", "--quiet-tokens", "600", "--targets", "1"), "end of the model's context"),
    (("speculation", "--text", TEXT, "--texts", "1", "--output", "2000"), "more than the 512"),
    (("speculation", "--text", TEXT, "--texts", "15", "--streams", "4"), "--texts 15 is too few for --streams 4"),
    (("stall", "--prompt", "100", "--targets", "fast"), "--targets"),
])
def test_engine_refuses(args, text):
    done = subprocess.run([str(BIN / "sits2026-bench"), "engine", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--scenario",
                           *map(str, args)], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode == 1 and text in done.stderr, (done.returncode, done.stderr)
    assert "LeakSanitizer" not in done.stderr, done.stderr
    assert not done.stdout


@pytest.mark.skipif(not TINY.exists() or not TEXT.exists(), reason="shared test data absent")
def test_engine_speculation(tmp_path):
    def run(*args):
        out = tmp_path / "out.json"
        subprocess.run([str(BIN / "sits2026-bench"), "engine", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--scenario",
                        "speculation", "--text", TEXT, "--json", out, *args], check=True, capture_output=True, timeout=60 * SLOW)
        return json.loads(out.read_text())["results"][0]
    one = run("--texts", "30", "--output", "64")
    assert one["answers_equal"] and 0 < one["accepted"] <= one["drafted"], one
    many = run("--texts", "100", "--output", "24", "--streams", "8", "--pairs", "3")
    assert len(many["ratios"]) == 3 and many["ratio_median_95"][0] <= many["ratio_median"] <= many["ratio_median_95"][1], many


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
@pytest.mark.parametrize("args,text", [
    (("--prefill", "513", "--batch", ""), "--prefill 513 is more than the model's context of 512"),
    (("--prefill", "", "--context", "500", "--steps", "13"), "--context 500 and --steps 13 are together more"),
    (("--prefill", "512", "--batch", "", "--context", "500", "--steps", "20", "--repeat", "1"), None),
    (("--prefill", "", "--batch", "1", "--context", "500", "--steps", "12"), None),
    (("--prefill", "4", "--batch", "", "--one-device"), "--one-device goes with --tensor-parallel-size"),
])
def test_throughput_keeps_to_the_models_context(args, text):
    done = subprocess.run([str(BIN / "sits2026-bench"), "throughput", "--model", str(TINY), "--device", "cpu", "--threads", "1", *args],
                          capture_output=True, text=True, timeout=60 * SLOW)
    assert (done.returncode in (1, 2) and text in done.stderr and not done.stdout) if text else done.returncode == 0, done.stderr


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
@pytest.mark.parametrize("args,text", [
    (("--context", "512"), "--context 512 and the token after it are more than the model's context of 512"),
    (("--context", "1000000"), "--context 1000000 and the token after it"),
    (("--depths", "1,500", "--chunks", "1,13"), "--depths 500 and --chunks 13 are together more than the model's context of 512"),
    (("--context", "511", "--depths", "500", "--chunks", "12"), None),
    (("--context", "512", "--decodes", "0"), None),
])
def test_steps_keep_to_the_models_context(args, text):
    done = subprocess.run([str(BIN / "sits2026-bench"), "steps", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--rounds", "1",
                           "--depths", "1", "--chunks", "1", *args], capture_output=True, text=True, timeout=60 * SLOW)
    assert (done.returncode == 1 and text in done.stderr and not done.stdout) if text else done.returncode == 0, done.stderr


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
@pytest.mark.parametrize("sizes", ["4294967297", "1,99999999999", "0", "8,,1", "x"])
def test_lists_hold_sizes(sizes):
    done = subprocess.run([str(BIN / "sits2026-bench"), "steps", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--rounds", "1",
                           "--depths", "1", "--chunks", sizes], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode == 2 and "lists such as" in done.stderr and not done.stdout, (done.returncode, done.stderr)


def serve(*args):
    return subprocess.run([str(BIN / "sits2026-bench"), "serve", "--url", "http://127.0.0.1:1", *map(str, args)], capture_output=True,
                          text=True, timeout=60 * SLOW)


@pytest.mark.parametrize("key", [("--api-key", "sk-of-mine"), ("--api-key=sk-of-mine",)])
def test_serve_keeps_the_key_and_counts_what_was_answered(key):
    """Results go into files and are shown around; prompts that nobody read are no throughput."""
    done = serve("--concurrency", 1, "--requests", 2, *key)
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["failed"] == 2 and result["done"] == 0
    assert "sk-of-mine" not in done.stdout + done.stderr and any("--api-key" in word for word in result["command"])
    assert result["total_tokens_per_s"] == result["output_tokens_per_s"] == 0


COST = dict.fromkeys(("weight_bytes", "head_bytes", "kv_bytes_per_token", "linear_flops_per_token", "head_flops_per_row",
                      "attention_flops_per_pair", "read_bytes_per_s", "weight_read_share", "head_read_share", "kv_read_share",
                      "small_batch_tokens", "small_batch_flops", "large_batch_flops", "attention_flops", "fixed_us", "kv_memory_bytes",
                      "max_batch_tokens"), 1000)


@pytest.mark.parametrize("row", [
    "99999999-11-16 18:15:46.68,10,10", "2023-13-16 18:15:46.68,10,10", "2023-11-16 18:15:inf,10,10", "2023-11-16 18:15:nan,10,10",
    "2023-11-16 24:15:46.68,10,10", "2023-11-16 18:15:46.68,10,4294967297", "2023-11-16 18:15:46.68,10", "2023-11-16,10,10",
])
def test_rows_of_traces_are_checked(row, tmp_path):
    trace, cost = tmp_path / "trace.csv", tmp_path / "cost.json"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,10\n{row}\n")
    cost.write_text(json.dumps(COST))
    simulated = subprocess.run([str(BIN / "sits2026-bench"), "simulate", "--trace", trace, "--cost", cost, "--speed", "1"],
                               capture_output=True, text=True, timeout=60 * SLOW)
    served = serve("--trace", trace)
    for done in simulated, served:
        assert done.returncode == 1 and not done.stdout, done.stderr
    assert "line 3 is not" in simulated.stderr and f"{trace}:3: not a trace row" in served.stderr


def test_a_trace_needs_no_heading(tmp_path):
    (tmp_path / "trace.csv").write_text("2023-11-16 18:15:46.68,10,10\n2023-11-16 18:15:46.69,10,10\n")
    assert json.loads(serve("--trace", tmp_path / "trace.csv").stdout)["sent"] == 2


def test_simulated_time_goes_on_into_the_next_month(tmp_path):
    trace, cost = tmp_path / "trace.csv", tmp_path / "cost.json"
    trace.write_text("2023-12-31 23:59:59.5,10,1\n2024-01-01 00:00:09.5,10,1\n")
    cost.write_text(json.dumps(COST | {"read_bytes_per_s": 1e12, "small_batch_flops": 1e12, "large_batch_flops": 1e12,
                                       "attention_flops": 1e12, "kv_memory_bytes": 1e9}))
    out = subprocess.run([str(BIN / "sits2026-bench"), "simulate", "--trace", trace, "--cost", cost, "--speed", "1", "--policy", "chunked"],
                         capture_output=True, text=True, timeout=60 * SLOW, check=True)
    point = json.loads(out.stdout)["points"][0]
    assert point["output_tokens_per_s"] == pytest.approx(2 / 10, rel=0.01)


@pytest.mark.parametrize("change,text", [
    ({"points": 5}, " points must be a list"), ({"prompt_points": {"1": 2}}, "prompt_points must be a list"),
    ({"lane_tokens": "512"}, "lane_tokens must be"), ({"tile_tokens": -1}, "tile_tokens must be"), ({"fixed_us": 0}, "fixed_us must be"),
])
def test_costs_are_checked(change, text, tmp_path):
    trace, cost = tmp_path / "trace.csv", tmp_path / "cost.json"
    trace.write_text("2023-11-16 18:15:46.68,10,10\n")
    cost.write_text(json.dumps(COST | change))
    done = subprocess.run([str(BIN / "sits2026-bench"), "simulate", "--trace", trace, "--cost", cost, "--speed", "1"], capture_output=True,
                          text=True, timeout=60 * SLOW)
    assert done.returncode == 1 and text in done.stderr and not done.stdout, done.stderr


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
def test_stall_tells_what_steps_consist_of():
    done = subprocess.run([str(BIN / "sits2026-bench"), "engine", "--model", str(TINY), "--device", "cpu", "--threads", "1", "--scenario",
                           "stall", "--prompt", "300", "--quiet-tokens", "40", "--targets", "1,1000"], capture_output=True, text=True,
                          timeout=60 * SLOW)
    assert done.returncode == 0, done.stderr
    whole, alps = json.loads(done.stdout)["results"]
    assert whole["share_of_time_left"] == 0 and whole["itl_worst_ms"] >= 0.5 * whole["took_ms"]  # everybody waits for the prompt
    assert alps["itl_target_ms"] == pytest.approx(10 * whole["quiet_p99_ms"], abs=0.002)
    assert alps["share_of_time_left"] == pytest.approx(alps["alone_ms"] / 0.9 / alps["took_ms"], rel=0.01)
    for row in whole, alps:
        assert row["worst_steps"]
        for step in row["worst_steps"]:
            assert 0 < step["batch_us"] + step["sliced_us"] <= step["step_us"] <= row["worst_steps"][0]["step_us"]
    assert max(step["prompt_tokens"] for step in whole["worst_steps"]) == 300


@pytest.mark.skipif(not TINY.exists(), reason="shared test data absent")
def test_replay_beside_the_simulation(tmp_path):
    """A few requests of a trace live under two policies; the simulation beside them has the very same ones."""
    trace, cost, out = tmp_path / "trace.csv", tmp_path / "cost.json", tmp_path / "out.json"
    rows = [f"2023-11-16 18:{15 + i // 60}:{i % 60:02}.1234567,{800 + i},{60 + i}" for i in range(0, 90, 3)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    keys = ["weight_bytes", "head_bytes", "kv_bytes_per_token", "linear_flops_per_token", "head_flops_per_row", "attention_flops_per_pair",
            "read_bytes_per_s", "weight_read_share", "head_read_share", "kv_read_share", "small_batch_tokens", "small_batch_flops",
            "large_batch_flops", "fixed_us"]
    cost.write_text(json.dumps({k: 1 for k in keys} | {"read_bytes_per_s": 1e9, "attention_flops": 1e9, "kv_memory_bytes": 1e6,
                                                        "max_batch_tokens": 512, "points": [[1, 300], [64, 2000], [4096, 120000]]}))
    command = [sys.executable, str(ROOT / "bench" / "live_policies.py"), "replay", "--bin", str(BIN), "--model", str(TINY), "--cost",
               str(cost), "--trace", str(trace), "--minutes", "0", "1", "--prompt-by", "16", "--output-by", "8", "--duration-s", "2",
               "--speeds", "5",
               "--itl-targets-ms", "50", "5000", "--ttft-target-ms", "60000", "--max-num-batched-tokens", "512", "--json", str(out)]
    for policies in ["static"], ["alps"]:  # the second run adds to the first
        done = subprocess.run([*command, "--policies", *policies], capture_output=True, text=True, timeout=60 * SLOW)
        assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(r["policy"], r["itl_target_ms"]) for r in result["runs"]] == [("static", 0), ("alps", 50), ("alps", 5000)]
    for run in result["runs"]:
        assert run["live"]["sent"] == run["live"]["done"] == 4 and run["live"]["failed"] == 0  # at 0, 3, 6 and 9 s of the trace
        assert 0 < run["simulated"]["itl_p99_ms"] < run["simulated"]["ttft_p99_ms"] < 60000
    assert result["carried_live"]["5000"]["alps"] == result["carried_simulated"]["5000"]["static"] == 5
    assert len(result["commands"]) == 2
