"""Named scenarios for the command line, each with a few words on what it shows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from smon.errors import ConfigError
from smon.synth import causes
from smon.synth.catalogue import CATALOGUE, Preset
from smon.synth.schedule import Schedule
from smon.synth.spec import Scenario

__all__ = ["PRESETS", "Preset", "scenario"]


#: Size of the job that the demo analyses.
_DEMO: Final = Scenario(dp=8, pp=4, tp=8, microbatches=16, steps=12)

PRESETS: Final = {
    "gpipe": Preset("all forwards, then all backwards", Scenario(schedule=Schedule.GPIPE)),
    "1f1b": Preset("one forward, one backward", Scenario(schedule=Schedule.ONE_F_ONE_B)),
    "interleaved": Preset(
        "two model chunks per stage", Scenario(schedule=Schedule.INTERLEAVED, vpp=2)
    ),
    "zero-bubble": Preset(
        "weight gradients fill the bubbles (ZB-H1)", Scenario(schedule=Schedule.ZERO_BUBBLE)
    ),
    "slow-worker": Preset(
        "the compute of worker (5,2) takes 1.5 times as long",
        replace(_DEMO, causes=(causes.slow_gpu(5, 2, 1.5),)),
    ),
    # Close to the public trace ST (docs/method.md section 8), whose last stage takes 2.1 times as
    # long forward and 1.4 times backward.
    "long-stage": CATALOGUE["C05"],
    "healthy": Preset("nothing is slow", _DEMO),
    **CATALOGUE,
}


def scenario(name: str, /, **overrides: Any) -> Scenario:  # noqa: ANN401  # fields of many types
    """The named scenario, called by that name, with some fields of `Scenario` replaced.

    Other `faults` take the place of all that goes wrong in it, its causes included.

    Raises
    ------
    ConfigError
        No such name or field, or values that do not go together.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(
            f"expected one of the scenarios {', '.join(PRESETS)}, found {name!r}: choose one"
        )
    known = [field.name for field in fields(Scenario)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ConfigError(
            f"expected fields of a scenario ({', '.join(known)}), found {', '.join(unknown)}: "
            "correct the name"
        )
    if "faults" in overrides:
        overrides = {"causes": (), **overrides}
    return replace(preset.scenario, **{"name": name, **overrides})
