"""A real wire server whose answers the test writes down: for the command line's own behaviour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from baftd.wire.server import Server


class AnsweringServer:
    """Serves in a thread; `answers` maps a request's class to the replies that it gets."""

    def __init__(self, socket_path: Path, answers: Mapping[type, Sequence[Any]]) -> None:
        self._path = socket_path
        self.answers = dict(answers)
        self._bound = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="answering server")
        self.received: list[Any] = []

    def __enter__(self) -> AnsweringServer:
        self._thread.start()
        assert self._bound.wait(10), "the answering server did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the socket and end the thread. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        server = Server(self._path)
        server.bind()
        self._bound.set()
        answering = asyncio.ensure_future(self._answer(server))
        await self._stop.wait()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await server.close()

    async def _answer(self, server: Server) -> None:
        while True:
            incoming = await server.recv()
            self.received.append(incoming.message)
            for reply in self.answers[type(incoming.message)]:
                reply.id = incoming.message.id
                server.send(incoming.peer, reply)
