"""A container engine of the tests' own: its data, sockets and containers are in a temporary folder and end with it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any, Iterator

import harness
from harness import wait_until

MINIMAL_ROOT = harness.ROOT / "target" / "minimal-root.tar"
IMAGE = "oubliette-test:latest"


def why_not() -> str | None:
    """Why no engine can be started here; none if one can."""
    if os.geteuid() != 0:
        return "an engine is started by root only"
    if not (shutil.which("dockerd") and shutil.which("docker")):
        return "no container engine (package docker.io)"
    if not MINIMAL_ROOT.exists():
        return "no target/minimal-root.tar: cargo xtask test makes it"
    return None


class Engine:
    """A running dockerd."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.socket = folder / "d.sock"
        self.log = folder / "dockerd.log"
        self.process: subprocess.Popen | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "dockerd", "-H", self.host, "--bridge=none", "--iptables=false",
                    "--data-root", self.folder / "data", "--exec-root", self.folder / "exec",
                    "--pidfile", self.folder / "pid",
                ],  # fmt: skip
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, "the container engine to answer")

    def _answers(self) -> bool:
        assert self.process and self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
        return self.docker("version", check=False).returncode == 0

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)

    def docker(self, *args: str, check: bool = True) -> subprocess.CompletedProcess:
        # The engine's own builder: BuildKit is a program of its own, which may not be installed.
        env = {**os.environ, "DOCKER_BUILDKIT": "0"}
        done = subprocess.run(["docker", "-H", self.host, *args], capture_output=True, text=True, env=env)
        assert not check or done.returncode == 0, f"docker {args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def containers(self, *, running_only: bool = False) -> list[str]:
        """The ids of the containers there are."""
        args = ["ps", "-q", "--no-trunc"] + ([] if running_only else ["-a"])
        return self.docker(*args).stdout.split()

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(self.docker("inspect", container).stdout)[0]

    def container_of(self, sandbox: str) -> str:
        """The container of a session's agent or tool server, by its label."""
        found = self.docker("ps", "-q", "--no-trunc", "--filter", f"label=oubliette.sandbox={sandbox}").stdout.split()
        assert len(found) == 1, found
        return found[0]


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """An engine with the image `IMAGE`."""
    with tempfile.TemporaryDirectory(prefix="oubeng", ignore_cleanup_errors=True) as folder:
        engine = Engine(pathlib.Path(folder))
        try:
            engine.start()
            engine.docker("import", str(MINIMAL_ROOT), IMAGE)
            yield engine
        finally:
            for container in engine.containers() if engine.process and engine.process.poll() is None else []:
                engine.docker("rm", "-f", container, check=False)
            engine.stop()
