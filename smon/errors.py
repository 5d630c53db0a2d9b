"""The exception tree of SMon.

SMonError
├── ConfigError       a setting, an option or an argument that cannot be used
├── TraceError        an input that cannot be read, or holds nothing that can be analysed
│   ├── UnknownFormatError   no reader recognises the file
│   ├── MetaError            the meta file or layout is missing, malformed or contradicts the trace
│   └── NothingUsableError   everything was read, but no step could be kept
├── TopologyError     a layout that is malformed or contradicts itself
├── GraphError        the ops of one step do not form a dependency graph
│   ├── CycleError           ops that wait for each other
│   └── UnpairedError        a send without its receive, or the other way round
├── SimulationError   a what-if that the trace cannot answer
├── WireError         a batch or request that breaks the protocol between agent and server
├── TaskLostError     a process or a node ended before the work that it had
└── StoreError        the database, an object or the log on disk cannot be used
    ├── ConflictError        what is asked for contradicts what is stored
    ├── MissingError         there is no such thing, or it is another tenant's
    └── FencedError          another worker has taken over, so this result is not written

Every message says what was expected, what was found, and what to do. A command turns each of
them into one line on stderr and an exit code (``docs/reference/errors.md``).
"""

from __future__ import annotations

from collections.abc import Sequence


class SMonError(Exception):
    """Base of every error that SMon raises on purpose."""


class ConfigError(SMonError):
    """A setting, an option or an argument that cannot be used."""


class TraceError(SMonError):
    """An input that cannot be read, or holds nothing that can be analysed."""


class UnknownFormatError(TraceError):
    """No reader recognises the content of the file."""


class MetaError(TraceError):
    """The meta file or layout is missing, malformed, or contradicts the trace."""


class NothingUsableError(TraceError):
    """Everything was read, but no step could be kept.

    Parameters
    ----------
    message
        One sentence for a person.
    skipped
        (step, reason) of every step that was left out.
    """

    def __init__(self, message: str, skipped: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


class TopologyError(SMonError):
    """A parallel layout that is malformed or contradicts itself."""


class GraphError(SMonError):
    """The ops of one step do not form a dependency graph.

    Parameters
    ----------
    message
        One sentence for a person; it names the first few ops.
    ops
        Names of the ops involved, e.g. ``forward-recv 3 of stage 1``.
    """

    def __init__(self, message: str, ops: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ops = tuple(ops)


class CycleError(GraphError):
    """Ops that wait for each other, so that none of them can start."""


class UnpairedError(GraphError):
    """Point-to-point ops of two stages whose numbers differ."""


class SimulationError(SMonError):
    """A what-if that the trace cannot answer."""


class WireError(SMonError):
    """A batch or request that breaks the protocol between agent and server.

    Parameters
    ----------
    problem
        Stable name of what is wrong (`smon.wire.problems.Problem`), for status code and type.
    message
        One sentence for a person: expected, found, what to do. Never holds the body.
    retry_after_s
        When it is worth to try again; None: not known.
    """

    def __init__(self, problem: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.retry_after_s = retry_after_s


class TaskLostError(SMonError):
    """A process or a node ended before the work that it had."""


class StoreError(SMonError):
    """The database, an object or the log on disk cannot be used."""


class ConflictError(StoreError):
    """What is asked for contradicts what is stored."""


class MissingError(StoreError):
    """There is no such thing, or it is another tenant's."""


class FencedError(StoreError):
    """Another worker has taken over, so this result is not written."""
