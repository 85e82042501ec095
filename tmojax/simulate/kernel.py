"""The event loop: dependency graph and link rules in, times out (docs/semantics.md, section 8).

Plain functions over arrays that numba compiles; without compilation they are ordinary Python and give the same bits.
Nodes of the graph become ready when all their predecessors have taken effect. The clock jumps from one end of an op,
set-up, hand-over or transfer to the next; ends closer together than `TIE` of the clock are one moment, so that
symmetric devices stay symmetric in spite of rounding. Inside a moment everything that can finish without a new
admission does so first; then engines are taken, then links are granted: the order in which ties are served never
depends on the order in which the loop happened to visit them.
"""

from __future__ import annotations

import numpy as np

from tmojax.simulate.jit import compiled, compiled_inner

INSTANT = 0  # takes no time: release, retire, signal, wait, lend, reclaim, entering a collective
WORK = 1  # occupies its device: compute, encode, decode
TRANSFER = 2  # holds engines: set-up, then bytes over links
COLLECTIVE = 3  # launch and latency, then bytes over links
TIMER = 4  # hand-over of a signal to other devices

FAIR, FCFS, PRIORITY, ORDER = 0, 1, 2, 3

LEFT, SINCE, RATE, END = 0, 1, 2, 3  # of a flow: bytes left at a time, rate from then on, and when it will end

TIE = 1e-12


@compiled
def fair_rates(count, flows, flow_class, link_ptr, link, coefficient, bandwidth, share, left, weight, users):
    """Max-min fair rates by progressive filling: `share[i]` in bytes/s on the most loaded link of flow i.

    The common level of all growing flows rises until a link is full; its flows stop there. Levels are computed from
    what is left of a link, not by adding steps, so flows that share nothing with a change keep their rate bit for bit.
    `left`, `weight`, `users` are scratch of one entry per link.
    """
    users[:] = 0
    for i in range(count):
        share[i] = -1.0
        kind = flow_class[flows[i]]
        for e in range(link_ptr[kind], link_ptr[kind + 1]):
            where = link[e]
            if users[where] == 0:
                left[where] = bandwidth[where]
                weight[where] = 0.0
            users[where] += 1
            weight[where] += coefficient[e]
    level = 0.0
    while True:
        full, lowest = -1, np.inf
        for where in range(users.size):
            if users[where] > 0:
                candidate = left[where] / weight[where]
                if candidate < lowest:
                    full, lowest = where, candidate
        if full < 0:
            break
        level = max(level, lowest)  # levels only rise; rounding must not make one fall, let alone below zero
        for i in range(count):
            if share[i] >= 0.0:
                continue
            kind = flow_class[flows[i]]
            crosses = False
            for e in range(link_ptr[kind], link_ptr[kind + 1]):
                if link[e] == full:
                    crosses = True
            if crosses:
                share[i] = level
                for e in range(link_ptr[kind], link_ptr[kind + 1]):
                    left[link[e]] -= coefficient[e] * level
                    weight[link[e]] -= coefficient[e]
                    users[link[e]] -= 1
    for i in range(count):
        if share[i] < 0.0:  # crosses no link: a collective of one device
            share[i] = np.inf


@compiled_inner
def _before(time_a, a, time_b, b, device, position):
    """Whether node a, due at time_a, is served before node b: earlier, then lower device, then earlier in the list."""
    if time_a != time_b:
        return time_a < time_b
    if device[a] != device[b]:
        return device[a] < device[b]
    return position[a] < position[b]


@compiled_inner
def _next_to_start(queue, queued, flow_class, engine_ptr, engine, busy, claimed):
    """Place in `queue` of the first transfer that can take its engines, or -1.

    Engines are first come, first served: a transfer that waits for one engine keeps its place at the others.
    """
    claimed[:] = False
    for place in range(queued):
        kind = flow_class[queue[place]]
        free = True
        for e in range(engine_ptr[kind], engine_ptr[kind + 1]):
            if busy[engine[e]] or claimed[engine[e]]:
                free = False
        if free:
            return place
        for e in range(engine_ptr[kind], engine_ptr[kind + 1]):
            claimed[engine[e]] = True
    return -1


@compiled_inner
def _next_to_admit(
    asking, asked, asked_s, flow_class, device_of, position, link_ptr, link, policy, slots, used, ranks, order_ptr,
    order, turn,
):  # fmt: skip
    """Place in `asking` of the transfer to admit now (semantics 8.3), or -1."""
    best = -1
    best_rank = 0
    for place in range(asked):
        node = asking[place]
        kind = flow_class[node]
        eligible = True
        for e in range(link_ptr[kind], link_ptr[kind + 1]):
            where = link[e]
            if policy[where] == FAIR:
                continue
            if used[where] >= slots[where]:
                eligible = False
            elif policy[where] == ORDER and order[order_ptr[where] + turn[where]] != node:
                eligible = False
        if not eligible:
            continue
        rank = ranks[kind, device_of[node]]
        if best >= 0 and rank > best_rank:
            continue
        other = asking[best]
        if best < 0 or rank < best_rank or _before(
            asked_s[node], node, asked_s[other], other, device_of, position
        ):  # fmt: skip
            best, best_rank = place, rank
    return best


@compiled_inner
def _slowdown(node, node_kind, flow, device_of, member_ptr, member, factors, computing):
    """Factor by which a flow progresses slower than its links allow, because devices compute meanwhile."""
    if node_kind[node] == TRANSFER:
        return factors[4] if computing[device_of[node]] >= 0 else 1.0
    for e in range(member_ptr[flow], member_ptr[flow + 1]):
        if computing[member[e]] >= 0:
            return factors[3]
    return 1.0


@compiled_inner
def _finish(node, succ_ptr, succ, waiting, stack, height):
    """Put the successors for which `node` was the last predecessor on the stack; its new height."""
    for e in range(succ_ptr[node], succ_ptr[node + 1]):
        other = succ[e]
        waiting[other] -= 1
        if waiting[other] == 0:
            stack[height] = other
            height += 1
    return height


@compiled_inner
def _enter_links(flow, link_ptr, link, now, on_link, busy_since):
    for e in range(link_ptr[flow], link_ptr[flow + 1]):
        where = link[e]
        if on_link[where] == 0:
            busy_since[where] = now
        on_link[where] += 1


@compiled_inner
def _record(now, flow_count, flows, share, flow_class, link_ptr, link, coefficient, rate, shown, segments, count):
    """Append (time, link, rate) for every link whose rate is another one; returns how many segments there are."""
    rate[:] = 0.0
    for i in range(flow_count):
        kind = flow_class[flows[i]]
        for e in range(link_ptr[kind], link_ptr[kind + 1]):
            rate[link[e]] += share[i] * coefficient[e]
    for where in range(rate.size):
        if rate[where] != shown[where]:
            if count < segments.shape[0]:
                segments[count, 0] = now
                segments[count, 1] = where
                segments[count, 2] = rate[where]
            count += 1
            shown[where] = rate[where]
    return count


@compiled_inner
def _add_flow(node, size_bytes, now, flows, flow, flow_count):
    flows[flow_count] = node
    flow[flow_count, LEFT] = size_bytes
    flow[flow_count, SINCE] = now
    flow[flow_count, RATE] = 0.0
    flow[flow_count, END] = np.inf
    return flow_count + 1


@compiled
def run_events(graph, rules, work_s, state, segments):
    """Run the graph. `work_s`: duration of WORK and TIMER nodes, set-up and latency of the others.

    Times go to `state`: NaN where nothing happened (deadlock, or no such phase). If `segments` has rows, they are
    filled with (time, link, bytes/s from then on), as many as there is room for. Returns (events, segments there are).
    """
    node_kind, device_of, position, flow_class, flow_bytes = (
        graph.kind, graph.device, graph.position, graph.flow_class, graph.flow_bytes
    )  # fmt: skip
    succ_ptr, succ = graph.succ_ptr, graph.succ
    link_ptr, link, coefficient = graph.link_ptr, graph.link, graph.coefficient
    engine_ptr, engine, source, destination = graph.engine_ptr, graph.engine, graph.source, graph.destination
    member_ptr, member, device_memory = graph.member_ptr, graph.member, graph.device_memory
    bandwidth, policy, slots, ranks = rules.bandwidth, rules.policy, rules.slots, rules.rank
    order_ptr, order, factors = rules.order_ptr, rules.order, rules.interference
    count = node_kind.size
    devices = device_memory.size
    interferes = False
    for i in range(factors.size):
        if factors[i] != 1.0:
            interferes = True

    start_s, flow_start_s, end_s, waiting, stack = (
        state.start_s, state.flow_start_s, state.end_s, state.waiting, state.stack
    )  # fmt: skip
    height = 0
    for node in range(count):
        waiting[node] = graph.waiting[node]
        start_s[node] = flow_start_s[node] = end_s[node] = np.nan
        if waiting[node] == 0:
            stack[height] = node
            height += 1

    # What each device computes; work left, in seconds without interference, at the time `compute_since`.
    computing, compute_end, compute_left, compute_since, compute_factor = (
        state.computing, state.compute_end, state.compute_left, state.compute_since, state.compute_factor
    )  # fmt: skip
    collectives = state.collectives
    for device in range(devices):
        computing[device] = -1
        compute_end[device] = np.inf
        collectives[device] = 0

    # Set-ups, launches and hand-overs under way; transfers that wait for engines, in the order of service; transfers
    # that wait for links; flows.
    fixed, fixed_end, fixed_count = state.fixed, state.fixed_end, 0
    queue, queue_s, queued = state.queue, state.queue_s, 0
    asking, asked_s, asked = state.asking, state.asked_s, 0
    flows, flow, share, flow_count = state.flows, state.flow, state.share, 0
    changed = False  # whether the set of flows is another one than at the last computation of rates

    engine_busy, claimed = state.engine_busy, state.claimed
    engine_busy[:] = False
    # Copies into and out of each memory that set up or move bytes.
    entering, leaving = state.entering, state.leaving
    entering[:] = 0
    leaving[:] = 0
    used, turn, on_link = state.used, state.turn, state.on_link
    busy_since, busy_s, shown, rate = state.busy_since, state.busy_s, state.shown, state.rate
    for where in range(bandwidth.size):
        used[where] = turn[where] = on_link[where] = 0
        busy_s[where] = shown[where] = 0.0
    record = segments.shape[0] > 0
    segment_count = 0

    now = 0.0
    limit = 0.0
    events = 0
    while True:
        # Everything that ends at this moment without a new start or admission.
        moved = True
        while moved:
            moved = False
            while height > 0:
                height -= 1
                node = stack[height]
                kind = node_kind[node]
                if kind == INSTANT:
                    start_s[node] = now
                    end_s[node] = now
                    height = _finish(node, succ_ptr, succ, waiting, stack, height)
                elif kind == WORK:
                    device = device_of[node]
                    start_s[node] = now
                    computing[device] = node
                    compute_left[device] = work_s[node]
                    compute_since[device] = now
                    compute_factor[device] = 1.0
                    compute_end[device] = now + work_s[node]
                elif kind == TRANSFER:
                    place = queued
                    while place > 0 and _before(now, node, queue_s[place - 1], queue[place - 1], device_of, position):
                        queue[place] = queue[place - 1]
                        queue_s[place] = queue_s[place - 1]
                        place -= 1
                    queue[place] = node
                    queue_s[place] = now
                    queued += 1
                else:
                    start_s[node] = now
                    fixed[fixed_count] = node
                    fixed_end[fixed_count] = now + work_s[node]
                    fixed_count += 1
            for device in range(devices):
                if compute_end[device] <= limit:
                    node = computing[device]
                    computing[device] = -1
                    compute_end[device] = np.inf
                    end_s[node] = now
                    events += 1
                    moved = True
                    height = _finish(node, succ_ptr, succ, waiting, stack, height)
            place = 0
            while place < fixed_count:
                if fixed_end[place] > limit:
                    place += 1
                    continue
                node = fixed[place]
                fixed_count -= 1
                fixed[place] = fixed[fixed_count]
                fixed_end[place] = fixed_end[fixed_count]
                events += 1
                moved = True
                kind = flow_class[node]
                if node_kind[node] == TIMER:
                    end_s[node] = now
                    height = _finish(node, succ_ptr, succ, waiting, stack, height)
                elif node_kind[node] == TRANSFER:
                    asking[asked] = node
                    asked_s[node] = now
                    asked += 1
                    leaving[source[kind]] -= 1
                    entering[destination[kind]] -= 1
                else:
                    flow_count = _add_flow(node, flow_bytes[node], now, flows, flow, flow_count)
                    flow_start_s[node] = now
                    changed = True
                    _enter_links(kind, link_ptr, link, now, on_link, busy_since)
                    for e in range(member_ptr[kind], member_ptr[kind + 1]):
                        collectives[member[e]] += 1

        # Engines.
        place = -1
        if queued > 0:
            place = _next_to_start(queue, queued, flow_class, engine_ptr, engine, engine_busy, claimed)
        if place >= 0:
            node = queue[place]
            queued -= 1
            for i in range(place, queued):
                queue[i] = queue[i + 1]
                queue_s[i] = queue_s[i + 1]
            kind = flow_class[node]
            for e in range(engine_ptr[kind], engine_ptr[kind + 1]):
                engine_busy[engine[e]] = True
            leaving[source[kind]] += 1
            entering[destination[kind]] += 1
            start_s[node] = now
            fixed[fixed_count] = node
            fixed_end[fixed_count] = now + work_s[node]
            fixed_count += 1
            continue

        # Links.
        while asked > 0:
            place = _next_to_admit(
                asking, asked, asked_s, flow_class, device_of, position, link_ptr, link, policy, slots, used, ranks,
                order_ptr, order, turn,
            )  # fmt: skip
            if place < 0:
                break
            node = asking[place]
            asked -= 1
            asking[place] = asking[asked]
            kind = flow_class[node]
            for e in range(link_ptr[kind], link_ptr[kind + 1]):
                where = link[e]
                used[where] += 1
                turn[where] += policy[where] == ORDER
            _enter_links(kind, link_ptr, link, now, on_link, busy_since)
            leaving[source[kind]] += 1
            entering[destination[kind]] += 1
            flow_count = _add_flow(node, flow_bytes[node], now, flows, flow, flow_count)
            flow_start_s[node] = now
            changed = True

        # Speeds.
        if changed:
            fair_rates(
                flow_count, flows, flow_class, link_ptr, link, coefficient, bandwidth, share, state.left, state.weight,
                state.users,
            )  # fmt: skip
        if changed or interferes:
            for i in range(flow_count):
                speed = share[i]
                if interferes:
                    speed /= _slowdown(
                        flows[i], node_kind, flow_class[flows[i]], device_of, member_ptr, member, factors, computing
                    )
                if speed != flow[i, RATE]:
                    if flow[i, RATE] > 0.0:
                        flow[i, LEFT] = max(flow[i, LEFT] - flow[i, RATE] * (now - flow[i, SINCE]), 0.0)
                    flow[i, RATE] = speed
                    flow[i, SINCE] = now
                    flow[i, END] = now + flow[i, LEFT] / speed
        if interferes:
            for device in range(devices):
                if computing[device] < 0:
                    continue
                memory = device_memory[device]
                factor = factors[0] if entering[memory] > 0 else 1.0
                if leaving[memory] > 0:
                    factor *= factors[1]
                if collectives[device] > 0:
                    factor *= factors[2]
                if factor != compute_factor[device]:
                    done = (now - compute_since[device]) / compute_factor[device]
                    compute_left[device] = max(compute_left[device] - done, 0.0)
                    compute_since[device] = now
                    compute_factor[device] = factor
                    compute_end[device] = now + compute_left[device] * factor
        if record and changed:
            segment_count = _record(
                now,
                flow_count,
                flows,
                share,
                flow_class,
                link_ptr,
                link,
                coefficient,
                rate,
                shown,
                segments,
                segment_count,
            )
        changed = False

        # The next moment.
        upcoming = np.inf
        for i in range(flow_count):
            upcoming = min(upcoming, flow[i, END])
        for device in range(devices):
            upcoming = min(upcoming, compute_end[device])
        for i in range(fixed_count):
            upcoming = min(upcoming, fixed_end[i])
        if upcoming == np.inf:
            break
        now = max(now, upcoming)
        limit = now + now * TIE

        kept = 0
        for i in range(flow_count):
            node = flows[i]
            if flow[i, END] > limit:
                if kept < i:
                    flows[kept] = node
                    for field in range(4):
                        flow[kept, field] = flow[i, field]
                    share[kept] = share[i]
                kept += 1
                continue
            changed = True
            events += 1
            end_s[node] = now
            kind = flow_class[node]
            transfer = node_kind[node] == TRANSFER
            for e in range(link_ptr[kind], link_ptr[kind + 1]):
                where = link[e]
                used[where] -= transfer
                on_link[where] -= 1
                if on_link[where] == 0:
                    busy_s[where] += now - busy_since[where]
            if transfer:
                leaving[source[kind]] -= 1
                entering[destination[kind]] -= 1
                for e in range(engine_ptr[kind], engine_ptr[kind + 1]):
                    engine_busy[engine[e]] = False
            else:
                for e in range(member_ptr[kind], member_ptr[kind + 1]):
                    collectives[member[e]] -= 1
            height = _finish(node, succ_ptr, succ, waiting, stack, height)
        flow_count = kept
    return events, segment_count
