"""Git runs over files that an agent writes and repositories that strangers serve: it reaches nothing of the host, has
no identity but the one named for it, and ends within its limits."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import ipaddress
import json
import os
import pathlib
import socket
import ssl
import subprocess
import tempfile
import threading
from typing import Any, Iterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import harness
from attack_support import answers, unharmed
from harness import ToolFailed, wait_until

TOKEN = "clone-token-77e1"
"""A credential that must be found nowhere after the clone it was for."""

OPERATOR = "operator-secret-3b9c"
"""What the operator's own git and ssh configuration holds."""

DIFF_TIMEOUT = 2
MEMORY_MB = 128


# -- a git server -----------------------------------------------------------------------------------


def git(folder: pathlib.Path, *args: str, input: str | None = None) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True, input=input
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def repositories() -> Iterator[pathlib.Path]:
    """A folder with the repository `good`, as the servers below serve it."""
    with tempfile.TemporaryDirectory(prefix="oubgit") as name:
        folder = pathlib.Path(name)
        good = folder / "good"
        good.mkdir()
        git(good, "init", "-q")
        (good / "readme").write_text("cloned\n")
        git(good, "add", ".")
        git(good, "commit", "-qm", "first")
        git(good, "update-server-info")
        yield folder


class GitServer:
    """Serves repositories over HTTP; notes what it was asked, with which credentials."""

    def __init__(self, folder: pathlib.Path, tls: ssl.SSLContext | None = None):
        self.asked: list[tuple[str, str | None]] = []
        self.redirect: str | None = None
        self.password: str | None = None
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: Any):
                super().__init__(*args, directory=str(folder))

            def do_GET(self) -> None:
                given = self.headers.get("Authorization")
                outer.asked.append((self.path, given))
                if outer.redirect:
                    self.send_response(302)
                    self.send_header("Location", outer.redirect + self.path)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif outer.password and outer.password not in _password(given):
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="x"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self.path = self.path.replace("/good/", "/good/.git/").split("?")[0]
                    super().do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> "GitServer":
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()


def _password(header: str | None) -> str:
    kind, _, value = (header or "").partition(" ")
    return base64.b64decode(value).decode().partition(":")[2] if kind == "Basic" else ""


@pytest.fixture(scope="module")
def certificate() -> Iterator[tuple[pathlib.Path, ssl.SSLContext]]:
    """A certificate of 127.0.0.1, and a server's TLS with it."""
    with tempfile.TemporaryDirectory(prefix="oubtls") as name:
        folder = pathlib.Path(name)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem, key_pem = folder / "cert.pem", folder / "key.pem"
        pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key_pem.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pem, key_pem)
        yield pem, tls


# -- the operator -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def operator() -> Iterator[dict[str, str]]:
    """The environment of an operator who has git and ssh set up for himself."""
    with tempfile.TemporaryDirectory(prefix="oubop") as name:
        home = pathlib.Path(name)
        (home / ".gitconfig").write_text(
            f"[http]\n\textraHeader = X-Operator: {OPERATOR}\n"
            f'[credential]\n\thelper = "!printf \\"username=u\\\\npassword={OPERATOR}\\\\n\\"; :"\n'
        )
        (home / ".netrc").write_text(f"default login u password {OPERATOR}\n")
        (home / ".git-credentials").write_text(f"https://u:{OPERATOR}@127.0.0.1\n")
        (home / ".ssh").mkdir(mode=0o700)
        (home / ".ssh" / "config").write_text(f"Host *\n  ProxyCommand touch {home}/ssh-ran\n")
        yield {
            "HOME": str(home),
            "SSH_AUTH_SOCK": str(home / "agent.sock"),
            "GIT_ASKPASS": f"/bin/echo {OPERATOR}",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "http.extraHeader",
            "GIT_CONFIG_VALUE_0": f"X-Operator: {OPERATOR}",
        }


@contextlib.contextmanager
def serving(config: str, env: dict[str, str]) -> Iterator[tuple[harness.Server, str, str]]:
    """A server with an admin token and a project."""
    with harness.running(config, env) as server:
        admin = server.token("admin")
        yield server, admin, server.api("project_create", admin, name="git")["project_id"]


def clone(server: harness.Server, admin: str, project: str, url: str, **more: Any) -> pathlib.Path:
    """Clones into a new workspace; its folder on the host."""
    made = server.api("workspace_create", admin, project_id=project, source={"git": url, **more})
    return server.home / "projects" / project / "workspaces" / made["workspace_id"]


def refused(server: harness.Server, admin: str, project: str, url: str) -> ToolFailed:
    with pytest.raises(ToolFailed) as failed:
        clone(server, admin, project, url)
    return failed.value


# -- where a clone may go ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/good",
        "http://localhost:{port}/good",
        "http://[::ffff:127.0.0.1]:{port}/good",
        "http://0.0.0.0:{port}/good",
        "http://2130706433:{port}/good",
        "http://169.254.169.254/latest/meta-data",
        "https://10.0.0.1/good",
        "http://192.168.0.1/good",
        "http://[fd00::1]/good",
        "http://[fe80::1]/good",
        "git://127.0.0.1:{port}/good",
    ],
)
def test_a_clone_does_not_reach_this_machine_or_its_network(server, admin, project, repositories, url):
    """A clone of a loopback, private or metadata address is refused, and nothing is asked there."""
    with GitServer(repositories) as remote:
        error = refused(server, admin, project, url.format(port=remote.port))
        assert error.code == "not_allowed" and "[egress] allow" in error.message, error
        assert remote.asked == []


def test_a_redirect_does_not_lead_to_this_machine(repositories, operator):
    """A server that may be reached sends the clone on to one that may not; that one is not asked."""
    with GitServer(repositories) as inner, GitServer(repositories) as outer:
        outer.redirect = f"http://127.0.0.1:{inner.port}"
        with serving(f'[egress]\nallow = ["127.0.0.1:{outer.port}"]\n', operator) as (server, admin, project):
            error = refused(server, admin, project, f"http://127.0.0.1:{outer.port}/good")
            assert error.code == "not_allowed" and str(inner.port) in error.message, error
            assert outer.asked and inner.asked == []
            outer.redirect = "file://" + str(repositories)
            assert refused(server, admin, project, f"http://127.0.0.1:{outer.port}/good").code == "invalid_argument"
            # The same server is cloned when it sends nobody on.
            outer.redirect = None
            workspace = clone(server, admin, project, f"http://127.0.0.1:{outer.port}/good")
            assert (workspace / "readme").read_text() == "cloned\n"
            assert server.api("workspace_diff", admin, workspace_id=workspace.name)["diff"] == ""
            assert list((server.home / "run").glob("git-*.sock")) == [], "the proxy's sockets are gone"


# -- as whom a clone goes ---------------------------------------------------------------------------


def test_a_clone_has_nothing_of_the_operators(repositories, operator, certificate):
    """No configuration, credential or variable of the operator reaches the remote, though it asks for a password."""
    pem, tls = certificate
    seen: list[str] = []
    with GitServer(repositories) as plain, GitServer(repositories, tls) as secure:
        plain.password = secure.password = OPERATOR
        config = f'[egress]\nallow = ["127.0.0.1:{plain.port}", "127.0.0.1:{secure.port}"]\n'
        with serving(config, {**operator, "SSL_CERT_FILE": str(pem)}) as (server, admin, project):
            for url in (f"http://127.0.0.1:{plain.port}/good", f"https://127.0.0.1:{secure.port}/good"):
                error = refused(server, admin, project, url)
                assert error.code == "invalid_argument" and "could not be cloned" in error.message, error
            seen = [given for _, given in plain.asked + secure.asked if given]
            assert plain.asked and secure.asked and seen == []


def test_an_ssh_clone_needs_an_identity_named_for_it(server, admin, project, operator):
    """Without `[git] ssh_key` an ssh URL is refused by the name of the setting."""
    error = refused(server, admin, project, "ssh://git@127.0.0.1/x")
    assert error.code == "unavailable" and "ssh_key" in error.message and "[git]" in error.message


def test_an_ssh_clone_goes_through_the_proxy_with_the_named_identity(operator, tmp_path):
    """ssh reaches only what the proxy lets it, reads nothing of the operator's, and trusts the named hosts only."""
    key, hosts = tmp_path / "key", tmp_path / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    hosts.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        greetings: list[bytes] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-test\r\n")
                        greetings.append(connection.recv(8))

        threading.Thread(target=accept, daemon=True).start()
        git_config = f'[git]\nssh_key = "{key}"\nknown_hosts = "{hosts}"\n'
        with serving(git_config, operator) as (server, admin, project):
            error = refused(server, admin, project, f"ssh://git@127.0.0.1:{port}/x")
            assert error.code == "not_allowed" and greetings == [], error
        with serving(f'{git_config}[egress]\nallow = ["127.0.0.1:{port}"]\n', operator) as (server, admin, project):
            error = refused(server, admin, project, f"ssh://git@127.0.0.1:{port}/x")
            assert error.code == "invalid_argument", error
            assert greetings == [b"SSH-2.0-"]
    assert not (pathlib.Path(operator["HOME"]) / "ssh-ran").exists()


# -- credentials ------------------------------------------------------------------------------------


def test_credentials_in_a_url_do_not_stay(repositories, operator, certificate):
    """The token of a clone URL is used for that clone, and is in no file, record, answer or log afterwards."""
    pem, tls = certificate
    with GitServer(repositories, tls) as remote, GitServer(repositories, tls) as elsewhere:
        remote.password = elsewhere.password = TOKEN
        config = '[log]\nlevel = "debug"\n[egress]\nallow = ["127.0.0.1"]\n'
        with serving(config, {**operator, "SSL_CERT_FILE": str(pem)}) as (server, admin, project):
            url = f"https://127.0.0.1:{remote.port}/good"
            with_token = url.replace("://", f"://user:{TOKEN}@")
            made = server.api("workspace_create", admin, project_id=project, source={"git": with_token})
            assert made["source"]["git"] == url
            folder = server.home / "projects" / project / "workspaces" / made["workspace_id"]
            assert (folder / "readme").read_text() == "cloned\n"
            assert git(folder, "config", "remote.origin.url") == url
            # As a user name, as tokens often are; with a wrong password; with a URL that is none.
            for bad in (f"https://{TOKEN}@127.0.0.1:{remote.port}/good", with_token + "\n", with_token + "/none"):
                assert TOKEN not in refused(server, admin, project, bad).message
            # A server that has the token sends the clone on: the other one does not get it.
            remote.redirect = f"https://127.0.0.1:{elsewhere.port}"
            error = refused(server, admin, project, with_token)
            assert TOKEN not in error.message
            assert elsewhere.asked, error
            assert [given for _, given in elsewhere.asked if given] == []
            remote.redirect = None
            # Through a session's tools, too, whose calls are in the debugger.
            keyed = server.api("project_create", admin, name="keyed", api_key={"scope": "write"})["project_id"]
            server.put_agent("cloner", admin, [[{"say": "here"}]])
            said = server.api("session_message", admin, message="go", project_id=keyed, agent="cloner", wait=True)
            arguments = {"project_id": keyed, "source": {"git": with_token}}
            call = {"session_id": said["session_id"], "tool": "oubliette_workspace_create", "arguments": arguments}
            server.api("tool_call", admin, **call)
            with server.debugger(admin) as debugger:
                recorded = debugger.until("tool_call", tool="oubliette_workspace_create")
                assert recorded["arguments"]["source"]["git"] == url
            server.stop()
            assert TOKEN not in server.log()
            files = [path for path in server.home.rglob("*") if path.is_file()]
            assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def command_lines() -> list[bytes]:
    """The arguments of every process of this machine, which any user can read."""
    lines = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return lines


def test_credentials_in_a_url_are_in_no_command_line(operator):
    """While a clone with a token in its URL is under way, no process has the token among its arguments."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(harness.DEADLINE)
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        with serving(f'[egress]\nallow = ["{host}"]\n', operator) as (server, admin, project):
            url = f"http://user:{TOKEN}@{host}/x"
            cloning = threading.Thread(target=lambda: refused(server, admin, project, url))
            cloning.start()
            with silent.accept()[0]:
                lines = command_lines()
                silent.close()
            cloning.join()
            assert [line for line in lines if host.encode() in line], "no clone was under way"
            assert [line for line in lines if TOKEN.encode() in line] == []


def test_a_credential_of_the_configuration_goes_to_its_host_only(repositories, operator, certificate):
    """`[[git.credential]]` is used over https for the host it names, and nowhere else."""
    pem, tls = certificate
    with GitServer(repositories, tls) as named, GitServer(repositories, tls) as other, GitServer(repositories) as plain:
        named.password = other.password = plain.password = TOKEN
        config = (
            f'[egress]\nallow = ["127.0.0.1"]\n[[git.credential]]\nhost = "127.0.0.1:{named.port}"\n'
            f'username = "u"\npassword_env = "CLONE_TOKEN"\n'
            f'[[git.credential]]\nhost = "127.0.0.1:{plain.port}"\nusername = "u"\npassword_env = "CLONE_TOKEN"\n'
        )
        env = {**operator, "SSL_CERT_FILE": str(pem), "CLONE_TOKEN": TOKEN}
        with serving(config, env) as (server, admin, project):
            folder = clone(server, admin, project, f"https://127.0.0.1:{named.port}/good")
            assert (folder / "readme").read_text() == "cloned\n"
            assert TOKEN not in (folder / ".git" / "config").read_text()
            refused(server, admin, project, f"https://127.0.0.1:{other.port}/good")
            refused(server, admin, project, f"http://127.0.0.1:{plain.port}/good")
            assert [given for _, given in other.asked + plain.asked if given] == []


# -- limits -----------------------------------------------------------------------------------------


def test_a_tree_bomb_ends_at_a_limit(repositories, operator):
    """A repository of a few hundred bytes that would check out as ten billion files ends the clone, nothing else."""
    bomb = repositories / "bomb"
    bomb.mkdir()
    git(bomb, "init", "-q")
    below = git(bomb, "hash-object", "-w", "--stdin", input="x")
    kind = "100644 blob"
    for _ in range(10):
        listing = "".join(f"{kind} {below}\tf{n}\n" for n in range(10))
        below, kind = git(bomb, "mktree", input=listing), "040000 tree"
    commit = git(bomb, "commit-tree", "-m", "bomb", below)
    git(bomb, "update-ref", "refs/heads/main", commit)
    config = f'[trust]\nread_only = ["{repositories}"]\n[sandbox]\nmemory_mb = {MEMORY_MB}\n[git]\nclone_timeout = "60s"\n'
    with serving(config, operator) as (server, admin, project):
        outcome: list[ToolFailed] = []
        cloning = threading.Thread(target=lambda: outcome.append(refused(server, admin, project, str(bomb))))
        cloning.start()
        while cloning.is_alive():
            answers(server, admin)
        assert outcome[0].code in ("limit_exceeded", "timeout"), outcome
        if outcome[0].code == "limit_exceeded":
            assert f"the {MEMORY_MB} MiB of [sandbox] memory_mb" in outcome[0].message, outcome
        listed = server.api("workspace_list", admin, project_id=project)["workspaces"]
        assert [row["default"] for row in listed] == [True]
        unharmed(server, admin)


def test_a_clone_that_is_given_up_leaves_nothing(operator):
    """A clone through a session's tools whose caller goes away in the middle leaves no files that belong to nobody."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        config = f'[egress]\nallow = ["127.0.0.1:{port}"]\n[git]\nclone_timeout = "3s"\n'
        with serving(config, operator) as (server, admin, _):
            keyed = server.api("project_create", admin, name="keyed", api_key={"scope": "write"})["project_id"]
            server.put_agent("cloner", admin, [[{"say": "here"}]])
            said = server.api("session_message", admin, message="go", project_id=keyed, agent="cloner", wait=True)
            folder = server.home / "projects" / keyed / "workspaces"
            before = set(folder.iterdir())
            arguments = {"project_id": keyed, "source": {"git": f"http://127.0.0.1:{port}/x"}}
            call = {"session_id": said["session_id"], "tool": "oubliette_workspace_create", "arguments": arguments}
            caller = socket.create_connection(("127.0.0.1", server.port))
            body = json.dumps(call).encode()
            head = f"POST /api/tools/tool_call HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {admin}\r\n"
            caller.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            with silent.accept()[0]:
                assert set(folder.iterdir()) > before
                caller.close()
                wait_until(lambda: set(folder.iterdir()) == before, "the clone's files to be removed")
            unharmed(server, admin)


@pytest.mark.parametrize("name", [".gitattributes", ".gitignore"])
def test_a_fifo_that_git_reads_ends_at_the_time_limit(operator, name):
    """A FIFO where git expects a file lets the diff time out; others are answered meanwhile, and no process stays."""
    with serving(f'[git]\ndiff_timeout = "{DIFF_TIMEOUT}s"\n', operator) as (server, admin, project):
        workspace = server.api("project_get", admin, project_id=project)["default_workspace_id"]
        folder = server.home / "projects" / project / "workspaces" / workspace
        (folder / "file").write_text("text\n")
        os.mkfifo(folder / name)
        outcomes: list[str] = []

        def compare() -> None:
            try:
                server.api("workspace_diff", admin, workspace_id=workspace)
                outcomes.append("compared")
            except ToolFailed as failed:
                outcomes.append(failed.code)

        comparing = [threading.Thread(target=compare) for _ in range(6)]
        for thread in comparing:
            thread.start()
        while any(thread.is_alive() for thread in comparing):
            answers(server, admin)
        assert set(outcomes) <= {"timeout", "limit_exceeded"} and "timeout" in outcomes, outcomes
        # Another project's diff is not held up by this one's.
        other = server.api("project_create", admin, name="other")["project_id"]
        other = server.api("project_get", admin, project_id=other)["default_workspace_id"]
        comparing = [threading.Thread(target=compare) for _ in range(6)]
        for thread in comparing:
            thread.start()
        assert server.api("workspace_diff", admin, workspace_id=other)["diff"] == ""
        for thread in comparing:
            thread.join()
        (folder / name).unlink()
        assert "+text" in server.api("workspace_diff", admin, workspace_id=workspace)["diff"]
        unharmed(server, admin)


def test_links_of_a_workspace_lead_to_no_host_file(server, admin, project):
    """Git's own files replaced by links to host files, and links in the tree, show nothing of the host."""
    workspace = server.api("project_get", admin, project_id=project)["default_workspace_id"]
    folder = server.home / "projects" / project / "workspaces" / workspace
    secret = server.home / "secret.txt"
    secret.write_text("host-file-41d7\n")
    (folder / "file").write_text("text\n")
    (folder / "folder").symlink_to(server.home)
    (folder / "link").symlink_to(secret)
    (folder / ".gitignore").symlink_to(secret)
    (folder / ".gitattributes").symlink_to(secret)
    nested = folder / "nested"
    nested.mkdir()
    (nested / ".git").write_text(f"gitdir: {server.home}\n")
    text = server.api("workspace_diff", admin, workspace_id=workspace)["diff"]
    assert "+text" in text and "host-file-41d7" not in text
