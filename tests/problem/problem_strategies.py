"""Hypothesis strategies for problems and schedules that the file formats must carry."""

from hypothesis import strategies as st

from tmojax.problem import (
    COMMUNICATION_STREAM,
    Action,
    Codec,
    Device,
    Interference,
    Lifetime,
    Link,
    LinkPolicy,
    LinkPolicyKind,
    ListBuilder,
    Machine,
    Memory,
    MemoryKind,
    Op,
    Overheads,
    Phase,
    Placement,
    Problem,
    Program,
    Route,
    Schedule,
    Segment,
    Tensor,
    TensorKind,
    Workload,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
times_s = st.floats(0, 1e6, allow_subnormal=True)
sizes_bytes = st.integers(0, 10**13)


def names(prefix: str, count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(texts, min_size=count, max_size=count).map(
        lambda items: [f"{prefix}{index}{text}" for index, text in enumerate(items)]
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Chains with random sizes, K, orders, codecs and one or two GPUs that share the host link."""
    gpus = draw(st.integers(1, 2))
    depth = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 3))
    tensor_names = draw(names("t", depth + 2))
    tensors = [
        Tensor(
            tensor_names[i],
            draw(sizes_bytes),
            draw(st.sampled_from(TensorKind)),
            alias_group=draw(texts),
            replica_group=draw(texts),
        )
        for i in range(depth + 1)
    ]
    tensors.append(Tensor(tensor_names[-1], draw(sizes_bytes), TensorKind.WEIGHT, Lifetime.STATE))
    state = depth + 1
    ops = [
        Op(
            name,
            draw(st.sampled_from(Phase)),
            draw(times_s),
            reads=(i, state),
            writes=(i + 1,),
            workspace_bytes=draw(sizes_bytes),
            layer=draw(texts),
            flops=draw(sizes_bytes),
        )
        for i, name in enumerate(draw(names("op", depth)))
    ]
    ops.append(Op("update", Phase.OPTIMIZER, draw(times_s), updates=(state,), recomputable=False, step_op=True))
    backwards = tuple(Segment(0, depth, k) for k in reversed(range(micro_batches)))
    orders = {"other": (*backwards, Segment(0, depth + 1, 0, True))} if draw(st.booleans()) else {}
    workload = Workload(
        draw(texts), (Program("p", tuple(tensors), tuple(ops), orders),), (0,) * gpus, micro_batches, draw(texts)
    )
    rate = st.floats(1e-3, 1e15)
    factor = st.floats(1, 10)
    machine = Machine(
        draw(texts),
        memories=(
            *(Memory(f"gpu{g}", MemoryKind.DEVICE, 10**9, draw(st.integers(0, 10**9))) for g in range(gpus)),
            Memory("host", MemoryKind.HOST, 10**12, 5, draw(st.integers(-1, 10**12)), draw(st.booleans())),
        ),
        links=(Link("up", draw(rate), draw(times_s)), Link("down", draw(rate), draw(times_s))),
        engines=tuple(f"gpu{g}.{way}" for g in range(gpus) for way in ("copy_out", "copy_in")),
        routes=tuple(
            route for g in range(gpus) for route in (Route(g, gpus, (0,), (2 * g,)), Route(gpus, g, (1,), (2 * g + 1,)))
        ),
        devices=tuple(Device(f"gpu{g}", "gpu", g, gpus, draw(texts)) for g in range(gpus)),
        overheads=Overheads(draw(times_s), draw(times_s), draw(times_s)),
        interference=Interference(draw(factor), draw(factor), draw(factor), draw(factor), draw(factor)),
        codecs=(Codec("half", 1, 2, draw(rate), draw(rate), draw(st.integers(0, 3))),),
        assumptions=tuple(draw(st.lists(texts, max_size=2))),
    )
    return Problem(draw(texts), workload, machine, frozenset(draw(st.sets(st.sampled_from(Action)))))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Rows of every kind; not schedules of any problem."""
    number = st.integers(0, 2**31 - 1)
    lists = []
    for _ in range(draw(st.integers(1, 3))):
        rows = ListBuilder()
        for kind in draw(st.lists(st.integers(0, 11), max_size=12)):
            copy = {"owner": draw(st.integers(-1, 3)), "part": draw(st.integers(0, 3)), "parts": 4}
            a, b, c, d = (draw(number) for _ in range(4))
            match kind:
                case 0:
                    rows.compute(a, b)
                case 1:
                    rows.offload(a, b, c, d, form=draw(st.integers(-1, 2)), **copy)
                case 2:
                    rows.prefetch(a, b, c, d, form=draw(st.integers(-1, 2)), **copy)
                case 3:
                    rows.release(a, b, c, form=draw(st.integers(-1, 2)), **copy)
                case 4:
                    rows.encode(a, b, c, d, **copy)
                case 5:
                    rows.decode(a, b, c, d, **copy)
                case 6:
                    rows.collective(a, b)
                case 7:
                    rows.retire(a)
                case 8:
                    rows.signal(a, b)
                case 9:
                    rows.wait(a, COMMUNICATION_STREAM)
                case 10:
                    rows.lend(draw(st.integers(0, 2**63 - 1)), a, b)
                case 11:
                    rows.reclaim(a)
        lists.append(rows.build())
    pairs = st.lists(st.tuples(number, number), max_size=4).map(tuple)
    policies = st.builds(
        LinkPolicy, st.sampled_from(LinkPolicyKind), st.integers(1, 9), st.lists(number, max_size=3).map(tuple), pairs
    )
    placement = st.builds(Placement, number, st.lists(number, max_size=3).map(tuple))
    return Schedule(
        tuple(lists),
        tuple(tuple(draw(st.lists(placement, max_size=3))) for _ in lists),
        tuple(draw(st.lists(policies, max_size=3))),
        draw(texts),
    )
