// The measured neighbours of a shape along each of its sizes, and the answer about a typed shape.

const NEAR = 6; // this many neighbours on each side are shown in any case
const MOST_EDGES = 60; // edges of a kind that are drawn; if there are more, none is
const MOST_COUNTED = 10000; // edges that are computed; if there are more, none is
const GEMM_SIZES = ["m", "n", "k"];
const CONV_SIZES = ["batch", "c", "kout"];
const SAME = ["run", "op", "pass", "dtype", "layout", "implementation", "config", "mode", "cache"];
const WORDS = [...SAME, "stride", "padding", "dilation"];
const sizesOf = (i) => (word("op", i) === "conv" ? CONV_SIZES : GEMM_SIZES);
const FIXED = { conv: ["batch", "c", "h", "w", "kout", "r", "s", "groups"], gemm: ["m", "n", "k", "batch"] };

// The timed rows that differ from row `i` at most in the size `along`, sorted by that size.
function lineThrough(i, along) {
  const fixed = (FIXED[word("op", i)] ?? []).filter((name) => name !== along);
  const rows = [];
  for (let other = 0; other < points.length; other++) {
    if (points.time_us[other] === null) continue;
    if (!fixed.every((name) => points[name][other] === points[name][i])) continue;
    if (WORDS.every((name) => points[name].codes[other] === points[name].codes[i])) rows.push(other);
  }
  rows.sort((a, b) => points[along][a] - points[along][b]);
  // A case of several sweeps has several rows, of which the line has only one. For the case of row
  // `i`, this is row `i` itself.
  const bySize = new Map();
  for (const row of rows) {
    const size = points[along][row];
    if (row === i || !bySize.has(size)) bySize.set(size, row);
  }
  return [...bySize.values()];
}

const ceil = (a, b) => Math.ceil(a / b);

// The sizes from `low` to `high` at which one more of M or N begins another tile (`tiles`) or even
// another wave (`waves`). The tile is the one that is predicted for row `i`, with its split of K.
// The result is empty along K, for a convolution, and if the edges would be too many to draw.
function edgesOf(i, along, low, high) {
  const edges = { tiles: [], waves: [] };
  const tile = word("predicted_tile", i).match(/^(\d+)x(\d+)/);
  if (!tile || along === "k" || word("op", i) !== "gemm") return edges;
  const [, tileRows, tileColumns] = tile.map(Number);
  const block = along === "m" ? tileRows : tileColumns;
  const across = points.tiles[i] / ceil(points[along][i], block); // tiles per block of the dimension
  const slots = runOf(i).kind === "gpu" ? runOf(i).sms : 0; // a CPU computes no waves
  const first = Math.max(1, ceil(low, block));
  const last = Math.floor((high - 1) / block);
  if (!block || last - first > MOST_COUNTED) return edges;
  const waves = (count) => ceil(count * across, slots);
  for (let count = first; count <= last; count++) {
    const kind = slots && waves(count + 1) > waves(count) ? "waves" : "tiles";
    edges[kind].push(count * block);
  }
  return edges;
}

// The smallest and the largest size of a line that are in view. All sizes from half to twice the
// size are in view, and at least the six nearest on each side. Moving the chart shows the others.
function endsAround(sizes, size) {
  const place = sizes.indexOf(size);
  const nearest = sizes.slice(Math.max(0, place - NEAR), place + NEAR + 1);
  const withinTwice = sizes.filter((other) => other >= size / 2 && other <= 2 * size);
  const shownSizes = [...nearest, ...withinTwice];
  return [Math.min(...shownSizes), Math.max(...shownSizes)];
}

// Draws the chart number `place`: the times along one size of row `i`, and the edges of its tiles
// and waves. Also fills the table of these times.
function drawLine(place, i, along) {
  const name = `line-${place}`;
  const line = lineThrough(i, along);
  const sizeOf = (row) => points[along][row];
  const size = along.toUpperCase();
  // 1. Fill in the times, and the ring around the chosen one.
  const column = (valueOf) => line.map(valueOf);
  model(name).data = {
    x: column(sizeOf),
    time: column((row) => points.time_us[row]),
    lo: column((row) => points.time_lo_us[row] ?? NaN),
    hi: column((row) => points.time_hi_us[row] ?? NaN),
    expected: column((row) => points.predicted_us[row] ?? NaN),
    description: column(
      (row) => `${size} ${sizeOf(row)}: ${timeOf(row)}; predicted ${predictedText(row)}`,
    ),
  };
  model(`${name}-here`).data =
    points.time_us[i] === null
      ? { x: [], time: [] }
      : { x: [sizeOf(i)], time: [points.time_us[i]] };
  // 2. Set the range that is in view. A line without another size has only its heading.
  const isSingle = line.every((row) => row === i);
  const [low, high] = endsAround(line.map(sizeOf), sizeOf(i));
  const inside = line.filter((row) => sizeOf(row) >= low && sizeOf(row) <= high);
  const top = Math.max(
    ...inside.map((row) => Math.max(points.time_us[row], points.predicted_us[row] ?? 0)),
  );
  const chart = model(`chart-${name}`);
  chart.below[0].axis_label = size;
  if (line.length) {
    const margin = isSingle ? 1 : 0.05 * (high - low);
    Object.assign(chart.x_range, { start: low - margin, end: high + margin });
    Object.assign(chart.y_range, { start: 0, end: 1.1 * top });
  }
  // 3. Draw the edges, from the bottom to the top of the chart.
  const edges = isSingle ? { tiles: [], waves: [] } : edgesOf(i, along, low, high);
  for (const kind of ["tiles", "waves"]) {
    const drawn = edges[kind].length > MOST_EDGES ? [] : edges[kind];
    model(`${name}-${kind}`).data = {
      x: drawn,
      low: drawn.map(() => 0),
      high: drawn.map(() => 1.1 * top),
    };
  }
  // 4. Write the heading and the table.
  const box = byId(`line-${place}`);
  for (const part of box.querySelectorAll(".chart, details")) part.hidden = isSingle;
  box.querySelector("h3").textContent = isSingle
    ? `Along ${size}: no other size was measured`
    : `Along ${size}: ${line.length} sizes${edgesText(edges, runOf(i))}`;
  lineTables[place].set(line.map((row) => ({ row, along })));
}

// The end of a heading that counts the edges; empty if there are none, or too many to be of use.
function edgesText({ tiles, waves }, run) {
  const count = tiles.length + waves.length;
  if (count === 0 || count > MOST_EDGES) return "";
  const wavesText = run.kind === "gpu" ? `, ${waves.length} of waves` : "";
  return `; ${tiles.length} edge${tiles.length === 1 ? "" : "s"} of tiles${wavesText}`;
}

// A row of the longest line of GEMMs, which has the most neighbours; null if no GEMM has a time.
function firstToShow() {
  let longest = { count: 0, row: null };
  const counts = new Map(); // number of rows of each line
  for (let i = 0; i < points.length; i++) {
    if (points.time_us[i] === null || word("op", i) !== "gemm") continue;
    for (const along of GEMM_SIZES) {
      const fixed = GEMM_SIZES.filter((name) => name !== along).map((name) => points[name][i]);
      const line = [along, ...fixed, ...SAME.map((name) => points[name].codes[i])].join(" ");
      const count = (counts.get(line) ?? 0) + 1;
      counts.set(line, count);
      if (count > longest.count) longest = { count, row: i };
    }
  }
  return longest.row;
}

// Whether a point was timed plainly: in bursts, without a configuration, and with the operands in
// the same caches as in most of the recording.
function isPlain(i) {
  const { cache } = runOf(i);
  return !word("config", i) && word("mode", i) === "burst" && word("cache", i) === cache;
}

// The width of a point's interval, as the ratio of its ends.
const width = (i) =>
  points.time_lo_us[i] === null ? Infinity : points.time_hi_us[i] / points.time_lo_us[i];

// The row that a shape's time is taken from, by recording and shape. It is the one with the
// narrowest interval among those that were timed plainly.
const plainRows = new Map();
for (let i = 0; i < points.length; i++) {
  if (points.time_us[i] === null || !word("spec", i) || !isPlain(i)) continue;
  const key = `${points.run.codes[i]} ${word("spec", i)}`;
  const narrowest = plainRows.get(key);
  if (narrowest === undefined || width(i) < width(narrowest)) plainRows.set(key, i);
}

// The row with a problem's time in a recording; undefined if it was not measured.
const exactRow = (problem, run) => plainRows.get(`${runs.indexOf(run)} ${specOf(problem)}`);

// The seconds of a problem in a public table, whose times have no interval; null if the problem is
// not in the table, or if the recording is not a public table.
function secondsInTable(problem, run) {
  const row = exactRow(problem, run);
  return row === undefined || points.time_lo_us[row] !== null ? null : points.time_us[row] * 1e-6;
}

// The row that is nearest to a problem, among those that were timed in its dtype; undefined if no
// row was. The distance adds the absolute logarithms (base 2) of the ratios of sizes,
// and 1 for each word that differs, such as the layout.
function nearestRow(problem) {
  // Points name a convolution's images ``batch``, and have pairs such as strides as text.
  const wanted = FIELDS[problem.op].map((name) => [
    problem.op === "conv" && name === "n" ? "batch" : name,
    Array.isArray(problem[name]) ? pairText(problem[name]) : problem[name],
  ]);
  let nearest = { distance: Infinity };
  for (let i = 0; i < points.length; i++) {
    if (points.time_us[i] === null || word("op", i) !== problem.op) continue;
    // If rows are equally near, one that was timed plainly is preferred.
    let distance = isPlain(i) ? 0 : 0.02;
    for (const [name, value] of wanted) {
      if (Array.isArray(points[name])) distance += Math.abs(Math.log2(points[name][i] / value));
      else if (word(name, i) !== value) distance += name === "dtype" ? Infinity : 1;
    }
    if (distance < nearest.distance) nearest = { row: i, distance };
  }
  return nearest.row;
}

// Shows the measured times next to a row, along each size. If the row is only the nearest one to
// the problem that the reader asked about, `asked` is that problem.
function choose(i, asked = null) {
  const share = asked === null ? 1 : points.flops[i] / flopsOf(asked);
  const isFar = share < 0.5 || share > 2;
  const distance = isFar ? ` has ${round(share, 2)}× the FLOPs. It is` : " is";
  const title = asked === null ? "Measured times next to" : `The nearest measured shape${distance}`;
  byId("chosen").textContent =
    `${title} ${shapeOf(i)} ${caseOf(i)}: ${timeOf(i)}, ${speedText(i)}; predicted ${predictedText(i)}.`;
  byId("measured").hidden = false;
  for (const [place, along] of sizesOf(i).entries()) drawLine(place, i, along);
}

// Answers about a problem on every machine, and shows what was measured next to it.
function ask(problem) {
  byId("answer").replaceChildren(...runs.flatMap((run) => answerElements(problem, run)));
  const measuredRow = runs.map((run) => exactRow(problem, run)).find((row) => row !== undefined);
  const chosen = measuredRow ?? nearestRow(problem);
  if (chosen === undefined) byId("measured").hidden = true;
  else choose(chosen, measuredRow === undefined ? problem : null);
}

// Answers a typed text, or says what is wrong with it and hides the answer to an earlier text.
function askTyped(text) {
  const { problem, fault } = parseShape(text);
  byId("fault").textContent = fault ?? "";
  if (problem) ask(problem);
  byId("answer").hidden = !problem;
  if (fault) byId("measured").hidden = true;
}
