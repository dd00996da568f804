"""What `cargo xtask dist` makes, installed as users install it: into a root file system that holds nothing but the
essential packages and bubblewrap.

`cargo xtask test` makes the artifacts with `--profile dev`, and the root file system with mmdebstrap. A test whose parts
are missing is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile

import pytest

from harness import DEADLINE, ROOT, free_port, get, running, wait_until

DIST = ROOT / "target" / "dist"
MINIMAL_ROOT = ROOT / "target" / "minimal-root.tar"

needs_dist = pytest.mark.skipif(not (DIST / "SHA256SUMS").exists(), reason="no target/dist: cargo xtask dist --profile dev")
needs_root = pytest.mark.skipif(
    not MINIMAL_ROOT.exists() or not shutil.which("bwrap"), reason="no minimal root file system: cargo xtask setup"
)


def one(pattern: str) -> pathlib.Path:
    """The only artifact with this name."""
    found = sorted(DIST.glob(pattern))
    assert len(found) == 1, found
    return found[0]


def tarball() -> pathlib.Path:
    return one("oubliette-*-linux.tar.gz")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> pathlib.Path:
    """The tarball's folder."""
    folder = tmp_path_factory.mktemp("tarball")
    with tarfile.open(tarball()) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


class MinimalRoot:
    """A fresh copy of the minimal root file system."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "root"
        self.path.mkdir()
        # As an ordinary user, files belong to that user; device files cannot be made and are not needed.
        subprocess.run(
            ["tar", "-xf", MINIMAL_ROOT, "-C", self.path, "--exclude=./dev/*", "--no-same-owner"], check=True, timeout=DEADLINE
        )

    def command(self, *args: str, user: int = 0) -> list[str]:
        """A command line that runs `args` inside, as root or another user."""
        identity = ["--unshare-user", "--uid", str(user), "--gid", str(user)]
        # The host's /proc, whole: a sandbox inside mounts its own, which the kernel allows only beside a whole one.
        return [
            "bwrap", *identity, "--die-with-parent", "--bind", str(self.path), "/", "--bind", "/proc", "/proc", "--dev", "/dev",
            "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "--setenv", "HOME", "/tmp", "--chdir", "/tmp", *args,
        ]  # fmt: skip

    def run(self, *args: str, user: int = 0, check: bool = True) -> subprocess.CompletedProcess:
        done = subprocess.run(self.command(*args, user=user), capture_output=True, text=True, timeout=DEADLINE)
        assert not check or done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def check_programs(self) -> None:
        """The programs start, the sandbox works, and a whole session runs."""
        for program in ("oubliette", "oubliette-client", "oubliette-agent"):
            assert self.run(program, "--version", user=1000).stdout.startswith(f"{program} ")
        report = json.loads(self.run("oubliette", "--home", "/tmp/h", "doctor", "--json", user=1000, check=False).stdout)
        checks = {check["name"]: check for check in report["checks"]}
        assert checks["sandbox"]["ok"] and checks["oubliette-client"]["ok"] and checks["oubliette-agent"]["ok"], report
        port = free_port()
        command = self.command("oubliette", "--home", "/tmp/h", "up", "--listen", f"127.0.0.1:{port}", user=1000)
        with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
            try:
                wait_until(lambda: server.poll() is not None or answers(port), "the server to be ready")
                assert server.poll() is None, "the server ended"
                done = self.run("oubliette", "--home", "/tmp/h", "run", "--agent", "demo", "Show me around", user=1000)
                assert "hello.txt" in done.stdout
            finally:
                server.terminate()


def answers(port: int) -> bool:
    try:
        return get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except Exception:
        return False


@pytest.fixture
def minimal_root(tmp_path) -> MinimalRoot:
    return MinimalRoot(tmp_path)


@needs_dist
def test_every_artifact_is_there_and_in_the_checksums():
    listed = {}
    for line in (DIST / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        listed[name] = digest
    assert set(listed) == {path.name for path in DIST.iterdir()} - {"SHA256SUMS"}
    for name, digest in listed.items():
        with (DIST / name).open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest, name
    endings = ("-linux.tar.gz", "-image.tar.gz", ".cdx.json") + ((".deb",) if shutil.which("dpkg-deb") else ())
    for ending in endings:
        assert any(name.endswith(ending) for name in listed), ending


@needs_dist
def test_the_tarball_does_not_depend_on_who_packed_it_or_when():
    with tarfile.open(tarball()) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert {(m.uid, m.gid) for m in members} == {(0, 0)}
    assert len({m.mtime for m in members}) == 1
    assert not [m.name for m in members if m.mode & 0o022], "writable for others"


@needs_dist
def test_the_tarball_holds_programs_completions_man_pages_and_the_unit(unpacked):
    for name in (
        "bin/oubliette", "bin/oubliette-client", "bin/oubliette-agent", "install.sh", "SHA256SUMS",
        "share/bash-completion/completions/oubliette", "share/zsh/site-functions/_oubliette",
        "share/fish/vendor_completions.d/oubliette.fish", "lib/systemd/system/oubliette.service",
        "share/man/man1/oubliette.1", "share/man/man1/oubliette-session-switch.1", "share/man/man1/oubliette-client.1",
    ):  # fmt: skip
        assert (unpacked / name).is_file(), name
    page = (unpacked / "share/man/man1/oubliette.1").read_text()
    assert ".TH" in page and "doctor" in page


@needs_dist
def test_the_bill_of_materials_names_what_is_linked():
    bill = json.loads(one("*.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    components = {component["name"]: component for component in bill["components"]}
    assert components["oubliette"]["type"] == "application"
    assert components["tokio"]["hashes"][0]["alg"] == "SHA-256" and components["tokio"]["licenses"]
    # What only tests use is not in the programs.
    assert "insta" not in components and "proptest" not in components
    references = set(component["bom-ref"] for component in bill["components"])
    for node in bill["dependencies"]:
        assert node["ref"] in references and set(node["dependsOn"]) <= references
    if (ROOT / "ui/dist/index.html").exists():
        assert components["marked"]["purl"].startswith("pkg:npm/marked@") and "svelte" in components and "vite" not in components
    # No path of the machine that built it.
    assert str(ROOT) not in json.dumps(bill)


@needs_dist
def test_a_changed_file_is_not_installed(unpacked, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(unpacked, copy)
    with (copy / "bin" / "oubliette-agent").open("ab") as file:
        file.write(b"x")
    target = tmp_path / "target"
    done = subprocess.run(
        [copy / "install.sh"], env={**os.environ, "DESTDIR": str(target)}, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 1 and "nothing was installed" in done.stderr
    assert not target.exists()
    # A file that the list does not know is refused too.
    shutil.copy(unpacked / "bin" / "oubliette-agent", copy / "bin" / "oubliette-agent")
    (copy / "bin" / "more").write_text("#!/bin/sh\n")
    done = subprocess.run(
        [copy / "install.sh"], env={**os.environ, "DESTDIR": str(target)}, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 1 and "bin/more" in done.stderr and not target.exists()


@needs_dist
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed (package systemd)")
def test_the_installed_unit_is_accepted_by_systemd(unpacked, tmp_path):
    target = tmp_path / "target"
    subprocess.run(
        [unpacked / "install.sh", "--service"], env={**os.environ, "DESTDIR": str(target)}, check=True, timeout=DEADLINE
    )
    unit = (target / "etc/systemd/system/oubliette.service").read_text()
    assert "ExecStart=/usr/local/bin/oubliette serve\n" in unit and "Type=notify\n" in unit and "WatchdogSec=" in unit
    copy = tmp_path / "oubliette.service"
    copy.write_text(unit.replace("/usr/local/bin", str(target / "usr/local/bin")))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=DEADLINE)
    # Lines about other units of this machine are not ours.
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "oubliette" in line]
    assert not ours, "\n".join(ours)


@needs_dist
@needs_root
def test_the_tarball_installs_and_runs_with_nothing_but_bubblewrap(minimal_root):
    with tarfile.open(tarball()) as archive:
        archive.extractall(minimal_root.path / "opt", filter="data")
    folder = next((minimal_root.path / "opt").iterdir()).name
    done = minimal_root.run(f"/opt/{folder}/install.sh")
    assert "Installed into /usr/local: oubliette " in done.stdout, done.stdout
    minimal_root.check_programs()
    minimal_root.run(f"/opt/{folder}/install.sh", "--uninstall")
    assert not (minimal_root.path / "usr/local/bin/oubliette").exists()


@needs_dist
@needs_root
@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_the_debian_package_installs_and_runs_with_nothing_but_bubblewrap(minimal_root):
    package = one("oubliette_*.deb")
    shutil.copy(package, minimal_root.path / "opt")
    minimal_root.run("dpkg", "--install", f"/opt/{package.name}")
    assert "ok installed" in minimal_root.run("dpkg", "--status", "oubliette").stdout
    assert "oubliette:" in (minimal_root.path / "etc/passwd").read_text()
    minimal_root.check_programs()
    minimal_root.run("dpkg", "--purge", "oubliette")
    assert not (minimal_root.path / "usr/bin/oubliette").exists()


@needs_dist
@needs_root
def test_the_image_serves(minimal_root):
    with tarfile.open(one("*-image.tar.gz")) as archive:
        folder = minimal_root.path / "opt"
        archive.extractall(folder, filter="data")
    context = next(folder.iterdir())
    shutil.copytree(context / "rootfs", minimal_root.path, dirs_exist_ok=True)
    containerfile = (context / "Containerfile").read_text()
    command = [*json.loads(re.search(r"^ENTRYPOINT (.*)$", containerfile, re.M)[1]), *json.loads(re.search(r"^CMD (.*)$", containerfile, re.M)[1])]
    assert command == ["oubliette", "serve", "--listen", "0.0.0.0:8080", "--insecure"]
    # On loopback and a free port, because this is the network of the machine.
    port = free_port()
    command[command.index("0.0.0.0:8080")] = f"127.0.0.1:{port}"
    with subprocess.Popen(minimal_root.command(*command, user=10001)) as server:
        try:
            wait_until(lambda: server.poll() is not None or answers(port), "the server to be ready")
            assert get(f"http://127.0.0.1:{port}/health").json()["status"] == "ok"
        finally:
            server.terminate()


def test_the_service_manager_hears_of_start_life_and_end(tmp_path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(DEADLINE)
        with running(env={"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000"}) as server:
            first = manager.recv(4096).decode()
            assert first.startswith("READY=1\n") and server.url in first
            assert manager.recv(4096) == b"WATCHDOG=1"
            assert manager.recv(4096) == b"WATCHDOG=1"
        heard = manager.recv(4096)
        while heard == b"WATCHDOG=1":
            heard = manager.recv(4096)
        assert heard.startswith(b"STOPPING=1\n")


def test_workflows_run_commands_that_exist():
    known = subprocess.run(
        ["grep", "-oP", r"^    [A-Z][a-z]+(?=[ ,{])", ROOT / "xtask/src/main.rs"], capture_output=True, text=True, check=True
    ).stdout.split()
    named = set()
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        named |= set(re.findall(r"cargo xtask ([a-z]+)", workflow.read_text()))
    assert {"docs", "dist", "test"} <= named, named
    assert named <= {name.lower() for name in known}, named


def test_a_release_is_tested_and_built_for_the_base_of_the_image():
    release = (ROOT / ".github/workflows/release.yml").read_text()
    assert "uses: ./.github/workflows/ci.yml" in release and "needs: test" in release
    assert "workflow_call:" in (ROOT / ".github/workflows/ci.yml").read_text()
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "deploy/container/Containerfile").read_text(), re.M)[1]
    assert base in release, "what is published is not started in the image's base"
