"""Pictures as inline SVG: a scatter with intervals, a bound against its limit, lines, a roofline. Numbers in, text out.

Colours and fonts are classes that the page styles (page.py). Widths of text are estimated: no font is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from strop.metric import Estimate

CHARACTER = 6.6
"""Width of a character of the 12 px labels, on the safe side."""
ZERO = 1e-6
"""Distances up to this are drawn in a strip of their own: on a log axis there is no place for zero."""


@dataclass(frozen=True)
class Point:
    """One program in the scatter.

    Attributes:
        label: Its name.
        tag: What stands for the name where there is no room.
        x, y: Values with bounds.
        title: Text of the tooltip.
        is_front: No other point beats it.
        is_parent: Of the untouched parent.
    """

    label: str
    tag: str
    x: Estimate
    y: Estimate
    title: str
    is_front: bool
    is_parent: bool

    @property
    def style(self) -> str:
        """Classes of its mark and label."""
        return " ".join(name for name, holds in (("front", self.is_front), ("parent", self.is_parent)) if holds)


@dataclass(frozen=True)
class Series:
    """One line of a plot: `values` at `positions`, None where there is nothing."""

    label: str
    positions: Sequence[float]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Spot:
    """Something that a program does, under its roof.

    Attributes:
        intensity: FLOPs per byte.
        speed: FLOPs per second, in the unit of the roof.
        title: Text of the tooltip.
    """

    intensity: float
    speed: Estimate
    title: str


@dataclass(frozen=True)
class Roof:
    """One program and the peaks that were measured with it.

    Attributes:
        label: Its name.
        bytes_per_s, flops_per_s: Peaks, in one unit (both in 10⁹ a second).
        spots: What it does.
    """

    label: str
    bytes_per_s: float
    flops_per_s: float
    spots: Sequence[Spot]


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels.

    Attributes:
        low, high: Of the values, low < high; both positive where it is a log axis.
        start, stop: Pixels that `low` and `high` go to.
        is_log: Equal ratios take equal lengths.
    """

    low: float
    high: float
    start: float
    stop: float
    is_log: bool

    def __call__(self, value: float) -> float:
        """The pixel of a value; values beyond the ends stay at the ends."""
        value = min(max(value, self.low), self.high)
        a, b, v = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return self.start + (v - a) / (b - a) * (self.stop - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the axis, at most `most`."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for digits in ((1, 2, 5), (1, 3), (1,)):
                values = [d * 10.0**e for e in range(first, last + 1) for d in digits]
                found = [v for v in values if self.low <= v <= self.high]
                if 3 <= len(found) <= most:
                    return found
            if len(found) > most:
                return found[:: -(-len(found) // most)]
        step = _round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Box:
    """A rectangle that a label must not cover."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Shared area in square pixels."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)


def scatter(points: Sequence[Point], *, width: int, height: int, titles: tuple[str, str], use_tags: bool) -> str:
    """Speed to the right, closeness up: the upper right corner is where one wants to be.

    Args:
        points: At least one; y is a distance, 0 or more.
        width: Of the picture, pixels.
        height: Of the picture, pixels.
        titles: Of the x and the y axis.
        use_tags: Label with `tag` instead of `label`.
    """
    area = Box(52, 34, width - 14, height - 42)
    strip = 44 if any(p.y.value <= ZERO for p in points) else 0
    speeds = [v for p in points for v in (p.x.lower, p.x.value, p.x.upper)]
    x_axis = _axis(speeds, area.left + 16, area.right - 16, is_log=max(speeds) > 3 * min(speeds) > 0)
    positive = [v for p in points if p.y.value > ZERO for v in (p.y.lower, p.y.value, p.y.upper) if v > ZERO]
    y_axis = _axis(positive or [1e-3, 1e-1], area.top + strip + 12, area.bottom - 12, is_log=True)

    def y_of(value: float) -> float:
        return area.top + 14 if value <= ZERO else y_axis(value)

    out = [_frame(area), *_x_ticks(x_axis, area, 4 if use_tags else 7, has_lines=True), *_titles(area, titles)]
    out += _y_ticks(y_axis, area, 6) if positive else []
    segments: list[tuple[str, float, float, float, float]] = []
    if strip:
        segments.append(("break", area.left, area.top + strip, area.right, area.top + strip))
        out.append(_text(area.left - 7, area.top + 18, "≈ 0", "tick", "end"))
    placed = [(p, x_axis(p.x.value), y_of(p.y.value)) for p in points]
    front = [(x, y) for p, x, y in placed if p.is_front]
    segments += [("front-line", *a, *b) for a, b in pairwise(_steps(front, area))]
    for p, x, y in placed:
        segments.append(("whisker", x_axis(p.x.lower), y, x_axis(p.x.upper), y))
        segments.append(("whisker", x, y_of(p.y.lower), x, y_of(p.y.upper)))
    out += [_line(*segment) for segment in segments]

    obstacles = [Box(x - 7, y - 7, x + 7, y + 7) for _, x, y in placed]
    obstacles += [Box(min(a, c) - 2, min(b, d) - 2, max(a, c) + 2, max(b, d) + 2) for _, a, b, c, d in segments]
    texts = [p.tag if use_tags else p.label for p in points]
    wanted = [(text, x, y) for text, (_, x, y) in zip(texts, placed, strict=True)]
    labels = place_labels(wanted, obstacles, Box(area.left + 2, area.top + 2, area.right - 2, area.bottom - 2))
    for (_, x, y), (box, is_far) in zip(wanted, labels, strict=True):
        if is_far:
            near = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
            out.append(_line("leader", x, y, *near))
    for (p, x, y), text, (box, _) in zip(placed, texts, labels, strict=True):
        title = f"<title>{escape(p.title)}</title>"
        out.append(f'<circle class="dot {p.style}" cx="{x:.1f}" cy="{y:.1f}" r="5">{title}</circle>')
        out.append(_text(box.left + 2, box.bottom - 4, text, f"label {p.style}", "start"))
    summary = "; ".join(p.title.replace("\n", ", ") for p in points)
    return _svg(width, height, f"Quality against speed. {summary}", out)


def place_labels(
    wanted: Sequence[tuple[str, float, float]], obstacles: Sequence[Box], area: Box
) -> list[tuple[Box, bool]]:
    """Where labels go so that they cover neither each other nor anything drawn, as near to their points as can be.

    Args:
        wanted: Text and the point (x, y) that it belongs to.
        obstacles: What is drawn already.
        area: Labels stay inside.

    Returns:
        In the same order: the label's box, and whether it is so far away that it needs a line to its point.
    """
    taken = list(obstacles)
    result: dict[int, tuple[Box, bool]] = {}
    for index in sorted(range(len(wanted)), key=lambda i: (wanted[i][2], wanted[i][1])):
        text, x, y = wanted[index]
        width, height = len(text) * CHARACTER + 4, 16.0
        best: tuple[float, Box, bool] | None = None
        for gap in (8, 14, 22, 32, 44, 58, 74, 92, 112, 134):
            for dx, dy in (
                (1, 0),
                (-1, 0),
                (0, -1),
                (0, 1),
                (1, -0.8),
                (1, 0.8),
                (-1, -0.8),
                (-1, 0.8),
                (0.4, -1),
                (0.4, 1),
            ):
                left = x + dx * gap - (width if dx < 0 else 0 if dx > 0 else width / 2)
                middle = y + dy * (gap + height / 2)
                box = Box(left, middle - height / 2, left + width, middle + height / 2)
                outside = width * height - box.overlap(area)
                covered = sum(box.overlap(other) for other in taken)
                cost = 50 * outside + 10 * covered + gap + (3 if dx < 0 else 0) + 2 * abs(dy)
                if best is None or cost < best[0]:
                    best = (cost, box, gap > 14)
        assert best is not None
        result[index] = best[1:]
        taken.append(best[1])
    return [result[i] for i in range(len(wanted))]


def limit_axis(values: Sequence[float], limit: float, start: float, stop: float) -> Axis:
    """The axis that several rows of one gate share: values and limit with room on both sides, log over two decades."""
    finite = [v for v in [*values, limit] if math.isfinite(v)]
    low, high = min(finite), max(finite)
    if low > 0 and high / low > 100:
        return Axis(low / 2, high * 2, start, stop, is_log=True)
    room = 0.18 * (high - low) or 0.5 * abs(limit) or 1.0
    return Axis(low - room, high + room, start, stop, is_log=False)


def against_limit(
    estimate: Estimate | None, limit: float, *, is_upper: bool, axis: Axis, outcome: str, text: str, height: int = 22
) -> str:
    """An interval on the axis of its gate, with the limit as a line and the side that passes shaded.

    Args:
        estimate: Value and bounds; None: not measured.
        limit: Of the gate.
        is_upper: The limit is the largest value that passes.
        axis: Shared by the rows of the gate.
        outcome: Class of the mark: `PASS`, `FAIL`, ….
        text: For those who cannot see the picture.
        height: Pixels.
    """
    width, middle, at = axis.stop + axis.start, height / 2, axis(limit)
    left, right = (axis.start, at) if is_upper else (at, axis.stop)
    out = [
        f'<rect class="allowed" x="{left:.1f}" y="3" width="{right - left:.1f}" height="{height - 6}" rx="2"/>',
        _line("track", axis.start, middle, axis.stop, middle),
        _line("limit", at, 0, at, height),
    ]
    if estimate is not None:
        out.append(_line(f"bound {outcome}", axis(estimate.lower), middle, axis(estimate.upper), middle))
        out.append(f'<circle class="mark {outcome}" cx="{axis(estimate.value):.1f}" cy="{middle}" r="4"/>')
    return _svg(width, height, text, out, "small")


def lines(
    series: Sequence[Series], *, width: int, height: int, titles: tuple[str, str], are_log: tuple[bool, bool]
) -> str:
    """Lines over a common x axis; the page says whose they are: the k-th has the class `s<k>`.

    Args:
        series: At least one with a value.
        width: Of the picture, pixels.
        height: Of the picture, pixels.
        titles: Of the x and the y axis.
        are_log: Log x axis, log y axis; on a log axis values that are not positive are left out.
    """
    area = Box(52, 34, width - 14, height - 42)
    drawn = [
        [
            (x, y)
            for x, y in zip(s.positions, s.values, strict=True)
            if y is not None and (y > 0 or not are_log[1]) and (x > 0 or not are_log[0])
        ]
        for s in series
    ]
    xs, ys = ([point[i] for path in drawn for point in path] for i in (0, 1))
    x_axis = _axis(xs, area.left, area.right, is_log=are_log[0])
    y_axis = _axis(ys if are_log[1] else [0.0, *ys], area.bottom - 8 * are_log[1], area.top + 8, is_log=are_log[1])
    out = [_frame(area), *_x_ticks(x_axis, area, 6), *_y_ticks(y_axis, area, 5), *_titles(area, titles)]
    for index, (s, path) in enumerate(zip(series, drawn, strict=True)):
        points = " ".join(f"{x_axis(a):.1f},{y_axis(b):.1f}" for a, b in path)
        title = f"<title>{escape(s.label)}</title>"
        out.append(f'<polyline class="series s{index}" points="{points}">{title}</polyline>')
    return _svg(width, height, f"{titles[1]} over {titles[0]}: {', '.join(s.label for s in series)}", out)


def roofline(roofs: Sequence[Roof], *, width: int, height: int, titles: tuple[str, str]) -> str:
    """Speed over intensity, both log: under the roof that memory (rising) and arithmetic (level) put over each program.

    The page says whose they are: the k-th program's roof and marks have the class `s<k>`. The first mark of each is
    round, the others are square.

    Args:
        roofs: At least one, each with at least one mark.
        width: Of the picture, pixels.
        height: Of the picture, pixels.
        titles: Of the x and the y axis.
    """
    area = Box(52, 34, width - 14, height - 42)
    xs = [x for r in roofs for x in (r.flops_per_s / r.bytes_per_s, *(s.intensity for s in r.spots))]
    ys = [y for r in roofs for s in r.spots for y in (s.speed.lower, s.speed.value, s.speed.upper) if y > 0]
    x_axis = _axis([min(xs) / 2, 2 * max(xs)], area.left, area.right, is_log=True)
    y_axis = _axis([min(ys) / 2, 1.5 * max(*ys, *(r.flops_per_s for r in roofs))], area.bottom, area.top, is_log=True)
    out = [_frame(area), *_x_ticks(x_axis, area, 6, has_lines=True), *_y_ticks(y_axis, area, 5), *_titles(area, titles)]
    for index, roof in enumerate(roofs):
        start = max(x_axis.low, y_axis.low / roof.bytes_per_s)
        corners = ((start, start * roof.bytes_per_s), (roof.flops_per_s / roof.bytes_per_s, roof.flops_per_s))
        path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in (*corners, (x_axis.high, roof.flops_per_s)))
        out.append(f'<polyline class="roof s{index}" points="{path}"><title>{escape(roof.label)}</title></polyline>')
    for index, roof in enumerate(roofs):
        for place, spot in enumerate(roof.spots):
            x, y = x_axis(spot.intensity), y_axis(spot.speed.value)
            title = f"<title>{escape(spot.title)}</title>"
            shape = (
                f'<rect class="spot s{index}" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9">{title}</rect>'
                if place
                else f'<circle class="spot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="5">{title}</circle>'
            )
            out += [_line("whisker", x, y_axis(spot.speed.lower), x, y_axis(spot.speed.upper)), shape]
    summary = "; ".join(s.title.replace("\n", ", ") for r in roofs for s in r.spots)
    return _svg(width, height, f"{titles[1]} over {titles[0]}. {summary}", out)


def short(value: float) -> str:
    """A number on an axis."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if exponent < -3 or exponent > 5:
        digit = f"{value / 10.0**exponent:.3g}"
        power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return power if digit == "1" else f"{digit}·{power}"
    return f"{value:.{max(0, 2 - exponent)}f}".rstrip("0").rstrip(".") if exponent < 2 else f"{value:,.0f}"


def _axis(values: Sequence[float], start: float, stop: float, is_log: bool) -> Axis:
    """From the smallest to the largest value, widened where they are so close that noise would fill the picture."""
    low, high = min(values), max(values)
    if is_log and high < 10 * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    elif not is_log and high - low < 0.1 * abs(high):
        low, high = low - 0.2 * abs(high), high + 0.2 * abs(high)
    return Axis(low, high if high > low else low + 1, start, stop, is_log)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(d * power for d in (1, 2, 5, 10) if d * power >= step * (1 - 1e-9))


def _steps(points: Sequence[tuple[float, float]], area: Box) -> list[tuple[float, float]]:
    """Corners of the edge of what can be had: everything left of it and below is beaten by a point of the front."""
    if not points:
        return []
    ordered = sorted(points)
    corners = [(area.left, ordered[0][1]), ordered[0]]
    for (x, _), (next_x, next_y) in pairwise(ordered):
        corners += [(x, next_y), (next_x, next_y)]
    return [*corners, (ordered[-1][0], area.bottom)]


def _x_ticks(axis: Axis, area: Box, most: int, has_lines: bool = False) -> list[str]:
    texts = [_text(axis(t), area.bottom + 16, short(t), "tick", "middle") for t in axis.ticks(most)]
    return texts + [_line("grid", axis(t), area.top, axis(t), area.bottom) for t in axis.ticks(most) if has_lines]


def _y_ticks(axis: Axis, area: Box, most: int) -> list[str]:
    texts = [_text(area.left - 7, axis(t) + 4, short(t), "tick", "end") for t in axis.ticks(most)]
    return texts + [_line("grid", area.left, axis(t), area.right, axis(t)) for t in axis.ticks(most)]


def _titles(area: Box, titles: tuple[str, str]) -> list[str]:
    x_title = _text(area.right, area.bottom + 34, titles[0], "axis", "end")
    return [x_title, _text(area.left - 44, area.top - 16, titles[1], "axis", "start")]


def _frame(area: Box) -> str:
    size = f'width="{area.right - area.left:.1f}" height="{area.bottom - area.top:.1f}"'
    return f'<rect class="frame" x="{area.left}" y="{area.top}" {size}/>'


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, style: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str], style: str = "plot") -> str:
    return (
        f'<svg class="{style}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">{"".join(parts)}</svg>'
    )
