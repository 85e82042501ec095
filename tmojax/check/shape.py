"""Are the arrays of a schedule readable at all? Every index must mean something before the lists are walked."""

from __future__ import annotations

import numpy as np

from tmojax.check.rules import START, WHOLE, Findings, Rule
from tmojax.check.static import EXECUTIONS, TRANSFERS, Static
from tmojax.errors import InputError
from tmojax.problem.schedule import FIRST_ENGINE_STREAM, INSTRUCTION, PLAIN, Kind, LinkPolicy, LinkPolicyKind, Schedule

_COPY_KINDS = (*TRANSFERS, int(Kind.RELEASE), int(Kind.ENCODE), int(Kind.DECODE))


def check_shape(static: Static, schedule: Schedule, findings: Findings) -> None:
    """Report every field that is out of range. Vectorised: one comparison per field and kind of instruction."""
    count = len(static.devices)
    if len(schedule.lists) != count:
        findings.add(
            Rule.MALFORMED, WHOLE, START, f"lists: {len(schedule.lists)} instruction list(s) for {count} device(s)"
        )
    for device, rows in enumerate(schedule.lists[:count]):
        if not isinstance(rows, np.ndarray) or rows.dtype != INSTRUCTION or rows.ndim != 1:
            is_array = isinstance(rows, np.ndarray)
            found = f"{rows.dtype} with {rows.ndim} dimension(s)" if is_array else type(rows).__name__
            findings.add(
                Rule.MALFORMED, device, START,
                f"lists[{device}]: must be a one-dimensional array of dtype INSTRUCTION, got {found}",
            )  # fmt: skip
        else:
            _check_rows(static, device, rows, findings)
    _check_order(static, schedule, findings)
    _check_initial(static, schedule, findings)
    _check_policies(static, schedule, findings)


def _check_rows(static: Static, device: int, rows: np.ndarray, findings: Findings) -> None:
    name = static.device_name(device)
    reported = np.zeros(len(rows), dtype=bool)

    def require(where: np.ndarray, good: np.ndarray, field: str, allowed: str) -> None:
        """Report rows of the mask `where` in which `good` is false; one report per row is enough."""
        for index in np.flatnonzero(where & ~good & ~reported).tolist():
            reported[index] = True
            kind = int(rows["kind"][index])
            label = Kind(kind).name.lower() if kind in set(Kind) else "instruction"
            findings.add(
                Rule.MALFORMED, device, index,
                f"{name} #{index}: {label} has {field} {int(rows[field][index])}, which must be {allowed}",
            )  # fmt: skip

    def between(field: str, low: int, high: np.ndarray | int) -> np.ndarray:
        return (rows[field] >= low) & (rows[field] <= high)

    kinds = rows["kind"]
    everywhere = np.ones(len(rows), dtype=bool)
    require(everywhere, np.isin(kinds, [int(kind) for kind in Kind]), "kind", f"0..{len(Kind) - 1}")
    last_micro_batch = static.micro_batches - 1

    runs = np.isin(kinds, EXECUTIONS)
    ops = static.devices[device].program.ops
    require(runs, between("op", 0, len(ops) - 1), "op", f"0..{len(ops) - 1}")
    usable = runs & ~reported
    op_index = np.where(usable, rows["op"], 0)
    if len(ops):
        collective = np.array([bool(op.collective) for op in ops])[op_index]
        step_op = np.array([op.step_op for op in ops])[op_index]
        require(usable, collective == (kinds == Kind.COLLECTIVE), "op",
                "an op with a collective for `collective`, and one without for `compute`")  # fmt: skip
        require(usable & step_op, between("micro_batch", 0, 0), "micro_batch", "0 for a step op")
        require(usable & ~step_op, between("micro_batch", 0, last_micro_batch), "micro_batch", f"0..{last_micro_batch}")

    copies = np.isin(kinds, _COPY_KINDS)
    devices, memories = len(static.devices), len(static.machine.memories)
    require(copies, between("owner", -1, devices - 1), "owner", f"-1..{devices - 1}")
    owner = np.where(copies & ~reported & (rows["owner"] >= 0), rows["owner"], device)
    tensors = np.array([len(table.sizes) for table in static.devices])[owner]
    require(copies, between("tensor", 0, tensors - 1), "tensor", f"an index into the tensors of {name} or of the owner")
    for number, table in enumerate(static.devices):
        mine = copies & ~reported & (owner == number)
        if mine.any():
            instances = np.array([table.instance_count(tensor) for tensor in range(len(table.sizes))])
            limit = instances[np.where(mine, rows["tensor"], 0)] - 1
            require(mine, between("micro_batch", 0, limit), "micro_batch", "0 (or 0..K-1 for a tensor per micro-batch)")
    codecs = len(static.machine.codecs)
    require(copies, between("form", PLAIN, codecs - 1), "form", f"-1..{codecs - 1}")
    coded = np.isin(kinds, [int(Kind.ENCODE), int(Kind.DECODE)])
    require(coded, between("form", 0, codecs - 1), "form", f"0..{codecs - 1} (a codec)")
    require(copies, rows["parts"] >= 1, "parts", "1 or more")
    require(copies, between("part", 0, rows["parts"].astype(np.int64) - 1), "part", "0..parts-1")
    require(copies, between("memory", 0, memories - 1), "memory", f"0..{memories - 1}")
    own = static.devices[device].memory
    require(coded, rows["memory"] == own, "memory", f"{own}: encode and decode run in the device's own memory")
    moves = np.isin(kinds, TRANSFERS)
    require(moves, between("to_memory", 0, memories - 1), "to_memory", f"0..{memories - 1}")

    streams = FIRST_ENGINE_STREAM + len(static.machine.engines)
    waits = kinds == Kind.WAIT
    require(waits, between("stream", 0, streams - 1), "stream", f"0..{streams - 1}")
    numbered = np.isin(kinds, [int(Kind.SIGNAL), int(Kind.WAIT), int(Kind.LEND), int(Kind.RECLAIM)])
    require(numbered, rows["event"] >= 0, "event", "0 or more")
    lends = kinds == Kind.LEND
    require(lends, between("to_device", 0, devices - 1) & (rows["to_device"] != device), "to_device", "another device")
    require(lends, rows["size_bytes"] >= 0, "size_bytes", "0 or more")


def _check_order(static: Static, schedule: Schedule, findings: Findings) -> None:
    for device in range(len(static.devices)):
        try:
            static.sequence(device, schedule.order)
        except (InputError, TypeError) as error:
            findings.add(Rule.MALFORMED, device, START, f"order: {error}")


def _check_initial(static: Static, schedule: Schedule, findings: Findings) -> None:
    memories = len(static.machine.memories)
    if len(schedule.initial) != len(static.devices):
        findings.add(
            Rule.INITIAL, WHOLE, START,
            f"initial: {len(schedule.initial)} placement(s) for {len(static.devices)} device(s)",
        )  # fmt: skip
        return
    for device, (table, placements) in enumerate(zip(static.devices, schedule.initial, strict=True)):
        where = f"initial of {static.device_name(device)}"
        missing = {tensor for tensor, state in enumerate(table.is_state) if state}
        for placement in placements:
            tensor = placement.tensor
            known = isinstance(tensor, int | np.integer) and 0 <= tensor < len(table.sizes)
            if not known or not table.is_state[tensor]:
                findings.add(Rule.INITIAL, device, START, f"{where}: tensor {tensor} is not a STATE tensor")
                continue
            name = table.program.tensors[tensor].name
            if tensor not in missing:
                findings.add(Rule.INITIAL, device, START, f"{where}: {name} is placed twice")
            missing.discard(tensor)
            chosen = placement.memories
            if not chosen or len(set(chosen)) != len(chosen):
                findings.add(Rule.INITIAL, device, START, f"{where}: {name} needs at least one memory, each named once")
            for memory in chosen:
                if not isinstance(memory, int | np.integer) or not 0 <= memory < memories:
                    findings.add(Rule.INITIAL, device, START, f"{where}: {name}: there is no memory {memory}")
        for tensor in sorted(missing):
            name = table.program.tensors[tensor].name
            findings.add(Rule.INITIAL, device, START, f"{where}: STATE tensor {name} has no placement")


def _check_policies(static: Static, schedule: Schedule, findings: Findings) -> None:
    links = static.machine.links
    if schedule.link_policies and len(schedule.link_policies) != len(links):
        findings.add(
            Rule.MALFORMED, WHOLE, START,
            f"link_policies: {len(schedule.link_policies)} for {len(links)} link(s); give one per link, or none",
        )  # fmt: skip
        return
    for link, policy in zip(links, schedule.link_policies, strict=False):
        problem = _policy_problem(static, policy)
        if problem:
            findings.add(Rule.MALFORMED, WHOLE, START, f"link_policies of {link.name}: {problem}")


def _policy_problem(static: Static, policy: LinkPolicy) -> str:
    if policy.kind not in set(LinkPolicyKind):
        return f"kind {policy.kind!r} is unknown"
    if policy.kind is LinkPolicyKind.FAIR:
        return ""
    if policy.slots < 1:
        return f"slots {policy.slots} must be at least 1"
    if policy.kind is LinkPolicyKind.PRIORITY:
        devices = set(range(len(static.devices)))
        if len(set(policy.device_rank)) != len(policy.device_rank) or not set(policy.device_rank) <= devices:
            return f"device_rank {policy.device_rank} must name devices of the machine, each once"
    return ""
