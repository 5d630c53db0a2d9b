"""The layout of a job, from the mesh of its devices.

Flow: `torch.distributed.device_mesh.DeviceMesh` → **here** → `smon.topology.Layout`.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

from smon.errors import ConfigError
from smon.topology import Layout, parse_layout

#: What the dimensions of a mesh are called, by ours; the slowest first, as ranks are numbered.
_NAMES: Final = {
    "pp": ("pp",),
    "dp": (
        "dp",
        "ddp",
        "fsdp",
        "dp_replicate",
        "dp_shard",
        "replicate",
        "shard",
        "dp_shard_mod_ep",
        "dp_shard_in_ep",
    ),
    "cp": ("cp",),
    "tp": ("tp",),
}
_OURS: Final = {name: ours for ours, names in _NAMES.items() for name in names}
_ORDER: Final = tuple(_NAMES)


def layout_of(given: Any) -> Layout | None:  # noqa: ANN401  # a mesh is torch's
    """A layout that was given as one, as text, or as a mesh of all ranks; None stays None.

    Raises
    ------
    ConfigError
        The mesh has a dimension that is not known, or numbers its ranks in another order.
    """
    if given is None or isinstance(given, Layout):
        return given
    if isinstance(given, str):
        return parse_layout(given)
    names = given.mesh_dim_names or ("dp",) * len(given.shape)
    sizes: dict[str, list[int]] = {ours: [] for ours in _ORDER}
    for name, size in zip(names, given.shape, strict=True):
        sizes[_ours(name, names)].append(int(size))
    order = [_ORDER.index(_ours(name, names)) for name in names]
    ranks = given.mesh.flatten().tolist()
    if order != sorted(order) or ranks != list(range(len(ranks))):
        raise ConfigError(
            f"layout: expected a mesh of all ranks in the order {', '.join(_ORDER)}, found "
            f"{', '.join(names)}: set SMON_LAYOUT only if ranks are numbered like that"
        )
    return Layout(**{ours: prod(found) for ours, found in sizes.items()})


def _ours(name: str, names: tuple[str, ...]) -> str:
    ours = _OURS.get(name) or ("dp" if len(names) == 1 else None)
    if ours is None:
        raise ConfigError(
            f"layout: expected dimensions such as pp, dp, cp, tp in the mesh, found {name!r}"
        )
    return ours
