"""The commands of README and the book, run as a reader would run them: each page in a fresh home, from top to bottom.

Blocks marked `sh` are run. Those marked `sh host` need the internet or the administrator of a machine; that their
commands exist is checked by `crates/server/tests/book.rs`.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import tempfile

import pytest

from harness import BIN, DEADLINE, ROOT, Server, get

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "src").glob("*.md"))]


def blocks(page: pathlib.Path) -> list[str]:
    """The blocks of a page that are to be run."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


RUN = [page for page in PAGES if not page.name.startswith("reference-") and blocks(page)]


def test_the_book_has_commands_to_run():
    assert len(RUN) > 8


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page):
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        user = pathlib.Path(folder)
        server = Server(user / ".oubliette", command="up").start()
        # An answer that is an error fails the page.
        (user / ".curlrc").write_text("fail-with-body\n")
        script = "\n".join(blocks(page))
        for address in ("localhost:8080", "127.0.0.1:8080"):
            script = script.replace(address, f"127.0.0.1:{server.port}")
        env = {key: value for key, value in os.environ.items() if not key.startswith("OUBLIETTE_")}
        try:
            done = subprocess.run(
                ["bash", "-eu", "-c", script],
                cwd=user,
                env={**env, "HOME": folder, "PATH": f"{BIN.resolve()}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert done.returncode == 0, f"{page.name}:\n{done.stdout}\n{done.stderr}\n{server.log()}"
        finally:
            server.stop()


def test_the_server_serves_the_book_under_its_strict_policy(server):
    answer = get(f"{server.url}/docs", follow_redirects=True)
    assert answer.url.path == "/docs/"
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "unsafe" not in policy
    assert get(f"{server.url}/docs/no-such-page.html").status_code == 404
    if not (ROOT / "docs" / "book" / "index.html").exists():
        pytest.skip("the book was not built (cargo xtask docs)")
    for name in ("start.html", "book.css", "book.js", "search.json", "reference-commands.html"):
        assert get(f"{server.url}/docs/{name}").status_code == 200, name
    # Nothing is loaded from elsewhere, and nothing is inline.
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|src=\"https?:", answer.text)
