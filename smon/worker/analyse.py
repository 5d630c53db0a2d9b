"""A claimed window, whatever it is made of, to its result: in this process.

Flow: `smon.worker.loop`, `smon.worker.elsewhere` → **here** → `smon.worker.windows`,
`smon.worker.captures`.
"""

from __future__ import annotations

from smon.store.captures import kind_of
from smon.store.models import WindowKind, WindowState
from smon.store.work import Claim
from smon.worker.captures import analyse_capture
from smon.worker.service import Service
from smon.worker.windows import Check, analyse_window


def analyse(service: Service, claim: Claim, check: Check) -> WindowState:
    """Analyse a window and write its result.

    Parameters
    ----------
    check
        Called as the analysis goes on; raises to end it.

    Raises
    ------
    FencedError
        Another worker has taken over; nothing is written.
    MissingError
        The window does not exist any more.
    StoreError
        The database or an object cannot be used: worth another try.
    """
    with service.database.read() as session:
        kind = kind_of(session, claim.id)
    return (analyse_capture if kind is WindowKind.CAPTURE else analyse_window)(
        service, claim, check
    )
