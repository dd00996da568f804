"""`backup` and `restore` of workspaces that `[workspaces] dir` has outside the home."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import tarfile

import pytest

import stores
from harness import Server


def config_with(folder: pathlib.Path) -> str:
    return f'[workspaces]\ndir = "{folder}"\n'


def fill(server: Server) -> tuple[str, str, pathlib.Path]:
    """A project with files in its workspace. Returns a token, the workspace and its folder."""
    admin = server.token("admin")
    project = server.api("project_create", admin, name="kept")
    return admin, project["project_id"], pathlib.Path(project["project_id"], "workspaces", project["default_workspace_id"])


def check(server: Server, admin: str, project: str, folder: pathlib.Path) -> None:
    server.start()
    try:
        assert server.api("project_get", admin, project_id=project)["name"] == "kept"
    finally:
        assert server.stop() == 0
    assert (folder / "deep" / "run.sh").read_text() == "#!/bin/sh\n"
    assert stat.S_IMODE((folder / "deep" / "run.sh").stat().st_mode) == 0o755
    assert os.readlink(folder / "link") == "/etc/passwd"


def test_workspaces_outside_the_home_are_backed_up_and_put_back(tmp_path):
    shared = tmp_path / "shared"
    server = Server(tmp_path / "h", config_with(shared)).start()
    try:
        admin, project, workspace = fill(server)
        folder = shared / workspace
        (folder / "deep").mkdir()
        (folder / "deep" / "run.sh").write_text("#!/bin/sh\n")
        (folder / "deep" / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("/etc/passwd")
        file = tmp_path / "backup.tar.gz"
        server.cli_json("backup", str(file))
        with tarfile.open(file) as tar:
            assert f"home/projects/{workspace}/deep/run.sh" in tar.getnames()
        done = server.cli("backup", str(shared / "backup.tar.gz"), check=False)
        assert done.returncode == 1 and "backed up itself" in done.stderr, done.stderr
    finally:
        server.stop()

    # Into a home whose configuration names another folder, which may be a file system of its own.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".of-the-file-system").mkdir()
    inode = elsewhere.stat().st_ino
    moved = Server(tmp_path / "moved", config_with(elsewhere))
    restored = moved.cli_json("restore", str(file))
    assert restored["workspaces"] == str(elsewhere) and elsewhere.stat().st_ino == inode
    assert {entry.name for entry in elsewhere.iterdir()} == {".of-the-file-system", project}
    check(moved, admin, project, elsewhere / workspace)

    # Into a home whose configuration has none: into the home itself.
    inside = Server(tmp_path / "inside", "[log]\nlevel = 'info'\n")
    assert inside.cli_json("restore", str(file))["workspaces"] is None
    check(inside, admin, project, inside.home / "projects" / workspace)

    # Without a configuration the backup's counts, and what is in its folder is not mixed with anything.
    new = Server(tmp_path / "new")
    done = new.cli("restore", str(file), check=False)
    assert done.returncode == 1 and str(shared) in done.stderr and "[workspaces] dir" in done.stderr, done.stderr
    assert (folder / "deep" / "run.sh").exists() and not (new.home / "oubliette.toml").exists()
    shutil.rmtree(shared)
    assert new.cli_json("restore", str(file))["workspaces"] == str(shared)
    assert {entry.name for entry in shared.iterdir()} == {project}
    check(new, admin, project, folder)


@pytest.mark.skipif(stores.ON_POSTGRES, reason="a PostgreSQL database has to be empty, with --force too")
def test_workspaces_that_are_there_are_moved_aside_with_force(tmp_path):
    shared = tmp_path / "shared"
    server = Server(tmp_path / "h", config_with(shared)).start()
    admin, project, workspace = fill(server)
    file = tmp_path / "backup.tar.gz"
    (shared / workspace / "a").write_text("of the backup")
    server.cli_json("backup", str(file))
    (shared / workspace / "a").write_text("changed since")
    server.stop()
    restored = server.cli_json("restore", str(file), "--force")
    kept = pathlib.Path(restored["workspaces_moved_to"])
    assert kept.parent == shared and kept.name.startswith(".replaced-")
    assert (kept / workspace / "a").read_text() == "changed since"
    assert (shared / workspace / "a").read_text() == "of the backup"
    # What was moved aside is no data: a second restore does not meet it, nor does a backup hold it.
    server.start()
    assert server.api("project_get", admin, project_id=project)["name"] == "kept"
    server.stop()
    again = tmp_path / "again.tar.gz"
    server.cli_json("backup", str(again))
    with tarfile.open(again) as tar:
        assert not any(".replaced-" in name for name in tar.getnames())
