// The page: its table, its legend, and its start.

function cell(row, text, tag = "td") {
  const made = document.createElement(tag);
  made.textContent = text;
  row.append(made);
}

// Opens and closes the timeline of run.
function opener(run) {
  const label = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = run.isOpen;
  box.addEventListener("change", () => {
    const wasWhole = view.to - view.from >= longest();
    run.isOpen = box.checked;
    run.section.hidden = !run.isOpen;
    if (wasWhole) show(0, longest());
    else show(view.from, view.to);
  });
  label.append(box, ` ${run.title}`);
  return label;
}

function fillTable() {
  const table = element("figures");
  const hasBytes = runs.some((run) => run.figures.peaks_bytes !== null);
  const heads = ["", "makespan", "of the first", "bubble", "span", "bubble of the span",
    "peak of a rank", ...(hasBytes ? ["in bytes"] : []), "ranks"];
  const head = table.createTHead().insertRow();
  for (const text of heads) cell(head, text, "th");
  const body = table.createTBody();
  for (const run of runs) {
    const figures = run.figures;
    const row = body.insertRow();
    row.insertCell().append(opener(run));
    cell(row, time(figures.makespan));
    cell(row, (figures.makespan / runs[0].figures.makespan).toFixed(3));
    cell(row, share(figures.bubble_share_makespan));
    cell(row, time(figures.span));
    cell(row, share(figures.bubble_share_span));
    cell(row, microbatches(Math.max(...figures.peaks)));
    if (hasBytes) cell(row, figures.peaks_bytes ? bytesText(Math.max(...figures.peaks_bytes)) : "");
    cell(row, String(run.ranks));
  }
}

function fillLegend() {
  const entry = (words, colour, name = "") => {
    const item = document.createElement("span");
    const swatch = document.createElement("i");
    if (colour) swatch.style.background = colour;
    swatch.className = name;
    item.append(swatch, words);
    return item;
  };
  const isShown = (kind) => !kind.is_mark && (kind.group === "passes" || shown[kind.group]);
  const items = page.kinds.filter(isShown).map((kind) => entry(kind.legend, kind.colour));
  items.push(entry("bubble", "var(--bubble)"));
  if (runs.some((run) => Math.max(...run.chunks))) items.push(entry("a later chunk", "", "later"));
  element("legend").replaceChildren(...items);
}

function build(run) {
  const section = document.createElement("section");
  const title = document.createElement("h2");
  title.textContent = run.title;
  section.append(title);
  for (const words of run.remarks) {
    const remark = document.createElement("p");
    remark.className = "remark";
    remark.textContent = words;
    section.append(remark);
  }
  const made = ["passes", "memory"].map((part) => {
    const canvas = document.createElement("canvas");
    canvas.className = part;
    canvas.setAttribute("role", "img");
    section.append(canvas);
    return canvas;
  });
  [run.canvas, run.memory] = made;
  const ranks = counted(run.ranks, "rank", "ranks");
  run.canvas.setAttribute("aria-label", `${run.title}: passes of ${ranks} by time`);
  run.memory.setAttribute("aria-label", `${run.title}: what each rank holds, by time`);
  run.section = section;
  section.hidden = !run.isOpen;
  element("runs").append(section);
  run.canvas.style.height = `${rows(run).height}px`;
  run.memory.style.height = `${MEMORY}px`;
  listen(run, run.canvas, boxAt);
  listen(run, run.memory, passOfCurve);
}

function start() {
  element("command").textContent = page.command;
  fillTable();
  fillLegend();
  readLook();
  runs.forEach(build);
  const groups = new Set(runs.flatMap((run) => run.tracks.map((track) => track.group)));
  element("messages").hidden = !groups.has("messages");
  element("copies").hidden = !groups.has("copies");
  element("bytes").hidden = runs.every((run) => run.figures.peaks_bytes === null);
  for (const what of ["critical", "messages", "copies", "bytes"]) {
    element(what).addEventListener("click", () => toggle(what));
  }
  element("in").addEventListener("click", () => zoom(1.5));
  element("out").addEventListener("click", () => zoom(1 / 1.5));
  element("whole").addEventListener("click", () => show(0, longest()));
  element("theme").addEventListener("click", turnTheme);
  window.addEventListener("resize", redraw);
  window.addEventListener("scroll", redraw, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readLook();
    redraw();
  });
  window.addEventListener("beforeprint", () => printAs(true));
  window.addEventListener("afterprint", () => printAs(false));
  drawNow();
}

start();
// For tests, and for a reader's console.
globalThis.timelines = {
  runs, view, rows, xOf, drawNow,
  get drawn() { return drawnBoxes; },
  get milliseconds() { return drawnIn; },
  get focus() { return kept || pointed; },
};
