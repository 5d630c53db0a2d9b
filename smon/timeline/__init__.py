"""The actual and the ideal run side by side: as a trace file for Perfetto, or as marks for a page.

`kinds` says what is drawn where, `spans` puts ops on a common time axis, `events` writes them as a
trace file and `output` to the disk; `marks` and `waits` are for the page, `reference` carries what
a part of a window needs of the whole.

Flow: `smon.simulate` → `smon.prepare` → **here** → a file, `smon.worker.tasks`.
"""

from __future__ import annotations

from smon.timeline.events import write_timeline
from smon.timeline.kinds import Choice, Kind

__all__ = ["Choice", "Kind", "write_timeline"]
