"""The named rules of the checker, each with its paragraph of docs/semantics.md, and what a check returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Rule(StrEnum):
    """What a schedule can violate. `PARAGRAPHS` maps each rule to its paragraph of docs/semantics.md.

    The first group makes a list unreadable: when one of them is found, later phases are skipped.
    """

    MALFORMED = "malformed"  # a field holds a value that means nothing, or the arrays have the wrong shape
    INITIAL = "initial"  # the placement of STATE tensors is incomplete, repeated or out of range

    OP_ORDER = "op-order"  # first executions do not follow the workload's order
    MISSING_OP = "missing-op"  # an op never runs
    RECOMPUTE_IN_PLACE = "recompute-in-place"  # an op that may not run twice runs again
    RECOMPUTE_VERSION = "recompute-version"  # a recomputation reads other versions than the first execution
    NO_ROUTE = "no-route"  # the machine has no way between two memories
    RETIRE = "retire"  # the workspace of something without workspace, of a later instruction, or a second time
    EVENT = "event"  # signalled twice, never signalled, or after an instruction that cannot be signalled

    DATA_NOT_THERE = "data-not-there"  # a copy that is read is not in that memory
    STALE_VERSION = "stale-version"  # a copy that is read holds an old version
    NOT_DECODED = "not-decoded"  # only an encoded copy is in the memory where a plain one is read
    DOUBLE_RELEASE = "double-release"
    RELEASE_FOREIGN = "release-foreign"  # a release of a copy that this list never made
    WRITE_FOREIGN = "write-foreign"  # a write to a copy that another list made
    LAST_CURRENT_COPY = "last-current-copy"  # released, and needed later
    STATE_NOT_RESTORED = "state-not-restored"
    LEAK = "leak"  # a copy or loan is left at the end of a list

    CAPACITY = "capacity"
    HOST_CAPACITY = "host-capacity"
    PINNED_CAPACITY = "pinned-capacity"
    LOAN = "loan"

    COLLECTIVE_MISMATCH = "collective-mismatch"
    CROSS_LIST_RACE = "cross-list-race"
    USE_BEFORE_ARRIVAL = "use-before-arrival"  # a read of another list's copy that is not ordered after its writing
    LINK_ORDER = "link-order"  # an `order` sequence that does not name every transfer of its link exactly once
    DEADLOCK = "deadlock"

    @property
    def paragraph(self) -> str:
        return PARAGRAPHS[self]


PARAGRAPHS: dict[Rule, str] = {
    Rule.MALFORMED: "3",
    Rule.INITIAL: "2",
    Rule.OP_ORDER: "3.2",
    Rule.MISSING_OP: "3.2",
    Rule.RECOMPUTE_IN_PLACE: "3.2",
    Rule.RECOMPUTE_VERSION: "3.2",
    Rule.NO_ROUTE: "3.1",
    Rule.RETIRE: "3.4",
    Rule.EVENT: "3.5",
    Rule.DATA_NOT_THERE: "6.2",
    Rule.STALE_VERSION: "6.2",
    Rule.NOT_DECODED: "6.2",
    Rule.DOUBLE_RELEASE: "6.4",
    Rule.RELEASE_FOREIGN: "6.4",
    Rule.WRITE_FOREIGN: "6.4",
    Rule.LAST_CURRENT_COPY: "6.3",
    Rule.STATE_NOT_RESTORED: "6.5",
    Rule.LEAK: "6.5",
    Rule.CAPACITY: "5.2",
    Rule.HOST_CAPACITY: "5.3",
    Rule.PINNED_CAPACITY: "5.3",
    Rule.LOAN: "3.6",
    Rule.COLLECTIVE_MISMATCH: "3.3",
    Rule.CROSS_LIST_RACE: "4.3",
    Rule.USE_BEFORE_ARRIVAL: "4.3",
    Rule.LINK_ORDER: "7",
    Rule.DEADLOCK: "7",
}

START = -1  # instruction number of what a list holds before its first instruction
MOST_LISTED = 100_000  # violations; a hostile plan must not fill the memory with them
MOST_CHARACTERS = 1000  # of a message; nor must names that are files of their own
WHOLE = -1  # device number of a violation that belongs to no list


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule. `device` and `instruction` are -1 where none applies (instruction -1: the start of the list)."""

    rule: Rule
    paragraph: str
    device: int
    instruction: int
    message: str
    memory: str = ""
    bytes_over: int = 0

    def __str__(self) -> str:
        return f"[{self.rule}, semantics {self.paragraph}] {self.message}"


class TooComplex(Exception):
    """To check a schedule would take more memory or time than any plan needs; the message says why."""


class Findings:
    """Collects violations while the phases run; beyond MOST_LISTED they are only counted, by rule."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.more: dict[Rule, int] = {}

    def add(
        self, rule: Rule, device: int, instruction: int, message: str, memory: str = "", bytes_over: int = 0
    ) -> None:
        if len(self.violations) < MOST_LISTED:
            if len(message) > MOST_CHARACTERS:
                message = f"{message[:MOST_CHARACTERS]} ... ({len(message)} characters)"
            self.violations.append(Violation(rule, rule.paragraph, device, instruction, message, memory, bytes_over))
        else:
            self.more[rule] = self.more.get(rule, 0) + 1

    def rules(self) -> set[Rule]:
        return {violation.rule for violation in self.violations} | self.more.keys()

    def notes(self) -> list[str]:
        """What is not listed."""
        if not self.more:
            return []
        counts = ", ".join(f"{count} {rule}" for rule, count in self.more.items())
        return [f"the first {MOST_LISTED} violations are listed; others are {counts}"]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check says. Byte counts are exact integers, recomputed from the instruction lists.

    `peak_bytes`: per memory name; of a device's own memory the maximum over the positions of its list (loans included),
    of a shared memory the sum of each list's own maximum. `peak_position`: per device, the instruction at which its
    memory is fullest (-1: the start). `largest_at_peak`: per device, up to five (name, bytes) there, largest first.
    `initial_bytes`: per memory name, before the first instruction. `notes`: phases that were skipped, and why, and
    violations that are too many to list.
    """

    violations: tuple[Violation, ...]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_position: tuple[int, ...] = ()
    largest_at_peak: tuple[tuple[tuple[str, int], ...], ...] = ()
    initial_bytes: dict[str, int] = field(default_factory=dict)
    instructions: int = 0
    notes: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.violations

    def counts(self) -> dict[str, int]:
        """How many violations of each rule there are."""
        counts: dict[str, int] = {}
        for violation in self.violations:
            counts[violation.rule.value] = counts.get(violation.rule.value, 0) + 1
        return counts

    def text(self, limit: int | None = 20) -> str:
        """The report for a person; at most `limit` violations are printed (None: all)."""
        if self.valid:
            lines = [f"valid: {self.instructions} instructions"]
        else:
            counts = ", ".join(f"{count} {rule}" for rule, count in self.counts().items())
            lines = [f"invalid: {len(self.violations)} violation(s): {counts}"]
            shown = self.violations if limit is None else self.violations[:limit]
            lines += [f"  {violation}" for violation in shown]
            if len(shown) < len(self.violations):
                lines.append(f"  ... and {len(self.violations) - len(shown)} more")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  peak of {name}: {size} bytes" for name, size in self.peak_bytes.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def as_dict(self) -> dict[str, object]:
        """The report as plain JSON values."""
        return {
            "valid": self.valid,
            "instructions": self.instructions,
            "violations": [
                {
                    "rule": v.rule.value,
                    "paragraph": v.paragraph,
                    "device": v.device,
                    "instruction": v.instruction,
                    "message": v.message,
                    "memory": v.memory,
                    "bytes_over": v.bytes_over,
                }
                for v in self.violations
            ],
            "peak_bytes": self.peak_bytes,
            "peak_position": list(self.peak_position),
            "largest_at_peak": [[{"name": n, "size_bytes": b} for n, b in entries] for entries in self.largest_at_peak],
            "initial_bytes": self.initial_bytes,
            "notes": list(self.notes),
        }
