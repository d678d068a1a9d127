"""What is installed and packed: cpack makes a .deb and a .tar.gz of what is built; unpacked in a folder, the programs run there, the manual
pages and the completion name every option, and the unit, the configuration and the dependencies are right."""
import os
import re
import shutil
import subprocess

import pytest
from conftest import BIN, ROOT, TINY, Server

BUILD = BIN.resolve().parent
TOOLS = ["sits2026-bench", "sits2026-compile", "sits2026-eval", "sits2026-opt"]


def run(*words, **more):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The packages' folder, with `deb` and `tgz` unpacked beside them."""
    if not (BUILD / "CPackConfig.cmake").exists() or not all((BIN / name).exists() for name in ["sits2026d", *TOOLS]):
        pytest.skip(f"nothing is built in {BUILD}")
    if not shutil.which("cpack") or not shutil.which("dpkg-deb") or not shutil.which("dpkg-shlibdeps"):
        pytest.skip("no cpack, dpkg-deb or dpkg-shlibdeps here")
    folder = tmp_path_factory.mktemp("package")
    run("cpack", "-G", "DEB;TGZ", "-B", folder, "--config", BUILD / "CPackConfig.cmake")
    deb, = folder.glob("*.deb")
    tgz, = folder.glob("*.tar.gz")
    run("dpkg-deb", "-x", deb, folder / "deb")
    run("dpkg-deb", "-e", deb, folder / "control")
    (folder / "tgz").mkdir()
    run("tar", "xzf", tgz, "-C", folder / "tgz", "--strip-components=1")
    return folder


def help_options():
    return set(re.findall(r"^  --([a-z0-9-]+)", run(BIN / "sits2026d", "--help"), re.M))


def test_the_deb_s_control_files(packed):
    control = (packed / "control/control").read_text()
    assert "Package: sits2026\n" in control
    depends = re.search(r"^Depends: (.*)$", control, re.M).group(1)
    for library in ("libc6", "libmicrohttpd12", "libgrpc29", "libjansson4", "libyaml-0-2", "libpcre2-8-0", "libcurl3", "libprotobuf-c1"):
        assert library in depends, depends
    assert (packed / "control/conffiles").read_text() == "/etc/sits2026/sits2026d.yaml\n"
    for script in ("postinst", "prerm"):
        run("sh", "-n", packed / "control" / script)
        assert os.access(packed / "control" / script, os.X_OK)


@pytest.mark.parametrize("kind,usr,etc", [("deb", "usr", "etc"), ("tgz", "usr", "usr/etc")])
def test_every_file_is_where_it_belongs(packed, kind, usr, etc):
    root = packed / kind
    base = root / usr
    for name in ["sits2026d", *TOOLS]:
        assert os.access(base / "bin" / name, os.X_OK)
        assert "not stripped" not in run("file", "-b", base / "bin" / name) if shutil.which("file") else True
    assert (root / etc / "sits2026/sits2026d.yaml").read_text() == (ROOT / "configs/sits2026d.yaml").read_text()
    unit = (base / "lib/systemd/system/sits2026d.service").read_text()
    assert "ExecStart=/usr/bin/sits2026d --config /etc/sits2026/sits2026d.yaml\n" in unit
    assert (base / "share/sits2026/kubernetes/base/deployment.yaml").exists()
    assert (base / "share/man/man8/sits2026d.8").exists() and all((base / f"share/man/man1/{t}.1").exists() for t in TOOLS)
    others = [p for p in root.rglob("*") if p.is_file() and p.stat().st_mode & 0o022]
    assert not others, "nothing is writable for others"


def test_the_unpacked_daemon_serves(packed):
    if not TINY.exists():
        pytest.skip("no model")
    root = packed / "deb"
    (root / "config.yaml").write_text("served-model-name: packed\nthreads: 1\n")
    import conftest
    before = conftest.BIN
    conftest.BIN = root / "usr/bin"
    try:
        server = Server(TINY, packed / "log", "--config", root / "config.yaml")
        status, answer = server.complete("Once upon a time", max_tokens=5)
        assert status == 200 and answer["model"] == "packed"
        assert server.stop() == 0
    finally:
        conftest.BIN = before
    assert "usage: sits2026-bench" in run(root / "usr/bin/sits2026-bench", "--help")


def test_manual_pages_name_every_option(packed):
    folder = packed / "deb/usr/share/man"
    page = (folder / "man8/sits2026d.8").read_text()
    for name in help_options():
        assert "\\fB\\-\\-" + name.replace("-", "\\-") + "\\fR" in page, name
    pages = [folder / "man8/sits2026d.8", *(folder / f"man1/{tool}.1" for tool in TOOLS)]
    for tool, path in zip(TOOLS, pages[1:]):
        if tool == "sits2026-bench":
            assert "\\-\\-concurrency" in path.read_text() or "\\-\\-url" in path.read_text()
        else:
            assert "\\-\\-model" in path.read_text() or "\\-\\-recipe" in path.read_text(), tool
    if shutil.which("groff"):
        for path in pages:
            done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", path], capture_output=True, text=True)
            assert done.returncode == 0 and not [e for e in done.stderr.splitlines() if "cannot" not in e], (path, done.stderr[:400])


def complete(script, line):
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    code = """source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); function=$(complete -p "$1"); function=${function##*-F }
${function%% *} "$1"; printf '%s\\n' "${COMPREPLY[@]}" """
    return set(run("bash", "-c", code, script, *words, env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}).split())


def test_completion_offers_every_option_and_choice(packed):
    script = packed / "deb/usr/share/bash-completion/completions/sits2026d"
    offered = {word[2:] for word in complete(script, "sits2026d --")}
    assert help_options() <= offered
    assert "no-enable-prefix-caching" in offered
    assert complete(script, "sits2026d --device ") == {"auto", "cpu", "cuda"}
    assert complete(script, "sits2026d --kv-cache-dtype int") == {"int8", "int4"}
    assert complete(script, "sits2026d --port ") == set()
    assert {"--model", "--threads"} <= complete(script, "sits2026-eval --")
    for tool in TOOLS:
        assert (script.parent / tool).exists()


def test_installing_to_a_prefix(tmp_path):
    if not (BUILD / "cmake_install.cmake").exists() or not shutil.which("cmake"):
        pytest.skip("no build folder or no cmake")
    run("cmake", "--install", BUILD, "--prefix", tmp_path / "opt")
    assert run(tmp_path / "opt/bin/sits2026d", "--version").startswith("sits2026d ")
    unit = (tmp_path / "opt/lib/systemd/system/sits2026d.service").read_text()
    assert f"ExecStart={tmp_path}/opt/bin/sits2026d --config {tmp_path}/opt/etc/sits2026/sits2026d.yaml\n" in unit
    assert (tmp_path / "opt/etc/sits2026/sits2026d.yaml").exists()
    assert (tmp_path / "opt/share/doc/sits2026/README.md").exists()
