"""Faults that can be put into a synthetic job: small values, to be combined at will."""

from smon.synth.faults.base import ALWAYS, Fault, When
from smon.synth.faults.compute import ExtraCompute, JobWide, SlowCompute, ThermalRamp, Warmup
from smon.synth.faults.data import MoeLoad, PackedSequences
from smon.synth.faults.host import GcPauses, HostContention, LoaderGap, StepPause
from smon.synth.faults.network import SlowCollective, SlowP2P
from smon.synth.faults.recording import ClockError, Hang, LostRows, LostWorker

__all__ = [
    "ALWAYS",
    "ClockError",
    "ExtraCompute",
    "Fault",
    "GcPauses",
    "Hang",
    "HostContention",
    "JobWide",
    "LoaderGap",
    "LostRows",
    "LostWorker",
    "MoeLoad",
    "PackedSequences",
    "SlowCollective",
    "SlowCompute",
    "SlowP2P",
    "StepPause",
    "ThermalRamp",
    "Warmup",
    "When",
]
