"""Programs compiled for GPUs that are not there; skipped where the CUDA compiler of JAX is not installed."""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jitted_networks as networks
import numpy as np
import pytest
import test_jitted_chain as chain
import test_jitted_step as steps

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "ways_out"))
from jax_rows import by_policy, shapes_of
from networks import network

from tmojax.errors import InputError
from tmojax.execute import jitted_gpu
from tmojax.execute.jitted_checks import GpuCompile
from tmojax.execute.jitted_gpu import TARGETS, compile_for_gpu, missing, verify_on_gpu
from tmojax.execute.jitted_names import NameAction
from tmojax.execute.jitted_step import JittedStep, jitted_step

needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

# The models and sizes of the JAX tutorial on host offloading, written anew: ten layers of two matrices under a scan;
# as it is, with the input of each layer offloaded, and with the weights on the host as well.
TUTORIAL = """
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from tmojax.execute.jitted_gpu import target_device

device = jax.sharding.SingleDeviceSharding(target_device("a100"))
host = device.with_memory_kind("pinned_host")
policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host")

def layer(x, weights):
    return (checkpoint_name(x, "x") @ weights[0]) @ weights[1], None

def fetching(x, weights):
    return layer(x, jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), weights))

def memory(body, place):
    loss = lambda weights, x: jax.lax.scan(body, x, weights)[0].sum()
    shape = lambda *sizes, at: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=at)
    weights = shape(10, 256, 1024, at=place), shape(10, 1024, 256, at=place)
    found = jax.jit(jax.grad(loss)).lower(weights, shape(256, 256, at=device)).compile().memory_analysis()
    return found.temp_size_in_bytes / 2**20, found.host_temp_size_in_bytes / 2**20

def offloaded(body):
    return jax.checkpoint(body, policy=policy, prevent_cse=False)

print([memory(layer, device), memory(offloaded(layer), device), memory(offloaded(fetching), host)])
"""
TUTORIAL_MB = (17.25, 6.50, 4.75)
# With jax 0.10.1 for an A100: 17.50, 4.50, 4.50, and for an H100 1 MB more each. Versions fuse and schedule otherwise,
# and a layer has up to 2.25 MB.
TUTORIAL_TOLERANCE_MB = 2.25


@needs_compiler
@pytest.mark.long
def test_the_figures_of_the_jax_tutorial():
    environment = os.environ | {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run([sys.executable, "-c", TUTORIAL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    for (temp_mb, _), expected_mb in zip(found, TUTORIAL_MB, strict=True):
        assert temp_mb == pytest.approx(expected_mb, abs=TUTORIAL_TOLERANCE_MB)
    # What is offloaded is known exactly: ten inputs of 256 x 256 floats.
    assert [host_mb for _, host_mb in found] == [0, 2.5, 2.5]


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_planned_bytes_are_on_the_host(target):
    net = networks.network("scanned")
    made = steps.exported("scanned", 0.3)
    found = verify_on_gpu(made, net.params, net.batch, target=target)
    assert found.host_temp_bytes == made.plan.host_bytes > 0
    net, made = networks.network("mlp"), steps.exported("mlp", 0.65, False)
    assert verify_on_gpu(made, net.params, net.batch, target=target).host_temp_bytes == made.plan.host_bytes
    made, _ = chain.exported(0.5)
    assert verify_on_gpu(made, chain.PARAMS, chain.BATCH, target=target).host_temp_bytes == made.plan.host_bytes


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("form", ["policy", "explicit"])
def test_an_export_is_compiled_where_it_can_be(form):
    made = steps.exported("scanned", 0.3) if form == "policy" else chain.exported(0.5)[0]
    found = made.verification.compiled
    assert found is not None and found.target == "h100" and found.flags == jitted_gpu.BASE_FLAGS
    assert found.host_temp_bytes == made.plan.host_bytes > 0 and found.peak_bytes > 0
    assert made.verification.not_compiled == "" and found.line() in made.verification.lines()


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_networks_of_the_table_leave_the_device(name):
    net = network(name)
    shapes = shapes_of(net.batch(np.random.default_rng(0)))
    _, _, _, made = by_policy(net, shapes)
    found = verify_on_gpu(made, net.params, shapes)
    assert found.host_temp_bytes == made.plan.host_bytes > 0
    assert found.temp_bytes < found.peak_bytes <= found.temp_bytes + 2 * found.argument_bytes


@needs_compiler
@pytest.mark.long
def test_what_the_jaxpr_calls_void_is_void():
    made = steps.exported("mlp", 0.65, False)
    plan = replace(made.plan, actions={"x": NameAction.OFFLOAD}, bytes_of={"x": 6 * 1024 * 64 * 4})
    weights, x = (jnp.ones((64, 64)), jnp.ones((64, 64))), jnp.ones((1024, 64))
    for prevent_cse in (True, False):
        loss = steps.per_layer(prevent_cse, 6, plan.policy())
        verification = steps.verify(loss, weights, x, plan)
        assert verification.void
        with pytest.raises(InputError, match="XLA has voided it"):
            verify_on_gpu(JittedStep(loss, plan, verification, made.step, made.shapes), weights, x, target="h100")


@needs_compiler
@pytest.mark.long
def test_what_cannot_be_compiled_is_an_error(monkeypatch):
    with pytest.raises(InputError, match=r"the compiler failed with flags .* --xla_no_such_flag=1: .*compile_for=None"):
        compile_for_gpu(jnp.sin, jnp.ones(3), flags=["--xla_no_such_flag=1"])

    def calls_back(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(InputError, match=r"JAX cannot export the function: .*; an export with compile_for=None is not"):
        compile_for_gpu(calls_back, jnp.ones(3))
    monkeypatch.setattr(jitted_gpu, "LONGEST_S", 0.01)
    with pytest.raises(InputError, match=r"not done after 0\.01 s with flags"):
        compile_for_gpu(jnp.sin, jnp.ones(3))


def export(name, factor, **settings):
    net = networks.network(name)
    step, problem, schedule = networks.planned(name, factor, 1, False)
    return jitted_step(net.loss, net.params, net.batch, networks.OPTIMIZER, step, problem, schedule, **settings)


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(jitted_gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed \(pip install \"jax\[cuda12\]\"\)"):
        compile_for_gpu(jnp.sin, jnp.ones(3))
    found = export("mlp", 0.65).verification
    assert found.compiled is None
    assert found.lines()[-1] == f"not compiled for a GPU: {jitted_gpu.NOT_INSTALLED}"


def test_every_export_asks_the_compiler_and_what_it_voids_is_an_error(monkeypatch):
    """The compiler itself is replaced here, so that this is tested where there is none."""
    asked = []

    def compiler(function, params, batch, *, target, flags):
        shapes = jax.eval_shape(function, params, batch)
        asked.append((target, jax.tree.structure(shapes[1])))
        return GpuCompile(target, ("--flag",), "0", 7, host, 1, peak)

    monkeypatch.setattr(jitted_gpu, "missing", lambda: "")
    monkeypatch.setattr(jitted_gpu, "compile_for_gpu", compiler)
    net, host, peak = networks.network("mlp"), 10**9, 8
    made = export("mlp", 0.65)
    assert asked == [("h100", jax.tree.structure(net.params))] and made.verification.compiled.temp_bytes == 7
    assert made.verification.lines()[-1].startswith("compiled for h100 (jax 0, --flag): 1000000000 bytes")
    assert export("mlp", 0.65, compile_for="a100").verification.compiled.target == "a100"
    assert export("mlp", 0.65, compile_for=None).verification.not_compiled == "compile_for is None"
    peak = networks.planned("mlp", 0.65, 1, False)[1].capacity_bytes(0) + 5
    assert export("mlp", 0.65).verification.lines()[-1].startswith("that peak is 5 bytes more than a GPU has")
    host = made.plan.host_bytes - 1
    with pytest.raises(InputError, match=r"the compiled program \d+ with flags --flag: XLA has voided it; put one jax"):
        export("mlp", 0.65)
    with pytest.raises(InputError, match="XLA has voided it"):
        chain.explicit_step(
            chain.loss_of, chain.block, chain.PARAMS, chain.BATCH, networks.OPTIMIZER, *chain.planned(0.5)
        )


def test_unknown_targets_are_errors():
    with pytest.raises(InputError, match="target: 'k80' is unknown; choose one of a100, h100"):
        jitted_gpu.target_device("k80")
    with pytest.raises(InputError, match="compile_for: 'k80' is unknown"):
        export("mlp", 0.65, compile_for="k80")
