"""Several servers on one PostgreSQL, and a load balancer in front of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import selectors
import signal
import socket
import tempfile
import threading
from typing import Any, AsyncIterator, Iterator

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import stores
from harness import DEADLINE, MODERN, Mcp, Server

KEY = "a-key-of-the-tests-that-no-log-has"


class Member(Server):
    """One server of a cluster."""

    def __init__(self, home: pathlib.Path, shared: pathlib.Path, config: str = "", key: str = KEY):
        super().__init__(home)
        cluster = f'[cluster]\nadvertise = "{self.url}"\nkey_env = "TEST_CLUSTER_KEY"\n'
        (home / "oubliette.toml").write_text(f"{cluster}{config}")
        self.env = {"OUBLIETTE_STORE_URL": stores.url(shared), "TEST_CLUSTER_KEY": key}

    def cli(self, *args: str, check: bool = True, **kwargs: Any):
        return super().cli(*args, check=check, **{"env": {**os.environ, **self.env}, **kwargs})

    def freeze(self) -> None:
        """Stops its processes' progress, as a machine without memory or power does."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)


class Servers:
    """All servers of a cluster. Definitions are stored at each."""

    def __init__(self, members: list[Member]):
        self.members = members

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __getitem__(self, at: int) -> Member:
        return self.members[at]

    def put_agent(self, slug: str, token: str, turns: list | None = None, **definition: Any) -> None:
        for member in self.members:
            member.put_agent(slug, token, turns, **definition)

    def put_tool(self, id: str, token: str, **definition: Any) -> None:
        for member in self.members:
            member.put_tool(id, token, **definition)


@contextlib.contextmanager
def cluster(count: int = 3, config: str = "", start: bool = True) -> Iterator[Servers]:
    """Servers on one database, stopped at the end; with `start=False` the test starts them."""
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        root = pathlib.Path(folder)
        members = [Member(root / f"h{n}", root, config.replace("ROOT", folder)) for n in range(count)]
        try:
            for member in members if start else ():
                member.start()
            yield Servers(members)
        finally:
            for member in members:
                if member.process and member.process.poll() is None:
                    member.thaw()
                    member.stop()


class Balancer:
    """A plain TCP load balancer: each connection goes to the next server."""

    def __init__(self, servers: Servers):
        self._ports = itertools.cycle([member.port for member in servers])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections: list[int] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                port = next(self._ports)
                self.connections.append(port)
                threading.Thread(target=self._forward, args=(client, port), daemon=True).start()

    def _forward(self, client: socket.socket, port: int) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as server:
            other = {client: server, server: client}
            with selectors.DefaultSelector() as ready:
                for end in other:
                    ready.register(end, selectors.EVENT_READ)
                while True:
                    for key, _ in ready.select():
                        end = key.fileobj
                        data = end.recv(65536)  # type: ignore[union-attr]
                        if not data:
                            return
                        other[end].sendall(data)  # type: ignore[index]

    @contextlib.asynccontextmanager
    async def mcp(self, token: str, mode: str = MODERN, **options: Any) -> AsyncIterator[Mcp]:
        """The Python SDK's client, with a new connection for every request."""
        headers = {"Authorization": f"Bearer {token}"}
        limits = httpx2.Limits(max_keepalive_connections=0)
        timeout = httpx2.Timeout(DEADLINE, read=300)
        async with httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits) as http:
            transport = streamable_http_client(f"{self.url}/mcp", http_client=http)
            if "logging_callback" in options:
                options.setdefault("log_level", "info")
            async with Client(transport, mode=mode, cache=None, **options) as client:
                yield Mcp(client)

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> "Balancer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
