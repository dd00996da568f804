"""The files of `deploy/`: what they name exists in the programs, and the tools they are for accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import httpx
import pytest

from harness import BIN, DEADLINE, ROOT, free_port, get, wait_until

DEPLOY = ROOT / "deploy"


def run(*command: str, **options) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_dashboard_and_alerts_name_metrics_that_exist(server, admin):
    # An action and a request, so that their families have rows.
    server.api("project_list", admin)
    text = get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {admin}"}).text
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    # A histogram is asked for by its parts.
    histograms = re.findall(r"^# TYPE (\S+) histogram", text, re.MULTILINE)
    known |= {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
    files = [DEPLOY / "prometheus" / "rules.yml", DEPLOY / "prometheus" / "rules.test.yml", DEPLOY / "grafana" / "oubliette.json"]
    for file in files:
        named = set(re.findall(r"\b(?:oubliette|process)_[a-z_]+", file.read_text()))
        assert named, f"{file.name} names no metric"
        assert named <= known, f"{file.name} names metrics that do not exist: {named - known}"


def test_the_book_tells_every_alert_and_no_other():
    alerts = set(re.findall(r"- alert: (\w+)", (DEPLOY / "prometheus" / "rules.yml").read_text()))
    told = set(re.findall(r"`(Oubliette[A-Z]\w+)`", (ROOT / "docs" / "src" / "guide-observe.md").read_text()))
    assert alerts and told == alerts


def test_every_panel_of_the_dashboard_asks_something():
    dashboard = json.loads((DEPLOY / "grafana" / "oubliette.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 10
    for panel in dashboard["panels"]:
        assert panel["title"] and all(target["expr"] for target in panel["targets"])


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (package prometheus)")
def test_the_alert_rules_fire_when_they_should():
    run("promtool", "check", "rules", "rules.yml", cwd=DEPLOY / "prometheus")
    run("promtool", "test", "rules", "rules.test.yml", cwd=DEPLOY / "prometheus")


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (package prometheus)")
def test_a_prometheus_server_scrapes_with_the_configuration_of_deploy(server, tmp_path):
    """The real Prometheus, with `scrape.yml` and `rules.yml` as they are but for the address and the token's file."""
    token = tmp_path / "token"
    token.write_text(server.token("read"))
    scrape = (DEPLOY / "prometheus" / "scrape.yml").read_text()
    config = re.sub(r"credentials_file: \S+", f"credentials_file: {token}", re.sub(r"127\.0\.0\.1:8080|localhost:8080", f"127.0.0.1:{server.port}", scrape))
    config = f"global:\n  scrape_interval: 1s\n{config}"
    assert str(server.port) in config and str(token) in config
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(DEPLOY / "prometheus" / "rules.yml", tmp_path)
    run("promtool", "check", "config", "prometheus.yml", cwd=tmp_path)
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        prometheus = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
            cwd=tmp_path, stdout=log, stderr=log,
        )

    def asked(query: str) -> list:
        try:
            return get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}).json()["data"]["result"]
        except (httpx.TransportError, ValueError, KeyError):
            assert prometheus.poll() is None, (tmp_path / "log").read_text()
            return []

    try:
        wait_until(lambda: any(row["value"][1] == "1" for row in asked("up")), "a scrape that worked")
        assert asked("oubliette_build_info")
    finally:
        prometheus.terminate()
        prometheus.wait(timeout=DEADLINE)


def test_calls_are_timed_in_histograms_by_server_and_outcome(server, admin):
    server.put_tool("files", admin, kind="builtin", builtinPolicy={"name": "fs_read", "allowedPaths": ["./"]})
    call = {"call": {"tool": "@files/fs_read", "arguments": {"path": "none"}}}
    server.put_agent("reader", admin, [[call, {"say": "done"}]], tools={"use": ["files"], "allowed": ["@files/*"]})
    project = server.api("project_create", admin, name="timed")["project_id"]
    server.api("session_message", admin, message="hi", project_id=project, agent="reader", wait=True)

    def count(name: str, **labels: str) -> float:
        try:
            return server.metric(admin, f"{name}_count", **labels)
        except StopIteration:
            return 0

    calls = lambda outcome: count("oubliette_tool_call_duration_seconds", source="catalog", server="files", outcome=outcome)
    wait_until(lambda: calls("ok") + calls("error") == 1, "the call to be counted")
    assert count("oubliette_action_duration_seconds", action="session_message", outcome="ok") == 1
    assert count("oubliette_commit_duration_seconds") >= 3
    assert server.metric(admin, "oubliette_database_bytes") > 0
    assert 0 < server.metric(admin, "oubliette_disk_free_bytes") <= server.metric(admin, "oubliette_disk_bytes")
    text = get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {admin}"}).text
    assert re.search(r'^oubliette_build_info\{version="[^"]+",build="commit [^"]+"\} 1$', text, re.MULTILINE)
    # Buckets are cumulative and end with all.
    rows = re.findall(r'^oubliette_commit_duration_seconds_bucket\{le="([^"]+)"\} (\d+)$', text, re.MULTILINE)
    counts = [int(n) for _, n in rows]
    assert counts == sorted(counts) and rows[-1][0] == "+Inf"
    if shutil.which("promtool"):
        run("promtool", "check", "metrics", input=text)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed (package systemd)")
def test_the_unit_is_accepted_by_systemd(tmp_path):
    unit = (DEPLOY / "systemd" / "oubliette.service").read_text()
    assert "ExecStart=/usr/bin/oubliette serve\n" in unit
    # The program is not installed where the unit expects it.
    copy = tmp_path / "oubliette.service"
    copy.write_text(unit.replace("/usr/bin/oubliette", str(BIN.resolve() / "oubliette")))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=DEADLINE)
    # Lines about other units of this machine are not ours.
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "oubliette" in line]
    assert not ours, "\n".join(ours)
