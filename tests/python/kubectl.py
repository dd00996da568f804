"""A Kubernetes that runs already: `cargo xtask cluster up` starts one, `OUBLIETTE_TEST_KUBECONFIG` names it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import uuid
from typing import Any, Iterator

import harness

# The image that `cargo xtask cluster up` imports. It is in no registry.
IMAGE = "oubliette-test:latest"
PROGRAMS = harness.ROOT / "target" / "cluster" / "bin"
KUBECONFIG = os.environ.get("OUBLIETTE_TEST_KUBECONFIG")


def helm_program() -> str | None:
    """Helm: the one built with the cluster, or the system's."""
    built = PROGRAMS / "helm"
    return str(built) if built.exists() else shutil.which("helm")


def kubectl_command() -> list[str] | None:
    """Kubernetes' command line: the one built with the cluster, or the system's."""
    built = PROGRAMS / "cluster"
    if built.exists():
        return [str(built), "kubectl"]
    found = shutil.which("kubectl")
    return [found] if found else None


def why_not() -> str | None:
    """Why nothing can be tried on a cluster here; none if it can."""
    if not KUBECONFIG:
        return "no cluster: `cargo xtask cluster up` starts one, OUBLIETTE_TEST_KUBECONFIG names its kubeconfig"
    if not pathlib.Path(KUBECONFIG).exists():
        return f"OUBLIETTE_TEST_KUBECONFIG={KUBECONFIG} is missing"
    if kubectl_command() is None:
        return "no kubectl: install it, or `cargo xtask cluster up` builds one"
    return None


def why_no_test_image() -> str | None:
    """Why pods cannot run the tests' image."""
    own = harness.ROOT / "target" / "cluster" / "ready"
    return None if own.exists() else f"the cluster was not started by `cargo xtask cluster up` and may not have {IMAGE}"


def kubectl(*args: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess:
    command = [*(kubectl_command() or []), "--kubeconfig", str(KUBECONFIG), *args]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=180)
    assert not check or done.returncode == 0, f"kubectl {args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def get_json(*args: str) -> Any:
    return json.loads(kubectl("get", *args, "--output", "json").stdout)


def apply(namespace: str, *objects: dict[str, Any]) -> None:
    kubectl("apply", "--namespace", namespace, "--filename", "-", text="\n---\n".join(json.dumps(o) for o in objects))


@contextlib.contextmanager
def own_namespace() -> Iterator[str]:
    """A namespace that admits pods of the restricted level only, and ends with everything in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    try:
        level = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
        kubectl("label", "namespace", name, *level)
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false", check=False)


def restricted_pod(*command: str) -> dict[str, Any]:
    """The specification of a pod of the restricted level that runs a command in the tests' image."""
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 64646, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "main",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "command": list(command),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }
