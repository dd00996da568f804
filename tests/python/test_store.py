"""The store on PostgreSQL: chosen by its address, used by one server, its password never shown."""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

import harness
import stores
from fault_injection import SmallDisk, small_disk
from fault_network import Link, Network
from harness import Server, ToolFailed, running, wait_until

on_postgres = pytest.mark.skipif(not stores.ON_POSTGRES, reason="runs with OUBLIETTE_TEST_STORE=postgres")


def run_cli(home, *args: str, url: str | None = None) -> subprocess.CompletedProcess:
    env = {**os.environ, "OUBLIETTE_STORE_URL": url or ""}
    command = [harness.BIN / "oubliette", "--home", home, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=harness.DEADLINE, env=env)


@on_postgres
def test_a_server_stores_everything_in_postgresql():
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.kill()
        assert not (server.home / "oubliette.db").exists()
        server.start()
        assert server.api("project_get", admin, project_id=project)["name"] == "p"
        checks = {check["name"]: check for check in server.cli_json("doctor")["checks"]}
        assert checks["database"]["ok"] and "postgres://oubliette@" in checks["database"]["detail"]


@on_postgres
def test_a_second_server_on_the_database_is_refused_and_told_who_has_it(tmp_path):
    with running() as server:
        url = stores.url(server.home)
        other = tmp_path / "other"
        done = run_cli(other, "serve", "--listen", f"127.0.0.1:{harness.free_port()}", url=url)
        assert done.returncode == 1, done.stdout
        assert "in use by oubliette" in done.stderr and f"process {server.process.pid}" in done.stderr
        assert server.api("project_list", server.token("read"))


@on_postgres
def test_the_password_of_the_address_is_shown_nowhere(tmp_path):
    url = stores.url(tmp_path).replace("oubliette@", "oubliette:hunter2hunter2@")
    with running(env={"OUBLIETTE_STORE_URL": url, "RUST_LOG": "trace"}, config='[log]\nlevel = "trace"\n') as server:
        server.env["RUST_LOG"] = "info"
        done = run_cli(server.home, "doctor", "--json", url=url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "hunter2" not in done.stdout + done.stderr
        server.stop()
        assert "hunter2" not in server.log()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("mysql://me:hunter2@h/d", "postgres://USER"),
        ("postgres://me:hunter2@h/d?pasword=hunter2", "parameter"),
        ("postgres://me:hunter2@127.0.0.1:1/d", "check host and port"),
        ("postgres://me:hunter2@no-such-host.invalid/d", "check host and port"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_remedy(tmp_path, url, remedy):
    done = run_cli(tmp_path / "h", "serve", "--listen", f"127.0.0.1:{harness.free_port()}", url=url)
    assert done.returncode == 1
    assert remedy in done.stderr and "hunter2" not in done.stdout + done.stderr, done.stderr
    assert not (tmp_path / "h" / "oubliette.db").exists()


# -- databases that cannot be used -------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder with a short path: it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        yield pathlib.Path(folder)


def refused_start(folder: pathlib.Path, url: str) -> str:
    """What a server says that does not start on this database."""
    done = run_cli(folder / "h", "serve", "--listen", f"127.0.0.1:{harness.free_port()}", url=url)
    assert done.returncode == 1, done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    return done.stderr


@on_postgres
def test_a_wrong_password_is_refused_with_the_remedy(folder):
    with contextlib.suppress(subprocess.CalledProcessError):  # another test made it
        stores.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
    said = refused_start(folder, stores.url(folder).replace("oubliette@", "guarded:hunter2@"))
    assert "refuses the login" in said and "check user and password" in said, said


@on_postgres
def test_a_database_of_another_program_is_left_alone(folder):
    url = stores.url(folder)
    schema = url.rpartition("=")[2]
    stores.execute(f"CREATE TABLE {schema}.invoices (total BIGINT); INSERT INTO {schema}.invoices VALUES (7)")
    said = refused_start(folder, url)
    assert "tables of another program (invoices)" in said and "of its own" in said, said
    tables = f"SELECT string_agg(tablename, ' ') FROM pg_tables WHERE schemaname = '{schema}'"
    assert stores.execute(tables) == "invoices" and stores.execute(f"SELECT total FROM {schema}.invoices") == "7"


@on_postgres
def test_a_database_that_can_only_be_read_is_refused_with_the_remedy(folder):
    said = refused_start(folder, f"{stores.url(folder)}&options[default_transaction_read_only]=on")
    assert "can only be read" in said and "address of the primary" in said, said


@on_postgres
def test_a_newer_schema_is_refused_and_left_as_it_is():
    """One that this version cannot work with; others are for test_rolling_upgrade.py."""
    with running() as server:
        server.stop()
        url = stores.url(server.home)
        schema = url.rpartition("=")[2]
        columns = "(version, description, success, checksum, execution_time)"
        newer = f"INSERT INTO _sqlx_migrations {columns} VALUES (9000, 'of tomorrow', true, '', 0)"
        unusable = "UPDATE schema_compatibility SET min_schema = 9000"
        stores.execute(f"SET search_path = {schema}; {newer}; {unusable}")
        for command in (["serve", "--listen", f"127.0.0.1:{harness.free_port()}"], ["project", "list"]):
            done = run_cli(server.home, *command, url=url)
            assert done.returncode != 0
        done = run_cli(server.home, "serve", "--listen", f"127.0.0.1:{harness.free_port()}", url=url)
        assert "newer oubliette (schema 9000)" in done.stderr and "use that version" in done.stderr, done.stderr
        assert stores.execute(f"SELECT MAX(version) FROM {schema}._sqlx_migrations") == "9000"


@on_postgres
def test_a_postgresql_that_is_too_old_is_refused_with_its_version(folder):
    """A newer one, whose answers are changed on their way to say that it is version 14."""
    number, version = stores.execute("SHOW server_version_num"), stores.execute("SHOW server_version")
    old = version.replace(number[:2], "14", 1)
    network = Network()
    (folder / "old").mkdir()

    def as_old(data: bytes) -> bytes:
        data = data.replace(struct.pack(">q", int(number)), struct.pack(">q", 140_005))
        return data.replace(version.encode(), old.encode())

    link = Link(network, lambda: [f"{stores.socket_dir()}/.s.PGSQL.5432"], f"{folder}/old/.s.PGSQL.5432", as_old)
    try:
        said = refused_start(folder, stores.url(folder).replace(stores.socket_dir(), f"{folder}/old"))
        assert f"is PostgreSQL {old}" in said and "needs 15 or later" in said, said
    finally:
        link.close()
        network.close()


@contextlib.contextmanager
def small_tablespace(folder: pathlib.Path) -> Iterator[tuple[str, SmallDisk]]:
    """An address whose tables are on a small disk of the database's machine."""
    with small_disk(folder / "m", megabytes=64) as disk:
        place = folder / "m" / "tables"
        place.mkdir()
        owner = os.stat(f"{stores.socket_dir()}/data")
        os.chown(place, owner.st_uid, owner.st_gid)
        for parent in (folder, folder / "m"):
            parent.chmod(0o755)
        url = stores.url(folder)
        schema, name = url.rpartition("=")[2], f"small_{os.getpid()}"
        stores.execute(f"CREATE TABLESPACE {name} LOCATION '{place}'")
        try:
            yield f"{url}&options[default_tablespace]={name}", disk
        finally:
            disk.free()
            stores.execute(f"DROP SCHEMA {schema} CASCADE")
            stores.execute(f"DROP TABLESPACE {name}")


@on_postgres
def test_a_full_database_refuses_says_so_and_goes_on_when_there_is_room(folder):
    with small_tablespace(folder) as (url, disk):
        disk.fill()
        said = refused_start(folder, url)
        assert "the disk of" in said and "is full: free some space" in said, said
        disk.free()
        server = Server(folder / "h", env={"OUBLIETTE_STORE_URL": url}).start()
        try:
            admin = server.token("admin")
            kept, refused = [], None
            while refused is None and len(kept) < 500:
                disk.fill()
                try:
                    # Text that cannot be compressed, so that each takes its place.
                    text = os.urandom(1500).hex()
                    kept.append(server.api("project_create", admin, name="p", description=text)["project_id"])
                except ToolFailed as error:
                    refused = error
            assert refused and refused.code == "unavailable" and "full" in refused.message, refused
            # What was acknowledged is there, and reads go on.
            listed = server.api("project_list", admin, limit=1000)["projects"]
            assert {row["project_id"] for row in listed} >= set(kept)
            disk.free()
            wait_until(server._ready, "the server to be ready with room in its database")
            assert server.api("project_create", admin, name="after")["project_id"]
        finally:
            server.stop()
