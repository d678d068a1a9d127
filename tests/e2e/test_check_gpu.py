"""scripts/check_gpu where there is no GPU: it names what is missing; and its bookkeeping, with programs that only pretend: order, results,
limits, logs, summary, exit status."""
import json
import os
import pathlib
import re
import stat
import subprocess
import sys
import time

import pytest
from conftest import BIN, ROOT

SCRIPT = ROOT / "scripts/check_gpu"
TESTS = sorted(re.sub(r"^test_|\.c$", "", file.name) for file in (ROOT / "tests/gpu").glob("test_*.c"))
PARTS = ["tests", "memcheck", "racecheck", "synccheck", "initcheck", "kernels", "throughput", "engine", "placement", "accuracy"]


def script(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n" + text + "\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


class Machine:
    """A PATH with pretended tools before the real ones, and a folder of pretended programs."""

    def __init__(self, folder, gpus=("NVIDIA H200, 9.0",)):
        self.folder = folder
        self.build, self.out = folder / "build", folder / "out"
        if gpus:
            script(folder / "path/nvidia-smi", "".join(f"echo '{gpu}'\n" for gpu in gpus))
        script(folder / "path/compute-sanitizer", 'while [ "$1" != --print-limit ]; do shift; done; shift 2\n'
                                                  '[ "$1" = --leak-check ] && shift 2\nexec "$@"')
        for name in TESTS:
            script(self.build / f"tests/gpu_test_{name}", "echo passed")
        for name in ("bench", "eval", "compile"):
            script(self.build / f"bin/sits2026-{name}", "echo passed")
        (folder / "model.gguf").write_text("")

    def run(self, *words, built=True):
        env = {**os.environ, "PATH": f"{self.folder}/path:{os.environ['PATH']}"}
        more = ["--build", self.build] if built else []
        done = subprocess.run([sys.executable, SCRIPT, "--out", self.out, "--model", self.folder / "model.gguf", *more, *words], env=env,
                              capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    def steps(self):
        return json.loads((self.out / "summary.json").read_text())["steps"]

    def results(self):
        return {(step["part"], step["name"]): step["result"] for step in self.steps()}


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_no_gpu_is_named(tmp_path):
    machine = Machine(tmp_path, gpus=())
    script(tmp_path / "path/nvidia-smi", "echo 'No devices were found' >&2; exit 6")
    code, out, err = machine.run("tests")
    assert code == 2 and out == "" and "missing: a GPU" in err
    assert not machine.out.exists(), "nothing ran"


def test_other_chips_are_named(tmp_path):
    code, _, err = Machine(tmp_path, gpus=["NVIDIA A100, 8.0"]).run("tests")
    assert code == 2 and "NVIDIA A100 has compute capability 8.0" in err


def test_everything_missing_is_named_at_once(machine):
    (machine.build / "bin/sits2026-bench").unlink()
    (machine.build / "tests/gpu_test_ops").unlink()
    (machine.folder / "model.gguf").unlink()
    code, _, err = machine.run("tests", "kernels", "accuracy", "placement")
    assert code == 2
    for words in ("sits2026-bench: not there", "gpu_test_ops: not there", "a model file (for accuracy)", "a second GPU (for placement)"):
        assert words in err, err


def test_building_wants_its_tools(machine):
    for name in ("cmake", "nvcc"):
        script(machine.folder / f"path/{name}", "echo 'Cuda compilation tools, release 12.4, V12.4.1'")
    script(machine.folder / "path/pkg-config", '[ "$2" != jansson ]')
    code, _, err = machine.run("kernels", built=False)
    assert code == 2 and "nvcc of CUDA 13; " in err and "is of 12.4" in err and "headers of jansson" in err


@pytest.mark.parametrize("words,want", [
    (["nothing"], "no part nothing; there are tests, memcheck"), (["tests", "--only", "ops,nope"], "no device test nope"),
    (["tests", "--jobs", "0"], "are positive"), (["tests", "--limit", "-1"], "are positive"), (["--frobnicate"], "unrecognized arguments")])
def test_wrong_arguments(machine, words, want):
    code, _, err = machine.run(*words)
    assert code == 2 and want in err


def test_all_parts_in_order(machine):
    """Everything passes; what one GPU cannot do is listed as left out, with the reason."""
    script(machine.build / "bin/sits2026-eval", 'case "$1" in greedy) echo "[]";; *) echo \'{"perplexity": 10}\';; esac')
    code, out, err = machine.run()
    assert code == 0, out + err
    steps = machine.steps()
    assert list(dict.fromkeys(step["part"] for step in steps)) == PARTS
    assert sorted(step["name"] for step in steps if step["part"] == "tests") == TESTS, "each program of tests/gpu, none else"
    left_out = {(step["part"], step["name"]): step["reason"] for step in steps if step["result"] == "left out"}
    for step in (("tests", "nodes"), ("throughput", "two GPUs"), ("placement", "trace")):
        assert left_out.pop(step) == "there is one GPU"
    assert {name for _, name in left_out} == {"pack", "forms", "faults", "nodes"} and len(left_out) == 16 and all(left_out.values())
    for step in steps:
        assert step["result"] == "left out" or (machine.out / step["log"]).read_text().startswith("$ "), step
    assert re.search(r"^memcheck +12 +0 +4 ", out, re.M), out


def test_two_gpus_run_what_wants_two(tmp_path):
    machine = Machine(tmp_path, gpus=["NVIDIA H200, 9.0"] * 2)
    code, out, err = machine.run("tests", "throughput", "placement")
    assert code == 0 and "left out" not in set(machine.results().values()), out + err
    assert (machine.out / "trace.csv").read_text().startswith("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:")


def test_failures_are_found(machine):
    script(machine.build / "tests/gpu_test_ops", "echo 'FAIL  norm'; exit 1")
    script(machine.build / "tests/gpu_test_lane", "echo 'SKIP  no CUDA device'; exit 77")
    script(machine.build / "tests/gpu_test_send", "kill -SEGV $$")
    script(machine.build / "tests/gpu_test_faults", "echo 'SKIP  faults are injected in other builds'; exit 77")
    code, out, _ = machine.run("tests")
    results = machine.results()
    assert code == 1 and [name for (_, name), result in results.items() if result == "fail"] == ["ops", "lane", "send"]
    assert results["tests", "faults"] == "left out" and "FAILED: " in out
    reasons = {step["name"]: step["reason"] for step in machine.steps()}
    assert reasons["ops"] == "exit status 1: FAIL  norm" and reasons["lane"] == "it skipped itself: SKIP  no CUDA device"
    assert reasons["faults"] == "it skipped itself: SKIP  faults are injected in other builds"


def test_a_hang_ends_and_is_a_failure(machine):
    """What the hanging program started ends with it, and the next one runs."""
    script(machine.build / "tests/gpu_test_ops", f"sleep 300 & echo $! > {machine.folder}/pid; wait")
    start = time.monotonic()
    code, out, _ = machine.run("racecheck", "--only", "ops,lane", "--sanitizer-limit", "2", "--jobs", "1")
    assert code == 1 and time.monotonic() - start < 30
    assert machine.results() == {("racecheck", "ops"): "time out", ("racecheck", "lane"): "pass"}, out
    pid = int((machine.folder / "pid").read_text())
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the sleep goes on")


def test_time_for_everything(machine):
    script(machine.build / "tests/gpu_test_ops", "sleep 3")
    code, out, _ = machine.run("tests", "--only", "ops,lane", "--limit", "2.5")
    assert code == 1 and machine.results() == {("tests", "ops"): "time out", ("tests", "lane"): "not run"}, out


def test_accuracy_beyond_its_bounds(machine):
    answers = '[{"ids": [1, 2, 3], "gap": [1, 0.5, 1]}]'
    script(machine.build / "bin/sits2026-eval",
           'case "$*" in *greedy*cuda*) echo \'[{"ids": [1, 9, 3], "gap": [1, 1, 1]}]\';; *greedy*) echo \'' + answers + "';;\n"
           '*int4*cuda*|*cuda*int4*) echo \'{"perplexity": 10.1}\';; *) echo \'{"perplexity": 10}\';; esac')
    code, out, _ = machine.run("accuracy")
    assert code == 1 and machine.results()["accuracy", "compile w4a16"] == "pass" and machine.results()["accuracy", "w4a16"] == "fail", out
    log = (machine.out / "accuracy/w4a16.log").read_text()
    assert "w4a16.bin int4: perplexity differs by 1.0 %, at most 0.5 was asked" in log and "parts after 1 tokens at a gap of 0.5" in log
    assert machine.results()["accuracy", "w4a8"] == "pass", "its bounds are wider"


@pytest.mark.parametrize("arg,status", [("--help", 0), ("--json", 2)])
def test_kernels_takes_no_option_for_its_file(arg, status, tmp_path):
    done = subprocess.run([BIN / "sits2026-bench", "kernels", arg], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status and "usage: sits2026-bench kernels [FILE" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_its_build_wants_no_server_libraries(tmp_path):
    """The preset's switches where pkg-config knows nothing but what the script names."""
    for name in ("jansson", "libpcre2-8", "yaml-0.1", "libcurl"):
        done = subprocess.run(["pkg-config", "--variable=pcfiledir", name], capture_output=True, text=True, check=True)
        (tmp_path / f"{name}.pc").write_text((pathlib.Path(done.stdout.strip()) / f"{name}.pc").read_text())
    done = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", "-DSITS_SERVER=OFF", "-DSITS_CUDA=OFF"],
                          env={**os.environ, "PKG_CONFIG_LIBDIR": str(tmp_path), "PKG_CONFIG_PATH": ""}, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    targets = subprocess.run(["ninja", "-C", tmp_path / "build", "-t", "targets", "all"], capture_output=True, text=True, check=True).stdout
    assert "bin/sits2026-bench:" in targets and "bin/sits2026-eval:" in targets and "sits2026d" not in targets
    preset = next(p for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"] if p["name"] == "gpu")
    assert preset["cacheVariables"] == {"SITS_CUDA": "ON", "SITS_SERVER": "OFF"}
