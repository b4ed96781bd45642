// Draws what each rank holds, and the time axis.

// Where a rank's curve goes up or down: time, and what is held from then on.
function curve(run, rank, column) {
  const track = run.ofRank[rank];
  const points = [];
  for (let n = track.first; n < track.last; n++) {
    const held = at(column, n);
    if (held === null) continue; // a mark
    if (points.length && at(run.step, n) !== at(run.step, n - 1)) points.push([run.end[n - 1], 0]);
    points.push([run.start[n], held]);
  }
  points.push([run.end[track.last - 1], 0]);
  return points;
}

const inBytes = (run) => shown.bytes && run.figures.peaks_bytes !== null;

// How the amounts of run stand on the screen.
function memoryScale(run) {
  const bytes = inBytes(run);
  const column = bytes ? run.held_bytes : run.held;
  const peak = run.most[bytes ? "held_bytes" : "held"] || 1;
  const allowed = run.limit && (bytes ? run.limit.bytes : run.limit.microbatches);
  const limit = allowed && allowed < 2 * peak ? allowed : 0; // one far above is not drawn
  const top = 10, low = MEMORY - 8;
  const most = Math.max(peak, limit);
  const yOf = (amount) => low - (amount / (most * 1.05)) * (low - top);
  return { bytes, column, limit, most, top, yOf };
}

// The pass whose rank has the curve that is nearest to a place, at that time; -1 if there is none.
function passOfCurve(run, x, y) {
  if (x < GUTTER) return -1;
  const { column, yOf } = memoryScale(run);
  const t = timeAt(run.memory, x);
  const passes = run.ofRank.map((track) => {
    const next = Math.min(firstAfter(run, track, t), track.last - 1);
    return run.start[next] > t && next > track.first ? next - 1 : next;
  });
  const away = passes.map((n) => Math.abs(yOf(at(column, n)) - y));
  const least = Math.min(...away);
  return least < 12 ? passes[away.indexOf(least)] : -1;
}

function drawMemory(run) {
  const canvas = run.memory;
  const pen = begin(canvas, MEMORY);
  const { bytes, limit, most, top, yOf } = memoryScale(run);
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const unit = bytes ? 2 ** 30 : 1;
  for (const tick of ticks(0, most / unit, 3)) {
    pen.fillStyle = look.faint;
    pen.fillText(String(tick), GUTTER - 8, yOf(tick * unit));
    pen.fillStyle = look.line;
    pen.fillRect(GUTTER, yOf(tick * unit), plotWidth(canvas), 0.5);
  }
  pen.fillStyle = look.faint;
  pen.textAlign = "left";
  pen.fillText(bytes ? "activations," : "microbatches", 0, top + 8);
  pen.fillText(bytes ? "GiB" : "held", 0, top + 20);
  const focus = kept || pointed;
  const marked = focus && focus.run === run ? run.trackOf[focus.box].rank : -1;
  clipped(pen, canvas, MEMORY, () => {
    for (let rank = 0; rank < run.ranks; rank++) {
      if (rank !== marked) drawCurve(pen, canvas, curveOf(run, rank, bytes), yOf, false);
    }
    if (marked >= 0) drawCurve(pen, canvas, curveOf(run, marked, bytes), yOf, true);
    if (limit) drawLimit(pen, canvas, yOf(limit));
  });
}

// Made once: a zoom draws it again and again.
function curveOf(run, rank, bytes) {
  const known = bytes ? (run.curvesInBytes ??= []) : (run.curves ??= []);
  return (known[rank] ??= curve(run, rank, bytes ? run.held_bytes : run.held));
}

function drawCurve(pen, canvas, points, yOf, isMarked) {
  pen.strokeStyle = isMarked ? look.accent : look.curve;
  pen.globalAlpha = isMarked ? 1 : 0.6;
  pen.lineWidth = isMarked ? 2 : 1;
  pen.beginPath();
  let y = yOf(0);
  for (let n = 0; n < points.length; n++) {
    const [t, held] = points[n];
    const next = n + 1 < points.length ? points[n + 1][0] : t;
    if (next < view.from) {
      y = yOf(held);
      continue;
    }
    const x = xOf(canvas, t);
    pen.lineTo(x, y);
    y = yOf(held);
    pen.lineTo(x, y);
    if (t > view.to) break;
  }
  pen.stroke();
  pen.globalAlpha = 1;
}

function drawLimit(pen, canvas, y) {
  pen.strokeStyle = look.accent;
  pen.lineWidth = 1;
  pen.setLineDash([6, 4]);
  pen.beginPath();
  pen.moveTo(GUTTER, y);
  pen.lineTo(canvas.clientWidth, y);
  pen.stroke();
  pen.setLineDash([]);
}

// Round numbers from low to high, about count of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((n) => n * size >= rough);
  const numbers = [];
  for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-9); n++) {
    numbers.push(Number((n * step).toPrecision(12)));
  }
  return numbers;
}

function drawAxis() {
  const canvas = element("axis");
  const pen = begin(canvas, 34);
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "top";
  pen.fillStyle = look.faint;
  pen.fillRect(GUTTER, 1, plotWidth(canvas), 1);
  for (const tick of ticks(view.from, view.to, Math.max(plotWidth(canvas) / 110, 2))) {
    const x = xOf(canvas, tick);
    pen.fillRect(x, 1, 1, 5);
    pen.fillText(tick ? time(tick) : "0", x, 8);
  }
  pen.textAlign = "left";
  pen.fillText("time", 0, 8);
  if (page.unit !== "s") pen.fillText("in the unit of the costs", GUTTER, 21);
}
