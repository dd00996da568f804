"""A real cluster that is there already: a namespace of the tests' own in it, with a shared volume, removed at the end.

`OUBLIETTE_TEST_KUBECONFIG` names the kubeconfig file. The cluster's one node must see this machine's temporary folder (the
volume is a folder of it) and have the image that `OUBLIETTE_TEST_POD_IMAGE` names (default `oubliette-test:latest`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
from typing import Any, Iterator

import harness

KUBECONFIG = os.environ.get("OUBLIETTE_TEST_KUBECONFIG")
IMAGE = os.environ.get("OUBLIETTE_TEST_POD_IMAGE", "oubliette-test:latest")


def why_not() -> str | None:
    """Why there is no cluster to test with; none if there is one."""
    if not KUBECONFIG:
        return "OUBLIETTE_TEST_KUBECONFIG names no cluster"
    if not shutil.which("kubectl"):
        return "no kubectl (package kubernetes-client)"
    return None


class Cluster:
    """A namespace of a cluster and a volume in it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.namespace = f"oubliette-test-{secrets.token_hex(4)}"

    def kubectl(self, *args: str, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess:
        command = ["kubectl", "--kubeconfig", KUBECONFIG, *args]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=harness.DEADLINE)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done

    def get(self, kind: str, *args: str) -> list[dict[str, Any]]:
        return json.loads(self.kubectl("-n", self.namespace, "get", kind, "-o", "json", *args).stdout)["items"]

    def pods(self, running_only: bool = False) -> list[dict[str, Any]]:
        """The pods of sandboxes."""
        pods = self.get("pods", "-l", "oubliette.scope")
        return [pod for pod in pods if not running_only or pod["status"].get("phase") in ("Pending", "Running")]

    def names(self, **more: bool) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(**more)]

    def delete(self, pod: str) -> None:
        # Where it is made of a Sandbox, a controller would make it again.
        self.kubectl("-n", self.namespace, "delete", "pod", pod, "--wait=false")

    def make(self) -> None:
        """Makes the namespace, which admits restricted pods only, and the volume."""
        volume = self.namespace
        objects = [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": self.namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteMany"],
                    "storageClassName": "",
                    "hostPath": {"path": str(self.folder), "type": "Directory"},
                    "claimRef": {"namespace": self.namespace, "name": "shared"},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "shared", "namespace": self.namespace},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "storageClassName": "",
                    "volumeName": volume,
                    "resources": {"requests": {"storage": "1Gi"}},
                },
            },
        ]
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        # Pods need it, though they get no token of it.
        account = ("-n", self.namespace, "get", "serviceaccount", "default")
        harness.wait_until(lambda: self.kubectl(*account, check=False).returncode == 0, "the service account")
        claim = ("-n", self.namespace, "get", "pvc", "shared", "-o", "jsonpath={.status.phase}")
        harness.wait_until(lambda: self.kubectl(*claim).stdout == "Bound", "the volume to be bound")

    def remove(self) -> None:
        self.kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)
        self.kubectl("delete", "persistentvolume", self.namespace, "--wait=false", check=False)

    @property
    def own_address(self) -> str:
        """This machine's address as the cluster sees it."""
        view = json.loads(self.kubectl("config", "view", "-o", "json", "--raw").stdout)
        server = urllib.parse.urlsplit(view["clusters"][0]["cluster"]["server"])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((server.hostname, server.port or 443))
            return probe.getsockname()[0]

    def config(self, grace: int, network_policy: str = "unchecked", **more: str) -> str:
        lines = "\n".join(f'{name} = "{value}"' for name, value in more.items())
        # One of its own: servers of several tests run side by side.
        port = harness.free_port()
        return f"""
[sandbox]
driver = "kubernetes"
grace = "{grace}s"
[sandbox.kubernetes]
kubeconfig = "{KUBECONFIG}"
namespace = "{self.namespace}"
image = "{IMAGE}"
volume_claim = "shared"
volume_path = "{self.folder}"
stage_listen = "0.0.0.0:{port}"
stage_address = "{self.own_address}:{port}"
network_policy = "{network_policy}"
{lines}
"""

    @contextlib.contextmanager
    def server(self, config: str) -> Iterator[harness.Server]:
        """A server whose home is on the volume."""
        home = pathlib.Path(tempfile.mkdtemp(prefix="h", dir=self.folder))
        server = harness.Server(home / "h", config).start()
        try:
            yield server
        finally:
            if server.process and server.process.poll() is None:
                server.stop()


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="oubk8s", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(pathlib.Path(folder))
        try:
            cluster.make()
            yield cluster
        finally:
            cluster.remove()
