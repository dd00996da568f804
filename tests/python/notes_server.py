"""An MCP server made with the Python SDK: it writes notes in the workspace, and can be slow or die on request."""

import os
import pathlib
import time

from mcp.server import MCPServer

server = MCPServer("notes")


@server.tool()
def add(text: str) -> str:
    """Adds a note to the workspace."""
    with pathlib.Path("notes.txt").open("a") as notes:
        notes.write(text + "\n")
    return f"noted: {text}"


@server.tool()
def slow(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """Kills its own process in the middle of the call."""
    os._exit(1)


@server.tool()
def environment() -> dict[str, str]:
    """What it can see of its environment."""
    return dict(os.environ)


if __name__ == "__main__":
    server.run("stdio")
