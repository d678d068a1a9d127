"""Plays the kubelet, the endpoint controller and a deployment's rolling update on local processes, by a Deployment's own manifest: its
arguments, probes, preStop hook, grace period and strategy.

As in a cluster, routers learn of changes late: a pod's removal and its termination start at the same moment, and the router goes on sending
to it for up to `lag` seconds. That is why preStop sleeps, and what the simulation shows.

Run as a program it rolls a deployment under load and prints what happened:
  kubelet.py MANIFEST_FOLDER MODEL [--bin BIN] [--lag SECONDS]"""
import argparse
import collections
import json
import pathlib
import random
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time

from kustomize import render


class Pod:
    """One container of a deployment as a process. States: starting, ready, terminating, gone."""

    def __init__(self, number, template, binary, model, folder):
        self.number, self.template = number, template
        self.spec = template["spec"]["containers"][0]
        self.log_path = folder / f"pod{number}.log"
        words = [re.sub(r"^/models/.*", str(model), word) for word in self.spec["args"]]
        words[words.index("--host") + 1] = "127.0.0.1"
        command = [str(binary), *words, "--port", "0", "--threads", "1", "--served-model-name", "tiny"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.port = None
        self.is_ready = self.is_terminating = False
        self.exit_code = self.term_seconds = self.stop_seconds = None
        self.was_killed = False
        self.ready_failures_after_term = 0
        threading.Thread(target=self.run_probes, daemon=True).start()

    def find_port(self):
        found = re.search(r"listening on http://[^:]+:(\d+)", self.log_path.read_text(errors="replace"))
        self.port = int(found.group(1)) if found else None
        return self.port

    def probe(self, name):
        """One probe as the kubelet makes it: 200 to 399 within the timeout."""
        spec = self.spec[name]
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=spec.get("timeoutSeconds", 1)) as sock:
                sock.settimeout(spec.get("timeoutSeconds", 1))
                sock.sendall(f"GET {spec['httpGet']['path']} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
                return 200 <= int(sock.makefile("rb").readline().split()[1]) < 400
        except (OSError, IndexError, ValueError):
            return False

    def run_probes(self):
        failures = 0
        startup = self.spec["startupProbe"]
        while self.process.poll() is None and not (self.find_port() and self.probe("startupProbe")):
            failures += 1
            assert failures < startup.get("failureThreshold", 3), "the kubelet would restart it"
            time.sleep(startup["periodSeconds"] / 10)  # so that tests do not wait for two seconds each time
        self.is_ready = self.process.poll() is None
        next_live, dead = time.time(), 0
        while self.process.poll() is None:
            ready = self.probe("readinessProbe")
            if self.process.poll() is None:
                self.is_ready = ready
            if time.time() >= next_live:
                dead = 0 if self.probe("livenessProbe") or self.process.poll() is not None else dead + 1
                assert dead < self.spec["livenessProbe"]["failureThreshold"], "the kubelet would kill it"
                next_live += self.spec["livenessProbe"]["periodSeconds"]
            time.sleep(self.spec["readinessProbe"]["periodSeconds"] / 4)
        self.is_ready = False

    def terminate(self):
        """preStop, SIGTERM, and SIGKILL at the end of the grace period, which counts both."""
        self.is_terminating = True
        began = time.time()
        grace = self.template["spec"]["terminationGracePeriodSeconds"]
        subprocess.run(self.spec["lifecycle"]["preStop"]["exec"]["command"], check=True, timeout=grace)
        self.term_seconds = time.time() - began
        self.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        self.ready_failures_after_term = int(not self.probe("readinessProbe"))
        try:
            self.process.wait(grace - (time.time() - began))
        except subprocess.TimeoutExpired:
            self.was_killed = True
            self.process.kill()
            self.process.wait()
        self.exit_code = self.process.returncode
        self.stop_seconds = time.time() - began


class Cluster:
    def __init__(self, deployment, binary, model, folder, lag=2.0):
        self.deployment, self.binary, self.model, self.folder, self.lag = deployment, binary, model, pathlib.Path(folder), lag
        self.template = deployment["spec"]["template"]
        self.pods, self.gone, self.next_number = [], [], 0
        self.routed = []  # what the router knows
        self.is_stopping = False
        threading.Thread(target=self.route, daemon=True).start()

    def start_pod(self):
        pod = Pod(self.next_number, self.template, self.binary, self.model, self.folder)
        self.next_number += 1
        self.pods.append(pod)
        return pod

    def route(self):
        """The router's endpoints follow the truth with a random lag."""
        history = collections.deque()
        while not self.is_stopping:
            now = time.time()
            history.append((now + random.uniform(0.3, 1) * self.lag, [p for p in self.pods if p.is_ready and not p.is_terminating]))
            while history and history[0][0] <= now:
                self.routed = history.popleft()[1]
            time.sleep(0.05)

    def wait(self, condition, seconds, what):
        end = time.time() + seconds
        while not condition():
            assert time.time() < end, what
            time.sleep(0.05)

    def scale_up(self, seconds=120):
        for _ in range(self.deployment["spec"]["replicas"]):
            self.start_pod()
        self.wait(lambda: len(self.routed) == len(self.pods), seconds, "not all pods are ready")

    def remove(self, pod):
        pod.terminate()
        self.pods.remove(pod)
        self.gone.append(pod)

    def roll(self, seconds=300):
        """A rolling update with the deployment's own maxSurge and maxUnavailable."""
        rolling = self.deployment["spec"]["strategy"]["rollingUpdate"]
        old, wanted = list(self.pods), len(self.pods)
        end, removals, n_new, lowest = time.time() + seconds, [], 0, wanted
        while old or any(t.is_alive() for t in removals) or len([p for p in self.pods if p.is_ready and not p.is_terminating]) < wanted:
            assert time.time() < end, "the roll does not end"
            standing = [p for p in self.pods if not p.is_terminating]
            ready = [p for p in standing if p.is_ready]
            lowest = min(lowest, len(ready))
            if len(standing) < wanted + rolling["maxSurge"] and n_new < wanted:
                self.start_pod()
                n_new += 1
            elif old and len(ready) > wanted - rolling["maxUnavailable"]:
                pod = old.pop(0)
                pod.is_terminating = True
                removals.append(threading.Thread(target=self.remove, args=(pod,)))
                removals[-1].start()
            time.sleep(0.05)
        return lowest

    def stop(self):
        for pod in list(self.pods):
            pod.process.terminate()
        for pod in list(self.pods):
            pod.process.wait(60)
        self.is_stopping = True


class Load:
    """Clients that send one request after the other to a pod of the router's choice, half of them streams. Nobody retries."""

    def __init__(self, cluster, n_clients, max_tokens=200):
        self.cluster, self.max_tokens = cluster, max_tokens
        self.n_done, self.lost, self.by_pod = 0, [], collections.Counter()
        self.is_stopping = False
        self.mutex = threading.Lock()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(n_clients)]
        for thread in self.threads:
            thread.start()

    def ask(self, pod, is_stream):
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": self.max_tokens, "ignore_eos": True, "stream": is_stream}).encode()
        with socket.create_connection(("127.0.0.1", pod.port), timeout=60) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = sock.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
        if is_stream:
            assert b"data: [DONE]" in answer and b'"finish_reason":"length"' in answer, answer[-300:]
        else:
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"] == self.max_tokens

    def run(self, number):
        is_stream = bool(number % 2)
        while not self.is_stopping:
            pods = self.cluster.routed
            if not pods:
                time.sleep(0.01)
                continue
            pod = random.choice(pods)
            try:
                self.ask(pod, is_stream)
                with self.mutex:
                    self.n_done += 1
                    self.by_pod[pod.number] += 1
            except (OSError, AssertionError, ValueError, KeyError, IndexError) as error:
                with self.mutex:
                    self.lost.append(f"pod {pod.number}: {type(error).__name__}: {error}")
            is_stream = not is_stream

    def stop(self):
        self.is_stopping = True
        for thread in self.threads:
            thread.join()


def deployment_of(folder):
    return next(o for o in render(folder) if o["kind"] == "Deployment" and o["metadata"]["name"] == "sits2026")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifests")
    parser.add_argument("model")
    parser.add_argument("--bin", default="build/release/bin/sits2026d")
    parser.add_argument("--lag", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deployment = deployment_of(options.manifests)
        print("args:", shlex.join(deployment["spec"]["template"]["spec"]["containers"][0]["args"]))
        cluster = Cluster(deployment, options.bin, options.model, folder, options.lag)
        cluster.scale_up()
        load = Load(cluster, options.clients)
        lowest = cluster.roll()
        load.stop()
        cluster.stop()
        print(f"{load.n_done} requests done by pods {dict(load.by_pod)}, {len(load.lost)} lost, never fewer than {lowest} ready pods")
        for pod in cluster.gone:
            print(f"pod {pod.number}: preStop {pod.term_seconds:.1f} s, gone after {pod.stop_seconds:.1f} s, exit code {pod.exit_code}")
        for line in load.lost[:20]:
            print(line)
        return 1 if load.lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
