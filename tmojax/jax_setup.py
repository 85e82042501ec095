"""Settings that JAX needs before its first use of a backend; every tmojax module that imports JAX imports this one.

The CPU compilers of some JAX versions return wrong numbers without an error for fused reductions. The flag below turns
the fusion that causes it off; it must be in `XLA_FLAGS` before the first computation of the process.
"""

import os
import warnings
from importlib.metadata import version

# WORKAROUND(jax<0.11.2): the YNN fusions of the CPU compiler give wrong results for a vmapped matrix-vector product
# followed by a reduction (public report jax#39103); an empty list of fusion kinds turns them off.
_FLAG = "--xla_cpu_experimental_ynn_fusion_type="
_FIXED_IN = (0, 11, 2)


def needs_workaround(jax_version: str) -> bool:
    """Say whether a JAX version string such as `0.10.1` is older than the first one that is right without the flag."""
    release = tuple(int(part) for part in jax_version.split(".")[:3] if part.isdigit())
    return release < _FIXED_IN


def setup() -> None:
    """Add the flag to `XLA_FLAGS` where the installed JAX needs it. Calling it again changes nothing.

    Warns if a backend is already in use and the flag is missing, because XLA reads the variable only once.
    """
    if not needs_workaround(version("jax")):
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG.rstrip("=") in flags:
        return
    os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}".strip()
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        warnings.warn(
            "JAX was used before tmojax was imported, so the workaround for wrong CPU results is not active; import "
            f"tmojax first or set XLA_FLAGS={_FLAG!r}",
            RuntimeWarning,
            stacklevel=2,
        )


setup()
