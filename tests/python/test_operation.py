"""Reloading while serving, and what `doctor`, lists and `--version` say about what is broken or missing."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
import threading

import httpx
import pytest

from harness import BIN, DEADLINE, Server, ToolFailed, running, wait_until

TURNS = [[{"say": "done"}]]


def hang_up(server, said: str) -> None:
    """Sends SIGHUP and waits until the log has a new line that contains `said`."""
    before = server.log().count(said)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.log().count(said) > before, f"{said!r} in the log")


def make_certificate(folder, name: str) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True,
        capture_output=True,
        timeout=DEADLINE,
    )


def served_name(server) -> str:
    """The certificate that a new connection is given."""
    pem = ssl.get_server_certificate(("127.0.0.1", server.port), timeout=DEADLINE)
    shown = subprocess.run(["openssl", "x509", "-noout", "-subject"], input=pem, capture_output=True, text=True, check=True)
    return shown.stdout.strip().split("CN")[-1].strip(" =")


class TlsServer(Server):
    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def _ready(self) -> bool:
        assert self.process and self.process.poll() is None, self.log()
        try:
            return httpx.get(f"{self.url}/ready", verify=False, timeout=DEADLINE).status_code == 200
        except httpx.TransportError:
            return False


def test_a_new_certificate_is_served_to_new_connections_while_old_ones_go_on(tmp_path):
    make_certificate(tmp_path, "first")
    config = f'[server]\ntls_cert = "{tmp_path}/cert.pem"\ntls_key = "{tmp_path}/key.pem"\n'
    server = TlsServer(tmp_path / "h", config).start()
    try:
        token = server.token("admin")
        headers = {"Authorization": f"Bearer {token}"}
        assert served_name(server) == "first"
        with httpx.Client(verify=False, timeout=DEADLINE, headers=headers) as old:
            ask = lambda: old.post(f"{server.url}/api/tools/project_list", json={})
            assert ask().status_code == 200
            make_certificate(tmp_path, "second")
            hang_up(server, "read again")
            wait_until(lambda: served_name(server) == "second", "the new certificate")
            # The same connection as before: it was not closed.
            assert ask().status_code == 200
            # A certificate that cannot be read changes nothing.
            (tmp_path / "cert.pem").write_text("nothing")
            hang_up(server, "the old one stays in use")
            assert served_name(server) == "second" and ask().status_code == 200
    finally:
        server.stop()


def test_a_reload_changes_what_can_change_names_the_rest_and_drops_no_request():
    with running('[retention]\nsessions = "30d"\n') as server:
        admin = server.token("admin")
        server.put_agent("quick", admin, TURNS)
        project = server.api("project_create", admin, name="p")["project_id"]
        session = server.api("session_message", admin, message="hi", project_id=project, agent="quick", wait=True)["session_id"]
        failures, stop = [], threading.Event()

        def ask():
            while not stop.is_set():
                try:
                    server.api("project_list", admin)
                except Exception as error:
                    failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        with server.events(session, admin) as events:
            file = server.home / "oubliette.toml"
            file.write_text('[retention]\nsessions = "60d"\n[limits]\nsession_log_mb = 7\n')
            hang_up(server, "take effect when the server is started again")
            [named] = [line for line in server.log().splitlines() if "started again" in line]
            assert "[limits]" in named and "[retention]" not in named and "listen" not in named
            # A broken file: the old configuration stays, the error is in the log and in the doctor.
            file.write_text("[server]\nlisen = 1\n")
            hang_up(server, "the old one stays in use")
            assert "lisen" in server.log()
            report = server.api("doctor", admin)
            [broken] = [check for check in report["checks"] if check["name"] == "config"]
            assert not broken["ok"] and "lisen" in broken["detail"] and not report["ok"]
            file.write_text('[limits]\nsession_log_mb = 7\n')
            hang_up(server, "read again")
            [good] = [check for check in server.api("doctor", admin)["checks"] if check["name"] == "config"]
            assert good["ok"]
            # The stream that was open is open.
            server.api("session_message", admin, session_id=session, message="more")
            assert events.until("turn_completed", turn=2)
        stop.set()
        asking.join()
        assert not failures


def test_a_broken_definition_is_in_every_list_with_its_error(server, admin):
    for kind, name in (("agents", "agent.json"), ("tools", "tool.json")):
        folder = server.home / kind / "torn"
        folder.mkdir(parents=True)
        (folder / name).write_text('{"name": "torn", ')
    row = wait_until(
        lambda: next((a for a in server.api("agent_list", admin)["agents"] if a["slug"] == "torn"), None), "the broken agent"
    )
    assert row["usable"] is False and "agent.json" in row["error"]
    entry = wait_until(
        lambda: next((e for e in server.api("catalog_list", admin)["entries"] if e["id"] == "torn"), None), "the broken tool"
    )
    assert entry["usable"] is False and entry["error"]
    server.put_agent("whole", admin, TURNS)
    rows = {a["slug"]: a["usable"] for a in server.api("agent_list", admin)["agents"]}
    assert rows["whole"] is True and list(rows) == sorted(rows)
    assert re.search(r"torn .*✗ broken, not in use", server.cli("agent", "list").stdout)
    assert re.search(r"torn .*✗ broken, not in use", server.cli("tool", "list").stdout)
    # Pages count it too.
    first = server.api("agent_list", admin, limit=1)
    assert len(first["agents"]) == 1 and first["next_cursor"]
    with pytest.raises(ToolFailed):
        server.api("agent_get", admin, slug="torn")


def test_an_agent_in_use_is_not_deleted(server, admin):
    server.put_agent("used", admin, TURNS)
    server.put_agent("other", admin, TURNS)

    def refused(user: str) -> None:
        with pytest.raises(ToolFailed, match="conflict") as error:
            server.api("agent_delete", admin, slug="used")
        assert user in error.value.message

    project = server.api("project_create", admin, name="uses it", agent="used")["project_id"]
    refused(project)
    server.api("project_update", admin, project_id=project, agent="other")
    server.put_agent("parent", admin, TURNS, children=["used"])
    refused("parent")
    server.api("agent_delete", admin, slug="parent")
    session = server.api("session_message", admin, message="hi", project_id=project, agent="used", wait=True)["session_id"]
    refused(session)
    server.api("session_end", admin, session_id=session)
    assert server.api("agent_delete", admin, slug="used")["deleted"] is True


def test_doctor_says_what_is_missing_for_real_work():
    with running('[providers.far]\nbase_url = "https://models.example.com"\napi_key_env = "NO_SUCH_KEY"\n') as server:
        admin = server.token("admin")
        report = server.api("doctor", admin)
        assert any(said.startswith("models: no model provider has its key") for said in report["missing"])
        folder = server.home / "agents" / "torn"
        folder.mkdir(parents=True)
        (folder / "agent.json").write_text("{")
        wait_until(lambda: any("agent torn" in said for said in server.api("doctor", admin)["missing"]), "the broken agent")
        said = server.cli("doctor", check=False).stdout
        assert "Missing for real work" in said and "Everything that is needed works" not in said
    with running() as server:
        missing = server.api("doctor", server.token("admin"))["missing"]
        assert any("no model provider is configured" in said for said in missing)


def test_the_version_names_commit_and_build():
    said = subprocess.run([BIN / "oubliette", "--version"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"oubliette \d+\.\d+\.\d+\S* \(commit ([0-9a-f]{7,40}|unknown), (debug|release) build for \S+\)\n", said)


def test_run_says_that_a_tool_server_is_down_and_status_what_runs(server, admin, project):
    server.put_tool("gone", admin, kind="mcp", transport="tcp", endpoint="127.0.0.1:9", timeouts={"startupMs": 1000}, restart={"maxAttempts": 0})
    server.put_agent("lonely", admin, TURNS, tools={"use": ["gone"]})
    done = server.cli("run", "--project", project, "--agent", "lonely", "hi", check=False)
    assert done.returncode == 1 and "done" in done.stdout
    assert "tool server gone is down" in done.stderr and "oubliette tool test gone" in done.stderr
    server.put_agent("quick", admin, TURNS)
    assert server.cli("run", "--project", project, "--agent", "quick", "hi").returncode == 0
    status = server.cli_json("status")
    assert status["url"] == server.url and status["active_sessions"] >= 2
    assert {"lonely", "quick"} <= {session["agent"] for session in status["sessions"]}
    assert server.url in server.cli("status").stdout
