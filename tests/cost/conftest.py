"""Shapes are checked: annotations of the cost model's arrays hold at every call."""

import sys

from jaxtyping import install_import_hook

if "tmojax.cost.timeline" not in sys.modules:
    install_import_hook(["tmojax.cost.timeline", "tmojax.cost.model"], "beartype.beartype")
