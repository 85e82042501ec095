"""Breadth-first orders: blocks, groups, step ops at their places."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import random_problem

from tmojax.errors import InputError
from tmojax.importers.micro_batch_orders import BreadthFirst, offer_orders
from tmojax.importers.synthetic import SyntheticTransformer, synthetic_transformer
from tmojax.problem import Op, Phase, Program, Tensor, TensorKind, Workload, validate_workload

SMALL = SyntheticTransformer(layers=4, tokens=16, width=64, sequence=16, parameters=1000)


def runs_of(order: BreadthFirst, micro_batches: int) -> list[tuple[str, int]]:
    """(layer, micro-batch) of the synthetic transformer, ops of one layer and direction merged."""
    workload = offer_orders(synthetic_transformer(SMALL, 2, micro_batches), (order,))
    validate_workload(workload)
    found: list[tuple[str, int]] = []
    for op, k in workload.sequence(0, order.name):
        spec = workload.programs[0].ops[op]
        run = (spec.layer + ("" if spec.phase is Phase.FORWARD else "'"), k)
        if not found or found[-1] != run:
            found.append(run)
    return found


def test_a_layer_for_all_micro_batches_before_the_next():
    forward = [(layer, k) for layer in ("embed", "layer0", "layer1", "layer2") for k in (0, 1)]
    turn = [(layer, k) for k in (0, 1) for layer in ("layer3", "loss'", "layer3'")]
    backward = [(f"layer{n}'", k) for n in (2, 1, 0) for k in (0, 1)]
    assert runs_of(BreadthFirst(), 2) == [*forward, *turn, *backward, ("synchronisation'", 0)]


def test_blocks_of_layers_and_groups_of_micro_batches():
    def group(*ks: int) -> list[tuple[str, int]]:
        return [
            (layer, k)
            for block in (["embed", "layer0", "layer1"],
                          ["layer2", "layer3", "loss'", "layer3'", "layer2'"], ["layer1'", "layer0'"])
            for k in ks
            for layer in block
        ]  # fmt: skip

    assert runs_of(BreadthFirst(group=2, layers=3), 4) == [*group(0, 1), *group(2, 3), ("synchronisation'", 0)]


def test_step_ops_of_a_block_run_at_their_places_in_the_last_micro_batch():
    tensors = tuple(Tensor(name, 1, TensorKind.ACTIVATION) for name in "abcd")
    ops = (
        Op("a", Phase.FORWARD, 1.0, writes=(0,), layer="first"),
        Op("b", Phase.FORWARD, 1.0, reads=(0,), writes=(1,), layer="second"),
        Op("b'", Phase.BACKWARD, 1.0, reads=(1,), writes=(2,), layer="second"),
        Op("update b", Phase.OPTIMIZER, 1.0, reads=(2,), step_op=True),
        Op("more", Phase.BACKWARD, 1.0, reads=(1,), layer="second"),
        Op("a'", Phase.BACKWARD, 1.0, reads=(2,), writes=(3,), layer="first"),
        Op("update a", Phase.OPTIMIZER, 1.0, reads=(3,), step_op=True),
    )
    workload = offer_orders(Workload("w", (Program("p", tensors, ops),), (0,), 2, "synthetic"), (BreadthFirst(),))
    validate_workload(workload)
    assert [f"{ops[op].name} {k}" for op, k in workload.sequence(0, "breadth-first")] == [
        "a 0", "a 1", "b 0", "b' 0", "more 0", "b 1", "b' 1", "update b 0", "more 1", "a' 0", "a' 1", "update a 0",
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), group=st.integers(2, 6), layers=st.integers(1, 3), rounds=st.integers(1, 3))
def test_orders_run_everything_once_on_data_that_is_there(seed, group, layers, rounds):
    workload = random_problem(seed).workload
    if workload.micro_batches == 1:
        return
    workload = Workload("w", workload.programs, (0,) * workload.device_count, group * rounds, "synthetic",
                        workload.collectives)  # fmt: skip
    try:
        offers = offer_orders(workload, (BreadthFirst(group, layers),))
    except InputError as error:
        assert f"micro_batch_orders.0.layers: {layers} in a block" in str(error)
        assert layers > 1
        return
    validate_workload(offers)


def test_names():
    orders = (BreadthFirst(), BreadthFirst(2), BreadthFirst(layers=3), BreadthFirst(4, 2))
    assert [order.name for order in orders] == [
        "breadth-first", "breadth-first-2", "breadth-first-layers-3", "breadth-first-4-layers-2",
    ]  # fmt: skip
    with pytest.raises(InputError, match="group: -1 must be at least 2"):
        BreadthFirst(group=-1)
