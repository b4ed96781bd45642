// The page's data (write.py), with what drawing needs of them, and words for them.

const page = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const at = (column, n) => (Array.isArray(column) ? column[n] : column);

const most = (column) => [column].flat().reduce((larger, n) => Math.max(larger, n || 0), 0);

function prepare(run) {
  let first = 0;
  for (const track of run.tracks) {
    track.first = first;
    track.last = first += track.boxes; // one after its last
  }
  run.trackOf = run.tracks.flatMap((track) => Array(track.boxes).fill(track));
  run.onPath = new Uint8Array(first);
  for (const box of run.critical) run.onPath[box] = 1;
  run.ofRank = []; // by rank, the track of its passes
  for (const track of run.tracks) if (track.group === "passes") run.ofRank[track.rank] = track;
  run.most = { held: most(run.held), held_bytes: most(run.held_bytes) };
  return run;
}

const runs = page.runs.map(prepare);
runs.forEach((run, n) => (run.isOpen = n < page.open_at_first));

// How long the longest of those is that are open.
const longest = () =>
  Math.max(...runs.map((run) => (run.isOpen ? run.length : 0))) || runs[0].length;

// What box had to wait for: the one before it on its track, and what it needs.
function before(run, box) {
  const own = box > run.trackOf[box].first ? [box - 1] : [];
  return own.concat(run.needs[box]);
}

// What had to wait for box.
function after(run, box) {
  if (!run.followers) {
    run.followers = run.needs.map(() => []);
    run.needs.forEach((needs, later) => needs.forEach((n) => run.followers[n].push(later)));
  }
  const own = box + 1 < run.trackOf[box].last ? [box + 1] : [];
  return own.concat(run.followers[box]);
}

const latest = (run, boxes) =>
  boxes.reduce((best, n) => (best < 0 || run.end[n] > run.end[best] ? n : best), -1);

// The first box of track that ends after time.
function firstAfter(run, track, time) {
  let low = track.first, high = track.last;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Its microbatch, and which slice of it where it is cut.
function part(run, box) {
  const slice = at(run.slice, box);
  return slice === null ? String(run.microbatch[box]) : `${run.microbatch[box]}.${slice}`;
}

function name(run, box) {
  const kind = page.kinds[run.kind[box]].name;
  const track = run.trackOf[box];
  if (kind === "reduction") return track.title;
  if (kind === "omitted") return `${at(run.stands_for, box)} passes omitted`;
  return `${run.stage[box]}${kind}${part(run, box)}`;
}

function time(seconds) {
  if (page.unit !== "s") return String(Number(seconds.toPrecision(6)));
  const size = Math.abs(seconds);
  if (size >= 1) return `${Number(seconds.toPrecision(4))} s`;
  if (size >= 1e-3) return `${Number((seconds * 1e3).toPrecision(4))} ms`;
  return `${Number((seconds * 1e6).toPrecision(3))} us`;
}

const share = (part) => `${(100 * part).toFixed(1)} %`;
function bytesText(bytes) {  // as `bytes_text` of words.py
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = Math.max(units.findLastIndex((_, n) => 2 ** (10 * n) <= bytes), 0);
  if (power === 2 && bytes >= 2 ** 28) power = 3;
  const number = bytes / 2 ** (10 * power);
  return `${number >= 1000 ? Math.round(number) : Number(number.toPrecision(3))} ${units[power]}`;
}
const counted = (number, thing, plural) => `${number} ${number === 1 ? thing : plural}`;
const microbatches = (number) =>
  counted(Number(number.toPrecision(3)), "microbatch", "microbatches");
