"""Looking after several servers: what `doctor` says of each, metrics that say whose they are, https between servers with a private
authority, and tokens that expire by the database's clock."""

from __future__ import annotations

import contextlib
import http.server
import json
import pathlib
import subprocess
import tempfile
import threading
from typing import Any, Iterator

import httpx
import pytest

import stores
from caller import call, lend
from cluster_support import KEY, Member, Servers, cluster
from harness import DEADLINE, ToolFailed, free_port, get, wait_until
from test_cluster import FAKETIME

pytestmark = pytest.mark.skipif(not stores.ON_POSTGRES, reason="several servers share a PostgreSQL database")

HOUR = 3_600_000


def sql(member: Member, text: str) -> str:
    """Runs a statement in the database that the servers share."""
    schema = stores.url(member.home.parent).rpartition("=")[2]
    return stores.execute(f"SET search_path = {schema}; {text}")


def pretend_server(member: Member, id: str, address: str, version: str = "9.9.9", clock_ahead: int = 0) -> None:
    """A row of a server that was heard of a moment ago, by a clock that never gets there: nobody declares it dead."""
    clock = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::bigint"
    sql(
        member,
        "INSERT INTO servers (server_id, address, host, machine, pid, version, started_at, last_seen, clock_ahead) "
        f"VALUES ('{id}', '{address}', 'elsewhere', '', 1, '{version}', {clock}, {clock} + 1000000000, {clock_ahead})",
    )


def checks_of(report: dict) -> dict[str, dict]:
    return {check["name"]: check for check in report["checks"]}


def doctor(member: Member, token: str) -> dict[str, dict]:
    return checks_of(member.api("doctor", token))


@contextlib.contextmanager
def plain_web_server() -> Iterator[str]:
    """Something that answers, but is no server of ours."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def test_doctor_names_every_server_and_what_is_wrong_with_it():
    with cluster(2) as servers, cluster_with_another_key() as stranger, plain_web_server() as web:
        one, two = servers
        admin = one.token("admin")
        found = doctor(one, admin)
        assert found["cluster"]["ok"] and found["cluster"]["detail"].startswith("2 servers, this one is srv_")
        assert found["clock"]["ok"] and found["clock"]["detail"].endswith("the database's")
        for member in servers:
            check = found[f"server {member.url}"]
            assert check["ok"], check
            assert "seen 0 s ago" in check["detail"] or "seen 1 s" in check["detail"] or "seen" in check["detail"]
            assert "same key" in check["detail"] and "version " in check["detail"]
            assert check["detail"].startswith("this one, ") == (member is one)
        assert found[f"clock of {two.url}"]["ok"] and "cluster versions" not in found
        # Servers that the database names and that are not what they should be.
        closed = f"http://127.0.0.1:{free_port()}"
        pretend_server(one, "srv_01ZZZZZZZZZZZZZZZZZZZZZZZA", closed, clock_ahead=-HOUR)
        pretend_server(one, "srv_01ZZZZZZZZZZZZZZZZZZZZZZZB", web)
        pretend_server(one, "srv_01ZZZZZZZZZZZZZZZZZZZZZZZC", stranger.url)
        found = doctor(one, admin)
        gone, no_server, other = (found[f"server {url}"] for url in (closed, web, stranger.url))
        assert not gone["ok"] and gone["essential"] and "not reached from here" in gone["detail"], gone
        assert "advertise" in gone["remedy"]
        assert not no_server["ok"] and "no server of a cluster" in no_server["detail"], no_server
        assert not other["ok"] and "does not accept this server's cluster key" in other["detail"], other
        assert "TEST_CLUSTER_KEY" in other["remedy"] and KEY not in json.dumps(found)
        clock = found[f"clock of {closed}"]
        assert not clock["ok"] and clock["detail"] == "3600 s behind the database's" and "elsewhere" in clock["remedy"]
        versions = found["cluster versions"]
        assert not versions["ok"] and "9.9.9 at " in versions["detail"] and "upgrade" in versions["remedy"]
        # Another server at the address than the database says.
        sql(one, "DELETE FROM servers WHERE host = 'elsewhere'")
        sql(one, f"UPDATE servers SET address = '{one.url}' WHERE address = '{two.url}'")
        answers = [check for check in one.api("doctor", admin)["checks"] if check["name"] == f"server {one.url}"]
        assert sorted(check["ok"] for check in answers) == [False, True]
        assert any("another server than the one in the database answers" in check["detail"] for check in answers)


def test_doctor_of_a_stopped_server_sees_the_others_and_a_wrong_key():
    with cluster(2) as servers:
        one, two = servers
        assert two.stop() == 0
        found = checks_of(json.loads(two.cli("doctor", "--json").stdout))
        assert found["cluster"]["ok"] and found["cluster"]["detail"] == "1 server, this one is stopped"
        assert found[f"server {one.url}"]["ok"], found
        two.env["TEST_CLUSTER_KEY"] = "another-key-that-nobody-has"
        found = checks_of(json.loads(two.cli("doctor", "--json", check=False).stdout))
        assert not found["cluster"]["ok"] and "another cluster key" in found["cluster"]["detail"]
        assert "TEST_CLUSTER_KEY" in found["cluster"]["remedy"]
        assert "does not accept" in found[f"server {one.url}"]["detail"]


@contextlib.contextmanager
def cluster_with_another_key() -> Iterator[Member]:
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        root = pathlib.Path(folder)
        member = Member(root / "h", root, key="a-key-that-the-others-do-not-have").start()
        try:
            yield member
        finally:
            member.stop()


def test_metrics_say_which_server_they_are_of_and_how_many_there_are():
    with cluster(2) as servers:
        admin = servers[0].token("admin")
        for member in servers:
            text = get(f"{member.url}/metrics", headers={"Authorization": f"Bearer {admin}"}).text
            samples = [line for line in text.splitlines() if not line.startswith("#")]
            label = f'server_address="{member.url}"'
            assert samples and all(line.count(label) == 1 for line in samples)
            assert f"oubliette_servers{{{label}}} 2" in samples
            assert member.metric(admin, "oubliette_servers") == 2
        servers[1].kill()
        wait_until(lambda: servers[0].metric(admin, "oubliette_servers") == 1, "the killed server to be gone")


# -- https between servers --------------------------------------------------------------------------


def openssl(*args: str, cwd: pathlib.Path) -> None:
    done = subprocess.run(["openssl", *args], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr


def make_authority(folder: pathlib.Path, name: str) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]
    openssl("req", "-x509", *key, "-days", "2", "-subj", f"/CN={name}", "-out", f"{name}.pem", cwd=folder)


def make_certificate(folder: pathlib.Path, authority: str, name: str) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]
    openssl("req", "-new", *key, "-subj", f"/CN={name}", "-out", f"{name}.csr", cwd=folder)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n")
    signed_by = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
    openssl("x509", "-req", "-in", f"{name}.csr", *signed_by, "-days", "2", "-extfile", "san", "-out", f"{name}.pem", cwd=folder)


class TlsMember(Member):
    """A server of a cluster with a certificate of its own."""

    def __init__(self, home: pathlib.Path, shared: pathlib.Path, name: str, ca: str | None):
        ca_file = f'ca_file = "{shared}/{ca}.pem"\n' if ca else ""
        rest = f'[server]\ntls_cert = "{shared}/{name}.pem"\ntls_key = "{shared}/{name}.key"\n'
        rest += f'[workspaces]\ndir = "{shared}/projects"\n'
        super().__init__(home, shared, f"{ca_file}{rest}")

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def _ready(self) -> bool:
        if self.process and self.process.poll() is not None:
            raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log()}")
        try:
            return httpx.get(f"{self.url}/ready", verify=False, timeout=DEADLINE).status_code == 200
        except httpx.TransportError:
            return False

    def api(self, tool: str, token: str, /, **arguments: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.post(f"{self.url}/api/tools/{tool}", json=arguments, headers=headers, verify=False, timeout=DEADLINE)
        if answer.status_code != 200:
            raise ToolFailed(answer.json()["error"]["code"], answer.json()["error"]["message"], answer.status_code)
        return answer.json()


def test_servers_reach_each_other_over_https_with_a_private_authority():
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        root = pathlib.Path(folder)
        for authority in ("ours", "theirs"):
            make_authority(root, authority)
        for name in ("one", "two", "three"):
            make_certificate(root, "ours", name)
        one, two = TlsMember(root / "h0", root, "one", "ours"), TlsMember(root / "h1", root, "two", "ours")
        # It trusts another authority, so it does not believe the others' certificates.
        three = TlsMember(root / "h2", root, "three", "theirs")
        servers = Servers([one, two, three])
        try:
            for member in servers:
                member.start()
            admin = one.token("admin")
            project = one.api("project_create", admin, name="p")["project_id"]
            servers.put_agent("asks", admin, [[call("myapp_ask", n=1), {"say": "asked"}], [{"say": "two"}]])
            begun = one.api("session_message", admin, message="go", project_id=project, agent="asks", context=lend("ask"))
            session = begun["session_id"]
            # The caller polls and answers at the other server; both pass over https.
            log = poll_until(two, admin, session, "caller_tool_request")
            request = next(event for event in log if event["type"] == "caller_tool_request")
            answer = {"session_id": session, "request_id": request["request_id"], "result": 1}
            assert two.api("caller_tool_response", admin, **answer) == {"resolved": True}
            poll_until(two, admin, session, "turn_completed")
            assert two.api("session_message", admin, session_id=session, message="b", wait=True)["text"] == "two"
            found = doctor(two, admin)
            assert found[f"server {one.url}"]["ok"] and found[f"server {two.url}"]["ok"], found
            # Who does not trust the authority does not send anything.
            with pytest.raises(ToolFailed) as refused:
                three.api("session_message", admin, session_id=session, message="c", wait=True)
            assert refused.value.code == "unavailable"
            check = doctor(three, admin)[f"server {one.url}"]
            assert not check["ok"] and "certificate" in check["detail"].lower(), check
            assert "ca_file" in check["remedy"]
            log = one.api("session_events", admin, session_id=session, max_events=1000)["events"]
            assert not any(event.get("text") == "c" for event in log)
        finally:
            for member in servers:
                if member.process and member.process.poll() is None:
                    member.stop()


def poll_until(server: Member, token: str, session: str, type: str) -> list[dict]:
    """All events of a session once there is one of this type, by polls that wait."""
    since, seen = -1, []
    while not any(event["type"] == type for event in seen):
        arguments = {"session_id": session, "since_index": since, "wait_ms": 20_000}
        page = server.api("session_events", token, **arguments)
        seen += page["events"]
        since = page["last_index"]
    return seen


def test_a_ca_file_that_cannot_be_used_is_refused_with_the_remedy(tmp_path):
    member = Member(tmp_path / "h", tmp_path, f'ca_file = "{tmp_path}/missing.pem"\n')
    for content, word in ((None, "No such file"), ("no certificate at all", "no certificate"), ("", "no certificate")):
        if content is not None:
            (tmp_path / "missing.pem").write_text(content)
        done = member.cli("serve", "--listen", f"127.0.0.1:{member.port}", check=False)
        assert done.returncode == 1 and "cluster.ca_file" in done.stderr and word in done.stderr, done.stderr
        assert "PEM file" in done.stderr


# -- tokens expire by the database's clock ------------------------------------------------------------


@pytest.mark.skipif(not FAKETIME, reason="needs faketime")
def test_tokens_expire_by_the_databases_clock():
    with cluster(1) as servers:
        right = servers[0]
        shared = right.home.parent
        late = Member(shared / "late", shared)
        late.env |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+2h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        servers.members.append(late.start())
        admin = right.token("admin")
        # An hour is an hour, whichever server made it and whichever is asked.
        made = [member.api("token_create", admin, name="hour", scope="read", expires_in="1h") for member in servers]
        for token in made:
            left = int(sql(right, f"SELECT expires_at - (EXTRACT(EPOCH FROM now()) * 1000)::bigint FROM tokens WHERE token_id = '{token['token_id']}'"))
            assert HOUR - 300_000 < left <= HOUR, "by the database's clock"
            for member in servers:
                assert member.api("project_list", token["token"]) is not None
        sql(right, "UPDATE tokens SET expires_at = (EXTRACT(EPOCH FROM now()) * 1000)::bigint - 1 WHERE name = 'hour'")
        for token in made:
            for member in servers:
                with pytest.raises(ToolFailed) as refused:
                    member.api("project_list", token["token"])
                assert refused.value.status == 401
