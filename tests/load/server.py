"""A server process for the load generator: prints its port, serves until SIGTERM, prints events."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select

from smon.api.access import gate_for
from smon.api.app import create_app
from smon.api.ingest import FastLane
from smon.api.ops import OpsServer
from smon.api.protocol import bounded_protocol
from smon.config import Settings
from smon.ingest.service import IngestService
from smon.store.database import Database
from smon.store.models import Stream
from smon.store.objects import Objects
from smon.store.schema import upgrade


def main(folder: str) -> None:
    """Serve with the data in this folder."""
    settings = Settings(
        data_dir=Path(folder),
        port=0,
        max_connections_per_address=1024,
        min_free_bytes=0,
        # On a fast machine the log is behind at the end; all of it is to be counted.
        stop_timeout_s=50.0,
    )
    database, objects = Database(settings.database), Objects(settings.traces)
    upgrade(database)
    registry = CollectorRegistry()
    gate = gate_for(settings, database)
    service = IngestService(settings, database, objects, registry=registry)
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(settings, database, objects, service, gate)
    config = uvicorn.Config(
        FastLane(app, service, gate),
        http=bounded_protocol(settings, registry),
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    ops = OpsServer(settings, registry, service.ready)
    ops.start()

    # uvicorn stops on SIGTERM and then raises it again: the log is to be moved on before the end.
    signal.signal(signal.SIGTERM, lambda *_: None)

    async def serve() -> None:
        service.start()
        print(listener.getsockname()[1], flush=True)  # noqa: T201  # read by the generator
        await uvicorn.Server(config).serve([listener])
        await service.stop()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())
    ops.stop()
    with database.read() as session:
        print(session.scalar(select(func.sum(Stream.events))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
