"""The cluster of the tests: upstream Kubernetes whose node runs pods, with agent-sandbox's kinds and controller."""

from __future__ import annotations

import pytest

import kubectl as cluster
from kubectl import apply, get_json, kubectl, own_namespace, restricted_pod

WHY_NOT = cluster.why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"kubernetes: {WHY_NOT}"),
    pytest.mark.xdist_group("kubernetes"),
]
NO_IMAGE = cluster.why_no_test_image()
needs_image = pytest.mark.skipif(NO_IMAGE is not None, reason=f"kubernetes: {NO_IMAGE}")


@pytest.fixture(scope="module")
def namespace():
    with own_namespace() as name:
        yield name


def test_a_node_is_ready():
    nodes = get_json("nodes")["items"]
    ready = [c["status"] for node in nodes for c in node["status"]["conditions"] if c["type"] == "Ready"]
    assert "True" in ready, nodes


@needs_image
def test_a_restricted_pod_runs_to_its_end(namespace):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ends"}}
    apply(namespace, {**pod, "spec": restricted_pod("sh", "-c", "echo hello from $(id -u)")})
    kubectl("wait", "-n", namespace, "pod/ends", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
    assert kubectl("logs", "-n", namespace, "ends").stdout == "hello from 64646\n"


def test_a_pod_that_is_not_restricted_is_refused(namespace):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}}
    spec = {"containers": [{"name": "main", "image": cluster.IMAGE}]}
    refused = pytest.raises(AssertionError, apply, namespace, {**pod, "spec": spec})
    assert "violates PodSecurity" in str(refused.value)


@needs_image
def test_a_sandbox_of_agent_sandbox_has_a_running_pod(namespace):
    sandbox = {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "one"}}
    apply(namespace, {**sandbox, "spec": {"podTemplate": {"spec": restricted_pod("sleep", "600")}}})
    kubectl("wait", "-n", namespace, "sandbox/one", "--for=condition=Ready", "--timeout=120s")
    assert kubectl("exec", "-n", namespace, "one", "--", "id", "-u").stdout == "64646\n"
    kubectl("delete", "-n", namespace, "sandbox/one", "--timeout=120s")
    kubectl("wait", "-n", namespace, "pod/one", "--for=delete", "--timeout=120s")


@needs_image
def test_a_service_reaches_its_pod_from_another_pod(namespace):
    labels = {"app": "listener"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "listener", "labels": labels}}
    # Perl is in every Debian: a listener that answers each connection with one line.
    answer = 'use IO::Socket; $l = IO::Socket::INET->new(Listen => 5, LocalPort => 8000); while ($c = $l->accept) { print $c "hello\\n"; close $c }'
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "listener"}}
    ports = [{"port": 80, "targetPort": 8000}]
    spec = restricted_pod("perl", "-e", answer)
    spec["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    apply(namespace, {**pod, "spec": spec}, {**service, "spec": {"selector": labels, "ports": ports}})
    kubectl("wait", "-n", namespace, "pod/listener", "--for=condition=Ready", "--timeout=120s")
    address = get_json("-n", namespace, "service", "listener")["spec"]["clusterIP"]
    ask = f'use IO::Socket; for (1..100) {{ $c = IO::Socket::INET->new("{address}:80") and print scalar <$c> and exit 0; select undef, undef, undef, 0.1 }} exit 1'
    asking = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asking"}}
    apply(namespace, {**asking, "spec": restricted_pod("perl", "-e", ask)})
    kubectl("wait", "-n", namespace, "pod/asking", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")
    assert kubectl("logs", "-n", namespace, "asking").stdout == "hello\n"
