"""The Helm chart: what it renders is accepted by a real API server, and values that make no sense are refused."""

from __future__ import annotations

import json
import subprocess
import tomllib

import pytest

import kubectl as cluster
from harness import ROOT
from kubectl import kubectl, own_namespace

CHART = ROOT / "deploy" / "helm" / "oubliette"
HELM = cluster.helm_program()
NO_CLUSTER = cluster.why_not()
pytestmark = [
    pytest.mark.skipif(HELM is None, reason="helm is not installed: `cargo xtask cluster up` builds it"),
    pytest.mark.xdist_group("kubernetes"),
]
needs_cluster = pytest.mark.skipif(NO_CLUSTER is not None, reason=f"kubernetes: {NO_CLUSTER}")

REQUIRED = {"image": {"repository": "registry.example.com/oubliette"}, "database": {"existingSecret": "database"}}
EVERYTHING = {
    "image": {"repository": "registry.example.com:5000/oubliette", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "replicas": 3,
    "database": {"existingSecret": "database", "key": "uri"},
    "clusterKey": {"existingSecret": "cluster-key"},
    "tls": {"existingSecret": "certificate"},
    "hosts": ["agents.example.com"],
    "service": {"type": "LoadBalancer", "port": 8443, "annotations": {"example.com/internal": "true"}},
    "sandbox": {"image": "debian:12", "runtimeClass": "gvisor", "networkPolicy": "unchecked", "grace": "1m", "cpus": 0.5},
    "workspaces": {"existingClaim": "files"},
    "config": '[providers.anthropic]\nbase_url = "https://api.anthropic.com"\napi_key_env = "KEY"\n',
    "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "anthropic"}}}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "serviceAccount": {"name": "agents"},
    "podDisruptionBudget": {"minAvailable": "50%"},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]},
    "podAnnotations": {"example.com/note": "x"},
    "podLabels": {"team": "agents"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "agents", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}
ONE_SERVER = {**REQUIRED, "replicas": 1, "workspaces": {"accessMode": "ReadWriteOnce", "size": "1Gi"}}


def helm(*args: str, values: dict | None = None) -> subprocess.CompletedProcess:
    # JSON is YAML.
    text = json.dumps(values or {})
    command = [str(HELM), *args, "--values", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def render(values: dict, namespace: str = "agents", name: str = "oubliette") -> str:
    done = helm("template", name, str(CHART), "--kube-version", "1.35.0", "--namespace", namespace, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accepted(values: dict, namespace: str) -> dict[str, dict]:
    """The objects as the API server would store them, by kind and name."""
    args = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--namespace", namespace]
    done = kubectl(*args, "--output", "json", "--filename", "-", text=render(values, namespace))
    assert "Warning" not in done.stderr, done.stderr
    objects = json.loads(done.stdout)["items"]
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in objects}


@pytest.fixture(scope="module")
def namespace():
    with own_namespace() as name:
        yield name


@pytest.mark.parametrize("values", [REQUIRED, EVERYTHING], ids=["required", "everything"])
def test_the_chart_passes_helm_lint(values):
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_cluster
@pytest.mark.parametrize("values", [REQUIRED, EVERYTHING, ONE_SERVER], ids=["required", "everything", "one server"])
def test_every_object_of_the_chart_is_accepted_by_the_api_server(namespace, values):
    """In a namespace of the restricted level, whose warnings count as errors."""
    objects = accepted(values, namespace)
    expected = {"ConfigMap/oubliette", "Deployment/oubliette", "Service/oubliette", "Service/oubliette-servers", "Role/oubliette", "RoleBinding/oubliette", "NetworkPolicy/oubliette"}
    assert expected <= objects.keys()
    assert ("PodDisruptionBudget/oubliette" in objects) == (values.get("replicas", 2) > 1)
    assert ("PersistentVolumeClaim/oubliette-workspaces" in objects) == (values is not EVERYTHING)
    assert ("Secret/oubliette-tls" in objects) == (values is not EVERYTHING)
    pod = objects["Deployment/oubliette"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    probes = pod["containers"][0]
    assert probes["livenessProbe"]["httpGet"]["path"] == "/health" and probes["readinessProbe"]["httpGet"]["path"] == "/ready"


@needs_cluster
@pytest.mark.parametrize("values", [REQUIRED, EVERYTHING], ids=["required", "everything"])
def test_the_configuration_that_the_chart_writes_is_toml(namespace, values):
    config = tomllib.loads(accepted(values, namespace)["ConfigMap/oubliette"]["data"]["oubliette.toml"])
    assert config["sandbox"]["driver"] == "kubernetes"
    assert config["sandbox"]["kubernetes"]["namespace"] == namespace
    assert config["workspaces"]["dir"].startswith(config["sandbox"]["kubernetes"]["volume_path"])
    assert f"oubliette.{namespace}.svc.cluster.local" in config["server"]["allowed_hosts"]
    assert ("providers" in config) == (values is EVERYTHING)


@needs_cluster
def test_the_servers_may_do_what_they_need_and_nothing_more(namespace):
    helm_done = helm("template", "rights", str(CHART), "--kube-version", "1.35.0", "--namespace", namespace, "--show-only", "templates/rbac.yaml", values=REQUIRED)
    kubectl("apply", "--namespace", namespace, "--filename", "-", text=helm_done.stdout)
    account = f"system:serviceaccount:{namespace}:rights-oubliette"

    def can(verb: str, resource: str, where: str = namespace) -> bool:
        # A slash would stand for the name of an object.
        resource, _, part = resource.partition("/")
        args = ["auth", "can-i", verb, resource, f"--subresource={part}", "--as", account, "--namespace", where]
        return kubectl(*args, check=False).returncode == 0

    needed = [
        *((verb, "pods") for verb in ("get", "list", "watch", "create", "delete")),
        *((verb, "sandboxes.agents.x-k8s.io") for verb in ("get", "list", "create", "delete")),
        *((verb, "networkpolicies") for verb in ("get", "create", "patch")),
        ("get", "pods/log"), ("list", "events"), ("get", "persistentvolumeclaims"),
    ]  # fmt: skip
    assert not [each for each in needed if not can(*each)]
    refused = [
        ("create", "pods/exec"), ("create", "pods/attach"), ("create", "pods/ephemeralcontainers"), ("get", "secrets"), ("list", "secrets"),
        ("get", "configmaps"), ("create", "deployments"), ("create", "serviceaccounts/token"), ("create", "rolebindings"),
        ("delete", "persistentvolumeclaims"), ("delete", "events"), ("delete", "networkpolicies"),
    ]  # fmt: skip
    assert not [each for each in refused if can(*each)]
    assert not can("list", "pods", "default") and not can("create", "pods", "kube-system")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"image": {"repository": ""}}, "repository"),
        ({"database": {"existingSecret": ""}}, "existingSecret"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"replica": 2}, "replica"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"service": {"port": 70000}}, "port"),
        ({"service": {"type": "Ingress"}}, "type"),
        ({"hosts": ["https://agents.example.com"]}, "hosts"),
        ({"sandbox": {"grace": "soon"}}, "grace"),
        ({"sandbox": {"driver": "docker"}}, "driver"),
        ({"sandbox": {"cpus": 0}}, "cpus"),
        ({"workspaces": {"size": "big"}}, "size"),
        ({"workspaces": {"accessMode": "ReadOnlyMany"}}, "accessMode"),
        ({"podDisruptionBudget": {"minAvailable": "half"}}, "minAvailable"),
        ({"env": [{"value": "x"}]}, "env"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_by_name(value, named):
    values = {name: {**REQUIRED.get(name, {}), **part} if isinstance(part, dict) else part for name, part in {**REQUIRED, **value}.items()}
    done = helm("template", "oubliette", str(CHART), "--kube-version", "1.35.0", values=values)
    assert done.returncode != 0 and named in done.stderr, done.stderr


def test_every_value_is_explained():
    """A comment stands above each value, or above the group of values that it explains together."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    groups = ("requests", "limits", "cpu", "memory", "podLabels", "tolerations", "affinity", "create")
    missing = [
        line.strip()
        for before, line in zip(["", *lines], lines)
        if line.strip() and not line.strip().startswith("#") and not before.strip().startswith("#")
        and line.strip().split(":")[0] not in groups
    ]  # fmt: skip
    assert not missing
