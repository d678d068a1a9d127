"""The Kubernetes manifests: rendered overlays validate against the published schemas of Kubernetes (PyPI: kubernetes-validate) and of
prometheus-operator (PyPI: cloudcoil-models-prometheus-operator), the other custom resources, whose schemas are on no package index,
against crd_schemas.yaml; and rolling a deployment under load, played on local processes by its own manifest, loses no request."""
import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml
from conftest import BIN, ROOT, SLOW, TINY
from kubelet import Cluster, Load, deployment_of
from kustomize import render

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")
FOLDER = ROOT / "configs/kubernetes"
OVERLAYS = sorted(p.name for p in (FOLDER / "overlays").iterdir())
EVERY = [FOLDER / "base", *(FOLDER / "overlays" / name for name in OVERLAYS)]
VERSION = "1.31"

CRDS = yaml.safe_load((pathlib.Path(__file__).parent / "crd_schemas.yaml").read_text())


def check_pod(template):
    pod = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"},
           "spec": {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}}
    kubernetes_validate.validate(pod, VERSION, strict=True)


RULES = {
    "service-has-port": lambda ref: ref.get("group", "") != "" or ref.get("kind", "Service") != "Service" or "port" in ref,
    "something-moves": lambda roll: roll.get("maxUnavailable", 1) not in (0, "0%") or roll.get("maxSurge", 0) not in (0, "0%"),
}


def rule_holds(validator, name, value, schema):
    if not RULES[name](value):
        yield jsonschema.ValidationError(f"{name}: {value}")


def pod_holds(validator, wanted, value, schema):
    check_pod(value)
    return ()


Structural = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-rules": rule_holds, "x-pod": pod_holds})


def check_model(item):
    """By the classes that are generated from the operator's published definitions. They let unknown fields pass; here those show as fields
    that are not there any more when the object is written out again."""
    monitoring = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
    written = getattr(monitoring, item["kind"]).model_validate(item).model_dump(mode="json", by_alias=True, exclude_unset=True)

    def compare(a, b, path):
        if isinstance(a, dict):
            assert set(a) <= set(b), f"{path}: unknown {set(a) - set(b)}"
            for key in a:
                compare(a[key], b[key], f"{path}.{key}")
        elif isinstance(a, list):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{path}[{i}]")
    compare(item, written, item["kind"])


def validate(item):
    """Whether the object is what its API takes; raises otherwise."""
    schema = CRDS.get(f"{item['apiVersion']}/{item['kind']}")
    if item["apiVersion"] == "monitoring.coreos.com/v1":
        check_model(item)
    elif schema:
        assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
        Structural(schema).validate(item["spec"])
    else:
        assert "." not in item["apiVersion"].split("/")[0] or item["apiVersion"].split("/")[0].endswith("k8s.io"), item["apiVersion"]
        kubernetes_validate.validate(item, VERSION, strict=True)


@pytest.mark.parametrize("folder", EVERY, ids=lambda p: p.name)
def test_every_object_validates(folder):
    objects = render(folder)
    assert len(objects) >= 4
    for item in objects:
        validate(item)
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)


def test_components_validate():
    for folder in (FOLDER / "components").iterdir():
        for item in render(folder):
            validate(item)


@pytest.mark.parametrize("change", [
    lambda d: d["spec"]["template"]["spec"]["containers"][0].update(imagePullPolcy="Always"),
    lambda d: d["spec"]["template"]["spec"]["containers"][0]["readinessProbe"].update(periodSeconds="2"),
    lambda d: d["spec"].pop("selector"),
])
def test_the_validation_sees_mistakes(change):
    deployment = deployment_of(FOLDER / "base")
    change(deployment)
    with pytest.raises(Exception):
        validate(deployment)


def pool_ref(spec):
    return spec["endpointPickerRef"]


def template(spec):
    return spec["leaderWorkerTemplate"]


@pytest.mark.parametrize("kind,change", [
    ("InferencePool", lambda s: s.update(targetPortNumber=8000)), ("InferencePool", lambda s: s["targetPorts"][0].update(number="8000")),
    ("InferencePool", lambda s: s["targetPorts"][0].update(number=0)),
    ("InferencePool", lambda s: s.update(targetPorts=2 * s["targetPorts"])),
    ("InferencePool", lambda s: pool_ref(s).pop("port")), ("InferencePool", lambda s: pool_ref(s).update(failureMode="FailOpened")),
    ("InferencePool", lambda s: s["selector"].update(matchLabels={})), ("InferencePool", lambda s: s.pop("endpointPickerRef")),
    ("HTTPRoute", lambda s: s.pop("parentRefs")), ("HTTPRoute", lambda s: s["rules"][0]["timeouts"].update(request="0")),
    ("HTTPRoute", lambda s: s["rules"][0]["backendRefs"][0].update(group="", kind="Service")),
    ("HTTPRoute", lambda s: s["rules"][0]["matches"][0]["path"].update(value="v1")), ("HTTPRoute", lambda s: s.update(rules=[])),
    ("ServiceMonitor", lambda s: s["endpoints"][0].update(intervall="5s")), ("ServiceMonitor", lambda s: s.pop("selector")),
    ("ServiceMonitor", lambda s: s["endpoints"][0].update(interval="5 s")), ("ServiceMonitor", lambda s: s.update(endpoint=[])),
    ("LeaderWorkerSet", lambda s: template(s).update(restartPolicy="Always")), ("LeaderWorkerSet", lambda s: template(s).update(size=0)),
    ("LeaderWorkerSet", lambda s: s["rolloutStrategy"]["rollingUpdateConfiguration"].update(maxUnavailable=0)),
    ("LeaderWorkerSet", lambda s: template(s)["workerTemplate"]["spec"]["containers"][0].update(prots=[])),
])
def test_the_schemas_see_mistakes(kind, change):
    objects = [o for folder in [*EVERY, *(FOLDER / "components").iterdir()] for o in render(folder)]
    item = next(o for o in objects if o["kind"] == kind)
    validate(item)
    change(item["spec"])
    with pytest.raises(Exception):
        validate(item)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
@pytest.mark.parametrize("folder", EVERY, ids=lambda p: p.name)
def test_our_rendering_is_that_of_kubectl(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    key = lambda o: (o["kind"], o["metadata"]["name"])  # noqa: E731
    assert sorted(yaml.safe_load_all(done.stdout), key=key) == sorted(render(folder), key=key)


def pod_specs():
    """(overlay, pod template) of everything that runs the daemon."""
    for folder in EVERY:
        for item in render(folder):
            if item["metadata"]["name"] == "sits2026" and item["kind"] == "Deployment":
                yield folder.name, item["spec"]["template"]
            elif item["kind"] == "LeaderWorkerSet":
                yield folder.name, item["spec"]["leaderWorkerTemplate"]["leaderTemplate"]


def test_all_pods_drain_probe_and_are_confined_alike():
    base = deployment_of(FOLDER / "base")["spec"]["template"]["spec"]
    seen = set()
    for name, template in pod_specs():
        seen.add(name)
        spec = template["spec"]
        container = spec["containers"][0]
        for key in ("terminationGracePeriodSeconds", "securityContext", "automountServiceAccountToken", "volumes"):
            assert spec[key] == base[key], (name, key)
        for key in ("lifecycle", "startupProbe", "readinessProbe", "livenessProbe", "securityContext", "ports", "volumeMounts"):
            assert container[key] == base["containers"][0][key], (name, key)
        done = subprocess.run([BIN / "sits2026d", *container["args"], "--print-config"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if name != "base":
            assert container["resources"]["limits"]["memory"], name
    assert seen == {"base", *OVERLAYS}
    assert json.dumps(dict(pod_specs())["mig"]).count("nvidia.com/mig-2g.35gb") == 2


def test_followers_find_their_leader_and_outlive_its_drain():
    objects = render(FOLDER / "overlays/multi-node")
    group = next(o for o in objects if o["kind"] == "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for key in ("terminationGracePeriodSeconds", "securityContext", "automountServiceAccountToken", "volumes", "tolerations"):
        assert worker["spec"][key] == leader["spec"][key], key
    ours, theirs = (t["spec"]["containers"][0] for t in (leader, worker))
    for key in ("image", "env", "securityContext", "volumeMounts", "resources"):
        assert theirs[key] == ours[key], key
    assert int(theirs["lifecycle"]["preStop"]["exec"]["command"][1]) > 5 + 30
    shown = subprocess.run([BIN / "sits2026d", "--print-config"], capture_output=True, text=True).stdout
    wait = float(re.search(r"^node-connect-timeout-s: (\S+)$", shown, re.M).group(1))
    startup = ours["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= wait + 600  # the others come, then the model is read
    service = next(o for o in objects if o["kind"] == "Service")
    assert not service["spec"]["selector"].items() <= worker["metadata"]["labels"].items()  # it serves nothing
    policy = next(o for o in objects if o["kind"] == "NetworkPolicy" and o["metadata"]["name"] == "sits2026-group")["spec"]
    together = policy["podSelector"]["matchLabels"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == together
    for template in (leader, worker):
        assert together.items() <= template["metadata"]["labels"].items()
        args = template["spec"]["containers"][0]["args"]
        for index, text in (("0", "1 of 2 processes came"), ("1", "Connection refused")):  # the launcher's names are understood
            done = subprocess.run([BIN / "sits2026d", *(a for a in args if a != "--device=cuda"), "--port", "0", "--model", TINY,
                                   "--node-connect-timeout-s", "1", "--leader-port", "1" if index == "1" else "29417"],
                                  capture_output=True, text=True, timeout=60,
                                  env={"SITS_NODE_SECRET": "0123456789abcdef", "LWS_WORKER_INDEX": index, "LWS_GROUP_SIZE": "2",
                                       "LWS_LEADER_ADDRESS": "127.0.0.1"})
            assert done.returncode == 1 and text in done.stderr, done.stderr


def test_selectors_meet_and_metrics_exist(tiny):
    exported = {line.split()[2] for line in tiny.get("/metrics")[2].decode().splitlines() if line.startswith("# TYPE")}
    for folder in EVERY:
        objects = render(folder)
        labels = next(t for n, t in pod_specs() if n == folder.name)["metadata"]["labels"]
        service = next(o for o in objects if o["kind"] == "Service" and o["metadata"]["name"] == "sits2026")
        assert service["spec"]["selector"].items() <= labels.items()
        for item in objects:
            if item["kind"] in ("PodDisruptionBudget",):
                assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()
            if item["kind"] == "NetworkPolicy":
                assert item["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
            if item["kind"] == "ServiceMonitor":
                assert item["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
                assert item["spec"]["endpoints"][0]["port"] in [p["name"] for p in service["spec"]["ports"]]
                assert tiny.get(item["spec"]["endpoints"][0]["path"])[0] == 200
            if item["kind"] == "HorizontalPodAutoscaler":
                for metric in item["spec"]["metrics"]:
                    assert metric["pods"]["metric"]["name"].replace("sits2026_", "sits2026:", 1) in exported
                target = item["spec"]["scaleTargetRef"]
                assert any(o["kind"] == target["kind"] and o["metadata"]["name"] == target["name"] for o in objects)
    pool = next(o for o in render(FOLDER / "components/gateway") if o["kind"] == "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    picker = next(o for o in render(FOLDER / "components/gateway") if o["kind"] == "Deployment")
    flags = dict(a.lstrip("-").split("=", 1) for a in picker["spec"]["template"]["spec"]["containers"][0]["args"])
    assert {flags["total-queued-requests-metric"], flags["kv-cache-usage-percentage-metric"]} <= exported


@pytest.mark.parametrize("overlay", ["base", "overlays/gpu"])
def test_a_roll_under_load_loses_no_request(overlay, tmp_path):
    """base surges, gpu takes a pod away first; both keep what they promise."""
    if not (BIN / "sits2026d").exists() or not TINY.exists():
        pytest.skip("no daemon or no model")
    deployment = deployment_of(FOLDER / overlay)
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    deployment["spec"]["template"]["spec"]["containers"][0]["args"] = [a for a in args if a != "--device=cuda"]
    cluster = Cluster(deployment, BIN / "sits2026d", TINY, tmp_path, lag=2.0)
    load = None
    try:
        cluster.scale_up(120 * SLOW)
        load = Load(cluster, n_clients=6)
        lowest = cluster.roll(240 * SLOW)
    finally:
        if load:
            load.stop()
        cluster.stop()
    assert not load.lost, load.lost[:5]
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert lowest >= deployment["spec"]["replicas"] - rolling["maxUnavailable"]
    assert load.n_done > 50 and len(load.by_pod) == 2 * deployment["spec"]["replicas"], load.by_pod
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for pod in cluster.gone:
        assert pod.exit_code == 0 and not pod.was_killed and pod.stop_seconds < grace
        assert pod.term_seconds >= 5 and pod.ready_failures_after_term, "readiness is red at once"


def test_without_the_sleep_requests_are_lost(tmp_path):
    """What the preStop sleep is for: without it the router still sends to a pod that no longer listens."""
    if not (BIN / "sits2026d").exists() or not TINY.exists():
        pytest.skip("no daemon or no model")
    deployment = deployment_of(FOLDER / "base")
    deployment["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] = ["true"]
    cluster = Cluster(deployment, BIN / "sits2026d", TINY, tmp_path, lag=2.0)
    cluster.scale_up(120 * SLOW)
    load = Load(cluster, n_clients=4, max_tokens=20)
    cluster.roll(240 * SLOW)
    load.stop()
    cluster.stop()
    assert load.lost
