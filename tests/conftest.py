"""JAX in tests, and in the processes that tests start: old-style random keys are errors, and compiled programmes are
kept in a folder that git ignores. Broadcasting between ranks stays allowed: the networks that are imported here do it.

Environment variables rather than `jax.config`, so that tests that need no JAX do not load it.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

assert "jax" not in sys.modules, "JAX was imported before its settings for tests were made"
os.environ["JAX_LEGACY_PRNG_KEY"] = "error"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))


@pytest.fixture
def interrupts():
    """Ctrl-C as in the foreground; what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
