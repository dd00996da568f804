"""Which database the servers of the tests use: SQLite, or PostgreSQL if `OUBLIETTE_TEST_STORE` is `postgres`.

Every home has a schema of its own on a PostgreSQL of the tests (`tests/postgres/serve.sh`). `OUBLIETTE_TEST_POSTGRES` names
the directory of its socket if somebody else started it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import subprocess

ON_POSTGRES = os.environ.get("OUBLIETTE_TEST_STORE") == "postgres"
SERVE = pathlib.Path(__file__).resolve().parents[1] / "postgres" / "serve.sh"


@functools.cache
def socket_dir() -> str:
    """Where the tests' PostgreSQL listens; it is started if nobody did, and ends with this process."""
    if named := os.environ.get("OUBLIETTE_TEST_POSTGRES"):
        return named
    process = subprocess.Popen([SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.readline().strip()
    assert said.startswith("ready "), f"no PostgreSQL for the tests: {said}"
    # Kept, because the server ends when its input is closed.
    socket_dir.process = process  # type: ignore[attr-defined]
    return said.removeprefix("ready ")


def execute(sql: str) -> str:
    """The output of a statement of the test's own."""
    command = ["psql", "-h", socket_dir(), "-U", "oubliette", "-d", "postgres", "-AtqX", "-v", "ON_ERROR_STOP=1", "-c", sql]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@functools.cache
def url(home: pathlib.Path) -> str:
    """The address of the schema of this home, which is made."""
    schema = "h" + hashlib.sha256(str(home).encode()).hexdigest()[:24]
    execute(f"SET client_min_messages = warning; CREATE SCHEMA IF NOT EXISTS {schema}")
    return f"postgres://oubliette@localhost/postgres?host={socket_dir()}&options[search_path]={schema}"


def env(home: pathlib.Path) -> dict[str, str]:
    """The environment in which a server or command uses this home."""
    return {"OUBLIETTE_STORE_URL": url(pathlib.Path(home))} if ON_POSTGRES else {}
