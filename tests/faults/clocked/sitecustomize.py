"""Runs before anything else in a process that is to have a clock of its own."""

import os

if "FAULTS_CLOCK" in os.environ:
    from tests.faults.clocks import HostClock, install

    install(HostClock.of(os.environ["FAULTS_CLOCK"]))
