"""Parallel layout of a job: sizes of each dimension, and ranks to coordinates and back.

Order of ranks: Megatron-LM's default, tp-cp-dp-pp with tp fastest
(``rank = tp + TP * (cp + CP * (dp + DP * pp))``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from smon.errors import TopologyError

#: Larger sizes are typing errors or attacks: no job has a million replicas.
MAX_SIZE = 1 << 20

_PART = re.compile(r"(tp|cp|dsp|ep|dp|pp|vpp)(\d{1,7})")


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank; those of its worker are `dp` and `stage`."""

    dp: int
    stage: int
    tp: int
    cp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel dimensions; each at least 1.

    Attributes
    ----------
    dp, pp, tp, cp
        Data, pipeline, tensor and context parallel size; their product is the world size.
    ep
        Expert parallel size; lives inside the data-parallel ranks.
    vpp
        Model chunks per pipeline stage (virtual pipeline stages).
    """

    dp: int
    pp: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
                raise TopologyError(
                    f"{field.name} size must be a whole number from 1 to {MAX_SIZE}, found {size!r}"
                )

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.dp * self.pp * self.tp * self.cp

    def rank(self, dp: int, stage: int, tp: int = 0, cp: int = 0) -> int:
        """Global rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * stage))

    def place(self, rank: int) -> Place:
        """Coordinates of a global rank; `rank` in reverse.

        Raises
        ------
        TopologyError
            There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"expected a rank below {self.world_size}, found {rank}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        stage, dp = divmod(rest, self.dp)
        return Place(dp, stage, tp, cp)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "vpp": self.vpp}
        extra = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "-".join([f"dp{self.dp}", f"pp{self.pp}", *extra])


def parse_layout(text: str) -> Layout:
    """Read ``tp4-dp4-pp4``: parts in any order, left-out sizes are 1.

    ``dsp`` (sequence data parallel, the name in ndtimeline's meta files) means ``cp``.

    Raises
    ------
    TopologyError
        Unknown or repeated part, or a size that is not from 1 to `MAX_SIZE`.
    """
    sizes: dict[str, int] = {}
    for part in text.strip().lower().split("-"):
        match = _PART.fullmatch(part)
        if match is None:
            raise TopologyError(
                f"layout {text!r}: expected parts such as tp4-cp2-dp4-pp2-vpp2, found {part!r}"
            )
        name = "cp" if match[1] == "dsp" else match[1]
        if name in sizes:
            raise TopologyError(f"layout {text!r}: {name} is given twice")
        sizes[name] = int(match[2])
    return replace(Layout(dp=1, pp=1), **sizes)


def layout_from_meta(meta: Mapping[str, object]) -> Layout:
    """Read the sizes of a meta file (``dp_size``, ``pp_size`` …; ``docs/formats.md``).

    Raises
    ------
    TopologyError
        A needed size is missing or malformed, or ``world_size`` is not the product of the sizes.
    """
    sizes = {
        name: _size(meta, key)
        for name, key in (
            ("dp", "dp_size"),
            ("pp", "pp_size"),
            ("tp", "tp_size"),
            ("cp", "cp_size" if "cp_size" in meta else "dsp_size"),
            ("ep", "ep_size"),
            ("vpp", "vpp_size"),
        )
    }
    layout = Layout(**sizes)
    declared = meta.get("world_size", layout.world_size)
    if declared != layout.world_size:
        raise TopologyError(
            f"world_size {declared!r} is not the product of the sizes, {layout.world_size} "
            f"({layout}): correct the meta file"
        )
    return layout


def _size(meta: Mapping[str, object], key: str) -> int:
    required = key in ("dp_size", "pp_size")
    if required and key not in meta:
        raise TopologyError(f"the meta file has no {key}: dp_size and pp_size are needed")
    value = meta.get(key, 1)
    if not isinstance(value, int):
        raise TopologyError(f"{key} must be a whole number, found {value!r}")
    return value
