"""What the agent could read here, in words: ``smon-agent check``.

Flow: `gpu`, `network`, `host` → **here** → `ingest_agents.check`. Changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from ingest_agents.sources.counters.amd import AmdGpus
from ingest_agents.sources.counters.gpu import GpuReading, NvidiaGpus, find_nvml, throttle_words
from ingest_agents.sources.counters.host import Host
from ingest_agents.sources.counters.network import Network
from ingest_agents.sources.counters.patient import Patient, Seams
from ingest_agents.sources.counters.trainers import trainer_of

#: Whoever asks sits and waits.
_PATIENCE_S: Final = 5.0


def preview(root: Path = Path("/"), *, find: Callable[[], Any | None] = find_nvml) -> Iterator[str]:
    """Lines about the host, its network cards and its GPUs.

    Parameters
    ----------
    root
        Above ``proc`` and ``sys``.
    find
        Gives the module ``pynvml``, or None.
    """
    yield "counters"
    facts = Host(root).facts()
    yield f"  host: {', '.join(f'{name} {value}' for name, value in facts.items())}"
    rate = Network(root).read().get("nic_rate_gbps")
    yield "  network: no card that is up" if rate is None else f"  network: from {rate:g} Gbit/s on"
    module, amd = find(), AmdGpus(root)
    if module is not None:
        nvidia = NvidiaGpus(module)
        yield from _gpus(nvidia.read, nvidia.driver, root)
    elif amd.read():
        yield from _gpus(amd.read, lambda: "amdgpu", root)
    else:
        yield "  GPUs: not read: nvidia-ml-py is not installed, and there are none of AMD"


def _gpus(
    read: Callable[[], list[GpuReading]], driver: Callable[[], str | None], root: Path
) -> Iterator[str]:
    over = threading.Event()
    patient = Patient(read, Seams(start=lambda run: _start(run, over)))
    patient.begin()
    over.wait(_PATIENCE_S)
    taken = patient.take()
    if taken is None:
        yield f"  GPUs: not read: {patient.failure or 'the driver does not answer'}"
        return
    yield f"  GPUs: {len(taken.value)}, driver {driver() or 'unknown'}"
    for reading in taken.value:
        yield f"    {_gpu(reading, root)}"


def _start(run: Callable[[], None], over: threading.Event) -> None:
    def whole() -> None:
        run()
        over.set()

    threading.Thread(target=whole, name="smon-counters", daemon=True).start()


def _gpu(reading: GpuReading, root: Path) -> str:
    if "gpu_lost" in reading.values:
        return f"{reading.uuid}: lost"
    clock = reading.values.get("gpu_clock_mhz")
    parts = [] if clock is None else [f"{clock:g} MHz"]
    parts += throttle_words(reading.reasons)
    parts += [_whose(holder.pid, root) for holder in reading.holders]
    return f"{reading.uuid}: {', '.join(parts) or 'nothing is known'}"


def _whose(pid: int, root: Path) -> str:
    trainer = trainer_of(root, pid)
    if trainer is None:
        return f"process {pid}, which may not be looked at"
    if trainer.rank is None:
        return f"process {pid} of no rank"
    return f"rank {trainer.rank} of {trainer.job or 'a job without a name'}"
