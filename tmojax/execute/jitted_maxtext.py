"""A plan in the form of MaxText's configuration: `remat`, `device` or `offload` per name of an activation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tmojax.errors import InputError
from tmojax.execute.jitted_names import NameAction, NamedPlan

VALUES = {NameAction.SAVE: "device", NameAction.OFFLOAD: "offload", NameAction.RECOMPUTE: "remat"}
_KEY = re.compile(r"[a-z_][a-z0-9_]*")


def maxtext_yaml(plan: NamedPlan, keys: Mapping[str, str] | None = None) -> str:
    """The fragment of a MaxText configuration that asks for `plan`, with `remat_policy: custom`.

    `keys` maps names of the plan to MaxText's (`decoder_layer_input`, `context`, `mlpwi`, `mlpwo`, `query_proj` and so
    on; its `configs/base.yml` has those of a version); without it the names are those already. MaxText decides for all
    layers together, so names that become one key must have one decision.
    Raises InputError for names that are no keys, for different decisions under one key, and for unknown names in
    `keys`.
    """
    keys = keys or {}
    unknown = [name for name in keys if name not in plan.actions]
    if unknown:
        raise InputError(f"keys: the plan has no name {unknown[0]!r}; it has {', '.join(plan.actions) or 'none'}")
    chosen: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, action in plan.actions.items():
        key = keys.get(name, name)
        if not _KEY.fullmatch(key):
            raise InputError(f"name {name!r}: is no key of a MaxText configuration; map it to one with `keys`")
        if chosen.setdefault(key, VALUES[action]) != VALUES[action]:
            raise InputError(
                f"key {key!r}: the plan has {chosen[key]} for {first[key]!r} and {VALUES[action]} for {name!r}, and "
                f"MaxText decides for all layers together; plan with tie_layers"
            )
        first.setdefault(key, name)
    lines = ["remat_policy: custom", *(f"{key}: {value}" for key, value in chosen.items())]
    return "\n".join(lines) + "\n"
