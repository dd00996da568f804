"""Sessions in pods, on a real cluster: tools of every source, the end, faults, what is refused, what is not there inside."""

from __future__ import annotations

import json
import socket
import time

import pytest

import harness
import kubernetes_cluster
from caller import call
from harness import MODERN, ToolFailed, wait_until
from kubernetes_cluster import IMAGE
from test_caller_tool_relay import NOTIFY, calling, lend
from test_docker import TOOL_SERVER

WHY_NOT = kubernetes_cluster.why_not()
on_a_cluster = pytest.mark.skipif(WHY_NOT is not None, reason=f"kubernetes driver: {WHY_NOT}")
pytestmark = pytest.mark.xdist_group("kubernetes")

GRACE = 5


@pytest.fixture(scope="module")
def cluster():
    with kubernetes_cluster.running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster):
    with cluster.server(cluster.config(GRACE)) as server:
        yield server


def talk(server, token, project, agent, message="go", **more):
    return server.api("session_message", token, message=message, project_id=project, agent=agent, wait=True, **more)


def results(server, token, session_id) -> list[dict]:
    events = server.api("session_events", token, session_id=session_id, max_events=1000)["events"]
    return [e for e in events if e["type"] == "tool_result"]


def end(server, token, session_id):
    server.api("session_end", token, session_id=session_id)


def checks_of(server) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(server.cli("--json", "doctor", check=False).stdout)["checks"]}


def all_gone(cluster):
    wait_until(lambda: not cluster.pods(), "every pod to be removed")


@on_a_cluster
def test_doctor_names_the_cluster_and_what_it_does_not_promise(cluster, server):
    checks = checks_of(server)
    assert checks["sandbox"]["ok"] and "kubernetes" in checks["sandbox"]["detail"], checks
    assert cluster.namespace in checks["cluster"]["detail"]
    for name in ("sandbox kind", "rights", "shared volume", "first process", "stage address", "pod security", "local sandbox"):
        assert checks[name]["ok"], checks[name]
    assert not checks["process limit"]["ok"] and "podPidsLimit" in checks["process limit"]["remedy"]


@on_a_cluster
async def test_tools_of_every_source_in_pods_and_no_pod_left(cluster, server, admin):
    project = server.api("project_create", admin, name="all", api_key={"scope": "read"}, env={"PROJECT_SECRET": "ps-1"})["project_id"]
    server.put_tool("sh", admin, kind="mcp", transport="stdio", command="/bin/sh", args=["-c", TOOL_SERVER], env={"OWN": "1"})
    server.put_tool("reader", admin, kind="builtin", builtinPolicy={"name": "fs_read", "allowedPaths": ["."]})
    server.put_tool("writer", admin, kind="builtin", builtinPolicy={"name": "fs_write", "allowedPaths": ["."]})
    server.put_tool("shell", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh"]})
    script = [
        call("writer_fs_write", path="a.txt", content="from fs_write"),
        call("shell_shell_exec", argv=["sh", "-c", "cat a.txt && echo more >> a.txt && id -u && cat /proc/1/comm"]),
        call("reader_fs_read", path="a.txt"),
        call("sh_look"),
        call("oubliette_project_list"),
        call("myapp_send_notification", message="hello"),
        {"say": "done"},
    ]
    server.put_agent("all", admin, [script], tools={"use": ["sh", "reader", "writer", "shell"]})
    async with calling(server, server.token("write"), MODERN) as caller:
        await caller.start(project_id=project, agent="all", context=lend(NOTIFY))
        request = await caller.until("caller_tool_request")
        # The agent and its tool server each have a pod of their own; that of the command may not be gone yet.
        pods = cluster.pods(running_only=True)
        of = [pod["metadata"]["labels"]["oubliette.sandbox"] for pod in pods]
        assert of.count("sh") == 1 and of.count(caller.session_id) == 1, of
        for pod in pods:
            told = json.dumps(pod)
            assert "ps-1" not in told and "oub_" not in told and "TOOL_SERVER" not in told, told
            spec = pod["spec"]
            container = spec["containers"][0]
            assert spec["automountServiceAccountToken"] is False and spec["restartPolicy"] == "Never"
            assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] != 0
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] and "env" not in container
        await caller.respond(request, result={"status": "sent"})
        assert (await caller.until("turn_completed"))["text"] == "done"
        session = caller.session_id
    got = results(server, admin, session)
    failed = [json.dumps(result) for result in got if not result["ok"]]
    assert not failed and len(got) == 6, failed
    texts = [json.dumps(result) for result in got]
    assert "from fs_write" in texts[1] and "oubliette-clien" in texts[1]
    assert "more" in texts[2]
    looked = texts[3]
    assert "OWN" in looked and "a.txt" in looked
    assert "PROJECT_SECRET" not in looked and "OUBLIETTE" not in looked and "relay.sock" not in looked
    assert "KUBERNETES" not in looked, "nothing of the cluster is in the environment"
    end(server, admin, session)
    all_gone(cluster)


@on_a_cluster
def test_nothing_of_the_cluster_is_inside(cluster, server, admin, project):
    look = """exec 2>&1
        ls /var/run/secrets/kubernetes.io/serviceaccount /run/secrets
        grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
        touch /etc/x /usr/x /x; cat /opt/oubliette/stage/token; cat /proc/1/environ; kill -9 1
        cat /etc/resolv.conf; ls /opt/oubliette/stage; true"""
    server.put_tool("peek", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh"]})
    server.put_agent("peek", admin, [[call("peek_shell_exec", argv=["sh", "-c", look]), {"say": "done"}]], tools={"use": ["peek"]})
    done = talk(server, admin, project, "peek")
    (seen,) = results(server, admin, done["session_id"])
    text = seen["result"]["content"][0]["text"]
    assert seen["ok"] and text.count("No such file or directory") >= 3, text
    assert "CapEff:\t0000000000000000" in text and "NoNewPrivs:\t1" in text and "Seccomp:\t2" in text, text
    assert text.count("Read-only file system") + text.count("Permission denied") >= 3, text
    assert "ca.crt" not in text and "nameserver 127.0.0.1" in text, text
    end(server, admin, done["session_id"])
    all_gone(cluster)


@on_a_cluster
def test_an_agent_reaches_no_network_or_is_refused_where_policies_are_not_kept(cluster):
    reach = "exec perl -MIO::Socket::INET -e 'print IO::Socket::INET->new(PeerAddr => $ARGV[0], Timeout => 3) ? q(open) : q(shut)' "
    # Something at the same address as the port for pods.
    with socket.create_server((cluster.own_address, 0)) as other, cluster.server(cluster.config(GRACE, network_policy="required")) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="net")["project_id"]
        server.put_tool("net", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh"]})
        target = f"{cluster.own_address}:{other.getsockname()[1]}"
        server.put_agent("net", admin, [[call("net_shell_exec", argv=["sh", "-c", reach + target]), {"say": "done"}]], tools={"use": ["net"]})
        (policy,) = [p for p in cluster.get("networkpolicies") if p["spec"]["egress"][0]["to"][0]["ipBlock"]["cidr"] == f"{cluster.own_address}/32"][:1]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"] and not policy["spec"].get("ingress")
        try:
            done = talk(server, admin, project, "net")
        except ToolFailed as refused:
            assert "does not keep network policies" in refused.message and "network_policy" in refused.message
            # Doctor shows a report that may be some seconds old.
            wait_until(lambda: not checks_of(server)["network policy"]["ok"], "doctor to say so")
        else:
            assert "shut" in json.dumps(results(server, admin, done["session_id"]))
            end(server, admin, done["session_id"])
        all_gone(cluster)


@on_a_cluster
def test_cancel_and_a_pod_deleted_from_outside(cluster, server, admin, project):
    server.put_agent("long", admin, [[{"say": "one"}, {"sleep_ms": 600_000}], [{"say": "two"}, {"sleep_ms": 600_000}], [{"say": "back"}]])
    session = server.api("session_message", admin, message="a", project_id=project, agent="long")["session_id"]
    with server.events(session, admin) as events:
        events.until("delta")
        assert server.api("session_cancel", admin, session_id=session)["cancelled"]
        assert events.until("turn_completed")["stop_reason"] == "cancelled"
        server.api("session_message", admin, message="b", session_id=session)
        events.until("delta")
        cluster.delete(cluster.names(running_only=True)[0])
        # Whichever is noticed first: the pod's end, or the end of its connection.
        told = json.dumps(events.until("error"))
        assert "killed from outside" in told or "was lost and not made again" in told, told
    assert server.api("session_message", admin, message="c", session_id=session, wait=True)["text"] == "back"
    end(server, admin, session)
    all_gone(cluster)


@on_a_cluster
def test_an_image_that_does_not_exist_is_refused_with_the_reason(cluster, server, admin, project):
    server.put_agent("nowhere", admin, [[{"say": "x"}]], sandbox={"image": "registry.invalid/oubliette-missing:1"})
    with pytest.raises(ToolFailed) as missing:
        talk(server, admin, project, "nowhere")
    assert "oubliette-missing:1 could not be pulled" in missing.value.message, missing.value.message
    server.put_agent("there", admin, [[{"say": "fine"}]], sandbox={"image": IMAGE})
    done = talk(server, admin, project, "there")
    assert done["text"] == "fine"
    end(server, admin, done["session_id"])
    all_gone(cluster)


@on_a_cluster
def test_after_kill_9_pods_end_within_the_grace_and_leftovers_are_removed(cluster):
    with cluster.server(cluster.config(GRACE)) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="kill")["project_id"]
        server.put_agent("long", admin, [[{"say": "one"}, {"sleep_ms": 600_000}], [{"say": "goes on"}]])
        session = server.api("session_message", admin, message="a", project_id=project, agent="long")["session_id"]
        with server.events(session, admin) as events:
            events.until("delta")
        assert len(cluster.names(running_only=True)) == 1
        server.kill()
        killed = time.monotonic()
        wait_until(lambda: not cluster.names(running_only=True), "the pod to end", deadline=GRACE * 6)
        assert time.monotonic() - killed >= GRACE / 2, "it waits for the server to come back"
        server.start()
        all_gone(cluster)
        assert server.api("session_message", admin, message="b", session_id=session, wait=True)["text"] == "goes on"
        # Killed while a pod runs, and started again at once: the next server removes it.
        left = cluster.names()
        server.kill()
        server.start()
        wait_until(lambda: not set(left) & set(cluster.names()), "the leftover to be removed")
        end(server, admin, session)
        all_gone(cluster)


UNREACHABLE = """
[sandbox]
driver = "kubernetes"
[sandbox.kubernetes]
namespace = "agents"
kubeconfig = "/nonexistent/kubeconfig"
volume_claim = "shared"
volume_path = "{folder}"
stage_listen = "127.0.0.1:{port}"
stage_address = "127.0.0.1:{port}"
{more}
"""


def test_doctor_says_what_to_do_without_a_cluster(tmp_path):
    config = UNREACHABLE.format(folder=tmp_path, port=harness.free_port(), more="")
    checks = checks_of(harness.Server(tmp_path / "h", config))
    assert not checks["sandbox"]["ok"] and not checks["cluster"]["ok"]
    assert "/nonexistent/kubeconfig" in checks["cluster"]["detail"]
    assert "[sandbox.kubernetes] kubeconfig" in checks["cluster"]["remedy"]


def test_a_warm_pool_is_refused_with_the_reason(tmp_path):
    config = UNREACHABLE.format(folder=tmp_path, port=harness.free_port(), more='warm_pool = "ready"')
    checks = checks_of(harness.Server(tmp_path / "h", config))
    assert not checks["sandbox"]["ok"] and not checks["warm pool"]["ok"]
    assert "runs before its session is known" in checks["warm pool"]["detail"]
