"""Compile one training step for a GPU that is not there, and print what XLA says about its memory as JSON.

Nothing runs on a GPU: XLA compiles against a description of one. Run it as README.md says; every compile is a process
of its own because XLA flags are read once.
"""

import argparse
import json
import os
import sys
import time
from importlib.metadata import version

# Tile sizes are not searched (that needs a device), and no rematerialisation is wanted: memory is declared huge.
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

TARGETS = {
    "a100": dict(
        cc=(8, 0), clock=1.41, cores=108, bandwidth=1555000000000, l2=41943040, shared=167936, threads=2048,
        registers=65536, name="NVIDIA A100-SXM4-40GB",
    ),
    "h100": dict(
        cc=(9, 0), clock=1.98, cores=132, bandwidth=3352320000000, l2=52428800, shared=232448, threads=2048,
        registers=65536, name="NVIDIA H100 80GB HBM3",
    ),
}  # fmt: skip


def target_text(target: str) -> str:
    t = TARGETS[target]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {t["shared"]}
  threads_per_core_limit: {t["threads"]}
  core_count: {t["cores"]}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {t["bandwidth"]}
  l2_cache_size: {t["l2"]}
  clock_rate_ghz: {t["clock"]}
  device_memory_size: 1099511627776
  shared_memory_per_block_optin: {t["shared"] - 1024}
  cuda_compute_capability {{ major: {t["cc"][0]} minor: {t["cc"][1]} }}
  registers_per_core_limit: {t["registers"]}
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{t["name"]}"
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="as for build_model")
    parser.add_argument("--target", choices=sorted(TARGETS), default="a100")
    parser.add_argument("--hlo", help="also write the scheduled HLO text here")
    args = parser.parse_args()

    import jax
    import optax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tmojax.models import build_model

    pairs = (item.split("=", 1) for item in args.option)
    options = {key: int(value) if value.isdigit() else value for key, value in pairs}
    model = build_model(args.model, **options)
    optimizer = optax.adamw(1e-4)

    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(model.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    topology = topologies.get_topology_desc(platform="cuda", target_config=target_text(args.target), topology="1x1x8")
    mesh = Mesh(topology.devices[:1], ("gpu",))
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = (model.params, jax.eval_shape(optimizer.init, model.params), model.batch)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated), shapes)
    begin = time.time()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    if args.hlo:
        with open(args.hlo, "w") as file:
            file.write(compiled.as_text())
    json.dump(
        {
            "model": args.model, "options": options, "target": TARGETS[args.target]["name"],
            "temp_size_in_bytes": memory.temp_size_in_bytes,
            "argument_size_in_bytes": memory.argument_size_in_bytes,
            "alias_size_in_bytes": memory.alias_size_in_bytes,
            "output_size_in_bytes": memory.output_size_in_bytes,
            "compile_s": round(time.time() - begin, 1),
            "versions": {name: version(name) for name in ("jax", "jaxlib", "jax-cuda12-plugin", "flax", "optax")},
            "xla_flags": os.environ["XLA_FLAGS"],
        },
        sys.stdout, indent=2,
    )  # fmt: skip
    print()


if __name__ == "__main__":
    main()
