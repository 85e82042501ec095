"""Pictures of the worked examples: streams over time, and bytes over time below.

    python tests/check/draw_worked_examples.py

writes docs/images/semantics-*.svg. Plain SVG text, so that the same example gives the same file everywhere.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

import numpy as np
from occupancy import Occupancy
from worked_examples import Example, examples

from tmojax.problem import COMMUNICATION_STREAM, COMPUTE_STREAM, FIRST_ENGINE_STREAM, Kind
from tmojax.simulate import Simulation, prepare

LEFT, WIDTH, RIGHT = 96, 560, 24  # pixels
ROW, BAR, PANEL, GAP = 22, 16, 46, 14
INK, QUIET, GRID = "#222222", "#666666", "#e3e3e3"
COLOURS = {
    "compute": "#3b6ea8",
    "again": "#b5651d",
    "collective": "#7a4f9a",
    "offload": "#2e7d5b",
    "prefetch": "#a23b54",
}
LIGHT = {"collective": "#d9cbe4", "offload": "#bfdccf", "prefetch": "#ecc8d0"}
STALL, BYTES, LIMIT = "#dddddd", "#c9d8ea", "#b00020"


def picture(example: Example) -> str:
    """The SVG of one example."""
    schedule = example.plan.schedule()
    simulation = prepare(example.plan.problem, schedule).run(steps=example.steps)
    return _Drawing(example, simulation).text()


class _Drawing:
    def __init__(self, example: Example, simulation: Simulation) -> None:
        self.example, self.simulation = example, simulation
        self.problem, self.schedule = example.plan.problem, example.plan.schedule()
        ends = np.concatenate([*simulation.end_s, [0.0]])
        self.last_s = float(np.nanmax(ends)) or 1.0
        if example.stuck:
            self.last_s += 2.0
        self.parts: list[str] = []
        self.y = 8.0

    def x(self, time_s: float) -> float:
        return LEFT + WIDTH * min(time_s, self.last_s) / self.last_s

    def text(self) -> str:
        for device in range(len(self.schedule.lists)):
            self.streams(device)
        occupancy = Occupancy(self.problem, self.schedule)
        if self.example.steps == 1:  # bytes are counted for one step
            for memory in (*range(1, len(self.problem.machine.memories)), 0):
                self.memory(occupancy, memory)
        bottom = self.y
        self.axis(bottom)
        height = bottom + 22
        whole = LEFT + WIDTH + RIGHT
        title = escape(self.example.title.split(". ", 1)[1])
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{height:g}" '
            f'viewBox="0 0 {whole} {height:g}" font-family="sans-serif" font-size="11" role="img">\n'
            f'<title>{title}</title>\n<rect width="{whole}" height="{height:g}" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"

    def streams(self, device: int) -> None:
        rows = self.schedule.lists[device]
        name = self.problem.machine.devices[device].name
        bars: dict[int, list[int]] = {COMPUTE_STREAM: []}
        for index, row in enumerate(rows):
            stream = self.stream(row)
            if stream is not None:
                bars.setdefault(stream, []).append(index)
        for stream in sorted(bars):
            self.label(f"{name} {self.stream_name(stream)}", self.y + BAR - 4)
            if stream == COMPUTE_STREAM:
                self.stalls(device, bars[stream])
            ran: set[tuple[int, int]] = set()
            for step in range(self.example.steps):
                for index in bars[stream]:
                    run = (int(rows["op"][index]), int(rows["micro_batch"][index]))
                    self.bar(device, index, step * len(rows) + index, again=step == 0 and run in ran)
                    ran.add(run)
            self.y += ROW
        self.y += 4

    def stream(self, row: np.void) -> int | None:
        """Where an instruction is drawn: its stream, of transfers the first engine."""
        kind = Kind(int(row["kind"]))
        if kind in (Kind.OFFLOAD, Kind.PREFETCH):
            route = self.problem.machine.route(int(row["memory"]), int(row["to_memory"]))
            return FIRST_ENGINE_STREAM + route.engines[0]
        streams = {Kind.COLLECTIVE: COMMUNICATION_STREAM}
        if kind in (Kind.COMPUTE, Kind.ENCODE, Kind.DECODE):
            return COMPUTE_STREAM
        return streams.get(kind)

    def stream_name(self, stream: int) -> str:
        names = {COMPUTE_STREAM: "compute", COMMUNICATION_STREAM: "comm"}
        return names[stream] if stream in names else f"engine {self.problem.machine.engines[stream - 2]}"

    def stalls(self, device: int, indices: list[int]) -> None:
        length = len(self.schedule.lists[device])
        places = [step * length + index for step in range(self.example.steps) for index in indices]
        free_s = 0.0
        for place in places:
            start_s, end_s = self.simulation.start_s[device][place], self.simulation.end_s[device][place]
            until_s = self.last_s if np.isnan(start_s) else start_s
            if until_s > free_s:
                self.box(free_s, until_s, STALL)
            if np.isnan(start_s):
                break
            free_s = end_s

    def bar(self, device: int, index: int, place: int, again: bool) -> None:
        row = self.schedule.lists[device][index]
        kind = Kind(int(row["kind"]))
        start_s, end_s = self.simulation.start_s[device][place], self.simulation.end_s[device][place]
        if np.isnan(start_s):
            return
        flow_s = self.simulation.transfer_start_s[device][place]
        end_s = self.last_s if np.isnan(end_s) else end_s
        words = self.example.plan.lines[device][index].split(": ")[-1].split()
        if kind in (Kind.OFFLOAD, Kind.PREFETCH, Kind.COLLECTIVE):
            colour = kind.name.lower()
            flow_s = end_s if np.isnan(flow_s) else flow_s
            if flow_s > start_s:
                self.box(start_s, flow_s, LIGHT[colour])
            if end_s > flow_s:
                self.box(flow_s, end_s, COLOURS[colour])
            label = words[1] if kind is Kind.COLLECTIVE else f"{words[0]} {words[1]}"
        else:
            self.box(start_s, end_s, COLOURS["again" if again and kind is Kind.COMPUTE else "compute"])
            label = words[1] if kind is Kind.COMPUTE else f"{words[0]} {words[1]}"
            flow_s = start_s
        for text in (label, words[1], ""):
            if self.x(end_s) - self.x(start_s) > 6.4 * len(text) + 4:
                break
        middle, wide = (flow_s + end_s) / 2, self.x(end_s) - self.x(flow_s)
        if wide < 6.4 * len(text) + 4:
            middle = (start_s + end_s) / 2
        fill = "#ffffff" if wide >= 6.4 * len(text) + 4 else INK
        self.parts.append(
            f'<text x="{self.x(middle):.1f}" y="{self.y + BAR - 4:g}" fill="{fill}" text-anchor="middle">'
            f"{escape(text)}</text>"
        )

    def box(self, start_s: float, end_s: float, colour: str) -> None:
        left, right = self.x(start_s), self.x(end_s)
        self.parts.append(
            f'<rect x="{left:.1f}" y="{self.y:g}" width="{max(right - left - 1, 0.5):.1f}" height="{BAR}" rx="2" '
            f'fill="{colour}"/>'
        )

    def memory(self, occupancy: Occupancy, memory: int) -> None:
        """Bytes over time; where they matter, the capacity."""
        times, sizes = occupancy.over_time(self.simulation, memory)
        most = int(sizes.max(initial=0))
        if not most:
            return
        spec = self.problem.machine.memories[memory]
        limit = spec.capacity_bytes - spec.reserve_bytes
        near = limit < 4 * most
        scale = (PANEL - 6) / (max(limit, most) if near else most)
        base = self.y + PANEL
        points = [(LEFT, base)]
        level = 0
        for time_s, size in zip(times.tolist(), sizes.tolist(), strict=True):
            points += [(self.x(time_s), base - level * scale), (self.x(time_s), base - size * scale)]
            level = size
        points += [(self.x(self.last_s), base - level * scale), (self.x(self.last_s), base)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{BYTES}" stroke="{COLOURS["compute"]}" stroke-width="1"/>')
        if near:
            y = base - limit * scale
            self.parts.append(
                f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LIMIT}" '
                f'stroke-dasharray="5 3"/>'
            )
        self.label(spec.name, base - PANEL / 2 - 2)
        note = f"most {most}" + (f" of {limit}" if near else "")
        self.label(note, base - PANEL / 2 + 11, QUIET)
        self.y += PANEL + GAP

    def axis(self, bottom: float) -> None:
        step = next(s for s in (0.5, 1, 2, 5, 10, 20) if self.last_s / s <= 14)
        lines = []
        for number in range(int(self.last_s / step + 1e-9) + 1):
            x = self.x(number * step)
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom:g}" stroke="{GRID}"/>')
            self.parts.append(
                f'<text x="{x:.1f}" y="{bottom + 14:g}" fill="{QUIET}" text-anchor="middle">{number * step:g}</text>'
            )
        self.parts[:0] = lines
        self.label("seconds", bottom + 14, QUIET)

    def label(self, text: str, y: float, colour: str = INK) -> None:
        self.parts.append(f'<text x="{LEFT - 8}" y="{y:g}" fill="{colour}" text-anchor="end">{escape(text)}</text>')


if __name__ == "__main__":
    for each in examples():
        each.picture.write_text(picture(each))
