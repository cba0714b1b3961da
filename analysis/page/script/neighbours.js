// The neighbours of a shape along each of its sizes, and the shape that somebody typed.

const NEAR = 6; // neighbours to each side that are shown at least
const MOST_EDGES = 60; // of tiles or waves: more are only counted
const MOST_COUNTED = 10000; // more are not
const GEMM_SIZES = ["m", "n", "k"];
const CONV_SIZES = ["batch", "c", "kout"];
const SAME = ["run", "op", "pass", "dtype", "layout", "implementation", "config", "mode", "cache"];
const WORDS = [...SAME, "stride", "padding", "dilation"];
const sizesOf = (i) => (word("op", i) === "conv" ? CONV_SIZES : GEMM_SIZES);
const FIXED = { conv: ["batch", "c", "h", "w", "kout", "r", "s", "groups"], gemm: ["m", "n", "k", "batch"] };

// Rows that differ from one in a single size, and the row itself, by that size.
function lineThrough(i, along) {
  const fixed = (FIXED[word("op", i)] ?? []).filter((name) => name !== along);
  const found = [];
  for (let j = 0; j < points.length; j++) {
    if (points.time_us[j] === null) continue;
    if (!fixed.every((name) => points[name][j] === points[name][i])) continue;
    if (WORDS.every((name) => points[name].codes[j] === points[name].codes[i])) found.push(j);
  }
  found.sort((a, b) => points[along][a] - points[along][b]);
  // The same case of several sweeps is one point of the line, where it is asked for that one.
  const bySize = new Map();
  for (const j of found) {
    if (j === i || !bySize.has(points[along][j])) bySize.set(points[along][j], j);
  }
  return [...bySize.values()];
}

const ceil = (a, b) => Math.ceil(a / b);

// Where one more of M or N begins another tile, and where another wave, between a line's ends: of the
// tile that is predicted for a row, with its parts of K.
function edgesOf(i, along, low, high) {
  const none = { tiles: [], waves: [] };
  const tile = word("predicted_tile", i).match(/^(\d+)x(\d+)/);
  if (!tile || along === "k" || word("op", i) !== "gemm") return none;
  const block = Number(tile[along === "m" ? 1 : 2]);
  const across = points.tiles[i] / ceil(points[along][i], block);
  const slots = machineOf(i).kind === "gpu" ? machineOf(i).sms : 0; // a CPU computes no waves
  const [first, last] = [Math.max(1, ceil(low, block)), Math.floor((high - 1) / block)];
  if (!block || last - first > MOST_COUNTED) return none;
  const waves = (count) => ceil(count * across, slots);
  const found = { tiles: [], waves: [] };
  for (let count = first; count <= last; count++) {
    const kind = slots && waves(count + 1) > waves(count) ? "waves" : "tiles";
    found[kind].push(count * block);
  }
  return found;
}

// The ends of what is shown of a line: twice and half the size, and at least some points; the other
// points are there for whoever moves the chart.
function endsAround(sizes, size) {
  const at = sizes.indexOf(size);
  const near = sizes.slice(Math.max(0, at - NEAR), at + NEAR + 1);
  const wide = sizes.filter((other) => other >= size / 2 && other <= 2 * size);
  const both = [...near, ...wide];
  return [Math.min(...both), Math.max(...both)];
}

function drawLine(place, i, along) {
  const line = i === null ? [] : lineThrough(i, along);
  const box = byId(`line-${place}`);
  const name = `line-${place}`;
  const columns = (of) => line.map(of);
  const said = (j) => `${along.toUpperCase()} ${points[along][j]}: ${timeOf(j)}; predicted ${predictedText(j)}`;
  model(name).data = {
    x: columns((j) => points[along][j]),
    time: columns((j) => points.time_us[j]),
    lo: columns((j) => points.time_lo_us[j] ?? NaN),
    hi: columns((j) => points.time_hi_us[j] ?? NaN),
    expected: columns((j) => points.predicted_us[j] ?? NaN),
    said: columns(said),
  };
  const single = !line.some((j) => j !== i);
  for (const part of box.querySelectorAll(".chart, details")) part.hidden = single;
  const title = i === null ? "" : `Along ${along.toUpperCase()}`;
  const heading = box.querySelector("h3");
  const [low, high] = endsAround(line.map((j) => points[along][j]), i === null ? 0 : points[along][i]);
  const inside = line.filter((j) => points[along][j] >= low && points[along][j] <= high);
  const tallest = (j) => Math.max(points.time_us[j], points.predicted_us[j] ?? 0);
  const top = Math.max(...inside.map(tallest));
  const edges = single ? { tiles: [], waves: [] } : edgesOf(i, along, low, high);
  const ofWaves = machineOf(i ?? 0).kind === "gpu" ? `, ${edges.waves.length} of waves` : "";
  const marks = `; ${edges.tiles.length} edges of tiles${ofWaves}`;
  const few = edges.tiles.length + edges.waves.length <= MOST_EDGES;
  heading.textContent = single
    ? `${title}: no other size was measured`
    : `${title}: ${line.length} sizes${few && edges.tiles.length + edges.waves.length ? marks : ""}`;
  for (const kind of ["tiles", "waves"]) {
    const drawn = edges[kind].length > MOST_EDGES ? [] : edges[kind];
    model(`${name}-${kind}`).data = {
      x: drawn,
      low: drawn.map(() => 0),
      high: drawn.map(() => 1.1 * top),
    };
  }
  model(`${name}-here`).data =
    i === null || points.time_us[i] === null
      ? { x: [], time: [] }
      : { x: [points[along][i]], time: [points.time_us[i]] };
  const chart = model(`chart-${name}`);
  chart.below[0].axis_label = along.toUpperCase();
  if (line.length) {
    const margin = single ? 1 : 0.05 * (high - low);
    Object.assign(chart.x_range, { start: low - margin, end: high + margin });
    Object.assign(chart.y_range, { start: 0, end: 1.1 * top });
  }
  lineTables[place].set(line.map((j) => ({ row: j, along })));
}

// The row that most other rows differ from in one size: its neighbourhood shows most.
function firstToShow() {
  let best = { count: 0, i: null };
  const counts = new Map();
  for (let i = 0; i < points.length; i++) {
    if (points.time_us[i] === null || word("op", i) !== "gemm") continue;
    for (const along of GEMM_SIZES) {
      const fixed = GEMM_SIZES.filter((name) => name !== along).map((name) => points[name][i]);
      const key = [along, ...fixed, ...SAME.map((name) => points[name].codes[i])].join(" ");
      const count = (counts.get(key)?.count ?? 0) + 1;
      counts.set(key, { count });
      if (count > best.count) best = { count, i };
    }
  }
  return best.i;
}

// The rows that a shape's time is taken from, by recording and shape: plainly timed, with operands
// from where most of the recording's came from, the narrowest interval first.
const plainRows = new Map();
function isPlain(i) {
  const { cache } = machineOf(i);
  return !word("config", i) && word("mode", i) === "burst" && word("cache", i) === cache;
}
const width = (i) =>
  points.time_lo_us[i] === null ? Infinity : points.time_hi_us[i] / points.time_lo_us[i];
for (let i = 0; i < points.length; i++) {
  if (points.time_us[i] === null || !word("spec", i) || !isPlain(i)) continue;
  const key = `${points.run.codes[i]} ${word("spec", i)}`;
  const known = plainRows.get(key);
  if (known === undefined || width(i) < width(known)) plainRows.set(key, i);
}
const exactRow = (problem, run) => plainRows.get(`${runs.indexOf(run)} ${specOf(problem)}`);

// The seconds of a problem in a public table, whose times have no interval; null if it has none.
function secondsInTable(problem, run) {
  const row = exactRow(problem, run);
  return row === undefined || points.time_lo_us[row] !== null ? null : points.time_us[row] * 1e-6;
}

// The row that is nearest to a problem, among those that were timed with its dtype. A size is as far
// as its ratio says, another word as far as twice a size.
function nearestRow(problem) {
  const asked = FIELDS[problem.op].map((name) => [
    problem.op === "conv" && name === "n" ? "batch" : name,
    Array.isArray(problem[name]) ? pairText(problem[name]) : problem[name],
  ]);
  let best = { far: Infinity };
  for (let i = 0; i < points.length; i++) {
    if (points.time_us[i] === null || word("op", i) !== problem.op) continue;
    let far = isPlain(i) ? 0 : 0.02;
    for (const [name, value] of asked) {
      if (Array.isArray(points[name])) far += Math.abs(Math.log2(points[name][i] / value));
      else if (word(name, i) !== value) far += name === "dtype" ? Infinity : 1;
    }
    if (far < best.far) best = { i, far };
  }
  return best.i;
}

// Shows the measured times next to a row, along each size.
function choose(i) {
  byId("chosen").textContent = `Measured times next to ${shapeOf(i)} ${caseOf(i)}: ${timeOf(i)}, ${speedText(i)}; predicted ${predictedText(i)}.`;
  byId("measured").hidden = false;
  for (const [place, along] of sizesOf(i).entries()) drawLine(place, i, along);
}

// Answers about a problem on every machine, and shows what was measured next to it.
function ask(problem) {
  byId("answer").replaceChildren(...runs.flatMap((run) => answerElements(problem, run)));
  const row = runs.map((run) => exactRow(problem, run)).find((each) => each !== undefined);
  const shown = row ?? nearestRow(problem);
  if (shown === undefined) byId("measured").hidden = true;
  else choose(shown);
}

function askTyped(text) {
  const { problem, fault } = parseShape(text);
  byId("fault").textContent = fault ?? "";
  if (problem) ask(problem);
  byId("answer").hidden = !problem;
  if (fault) byId("measured").hidden = true;
}
