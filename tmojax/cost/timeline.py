"""The relaxed step: from fractions of choices and timing to memory, stalls, link loads and step time, differentiably.

Everything here is for one point (no restart axis); `jax.vmap` adds one. Design: the periodic transcription.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tmojax.cost.model import COMPRESS, DROP, KEEP, OFFLOAD, OFFLOAD_COMPRESSED, PEER, PeriodicModel

BIN_SHIFT = 0.382  # of a bin


class PeerDemand(eqx.Module):
    """What goes to the lender instead of the host; fields as in `Demand`."""

    ready_gb: Float[Array, "gpu slot"]
    absorbed_gb: Float[Array, "gpu slot"]
    due_gb: Float[Array, "gpu slot"]
    total_gb: Float[Array, " gpu"]


class Demand(eqx.Module):
    """What choices ask of the timing. Cumulative over slots, GB; axes gpu, slot.

    held_gb: resident whatever the copies do. ready_gb: may have left before the slot's end. absorbed_gb: of the
    bytes that came back, those that `held_gb` counts again. due_gb: must be back before the slot begins.
    recompute_s: compute added. total_gb [gpu]: bytes that leave. state_gb [gpu]: optimizer state resting on the
    host. gone_gb: must have left before the slot begins; open_gb: may have come in by the end of the slot. Where only
    memory says when (as in `demand`) these are 0 and total_gb; fixed lists say it themselves. uncopied_gb: of the bytes
    that come back, those that are gone before the slot without a copy out. state_away_gb [gpu]: resting state that goes
    out in the first forward of a step and comes back in the last backward.
    """

    held_gb: Float[Array, "gpu slot"]
    ready_gb: Float[Array, "gpu slot"]
    absorbed_gb: Float[Array, "gpu slot"]
    due_gb: Float[Array, "gpu slot"]
    recompute_s: Float[Array, "gpu slot"]
    total_gb: Float[Array, " gpu"]
    state_gb: Float[Array, " gpu"]
    gone_gb: Float[Array, "gpu slot"]
    open_gb: Float[Array, "gpu slot"]
    uncopied_gb: Float[Array, "gpu slot"]
    state_away_gb: Float[Array, " gpu"]
    peer: PeerDemand | None = None


class Timing(eqx.Module):
    """stall_s [gpu, slot]: at the end of a slot, beyond what the GPU's own copies take. out_share, in_share [gpu,
    slot] in (0, 1): of the bytes waiting to leave, what leaves in the slot; of the bytes that may still come later
    (seen backwards), what comes in the slot.
    phase [gpu]: start of a GPU, in periods, at least 0. peer_out_share, peer_in_share: the shares of what goes to the
    lender, where somebody lends.
    """

    stall_s: Float[Array, "gpu slot"]
    out_share: Float[Array, "gpu slot"]
    in_share: Float[Array, "gpu slot"]
    phase: Float[Array, " gpu"]
    peer_out_share: Float[Array, "gpu slot"] | None = None
    peer_in_share: Float[Array, "gpu slot"] | None = None


class Limits(eqx.Module):
    """Violations (positive: over) relative to the limit's own scale. memory, order [gpu, slot]; link [link, bin];
    host [host].
    """

    memory: Float[Array, "gpu slot"]
    order: Float[Array, "gpu slot"]
    link: Float[Array, "link bin"]
    host: Float[Array, " host"]


class Step(eqx.Module):
    """period_s [gpu]; slot_end_s, stall_s [gpu, slot]: with all stalls; memory_gb [gpu, slot]: with what is lent;
    out_gb, in_gb [gpu, slot]: cumulative host copies at the end of a slot; link_gb [link, bin]: load of every bin of
    `bin_s` seconds; step_s: the estimate; tail_s: its part after the micro-batches.
    """

    period_s: Float[Array, " gpu"]
    slot_end_s: Float[Array, "gpu slot"]
    stall_s: Float[Array, "gpu slot"]
    memory_gb: Float[Array, "gpu slot"]
    out_gb: Float[Array, "gpu slot"]
    in_gb: Float[Array, "gpu slot"]
    link_gb: Float[Array, "link bin"]
    bin_s: Float[Array, ""]
    step_s: Float[Array, ""]
    tail_s: Float[Array, ""]


def demand(
    model: PeriodicModel, choice: Float[Array, "gpu candidate choice"], state_out: Float[Array, " gpu"],
    state_away: Float[Array, " gpu"] | float = 0.0,
) -> Demand:  # fmt: skip
    """Sum up choices per slot. Linear in the fractions, except for recompute chains (products along a path).

    state_out: share of the resting state that rests on the host; state_away: share of the rest of it that leaves for
    most of the step.
    """
    keep, away, drop = choice[..., KEEP], choice[..., OFFLOAD], choice[..., DROP]
    coded = jnp.zeros_like(keep)
    if model.choices > 3:  # an encoded tensor is a part of one that is kept, or that leaves
        coded = choice[..., COMPRESS] + choice[..., OFFLOAD_COMPRESSED]
        keep = keep + model.coded_share * choice[..., COMPRESS]
        away = away + model.coded_share * choice[..., OFFLOAD_COMPRESSED]
    early, early_sum = _early_fractions(model, drop)
    again = jnp.where(model.needed, drop, drop * early_sum)
    paid = again
    if model.other_outputs.shape[-1]:  # one recomputation yields all outputs of an op
        paid = again - jnp.minimum(again, _take(again, model.other_outputs).max(-1))
    owner_away = jnp.take_along_axis(away, model.path_owner, 1) * early
    owner_drop = jnp.take_along_axis(drop, model.path_owner, 1) * early
    part = jnp.take_along_axis(paid / jnp.maximum(again, 1e-6), model.path_owner, 1)
    produced = jnp.einsum("gqi,gci->gcq", model.produced_gb, jnp.stack([keep, away * ~model.clean], 1))
    behind = min(model.candidates)  # only state can be clean or around the end of a period
    uncopied = jnp.einsum("gqi,gi->gq", model.produced_gb[..., behind:], (away * model.clean)[..., behind:])
    around = jnp.einsum("gi,gci->gc", model.around_gb[..., behind:], jnp.stack([keep, away], 1)[..., behind:])
    absorbed = jnp.einsum("gqi,gci->gcq", model.absorbed_gb, jnp.stack([keep, away], 1))
    sooner = jnp.einsum("gqp,gcp->gcq", model.early_gb, jnp.stack([owner_away, owner_drop], 1))
    state_gb = state_out * model.resting_gb
    state_away_gb = state_away * (model.resting_gb - state_gb)
    total_gb = jnp.einsum("gi,gi->g", model.size_gb, away)
    held_gb = (
        model.base_gb - (state_gb + state_away_gb - around[:, 0])[:, None]
        + produced[:, 0] - absorbed[:, 0] + sooner[:, 1]
    )  # fmt: skip
    recompute_s = (
        jnp.einsum("gqi,gi->gq", model.use_s, paid) + jnp.einsum("gqp,gp->gq", model.shift_s, owner_drop * part)
    )  # fmt: skip
    if model.choices > 3:
        owner_coded = jnp.take_along_axis(coded, model.path_owner, 1) * early
        held_gb += jnp.einsum("gqi,gi->gq", model.coding_gb, coded)
        held_gb += (1 - model.coded_share) * jnp.einsum("gqp,gp->gq", model.early_gb, owner_coded)
        recompute_s += jnp.einsum("gqi,gi->gq", model.coding_s, coded)
    return Demand(
        held_gb=held_gb,
        ready_gb=produced[:, 1],
        absorbed_gb=absorbed[:, 1],
        due_gb=jnp.einsum("gqi,gi->gq", model.due_gb, away) + sooner[:, 0],
        recompute_s=recompute_s,
        total_gb=total_gb,
        state_gb=state_gb,
        gone_gb=jnp.zeros_like(model.slot_s),
        open_gb=jnp.broadcast_to(total_gb[:, None], model.slot_s.shape),
        uncopied_gb=uncopied + around[:, 1, None],
        state_away_gb=state_away_gb,
        peer=_peer_demand(model, choice[..., PEER], early) if model.has_lenders else None,
    )


def _peer_demand(
    model: PeriodicModel, peer: Float[Array, "gpu candidate"], early: Float[Array, "gpu path"]
) -> PeerDemand:
    sooner = jnp.einsum("gqp,gp->gq", model.early_gb, jnp.take_along_axis(peer, model.path_owner, 1) * early)
    produced, absorbed, due = (
        jnp.einsum("gqi,gi->gq", sizes, peer) for sizes in (model.produced_gb, model.absorbed_gb, model.due_gb)
    )
    return PeerDemand(produced, absorbed, due + sooner, jnp.einsum("gi,gi->g", model.size_gb, peer))


def _take(values: Float[Array, "gpu item"], places: Int[Array, "gpu ..."]) -> Float[Array, "gpu ..."]:
    """values at places; the place behind the last one reads 0."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(jnp.pad(values, ((0, 0), (0, 1))), places)


def _early_fractions(model: PeriodicModel, drop: Float[Array, "gpu candidate"]) -> tuple[Array, Array]:
    """(fraction that becomes wanted at each path's slot [gpu, path], sum over a candidate's paths [gpu, candidate]).

    Paths of a candidate stand in order of their slots; each adds what exceeds all earlier ones.
    """
    if not model.level_first:
        return jnp.zeros(model.path_place.shape, drop.dtype), jnp.zeros_like(drop)
    weight = _take(drop, model.level_first[0])
    for first, rest in zip(model.level_first[1:], model.level_rest, strict=True):
        weight = jnp.concatenate([weight, _take(drop, first) * _take(weight, rest)], axis=1)
    reached = jax.lax.cummax(_take(weight, model.path_grid), axis=2)
    added = jnp.diff(reached, axis=2, prepend=0.0)
    return jnp.take_along_axis(added.reshape(added.shape[0], -1), model.path_place, 1), reached[..., -1]


def _drain(share: Float[Array, "*batch slot"], ready: Float[Array, "*batch slot"],
           least: Float[Array, "*batch slot"]) -> Float[Array, "*batch slot"]:  # fmt: skip
    """D_t = L_t + share_t (ready_t - L_t) with L_t the larger of D_(t-1) and least_t: never more than is ready, never
    less than has to be, by construction.

    A sequential scan: on the CPU it compiles and runs several times faster than an associative one of this length.
    """

    def advance(drained, now):
        low = jnp.maximum(drained, now[2])
        drained = low + now[0] * jnp.maximum(now[1] - low, 0.0)
        return drained, drained

    along = tuple(jnp.moveaxis(values, -1, 0) for values in (share, ready, least))
    return jnp.moveaxis(jax.lax.scan(advance, jnp.zeros_like(along[0][0]), along)[1], 0, -1)


def run_step(model: PeriodicModel, asked: Demand, timing: Timing, bins: int) -> tuple[Step, Limits]:
    """Lay a step out in time. `bins`: how finely shared links are checked over a period (or over the step, if K =
    1).
    """
    total = asked.total_gb[:, None]
    # Seen backwards, copies in are like copies out: what may come later than a slot is what is not due before it, what
    # has to come later is what is not open before it.
    gone_next = jnp.pad(asked.gone_gb[:, 1:], ((0, 0), (0, 1)))
    shut_before = jnp.pad((total - asked.open_gb)[:, :-1], ((0, 0), (1, 0)))
    out, later = _drain(
        jnp.stack([timing.out_share, timing.in_share[:, ::-1]]),
        jnp.stack([asked.ready_gb, (total - asked.due_gb)[:, ::-1]]),
        jnp.stack([gone_next, shut_before[:, ::-1]]),
    )
    later = later[:, ::-1]
    later_next = jnp.pad(later[:, 1:], ((0, 0), (0, 1)))
    into = total - later_next
    out_before = jnp.pad(out[:, :-1], ((0, 0), (1, 0)))
    moved_out, moved_in = out - out_before, later - later_next
    memory = asked.held_gb + asked.ready_gb - out_before + into - asked.absorbed_gb

    order_gb = into - out_before - asked.uncopied_gb
    lane_s = jnp.stack([moved_out, moved_in]) / model.lane_gb_per_s.T[..., None]
    peer_flows = None
    if asked.peer is not None:
        peer_flows = _peer_flows(asked.peer, timing)
        peer_out, peer_into = peer_flows[:, 0], peer_flows[:, 1]
        memory += asked.peer.ready_gb - peer_out[:, :-1] + peer_into[:, 1:] - asked.peer.absorbed_gb
        # A loan lasts for the whole step: the most that is ever in it, copies in flight included.
        memory += (model.lent_use @ (peer_out[:, 1:] - peer_into[:, :-1]).max(axis=1))[:, None]
        order_gb = jnp.maximum(order_gb, peer_into[:, 1:] - peer_out[:, :-1])
        # One engine copies out and one in, wherever to.
        lane_s += jnp.moveaxis(jnp.diff(peer_flows), 0, 1) / model.peer_lane_gb_per_s.T[..., None]
    compute_s = model.slot_s + asked.recompute_s
    slowed_s = compute_s * (1 + jnp.einsum("d,dgq->gq", model.compute_slowdown - 1,
                                           jnp.minimum(lane_s / jnp.maximum(compute_s, 1e-9), 1.0)))  # fmt: skip
    # A slot lasts at least as long as its own copies need alone, so that only what is shared can be exceeded.
    stall_s = timing.stall_s + jnp.maximum(0.0, lane_s.max(0) - slowed_s / model.copy_slowdown)
    slot_s = slowed_s + stall_s
    end_s = jnp.cumsum(slot_s, axis=1)
    period_s = end_s[:, -1]
    flows = jnp.stack([jnp.pad(out, ((0, 0), (1, 0))), jnp.pad(into, ((0, 0), (1, 0)))], 1)
    link_gb, bin_s = _link_loads(model, model.link_use, flows, end_s, timing.phase, bins)
    if peer_flows is not None:
        link_gb += _link_loads(model, model.peer_link_use, peer_flows, end_s, timing.phase, bins)[0]
    tail_s, step_s = _step_time(model, asked, flows, end_s, timing.phase)
    step = Step(period_s, end_s, stall_s, memory, out, into, link_gb, bin_s, step_s, tail_s)
    limits = Limits(
        memory=memory / model.capacity_gb[:, None] - 1,
        order=order_gb / model.capacity_gb[:, None],
        link=link_gb / (model.link_gb_per_s[:, None] * bin_s) - 1,
        host=(model.host_use @ (asked.total_gb + asked.state_gb + asked.state_away_gb)) / model.host_gb - 1,
    )
    return step, limits


def _peer_flows(asked: PeerDemand, timing: Timing) -> Float[Array, "gpu 2 knot"]:
    """Bytes to the lender and back, cumulative, at the start and at the end of every slot; as those of the host."""
    total = asked.total_gb[:, None]
    assert timing.peer_out_share is not None and timing.peer_in_share is not None
    out, later = _drain(
        jnp.stack([timing.peer_out_share, timing.peer_in_share[:, ::-1]]),
        jnp.stack([asked.ready_gb, (total - asked.due_gb)[:, ::-1]]),
        jnp.zeros((2, *asked.ready_gb.shape), asked.ready_gb.dtype),
    )
    into = total - jnp.pad(later[:, ::-1][:, 1:], ((0, 0), (0, 1)))
    return jnp.pad(jnp.stack([out, into], 1), ((0, 0), (0, 0), (1, 0)))


def _link_loads(model: PeriodicModel, link_use: Float[Array, "link gpu 2"], flows: Float[Array, "gpu 2 knot"],
                end_s: Float[Array, "gpu slot"], phase: Float[Array, " gpu"],
                bins: int) -> tuple[Float[Array, "link bin"], Float[Array, ""]]:  # fmt: skip
    """Bytes over each shared link in each of `bins` equal parts of the period (of the whole step without
    wrap-around).
    """
    period = end_s[:, -1].max()
    knots = jnp.pad(end_s, ((0, 0), (1, 0)))
    shift = phase * period
    horizon = period if model.wraps else (shift + end_s[:, -1]).max()
    # With wrap-around, bins end off the round shares of a period: where a GPU starts just at the end of one, rounding
    # can count a turn in `turns` and not in `inside` (XLA computes `turns` twice): a whole period's bytes.
    edge = jnp.linspace(0.0, 1.0, bins + 1, dtype=end_s.dtype) + (BIN_SHIFT / bins if model.wraps else 0.0)
    moment = edge * horizon - shift[:, None]
    turns = jnp.floor(moment / period) if model.wraps else jnp.zeros_like(moment)
    inside = moment - turns * period

    def read(own_knots, own_flows, own_inside):
        after = jnp.clip(jnp.sum(own_knots[None, :] <= own_inside[:, None], 1), 1, own_knots.shape[0] - 1)
        left, right = own_knots[after - 1], own_knots[after]
        share = jnp.clip((own_inside - left) / jnp.maximum(right - left, 1e-9), 0.0, 1.0)
        low, high = own_flows[:, after - 1], own_flows[:, after]
        return low + share * (high - low)

    level = jax.vmap(read)(knots, flows, inside) + turns[:, None, :] * flows[..., -1:]
    return jnp.einsum("lgd,gdb->lb", link_use, jnp.diff(level, axis=-1)), horizon / bins


def _step_time(model: PeriodicModel, asked: Demand, flows: Float[Array, "gpu 2 knot"], end_s: Array,
               phase: Array) -> tuple[Array, Array]:  # fmt: skip
    """(tail_s, step_s): K periods of the slowest GPU, its start, synchronisation, and the update with the state's
    way in and out.

    Synchronisation and update wait for all GPUs. State moves in and out while the update computes.
    """
    state = asked.state_gb
    link_s = (jnp.einsum("lgd,g->l", model.link_use, state) / model.link_gb_per_s).max(initial=0.0)
    lane_s = (state[:, None] / model.lane_gb_per_s).max()
    period = end_s[:, -1].max()
    begin = phase * period
    computed = (begin + end_s[:, -1]).max()
    tail_s = (
        jnp.maximum(computed, _synchronised(model, flows, end_s, begin)) - computed
        + jnp.maximum(jnp.maximum(link_s, lane_s), model.update_s.max())
    )  # fmt: skip
    fixed_s = (model.micro_batches - 1) * period + computed + tail_s
    moved_gb = flows[..., -1]
    extra_s = _crowded(model, moved_gb + asked.state_away_gb[:, None], end_s) - _crowded(model, moved_gb, end_s)
    return tail_s, fixed_s + extra_s


def _crowded(model: PeriodicModel, moved_gb: Float[Array, "gpu 2"], end_s: Array) -> Array:
    """Seconds by which copies out outlast a forward, and copies in a backward: of one GPU, and of a link."""
    turn_s = jnp.take_along_axis(jnp.pad(end_s, ((0, 0), (1, 0))), model.turn_slot[:, None], axis=1)
    window_s = jnp.concatenate([turn_s, end_s[:, -1:] - turn_s], axis=1)
    own_s = jnp.maximum(moved_gb / model.lane_gb_per_s - window_s, 0.0)
    shared_s = jnp.einsum("lgd,gd->ld", model.link_use, moved_gb) / model.link_gb_per_s[:, None] - window_s.min(0)
    # The sum of both: the larger of them makes XLA's CPU compiler, without fusion emitters, yield NaN.
    return own_s.max(0).sum() + jnp.maximum(shared_s, 0.0).max(0, initial=0.0).sum()


def _synchronised(model: PeriodicModel, flows: Float[Array, "gpu 2 knot"], end_s: Array, begin: Array) -> Array:
    """When the step's collectives end, from the start of the last micro-batch: each is followed by all later ones, and
    what is still copied over their links takes its time there as well.

    So what a GPU recomputes or waits for behind its first collective may be free.
    """
    if not model.sync_slot.shape[1]:
        return jnp.zeros((), end_s.dtype)
    at = model.sync_slot + 1
    ready_s = begin[:, None] + jnp.take_along_axis(jnp.pad(end_s, ((0, 0), (1, 0))), at, axis=1)
    to_come = flows[..., -1][..., None, None] - flows[..., at]  # [gpu that copies, direction, gpu, collective]
    load_gb = model.sync_left_gb + jnp.einsum("lhd,hdgc->glc", model.link_use, to_come) * (model.sync_left_gb > 0)
    links_s = (load_gb / model.link_gb_per_s[:, None]).max(axis=1, initial=0.0)
    return (ready_s + jnp.maximum(model.sync_left_s, links_s)).max()
