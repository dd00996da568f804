"""Archives that clients send into workspaces are bounded in what they hold, in number and on disk."""

from __future__ import annotations

import contextlib
import gzip
import io
import socket
import tarfile

import pytest

from attack_support import ANSWERED_WITHIN, MIB, answers, unharmed
from harness import put, running, wait_until

UPLOADS = 40
"""Archives that are sent at once: more than the server takes for all workspaces together."""
CONTENT = 1024 * MIB
"""Bytes that follow the header of a link: as gzip one megabyte, to be skipped."""
NAMES = 700_000
"""Names that no entry follows: more than three for each entry an archive may have."""


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture
def workspace(server, admin, project):
    return server.api("workspace_list", admin, project_id=project)["workspaces"][0]["workspace_id"]


def header(name: str, kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "x" if kind == tarfile.SYMTYPE else ""
    return info.tobuf(tarfile.GNU_FORMAT)


def compressed(first: bytes, block: bytes, times: int) -> bytes:
    """A gzip file of some bytes and a block again and again, and the end of a tar file."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as file:
        file.write(first)
        for _ in range(times):
            file.write(block)
        file.write(bytes(1024))
    return out.getvalue()


def link_with_content() -> bytes:
    return compressed(header("link", tarfile.SYMTYPE, CONTENT), bytes(MIB), CONTENT // MIB)


def folder_with_content() -> bytes:
    return compressed(header("folder/", tarfile.DIRTYPE, CONTENT), bytes(MIB), CONTENT // MIB)


def names_alone() -> bytes:
    name = header("././@LongLink", tarfile.GNUTYPE_LONGNAME, 5) + b"name".ljust(512, b"\0")
    return compressed(b"", name * 1000, NAMES // 1000)


@pytest.mark.parametrize(
    ("made", "code"),
    [(link_with_content, "invalid_argument"), (folder_with_content, "invalid_argument"), (names_alone, "limit_exceeded")],
)
def test_what_an_archive_has_besides_files_is_not_unpacked_without_end(server, admin, workspace, made, code):
    """A small archive is gigabytes when it is unpacked, none of them in a file: it is refused where that begins."""
    headers = {"Authorization": f"Bearer {admin}"}
    url = f"{server.url}/api/workspaces/{workspace}/archive"
    answer = put(url, content=made(), headers=headers, timeout=ANSWERED_WITHIN)
    assert answer.json().get("error", {}).get("code") == code, answer.text
    unharmed(server, admin)


class UnfinishedUpload:
    """An archive of which some is sent, and no more."""

    def __init__(self, server, token: str, workspace: str, content: bytes):
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.settimeout(ANSWERED_WITHIN)
        head = [
            f"PUT /api/workspaces/{workspace}/archive HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            f"Authorization: Bearer {token}",
            "Content-Length: 1000000000",
        ]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + content)

    def refused(self) -> bool:
        """Whether it was answered with 429."""
        self.socket.setblocking(False)
        try:
            return self.socket.recv(64, socket.MSG_PEEK).startswith(b"HTTP/1.1 429")
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        finally:
            self.socket.settimeout(ANSWERED_WITHIN)


def test_uploads_are_counted(server, admin, project):
    """A client begins many uploads and ends none: of one workspace, then of many."""
    made = [
        server.api("workspace_create", admin, project_id=project, name=f"w{n}")["workspace_id"] for n in range(UPLOADS // 4)
    ]
    with contextlib.ExitStack() as stack:
        uploads = [UnfinishedUpload(server, admin, workspace, b"\x1f\x8b") for workspace in made for _ in range(5)]
        for upload in uploads:
            stack.callback(upload.socket.close)
        # Four of each workspace, and thirty-two of all.
        wait_until(lambda: sum(upload.refused() for upload in uploads) == len(uploads) - 32, "uploads to be refused")
        answers(server, admin)
    # When they are gone, there is room again.
    empty = compressed(b"", b"", 0)
    headers = {"Authorization": f"Bearer {admin}"}
    url = f"{server.url}/api/workspaces/{made[0]}/archive"
    wait_until(lambda: put(url, content=empty, headers=headers).status_code == 200, "archives to be taken again")
    unharmed(server, admin)


def test_what_is_being_received_counts_against_the_workspace():
    """Archives that are sent at once and never end have together no more on disk than the workspace may hold."""
    with running("[sandbox]\nworkspace_mb = 8\n") as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="small")["project_id"]
        workspace = server.api("workspace_list", admin, project_id=project)["workspaces"][0]["workspace_id"]
        uploads = [UnfinishedUpload(server, admin, workspace, bytes(5 * MIB)) for _ in range(3)]
        try:
            # All three, if they are received side by side and reach the limit in the same moment.
            wait_until(lambda: sum(upload.refused() for upload in uploads) >= 2, "two of three uploads to be refused")
            unharmed(server, admin)
        finally:
            for upload in uploads:
                upload.socket.close()
