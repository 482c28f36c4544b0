"""Timelines as one HTML page without outside parts, for schedules of any size: zoom, move, hover.

The page carries the events as numbers and draws what is visible on a canvas, so that 64 ranks with 1024 microbatches
stay quick where an SVG would have 200,000 elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape

from zbkern.pipeline import draw
from zbkern.pipeline.costs import Costs
from zbkern.pipeline.timeline import Timeline


def html(
    timelines: Sequence[Timeline], titles: Sequence[str] | None = None, costs: Sequence[Costs] | None = None
) -> str:
    """The page; titles and costs as in `draw.save`. The wheel zooms, dragging moves, hovering tells, a double click
    shows everything again."""
    titles, tracks = draw.checked(timelines, titles, costs)
    data = {
        "unit": timelines[0].unit,
        "timelines": [
            _timeline(timeline, title, rows) for timeline, title, rows in zip(timelines, titles, tracks, strict=True)
        ],
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # a title must not end the script
    legend = "".join(
        f'<span><i style="background:{fill}"></i>{escape(name)}</span>'
        for name, fill in draw.legend(timelines, max((h for t in tracks for r in t for _, h in r), default=0.0))
    )
    colours = {"idle": draw.IDLE, "outside": draw.OUTSIDE, "held": draw.HELD}
    parts = {"TITLE": escape(", ".join(titles)), "LEGEND": legend, "COLOURS": json.dumps(colours), "DATA": text}
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], _PAGE)


def _timeline(timeline: Timeline, title: str, tracks: Sequence[draw.Track]) -> dict[str, object]:
    """fills: colour and colour of the number; rows: [start, end, fill, action, microbatch] of each event."""
    first = min((row[0].start for row in timeline.events if row), default=0.0)
    fills: dict[str, int] = {}
    rows = []
    for rank, row in enumerate(timeline.events):
        chunks, found = timeline.schedule.chunks_of(rank), []
        for _, action, start, end in row:
            fill = draw.shade(action.kind, chunks.index(action.chunk), len(chunks))
            place = fills.setdefault(fill, len(fills))
            found.append([_short(start - first), _short(end - first), place, str(action), action.microbatch])
        rows.append(found)
    return {
        "title": title,
        "note": draw.note(timeline),
        "fills": [[fill, "#24292f" if draw.is_light(fill) else "#fff"] for fill in fills],
        "rows": rows,
        "held": [[[_short(time - first), _short(held)] for time, held in track] for track in tracks],
    }


def _short(value: float) -> float:
    """Six digits: more cannot be seen."""
    return float(f"{value:.6g}")


_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>@TITLE@</title>
<style>
body { margin: 16px; font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: #57606a; }
#legend span { margin-right: 18px; white-space: nowrap; }
#legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; }
#help { float: right; color: #8c959f; }
canvas { display: block; width: 100%; cursor: grab; margin-top: 8px; }
#tip { position: fixed; display: none; padding: 6px 9px; border-radius: 6px; background: #24292f; color: #fff;
  white-space: pre; pointer-events: none; }
</style>
<div id="help">wheel: zoom &nbsp; drag: move &nbsp; double click: all</div>
<div id="legend">@LEGEND@</div>
<canvas></canvas>
<div id="tip"></div>
<script>
const data = @DATA@;
const colours = @COLOURS@;
const LEFT = 64, TITLE = 30, ROW = 24, HELD = 24, GAP = 18, AXIS = 30, FONT = 'px system-ui, sans-serif';
const canvas = document.querySelector('canvas'), pen = canvas.getContext('2d'), tip = document.querySelector('#tip');
const span = Math.max(...data.timelines.map(t => Math.max(...t.rows.map(r => r.length ? r[r.length - 1][1] : 0)))) || 1;
const most = Math.max(0, ...data.timelines.flatMap(t => t.held.map(h => h.reduce((m, s) => Math.max(m, s[1]), 0))));
let from = 0, to = span, width = 0, marked = null, places = [];

const x = time => LEFT + (time - from) / (to - from) * (width - LEFT);
const time = left => from + (left - LEFT) / (width - LEFT) * (to - from);
const short = value => Math.abs(value) < 1e4 ? String(+value.toPrecision(4)) : value.toFixed(0);

// index of the first entry whose time at `place` is beyond t, in entries ordered by it
function after(entries, t, place) {
  let low = 0, high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (entries[middle][place] > t) high = middle; else low = middle + 1;
  }
  return low;
}

function text(words, left, top, colour, align = 'left', font = '12') {
  pen.fillStyle = colour; pen.font = font + FONT; pen.textAlign = align; pen.fillText(words, left, top);
}

function box(fill, begin, end, top, height) {
  const left = Math.max(LEFT, x(begin)), right = Math.min(width, x(end));
  if (right > left) { pen.fillStyle = fill; pen.fillRect(left, top, right - left, height); }
}

function row(timeline, rank, top) {
  const events = timeline.rows[rank];
  text('rank ' + rank, LEFT - 8, top + 15, '#57606a', 'right');
  box(colours.outside, from, to, top, ROW - 2);
  if (!events.length) return;
  box(colours.idle, events[0][0], events[events.length - 1][1], top, ROW - 2);
  const pixel = (to - from) / (width - LEFT);
  for (let i = after(events, from, 1); i < events.length && events[i][0] < to; i++) {
    const [begin, end, fill, name, microbatch] = events[i], [back, front] = timeline.fills[fill];
    const left = Math.max(LEFT, x(begin)), right = Math.min(width, x(end)), gap = Math.min(1, (right - left) / 8);
    if (end - begin < pixel) {  // one per half a pixel, and whole pixels, or all would be pale
      pen.fillStyle = back;
      pen.fillRect(left, top, 1, ROW - 2);
      i = Math.max(i, after(events, begin + pixel / 2, 0) - 1);
      continue;
    }
    pen.fillStyle = '#fff';
    pen.fillRect(left, top, right - left, ROW - 2);
    pen.fillStyle = back;
    pen.fillRect(left, top, right - left - gap, ROW - 2);
    if (right - left >= 2 + 7 * String(microbatch).length)
      text(right - left > 100 ? name : microbatch, (left + right) / 2, top + 15, front, 'center', '11');
    if (marked === microbatch && right - left > 2) {
      pen.strokeStyle = '#24292f'; pen.lineWidth = 2;
      pen.strokeRect(left + 1, top + 1, right - left - gap - 2, ROW - 4);
    }
  }
}

function held(steps, top) {
  const bottom = top + HELD - 4, pixel = (to - from) / (width - LEFT), last = steps.length - 1;
  box('#f6f8fa', from, to, top, HELD - 4);
  if (last < 0 || steps[last][0] <= from || steps[0][0] >= to) return;
  const inside = t => Math.min(width, Math.max(LEFT, x(t)));
  let i = Math.max(0, after(steps, from, 0) - 1);
  pen.beginPath();
  pen.moveTo(inside(steps[i][0]), bottom);
  for (; i < last && steps[i][0] < to; i = Math.max(i + 1, after(steps, steps[i][0] + pixel / 2, 0) - 1)) {
    const level = bottom - steps[i][1] / most * (HELD - 5);
    pen.lineTo(inside(steps[i][0]), level);
    pen.lineTo(inside(steps[i + 1][0]), level);
  }
  pen.lineTo(inside(steps[i][0]), bottom);
  pen.fillStyle = colours.held;
  pen.fill();
}

function axis(top) {
  let step = 10 ** Math.floor(Math.log10((to - from) / 5));
  step *= [1, 2, 5, 10].find(factor => (to - from) / (step * factor) <= 10);
  text(data.unit || 'time', LEFT - 20, top + 19, '#57606a', 'right');
  for (let i = Math.ceil(from / step); i * step <= to; i++) {
    pen.fillStyle = '#8c959f'; pen.fillRect(x(i * step), top + 2, 1, 4);
    text(short(i * step), x(i * step), top + 19, '#57606a', 'center');
  }
}

function show() {
  const ranks = data.timelines.reduce((sum, t) => sum + t.rows.length, 0), each = ROW + (most ? HELD : 0);
  const height = data.timelines.length * (TITLE + GAP) + ranks * each - GAP + AXIS, sharp = devicePixelRatio || 1;
  canvas.style.height = height + 'px';
  width = canvas.clientWidth;
  canvas.width = width * sharp; canvas.height = height * sharp;
  pen.setTransform(sharp, 0, 0, sharp, 0, 0);
  places = [];
  const above = -canvas.getBoundingClientRect().top - each, below = above + each + innerHeight;
  let top = 0;
  for (const timeline of data.timelines) {
    text(timeline.title, LEFT, top + 19, '#24292f', 'left', '600 14');
    text(timeline.note, LEFT + 10 + pen.measureText(timeline.title).width, top + 19, '#57606a');
    top += TITLE;
    for (let rank = 0; rank < timeline.rows.length; rank++) {
      places.push([top, timeline, rank]);
      if (top > above && top < below) {
        row(timeline, rank, top);
        if (most) held(timeline.held[rank], top + ROW - 2);
      }
      top += each;
    }
    top += GAP;
  }
  axis(top - GAP);
}

function look(begin, length) {
  length = Math.min(span, Math.max(length, span * 1e-6));
  from = Math.min(Math.max(0, begin), span - length); to = from + length;
  show();
}

function hover(event) {
  const t = time(event.offsetX), place = places.find(([top]) => event.offsetY >= top && event.offsetY < top + ROW);
  const events = place ? place[1].rows[place[2]] : [], found = events[after(events, t, 1)];
  const hit = found && found[0] <= t && event.offsetX >= LEFT ? found : null, before = marked;
  marked = hit && hit[4];
  tip.style.display = hit ? 'block' : 'none';
  if (hit) {
    const [begin, end, , name] = hit, steps = place[1].held[place[2]];
    const level = steps.length ? after(steps, begin, 0) - 1 : -1;
    tip.textContent = `${name} on rank ${place[2]}\\n${short(begin)} to ${short(end)}, takes ${short(end - begin)}`
      + (level < 0 ? '' : `\\nmemory held ${short(steps[level][1])}`);
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
  }
  if (marked !== before) show();
}

let drag = null;
canvas.addEventListener('wheel', event => {
  event.preventDefault();
  const t = time(Math.max(LEFT, event.offsetX)), factor = 1.2 ** Math.sign(event.deltaY);
  look(t - (t - from) * factor, (to - from) * factor);
}, {passive: false});
canvas.addEventListener('pointerdown', event => {
  drag = [event.clientX, from, event.clientY, scrollY]; canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener('pointermove', event => {
  if (!drag) return hover(event);
  scrollTo(scrollX, drag[3] + drag[2] - event.clientY);
  look(drag[1] - (event.clientX - drag[0]) / (width - LEFT) * (to - from), to - from);
});
canvas.addEventListener('pointerup', () => { drag = null; });
canvas.addEventListener('pointerleave', () => { tip.style.display = 'none'; });
canvas.addEventListener('dblclick', () => look(0, span));
addEventListener('resize', show);
addEventListener('scroll', show);
show();
</script>
"""
