"""Fixtures: a server shared by the tests of a module, its admin token, a project, both MCP lifecycles."""

from __future__ import annotations

import os
import subprocess

import pytest

import harness


def pytest_runtest_logreport(report):
    """Writes the names of failed tests into the file that `OUBLIETTE_TEST_FAILED` names, one a line."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if report.failed and not is_worker and (file := os.environ.get("OUBLIETTE_TEST_FAILED")):
        with open(file, "a") as failed:
            failed.write(f"{report.nodeid}\n")


@pytest.fixture(scope="session", autouse=True)
def programs():
    """Builds the programs, unless `OUBLIETTE_BIN_DIR` names built ones."""
    if "OUBLIETTE_BIN_DIR" not in os.environ:
        subprocess.run(["cargo", "build", "--workspace", "--bins", "--quiet"], cwd=harness.ROOT, check=True)
    for name in ("oubliette", "oubliette-client", "oubliette-agent"):
        assert (harness.BIN / name).exists(), f"{name} is not built"


@pytest.fixture(scope="module")
def server():
    with harness.running() as server:
        yield server


@pytest.fixture(scope="module")
def admin(server):
    return server.token("admin")


@pytest.fixture
def project(server, admin):
    return server.api("project_create", admin, name="test")["project_id"]


@pytest.fixture(params=[harness.LEGACY, harness.MODERN])
def mode(request):
    """Both lifecycles of MCP."""
    return request.param
