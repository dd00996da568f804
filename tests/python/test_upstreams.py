"""Services of `[upstreams]`: an agent uses them with a credential that never enters its sandbox, as far as `allow` goes."""

from __future__ import annotations

import base64
import json
import pathlib
import subprocess
from typing import Any, Iterator

import pytest

import harness
from attack_support import TRUST, Attacker, refusal
from egress_support import SAY, WebServer, egress_events
from git_backend import GitBackend

TOKEN = "service-token-5d1f8a"
PASSWORD = "git-token-c07be2"
"""Credentials that must be found nowhere inside, in no record and in no log."""

ASK_SERVICE = """
    import http.client, json

    def ask(method, path, headers={}, body=None):
        connection = http.client.HTTPConnection('127.0.0.1', 19999, timeout=60)
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader('Content-Length', str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode(errors='replace')

    said = json.dumps([ask(*request) for request in requests])
"""
"""Makes each of `requests` at the forwarder's port; says status, headers and body of each answer."""


class EchoServer(WebServer):
    """Answers with the headers it got: a service that sends the credential back."""

    def answer(self, headers: dict[str, str]) -> str:
        return json.dumps(headers)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("repositories")
    git(folder, "init", "-q", "--bare", "acme/app.git")
    git(folder, "init", "-q", "work")
    work = folder / "work"
    (work / "readme").write_text("from the server\n")
    git(work, "add", ".")
    git(work, "commit", "-qm", "first")
    git(work, "push", "-q", str(folder / "acme" / "app.git"), "HEAD:main")
    git(folder / "acme" / "app.git", "symbolic-ref", "HEAD", "refs/heads/main")
    subprocess.run(["cp", "-r", folder / "acme", folder / "other"], check=True)
    return folder


def git(folder: pathlib.Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main", "-c", "safe.directory=*"]
    done = subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Outside:
    """The services outside, and the server that knows them."""

    def __init__(self, server: harness.Server, api: EchoServer, forge: GitBackend):
        self.server, self.api, self.forge = server, api, forge
        self.admin = server.token("admin")
        self.project = server.api("project_create", self.admin, name="test")["project_id"]

    def agent(self, slug: str, upstreams: list[str], **sandbox: Any) -> Attacker:
        sandbox = {"upstreams": upstreams, **sandbox}
        return Attacker(self.server, self.admin, self.project, slug, sandbox=sandbox)


@pytest.fixture(scope="module")
def outside(repositories) -> Iterator[Outside]:
    basic = "Basic " + base64.b64encode(f"x-access-token:{PASSWORD}".encode()).decode()
    with EchoServer() as api, GitBackend(repositories, basic) as forge:
        config = f"""{TRUST}
            [log]
            level = "debug"
            [upstreams.api]
            base_url = "http://127.0.0.1:{api.port}/base"
            api_key_env = "API_TOKEN"
            allow = [
              {{ methods = ["GET"], paths = ["items/*", "/exact"] }},
              {{ methods = ["POST"], paths = ["items/new"] }},
            ]
            [upstreams.keyed]
            base_url = "http://127.0.0.1:{api.port}"
            api_key_env = "API_TOKEN"
            auth = "header:X-Service-Key"
            allow = [{{ methods = ["GET"], paths = ["*"] }}]
            [upstreams.closed]
            base_url = "http://127.0.0.1:{api.port}"
            api_key_env = "API_TOKEN"
            [upstreams.keyless]
            base_url = "http://127.0.0.1:{api.port}"
            api_key_env = "NO_SUCH_VARIABLE"
            allow = [{{ methods = ["GET"], paths = ["*"] }}]
            [upstreams.forge]
            base_url = "http://127.0.0.1:{forge.port}"
            api_key_env = "GIT_TOKEN"
            auth = "basic"
            allow = [{{ methods = ["GET", "POST"], paths = ["acme/*"] }}]
            git = true
            """
        with harness.running(config, {"API_TOKEN": TOKEN, "GIT_TOKEN": PASSWORD}) as server:
            yield Outside(server, api, forge)


def asked(agent: Attacker, *requests: tuple) -> list[tuple[int, dict[str, str], str]]:
    return json.loads(agent.run(ASK_SERVICE + SAY, requests=requests))


def test_a_service_is_asked_with_its_credential(outside):
    """The agent asks without a credential, or with one of its own; the service gets the operator's, and what it sends back
    of it does not get inside."""
    before = len(outside.api.requests)
    with outside.agent("asker", ["api", "keyed"]) as agent:
        mine = {"Authorization": "Bearer mine", "Cookie": "a=b", "X-Service-Key": "mine", "X-Keep": "this"}
        answers = asked(
            agent,
            ("GET", "/api/items/1?page=2", mine),
            ("POST", "/api/items/new", {"Content-Type": "text/plain"}, b"the body"),
            ("GET", "/keyed/anything", mine),
            ("HEAD", "/api/exact"),
        )
        assert [status for status, _, _ in answers] == [200, 200, 200, 200], answers
        assert TOKEN not in json.dumps(answers), "the credential came back from the service"
        first, second, third, fourth = outside.api.requests[before:]
        assert first[:2] == ("GET", "/base/items/1?page=2") and first[2]["authorization"] == f"Bearer {TOKEN}", first
        assert "cookie" not in first[2] and first[2]["x-keep"] == "this", first
        assert second[:2] == ("POST", "/base/items/new") and second[3] == b"the body", second
        assert third[2]["x-service-key"] == TOKEN and "authorization" not in third[2], third
        assert fourth[:2] == ("HEAD", "/base/exact"), fourth

        environment = agent.run("import json, os\nagent.say(json.dumps(dict(os.environ)))")
        assert TOKEN not in environment and PASSWORD not in environment
        events = egress_events(outside.server, outside.admin, agent.session, 4)
        row = next(event for event in events if event.get("path") == "/items/1")
        assert (row["upstream"], row["method"], row["status"], row["rule"]) == ("api", "GET", 200, "items/*"), row
        assert row["allowed"] and row["host"] == "127.0.0.1" and row["bytes_in"] > 0, row
        assert next(event for event in events if event["method"] == "POST")["bytes_out"] == len(b"the body")
        assert TOKEN not in json.dumps(events) and TOKEN not in outside.server.log()


ATTACKS_ON_ALLOW = [
    ("POST", "/api/items/1"),
    ("DELETE", "/api/items/1"),
    ("OPTIONS", "/api/items/1"),
    ("GET", "/api/admin"),
    ("GET", "/api/items"),
    ("GET", "/api"),
    ("GET", "/api/"),
    ("GET", "/api/Items/1"),
    ("GET", "/api/exact/"),
    ("GET", "/api/items/../admin"),
    ("GET", "/api/items/.."),
    ("GET", "/api/items/%2e%2e/admin"),
    ("GET", "/api/items/%2E./admin"),
    ("GET", "/api/items/..%2fadmin"),
    ("GET", "/api/items/%2e%2e%2fadmin"),
    ("GET", "/api/items/%252e%252e/admin"),
    ("GET", "/api/items/..%5cadmin"),
    ("GET", "/api/items/..\\admin"),
    ("GET", "/api/items/..;/admin"),
    ("GET", "/api/items/;/../admin"),
    ("GET", "/api/items//../admin"),
    ("GET", "/api//items/1"),
    ("GET", "//api/items/1"),
    ("GET", "/api/items/%c0%ae%c0%ae/admin"),
    ("GET", "/api/items/%EF%BC%8E%EF%BC%8E/admin"),
    ("GET", "/api/items/1%00"),
    ("GET", "/api/items/1%0d%0aX-Injected:1"),
    ("GET", "/api/%69tems/1"),
    ("GET", "/%61pi/items/1"),
    ("GET", "/api/items/1?_method=DELETE"),
    ("GET", "/api/items/1?access_token=mine"),
    ("GET", "http://127.0.0.1/api/items/1"),
    ("GET", "/closed/items/1"),
    ("GET", "/keyless/items/1"),
    ("GET", "/keyed/items/1"),
    ("GET", "/nowhere/items/1"),
]


def test_nothing_gets_around_allow(outside):
    """Every way of writing a path, a method or a name that might reach more than `allow` says: the service hears nothing."""
    before = len(outside.api.requests)
    with outside.agent("around", ["api", "closed", "keyless"]) as agent:
        answers = asked(agent, *ATTACKS_ON_ALLOW)
        heard = outside.api.requests[before:]
        assert heard == [], heard
        for request, (status, _, body) in zip(ATTACKS_ON_ALLOW, answers, strict=True):
            assert status in (400, 403, 404, 503), (request, status, body)
        by_path = {path: (status, body) for (_, path), (status, _, body) in zip(ATTACKS_ON_ALLOW, answers)}
        assert by_path["/api/admin"][0] == 403 and "allow of [upstreams.api]" in by_path["/api/admin"][1]
        assert "sandbox.upstreams in agents/around/agent.json" in by_path["/keyed/items/1"][1], by_path
        assert by_path["/keyless/items/1"][0] == 503 and "NO_SUCH_VARIABLE" in by_path["/keyless/items/1"][1]
        # Headers that tell some servers another method or path are not passed on.
        headers = {"X-HTTP-Method-Override": "DELETE", "X-Original-URL": "/admin", "X-Rewrite-Url": "/admin"}
        headers |= {"X-Forwarded-Prefix": "/admin", "Connection": "X-Service-Key", "X-Service-Key": "mine"}
        # Many servers read an underscore in a name as a hyphen.
        headers |= {"X_HTTP_Method_Override": "DELETE", "X_Forwarded_Prefix": "/admin", "X-Original-Uri": "/admin"}
        assert asked(agent, ("GET", "/api/items/1", headers))[0][0] == 200
        sent = outside.api.requests[-1][2]
        assert not {name.lower() for name in headers} & set(sent) - {"connection"}, sent


FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PARTS = {"Content-Type": "multipart/form-data; boundary=b"}
METHODS_IN_FORMS = [
    ("POST", "/api/items/new", FORM, "title=x&_method=DELETE"),
    ("POST", "/api/items/new", FORM, "title=x&%5fmethod=DELETE"),
    ("POST", "/api/items/new", {}, "_method=DELETE"),
    ("POST", "/api/items/new", {**FORM, "Content-Encoding": "gzip"}, "compressed"),
    ("POST", "/api/items/new", PARTS, '--b\r\nContent-Disposition: form-data; name="_method"\r\n\r\nDELETE\r\n--b--\r\n'),
    # More than one piece of a body.
    ("POST", "/api/items/new", FORM, "title=" + 300_000 * "x" + "&_method=DELETE"),
]


def test_a_form_does_not_change_the_method(outside):
    """A service made with Rails or Laravel takes `_method` of a posted form for the method of the request; it never gets a
    form that has one. Other forms pass."""
    before = len(outside.api.requests)
    with outside.agent("poster", ["api"]) as agent:
        answers = asked(agent, *((method, path, headers, body.encode()) for method, path, headers, body in METHODS_IN_FORMS))
        for request, (status, _, body) in zip(METHODS_IN_FORMS, answers, strict=True):
            assert status == 400 and "_method" in body, (request[2:], status, body)
        heard = [body for _, _, _, body in outside.api.requests[before:]]
        assert not [body for body in heard if b"method" in body.lower() or body == b"compressed"], heard
        assert asked(agent, ("POST", "/api/items/new", FORM, b"method=DELETE&a=_method"))[0][0] == 200
        assert outside.api.requests[-1][3] == b"method=DELETE&a=_method"


def test_a_redirect_is_not_followed_with_the_credential(outside):
    with WebServer("elsewhere") as elsewhere, outside.agent("redirected", ["api"]) as agent:
        for location, told in (
            (f"http://127.0.0.1:{elsewhere.port}/x", f"http://127.0.0.1:{elsewhere.port}/x"),
            (f"http://127.0.0.1:{outside.api.port}/base/items/2?a=b", "/api/items/2?a=b"),
            ("/base/admin", "/api/admin"),
            ("/admin", f"http://127.0.0.1:{outside.api.port}/admin"),
        ):
            outside.api.status, outside.api.headers = 302, {"Location": location, "Set-Cookie": "session=1"}
            try:
                ((status, headers, _),) = asked(agent, ("GET", "/api/items/1"))
            finally:
                outside.api.status, outside.api.headers = 200, {}
            headers = {name.lower(): value for name, value in headers.items()}
            assert (status, headers["location"]) == (302, told), headers
            assert "set-cookie" not in headers, headers
        assert elsewhere.requests == []


def test_git_clones_and_pushes_with_a_credential_it_does_not_have(outside, repositories):
    """Plain `git clone https://HOST/…` inside, and a push; a repository that `allow` does not name is not reached."""
    with outside.agent("committer", ["forge"]) as agent:
        said = agent.run(
            """
            import json, os, subprocess

            def git(*args, cwd='/workspace'):
                env = {**os.environ, 'GIT_TERMINAL_PROMPT': '0'}
                done = subprocess.run(['git', *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
                return done.returncode, done.stdout + done.stderr

            steps = [git('clone', '-q', f'https://127.0.0.1:{port}/acme/app.git', 'app')]
            steps.append((0, open('/workspace/app/readme').read()))
            open('/workspace/app/added', 'w').write('from inside')
            who = ('-c', 'user.name=a', '-c', 'user.email=a@a')
            steps.append(git('add', '.', cwd='/workspace/app'))
            steps.append(git(*who, 'commit', '-qm', 'from inside', cwd='/workspace/app'))
            steps.append(git('push', '-q', 'origin', 'HEAD:main', cwd='/workspace/app'))
            steps.append(git('config', '-l', cwd='/workspace/app'))
            refused = git('clone', '-q', f'https://127.0.0.1:{port}/other/app.git', 'other')
            agent.say(json.dumps([steps, refused]))
            """,
            port=outside.forge.port,
        )
        steps, refused = json.loads(said)
        assert [code for code, _ in steps] == [0] * len(steps), steps
        assert steps[1][1] == "from the server\n"
        assert git(repositories / "acme" / "app.git", "log", "-1", "--format=%s", "main") == "from inside"
        assert refused[0] != 0 and "403" in refused[1], refused
        assert PASSWORD not in said and all("other" not in path for _, path, _ in outside.forge.asked)
        files = subprocess.run(["grep", "-rl", PASSWORD, agent.workspace, outside.server.home], capture_output=True)
        assert files.stdout == b"", files.stdout
        assert PASSWORD not in outside.server.log()
        events = outside.server.api("debugger_events", outside.admin, session_id=agent.session, max_events=1000)["events"]
        paths = {event["path"] for event in events if event.get("upstream") == "forge" and event["allowed"]}
        assert "/acme/app.git/git-receive-pack" in paths, paths


def test_an_agent_that_names_no_service_of_the_configuration_is_refused(outside):
    with pytest.raises(harness.ToolFailed) as refused:
        outside.agent("unknown", ["nowhere"])
    assert refused.value.code == "invalid_argument" and "[upstreams.nowhere]" in refused.value.message, refused.value


def test_doctor_names_a_service_without_its_credential(outside):
    checks = {check["name"]: check for check in outside.server.api("doctor", outside.admin)["checks"]}
    assert checks["upstream api"]["ok"] and TOKEN not in json.dumps(checks), checks
    keyless = checks["upstream keyless"]
    assert not keyless["ok"] and "NO_SUCH_VARIABLE" in keyless["detail"] and keyless["remedy"], keyless
    assert not checks["upstream closed"]["ok"] and "allow" in checks["upstream closed"]["detail"], checks
