// What a reader points at, and keys.

function boxAt(run, x, y) {
  if (x < GUTTER) return -1;
  const place = rows(run).places.find((p) => y >= p.y && y < p.y + p.height);
  if (!place) return -1;
  const t = timeAt(run.canvas, x);
  const near = (2 * (view.to - view.from)) / plotWidth(run.canvas); // two pixels
  const n = firstAfter(run, place.track, t - near);
  return n < place.track.last && run.start[n] <= t + near ? n : -1;
}

function describe(run, box) {
  const kind = page.kinds[run.kind[box]];
  const track = run.trackOf[box];
  const lines = [[name(run, box), "b"]];
  if (kind.name === "reduction" || kind.name === "omitted") lines.push([kind.does]);
  else {
    const chunks = Math.max(...run.chunks) ? `, chunk ${run.chunks[run.stage[box]]}` : "";
    const step = Array.isArray(run.step) ? `, step ${at(run.step, box)}` : "";
    const stage = `stage ${run.stage[box]}${chunks} of rank ${track.rank}`;
    lines.push([`${kind.does}: microbatch ${part(run, box)}, ${stage}${step}`]);
  }
  const length = run.end[box] - run.start[box];
  const idle = box > track.first ? run.start[box] - run.end[box - 1] : run.start[box];
  const hasIdled = track.group === "passes" && idle > 1e-9 * run.length;
  const idling = hasIdled ? `, after ${time(idle)} of idling` : "";
  lines.push([`from ${time(run.start[box])} to ${time(run.end[box])}${idling}`]);
  lines.push([`takes ${time(length)} (cost ${time(run.cost[box])})`]);
  const held = at(run.held, box), bytes = at(run.held_bytes, box);
  if (held !== null) {
    const amounts = [microbatches(held), ...(bytes === null ? [] : [bytesText(bytes)])];
    lines.push([`its rank holds ${amounts.join(", ")}`]);
  }
  const earlier = before(run, box);
  const last = latest(run, earlier);
  const named = (n) => `${name(run, n)} of rank ${run.trackOf[n].rank}`;
  if (earlier.length) {
    const isLast = (n) => n === last && earlier.length > 1;
    const words = earlier.map((n) =>
      `${named(n)}, until ${time(run.end[n])}${isLast(n) ? " (last)" : ""}`);
    lines.push([`waited for ${words.join("; ")}`]);
  }
  const later = after(run, box);
  if (later.length) {
    const words = later.slice(0, 6).map(named);
    if (later.length > 6) words.push(`${later.length - 6} more`);
    lines.push([`waited for by ${words.join("; ")}`]);
  }
  return lines;
}

function tell(x, y) {
  const tip = element("tip");
  const focus = kept || pointed;
  tip.hidden = !focus;
  if (!focus) return;
  tip.replaceChildren(...describe(focus.run, focus.box).map(([words, tag]) => {
    const line = document.createElement("div");
    const part = tag ? document.createElement(tag) : line;
    part.textContent = words;
    if (part !== line) line.append(part);
    return line;
  }));
  const left = x + 16 + tip.offsetWidth > window.innerWidth ? x - 16 - tip.offsetWidth : x + 16;
  const top = y + 20 + tip.offsetHeight > window.innerHeight ? y - 12 - tip.offsetHeight : y + 20;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

// Keep box, bring it on the screen, and tell of it.
function keep(run, box) {
  kept = { run, box };
  const width = view.to - view.from;
  if (run.end[box] < view.from || run.start[box] > view.to) {
    const middle = (run.start[box] + run.end[box]) / 2;
    show(middle - width / 2, middle + width / 2);
  }
  const place = rows(run).places.find((p) => p.track === run.trackOf[box]);
  const bounds = run.canvas.getBoundingClientRect();
  const x = bounds.left + Math.max(xOf(run.canvas, run.start[box]), GUTTER);
  tell(x, bounds.top + (place ? place.y + place.height : 0));
  redraw();
}

function letGo() {
  kept = pointed = null;
  tell(0, 0);
  redraw();
}

function step(key) {
  if (!kept) return false;
  const { run, box } = kept;
  const track = run.trackOf[box];
  let next = -1;
  if (key === "n" && box + 1 < track.last) next = box + 1;
  if (key === "p" && box > track.first) next = box - 1;
  if (key === "w") next = latest(run, before(run, box));
  if (key === "ArrowUp" || key === "ArrowDown") {
    const other = run.ofRank[track.rank + (key === "ArrowUp" ? -1 : 1)];
    if (other) next = Math.min(firstAfter(run, other, run.start[box]), other.last - 1);
  }
  if (next >= 0) keep(run, next);
  return true;
}

// Have canvas, of run, follow the pointer. hit: the box at a place on it, or -1.
function listen(run, canvas, hit) {
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const moved = event.clientX - drag.x;
      drag.moved ||= Math.abs(moved) > 3;
      if (!drag.moved) return;
      const by = (moved / plotWidth(canvas)) * (drag.to - drag.from);
      show(drag.from - by, drag.to - by);
      return;
    }
    const box = hit(run, event.offsetX, event.offsetY);
    pointed = box < 0 ? null : { run, box };
    if (!kept) tell(event.clientX, event.clientY);
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    const hasMoved = drag && drag.moved;
    drag = null;
    if (hasMoved) return;
    const box = hit(run, event.offsetX, event.offsetY);
    if (box < 0) letGo();
    else keep(run, box);
  });
  canvas.addEventListener("pointerleave", () => {
    pointed = null;
    if (!kept) tell(0, 0);
    redraw();
  });
  canvas.addEventListener("dblclick", (event) => zoom(2, timeAt(canvas, event.offsetX)));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(-event.deltaY / 300), timeAt(canvas, event.offsetX));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / plotWidth(canvas));
    }
  }, { passive: false });
}

function toggle(what) {
  shown[what] = !shown[what];
  element(what).setAttribute("aria-pressed", shown[what]);
  fillLegend();
  redraw();
}

function turnTheme() {
  document.documentElement.dataset.theme = look.isDark ? "light" : "dark";
  readLook();
  redraw();
}

const KEYS = {
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  "0": () => show(0, longest()),
  ArrowLeft: () => pan(-0.1),
  ArrowRight: () => pan(0.1),
  c: () => toggle("critical"),
  m: () => toggle("messages"),
  h: () => toggle("copies"),
  b: () => toggle("bytes"),
  t: turnTheme,
  Escape: letGo,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const act = KEYS[event.key];
  if (act) act();
  if (act ? event.key.startsWith("Arrow") : step(event.key)) event.preventDefault();
});
