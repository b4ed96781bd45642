// Draws the tracks of ranks: passes, messages and copies, who waited for whom, the critical path.

const look = {};

function readLook() {
  const style = getComputedStyle(document.documentElement);
  for (const part of ["ground", "text", "faint", "line", "bubble", "accent", "curve"]) {
    look[part] = style.getPropertyValue(`--${part}`).trim();
  }
  look.isDark = luminance(look.ground) < 0.2;
  look.fills = page.kinds.map((kind) =>
    look.isDark && luminance(kind.colour) < 0.02 ? "#FFFFFF" : kind.colour);
  look.hatch = hatch();
  look.texts = look.fills.map((fill) => (luminance(fill) < 0.18 ? "#FFFFFF" : "#000000"));
}

// White strokes, which later chunks of a rank have, as in pictures.
function hatch() {
  const tile = document.createElement("canvas");
  const scale = 4; // finer than a screen
  tile.width = tile.height = 7 * scale;
  const pen = tile.getContext("2d");
  pen.scale(scale, scale);
  pen.strokeStyle = "#FFFFFF";
  pen.lineWidth = 0.9;
  for (const left of [-7, 0, 7]) {
    pen.moveTo(left - 1, 8);
    pen.lineTo(left + 8, -1);
  }
  pen.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

// Of a colour as #rrggbb, from 0 to 1, as WCAG has it.
function luminance(colour) {
  const parts = [1, 3, 5].map((n) => parseInt(colour.slice(n, n + 2), 16) / 255);
  const [red, green, blue] = parts.map((part) =>
    part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function begin(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// Within, nothing is drawn beside the axis.
function clipped(pen, canvas, height, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, plotWidth(canvas) + 1, height);
  pen.clip();
  draw();
  pen.restore();
}

function drawRun(run) {
  const { places, height } = rows(run);
  const canvas = run.canvas;
  const pen = begin(canvas, height);
  pen.textBaseline = "middle";
  drawNames(pen, run, places);
  clipped(pen, canvas, height, () => {
    pen.fillStyle = look.bubble;
    const end = xOf(canvas, run.length);
    const start = xOf(canvas, 0);
    for (const { track, y, height: h } of places) {
      if (track.group === "passes") pen.fillRect(start, y + 1, end - start, h - 2);
    }
    pen.textAlign = "center";
    for (const place of places) drawTrack(pen, run, place);
    if (shown.critical) drawPath(pen, run, places);
    const focus = kept || pointed;
    if (focus && focus.run === run) drawWaits(pen, run, places, focus.box);
  });
}

function drawNames(pen, run, places) {
  pen.textAlign = "right";
  for (const { track, y, height } of places) {
    const isPasses = track.group === "passes";
    pen.font = isPasses ? "12px system-ui, sans-serif" : "9px system-ui, sans-serif";
    pen.fillStyle = isPasses ? look.text : look.faint;
    const words = isPasses ? `rank ${track.rank}` : track.title;
    pen.fillText(words, GUTTER - 8, y + height / 2, GUTTER - 10);
  }
}

function drawTrack(pen, run, { track, y: edge, height }) {
  const canvas = run.canvas;
  const isPasses = track.group === "passes";
  const top = edge + 1, high = height - 2;
  const perTime = plotWidth(canvas) / (view.to - view.from);
  pen.font = `${height > 18 ? 11 : 9}px system-ui, sans-serif`;
  const isNamed = isPasses && namesFit(run, track, perTime);
  let painted = -1; // up to which pixel
  let first = firstAfter(run, track, view.from);
  if (first < track.last && at(run.half, first) === 1) first--;
  for (let n = first; n < track.last; n++) {
    const half = at(run.half, n);
    const { from, to } = drawnTimes(run, n);
    if (from > view.to) break;
    const kind = run.kind[n];
    const x = GUTTER + (from - view.from) * perTime;
    if (page.kinds[kind].is_mark) {
      drawMark(pen, x, top, page.kinds[kind].name);
      continue;
    }
    const end = GUTTER + (to - view.from) * perTime;
    if (end - painted < 0.5 && half !== 1) continue; // nobody sees it
    painted = end;
    drawnBoxes++;
    const width = end - x;
    const inner = width > 4 ? width - 1 : Math.max(width, 0.6);
    pen.globalAlpha = shown.critical && !run.onPath[n] ? 0.28 : at(run.step, n) % 2 ? 0.5 : 1;
    pen.fillStyle = look.fills[kind];
    const y = half === 1 ? top + high / 2 : top, h = half === null ? high : high / 2;
    pen.fillRect(x, y, inner, h);
    if (!isPasses) continue;
    if (width > 6 && run.chunks[run.stage[n]] % 2) {
      pen.fillStyle = look.hatch;
      pen.fillRect(x, y, inner, h);
    }
    const right = Math.min(end, canvas.clientWidth - RIGHT);
    if (width > 9) drawLabel(pen, run, n, Math.max(x, GUTTER), right, y + h / 2, isNamed);
  }
  pen.globalAlpha = 1;
}

// Overlapped passes are drawn as long as both.
function drawnTimes(run, n) {
  const half = at(run.half, n);
  return { from: run.start[half === 1 ? n - 1 : n], to: run.end[half === 0 ? n + 1 : n] };
}

const isOmitted = (run, box) => page.kinds[run.kind[box]].name === "omitted";
const fits = (text, width) => text.length * 7 + 3 < width;

// Whether each pass of a row that is wide enough for its microbatch is wide enough for its name.
// Otherwise no label of the row is a name, since 10 next to 2F1 reads as another kind of label.
function namesFit(run, track, perTime) {
  for (let n = track.first; n < track.last; n++) {
    if (page.kinds[run.kind[n]].is_mark || isOmitted(run, n)) continue;
    const { from, to } = drawnTimes(run, n);
    const width = (to - from) * perTime;
    if (fits(part(run, n), width) && !fits(name(run, n), width)) return false;
  }
  return true;
}

function drawLabel(pen, run, box, x, end, middle, isNamed) {
  let text = isNamed ? name(run, box) : part(run, box);
  if (isOmitted(run, box)) {
    const long = name(run, box);
    text = fits(long, end - x) ? long : String(at(run.stands_for, box));
  }
  if (!fits(text, end - x)) return;
  pen.fillStyle = look.texts[run.kind[box]];
  pen.fillText(text, (x + end) / 2, middle + 0.5);
}

function drawMark(pen, x, top, kind) {
  pen.fillStyle = look.text;
  pen.beginPath();
  if (kind === "STEP") {
    pen.moveTo(x - 4, top);
    pen.lineTo(x + 4, top);
    pen.lineTo(x, top + 7);
  } else {
    pen.arc(x, top + 3.5, 3.5, 0, 7);
  }
  pen.fill();
}

// Where the middle of the start (or the end) of a box is, if its track is shown.
function point(run, places, box, isEnd) {
  const place = places.find(({ track }) => track === run.trackOf[box]);
  if (!place) return null;
  const t = isEnd ? run.end[box] : run.start[box];
  return { x: xOf(run.canvas, t), y: place.y + place.height / 2, place };
}

function connect(pen, run, places, from, to) {
  const start = point(run, places, from, true), end = point(run, places, to, false);
  if (!start || !end) return;
  const bend = Math.min(Math.max(end.x - start.x, 10) / 2, 30);
  const over = start.y === end.y ? 14 : 0; // what is between them on their track
  pen.beginPath();
  pen.moveTo(start.x, start.y);
  pen.bezierCurveTo(start.x + bend, start.y - over, end.x - bend, end.y - over, end.x, end.y);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(end.x, end.y);
  pen.lineTo(end.x - 6, end.y - 3.5);
  pen.lineTo(end.x - 6, end.y + 3.5);
  pen.fill();
}

function outline(pen, run, places, box) {
  const start = point(run, places, box, false);
  if (!start) return;
  const width = xOf(run.canvas, run.end[box]) - start.x;
  pen.strokeRect(start.x, start.place.y + 1, Math.max(width - 1, 1), start.place.height - 2);
}

function drawWaits(pen, run, places, box) {
  const isSeen = (n) => places.some(({ track }) => track === run.trackOf[n]);
  // In the place of a message whose track is folded away, what is before and behind it.
  const source = (n) => (isSeen(n) ? [n] : run.needs[n].filter(isSeen));
  const earlier = before(run, box).flatMap(source);
  const later = after(run, box).flatMap((n) => (isSeen(n) ? [n] : run.followers[n].filter(isSeen)));
  const waitedFor = latest(run, before(run, box));
  const last = waitedFor < 0 ? -1 : latest(run, source(waitedFor));
  pen.strokeStyle = pen.fillStyle = look.text;
  for (const n of later) {
    pen.lineWidth = 1;
    pen.setLineDash([4, 3]);
    connect(pen, run, places, box, n);
    pen.setLineDash([]);
  }
  for (const n of earlier) {
    pen.strokeStyle = pen.fillStyle = n === last ? look.accent : look.text;
    pen.lineWidth = n === last ? 2 : 1;
    outline(pen, run, places, n);
    connect(pen, run, places, n, box);
  }
  pen.strokeStyle = look.accent;
  pen.lineWidth = 2.5;
  outline(pen, run, places, box);
}

function drawPath(pen, run, places) {
  pen.strokeStyle = pen.fillStyle = look.accent;
  pen.lineWidth = 1.5;
  const seen = run.critical.filter((n) => places.some(({ track }) => track === run.trackOf[n]));
  seen.forEach((box, n) => {
    if (run.end[box] < view.from || run.start[box] > view.to) return;
    const previous = seen[n - 1];
    if (n && run.trackOf[previous] !== run.trackOf[box]) connect(pen, run, places, previous, box);
  });
}
