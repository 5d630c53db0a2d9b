"""An agent with a bug: it counts a batch as delivered before the server has it.

Checkpoint and segments go on at the moment of sending, so that an agent that is killed between
sending and the answer has nothing left to send again.
"""

from __future__ import annotations

import sys
from typing import Any

import ingest_agents.agent
from ingest_agents.cli import main
from ingest_agents.payload import last_seq
from ingest_agents.shipping import Shipper
from smon.wire import Batch


class EagerShipper(Shipper):
    """Lets the spool forget what is about to be sent."""

    def message(self) -> Batch | None:
        """The batch to send; the spool has forgotten it."""
        message = super().message()
        if message is not None:
            local = self.numbering.local(last_seq(message) + 1)
            self._acknowledged = max(self._acknowledged, local)
            self.save()
            self._release(local)
        return message


if __name__ == "__main__":
    agent: Any = ingest_agents.agent
    agent.Shipper = EagerShipper
    sys.exit(main())
