"""Make a decision fit: where its decode runs out of memory, send away more of what is kept there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tmojax.planners.workbench import Workbench
from tmojax.problem import Action
from tmojax.relax.decisions import Choice, DeviceDecision, Rest
from tmojax.relax.decode import DeviceList, DoesNotFit


def repair(
    bench: Workbench, device: int, decision: DeviceDecision, most_rounds: int = 60, lent_bytes: int = 0
) -> DeviceDecision | DoesNotFit:
    """`decision`, or one that keeps less where it does not fit; the last failure if nothing helps.

    In each round the largest tensors that are kept and idle at the failing op are offloaded (recomputed, if offload is
    not allowed) until the missing bytes are covered; when none is left there, resting state leaves. `lent_bytes` of the
    device's memory are others'.
    """
    view, actions = bench.view(device), bench.problem.actions
    slot_of = {int(op): slot for slot, op in enumerate(view.slot_op)}
    offload, recompute = Action.OFFLOAD in actions, Action.RECOMPUTE in actions
    found: DeviceList | DoesNotFit = bench.decode(device, decision, lent_bytes=lent_bytes)
    for _ in range(most_rounds):
        if not isinstance(found, DoesNotFit):
            return decision
        slot = slot_of.get(found.op, -1)
        idle = (view.idle_from < slot) & (slot < view.idle_to) & (decision.choice == Choice.KEEP) & view.needed
        movable = idle & view.may_offload & offload
        droppable = idle & view.may_recompute & recompute & ~movable
        choice, state_out = decision.choice.copy(), decision.state_out.astype(np.int8)
        covered = 0
        for index in sorted(np.flatnonzero(movable | droppable), key=lambda i: (-view.size_bytes[i], i)):
            if covered >= found.bytes_over:
                break
            choice[index] = Choice.OFFLOAD if movable[index] else Choice.RECOMPUTE
            covered += int(view.size_bytes[index])
        if covered == 0:
            home = view.state_resting & (state_out == Rest.ON_DEVICE)
            if not offload or not home.any():
                return found
            for index in sorted(np.flatnonzero(home), key=lambda i: (-view.state_bytes[i], i)):
                if covered >= found.bytes_over:
                    break
                state_out[index] = Rest.AWAY
                covered += int(view.state_bytes[index])
        decision = replace(decision.alike(), choice=choice, state_out=state_out)
        found = bench.decode(device, decision, lent_bytes=lent_bytes)
    return found if isinstance(found, DoesNotFit) else decision
