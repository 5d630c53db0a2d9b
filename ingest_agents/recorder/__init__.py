"""The recorder: runs inside the trainer, and never raises into it.

`attach` is the way in for a plain PyTorch loop, ``Recorder.from_env()`` for a loop that says itself
what it does; ``docs/reference/agent.md`` has examples of both.
"""

from typing import TYPE_CHECKING, Any

from ingest_agents.recorder.recorder import Open, Recorder

if TYPE_CHECKING:
    from ingest_agents.recorder.plain import Attached, attach

__all__ = ["Attached", "Open", "Recorder", "attach"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # what is imported at its first use
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ingest_agents.recorder import plain

    return getattr(plain, name)
