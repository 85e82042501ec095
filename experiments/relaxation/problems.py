"""The problems whose plans are compared: what each changes in configs/runs/coordination.toml."""

HALF_DUPLEX = "machine.preset=prototype-4gpu-12.5-half-duplex"
ALL = 'actions=["offload", "recompute"]'
GPT2 = (
    'workload={kind="model", model="gpt2", batch=8, dtype="bfloat16", optimizer="adamw"}',
    "machine.preset=rtx4090x4-one-uplink",
)

PROBLEMS: dict[str, tuple[str, ...]] = {
    "prototype-offload-1.33-k1": ('actions=["offload"]', "capacity.footprint_factor=1.33", "micro_batches=1"),
    "prototype-offload-1.33-k8": ('actions=["offload"]', "capacity.footprint_factor=1.33", "micro_batches=8"),
    "prototype-all-3-k8": (ALL, "capacity.footprint_factor=3", "micro_batches=8"),
    "prototype-all-2-k1-half": (ALL, "capacity.footprint_factor=2", "micro_batches=1", HALF_DUPLEX),
    "gpt2-all-3-k8": (*GPT2, ALL, "capacity.footprint_factor=3", "micro_batches=8"),
}

# Not among the 200 plans: here the model does not see what decides (README.md). Made when asked for by name.
OUTSIDE: dict[str, tuple[str, ...]] = {
    "gpt2-two-sockets": (
        'workload={kind="model", model="gpt2", batch=4, dtype="float16", optimizer="adamw"}',
        "machine.preset=dual-socket-v100x4", ALL, "capacity.footprint_factor=2", "micro_batches=4",
    ),
}  # fmt: skip

ALL_PROBLEMS = {**PROBLEMS, **OUTSIDE}
