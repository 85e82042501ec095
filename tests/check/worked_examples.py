"""Reads the examples of docs/worked-examples.md. The page is their only source: tests run them, a script draws them.

An example is a block of lines. First the step and the machine (defaults in `_BOX`), then per device a list in the
notation of plan_text.py, each instruction with its times behind a bar, then what is expected of the whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from plan_text import Plan

from tmojax.problem import (
    Action,
    Codec,
    Collective,
    CollectiveKind,
    Device,
    Interference,
    Lifetime,
    Link,
    LinkPolicy,
    LinkPolicyKind,
    Machine,
    Memory,
    MemoryKind,
    Op,
    Overheads,
    Phase,
    Problem,
    Program,
    Route,
    Tensor,
    TensorKind,
    Workload,
    validate_problem,
)

PAGE = Path(__file__).parents[2] / "docs" / "worked-examples.md"
IMAGES = PAGE.parent / "images"

HOST = 0
END = -2  # instruction number of a violation at the end of a list
_BOX = {"gpus": 1, "lane": 10.0, "uplink": 10.0, "duplex": 0.0, "latency": 0.0}


@dataclass(frozen=True)
class Example:
    """`times_s[device][instruction]`: (start, end), or (effect,) of what has no stream; None where none is given."""

    title: str
    name: str
    plan: Plan
    times_s: tuple[tuple[tuple[float, ...] | None, ...], ...]
    step_s: float | None = None
    stuck: bool = False
    steps: int = 1
    period_s: float | None = None
    stall_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    violations: tuple[tuple[str, str, int, int], ...] = ()  # rule, device, instruction, bytes over

    @property
    def picture(self) -> Path:
        return IMAGES / f"semantics-{self.name}.svg"


def examples() -> list[Example]:
    """All examples of the page, in its order."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        for text in re.findall(r"^```example\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
            found.append(_Reader(title, text).example())
    return found


class _Reader:
    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self.box = dict(_BOX)
        self.memories: dict[str, dict[str, int | bool]] = {}
        self.overheads: dict[str, float] = {}
        self.interference: dict[str, float] = {}
        self.codecs: list[Codec] = []
        self.tensors: list[Tensor] = []
        self.ops: list[tuple[str, list[str]]] = []
        self.collectives: list[tuple[str, str, int]] = []
        self.policies: dict[str, list[str]] = {}
        self.micro_batches = 1
        self.lists: list[list[str]] = []
        self.times: list[list[tuple[float, ...] | None]] = []
        self.initial: list[dict[str, tuple[str, ...]]] = []
        self.expected: dict = {"stall_s": {}, "peak_bytes": {}}
        self.violations: list[tuple[str, str, int, int]] = []
        for line in text.splitlines():
            line = line.split(";")[0].rstrip()
            if not line:
                continue
            if line.startswith(" "):
                self._instruction(line)
            else:
                self._line(line.split())

    def _instruction(self, line: str) -> None:
        words, _, times = line.partition("|")
        self.lists[-1].append(" ".join(words.split()))
        self.times[-1].append(tuple(float(time) for time in times.split()) or None)

    def _line(self, words: list[str]) -> None:
        key, *rest = words
        if re.fullmatch(r"gpu\d:", key):
            self.lists.append([])
            self.times.append([])
            self.initial.append({place.split("@")[0]: tuple(place.split("@")[1].split(",")) for place in rest})
        elif key in self.box:
            self.box[key] = float(rest[0])
        elif key == "memory":
            options = dict(word.split("=") for word in rest[2:])
            self.memories[rest[0]] = {"capacity_bytes": int(rest[1])} | {
                name: value == "yes" if value in ("yes", "no") else int(value) for name, value in options.items()
            }
        elif key in ("launch_s", "transfer_setup_s", "handover_s"):
            self.overheads[key] = float(rest[0])
        elif key == "interference":
            self.interference[rest[0]] = float(rest[1])
        elif key == "codec":
            options = dict(word.split("=") for word in rest[1:])
            numerator, denominator = map(int, options["size"].split("/"))
            self.codecs.append(
                Codec(rest[0], numerator, denominator, float(options["encode"]), float(options["decode"]))
            )
        elif key == "micro-batches":
            self.micro_batches = int(rest[0])
        elif key == "tensor":
            lifetime = Lifetime(rest[2]) if len(rest) > 2 else Lifetime.MICRO_BATCH
            self.tensors.append(Tensor(rest[0], int(rest[1]), TensorKind.ACTIVATION, lifetime))
        elif key == "op":
            self.ops.append((rest[0], rest[1:]))
        elif key == "collective":
            self.collectives.append((rest[0], rest[1], int(rest[2])))
        elif key == "policy":
            self.policies[rest[0]] = rest[1:]
        elif key in ("step", "period"):
            self.expected[f"{key}_s"] = float(rest[0])
        elif key == "steps":
            self.expected["steps"] = int(rest[0])
        elif key == "stuck":
            self.expected["stuck"] = True
        elif key == "stall":
            self.expected["stall_s"][rest[0]] = float(rest[1])
        elif key == "peak":
            self.expected["peak_bytes"][rest[0]] = int(rest[1])
        elif key == "violation":
            rule, device, instruction, *over = rest
            place = {"start": -1, "end": END}.get(instruction, None)
            place = int(instruction[1:]) if place is None else place
            self.violations.append((rule, device, place, int(over[0]) if over else 0))
        else:
            raise ValueError(f"{self.title}: unknown line {' '.join(words)!r}")

    def example(self) -> Example:
        problem = Problem(self.title, self._workload(), self._machine(), frozenset(Action))
        validate_problem(problem)
        policies = self._policies(problem.machine) if self.policies else ()
        lists = tuple(tuple(lines) for lines in self.lists)
        plan = Plan(problem, lists, tuple(self.initial), policies)
        name = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).lstrip("-0123456789").strip("-")
        times = tuple(tuple(times) for times in self.times)
        return Example(self.title, name, plan, times, violations=tuple(self.violations), **self.expected)

    def _machine(self) -> Machine:
        gpus = int(self.box["gpus"])
        links = [
            link for d in range(gpus) for link in (Link(f"out{d}", self.box["lane"]), Link(f"in{d}", self.box["lane"]))
        ]
        up, down, both = 2 * gpus, 2 * gpus + 1, ()
        links += [Link("up", self.box["uplink"], self.box["latency"])]
        links += [Link("down", self.box["uplink"], self.box["latency"])]
        if self.box["duplex"]:
            links.append(Link("duplex", self.box["duplex"]))
            both = (2 * gpus + 2,)
        routes = []
        for d in range(gpus):
            routes.append(Route(1 + d, HOST, (2 * d, up, *both), (2 * d,)))
            routes.append(Route(HOST, 1 + d, (down, 2 * d + 1, *both), (2 * d + 1,)))
            routes += [Route(1 + d, 1 + e, (2 * d, 2 * e + 1), (2 * d, 2 * e + 1)) for e in range(gpus) if e != d]
        memories = [Memory("host", MemoryKind.HOST, 1000)]
        memories += [Memory(f"gpu{d}", MemoryKind.DEVICE, 1000) for d in range(gpus)]
        return Machine(
            "box",
            tuple(replace(memory, **self.memories.get(memory.name, {})) for memory in memories),
            tuple(links),
            tuple(f"{way}{d}" for d in range(gpus) for way in ("out", "in")),
            tuple(routes),
            tuple(Device(f"gpu{d}", "gpu", 1 + d, HOST) for d in range(gpus)),
            Overheads(**self.overheads),
            Interference(**self.interference),
            tuple(self.codecs),
        )

    def _workload(self) -> Workload:
        gpus = tuple(range(int(self.box["gpus"])))
        collectives = tuple(Collective(name, CollectiveKind(kind), size, gpus) for name, kind, size in self.collectives)
        program = Program("step", tuple(self.tensors), tuple(self._op(name, words) for name, words in self.ops))
        return Workload(self.title, (program,), (0,) * len(gpus), self.micro_batches, "synthetic", collectives)

    def _op(self, name: str, words: list[str]) -> Op:
        names = [tensor.name for tensor in self.tensors]
        is_collective = name in [collective for collective, *_ in self.collectives]
        found: dict[str, list[int]] = {"reads": [], "writes": [], "updates": []}
        workspace, step, target = 0, False, ""
        rest = iter(words[1:])
        for word in rest:
            if word in found:
                target = word
            elif word == "workspace":
                workspace = int(next(rest))
            elif word == "step":
                step = True
            else:
                found[target].append(names.index(word))
        return Op(
            name, Phase.FORWARD, float(words[0]), *(tuple(found[f]) for f in ("reads", "writes", "updates")), workspace,
            not found["updates"], step, name if is_collective else "",
        )  # fmt: skip

    def _policies(self, machine: Machine) -> tuple[LinkPolicy, ...]:
        return tuple(
            self._policy(self.policies[link.name]) if link.name in self.policies else LinkPolicy()
            for link in machine.links
        )

    def _policy(self, words: list[str]) -> LinkPolicy:
        kind, *rest = words
        slots = next((int(word[6:]) for word in rest if word.startswith("slots=")), 1)
        rest = [word for word in rest if not word.startswith("slots=")]
        if kind == "priority":
            return LinkPolicy(LinkPolicyKind.PRIORITY, slots, tuple(int(word[3:]) for word in rest))
        if kind == "order":
            turns = tuple((int(word[3:].split("#")[0]), int(word.split("#")[1])) for word in rest)
            return LinkPolicy(LinkPolicyKind.ORDER, slots, sequence=turns)
        return LinkPolicy(LinkPolicyKind(kind), slots)
