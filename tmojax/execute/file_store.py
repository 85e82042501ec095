"""The NVMe tier: every copy is a file in a folder of the drive. Files are used again, step after step."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True, eq=False)
class FileCopy:
    """An array in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int

    def read(self) -> np.ndarray:
        """The array, in memory of its own."""
        # As bytes, because NumPy does not read all of JAX's types from files.
        return np.fromfile(self.path, np.uint8).view(self.dtype).reshape(self.shape)


class FileStore:
    """Copies of one device on a drive. The files are gone when the store is.

    `allocated`: files made so far; `reused`: copies that went into a file from before.
    """

    def __init__(self, folder: str | Path) -> None:
        """`folder`: an existing folder on the drive."""
        self._folder = tempfile.TemporaryDirectory(dir=folder, prefix="tmojax-")
        self._free: dict[int, list[Path]] = {}
        self._lock = threading.Lock()
        self.allocated = self.reused = 0

    def store(self, array: Array) -> FileCopy:
        """Write an array; it is on the drive, or in the system's write cache, on return."""
        value = np.ascontiguousarray(array)
        path = self._take(value.nbytes)
        value.reshape(-1).view(np.uint8).tofile(path)
        return FileCopy(path, value.shape, value.dtype, value.nbytes)

    load = store

    def give_back(self, copy: FileCopy) -> None:
        """The copy is released; nothing reads it any more."""
        with self._lock:
            self._free.setdefault(copy.nbytes, []).append(copy.path)

    def _take(self, size_bytes: int) -> Path:
        with self._lock:
            if self._free.get(size_bytes):
                self.reused += 1
                return self._free[size_bytes].pop()
            self.allocated += 1
            return Path(self._folder.name) / f"{self.allocated}"
