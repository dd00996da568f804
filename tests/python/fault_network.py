"""Networks of fault rounds: connections pass through this process, where they can be held up or broken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import Any, Callable, Iterable

Address = str | int
"""A Unix socket's path, or a port of the loopback interface."""


class Network:
    """One thread that passes everything on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function, or awaits what it returns, on the network's thread."""

        async def run() -> Any:
            done = function()
            return await done if asyncio.iscoroutine(done) else done

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class Link:
    """Takes connections and passes them on to the first target that accepts."""

    def __init__(
        self,
        network: Network,
        targets: Callable[[], Iterable[Address]],
        listen: Address = 0,
        change: Callable[[bytes], bytes] = bytes,
    ):
        """`change` is done to each piece of data that passes."""
        self._network, self._targets, self._change = network, targets, change
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._listener = network.call(lambda: self._listen(listen))
        self.port = self._listener.sockets[0].getsockname()[1] if isinstance(listen, int) else 0

    async def _listen(self, at: Address) -> asyncio.Server:
        if isinstance(at, str):
            return await asyncio.start_unix_server(self._serve, at)
        return await asyncio.start_server(self._serve, "127.0.0.1", at)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        far = None
        try:
            far = None if self._refusing else await self._connect()
            if far is not None:
                self._writers.add(far[1])
                ways = [asyncio.ensure_future(self._pass_on(*ends)) for ends in ((reader, far[1]), (far[0], writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
        finally:
            for end in (writer, far[1]) if far else (writer,):
                self._writers.discard(end)
                end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for target in self._targets():
            with contextlib.suppress(OSError):
                if isinstance(target, str):
                    return await asyncio.open_unix_connection(target)
                return await asyncio.open_connection("127.0.0.1", target)
        return None

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._passing.wait()
                target.write(self._change(data))
                await target.drain()

    def cut(self) -> None:
        """Connections stay open, and nothing passes, as when a cable is pulled."""
        self._network.call(self._passing.clear)

    def restore(self) -> None:
        """What was held up passes now."""
        self._network.call(self._passing.set)

    def break_off(self) -> None:
        """Ends all connections."""
        self._network.call(lambda: [writer.transport.abort() for writer in list(self._writers)])

    def refuse(self, refusing: bool) -> None:
        """Ends all connections, and new ones at once, until it is told to accept again."""
        self._refusing = refusing
        if refusing:
            self.break_off()

    def close(self) -> None:
        self._network.call(self._listener.close)
        self.break_off()


def balancer(network: Network, servers: list[Link]) -> Link:
    """A plain TCP load balancer: each connection goes to the next server that accepts it."""
    turn = itertools.count()

    def in_turn() -> list[Address]:
        first = next(turn) % len(servers)
        return [link.port for link in servers[first:] + servers[:first]]

    return Link(network, in_turn)
