"""A fluid replay of decided plans, many at once: what the hardware does with fixed lists when nothing is optimised.

The relaxed model chooses its timing; here timing follows from the lists (semantics, sections 4, 5.1 and 8): an op
starts when its releases and data are complete, copies queue in order on one engine per direction, shared links
admit and share by policy. Between two events everything moves at constant rate, so a step is a loop over events;
`jax.vmap` adds plans.
"""

from __future__ import annotations

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

TINY = 1e-30  # keeps quotients finite where they are not used
TOLERANCE = 1e-5  # relative: events closer than this to the next one happen with it


class PathModel(eqx.Module):
    """The machine as the copies see it. Axes: link (all links of the host paths), gpu, direction (0 out, 1 in).

    use: 1 where copies cross the link. setup_s: set-up and latency before the first byte. compute_slowdown
    [direction], copy_slowdown: interference factors. shares: how many different fair rates are told apart.
    """

    link_gb_per_s: Float[Array, " link"]
    use: Float[Array, "link gpu 2"]
    setup_s: Float[Array, "gpu 2"]
    compute_slowdown: Float[Array, " 2"]
    copy_slowdown: Float[Array, ""]
    shares: int = eqx.field(static=True)


class ReplayTables(eqx.Module):
    """Lists of all GPUs of one plan. Axes: gpu, segment (ops between which nothing changes; padded), copy (per
    direction, padded).

    segment_s: compute. segments [gpu]: how many are real. needs [segment, direction]: copies that must be complete
    before it. joined: a collective, which starts when all GPUs have come to it. copy_gb; copies: how many are real.
    copy_after: segments that must be complete before it. copy_needs [copy, direction]: copies that must be complete
    before it. start_after [gpu]: segments of GPU 0 that must be complete before the first one. slots [link]:
    transfers admitted at once (a large number: fair). rank [gpu]: place for priority links (0 without).
    """

    segment_s: Float[Array, "gpu segment"]
    segments: Int[Array, " gpu"]
    needs: Int[Array, "gpu segment 2"]
    joined: Bool[Array, "gpu segment"]
    copy_gb: Float[Array, "gpu 2 copy"]
    copies: Int[Array, "gpu 2"]
    copy_after: Int[Array, "gpu 2 copy"]
    copy_needs: Int[Array, "gpu 2 copy 2"]
    start_after: Int[Array, " gpu"]
    slots: Int[Array, " link"]
    rank: Int[Array, " gpu"]


class _State(eqx.Module):
    now_s: Float[Array, ""]
    segment: Int[Array, " gpu"]
    left_s: Float[Array, " gpu"]
    copy: Int[Array, "gpu 2"]
    left_gb: Float[Array, "gpu 2"]
    setup_s: Float[Array, "gpu 2"]
    request_s: Float[Array, "gpu 2"]
    admitted: Bool[Array, "gpu 2"]
    busy_s: Float[Array, " gpu"]
    stuck: Bool[Array, ""]


def replay(paths: PathModel, tables: ReplayTables) -> tuple[Float[Array, ""], Float[Array, " gpu"]]:
    """(step time, compute time of every GPU without stalls) in seconds; inf where the lists wait for each other."""
    gpus = tables.segments.shape[0]
    first = _State(
        now_s=jnp.zeros((), tables.segment_s.dtype),
        segment=jnp.zeros(gpus, jnp.int32),
        left_s=tables.segment_s[:, 0],
        copy=jnp.zeros((gpus, 2), jnp.int32),
        left_gb=tables.copy_gb[:, :, 0],
        setup_s=paths.setup_s,
        request_s=jnp.full((gpus, 2), jnp.inf, tables.segment_s.dtype),
        admitted=jnp.zeros((gpus, 2), bool),
        busy_s=jnp.zeros(gpus, tables.segment_s.dtype),
        stuck=jnp.zeros((), bool),
    )

    def unfinished(state: _State) -> Array:
        return ~state.stuck & ((state.segment < tables.segments).any() | (state.copy < tables.copies).any())

    last = jax.lax.while_loop(unfinished, lambda state: _advance(paths, tables, state), first)
    return jnp.where(last.stuck, jnp.inf, last.now_s), last.busy_s


def _advance(paths: PathModel, tables: ReplayTables, state: _State) -> _State:
    """Run everything that can run until the next event."""
    computing = _can_compute(tables, state)
    each = jnp.arange(computing.shape[0])[:, None]
    way = jnp.arange(2)[None, :]
    wanted = tables.copy_needs[each, way, state.copy]
    after = tables.copy_after[each, way, state.copy]
    ready = (state.copy < tables.copies) & (state.segment[:, None] >= after)
    ready &= (state.copy[:, None, :] >= wanted).all(-1)
    preparing = ready & (state.setup_s > 0)
    asking = ready & ~preparing
    admitted = _admit(paths, tables, state, asking)
    rate = jnp.where(admitted, _fair_rates(paths, admitted), 0.0)
    rate = rate / jnp.where(computing[:, None], paths.copy_slowdown, 1.0)
    moving = admitted | preparing
    speed = jnp.where(computing, 1.0 / jnp.prod(jnp.where(moving, paths.compute_slowdown, 1.0), axis=1), 0.0)

    until_compute = jnp.where(computing, state.left_s / jnp.maximum(speed, TINY), jnp.inf)
    until_copy = jnp.where(admitted, state.left_gb / jnp.maximum(rate, TINY), jnp.inf)
    until_ready = jnp.where(preparing, state.setup_s, jnp.inf)
    wait_s = jnp.minimum(until_compute.min(), jnp.minimum(until_copy.min(), until_ready.min()))
    stuck = jnp.isinf(wait_s)
    wait_s = jnp.where(stuck, 0.0, wait_s)
    reach_s = wait_s * (1 + TOLERANCE)

    computed = computing & (until_compute <= reach_s)
    copied = admitted & (until_copy <= reach_s)
    prepared = preparing & (until_ready <= reach_s)
    segment = state.segment + computed
    copy = state.copy + copied
    now_s = state.now_s + wait_s
    following_s = tables.segment_s[each[:, 0], jnp.minimum(segment, tables.segment_s.shape[1] - 1)]
    following_gb = tables.copy_gb[each, way, jnp.minimum(copy, tables.copy_gb.shape[2] - 1)]
    setup_s = jnp.where(prepared, 0.0, jnp.where(preparing, state.setup_s - wait_s, state.setup_s))
    # Without set-up a copy asks as soon as it is ready, with one when that is over.
    requested = asking & jnp.isinf(state.request_s)
    request_s = jnp.where(prepared, now_s, jnp.where(requested, state.now_s, state.request_s))
    return _State(
        now_s=now_s,
        segment=segment,
        left_s=jnp.where(computed, following_s, state.left_s - speed * wait_s),
        copy=copy,
        left_gb=jnp.where(copied, following_gb, state.left_gb - rate * wait_s),
        setup_s=jnp.where(copied, paths.setup_s, setup_s),
        request_s=jnp.where(copied, jnp.inf, request_s),
        admitted=admitted & ~copied,
        busy_s=state.busy_s + jnp.where(computing & ~_at_join(tables, state), wait_s, 0.0),
        stuck=stuck,
    )


def _at_join(tables: ReplayTables, state: _State) -> Bool[Array, " gpu"]:
    at = jnp.minimum(state.segment, tables.joined.shape[1] - 1)
    return tables.joined[jnp.arange(at.shape[0]), at] & (state.segment < tables.segments)


def _can_compute(tables: ReplayTables, state: _State) -> Bool[Array, " gpu"]:
    at = jnp.minimum(state.segment, tables.segment_s.shape[1] - 1)
    needs = tables.needs[jnp.arange(at.shape[0]), at]
    possible = (state.segment < tables.segments) & (state.copy >= needs).all(axis=1)
    possible &= (state.segment > 0) | (state.segment[0] >= tables.start_after)
    joining = _at_join(tables, state)
    return possible & (~joining | (possible & joining).all())


def _admit(paths: PathModel, tables: ReplayTables, state: _State, asking: Bool[Array, "gpu 2"]) -> Bool[Array, "gpu 2"]:
    """Let transfers in, by rank, request time and GPU, while every link of their way has a free slot (semantics
    8.3).
    """
    gpus = asking.shape[0]
    request_s = jnp.where(jnp.isinf(state.request_s), state.now_s, state.request_s).reshape(-1)
    rank = jnp.repeat(tables.rank, 2)
    order = jnp.lexsort((jnp.repeat(jnp.arange(gpus), 2), request_s, rank))
    use = paths.use.reshape(paths.use.shape[0], -1).astype(jnp.int32)
    admitted = state.admitted.reshape(-1)
    ask = asking.reshape(-1)
    for place in range(2 * gpus):
        flow = order[place]
        taken = use @ admitted.astype(jnp.int32)
        free = ((use[:, flow] == 0) | (taken < tables.slots)).all()
        admitted = admitted.at[flow].set(admitted[flow] | (ask[flow] & free))
    return admitted.reshape(gpus, 2)


def _fair_rates(paths: PathModel, admitted: Bool[Array, "gpu 2"]) -> Float[Array, "gpu 2"]:
    """Max-min fair rates by progressive filling: the tightest link is settled first."""
    use = paths.use.reshape(paths.use.shape[0], -1)
    open_ = admitted.reshape(-1)
    rate = jnp.zeros(open_.shape, use.dtype)
    for _ in range(paths.shares):
        left = jnp.maximum(paths.link_gb_per_s - use @ rate, 0.0)
        users = use @ open_.astype(use.dtype)
        share = jnp.where(users > 0, left / jnp.maximum(users, 1.0), jnp.inf)
        offer = jnp.where(use > 0, share[:, None], jnp.inf).min(axis=0)
        offer = jnp.where(open_, offer, jnp.inf)
        settled = open_ & (offer <= offer.min() * (1 + TOLERANCE))
        rate = jnp.where(settled, offer, rate)
        open_ &= ~settled
    return rate.reshape(admitted.shape)
