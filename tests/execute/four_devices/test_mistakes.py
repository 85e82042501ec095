"""What a user can do wrong is named, with the remedy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import GPU, OPTIMIZER, perceptron, plan, planned

from tmojax import InputError
from tmojax.execute.compiled_step import CompiledStep
from tmojax.execute.functions import StepFunctions
from tmojax.execute.lists import prepare_list
from tmojax.execute.planned_step import PlannedStep
from tmojax.importers.jax_importer import import_step, import_train_step
from tmojax.problem import CollectiveKind
from tmojax.problem.io import PlanFile, problem_hash


@pytest.fixture(scope="module")
def case():
    return perceptron()


@pytest.fixture(scope="module")
def schedule(case):
    return plan(case.problem(), "offload-all")


def changed_program(problem, change):
    """The problem with `change` applied to its program."""
    workload = problem.workload
    return replace(problem, workload=replace(workload, programs=(change(workload.programs[0]),)))


def test_a_plan_of_another_problem(case, schedule):
    problem = case.problem()
    other = case.problem(2.0)
    good = PlanFile(schedule, problem_hash(problem), "offload-all", "feasible")
    PlannedStep(case.compiled, problem, good)
    with pytest.raises(InputError, match=r"plan: it is of problem .* plan this problem"):
        PlannedStep(case.compiled, other, good)


def test_a_plan_of_another_step(case, schedule):
    problem = case.problem()

    def renamed(program):
        tensors = (replace(program.tensors[0], name="embedding"), *program.tensors[1:])
        return replace(program, tensors=tensors)

    with pytest.raises(InputError, match="tensor 'embedding' is not in the step: the plan is of another step"):
        PlannedStep(case.compiled, changed_program(problem, renamed), schedule)

    def shorter(program):
        return replace(program, ops=program.ops[:-1])

    name = problem.workload.programs[0].ops[-1].name
    with pytest.raises(InputError, match=f"op '{name}' of the step has no place in the plan"):
        PlannedStep(case.compiled, changed_program(problem, shorter), schedule)
    with pytest.raises(InputError, match="micro_batches is 3"):
        changed = replace(problem, workload=replace(problem.workload, micro_batches=3))
        PlannedStep(case.compiled, changed, schedule)


def test_a_plan_that_forgets_workspace_or_bytes(case, schedule):
    problem = case.problem()

    def without_workspace(program):
        return replace(program, ops=tuple(replace(op, workspace_bytes=0) for op in program.ops))

    with pytest.raises(InputError, match=r"compiled it needs \d+ bytes of workspace, and the plan counts 0"):
        PlannedStep(case.compiled, changed_program(problem, without_workspace), schedule)

    def smaller(program):
        return replace(program, tensors=(replace(program.tensors[0], size_bytes=1), *program.tensors[1:]))

    with pytest.raises(InputError, match=r"tensor '.*': the step makes \d+ bytes, and the plan counts 1"):
        PlannedStep(case.compiled, changed_program(problem, smaller), schedule)


def test_an_invalid_plan(case, schedule):
    lists = (schedule.lists[0][:-1], *schedule.lists[1:])
    with pytest.raises(InputError, match="the checker rejects it"):
        PlannedStep(case.compiled, case.problem(), replace(schedule, lists=lists))


def test_an_aliased_tensor_cannot_be_offloaded(case, schedule):
    def aliased(program):
        first = [t for t, spec in enumerate(program.tensors) if spec.name in ("dense0", "dense1")]
        tensors = [
            replace(spec, alias_group="shared") if t in first else spec for t, spec in enumerate(program.tensors)
        ]
        return replace(program, tensors=tuple(tensors))

    with pytest.raises(InputError, match=r"tensor 'dense\d': shares its storage \(aliased, group 'shared'\)"):
        PlannedStep(case.compiled, changed_program(case.problem(), aliased), schedule)


def test_state_that_would_share_a_buffer():
    """The new value of one state array is another one: aliased, so neither can move alone."""

    def step(state, batch):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["now"])
        return {"now": state["now"] - gradient, "before": state["now"]}, loss

    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    imported = import_step(step, {"now": array, "before": array}, array, gpu=GPU)
    with pytest.raises(InputError, match=r"'before' is another argument .*\(aliased\)"):
        StepFunctions(imported.traced, imported.workload.programs[0])


def test_donated_arrays(case, schedule):
    step = PlannedStep(case.compiled, case.problem(), schedule)
    params = jax.tree.map(jnp.array, case.params)
    state = OPTIMIZER.init(params)
    params["dense1"]["bias"].delete()
    with pytest.raises(InputError, match=r"dense1.bias: the array is deleted, it was probably donated"):
        step.load(params, state)


def test_other_structures_and_shapes(case, schedule):
    step = PlannedStep(case.compiled, case.problem(), schedule)
    state = OPTIMIZER.init(case.params)
    with pytest.raises(InputError, match="state: expected 3 tree"):
        step.load()
    with pytest.raises(InputError, match=r"state\[0\]: has structure"):
        step.load({"dense0": case.params["dense0"]}, state)
    wrong = jax.tree.map(lambda a: a[:1], case.params)
    with pytest.raises(InputError, match=r"dense0.bias: is float32\[1\], the step was traced with float32\[32\]"):
        step.load(wrong, state)
    with pytest.raises(InputError, match="state: nothing is loaded"):
        step.step(case.batches())
    step = planned(case, case.problem(), schedule)
    with pytest.raises(InputError, match=r"batches: expected 4 device\(s\) with 2 micro-batch"):
        step.step(case.batches()[:2])
    batches = case.batches()
    batches[1][1] = {"x": batches[1][1]["x"]}
    with pytest.raises(InputError, match=r"batches\[1\]\[1\]: has structure"):
        step.step(batches)
    batches[1][1] = {name: np.zeros((2, 2), "float64") for name in ("x", "y")}
    with pytest.raises(InputError, match=r"batches\[1\]\[1\]: batch.x: is float64\[2, 2\]"):
        step.step(batches)
    step.step(case.batches())  # a rejected batch leaves the step usable


def test_more_devices_than_there_are():
    shape = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    imported = import_train_step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2), shape, shape["w"], optax.sgd(0.1), gpu=GPU, gpus=5
    )
    with pytest.raises(InputError, match="devices: the workload needs 5, and 4 are present; on CPU set XLA_FLAGS"):
        CompiledStep(imported)
    with pytest.raises(InputError, match="devices: the workload needs 5, and 2 are present"):
        CompiledStep(imported, jax.devices()[:2])


def test_slices_are_refused_before_anything_runs(case, schedule):
    problem = case.problem()
    rows = schedule.lists[0].copy()
    move = int(np.flatnonzero(rows["tensor"] >= 0)[0])
    rows["parts"][move] = 2
    with pytest.raises(
        InputError, match=r"gpu0 #\d+: moves slice 0 of 2 of '.*whole tensors only.*plan without slices"
    ):
        prepare_list(problem, replace(schedule, lists=(rows, *schedule.lists[1:])), 0)


def with_collectives(workload, **changes):
    return replace(workload, collectives=tuple(replace(one, **changes) for one in workload.collectives))


def test_only_gradients_are_reduced(case):
    example = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.batches()[0][0])
    imported = import_train_step(case.loss, case.params, example, OPTIMIZER, gpu=GPU, gpus=2)
    gathering = with_collectives(imported.workload, kind=CollectiveKind.ALL_GATHER)
    ops = imported.workload.programs[0].ops
    read = tuple(replace(op, reads=op.updates, updates=()) if op.collective else op for op in ops)
    reading = replace(imported.workload, programs=(replace(imported.workload.programs[0], ops=read),))
    for workload, message in (
        (gathering, "its kind is all_gather, and .*import_train_step"),
        (reading, "the runtime reduces tensors in place"),
    ):
        with pytest.raises(InputError, match=f"collective 'all_reduce.0': {message}"):
            _ = CompiledStep(replace(imported, workload=workload)).reductions


def test_a_plan_with_other_collectives(case, schedule):
    problem = case.problem()
    other = replace(problem, workload=with_collectives(problem.workload, devices=(0, 1)))
    with pytest.raises(InputError, match=r"collective 'all_reduce\.0': the plan has other collectives than the step"):
        PlannedStep(case.compiled, other, schedule)


def test_the_host_computes_nothing(case, schedule):
    problem = case.problem()
    devices = (replace(problem.machine.devices[0], kind="cpu"), *problem.machine.devices[1:])
    problem = replace(problem, machine=replace(problem.machine, devices=devices))
    with pytest.raises(InputError, match="device 'gpu0': kind 'cpu' has no runtime; plan for devices of kind 'gpu'"):
        PlannedStep(case.compiled, problem, schedule)
