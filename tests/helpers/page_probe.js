// What a reader does on a page of timelines, and what comes of it, as JSON in the element "probe".
const frames = () => timelines.drawNow(); // a browser without a window may wait long with its own
const { runs, view } = timelines;

function pixel(canvas, x, y) {
  const scale = canvas.width / canvas.clientWidth;
  const at = [x, y].map((place) => Math.round(place * scale));
  const [r, g, b] = canvas.getContext("2d").getImageData(...at, 1, 1).data;
  return [r, g, b];
}

function place(run, box) {
  const { y, height } = timelines.rows(run).places.find((p) => p.track === run.trackOf[box]);
  const x = timelines.xOf(run.canvas, run.start[box]);
  return { x, y, height, width: timelines.xOf(run.canvas, run.end[box]) - x };
}

// The colours of all passes that are wide enough, beneath their names.
function colours(run) {
  return run.trackOf.flatMap((track, box) => {
    if (track.group !== "passes") return [];
    const { x, y, height, width } = place(run, box);
    if (width < 5) return [];
    return [[box, pixel(run.canvas, x + 1.5, y + height - 3)]];
  });
}

function fire(target, type, kind, init) {
  target.dispatchEvent(new kind(type, { bubbles: true, cancelable: true, pointerId: 1, ...init }));
}

function over(run, box, type, more = {}) {
  const { x, y, height, width } = place(run, box);
  const bounds = run.canvas.getBoundingClientRect();
  const at = { clientX: bounds.left + x + width / 2, clientY: bounds.top + y + height / 2 };
  fire(run.canvas, type, type === "wheel" ? WheelEvent : PointerEvent, { ...at, ...more });
  return at;
}

const key = async (name) => {
  fire(document, "keydown", KeyboardEvent, { key: name });
  frames();
};
const tip = () => {
  const shown = document.getElementById("tip");
  return shown.hidden ? null : [...shown.children].map((line) => line.textContent);
};
const seen = () => ({ from: view.from, to: view.to });

async function probe() {
  const told = { errors: window.pageErrors };
  frames();
  HTMLElement.prototype.setPointerCapture = () => {}; // no real pointer is down
  told.text = document.body.innerText;
  told.drawn = timelines.drawn;
  told.colours = runs.map(colours);
  const last = runs.length - 1, run = runs[last];
  const box = run.trackOf.findIndex(
    (t, n) => t.rank === 1 && t.group === "passes" && n > t.first && run.needs[n].length);
  over(run, box, "pointermove");
  frames();
  told.hovered = { box, tip: tip() };
  over(run, box, "pointerdown");
  over(run, box, "pointerup");
  frames();
  await key("n");
  told.next = timelines.focus.box;
  await key("p");
  await key("w");
  told.waitedFor = timelines.focus.box;
  await key("Escape");
  told.letGo = tip();
  const peak = run.held.indexOf(Math.max(...run.held));
  const memory = run.memory.getBoundingClientRect();
  const clientX = memory.left + timelines.xOf(run.memory, (run.start[peak] + run.end[peak]) / 2);
  const above = Array.from({ length: memory.height }, (_, y) => {
    fire(run.memory, "pointermove", PointerEvent, { clientX, clientY: memory.top + y });
    return timelines.focus && run.held[timelines.focus.box];
  });
  told.curves = [run.held[peak], above.filter((held) => held !== null)];
  fire(run.memory, "pointerleave", PointerEvent, {});
  await key("+");
  told.zoomed = seen();
  await key("ArrowRight");
  told.panned = seen();
  await key("0");
  told.whole = seen();
  const wheel = place(run, box), middle = (run.start[box] + run.end[box]) / 2;
  over(run, box, "wheel", { ctrlKey: true, deltaY: -300 });
  frames();
  const after = timelines.xOf(run.canvas, middle);
  told.wheeled = { ...seen(), before: wheel.x + wheel.width / 2, after };
  over(run, box, "pointerdown", { clientX: 600 });
  fire(run.canvas, "pointermove", PointerEvent, { clientX: 500, clientY: 0 });
  fire(run.canvas, "pointerup", PointerEvent, { clientX: 500, clientY: 0 });
  frames();
  told.dragged = seen();
  await key("0");
  const heights = () => runs.map((r) => r.canvas.clientHeight);
  told.folded = heights();
  await key("m");
  told.unfolded = heights();
  await key("m");
  await key("c");
  told.critical = { path: [...run.critical], colours: colours(run) };
  await key("c");
  const ground = () => getComputedStyle(document.body).backgroundColor;
  told.light = ground();
  await key("t");
  told.dark = ground();
  told.darkColours = colours(run);
  await key("t");
  document.querySelectorAll("#figures input")[0].click();
  frames();
  told.closed = { hidden: runs.map((r) => r.section.hidden), ...seen() };
  told.milliseconds = timelines.milliseconds;
  return told;
}

const shown = document.createElement("pre");
shown.id = "probe";
probe().then(
  (told) => { shown.textContent = JSON.stringify(told); },
  (error) => { shown.textContent = JSON.stringify({ errors: [String(error.stack)] }); },
).finally(() => document.body.append(shown));
