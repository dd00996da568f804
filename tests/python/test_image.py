"""The container image: built by an engine from what `cargo xtask dist` makes, started, and used as the book says.

No registry is reached: the base is the minimal root file system, which has every package the server needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
from typing import Iterator

import pytest

import container_engine
from container_engine import IMAGE, Engine
from harness import DEADLINE, ROOT, wait_until
from test_dist import needs_dist, one
from test_docker import TOOL_SERVER

WHY_NOT = container_engine.why_not()
pytestmark = [pytest.mark.skipif(WHY_NOT is not None, reason=f"image: {WHY_NOT}"), needs_dist]

OURS = "oubliette-server:latest"
USER = 10001
GUIDE = (ROOT / "docs/src/guide-deploy.md").read_text()


class ServerContainer:
    """A container of the image. Its network has nothing but a loopback interface of its own."""

    def __init__(self, engine: Engine, container: str):
        self.engine, self.id = engine, container

    def get(self, path: str) -> str | None:
        """The body of an answer 200 of the server; none if there is another answer or none."""
        state = self.engine.inspect(self.id)["State"]
        assert state["Running"], self.logs()
        url = f"http://127.0.0.1:8080{path}"
        enter = ["nsenter", "--net", "--target", str(state["Pid"])]
        done = subprocess.run([*enter, "curl", "--silent", "--fail", url], capture_output=True, text=True, timeout=DEADLINE)
        return done.stdout if done.returncode == 0 else None

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess:
        """`oubliette` with these arguments, in the container."""
        done = self.engine.docker("exec", self.id, "oubliette", *args, check=False)
        assert not check or done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def doctor(self) -> dict[str, dict]:
        return {check["name"]: check for check in json.loads(self.run("doctor", "--json", check=False).stdout)["checks"]}

    def logs(self) -> str:
        done = self.engine.docker("logs", self.id, check=False)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def engine():
    with container_engine.running_engine() as engine:
        yield engine


@pytest.fixture(scope="module", autouse=True)
def image(engine, tmp_path_factory) -> dict:
    """The image, and what the engine says of it."""
    folder = tmp_path_factory.mktemp("context")
    with tarfile.open(one("*-image.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    context = next(folder.iterdir())
    arguments = ["--build-arg", f"BASE={IMAGE}", "--build-arg", "PACKAGES="]
    engine.docker("build", "--network", "none", *arguments, "--tag", OURS, "--file", str(context / "Containerfile"), str(context))
    return engine.inspect(OURS)


@contextlib.contextmanager
def started(engine: Engine, *options: str, command: tuple[str, ...] = ()) -> Iterator[ServerContainer]:
    """A container of the image that answers `/health`."""
    container = engine.docker("run", "--detach", "--network", "none", *options, OURS, *command).stdout.strip()
    server = ServerContainer(engine, container)
    try:
        health = wait_until(lambda: server.get("/health"), "the server in the container to answer")
        assert json.loads(health)["status"] == "ok"
        yield server
    finally:
        engine.docker("rm", "--force", "--volumes", container, check=False)


def documented(option: str) -> list[str]:
    """The options of this name that the guide gives to `docker run`."""
    found = re.findall(rf"({option}) (\S+)", GUIDE)
    assert found, option
    return [word for pair in dict.fromkeys(found) for word in pair]


UP = ("up", "--listen", "0.0.0.0:8080", "--insecure")


def test_the_built_image_serves_as_it_is_and_stops_when_told(engine, image):
    assert image["Config"]["User"] == f"{USER}:{USER}"
    with started(engine) as server:
        assert server.run("--version").stdout.startswith("oubliette ")
        token = server.run("token", "create", "--name", "first", "--scope", "admin").stdout
        assert "oub_" in token and server.doctor()["home"]["ok"]
        # An engine forbids sandboxes in a container by default; that is said, and what to do.
        sandbox = server.doctor()["sandbox"]
        assert not sandbox["ok"] and sandbox["remedy"], sandbox
        assert server.get("/ready") is None
        engine.docker("stop", "--time", str(int(DEADLINE)), server.id)
        assert engine.inspect(server.id)["State"]["ExitCode"] == 0, server.logs()


def test_sandboxes_inside_the_container_with_the_options_of_the_guide(engine):
    with started(engine, *documented("--security-opt"), command=UP) as server:
        assert server.doctor()["sandbox"]["ok"]
        assert server.get("/ready")
        done = server.run("run", "--agent", "demo", "Show me around")
        assert "hello.txt" in done.stdout


def test_sessions_in_containers_of_the_engine_whose_socket_is_mounted(engine):
    # A short path: sockets below it must not be longer than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="oubimg", ignore_cleanup_errors=True) as folder:
        home = pathlib.Path(folder)
        os.chown(home, USER, USER)
        (home / "oubliette.toml").write_text(f'[sandbox]\ndriver = "docker"\n[sandbox.docker]\nimage = "{IMAGE}"\n')
        options = [
            "--volume", f"{home}:{home}", "--env", f"OUBLIETTE_HOME={home}",
            "--volume", f"{engine.socket}:/var/run/docker.sock", "--group-add", str(engine.socket.stat().st_gid),
        ]  # fmt: skip
        with started(engine, *options, command=UP) as server:
            assert server.get("/ready"), server.run("doctor", check=False).stdout
            done = server.run("run", "--agent", "demo", "Show me around")
            assert "hello.txt" in done.stdout
            # The agent's container stands beside the server's, as restricted as any.
            beside = [container for container in engine.containers(running_only=True) if container != server.id]
            assert beside
            for container in beside:
                told = engine.inspect(container)
                assert told["HostConfig"]["CapDrop"] == ["ALL"] and told["HostConfig"]["ReadonlyRootfs"], told
                assert told["Config"]["User"] == f"{USER}:{USER}"
                mounted = [mount["Source"] for mount in told["Mounts"] if mount["Type"] == "bind"]
                assert all(pathlib.Path(source).is_relative_to(home) for source in mounted), mounted
            # A trial without a session finds its folders on the engine's machine too.
            tool = home / "tools" / "sh" / "tool.json"
            tool.parent.mkdir()
            entry = {"id": "sh", "kind": "mcp", "transport": "stdio", "command": "/bin/sh", "args": ["-c", TOOL_SERVER]}
            tool.write_text(json.dumps(entry))
            assert [tool["name"] for tool in json.loads(server.run("tool", "test", "sh", "--json").stdout)["tools"]] == ["@sh/look"]
            engine.docker("stop", "--time", str(int(DEADLINE)), server.id)
            wait_until(lambda: not engine.containers(running_only=True), "the sessions' containers to end")
