// What is shown, and where it stands on the screen.

const view = { from: 0, to: longest() };
const shown = { critical: false, messages: false, copies: true, bytes: false };
let pointed = null; // {run, box}
let kept = null; // the same, after a click
let drawnBoxes = 0, drawnIn = 0; // in the last picture, and the milliseconds it took

function show(from, to) {
  const width = Math.min(Math.max(to - from, longest() / 1e5), longest());
  view.from = Math.min(Math.max(from, 0), longest() - width);
  view.to = view.from + width;
  redraw();
}

function zoom(factor, time = (view.from + view.to) / 2) {
  const width = Math.min((view.to - view.from) / factor, longest());
  const part = (time - view.from) / (view.to - view.from);
  show(time - part * width, time + (1 - part) * width);
}

const pan = (part) => {
  const step = part * (view.to - view.from);
  show(view.from + step, view.to + step);
};

const GUTTER = 120; // left of the time axis, for names
const RIGHT = 26;
const MEMORY = 96; // height of the curves

function rows(run) {
  const row = run.ranks > 24 ? 15 : 22;
  const visible = run.tracks.filter((t) => t.group === "passes" || shown[t.group]);
  const places = [];
  let y = 2;
  let rank = -1;
  for (const track of visible) {
    if (track.rank !== rank && rank >= 0) y += 3;
    rank = track.rank;
    const height = track.group === "passes" ? row : 10;
    places.push({ track, y, height });
    y += height;
  }
  return { places, height: y + 2 };
}

const plotWidth = (canvas) => canvas.clientWidth - GUTTER - RIGHT;
const xOf = (canvas, time) =>
  GUTTER + ((time - view.from) / (view.to - view.from)) * plotWidth(canvas);
const timeAt = (canvas, x) =>
  view.from + ((x - GUTTER) / plotWidth(canvas)) * (view.to - view.from);
