"""`workspace push` and `pull`: folders into workspaces and back, and what neither takes."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import subprocess
import tarfile

import pytest

from harness import BIN, DEADLINE, delete, get, put, running


def mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def workspace_of(server, admin, project):
    return server.api("project_get", admin, project_id=project)["default_workspace_id"]


def archive_names(server, admin, workspace) -> set[str]:
    answer = get(f"{server.url}/api/workspaces/{workspace}/archive", headers={"Authorization": f"Bearer {admin}"})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        return {entry.name for entry in tar if not entry.isdir()}


def put_archive(server, token, workspace, content: bytes):
    headers = {"Authorization": f"Bearer {token}"}
    return put(f"{server.url}/api/workspaces/{workspace}/archive", content=content, headers=headers)


def tar_of(*entries: tuple[str, bytes | str]) -> bytes:
    """An archive of files, and of links for targets given as text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.GNU_FORMAT) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """A folder with everything that is pushed, and with what is not."""
    root = tmp_path / "src"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "deep" / "er" / "secret").write_text("s")
    (root / "deep" / "er" / "secret").chmod(0o600)
    (root / "large").write_bytes(os.urandom(9 << 20))
    (root / "deep" / "link").symlink_to("er/secret")
    (root / "empty").mkdir()
    (root / ".hidden").write_text("h")
    (root / ".gitignore").write_text("*.log\n/build/\n")
    (root / "deep" / ".gitignore").write_text("own\n")
    for ignored in ("a.log", "deep/b.log", "deep/own", "build/x", ".git/config"):
        (root / ignored).parent.mkdir(exist_ok=True)
        (root / ignored).write_text("ignored")
    return root


def test_a_folder_comes_back_as_it_was_without_what_is_ignored(server, admin, project, folder, tmp_path):
    pushed = server.cli_json("workspace", "push", str(folder), "--project", project)
    workspace = workspace_of(server, admin, project)
    assert pushed["workspace_id"] == workspace and pushed["files"] == 6
    expected = {"run.sh", "deep/er/secret", "large", "deep/link", ".hidden", ".gitignore", "deep/.gitignore"}
    assert archive_names(server, admin, workspace) == expected
    # Again, over what is there.
    (folder / "run.sh").write_text("#!/bin/sh\necho 2\n")
    server.cli("workspace", "push", str(folder), "--workspace", workspace)
    back = tmp_path / "back"
    (back / "mine").mkdir(parents=True)
    (back / "run.sh").write_text("old")
    pulled = server.cli_json("workspace", "pull", str(back), "--workspace", workspace)
    assert pulled["files"] == 6 and pulled["skipped"] == 0
    assert (back / "run.sh").read_text() == "#!/bin/sh\necho 2\n" and mode(back / "run.sh") == 0o755
    assert mode(back / "deep/er/secret") == 0o600 and (back / "large").read_bytes() == (folder / "large").read_bytes()
    assert os.readlink(back / "deep/link") == "er/secret" and (back / "mine").is_dir()
    assert sorted(p.name for p in back.iterdir()) == [".gitignore", ".hidden", "deep", "empty", "large", "mine", "run.sh"]
    assert list((back / "empty").iterdir()) == []
    audited = [e for e in server.api("audit_list", admin, limit=1000)["entries"] if e["action"] == "workspace_archive_put"]
    assert len(audited) == 2 and {e["outcome"] for e in audited} == {"ok"}


def test_it_works_from_another_machine(server, admin, project, folder, tmp_path):
    env = {**os.environ, "OUBLIETTE_URL": server.url, "OUBLIETTE_TOKEN": admin, "OUBLIETTE_HOME": str(tmp_path / "none")}
    def client(*args):
        done = subprocess.run([BIN / "oubliette", *args, "--json"], env=env, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert client("workspace", "push", str(folder), "--project", project)["files"] == 6
    assert client("workspace", "pull", str(tmp_path / "b"), "--project", project)["files"] == 6
    assert (tmp_path / "b" / "large").read_bytes() == (folder / "large").read_bytes()


def test_without_a_name_the_only_project_is_meant(folder, tmp_path):
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="only")["project_id"]
        pushed = server.cli_json("workspace", "push", str(folder))
        assert pushed["workspace_id"] == workspace_of(server, admin, project)
        assert server.cli_json("workspace", "pull", str(tmp_path / "back"))["files"] == 6
        server.api("project_create", admin, name="another")
        refused = server.cli("workspace", "push", str(folder), check=False)
        assert refused.returncode != 0 and "--project" in refused.stderr


def test_what_cannot_be_pushed_is_named(server, admin, project, tmp_path):
    def refused(dir) -> str:
        done = server.cli("workspace", "push", str(dir), "--project", project, check=False)
        assert done.returncode == 1
        return done.stderr

    root = tmp_path / "src"
    root.mkdir()
    (root / "ok").write_text("x")
    link = root / "out"
    for target in ("/etc/passwd", "../elsewhere", "a/../../b"):
        link.symlink_to(target)
        said = refused(root)
        assert "leads outside" in said and "out" in said and ".gitignore" in said
        link.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s.sock"))
        assert "is a socket" in refused(root)
    (root / "s.sock").unlink()
    os.mkfifo(root / "pipe")
    assert "is a pipe" in refused(root)
    (root / "pipe").unlink()
    many = root / "many"
    many.mkdir()
    for n in range(100_001):
        (many / str(n)).touch()
    assert "more than 100000 files" in refused(root)
    # What is ignored does not count.
    (root / ".gitignore").write_text("many\n")
    assert server.cli_json("workspace", "push", str(root), "--project", project)["files"] == 2
    assert "is not a folder" in refused(root / "ok") and "No such file" in refused(tmp_path / "none")


def test_a_refused_archive_changes_nothing(server, admin, project, tmp_path):
    workspace = workspace_of(server, admin, project)
    good = tar_of(("a", b"1"), ("d/b", b"2"))
    assert put_archive(server, admin, workspace, good).json()["files"] == 2
    before = archive_names(server, admin, workspace)
    bad = {
        "out": tar_of(("new", b"x"), ("../out", b"x")),
        "cut": good[: len(good) - 20],
        "text": b"no archive",
        "device": None,
        "folder": tar_of(("new", b"x"), ("d", b"in the place of a folder")),
        "through": tar_of(("new", b"x"), ("a/b", b"below a file")),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("null")
        info.type = tarfile.CHRTYPE
        tar.addfile(info)
    bad["device"] = buffer.getvalue()
    for name, content in bad.items():
        answer = put_archive(server, admin, workspace, content)
        assert answer.status_code in (400, 404, 409), f"{name}: {answer.text}"
        assert archive_names(server, admin, workspace) == before, name
    # A link of the workspace is not followed, also when the archive brings it along.
    answer = put_archive(server, admin, workspace, tar_of(("l", str(tmp_path)), ("l/x", b"out")))
    assert answer.status_code == 400 and not (tmp_path / "x").exists()
    assert archive_names(server, admin, workspace) == before
    assert not list((server.home / "projects" / project / "uploads").iterdir())
    read = server.token("read")
    assert put_archive(server, read, workspace, good).status_code == 403
    headers = {"Authorization": f"Bearer {admin}"}
    assert delete(f"{server.url}/api/workspaces/{workspace}/files/a", headers=headers).status_code == 200


def test_a_push_stays_within_what_a_workspace_may_hold(server, admin, tmp_path):
    project = server.api("project_create", admin, name="small", sandbox={"workspace_mb": 2})["project_id"]
    root = tmp_path / "src"
    root.mkdir()
    (root / "zeros").write_bytes(bytes(3 << 20))
    done = server.cli("workspace", "push", str(root), "--project", project, "--json", check=False)
    assert done.returncode == 1 and json.loads(done.stdout)["error"]["code"] == "limit_exceeded"
    assert archive_names(server, admin, workspace_of(server, admin, project)) == set()


def test_a_pulled_archive_writes_nothing_outside_its_folder(server, admin, project, tmp_path):
    workspace = workspace_of(server, admin, project)
    outside = tmp_path / "outside"
    outside.mkdir()
    content = tar_of(("evil", str(outside)), ("fine", b"x"), (".git/hooks/post-checkout", b"#!/bin/sh\n"))
    assert put_archive(server, admin, workspace, content).status_code == 200
    back = tmp_path / "back"
    pulled = server.cli_json("workspace", "pull", str(back), "--project", project)
    assert (pulled["files"], pulled["skipped"]) == (1, 1)
    assert [p.name for p in back.iterdir()] == ["fine"] and not list(outside.iterdir())
    # A link that is here already is not followed either.
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "d").symlink_to(outside)
    assert put_archive(server, admin, workspace, tar_of(("d/x", b"x"))).status_code == 200
    refused = server.cli("workspace", "pull", str(tmp_path / "linked"), "--project", project, check=False)
    assert refused.returncode == 1 and "link" in refused.stderr and not list(outside.iterdir())


def test_no_chain_of_links_that_is_pulled_leads_outside(server, admin, project, tmp_path):
    """Each link stays inside by its own text, and each leads one folder further up than the one before: with all of them in
    place, a file of the pulled folder would be one of its owner's."""
    workspace = workspace_of(server, admin, project)
    (tmp_path / "secret").write_text("the owner's")
    links = [("d/a", ".."), ("d/b", "a/.."), ("d/notes", "b/secret"), ("d/inside", "../d/real"), ("d/real", b"x")]
    assert put_archive(server, admin, workspace, tar_of(*links)).status_code == 200
    back = tmp_path / "back"
    pulled = server.cli_json("workspace", "pull", str(back), "--project", project)
    outside = [path for path in (back / "d").iterdir() if not path.resolve().is_relative_to(back.resolve())]
    assert outside == [] and pulled["skipped"] == 1, pulled
    assert (back / "d" / "inside").read_bytes() == b"x"
