"""Schedules as text, one instruction a line, so that a test can show a plan and change one line of it.

    [label:] compute OP.k            collective OP.k
    offload TENSOR.k FROM TO         prefetch TENSOR.k FROM TO         release TENSOR.k MEMORY
    encode TENSOR.k MEMORY CODEC     decode TENSOR.k MEMORY CODEC
    retire LABEL                     signal EVENT LABEL                wait EVENT STREAM
    lend BYTES DEVICE LOAN           reclaim LOAN

A copy may carry options: `form=CODEC`, `part=I/N`, `owner=DEVICE`. `.k` is the micro-batch (0 if left out). Streams:
`compute`, `comm`, or the name of an engine. Everything from `;` on is a comment.
"""

from __future__ import annotations

from dataclasses import dataclass

from tmojax.problem import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    FIRST_ENGINE_STREAM,
    LinkPolicy,
    ListBuilder,
    Placement,
    Problem,
    Schedule,
)


@dataclass(frozen=True)
class Plan:
    """Lines of instructions per device, and where STATE is: per device, tensor name -> names of memories."""

    problem: Problem
    lines: tuple[tuple[str, ...], ...]
    initial: tuple[dict[str, tuple[str, ...]], ...]
    link_policies: tuple[LinkPolicy, ...] = ()
    order: str = "default"

    def schedule(self) -> Schedule:
        lists = tuple(_ListParser(self.problem, d).parse(lines) for d, lines in enumerate(self.lines))
        memories = [memory.name for memory in self.problem.machine.memories]
        initial = tuple(
            tuple(
                Placement(_tensor(self.problem, device, name), tuple(memories.index(memory) for memory in places))
                for name, places in placements.items()
            )
            for device, placements in enumerate(self.initial)
        )
        return Schedule(lists, initial, self.link_policies, self.order)

    def place(self, device: int, line: str) -> int:
        """Index of the only line that reads `line`, or if there is none, reads so without its label."""
        places = [i for i, text in enumerate(self.lines[device]) if text == line]
        places = places or [i for i, text in enumerate(self.lines[device]) if _without_label(text) == line]
        assert len(places) == 1, f"{line!r} stands at {places} in list {device}"
        return places[0]

    def replace(self, line: str, *new: str, device: int = 0) -> Plan:
        """The plan with one line replaced by `new` (nothing: deleted)."""
        place = self.place(device, line)
        lines = self.lines[device]
        return self._with(device, (*lines[:place], *new, *lines[place + 1 :]))

    def before(self, line: str, *new: str, device: int = 0) -> Plan:
        place = self.place(device, line)
        lines = self.lines[device]
        return self._with(device, (*lines[:place], *new, *lines[place:]))

    def after(self, line: str, *new: str, device: int = 0) -> Plan:
        place = self.place(device, line)
        lines = self.lines[device]
        return self._with(device, (*lines[: place + 1], *new, *lines[place + 1 :]))

    def move(self, line: str, before: str, device: int = 0) -> Plan:
        """The plan with a line moved to stand before another."""
        text = self.lines[device][self.place(device, line)]
        return self.replace(line, device=device).before(before, text, device=device)

    def _with(self, device: int, lines: tuple[str, ...]) -> Plan:
        changed = (*self.lines[:device], lines, *self.lines[device + 1 :])
        return Plan(self.problem, changed, self.initial, self.link_policies, self.order)


def lines(text: str) -> tuple[str, ...]:
    """The instructions of a block of text, without comments and blank lines."""
    stripped = (" ".join(line.split(";")[0].split()) for line in text.splitlines())
    return tuple(line for line in stripped if line)


def _without_label(line: str) -> str:
    head, colon, rest = line.partition(": ")
    return rest if colon and " " not in head else line


def _tensor(problem: Problem, device: int, name: str) -> int:
    return [tensor.name for tensor in problem.workload.program(device).tensors].index(name)


class _ListParser:
    def __init__(self, problem: Problem, device: int) -> None:
        self.problem, self.device = problem, device
        machine = problem.machine
        self.memories = {memory.name: index for index, memory in enumerate(machine.memories)}
        self.devices = {spec.name: index for index, spec in enumerate(machine.devices)}
        self.codecs = {codec.name: index for index, codec in enumerate(machine.codecs)}
        self.streams = {"compute": COMPUTE_STREAM, "comm": COMMUNICATION_STREAM}
        self.streams |= {name: FIRST_ENGINE_STREAM + index for index, name in enumerate(machine.engines)}
        self.builder = ListBuilder()

    def parse(self, text: tuple[str, ...]):
        labels = {line.partition(": ")[0]: index for index, line in enumerate(text) if _without_label(line) != line}
        for line in text:
            self._add(_without_label(line).split(), labels)
        return self.builder.build()

    def _add(self, words: list[str], labels: dict[str, int]) -> None:
        kind, *rest = words
        options = dict(word.split("=") for word in rest if "=" in word)
        rest = [word for word in rest if "=" not in word]
        build = self.builder
        if kind in ("compute", "collective"):
            name, _, k = rest[0].partition(".")
            op = [op.name for op in self.problem.workload.program(self.device).ops].index(name)
            getattr(build, kind)(op, int(k or 0))
        elif kind in ("offload", "prefetch", "release", "encode", "decode"):
            owner = self.devices[options["owner"]] if "owner" in options else -1
            name, _, k = rest[0].partition(".")
            tensor = _tensor(self.problem, self.device if owner < 0 else owner, name)
            copy = {"owner": owner}
            if "form" in options:
                copy["form"] = self.codecs[options["form"]]
            if "part" in options:
                copy["part"], copy["parts"] = map(int, options["part"].split("/"))
            if kind in ("encode", "decode"):
                copy["form"] = self.codecs[rest.pop()]
            places = [self.memories[word] for word in rest[1:]]
            getattr(build, kind)(tensor, int(k or 0), *places, **copy)
        elif kind == "retire":
            build.retire(labels[rest[0]])
        elif kind == "signal":
            build.signal(int(rest[0]), labels[rest[1]])
        elif kind == "wait":
            build.wait(int(rest[0]), self.streams[rest[1]])
        elif kind == "lend":
            build.lend(int(rest[0]), self.devices[rest[1]], int(rest[2]))
        else:
            assert kind == "reclaim", kind
            build.reclaim(int(rest[0]))
