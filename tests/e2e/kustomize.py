"""The part of kustomize that our manifests use: resources, components, JSON 6902 patches with a target, `$patch: delete`, and images. Where
kubectl is installed, test_kubernetes.py compares this with `kubectl kustomize`."""
import copy
import pathlib

import yaml

KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images"}


def documents(path):
    return [d for d in yaml.safe_load_all(pathlib.Path(path).read_text()) if d]


def render(folder):
    """Every object of a kustomization."""
    folder = pathlib.Path(folder)
    custom = documents(folder / "kustomization.yaml")[0]
    assert set(custom) <= KNOWN, set(custom) - KNOWN
    objects = []
    for entry in custom.get("resources", []):
        path = folder / entry
        objects += render(path) if path.is_dir() else documents(path)
    for entry in custom.get("components", []):
        objects += render(folder / entry)
    for patch in custom.get("patches", []):
        objects = apply(objects, patch)
    for image in custom.get("images", []):
        for item in objects:
            rename_images(item, image)
    return objects


def matches(item, target):
    return item["kind"] == target["kind"] and item["metadata"]["name"] == target["name"]


def apply(objects, patch):
    body = yaml.safe_load(patch["patch"])
    if isinstance(body, dict):
        assert body.get("$patch") == "delete" and "target" not in patch, "only deletion is known"
        found = [o for o in objects if matches(o, {"kind": body["kind"], "name": body["metadata"]["name"]})]
        assert len(found) == 1
        return [o for o in objects if o is not found[0]]
    found = [o for o in objects if matches(o, patch["target"])]
    assert found, patch["target"]
    for item in found:
        for step in body:
            json_patch(item, step)
    return objects


def json_patch(item, step):
    *path, last = step["path"].lstrip("/").split("/")
    for part in path:
        item = item[int(part)] if isinstance(item, list) else item[part.replace("~1", "/")]
    last = last.replace("~1", "/")
    value = copy.deepcopy(step.get("value"))
    if isinstance(item, list):
        if last == "-" and step["op"] == "add":
            item.append(value)
        else:
            assert step["op"] == "replace"
            item[int(last)] = value
    else:
        assert step["op"] == "add" or last in item, step
        item[last] = value


def rename_images(node, image):
    if isinstance(node, dict):
        for container in node.get("containers", []) if isinstance(node.get("containers"), list) else []:
            name, _, tag = container.get("image", "").partition(":")
            if name == image["name"]:
                container["image"] = image.get("newName", name) + (":" + image.get("newTag", tag) if image.get("newTag", tag) else "")
        for value in node.values():
            rename_images(value, image)
    elif isinstance(node, list):
        for value in node:
            rename_images(value, image)
