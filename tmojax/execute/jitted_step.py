"""A plan inside one jitted training step: a `jax.checkpoint` policy, checked before it is handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

import tmojax.jax_setup  # noqa: F401
from tmojax.errors import InputError
from tmojax.execute.jitted_checks import Verification, require_effective, verify
from tmojax.execute.jitted_gpu import with_compile
from tmojax.execute.jitted_names import NamedPlan, named_plan, reach_of
from tmojax.execute.jitted_scans import Body, Loss, ScanEquation, names_of, with_bodies
from tmojax.importers.jax_importer import ImportedStep
from tmojax.problem import Problem, Schedule
from tmojax.problem.io import PlanFile

COMPILE_FOR = "h100"  # the stricter target: there XLA's scheduler moves copies, which is what voids plans


@dataclass(frozen=True, eq=False)
class JittedStep:
    """A training step with a plan inside: `step(params, state, batch) -> (params, state, loss)`.

    `params` and `state` are donated. With K > 1 micro-batches every leaf of `batch` has a leading axis of length K;
    gradients are averaged over it. `loss`: the loss under the plan, to be used in a step of one's own. `plan`: the
    decisions. `verification`: what was checked. `shapes`: of the parameters and of one micro-batch, for which it was.
    `step`: the function itself, for a `shard_map` say; it takes any shapes, as jitted functions do.
    """

    loss: Loss
    plan: NamedPlan
    verification: Verification
    step: Callable[..., Any]
    shapes: tuple[Any, Any]

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        """One step. Raises InputError for shapes that the plan is not for, and for arrays that a step was given."""
        count = self.plan.micro_batches
        _require_shapes("params", params, self.shapes[0], ())
        _require_shapes("batch", batch, self.shapes[1], (count,) if count > 1 else ())
        _require_live("params", params)
        _require_live("state", state)
        return self.step(params, state, batch)


def _require_shapes(what: str, given: Any, expected: Any, leading: tuple[int, ...]) -> None:
    found, structure = jax.tree.flatten(given)
    if structure != jax.tree.structure(expected):
        raise InputError(f"{what}: has structure {structure}, the plan is for {jax.tree.structure(expected)}")
    for leaf, (path, shape) in zip(found, jax.tree_util.tree_leaves_with_path(expected), strict=True):
        wanted, dtype = (*leading, *shape.shape), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
        if jnp.shape(leaf) != wanted or dtype != shape.dtype:
            raise InputError(
                f"{what}{jax.tree_util.keystr(path)}: is {dtype}{list(jnp.shape(leaf))}, the plan is for "
                f"{shape.dtype}{list(wanted)}{' (a micro-batch per row)' if leading else ''}; import and plan the step "
                f"with the shapes that it runs with"
            )


def _require_live(what: str, given: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise InputError(
                f"{what}{jax.tree_util.keystr(path)}: the array is deleted, because a step donates its parameters and "
                f"state; give what the step before returned"
            )


def shapes_of(params: Any, batch: Any) -> tuple[Any, Any]:
    """Shapes and types as JAX has them, of arrays or shapes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x))), (params, batch)
    )


def planned_loss(loss: Loss, plan: NamedPlan, scanned: bool) -> Loss:
    """`loss` under the policy of a plan: around the bodies of its named scans, or around the whole of it."""
    policy = plan.policy()
    if not scanned:
        # One checkpoint around all, with its barrier: XLA voids offloads without (`void_reason`).
        return jax.checkpoint(loss, policy=policy, prevent_cse=True)

    def change(scan: ScanEquation, number: int, body: Body) -> Body:
        # A scan is a barrier by itself, so there is no common subexpression to prevent.
        return jax.checkpoint(body, policy=policy, prevent_cse=False) if names_of(scan.jaxpr) else body

    return with_bodies(loss, change)


def jitted_step(
    loss: Loss,
    params: Any,
    batch: Any,
    optimizer: optax.GradientTransformation,
    imported: ImportedStep,
    problem: Problem,
    plan: PlanFile | Schedule,
    *,
    platform: str | None = None,
    axis_name: str | None = None,
    compile_for: str | None = COMPILE_FOR,
) -> JittedStep:
    """A step function from a loss and a plan that is equal on all devices.

    `loss`, `params`, `batch` and `optimizer` as they were given to `import_train_step`, which made `imported`; arrays
    or shapes. `platform`: "cpu" or "gpu", where the step will run (default: where JAX runs). `axis_name`: gradients and
    loss are averaged over that axis of a `shard_map` around `step`. `compile_for`: the GPU (`jitted_gpu.TARGETS`) for
    which the gradient is compiled as well, in a process of its own, where `jax[cuda12]` is installed; that takes as
    long as compiling the step does. None leaves it out.
    Raises InputError for a plan of another step or problem, one that a policy cannot express (`named_plan`), one that
    JAX does not carry out (`verify`), and one that the compiler would void (`require_effective`) or voids
    (`with_compile`).
    """
    decided = named_plan(imported, reach := reach_of(loss, params, batch, imported), problem, plan)
    under_plan = planned_loss(loss, decided, reach.scanned)
    verification = verified(under_plan, decided, problem, params, batch, platform, compile_for)
    step = step_of(under_plan, optimizer, decided.micro_batches, axis_name, problem.workload.device_count)
    return JittedStep(under_plan, decided, verification, step, shapes_of(params, batch))


def verified(
    loss: Loss, plan: NamedPlan, problem: Problem, params: Any, batch: Any, platform: str | None,
    compile_for: str | None, explicit: bool = False,
) -> Verification:
    """All checks of an export, as far as they can be made here."""
    verification = replace(
        verify(loss, params, batch, plan, explicit=explicit), capacity_bytes=problem.capacity_bytes(0)
    )  # fmt: skip
    require_effective(verification, platform or jax.default_backend())
    return with_compile(verification, loss, plan, params, batch, compile_for)


def step_of(
    loss: Loss, optimizer: optax.GradientTransformation, micro_batches: int, axis_name: str | None, devices: int
) -> Callable[..., Any]:
    """The training step of a loss, jitted unless it is to stand in a `shard_map` with an axis `axis_name`.

    Raises InputError (when traced) for an axis of another length than the `devices` of the plan.
    """
    gradient = jax.value_and_grad(loss)

    def accumulated(params: Any, batches: Any) -> tuple[jax.Array, Any]:
        def add(total: Any, batch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, batch)), None

        first = jax.tree.map(lambda x: x[0], batches)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, params, first))
        total, _ = jax.lax.scan(add, zero, batches)
        return jax.tree.map(lambda x: x / jnp.asarray(micro_batches, x.dtype), total)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = accumulated(params, batch) if micro_batches > 1 else gradient(params, batch)
        if axis_name is not None:
            count = jax.lax.axis_size(axis_name)
            if count != devices:
                raise InputError(
                    f"axis_name: {axis_name!r} has {count} device(s), and the plan is for {devices}; make the mesh of "
                    f"{devices} devices, or import and plan the step with gpus={count}"
                )
            value, gradients = jax.lax.pmean((value, gradients), axis_name)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    return step if axis_name else jax.jit(step, donate_argnums=(0, 1))
