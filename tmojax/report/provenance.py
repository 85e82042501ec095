"""Where a run's numbers come from: versions, devices, seed, command line, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("tmojax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "numba", "highspy", "matplotlib")


def provenance(*, seed: int, command_line: Sequence[str]) -> dict[str, Any]:
    """The content of provenance.json as JSON values. No host or user names are recorded.

    `devices` are those of JAX where the process has started it, else null (planning needs no accelerator).
    """
    return {
        "command_line": list(command_line),
        "seed": seed,
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "devices": _jax_devices(),
        "git_commit": git_commit(Path(__file__).parent),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "tmojax" not in found:
        found["tmojax"] = "not installed"
    return found


def _jax_devices() -> list[str] | None:
    jax = sys.modules.get("jax")
    return None if jax is None else [str(device) for device in jax.devices()]


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout that `folder` is in, with `+changes` if tracked files differ; None outside of one."""
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
        if not (Path(top) / "tmojax").is_dir():
            return None  # installed inside some other project's checkout
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ("git", "-C", str(folder), *arguments), capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
