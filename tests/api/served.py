"""A server on a real port, with ingest, in a thread of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn
from prometheus_client import CollectorRegistry

from smon.api.access import TokenGate
from smon.api.app import create_app
from smon.api.routes.common import Seams
from smon.ingest.service import IngestService
from tests.api.filled import World


@contextmanager
def served(world: World, seams: Seams | None = None) -> Iterator[tuple[str, World]]:
    """The address of the server, and the world with its application."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    ingest = IngestService(
        world.settings, world.database, world.objects, registry=CollectorRegistry()
    )
    app = create_app(
        world.settings,
        world.database,
        world.objects,
        ingest,
        TokenGate(world.database),
        seams or Seams(task_wait_s=0.05),
    )
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none")
    )

    async def main() -> None:
        ingest.start()
        try:
            await server.serve([listener])
        finally:
            await ingest.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", replace(world, app=app)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
