// The page's tables, its event handlers, and the calls that start everything.

// Columns of a table. A cell shows the text that `textOf(row)` returns. A column of figures is
// sorted by the number that `valueOf(row)` returns.
const text = (title, textOf) => ({ title, text: textOf });
const figure = (title, textOf, valueOf) => ({ title, text: textOf, value: valueOf });
const lineTables = [0, 1, 2].map(
  (place) =>
    new Table(byId(`line-${place}`).querySelector(".line-table"), `line ${place + 1}`, [
      figure("size", ({ row, along }) => String(points[along][row]), ({ row, along }) => points[along][row]),
      figure("time", ({ row }) => timeOf(row), ({ row }) => points.time_us[row]),
      figure("predicted", ({ row }) => predictedText(row), ({ row }) => points.predicted_us[row]),
    ], { first: PAGE }),
);
const pointTable = new Table(byId("points-table"), "the points", [
  { ...text("shape", shapeOf), choose: (i) => show(i) },
  text("case", caseOf),
  figure("time", timeOf, (i) => points.time_us[i]),
  figure("speed", speedText, (i) => (points.time_us[i] === null ? null : speed(i))),
  figure("predicted", predictedText, (i) => points.predicted_us[i]),
  figure("error", (i) => (errorOf(i) === null ? "–" : percent(errorOf(i))), errorOf),
  text("limit", (i) => word("limit", i)),
  text("tile", (i) => word("tile", i)),
  figure("waves", (i) => number(points.waves[i]), (i) => points.waves[i]),
  text("kernel", (i) => word("kernel", i)),
]);

// Answers about a clicked point that is a GEMM or a convolution, and scrolls to the answer.
function show(i) {
  if (!word("spec", i)) return;
  byId("shape").value = word("spec", i);
  askTyped(word("spec", i));
  choose(i);
  byId("neighbourhood").scrollIntoView();
  byId("shape").focus({ preventScroll: true });
}

// Applies the filters: updates the counts of their words, the points and the table of cases.
function refresh() {
  const { rows, counts } = filtered();
  for (const [f, filter] of filters.entries()) {
    filter.counts.forEach((span, code) => {
      span.textContent = counts[f][code].toLocaleString("en");
    });
  }
  const { drawable, drawn } = drawPoints(rows);
  const counted = (count) => count.toLocaleString("en");
  const leftOut =
    drawn < drawable
      ? `; ${counted(drawn)} of ${counted(drawable)} are drawn; zoom in to see all`
      : "";
  byId("count").textContent =
    `${counted(rows.length)} of ${counted(points.length)} cases${leftOut}`;
  pointTable.set(rows);
}

// Fills the table of changes that are worth making.
function adviceTable() {
  const rows = runs.flatMap((run) =>
    run.advice.filter((row) => row.verdict !== "leave it").map((row) => ({ ...row, run: run.name })),
  );
  // Confirmed changes come first. Changes with the same verdict are sorted by the lower end of the
  // gain's interval.
  rows.sort((a, b) => (b.verdict === "do it") - (a.verdict === "do it") || b.lo - a.lo);
  const recordingColumn = runs.length > 1 ? [text("recording", (row) => row.run)] : [];
  const table = new Table(
    byId("advice-table"), "the recommendations",
    [
      ...recordingColumn,
      text("shape", (row) => row.shape),
      text("verdict", (row) => row.verdict_text),
      text("query", (row) => row.question),
      text("change", (row) => row.change),
      figure("gain", gain, (row) => row.gain),
      figure("more FLOPs", (row) => percent(row.flops), (row) => row.flops),
      text("evidence", (row) => row.evidence),
      text("why", (row) => row.reason),
    ],
    { copies: true },
  );
  table.set(rows);
}

// Fills the table of rules, if the page has one. Rules without an effect come last. Effects that
// are shares are written as percentages; all other effects are ratios.
function rulesTable() {
  if (!byId("rules-table")) return;
  const rows = runs.flatMap((run) => run.rules.map((rule) => ({ ...rule, run: run.name })));
  rows.sort((a, b) => (a.effect === null) - (b.effect === null));
  const effectText = ({ effect, lo, hi, is_share: isShare }) => {
    if (effect === null) return "–";
    return isShare
      ? `${percent(effect, 0)} (${percent(lo, 0)} to ${percent(hi, 0)})`
      : `${effect.toFixed(2)}× (${lo.toFixed(2)} to ${hi.toFixed(2)})`;
  };
  const table = new Table(
    byId("rules-table"), "the rules",
    [
      text("advice", (row) => `${row.id}: ${row.statement}`),
      text("verdict", (row) => row.verdict),
      figure("effect", effectText, (row) => row.effect),
      figure("pairs", (row) => String(row.cases), (row) => row.cases),
      text("why", (row) => row.reason),
      text("source", (row) => row.source),
      ...(runs.length > 1 ? [text("recording", (row) => row.run)] : []),
    ],
    { copies: true },
  );
  table.set(rows);
}

// Makes a table of mean errors by M, rounded down to a power of two (lines), and N·K, rounded down
// to a power of four (columns).
function errorsByShape() {
  // 1. Sum the errors for each pair of exponents of M and N·K.
  const sums = new Map();
  const lines = new Set();
  const columns = new Set();
  const exponent = (value) => Math.floor(Math.log2(value));
  for (let i = 0; i < points.length; i++) {
    if (errorOf(i) === null) continue;
    const ofM = exponent(points.m[i]);
    const ofNK = 2 * Math.floor(exponent(points.n[i] * points.k[i]) / 2);
    lines.add(ofM);
    columns.add(ofNK);
    const key = `${ofM} ${ofNK}`;
    const sum = sums.get(key) ?? { error: 0, count: 0 };
    sum.error += Math.abs(errorOf(i));
    sum.count++;
    sums.set(key, sum);
  }
  // 2. Make the table, with a cell for each pair of exponents.
  const sorted = (exponents) => [...exponents].sort((a, b) => a - b);
  const table = element("table");
  const head = element("tr");
  head.append(element("th", "M \\ N × K", { scope: "col" }));
  for (const ofNK of sorted(columns)) head.append(element("th", `2^${ofNK}`, { scope: "col" }));
  table.append(head);
  for (const ofM of sorted(lines)) {
    const line = element("tr");
    line.append(element("th", `${2 ** ofM}`, { scope: "row" }));
    for (const ofNK of sorted(columns)) line.append(errorCell(sums.get(`${ofM} ${ofNK}`)));
    table.append(line);
  }
  byId("errors-by-shape").replaceChildren(table);
}

// Returns a cell with a mean error. Larger errors are redder. Without cases, the cell is empty.
function errorCell(sum) {
  if (!sum) return element("td", "", { class: "heat" });
  const mean = sum.error / sum.count;
  const cell = element("td", percent(mean), { class: "heat" });
  cell.title = sum.count === 1 ? "1 case" : `${sum.count} cases`;
  cell.style.backgroundColor = `rgba(213, 94, 0, ${Math.min(0.7, 2 * mean)})`;
  return cell;
}

// The pairs of rows of the same case in the first two recordings. Each row has the fastest
// implementation of its recording.
function commonPairs() {
  const fastestRows = [new Map(), new Map()];
  for (let i = 0; i < points.length; i++) {
    const run = points.run.codes[i];
    if (run > 1 || points.intensity[i] === null || !word("spec", i)) continue;
    const key = [word("spec", i), word("mode", i), word("cache", i)].join(" ");
    const fastestRow = fastestRows[run].get(key);
    if (fastestRow === undefined || points.time_us[i] < points.time_us[fastestRow]) {
      fastestRows[run].set(key, i);
    }
  }
  const [firstRows, secondRows] = fastestRows;
  return [...firstRows]
    .filter(([key]) => secondRows.has(key))
    .map(([key, first]) => ({ first, second: secondRows.get(key) }));
}

// Draws the speeds of the second recording over those of the first, and fills the table of them.
function sideBySide() {
  if (runs.length < 2) return;
  const pairs = commonPairs();
  const ratio = ({ first, second }) => points.time_us[first] / points.time_us[second];
  model("pairs").data = {
    x: pairs.map(({ first }) => points.intensity[first]),
    ratio: pairs.map(ratio),
    shape: pairs.map(({ first }) => `${shapeOf(first)} ${caseOf(first)}`),
    times: pairs.map(({ first, second }) => `${timeOf(first)}; ${timeOf(second)}`),
    color: pairs.map(({ first }) => color(word("dtype", first))),
    marker: pairs.map(({ first }) => MARKERS[word("dtype", first)] ?? "cross"),
  };
  const chart = model("pairs-chart");
  const around = (values) => ({ start: Math.min(...values) / 1.5, end: Math.max(...values) * 1.5 });
  if (pairs.length) {
    Object.assign(chart.x_range, around(pairs.map(({ first }) => points.intensity[first])));
    // The ratio 1, at which both are equally fast, is always in view.
    Object.assign(chart.y_range, around([1, ...pairs.map(ratio)]));
  }
  const table = new Table(
    byId("pairs-table"), "the pairs",
    [
      text("shape", ({ first }) => shapeOf(first)),
      text("case", ({ first }) => caseOf(first)),
      figure(runs[0].name, ({ first }) => timeOf(first), ({ first }) => points.time_us[first]),
      figure(runs[1].name, ({ second }) => timeOf(second), ({ second }) => points.time_us[second]),
      figure("speed", (pair) => `${ratio(pair).toFixed(2)}×`, ratio),
    ],
    { copies: true, first: PAGE },
  );
  table.set(pairs);
}

// Adds the handlers of clicks, the form, zooming, printing and a change of dark mode.
function listen() {
  const source = model("shown");
  source.selected.properties.indices.change.connect(() => {
    const [place] = source.selected.indices;
    if (place !== undefined) show(shown[place]);
  });
  byId("choose").addEventListener("submit", (event) => {
    event.preventDefault();
    askTyped(byId("shape").value);
  });
  // Zooming in makes room for points that were left out, so the points are drawn again. It changes
  // the ranges many times, and only the last change draws.
  let waiting = 0;
  const chart = model("roofline");
  for (const range of [chart.x_range, chart.y_range]) {
    range.change.connect(() => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        if (points.length > MOST_DRAWN) refresh();
      }, 250);
    });
  }
  // Hide the charts' buttons on paper.
  for (const [event, visible] of [["beforeprint", false], ["afterprint", true]]) {
    addEventListener(event, () => {
      for (const root of Bokeh.index.roots) root.model.toolbar.visible = visible;
    });
  }
  dark.addEventListener("change", () => {
    colour();
    refresh();
    sideBySide();
  });
}

// Waits until Bokeh has made the charts, which happens after this script has begun.
function bokehIsReady() {
  return new Promise((resolve) => {
    const look = () => (model("shown") ? resolve() : setTimeout(look, 10));
    look();
  });
}

makeFilters();
await bokehIsReady();
colour();
refresh();
adviceTable();
rulesTable();
errorsByShape();
sideBySide();
listen();
const first = firstToShow();
if (first !== null) choose(first);
performance.mark("ready");
document.documentElement.dataset.ready = "true";
