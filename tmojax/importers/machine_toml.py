"""Machine descriptions in TOML: their types, strict reading, and presets (docs/machines.md).

A description is a tree: GPUs hang under uplinks or hosts, uplinks under uplinks or hosts. `preset = "name"` starts from
another description and changes what the file gives. `tmojax.importers.machine_build` turns it into a `Machine`.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tmojax.errors import InputError
from tmojax.units import parse_bandwidth, parse_bytes, parse_seconds

MAX_TOML_BYTES = 10**6
PRESETS = Path(__file__).resolve().parents[1] / "data" / "machines"


def _quantity(parse: Any) -> BeforeValidator:
    def validate(value: object) -> Any:
        try:
            return parse(value, "")
        except InputError as error:  # pydantic adds the path; its own error type is ValueError
            raise ValueError(str(error).removeprefix(": ")) from None

    return BeforeValidator(validate)


def _parse_ratio(value: object, _field: str) -> Fraction:
    try:
        ratio = Fraction(value) if isinstance(value, str) and len(value) < 20 else None
    except (ValueError, ZeroDivisionError):
        ratio = None
    if ratio is None or not 0 <= ratio.numerator <= 10**6 or ratio.denominator > 10**6:
        raise InputError(f"{value!r} is not a ratio; write for example '1/2'")
    return ratio


def _parse_duplex(value: object, _field: str) -> str | float:
    return (
        value
        if value in ("full", "half")
        else parse_bandwidth(value, "use 'full', 'half' or the total of both directions")
    )


Bytes = Annotated[int, _quantity(parse_bytes)]
BytesPerSecond = Annotated[float, _quantity(parse_bandwidth)]
Seconds = Annotated[float, _quantity(parse_seconds)]
Ratio = Annotated[Fraction, _quantity(_parse_ratio)]
Duplex = Annotated[str | float, _quantity(_parse_duplex)]
Factor = Annotated[float, Field(ge=1, le=1000)]


class Strict(BaseModel):
    """Unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class Way(Strict):
    """A connection towards a host. `rate` is that of each direction; or give `to_host` and `from_host`.

    `duplex`: "full" (both directions at once at full rate), "half" (together the rate of one), or what both reach
    together. `measured` and `duplex_measured` name the measurement; without them the value is listed as assumed.
    """

    rate: BytesPerSecond | None = None
    to_host: BytesPerSecond | None = None
    from_host: BytesPerSecond | None = None
    duplex: Duplex | None = None
    latency: Seconds = 0.0
    measured: str = ""
    duplex_measured: str = ""

    @model_validator(mode="after")
    def _one_or_both(self) -> Way:
        if (self.rate is None) == (self.to_host is None and self.from_host is None) or (self.to_host is None) != (
            self.from_host is None
        ):
            raise ValueError("give either rate, or to_host and from_host")
        if not self.out_bytes_per_s or not self.in_bytes_per_s:
            raise ValueError("rates must be positive")
        if isinstance(self.duplex, float) and self.duplex < max(self.out_bytes_per_s, self.in_bytes_per_s):
            raise ValueError("duplex: both directions together must reach at least what the faster one reaches alone")
        return self

    @property
    def out_bytes_per_s(self) -> float:
        return (self.to_host if self.rate is None else self.rate) or 0.0

    @property
    def in_bytes_per_s(self) -> float:
        return (self.from_host if self.rate is None else self.rate) or 0.0


class GpuGroup(Way):
    """`count` equal GPUs; rates are those of one GPU's own lanes. `model`: row of the GPU table (gives `memory`)."""

    count: Annotated[int, Field(ge=1, le=128)]
    under: str
    model: str = ""
    memory: Bytes | None = None
    reserve: Bytes = 0


class Uplink(Way):
    """What all GPUs and uplinks under it share: a switch's link, a root port, a root complex."""

    under: str


class Host(Strict):
    """A NUMA node. `fabric`: a limit that everything to and from this node shares (root complex, memory controller)."""

    capacity: Bytes
    reserve: Bytes | None = None
    pinned_limit: Bytes | None = None
    pinned_power_of_two: bool = False
    fabric: Way | None = None
    measured: str = ""


class SocketLink(Strict):
    """A link between two NUMA nodes; `rate` is that of each direction."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    rate: BytesPerSecond
    duplex: Duplex | None = None
    latency: Seconds = 0.0
    measured: str = ""
    duplex_measured: str = ""


class NvLink(Strict):
    """A direct connection of two GPUs; `rate` is that of each direction."""

    gpus: Annotated[list[int], Field(min_length=2, max_length=2)]
    rate: BytesPerSecond


class Peer(Strict):
    """How GPUs reach each other: "host" (no peer access, staged), "pcie" (within the tree), "nvswitch" (`rate` a GPU).

    `nvlinks` connect pairs directly, in front of that.
    """

    kind: Literal["host", "pcie", "nvswitch"]
    rate: BytesPerSecond | None = None
    latency: Seconds = 0.0
    nvlinks: list[NvLink] = []
    measured: str = ""

    @model_validator(mode="after")
    def _rate_where_needed(self) -> Peer:
        if (self.kind == "nvswitch") != (self.rate is not None):
            raise ValueError("give rate with kind 'nvswitch', and only there")
        return self


class Nvme(Strict):
    """A drive under a host."""

    under: str
    capacity: Bytes
    read: BytesPerSecond
    write: BytesPerSecond
    measured: str = ""


class OverheadTimes(Strict):
    """Fixed costs; those not given are assumed."""

    launch: Seconds | None = None
    transfer_setup: Seconds | None = None
    handover: Seconds | None = None
    measured: str = ""


class InterferenceFactors(Strict):
    """Slow-down factors of activities that overlap on a GPU, as in `tmojax.problem.Interference`."""

    compute_during_copy_in: Factor = 1.0
    compute_during_copy_out: Factor = 1.0
    compute_during_collective: Factor = 1.0
    collective_during_compute: Factor = 1.0
    copy_during_compute: Factor = 1.0
    measured: str = ""


class CodecSpec(Strict):
    """A compression: encoded size = `ratio` x plain size, scratch = `workspace` x plain size."""

    ratio: Ratio
    encode: BytesPerSecond
    decode: BytesPerSecond
    workspace: Ratio = Fraction(0)


class MachineFile(Strict):
    """A whole description. Order of the GPU groups is the order of the devices."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    gpus: Annotated[dict[str, GpuGroup], Field(min_length=1)]
    uplinks: dict[str, Uplink] = {}
    hosts: Annotated[dict[str, Host], Field(min_length=1)]
    socket_links: dict[str, SocketLink] = {}
    peer: Peer | None = None
    nvme: dict[str, Nvme] = {}
    overheads: OverheadTimes = OverheadTimes()
    interference: InterferenceFactors | None = None
    codecs: dict[str, CodecSpec] = {}
    assumptions: list[str] = []


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parse a TOML file of at most 1 MB. Raises InputError with the file's name."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
        if len(data) > MAX_TOML_BYTES:
            raise InputError(f"{path}: larger than {MAX_TOML_BYTES} bytes; is this a configuration?")
        return tomllib.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    except ValueError as error:  # not UTF-8, not TOML, a NUL in the name
        raise InputError(f"{path}: not TOML: {error}") from None


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it: tables are merged key by key, everything else is replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def preset_names() -> list[str]:
    """Names of the machine presets that come with tmojax, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def resolve_presets(document: dict[str, Any], folder: Path, path: str = "machine") -> dict[str, Any]:
    """Replace `preset` by what it names: a preset of tmojax, or a file (relative to `folder`, ending in .toml).

    Raises InputError for unknown names and circles.
    """
    seen: list[Path] = []
    while "preset" in document:
        changes = dict(document)
        name = changes.pop("preset")
        if not isinstance(name, str) or not name or "\0" in name:
            raise InputError(f"{path}.preset: {name!r} is not a name or a path")
        file = folder / name if name.endswith(".toml") else PRESETS / f"{name}.toml"
        if not file.is_file():
            raise InputError(
                f"{path}.preset: there is no {file if name.endswith('.toml') else f'preset {name!r}'}; "
                f"presets: {', '.join(preset_names())}; or give a path that ends in .toml"
            )
        if file.resolve() in seen:
            raise InputError(f"{path}.preset: {name!r} leads back to itself")
        seen.append(file.resolve())
        base, folder = read_toml(file), file.parent
        if "name" not in changes:  # a changed preset is not the preset any more
            changes["name"] = f"{base.get('name', name)}, changed" if changes else base.get("name", name)
        document = merge(base, changes)
    return document


def parse_machine(document: dict[str, Any], path: str = "machine") -> MachineFile:
    """Check the types of a description whose presets are resolved. Raises InputError listing all mistakes."""
    try:
        return MachineFile.model_validate(document)
    except ValidationError as error:
        raise InputError(explain(error, MachineFile, path)) from None


def explain(error: ValidationError, model: type[BaseModel], path: str) -> str:
    """All mistakes of a validation, one a line: path, what is wrong, the value, known keys or the expectation."""
    lines = []
    for detail in error.errors(include_url=False):
        location = ".".join((path, *map(str, detail["loc"]))).strip(".")
        value = repr(detail["input"])
        shown = value if len(value) <= 60 else value[:57] + "..."
        match detail["type"]:
            case "extra_forbidden":
                known = known_keys(model, detail["loc"][:-1])
                close = difflib.get_close_matches(str(detail["loc"][-1]), known, 1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                lines.append(f"{location}: unknown key; {hint}known: {', '.join(known)}")
            case "missing":
                lines.append(f"{location}: is missing")
            case "value_error":
                lines.append(f"{location}: {detail['msg'].removeprefix('Value error, ')}")
            case _:
                lines.append(f"{location}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {shown}")
    return "\n".join(dict.fromkeys(lines))


def known_keys(model: Any, location: tuple[int | str, ...]) -> list[str]:
    """Keys of the table at `location` inside a pydantic model; empty where the schema does not say."""
    for key in location:
        candidates = [model, *get_args(model)]
        tables = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        named = [t for t in tables if key in t.model_fields]
        tagged = [t for t in tables if "kind" in t.model_fields and key in get_args(t.model_fields["kind"].annotation)]
        if named:
            model = named[0].model_fields[str(key)].annotation
        elif tagged:
            model = tagged[0]
        else:  # the key of a dict or the index of a list
            model = get_args(model)[-1] if get_args(model) else None
    tables = [c for c in (model, *get_args(model)) if isinstance(c, type) and issubclass(c, BaseModel)]
    return sorted(tables[0].model_fields) if tables else []
