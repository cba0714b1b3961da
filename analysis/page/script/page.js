// The page's tables, what answers to a click, and the order in which all of it begins.

const text = (title, of) => ({ title, text: of });
const figure = (title, of, value) => ({ title, text: of, value });
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

function show(i) {
  if (!word("spec", i)) return; // neither a GEMM nor a convolution
  byId("shape").value = word("spec", i);
  askTyped(word("spec", i));
  choose(i);
  byId("neighbourhood").scrollIntoView();
  byId("shape").focus({ preventScroll: true });
}

function refresh() {
  const { rows, counts } = filtered();
  for (const [f, filter] of filters.entries()) {
    filter.counts.forEach((span, code) => {
      span.textContent = counts[f][code].toLocaleString("en");
    });
  }
  const { timed, drawn } = drawPoints(rows);
  const some = drawn < timed ? `; ${drawn.toLocaleString("en")} of ${timed.toLocaleString("en")} are drawn; zoom in to see all` : "";
  byId("count").textContent =
    `${rows.length.toLocaleString("en")} of ${points.length.toLocaleString("en")} cases${some}`;
  pointTable.set(rows);
}

function adviceTable() {
  const rows = runs.flatMap((run) =>
    run.advice.filter((row) => row.verdict !== "leave it").map((row) => ({ ...row, run: run.name })),
  );
  // The surest come first, and of equally sure ones those that gain at least so much.
  rows.sort((a, b) => (b.verdict === "do it") - (a.verdict === "do it") || b.lo - a.lo);
  const several = runs.length > 1 ? [text("recording", (row) => row.run)] : [];
  const table = new Table(
    byId("advice-table"), "the recommendations",
    [
      ...several,
      text("shape", (row) => row.shape),
      text("verdict", (row) => row.told),
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

function rulesTable() {
  const rows = runs.flatMap((run) => run.rules.map((rule) => ({ ...rule, run: run.name })));
  rows.sort((a, b) => (a.effect === null) - (b.effect === null));
  if (!byId("rules-table")) return;
  const ratio = (row) => (row.effect === null ? "–" : `${row.effect.toFixed(2)}× (${row.lo.toFixed(2)} to ${row.hi.toFixed(2)})`);
  const table = new Table(
    byId("rules-table"), "the rules",
    [
      text("advice", (row) => `${row.id}: ${row.statement}`),
      text("verdict", (row) => row.verdict),
      figure("effect", ratio, (row) => row.effect),
      figure("pairs", (row) => String(row.cases), (row) => row.cases),
      text("why", (row) => row.reason),
      text("source", (row) => row.source),
      ...(runs.length > 1 ? [text("recording", (row) => row.run)] : []),
    ],
    { copies: true },
  );
  table.set(rows);
}

// Mean error by powers of two of M (down) and of N·K (across).
function errorsByShape() {
  const sums = new Map();
  const power = (value) => Math.floor(Math.log2(value));
  for (let i = 0; i < points.length; i++) {
    if (errorOf(i) === null) continue;
    const key = `${power(points.m[i])} ${2 * Math.floor(power(points.n[i] * points.k[i]) / 2)}`;
    const sum = sums.get(key) ?? { error: 0, count: 0 };
    sum.error += Math.abs(errorOf(i));
    sum.count++;
    sums.set(key, sum);
  }
  const keys = [...sums.keys()].map((key) => key.split(" ").map(Number));
  const sorted = (at) => [...new Set(keys.map((key) => key[at]))].sort((a, b) => a - b);
  const [downs, acrosses] = [sorted(0), sorted(1)];
  const table = element("table");
  const head = element("tr");
  head.append(element("th", "M \\ N × K", { scope: "col" }));
  for (const across of acrosses) head.append(element("th", `2^${across}`, { scope: "col" }));
  table.append(head);
  for (const down of downs) {
    const line = element("tr");
    line.append(element("th", `${2 ** down}`, { scope: "row" }));
    for (const across of acrosses) {
      const sum = sums.get(`${down} ${across}`);
      const mean = sum ? sum.error / sum.count : 0;
      const cell = element("td", sum ? percent(mean) : "", { class: "heat" });
      if (sum) {
        cell.title = `${sum.count} cases`;
        cell.style.backgroundColor = `rgba(213, 94, 0, ${Math.min(0.7, 2 * mean)})`;
      }
      line.append(cell);
    }
    table.append(line);
  }
  byId("errors-by-shape").replaceChildren(table);
}

// The same shapes in the first two recordings, each by its fastest implementation.
function sideBySide() {
  if (runs.length < 2) return;
  const best = [new Map(), new Map()];
  for (let i = 0; i < points.length; i++) {
    const run = points.run.codes[i];
    if (run > 1 || points.intensity[i] === null || !word("spec", i)) continue;
    const key = [word("spec", i), word("mode", i), word("cache", i)].join(" ");
    const before = best[run].get(key);
    if (before === undefined || points.time_us[i] < points.time_us[before]) best[run].set(key, i);
  }
  const rows = [...best[0]].filter(([key]) => best[1].has(key)).map(([key, i]) => [i, best[1].get(key)]);
  const ratio = ([a, b]) => points.time_us[a] / points.time_us[b];
  const times = ([a, b]) => `${timeOf(a)}; ${timeOf(b)}`;
  model("pairs").data = {
    x: rows.map(([a]) => points.intensity[a]),
    ratio: rows.map(ratio),
    shape: rows.map(([a]) => `${shapeOf(a)} ${caseOf(a)}`),
    times: rows.map(times),
    color: rows.map(([a]) => color(word("dtype", a))),
    marker: rows.map(([a]) => MARKERS[word("dtype", a)] ?? "cross"),
  };
  const chart = model("pairs-chart");
  const around = (values) => ({ start: Math.min(...values) / 1.5, end: Math.max(...values) * 1.5 });
  if (rows.length) {
    Object.assign(chart.x_range, around(rows.map(([a]) => points.intensity[a])));
    Object.assign(chart.y_range, around([1, ...rows.map(ratio)]));
  }
  const table = new Table(
    byId("pairs-table"), "the pairs",
    [
      text("shape", ([a]) => shapeOf(a)),
      text("case", ([a]) => caseOf(a)),
      figure(runs[0].name, ([a]) => timeOf(a), ([a]) => points.time_us[a]),
      figure(runs[1].name, ([, b]) => timeOf(b), ([, b]) => points.time_us[b]),
      figure("speed", (pair) => `${ratio(pair).toFixed(2)}×`, ratio),
    ],
    { copies: true, first: PAGE },
  );
  table.set(rows);
}

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
  // While it is zoomed, points that were left out are drawn where there is room for them.
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
