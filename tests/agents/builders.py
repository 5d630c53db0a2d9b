"""What tests of the agent share: streams, batches, an agent that tests turn by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ingest_agents.agent import Agent, Source
from ingest_agents.config import AgentSettings
from ingest_agents.link import Link
from ingest_agents.payload import OpRow, ops_batch
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.topology import Layout
from smon.wire import Batch
from tests.agents.fake import Fake, Wire

#: Segments of a few batches, and no cap.
SMALL = SpoolLimits(segment_bytes=1500, segment_s=1e9, cap_bytes=0)


def spec(key: str = "job/0/host/0", *, source: str = "test", epoch: int = 0) -> StreamSpec:
    """A stream of rank 0 of a job of two."""
    return StreamSpec(
        key=key,
        job="job",
        attempt=0,
        layout=Layout(dp=2, pp=1),
        mode="live",
        time="unix",
        host="host",
        source=source,
        ranks=(0,),
        epoch=epoch,
    )


def rows(first: int, count: int, *, step: int = 0) -> list[OpRow]:
    """Ops whose starts are `first`, `first + 1`, …: each is one of a kind."""
    return [
        OpRow(step, 0, 0, 0, "forward-compute", first + number, noise(first + number), number)
        for number in range(count)
    ]


def chance_of(seed: int) -> random.Random:
    """Chance that is the same every time."""
    return random.Random(seed)  # noqa: S311  # nothing here is a secret


def noise(number: int) -> int:
    """A duration that looks like no other, so that batches do not compress too well."""
    return number * 2654435761 % 1_000_000_007


def batch(first: int, count: int = 3, *, step: int = 0, done: int | None = None) -> Batch:
    """A batch of such ops."""
    return ops_batch(rows(first, count, step=step), steps_done=done)


def write(
    root: Path,
    batches: int,
    *,
    each: int = 3,
    key: str = "job/0/host/0",
    limits: SpoolLimits = SMALL,
    end: bool = True,
) -> Path:
    """A stream of so many batches, one per step, in the spool; its folder."""
    writer = SpoolWriter(root, spec(key), limits)
    for number in range(batches):
        writer.append(batch(number * each, each, step=number, done=number))
    if end:
        writer.end("complete")
    writer.close()
    return writer.folder


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def settings(root: Path, **changed: object) -> AgentSettings:
    """Settings of an agent that sends in the caller's thread, and as soon as it can."""
    base = AgentSettings(spool_dir=str(root), poll_s=0.01, retry_min_s=0.5, stop_s=5.0)
    # 0 is for tests alone: no thread.
    return replace(replace(base, senders=0), **changed)  # type: ignore[arg-type]  # any field


class Hand:
    """An agent that does a round when it is told to.

    Attributes
    ----------
    said
        (name, sentence) of all that it told people.
    """

    def __init__(
        self,
        fake: Fake,
        root: Path,
        *,
        sources: Sequence[Source] = (),
        make: Callable[..., Agent] = Agent,
        **changed: object,
    ) -> None:
        self.clock, self.said = Clock(), list[tuple[str, str]]()
        link = Link(lambda: Wire(fake), lambda: None, "host")
        self.agent = make(
            settings(root, **changed),
            link,
            sources,
            lambda name, text: self.said.append((name, text)),
            clock=self.clock,
            wall=self.clock,
        )

    def rounds(self, count: int = 1, *, seconds: float = 61.0) -> None:
        """So many rounds, with time between them for every pause to end."""
        for _ in range(count):
            self.agent.round()
            self.clock.now += seconds

    def until(self, done: Callable[[], bool], limit: int = 60) -> None:
        """Rounds until something is so."""
        for _ in range(limit):
            if done():
                return
            self.rounds()
        raise AssertionError(f"not done after {limit} rounds; it said {self.said[-5:]}")

    def kill(self) -> None:
        """End as `kill -9` does: nothing is written any more."""
        self.agent._lock.release()

    def sentences(self, name: str) -> list[str]:
        """What it said under this name."""
        return [text for key, text in self.said if key == name and text]
