"""Compilation of the simulator's inner loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile with numba on the first call and keep the machine code on disk where a cache directory can be written.

    numba raises RuntimeError at decoration when neither the package's directory nor the user's cache is writable; then
    the function is compiled anew in each process. Compiled functions call only functions of their own file, because
    numba invalidates its cache by the time stamp of that one file.
    """
    try:
        return njit(cache=True, error_model="numpy", **options)(function)
    except RuntimeError:
        return njit(error_model="numpy", **options)(function)


def compiled_inner(function: Callable[..., Any]) -> Any:
    """The same for functions that only compiled ones call: without entry from Python, which takes half of their compile
    time.
    """
    return compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
