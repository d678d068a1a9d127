"""ThreadSanitizer and gRPC's C core, which was not compiled for it: what it reports of a completion queue without any of our code is false,
the annotation that src/front/grpc uses says what the library promises, and a real race shows in spite of it."""
import os
import re
import subprocess

import pytest
from conftest import ROOT, SLOW

SOURCE = ROOT / "tests/tools/completion_queue.c"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tsan")
    libraries = subprocess.run(["pkg-config", "--cflags", "--libs", "grpc", "gpr"], capture_output=True, text=True,
                               check=True).stdout.split()

    def run(*defines):
        program = folder / ("queue" + "".join(defines))
        flags = ["-std=gnu17", "-O1", "-g", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror", *(f"-D{d}" for d in defines)]
        build = subprocess.run(["cc", *flags, SOURCE, "-o", program, *libraries, "-pthread"], capture_output=True, text=True)
        if build.returncode and "tsan" in build.stderr:
            pytest.skip("no ThreadSanitizer here")
        assert build.returncode == 0, build.stderr
        done = subprocess.run([program], capture_output=True, text=True, timeout=120 * SLOW,
                              env={**os.environ, "TSAN_OPTIONS": "ignore_noninstrumented_modules=1"})
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("the sanitizer does not run on this kernel")
        assert str(sum(range(20000))) in done.stdout, done.stderr
        return re.findall(r"WARNING: ThreadSanitizer: data race.*?#0 (\w+)", done.stderr, re.S), done.returncode
    return run


def test_the_library_alone_is_reported(reports):
    found, status = reports()
    assert set(found) == {"take"} and status == 66


def test_annotated_nothing_is_reported(reports):
    assert reports("ANNOTATE") == ([], 0)


def test_a_race_is_reported_in_spite_of_the_annotation(reports):
    found, status = reports("ANNOTATE", "PLANT")
    assert found and status == 66
