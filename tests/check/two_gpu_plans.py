"""Valid plans for two GPUs: loans, copies that both use, signals and collectives."""

from __future__ import annotations

from plan_text import Plan, lines
from small_plans import KEEP, LAYER, ONE_GPU, G, W, layer, machine, problem

from tmojax.problem import Collective, CollectiveKind, Op, Phase, Problem, Program, Workload

# What the second GPU does when it plans alone.
SECOND = tuple(line.replace("gpu0", "gpu1") for line in KEEP.lines[0])

# gpu0 parks `a` in memory that gpu1 lends.
LOAN = Plan(
    layer(gpus=2),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        wait 1 out0
        offload a gpu0 gpu1
        release a gpu0
        prefetch a gpu1 gpu0
        done: release a gpu1
        signal 2 done
        compute back
        release a gpu0
        release b gpu0
        compute step
        release g gpu0
        """),
        lines("""
        prefetch x host gpu1
        compute f1
        free: release x gpu1
        lend 400 gpu0 7
        signal 1 free
        compute f2
        compute back
        release a gpu1
        release b gpu1
        compute step
        release g gpu1
        wait 2 comm
        reclaim 7
        """),
    ),
    ({"w": ("gpu0",)}, {"w": ("gpu1",)}),
)

# gpu1 copies the weights of gpu0 from the host while gpu0 does not change them.
READER = Plan(
    layer(gpus=2),
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        compute back
        release a gpu0
        release b gpu0
        wait 1 compute
        compute step
        release g gpu0
        offload w gpu0 host
        """),
        (
            *lines("""
            prefetch w host gpu1 owner=gpu0
            offload w gpu1 host owner=gpu0 part=0/2
            here: release w gpu1 owner=gpu0
            release w host owner=gpu0 part=0/2
            signal 1 here
            """),
            *SECOND,
        ),
    ),
    ({"w": ("gpu0", "host")}, {"w": ("gpu1",)}),
)

# --- collectives ------------------------------------------------------------------------------------------------------

REDUCED = Program(
    "reduced",
    LAYER.tensors,
    (
        *LAYER.ops[:3],
        Op("sum", Phase.COLLECTIVE, 0.0, updates=(G,), recomputable=False, collective="sum", step_op=True),
        Op("wsum", Phase.COLLECTIVE, 0.0, updates=(W,), recomputable=False, collective="wsum", step_op=True),
        LAYER.ops[3],
    ),
)


def reduced() -> Problem:
    collectives = tuple(Collective(name, CollectiveKind.ALL_REDUCE, 70, (0, 1)) for name in ("sum", "wsum"))
    workload = Workload("reduced", (REDUCED,), (0, 0), 1, "synthetic", collectives)
    return problem(workload, machine(2))


_REDUCED = lines("""
prefetch x host gpu0
compute f1
release x gpu0
compute f2
compute back
release a gpu0
release b gpu0
collective sum
collective wsum
compute step
release g gpu0
""")

REDUCE = Plan(
    reduced(),
    (_REDUCED, tuple(line.replace("gpu0", "gpu1") for line in _REDUCED)),
    ({"w": ("gpu0",)}, {"w": ("gpu1",)}),
)

# gpu0 offloads only when gpu1 says so.
STAGED = Plan(
    LOAN.problem,
    (
        lines("""
        prefetch x host gpu0
        compute f1
        release x gpu0
        compute f2
        wait 1 out0
        offload a gpu0 host
        release a gpu0
        prefetch a host gpu0
        compute back
        release a gpu0
        release a host
        release b gpu0
        compute step
        release g gpu0
        """),
        ("go: wait 2 comm", "signal 1 go", *SECOND),
    ),
    ({"w": ("gpu0",)}, {"w": ("gpu1",)}),
)
STAGED = STAGED.replace("compute f1", "early: compute f1", "signal 2 early")

# gpu0 and gpu1 park copies in each other's memory: both directions use engines of both.
PARKED = Plan(
    LOAN.problem,
    tuple(
        lines(f"""
        prefetch x host gpu{me}
        compute f1
        free: release x gpu{me}
        lend 400 gpu{other} 1
        signal {me} free
        compute f2
        wait {other} out{me}
        offload a gpu{me} gpu{other}
        release a gpu{me}
        prefetch a gpu{other} gpu{me}
        done: release a gpu{other}
        signal {me + 10} done
        compute back
        release a gpu{me}
        release b gpu{me}
        compute step
        release g gpu{me}
        wait {other + 10} comm
        reclaim 1
        """)
        for me, other in ((0, 1), (1, 0))
    ),
    ({"w": ("gpu0",)}, {"w": ("gpu1",)}),
)

TWO_GPUS = {"loan": LOAN, "reader": READER, "reduce": REDUCE, "staged": STAGED, "parked": PARKED}
VALID = ONE_GPU | TWO_GPUS
