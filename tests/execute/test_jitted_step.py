"""Plans inside a jitted step: the same gradients, the bytes of the plan, and an error for what JAX would ignore."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import jitted_networks as networks
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from tmojax.check import check
from tmojax.errors import InputError
from tmojax.execute import jitted_checks
from tmojax.execute.jitted_checks import moves_of, placements, require_effective, require_names, verify
from tmojax.execute.jitted_names import NameAction, named_plan, planner_for, reach_of
from tmojax.execute.jitted_scans import scan_in_segments
from tmojax.execute.jitted_step import jitted_step, planned_loss
from tmojax.planners.simple import OffloadAll, RecomputeAll
from tmojax.problem import Kind, ListBuilder
from tmojax.problem.io import PlanFile
from tmojax.problem.workload import TensorKind

# Largest difference of a gradient relative to its largest number. XLA may fuse a recomputed op otherwise than the
# first time and then rounds sums elsewhere; offloading alone changes no bit.
TOLERANCE = 2e-6
CASES = [
    ("mlp", 0.9, True),
    ("mlp", 0.65, False),
    ("segments", 0.7, False),
    ("scanned", 0.3, True),
    pytest.param("gpt2", 0.5, True, marks=pytest.mark.long),
    pytest.param("gpt2", 0.5, False, marks=pytest.mark.long),
]


@cache
def exported(name, factor, tie_layers=True, micro_batches=1):
    net = networks.network(name)
    step, problem, schedule = networks.planned(name, factor, micro_batches, tie_layers)
    return jitted_step(net.loss, net.params, net.batch, networks.OPTIMIZER, step, problem, schedule)


def largest_difference(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize(("name", "factor", "tie_layers"), CASES)
def test_gradients_and_bytes(name, factor, tie_layers):
    net = networks.network(name)
    step, problem, schedule = networks.planned(name, factor, 1, tie_layers)
    assert check(problem, schedule).valid
    made = exported(name, factor, tie_layers)
    ours = jax.jit(jax.value_and_grad(made.loss))(net.params, net.batch)
    theirs = jax.jit(jax.value_and_grad(net.plain))(net.params, net.batch)
    assert largest_difference(ours, theirs) <= TOLERANCE
    # The plan's own instructions, counted here once more.
    rows, program = schedule.lists[0], step.workload.programs[0]
    sent = sum(program.tensors[row["tensor"]].size_bytes for row in rows if row["kind"] == Kind.OFFLOAD)
    found = made.verification
    assert sent == found.planned_host_bytes == found.jaxpr_host_bytes > 0
    assert found.moves == found.placements_on_host == found.placements_on_device > 0


@pytest.mark.long
def test_names_decide_by_layer_and_by_segment():
    assert set(exported("mlp", 0.65, False).plan.actions.values()) == set(NameAction)
    actions = exported("segments", 0.7, False).plan.actions
    assert actions["inner.segment0"] is not actions["inner.segment1"]
    tied = exported("gpt2", 0.5).plan.actions
    assert all(tied[f"h0.{part}"] is tied[f"h1.{part}"] for part in ("ln1", "attn.qkv", "ln2", "mlp.fc"))
    assert NameAction.OFFLOAD in tied.values() and NameAction.SAVE in tied.values()


def test_a_step_updates_like_the_ordinary_one():
    net = networks.network("mlp")
    made = exported("mlp", 0.65, False)
    copies = [jax.tree.map(jnp.array, net.params) for _ in range(2)]
    state = networks.OPTIMIZER.init(net.params)
    params, _, loss = made(copies[0], state, net.batch)
    value, gradients = jax.value_and_grad(net.plain)(copies[1], net.batch)
    changes, _ = networks.OPTIMIZER.update(gradients, networks.OPTIMIZER.init(net.params), copies[1])
    assert largest_difference(loss, value) <= TOLERANCE
    assert largest_difference(params, jax.tree.map(jnp.add, copies[1], changes)) <= TOLERANCE


def test_micro_batches_are_averaged():
    net = networks.network("mlp")
    made = exported("mlp", 0.65, True, 2)
    other = jax.tree.map(lambda x: x[::-1] * 0.5, net.batch)
    params, _, loss = made(
        jax.tree.map(jnp.array, net.params), networks.OPTIMIZER.init(net.params),
        jax.tree.map(lambda a, b: np.stack([a, b]), net.batch, other),
    )  # fmt: skip
    both = [jax.value_and_grad(net.plain)(net.params, batch) for batch in (net.batch, other)]
    value, gradients = jax.tree.map(lambda a, b: (a + b) / 2, *both)
    changes, _ = networks.OPTIMIZER.update(gradients, networks.OPTIMIZER.init(net.params), net.params)
    assert largest_difference(loss, value) <= TOLERANCE
    assert largest_difference(params, jax.tree.map(jnp.add, net.params, changes)) <= TOLERANCE


def test_a_scan_fetches_layer_by_layer():
    """Around the scan, the policy would have all layers on the device before the first of backward."""
    net = networks.network("scanned")
    jaxpr = jax.make_jaxpr(jax.grad(exported("scanned", 0.3).loss))(net.params, net.batch).jaxpr
    back = [move for move in moves_of(jaxpr) if not move.to_host]
    assert back and all(move.in_scan for move in back)
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(scans) == 2  # one forward, one backward: nothing in between restores a stack


def verification_of(name, listed, host_bytes, **names):
    net = networks.network(name)
    plan = exported("mlp", 0.65, False).plan
    changed = replace(plan, actions=listed, bytes_of=host_bytes)
    return verify(planned_loss(net.loss, changed, scanned=False), net.params, net.batch, changed)


def test_what_jax_would_ignore_is_an_error():
    with pytest.raises(InputError, match=r"name 'rleu0': the loss has no checkpoint_name of that spelling.*relu0"):
        verification_of("mlp", {"rleu0": NameAction.SAVE}, {"rleu0": 16384})
    with pytest.raises(InputError, match=r"sends 4096 bytes per micro-batch to the host, and the jaxpr 16384"):
        verification_of("mlp", {"relu0": NameAction.OFFLOAD}, {"relu0": 4096})
    net = networks.network("mlp")
    with pytest.raises(InputError, match=r"name 'relu0': is listed 2 times; list every name once"):
        require_names(net.loss, net.params, net.batch, ["relu0", "relu1", "relu0"])
    # Backward of a sum does not need what is added up: JAX drops it.
    plan = replace(exported("mlp", 0.65, False).plan, actions={"out": NameAction.OFFLOAD}, bytes_of={"out": 1024})
    loss = jax.checkpoint(lambda w, x: checkpoint_name(x @ w, "out").sum(), policy=plan.policy())
    with pytest.raises(InputError, match=r"sends 1024 bytes per micro-batch to the host, and the jaxpr 0"):
        verify(loss, jnp.ones((16, 16)), jnp.ones((16, 16)), plan)


def per_layer(prevent_cse, layers, policy):
    """A checkpoint for each layer, as many models have it."""

    def loss(weights, x):
        for _ in range(layers):
            x = jax.checkpoint(networks.layer, policy=policy, prevent_cse=prevent_cse)(x, weights)
        return x.sum()

    return loss


def test_forms_that_xla_voids_are_an_error_on_a_gpu():
    plan = replace(exported("mlp", 0.65, False).plan, actions={"x": NameAction.OFFLOAD}, bytes_of={"x": 2048})
    weights, x = (jnp.ones((16, 16)), jnp.ones((16, 16))), jnp.ones((16, 16))
    found = verify(per_layer(True, 2, plan.policy()), weights, x, plan)
    with pytest.raises(
        InputError, match=r"would void it: 2 jax\.checkpoints outside of scans.*one jax\.checkpoint with"
    ):
        require_effective(found, "gpu")
    assert "void on a GPU" in found.lines()[-1]
    require_effective(found, "cpu")
    found = verify(per_layer(False, 1, plan.policy()), weights, x, replace(plan, bytes_of={"x": 1024}))
    with pytest.raises(InputError, match=r"prevent_cse=False outside of a scan"):
        require_effective(found, "gpu")
    for effective in (exported("mlp", 0.65, False), exported("scanned", 0.3)):
        assert not effective.verification.void
        require_effective(effective.verification, "gpu")
    with pytest.raises(InputError, match="platform: 'tpu' is unknown"):
        require_effective(found, "tpu")


def test_plans_that_no_policy_expresses_are_errors():
    # One without unnamed activations and optimizer state can be anybody's.
    net, step = networks.network("mlp"), networks.imported("mlp")
    reach = reach_of(net.loss, net.params, net.batch, step)
    problem = networks.problem_of(step, 0.9)
    moved = OffloadAll().plan(problem).schedule
    assert moved is not None
    assert len(named_plan(step, reach, problem, moved).names(NameAction.OFFLOAD)) == 1
    # Optimizer state that rests on the host.
    step = networks.import_train_step(net.loss, net.params, net.batch, optax.adam(1e-3), gpu="A100-SXM4-40GB", gpus=4)
    problem = networks.problem_of(step, 0.9)
    moved = OffloadAll().plan(problem).schedule
    assert moved is not None
    with pytest.raises(InputError, match="rests outside of device memory"):
        named_plan(step, reach, problem, moved)
    net, step = networks.network("gpt2"), networks.imported("gpt2")
    reach = reach_of(net.loss, net.params, net.batch, step)
    problem = networks.problem_of(step, 0.9)
    unnamed = RecomputeAll().plan(problem).schedule
    assert unnamed is not None
    with pytest.raises(InputError, match="which has no checkpoint_name, so JAX would recompute it"):
        named_plan(step, reach, problem, unnamed)


def with_rows(schedule, problem, fill):
    """The schedule with rows at the end of every list."""
    lists = []
    for device, rows in zip(problem.machine.devices, schedule.lists, strict=True):
        builder = ListBuilder()
        fill(builder, device.memory, device.host_memory)
        lists.append(np.concatenate([rows, builder.build()]))
    return replace(schedule, lists=tuple(lists))


def test_what_cannot_be_offloaded_is_an_error():
    net = networks.network("mlp")
    step, problem, schedule = networks.planned("mlp", 0.65, 1, False)
    reach = reach_of(net.loss, net.params, net.batch, step)
    program = problem.workload.programs[0]
    weight = next(t for t, tensor in enumerate(program.tensors) if tensor.kind is TensorKind.WEIGHT)

    def away(builder, device, host):
        builder.offload(weight, 0, device, host)
        builder.release(weight, 0, host)

    name = program.tensors[weight].name
    with pytest.raises(InputError, match=rf"offloads '{name}', which is no activation.*donates its state there: ask"):
        named_plan(step, reach, problem, with_rows(schedule, problem, away))

    def aliased(workload):
        offloaded = {int(row["tensor"]) for row in schedule.lists[0] if row["kind"] == Kind.OFFLOAD}
        tensors = tuple(
            replace(tensor, alias_group="shared") if t == min(offloaded) else tensor
            for t, tensor in enumerate(program.tensors)
        )
        return replace(workload, programs=(replace(workload.programs[0], tensors=tensors),))

    other = replace(problem, workload=aliased(problem.workload))
    with pytest.raises(InputError, match=r"which shares its storage \(aliased, group 'shared'\)"):
        named_plan(replace(step, workload=aliased(step.workload)), reach, other, schedule)


def test_a_step_is_for_the_shapes_of_its_plan():
    net, made = networks.network("mlp"), exported("mlp", 0.65, False)
    state = networks.OPTIMIZER.init(net.params)
    rows = net.batch["x"].shape[0]
    with pytest.raises(InputError, match=rf"batch\['x'\]: is float32\[7, .*\], the plan is for float32\[{rows}, "):
        made(net.params, state, jax.tree.map(lambda x: x[:7], net.batch))
    with pytest.raises(InputError, match="batch: has structure"):
        made(net.params, state, {"x": net.batch["x"]})
    # Without a leading axis, the rows of one micro-batch would be taken for micro-batches.
    with pytest.raises(InputError, match=rf"the plan is for float32\[2, {rows}, .*\] \(a micro-batch per row\)"):
        exported("mlp", 0.65, True, 2)(net.params, state, net.batch)


def test_donated_arrays_are_named():
    net, made = networks.network("mlp"), exported("mlp", 0.65, False)
    params = jax.tree.map(jnp.array, net.params)
    state = networks.OPTIMIZER.init(params)
    made(params, state, net.batch)
    with pytest.raises(InputError, match=r"params.*: the array is deleted, because a step donates.*before returned"):
        made(params, state, net.batch)


def test_devices_that_differ_are_an_error():
    net = networks.network("mlp")
    step, problem, loose = networks.planned("mlp", 0.9, 1, False)
    _, _, tight = networks.planned("mlp", 0.65, 1, False)
    lists = (loose.lists[0], *tight.lists[1:])
    mixed = replace(loose, lists=lists)
    with pytest.raises(InputError, match=r"on device 1, micro-batch 0, and \w+ on device 0.*one jitted step does the"):
        named_plan(step, reach_of(net.loss, net.params, net.batch, step), problem, mixed)


def test_plans_of_other_steps_and_wrong_plans_are_errors():
    net = networks.network("mlp")
    step, problem, schedule = networks.planned("mlp", 0.65, 1, False)
    reach = reach_of(net.loss, net.params, net.batch, step)
    with pytest.raises(InputError, match=r"the plan is of another step"):
        named_plan(networks.imported("gpt2"), reach, problem, schedule)
    with pytest.raises(InputError, match=r"1 micro-batch\(es\), and the step was imported for .* and 2; plan"):
        named_plan(networks.imported("mlp", 2), reach, problem, schedule)
    with pytest.raises(InputError, match=r"plan: it is of problem 000000000000\.\.\."):
        named_plan(step, reach, problem, PlanFile(schedule, "0" * 64, "by-name", "feasible"))
    with pytest.raises(InputError, match=r"plan: None is no schedule; .*PlanResult\.message"):
        named_plan(step, reach, problem, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the checker rejects it"):
        named_plan(step, reach, problem.with_device_capacity(1000), schedule)


@pytest.mark.parametrize(("host", "device"), [(0, 0), (1, 0), (0, 1)])
def test_placements_that_lowering_drops_are_an_error(monkeypatch, host, device):
    net, made = networks.network("mlp"), exported("mlp", 0.65, False)
    moves = made.verification.moves
    found = {"pinned_host": moves * host, "device": moves * device}
    monkeypatch.setattr(jitted_checks, "placements", lambda text: found)
    with pytest.raises(InputError, match=f"{moves} tensors are offloaded, and there are {moves * host} placements on"):
        verify(made.loss, net.params, net.batch, made.plan)


def test_a_step_without_names_is_an_error():
    def loss(params, batch):
        return jnp.sum(batch["x"] @ params[0])

    net = networks.network("mlp")
    plain = networks.import_train_step(loss, net.params, net.batch, networks.OPTIMIZER, gpu="A100-SXM4-40GB")
    with pytest.raises(InputError, match="none of its activations has a name"):
        planner_for(loss, net.params, net.batch, plain)


def test_a_scan_whose_input_has_no_name_is_an_error():
    net = networks.network("segments")

    def loss(params, batch):
        def body(x, weights):
            return x + checkpoint_name(x @ weights[0], "inner"), None

        return jax.lax.scan(body, batch["x"] @ params["in"], params["layers"])[0].sum()

    step = networks.import_train_step(loss, net.params, net.batch, networks.OPTIMIZER, gpu="A100-SXM4-40GB")
    with pytest.raises(InputError, match="named_scan_inputs"):
        reach_of(loss, net.params, net.batch, step)


def test_segments_must_add_up():
    with pytest.raises(InputError, match=r"lengths: \(2, 2\) must be positive and add up to 6"):
        scan_in_segments(lambda x, w: (x * w, None), jnp.ones(3), jnp.ones((6, 3)), (2, 2))


def test_activations_only_have_names():
    """Marks of gradients, which the importer makes by names too, are not among them."""
    step = networks.imported("gpt2")
    net = networks.network("gpt2")
    kinds = {tensor.name: tensor.kind for tensor in step.workload.programs[0].tensors}
    reach = reach_of(net.loss, net.params, net.batch, step)
    assert {kinds[t] for tensors in reach.names.values() for t in tensors} == {TensorKind.ACTIVATION}


def test_placements_of_called_functions_count_as_often_as_they_are_called():
    text = """
    func.func public @main(%a: f32) {
      %0 = func.call @moved(%a)
      %1 = call @moved(%a)
      %2 = stablehlo.custom_call @annotate_device_placement(%1) {x = {_xla_buffer_placement = "device"}}
    }
    func.func private @moved(%a: f32) {
      %0 = stablehlo.custom_call @annotate_device_placement(%a) {x = {_xla_buffer_placement = "pinned_host"}}
    }
    """
    assert placements(text) == {"pinned_host": 2, "device": 1}
