"""The TypeScript client, built, and the releases of Node it runs on."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from harness import ROOT

CLIENT = ROOT / "clients" / "typescript"


def node_programs() -> list[str]:
    """The system's Node and the one the end-to-end tests install, where they are there."""
    installed = ROOT / "tests" / "node" / "node_modules" / "node" / "bin" / "node"
    found = [shutil.which("node"), str(installed) if installed.exists() else None]
    return [program for program in found if program]


@pytest.fixture(scope="session")
def typescript_client() -> pathlib.Path:
    """`clients/typescript`, built: by an earlier step of the tests, or here."""
    if not (CLIENT / "dist" / "index.js").exists():
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-save", "--no-audit", "--no-fund"], cwd=CLIENT, check=True)
        subprocess.run(["npm", "run", "build"], cwd=CLIENT, check=True)
    return CLIENT
