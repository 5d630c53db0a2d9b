"""The recorder: runs inside the trainer, and never raises into it.

``Recorder.from_env()`` is the way in; ``docs/reference/agent.md`` has an example.
"""

from ingest_agents.recorder.recorder import Open, Recorder

__all__ = ["Open", "Recorder"]
