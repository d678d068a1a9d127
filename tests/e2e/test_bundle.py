"""scripts/bundle: the folder runs from another place, with an empty environment, on its own libraries alone."""
import pathlib
import re
import shutil
import subprocess

import pytest

from conftest import BIN, ROOT, TINY, Server

SYSTEM = re.compile(r"(ld-linux.*|linux-vdso|lib(c|m|dl|rt|pthread|resolv|util|anl|mvec))\.so")
LEFT_OUT = "libcublasLt"  # half a gigabyte, and found by the system's own search where the CUDA backend is built


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Made in one place, used in another."""
    made, used = (tmp_path_factory.mktemp(name) for name in ("made", "used"))
    command = [ROOT / "scripts/bundle", "--build", BIN.parent, "--without", LEFT_OUT, made / "b"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.move(made / "b", used / "b")
    return used / "b"


def test_every_library_comes_from_the_bundle(bundle):
    programs = sorted((bundle / "bin").iterdir())
    assert {p.name for p in programs} >= {"sits2026d", "sits2026-compile", "sits2026-eval", "sits2026-bench"}
    for program in programs:
        out = subprocess.run(["ldd", program], check=True, capture_output=True, text=True, env={}).stdout
        found = dict(re.findall(r"(\S+) => (\S+)", out))
        assert len(found) > 3, out
        for name, path in found.items():
            if not SYSTEM.match(name) and not name.startswith(LEFT_OUT):
                assert pathlib.Path(path).parent.resolve() == (bundle / "lib").resolve(), f"{program.name}: {name} from {path}"


def test_daemon_serves_with_an_empty_environment(bundle, tmp_path):
    if not TINY.exists():
        pytest.skip("no shared data")
    server = Server(TINY, tmp_path / "log", "--device", "cpu", program=bundle / "bin/sits2026d", bare=True)
    try:
        status, body = server.complete(max_tokens=8, temperature=0)
        assert status == 200 and body["usage"]["completion_tokens"] == 8
    finally:
        assert server.stop() == 0


def test_what_is_no_build_is_refused(tmp_path):
    done = subprocess.run([ROOT / "scripts/bundle", "--build", tmp_path, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 1 and "is no build folder" in done.stderr and not (tmp_path / "out").exists()
