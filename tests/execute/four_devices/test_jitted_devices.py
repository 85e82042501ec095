"""A plan in one jitted step on four devices: gradients are averaged over them."""

import jax
import jax.numpy as jnp
import jitted_networks as networks
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tmojax import InputError
from tmojax.execute import jitted_step


def sharded_over(made, devices):
    everywhere, rows = PartitionSpec(), PartitionSpec("gpu")
    return jax.jit(
        jax.shard_map(
            made.step, mesh=Mesh(np.array(devices), ("gpu",)), in_specs=(everywhere, everywhere, rows),
            out_specs=everywhere, check_vma=False,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def made():
    net = networks.network("mlp")
    step, problem, schedule = networks.planned("mlp", 0.65, 1, False)
    return jitted_step(net.loss, net.params, net.batch, networks.OPTIMIZER, step, problem, schedule, axis_name="gpu")


def test_another_number_of_devices_than_planned(made):
    net = networks.network("mlp")
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), net.batch)
    with pytest.raises(InputError, match=r"axis_name: 'gpu' has 2 device\(s\), and the plan is for 4; .*gpus=2"):
        sharded_over(made, jax.devices()[:2])(net.params, networks.OPTIMIZER.init(net.params), batch)


def test_a_step_in_shard_map(made):
    net = networks.network("mlp")
    sharded = sharded_over(made, jax.devices())
    parts = [jax.tree.map(lambda x, i=i: x * (1 + i), net.batch) for i in range(4)]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    params, _, loss = sharded(net.params, networks.OPTIMIZER.init(net.params), batch)
    each = [jax.value_and_grad(net.plain)(net.params, part) for part in parts]
    value, gradients = jax.tree.map(lambda *x: sum(x) / 4, *each)
    assert abs(float(loss) - float(value)) <= 1e-6 * float(value)
    changes, _ = networks.OPTIMIZER.update(gradients, networks.OPTIMIZER.init(net.params), net.params)
    expected = jax.tree.map(jnp.add, net.params, changes)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(ours - theirs).max()) <= 2e-6 * float(jnp.abs(theirs).max())
