"""Codecs of a plan on real arrays: conversion to a smaller floating-point type, and back.

A machine says of a codec how many bytes it makes and how fast it is; what it does with numbers is said by its name,
that of a JAX type such as `bfloat16` or `float8_e4m3fn`. Numbers beyond the type's range become its largest ones;
infinity stays infinite, or becomes NaN in a type without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.execute.segments import array_bytes, workspace_bytes
from tmojax.problem import Codec

Array = Any
CODEC_TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")


class Recoding:
    """A codec for arrays of one shape and type, compiled for one device.

    `encode(array)`, `decode(array)` return new arrays; the operand stays. `encoded_bytes`: of the encoded array;
    `workspace_bytes`: what the compiler needs beside operand and result.
    """

    def __init__(self, codec: Codec, shape: jax.ShapeDtypeStruct, device: Any, where: str) -> None:
        """Compile. `where` names instruction and tensor in messages.

        Raises InputError for a codec that no type stands for, an array without floating-point numbers, and bytes or
        workspace beyond what the machine says of the codec.
        """
        if codec.name not in CODEC_TYPES:
            raise InputError(
                f"{where}: codec {codec.name!r} has no meaning for real numbers; name it in the machine after the type "
                f"that it converts to ({', '.join(CODEC_TYPES)}), or plan without the action 'compress'"
            )
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            raise InputError(
                f"{where}: codec {codec.name!r} converts floating-point numbers, and these are {shape.dtype}; plan "
                f"without compressing it"
            )
        small = jnp.dtype(codec.name)
        plain, encoded = shape, jax.ShapeDtypeStruct(shape.shape, small)
        self.encoded_bytes = array_bytes(encoded)
        planned = codec.encoded_bytes(array_bytes(plain))
        if self.encoded_bytes > planned:
            raise InputError(
                f"{where}: codec {codec.name!r} makes {self.encoded_bytes} bytes of {array_bytes(plain)}, and the "
                f"machine says {planned}; set its ratio to {small.itemsize}/{plain.dtype.itemsize}"
            )
        largest = min(float(jnp.finfo(small).max), float(jnp.finfo(plain.dtype).max))

        def shrink(x: Array) -> Array:
            return jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest)).astype(small)

        sharding = SingleDeviceSharding(device)
        self.encode = _compiled(shrink, plain, sharding)
        self.decode = _compiled(lambda x: x.astype(plain.dtype), encoded, sharding)
        needed = max(workspace_bytes(self.encode, self.encoded_bytes), workspace_bytes(self.decode, array_bytes(plain)))
        self.workspace_bytes = needed
        if needed > codec.workspace_bytes(array_bytes(plain)):
            raise InputError(
                f"{where}: codec {codec.name!r} needs {needed} bytes of workspace, and the machine says "
                f"{codec.workspace_bytes(array_bytes(plain))}; raise its workspace"
            )


class Recodings:
    """The codecs of a plan's machine, compiled where they are first asked for."""

    def __init__(self, codecs: Sequence[Codec], devices: Sequence[Any]) -> None:
        self._codecs, self._devices = codecs, devices
        self._known: dict[tuple[int, int, tuple[int, ...], Any], Recoding] = {}

    def of(self, form: int, device: int, shape: jax.ShapeDtypeStruct, where: str) -> Recoding:
        """The codec number `form` for arrays of `shape` on a device. Raises InputError as `Recoding` does."""
        key = form, device, shape.shape, shape.dtype
        if key not in self._known:
            self._known[key] = Recoding(self._codecs[form], shape, self._devices[device], where)
        return self._known[key]


def _compiled(function: Any, shape: jax.ShapeDtypeStruct, sharding: Any) -> Any:
    placed = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    return jax.jit(function).lower(placed).compile()
