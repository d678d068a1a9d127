"""sd_notify: the daemon tells systemd when it serves and when it drains, and feeds the watchdog; the unit file agrees with it."""
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import BIN, ROOT, SLOW, TINY, start


class Manager:
    """systemd's end of NOTIFY_SOCKET."""

    def __init__(self, address, name):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(address)
        self.name = name
        self.got = []

    def read(self, seconds, until=None):
        """Messages (time, text) until one has the text, or the time is up."""
        end = time.time() + seconds
        while time.time() < end:
            self.sock.settimeout(max(0.01, end - time.time()))
            try:
                text = self.sock.recv(4096).decode()
            except TimeoutError:
                break
            self.got.append((time.time(), text))
            if until and until in text.split("\n"):
                return True
        return not until


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_readiness_watchdog_and_stop(tmp_path_factory, kind):
    path = str(tmp_path_factory.mktemp("notify") / "socket")
    name = path if kind == "path" else f"@sits-notify-{os.getpid()}"
    manager = Manager(name if kind == "path" else "\0" + name[1:], name)
    server = start(tmp_path_factory, TINY, env={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "400000"}, wait=False)
    assert manager.read(60 * SLOW, "READY=1"), server.text()
    assert server.get("/health/ready")[0] == 200, "ready is told only once it is so"
    manager.got.clear()
    manager.read(2)
    fed = [when for when, text in manager.got if text == "WATCHDOG=1"]
    assert len(fed) >= 5, manager.got
    assert max(b - a for a, b in zip(fed, fed[1:])) < 0.4 * SLOW, "each within the watchdog's time"
    server.process.terminate()
    assert manager.read(10 * SLOW, "STOPPING=1")
    assert server.stop() == 0


def test_another_process_s_watchdog_is_not_fed(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("notify") / "socket")
    manager = Manager(path, path)
    server = start(tmp_path_factory, TINY, env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"}, wait=False)
    assert manager.read(60 * SLOW, "READY=1")
    manager.read(1)
    assert not [text for _, text in manager.got if "WATCHDOG" in text]
    assert server.stop() == 0


def test_a_wedged_engine_starves_the_watchdog(tmp_path_factory):
    """So systemd restarts the service."""
    path = str(tmp_path_factory.mktemp("notify") / "socket")
    manager = Manager(path, path)
    server = start(tmp_path_factory, TINY, "--liveness-timeout-s", 1, wait=False,
                   env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000", "SITS_TEST_WEDGE": "1"})
    assert manager.read(60 * SLOW, "READY=1")
    assert manager.read(5 * SLOW, "WATCHDOG=1")
    server.process.send_signal(signal.SIGUSR2)
    asker = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "Once", "max_tokens": 100}))
    asker.start()
    end = time.time() + 20 * SLOW
    while server.get("/health/live")[0] == 200:
        assert time.time() < end
        time.sleep(0.05)
    manager.read(0.3)
    manager.got.clear()
    manager.read(1.5)
    assert not manager.got, manager.got
    assert server.stop() == 0
    asker.join()


def test_failed_loading_is_never_ready(tmp_path):
    path = str(tmp_path / "socket")
    manager = Manager(path, path)
    done = subprocess.run([BIN / "sits2026d", "--model", "/nonexistent", "--port", "0"], capture_output=True, text=True,
                          env={**os.environ, "NOTIFY_SOCKET": path})
    assert done.returncode == 1
    manager.read(0.2)
    assert not [text for _, text in manager.got if "READY" in text]


def test_the_unit_fits_the_daemon():
    unit = (ROOT / "configs/systemd/sits2026d.service").read_text()
    value = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert value["Type"] == "notify" and value["NotifyAccess"] == "main"
    words = value["ExecStart"].split()[1:]
    assert words == ["--config", "/etc/sits2026/sits2026d.yaml"]
    done = subprocess.run([BIN / "sits2026d", "--config", ROOT / "configs/sits2026d.yaml", "--model", "x", "--print-config"],
                          capture_output=True, text=True)
    drain = float(re.search(r"^shutdown-timeout-s: (\S+)$", done.stdout, re.M).group(1))
    assert drain + 10 <= float(value["TimeoutStopSec"])
    assert float(value["WatchdogSec"]) >= 10
