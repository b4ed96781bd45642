// When it is drawn.

let isAsked = false;

function redraw() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(drawNow);
}

function drawNow() {
  isAsked = false;
  const began = performance.now();
  drawnBoxes = 0;
  for (const run of runs) {
    if (run.isOpen && isOnScreen(run.section)) {
      drawRun(run);
      drawMemory(run);
    }
  }
  drawAxis();
  drawnIn = performance.now() - began;
}

let isPrinting = false;
const isSmall = runs.reduce((boxes, run) => boxes + run.kind.length, 0) < 10_000;
let screenTheme; // while it is printed, which is light

function printAs(isBegun) {
  const root = document.documentElement;
  if (isBegun) screenTheme = root.dataset.theme;
  isPrinting = isBegun;
  if (isBegun) root.dataset.theme = "light";
  else if (screenTheme) root.dataset.theme = screenTheme;
  else delete root.dataset.theme;
  readLook();
  drawNow();
}

function isOnScreen(section) {
  const { top, bottom } = section.getBoundingClientRect();
  return isPrinting || isSmall || (bottom > -200 && top < window.innerHeight + 200);
}
