"""The image as a pod of a cluster, with the driver `kubernetes`: its sessions run in pods beside it.

The image has the files of the image's context on the minimal root file system, which is imported into the cluster of
`cargo xtask cluster up`: no registry is reached. The server uses its pod's own account, with the rights that the book lists.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import tarfile

import pytest

import kubectl
import kubernetes_cluster
from harness import DEADLINE, ROOT, wait_until
from kubernetes_cluster import IMAGE
from test_dist import MINIMAL_ROOT, needs_dist, needs_root, one

WHY_NOT = kubernetes_cluster.why_not() or kubectl.why_no_test_image()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"image in a cluster: {WHY_NOT}"),
    pytest.mark.xdist_group("kubernetes"),
    needs_dist,
    needs_root,
]

OURS = "oubliette-server-test:latest"
USER = 10001
GUIDE = (ROOT / "docs/src/guide-kubernetes.md").read_text()


def rights() -> list[dict]:
    """The rules of a Role, from the table of the guide."""
    table = GUIDE.split("## Rights")[1].split("## ")[0]
    rules = []
    for resources, verbs in re.findall(r"^\| (`.*?) \| (.*?) \|$", table, re.M):
        names = re.findall(r"`([a-z0-9./-]+)`", resources)
        group = next((name for name in names if "." in name and "/" not in name), "")
        kinds = [name for name in names if name != group]
        each = [part.strip().split(", ") for part in verbs.split(";")]
        for place, kind in enumerate(kinds):
            rules.append({"apiGroups": [group], "resources": [kind], "verbs": each[place if len(each) > 1 else 0]})
    assert len(rules) >= 5, rules
    return rules


@pytest.fixture(scope="module")
def cluster():
    with kubernetes_cluster.running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory) -> None:
    """Imports the image: one archive of the base and, after it, of what the Containerfile copies."""
    folder = tmp_path_factory.mktemp("image")
    with tarfile.open(one("*-image.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    context = next(folder.iterdir())
    root = folder / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", MINIMAL_ROOT, "-C", root, "--exclude=./dev/*"], check=True, timeout=DEADLINE)
    subprocess.run(["cp", "-a", f"{context}/rootfs/.", root], check=True, timeout=DEADLINE)
    whole = folder / "whole.tar"
    subprocess.run(["tar", "-cf", whole, "-C", root, "."], check=True, timeout=DEADLINE)
    program = kubectl.PROGRAMS / "cluster"
    state = ROOT / "target" / "cluster"
    subprocess.run([program, "import", "--state", state, "--name", OURS, whole], check=True, timeout=DEADLINE)


def test_the_image_serves_with_the_kubernetes_driver(cluster):
    home = pathlib.Path(cluster.folder) / "home"
    home.mkdir(mode=0o700)
    os.chmod(cluster.folder, 0o755)
    config = f"""
[sandbox]
driver = "kubernetes"
[sandbox.kubernetes]
namespace = "{cluster.namespace}"
image = "{IMAGE}"
volume_claim = "shared"
volume_path = "/data"
stage_listen = "0.0.0.0:7443"
stage_address = "@POD_IP@:7443"
network_policy = "unchecked"
"""
    (home / "config").write_text(config)
    for path in (home, home / "config"):
        os.chown(path, USER, USER)
    start = (
        "sed s/@POD_IP@/$POD_IP/ /data/home/config > /data/home/oubliette.toml && "
        "exec oubliette up --listen 127.0.0.1:8080"
    )
    restricted = {
        "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "server"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{
                "name": "server", "image": OURS, "imagePullPolicy": "Never", "command": ["sh", "-c", start],
                "env": [
                    {"name": "OUBLIETTE_HOME", "value": "/data/home"},
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "securityContext": restricted,
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}],
        },
    }  # fmt: skip
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "server"}, "rules": rights()}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "server"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "server"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": cluster.namespace}],
    }  # fmt: skip
    inside = ("-n", cluster.namespace)
    cluster.kubectl(*inside, "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding, pod]}))

    def oubliette(*args: str, check: bool = True) -> subprocess.CompletedProcess:
        done = cluster.kubectl(*inside, "exec", "server", "--", "oubliette", *args, check=False)
        log = "" if done.returncode == 0 or not check else cluster.kubectl(*inside, "logs", "server", check=False).stdout
        assert done.returncode == 0 or not check, f"{args}: {done.stdout}\n{done.stderr}\n{log}"
        return done

    wait_until(lambda: oubliette("status", check=False).returncode == 0, "the server in the pod to answer")
    checks = {check["name"]: check for check in json.loads(oubliette("doctor", "--json", check=False).stdout)["checks"]}
    for name in ("sandbox", "rights", "shared volume", "first process", "pod security"):
        assert checks[name]["ok"], checks[name]
    done = oubliette("run", "--agent", "demo", "Show me around")
    assert "hello.txt" in done.stdout
    # The agent has a pod of its own, of its own image.
    [agent, *_] = cluster.pods(running_only=True)
    assert agent["metadata"]["name"] != "server" and agent["spec"]["containers"][0]["image"] == IMAGE
    oubliette("session", "end", "last")
    wait_until(lambda: not cluster.pods(), "every pod of the session to be removed")
