"""The periodic fluid model of a training step as arrays: what `relax_problem` builds and everything differentiable
reads.

Time is in seconds and bytes are in GB (10^9 bytes), so that single precision is enough. One *period* is one
micro-batch; slots are those of `tmojax.cost.slots`. Directions: 0 out (device to host), 1 in.
"""

from __future__ import annotations

import tmojax.jax_setup  # noqa: F401  (before JAX)

# isort: split
import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

GB = 1e9
OUT, IN = 0, 1
# Places in the last axis of choices; all but the first three only where a problem allows peers or codecs.
KEEP, OFFLOAD, DROP, PEER, COMPRESS, OFFLOAD_COMPRESSED = range(6)


class PeriodicModel(eqx.Module):
    """Data of the relaxed model; nothing in here is optimised.

    Axes: gpu, slot, candidate, choice (3, or 6 with peers or codecs), path (see `tmojax.cost.chains`; `width` paths at
    most per candidate), link (only links that several GPUs or directions share), host.

    slot_s: compute of a slot. base_gb: resident with every candidate away and all state present. produced_gb [q,
    i]: size where the last use before the idle interval lies before slot q. absorbed_gb: size where base counts it
    again or nobody wants it any more. due_gb: size where its own use is at or before q. use_s [q, i]: recompute
    time, in the slot of its own use; 0 for candidates that backward does not use. needed: backward uses it.
    allowed: keep, offload, drop, peer, compress, compress and offload. clean: the host has a current copy, so it leaves
    without a copy out. around_gb: size where the idle interval spans the end of a period (0: others). Behind the
    candidates of the `StepView` stand state tensors that may leave within the step.
    other_outputs: earlier candidates of the same producer (I: none). Paths stand in order of their length; a level
    holds those of one length, level_first the tensor that each begins with, level_rest (from length 2) the path that
    goes on from there. path_grid: a candidate's paths by slot, earliest first (P: none). path_place: place of a path in
    the flattened grid, path_owner its candidate. early_gb [q, p]: the owner's size from the path's slot until its own
    use. shift_s [q, p]: the owner's recompute time added in the path's slot, taken away in that of its own use.
    lane_gb_per_s: one GPU's copies alone, set-up of a mean copy included. link_use: 1 where the copies of a GPU and
    direction cross the link. resting_gb: optimizer state that can rest on the host. host_use, host_gb: which GPUs
    offload to a host memory, and what is left there beside the inputs. update_s: of the step ops. turn_slot: the first
    slot that is not forward. sync_slot: behind which slot of the last micro-batch a collective of the step may start
    (-1: at once); sync_left_s, sync_left_gb: time alone, and bytes over the shared links, of it and all later ones.
    compute_slowdown, copy_slowdown: interference factors. coding_s, coding_gb: seconds that encoding and decoding take,
    and encoded bytes beside the plain ones, in the slots where that happens; coded_share: encoded bytes of a plain one.
    peer_lane_gb_per_s, peer_link_use: as those of the host, of copies to the lender and back; lent_use [l, g]: 1 where
    l lends to g. codec, lenders: which codec and lenders these are (-1: nobody lends).
    unit_s: the longest period without stalls. wraps: copies of neighbouring micro-batches overlap (more than one
    per step). merged: merged slot of every slot (-1 behind the last). candidates: how many of
    the `StepView` a GPU has. state: of each state tensor behind them, its index in `StepView.state_tensor` and the
    slots of its last use before and first use after the gap.
    """

    slot_s: Float[Array, "gpu slot"]
    base_gb: Float[Array, "gpu slot"]
    capacity_gb: Float[Array, " gpu"]
    size_gb: Float[Array, "gpu candidate"]
    produced_gb: Float[Array, "gpu slot candidate"]
    absorbed_gb: Float[Array, "gpu slot candidate"]
    due_gb: Float[Array, "gpu slot candidate"]
    use_s: Float[Array, "gpu slot candidate"]
    needed: Bool[Array, "gpu candidate"]
    allowed: Bool[Array, "gpu candidate choice"]
    clean: Bool[Array, "gpu candidate"]
    around_gb: Float[Array, "gpu candidate"]
    other_outputs: Int[Array, "gpu candidate other"]
    level_first: tuple[Int[Array, "gpu _"], ...]
    level_rest: tuple[Int[Array, "gpu _"], ...]
    path_grid: Int[Array, "gpu candidate width"]
    path_place: Int[Array, "gpu path"]
    path_owner: Int[Array, "gpu path"]
    early_gb: Float[Array, "gpu slot path"]
    shift_s: Float[Array, "gpu slot path"]
    lane_gb_per_s: Float[Array, "gpu 2"]
    link_gb_per_s: Float[Array, " link"]
    link_use: Float[Array, "link gpu 2"]
    resting_gb: Float[Array, " gpu"]
    host_gb: Float[Array, " host"]
    host_use: Float[Array, "host gpu"]
    update_s: Float[Array, " gpu"]
    turn_slot: Int[Array, " gpu"]
    sync_slot: Int[Array, "gpu collective"]
    sync_left_s: Float[Array, "gpu collective"]
    sync_left_gb: Float[Array, "gpu link collective"]
    compute_slowdown: Float[Array, " 2"]
    copy_slowdown: Float[Array, ""]
    unit_s: Float[Array, ""]
    coding_s: Float[Array, "gpu slot candidate"]
    coding_gb: Float[Array, "gpu slot candidate"]
    coded_share: Float[Array, ""]
    peer_lane_gb_per_s: Float[Array, "gpu 2"]
    peer_link_use: Float[Array, "link gpu 2"]
    lent_use: Float[Array, "gpu gpu"]
    micro_batches: int = eqx.field(static=True)
    wraps: bool = eqx.field(static=True)
    link_names: tuple[str, ...] = eqx.field(static=True)
    candidates: tuple[int, ...] = eqx.field(static=True)
    state: tuple[tuple[tuple[int, int, int], ...], ...] = eqx.field(static=True)
    merged: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    codec: int = eqx.field(static=True)
    lenders: tuple[int, ...] = eqx.field(static=True)

    @property
    def gpus(self) -> int:
        return self.slot_s.shape[0]

    @property
    def slots(self) -> int:
        return self.slot_s.shape[1]

    @property
    def choices(self) -> int:
        return self.allowed.shape[2]

    @property
    def has_lenders(self) -> bool:
        return any(lender >= 0 for lender in self.lenders)
