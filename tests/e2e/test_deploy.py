"""Files for operators against the running daemon: every metric that a rule or panel names is exported, every option in the manifests
exists, probes hit routes that answer, and the drain arithmetic of the manifests adds up."""
import json
import pathlib
import re
import subprocess

import yaml
from conftest import BIN, ROOT

CONFIGS = ROOT / "configs"
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def exported(server):
    text = server.get("/metrics")[2].decode()
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


def names_in(text):
    return {SUFFIX.sub("", name) for name in re.findall(r"sits2026:\w+", text)}


def documents(path):
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def test_rules_name_exported_metrics(tiny):
    rules = documents(CONFIGS / "prometheus/rules.yaml")[0]
    rows = [rule for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rows if "record" in rule}
    used = set().union(*(names_in(rule["expr"]) for rule in rows)) - recorded
    assert used and used <= exported(tiny), used - exported(tiny)


def test_dashboard_names_exported_metrics_and_is_current(tiny, tmp_path):
    board = json.loads((CONFIGS / "grafana/sits2026.json").read_text())
    used = set().union(*(names_in(t["expr"]) for p in board["panels"] for t in p["targets"]))
    assert used and used <= exported(tiny), used - exported(tiny)
    copy = tmp_path / "generate.py"
    copy.write_text((CONFIGS / "grafana/generate.py").read_text())
    subprocess.run(["python3", copy], check=True)
    assert json.loads((tmp_path / "sits2026.json").read_text()) == board, "run configs/grafana/generate.py"


def container():
    deployment = documents(CONFIGS / "kubernetes/base/deployment.yaml")[0]
    return deployment["spec"]["template"]["spec"], deployment["spec"]["template"]["spec"]["containers"][0]


def test_probes_hit_routes_that_answer(tiny):
    _, spec = container()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert tiny.get(spec[probe]["httpGet"]["path"])[0] == 200, probe
    docker = (ROOT / "docker/Dockerfile").read_text()
    assert tiny.get(re.search(r"127\.0\.0\.1:8000(/\S+?)\"", docker).group(1))[0] == 200


def test_manifest_options_exist():
    _, spec = container()
    overlay = documents(CONFIGS / "kubernetes/overlays/cpu/kustomization.yaml")[0]
    words = spec["args"] + re.findall(r"value: (--\S+)", overlay["patches"][0]["patch"])
    done = subprocess.run([BIN / "sits2026d", *words, "--print-config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_drain_fits_the_grace_period():
    pod, spec = container()
    sleep = int(spec["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(spec["args"][spec["args"].index("--shutdown-timeout-s") + 1])
    assert sleep + drain + 5 <= pod["terminationGracePeriodSeconds"]


def test_every_file_is_yaml():
    files = [*CONFIGS.rglob("*.yaml"), *CONFIGS.rglob("*.yml"), ROOT / "docker/compose.yaml"]
    assert len(files) > 10
    for file in files:
        assert documents(pathlib.Path(file)) or file.name == "sits2026d.yaml", file


def test_both_images_end_alike():
    """The CUDA image starts, is watched and confined as the CPU image is."""
    ends = [[line for line in (ROOT / "docker" / name).read_text().splitlines()
             if line.split(" ")[0] in ("USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT")]
            for name in ("Dockerfile", "Dockerfile.cuda")]
    assert ends[0] == ends[1] and len(ends[0]) == 5
    assert ends[0][0] == "USER 10001:10001"


def test_images_take_only_what_was_installed():
    """Not all of the build stage's /usr/local: in the CUDA image the toolkit lies there, gigabytes of it."""
    for name in ("Dockerfile", "Dockerfile.cuda"):
        text = (ROOT / "docker" / name).read_text()
        assert re.findall(r"^COPY --from=.*", text, re.M) == ["COPY --from=build /out/usr/local /usr/local"]
        assert "DESTDIR=/out cmake --install build/release --prefix /usr/local --strip" in text


def test_images_build_with_the_packages_of_setup():
    """One list of libraries: scripts/lib.sh's."""
    wanted = set(re.findall(r"\blib[\w.+-]+-dev\b", re.search(r"BUILD_PACKAGES=\((.*?)\)", (ROOT / "scripts/lib.sh").read_text(), re.S)[1]))
    assert len(wanted) > 6
    for name in ("Dockerfile", "Dockerfile.cuda"):
        build = (ROOT / "docker" / name).read_text().split("\nFROM ")[1]
        assert set(re.findall(r"\blib[\w.+-]+-dev\b", build)) == wanted, name
