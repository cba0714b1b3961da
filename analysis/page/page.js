// Joins the page's data with its charts: filters, tables, and the neighbours of a shape.
// Whatever comes from a recording is set as text, never as markup.

const MOST_DRAWN = 4000; // points at once: more look the same and take longer
const PAGE = 100; // rows of a table at once
const NEAR = 6; // neighbours to each side that are shown at least
const MOST_EDGES = 60;
const GEMM_SIZES = ["m", "n", "k"];
const CONV_SIZES = ["batch", "c", "kout"];
const COLORS = { bf16: "#0072B2", fp16: "#009E73", tf32: "#E69F00", fp32: "#D55E00", fp8: "#CC79A7" };
const DARK_COLORS = { bf16: "#56B4E9", fp16: "#3ddba8", tf32: "#F0C24B", fp32: "#FF8A4C", fp8: "#F0A6CF" };
const MARKERS = { bf16: "circle", fp16: "square", tf32: "triangle", fp32: "diamond", fp8: "inverted_triangle" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);

// ---- Data -----------------------------------------------------------------------------------

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The points of all recordings in one set of columns; a column of words is codes and words.
function joined(runs) {
  const points = { length: 0, run: { codes: [], words: runs.map((run) => run.name) } };
  for (const [place, run] of runs.entries()) {
    const count = run.points.m.length;
    for (const [name, column] of Object.entries(run.points)) {
      if (Array.isArray(column)) {
        points[name] = (points[name] ?? []).concat(column);
        continue;
      }
      points[name] ??= { codes: [], words: [] };
      const { codes, words } = points[name];
      const known = new Map(words.map((word, code) => [word, code]));
      const now = column.words.map((word) => {
        if (!known.has(word)) known.set(word, words.push(word) - 1);
        return known.get(word);
      });
      for (const code of column.codes) codes.push(now[code]);
    }
    for (let i = 0; i < count; i++) points.run.codes.push(place);
    points.length += count;
  }
  return points;
}

const runs = await unpacked();
const points = joined(runs);
const word = (name, i) => points[name].words[points[name].codes[i]];
const speedOf = (i, time) => points.flops[i] / time / 1e6;
const machineOf = (i) => runs[points.run.codes[i]];

// ---- Numbers as text ------------------------------------------------------------------------

const round = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const rate = (tflops) =>
  tflops >= 0.95 ? `${round(tflops)} TFLOP/s` : `${round(tflops * 1000)} GFLOP/s`;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const gain = (row) => `${percent(row.gain)} (${percent(row.lo)} to ${percent(row.hi)})`;

function shapeOf(i) {
  if (word("op", i) !== "conv") {
    const batch = points.batch[i] > 1 ? `${points.batch[i]} × ` : "";
    return `${batch}${points.m[i]}×${points.n[i]}×${points.k[i]}`;
  }
  const at = (name) => points[name][i];
  return (
    `${at("batch")}×${at("c")}×${at("h")}×${at("w")} → ${at("kout")}, ` +
    `${at("r")}×${at("s")} ${word("pass", i)}`
  );
}

const caseOf = (i) =>
  ["dtype", "layout", "implementation", "config", "cache", "mode", "sweep", "status"]
    .map((name) => word(name, i))
    .filter((text) => text && text !== "ok")
    .join(" ");

function timeOf(i) {
  const [time, low, high] = [points.time_us[i], points.time_lo_us[i], points.time_hi_us[i]];
  if (time === null) return word("message", i) || word("status", i);
  return low === null ? `${time} µs` : `${time} µs (${low} to ${high})`;
}

function speedText(i) {
  if (points.time_us[i] === null || points.flops[i] === null) return "–";
  const speed = speedOf(i, points.time_us[i]);
  const peak = machineOf(i).peaks[word("dtype", i)];
  return peak ? `${rate(speed)}, ${percent(speed / peak, 0)} of the peak` : rate(speed);
}

function predictedText(i) {
  const time = points.predicted_us[i];
  if (time === null) return "–";
  return `${time} µs (${points.predicted_lo_us[i]} to ${points.predicted_hi_us[i]})`;
}

const errorOf = (i) =>
  points.predicted_us[i] === null || points.time_us[i] === null
    ? null
    : points.predicted_us[i] / points.time_us[i] - 1;

const number = (value, unit = "") => (value === null ? "–" : `${round(value, 4)}${unit}`);

// ---- Tables ---------------------------------------------------------------------------------

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A table of rows that is sorted by its heads and searched by a word. A column has a title, a text
// of a row, and, where it is sorted as a number, its value.
class Table {
  constructor(place, name, columns, { copies = false } = {}) {
    Object.assign(this, { place, name, columns, copies, rows: [], sorted: null, down: true });
    this.search = element("input", "", { type: "search", "aria-label": `Search ${name}` });
    this.search.placeholder = "Search";
    this.search.addEventListener("input", () => this.draw());
    this.told = element("output", "", { "aria-live": "polite" });
    this.more = element("button", "More rows", { type: "button" });
    this.more.addEventListener("click", () => this.draw(this.shown + PAGE));
    const scroll = element("div", "", { class: "scroll", tabindex: "0", "aria-label": name });
    scroll.setAttribute("role", "region");
    this.table = element("table");
    scroll.append(this.table);
    const tools = element("p");
    tools.append(this.search, " ", this.told);
    place.replaceChildren(tools, scroll, this.more);
  }

  set(rows) {
    this.rows = rows;
    this.draw();
  }

  wanted() {
    const needle = this.search.value.trim().toLowerCase();
    const has = (row) => this.columns.some((c) => c.text(row).toLowerCase().includes(needle));
    const rows = needle ? this.rows.filter(has) : [...this.rows];
    const column = this.columns[this.sorted];
    if (column) {
      const of = column.value ?? column.text;
      const keys = new Map(rows.map((row) => [row, of(row)]));
      const sign = this.down ? -1 : 1;
      rows.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
      });
    }
    return rows;
  }

  draw(count = PAGE) {
    const rows = this.wanted();
    this.shown = Math.min(count, rows.length);
    this.told.textContent = `${this.shown} of ${rows.length.toLocaleString("en")} rows`;
    this.more.hidden = this.shown === rows.length;
    const head = element("tr");
    for (const [place, column] of this.columns.entries()) {
      const cell = element("th", "", { class: column.value ? "number" : "", scope: "col" });
      const mark = place === this.sorted ? (this.down ? " ↓" : " ↑") : "";
      const button = element("button", column.title + mark, { type: "button" });
      button.addEventListener("click", () => this.sort(place));
      if (mark) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      cell.append(button);
      head.append(cell);
    }
    if (this.copies) head.append(element("th", "", { scope: "col" }));
    const top = element("thead");
    top.append(head);
    const body = element("tbody");
    for (const row of rows.slice(0, this.shown)) body.append(this.line(row));
    this.table.replaceChildren(top, body);
  }

  line(row) {
    const line = element("tr");
    for (const column of this.columns) {
      const cell = element("td", column.text(row), { class: column.value ? "number" : "" });
      if (column.choose) {
        const button = element("button", column.text(row), { type: "button" });
        button.addEventListener("click", () => column.choose(row));
        cell.replaceChildren(button);
      }
      line.append(cell);
    }
    if (this.copies) {
      const button = element("button", "Copy", { type: "button", class: "copy" });
      button.title = "Copy this row as Markdown";
      button.addEventListener("click", () => this.copy(row, button));
      const cell = element("td");
      cell.append(button);
      line.append(cell);
    }
    return line;
  }

  sort(place) {
    this.down = place === this.sorted ? !this.down : Boolean(this.columns[place].value);
    this.sorted = place;
    this.draw();
    this.table.querySelectorAll("th button")[place].focus();
  }

  async copy(row, button) {
    const cells = this.columns.map((c) => c.text(row).replaceAll("|", "\\|").replaceAll("\n", " "));
    const line = (texts) => `| ${texts.join(" | ")} |`;
    const titles = this.columns.map((c) => c.title);
    const text = [line(titles), line(titles.map(() => "---")), line(cells)].join("\n");
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // A file from the disk may not write to the clipboard everywhere.
      const area = element("textarea", text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
  }
}

// ---- Filters --------------------------------------------------------------------------------

const FACETS = ["run", "dtype", "op", "pass", "implementation", "sweep", "status"];
const NAMES = { op: "operation", run: "recording" };
const MANY = 8;

// For each facet: which of its words are wanted, by code.
const filters = FACETS.filter((name) => points[name].words.length > 1).map((name) => ({
  name,
  codes: Uint32Array.from(points[name].codes),
  wanted: new Uint8Array(points[name].words.length).fill(1),
  counts: [],
}));

// The rows that all filters want, and of each word how many rows there are but for its own facet.
function filtered() {
  const rows = [];
  const counts = filters.map((f) => new Uint32Array(f.wanted.length));
  for (let i = 0; i < points.length; i++) {
    let misses = 0;
    let missed = -1;
    for (let f = 0; f < filters.length && misses < 2; f++) {
      if (!filters[f].wanted[filters[f].codes[i]]) {
        misses++;
        missed = f;
      }
    }
    if (misses === 0) {
      rows.push(i);
      for (let f = 0; f < filters.length; f++) counts[f][filters[f].codes[i]]++;
    } else if (misses === 1) {
      counts[missed][filters[missed].codes[i]]++;
    }
  }
  return { rows, counts };
}

function makeFilters() {
  const form = byId("filters");
  for (const filter of filters) {
    const { name } = filter;
    const set = element("fieldset");
    set.append(element("legend", NAMES[name] ?? name));
    const box = element("div", "", { class: points[name].words.length > MANY ? "many" : "" });
    for (const [code, text] of points[name].words.entries()) {
      const label = element("label");
      const input = element("input", "", { type: "checkbox", name, value: text });
      input.checked = true;
      input.addEventListener("change", () => {
        filter.wanted[code] = Number(input.checked);
        refresh();
      });
      const count = element("span", "", { class: "faint" });
      filter.counts.push(count);
      label.append(input, ` ${text || "none"} `, count);
      box.append(label);
    }
    const others = element("button", "All or none", { type: "button" });
    others.addEventListener("click", () => {
      const all = filter.wanted.every(Boolean);
      filter.wanted.fill(Number(!all));
      for (const input of box.querySelectorAll("input")) input.checked = !all;
      refresh();
    });
    set.append(box);
    if (points[name].words.length > 2) set.append(others);
    form.append(set);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
}

// ---- Charts ---------------------------------------------------------------------------------

const model = (name) => Bokeh.documents.map((d) => d.get_model_by_name(name)).find(Boolean);
const color = (dtype) => (dark.matches ? DARK_COLORS : COLORS)[dtype] ?? "#888888";

// Rows spread evenly over all of them, the same ones each time.
function spread(rows, most) {
  if (rows.length <= most) return rows;
  return Array.from({ length: most }, (_, i) => rows[Math.floor((i * rows.length) / most)]);
}

// Charts of many points have fixed ranges, so that only whoever looks at one changes what is seen.
const inView = (value, range) => value >= range.start && value <= range.end;
let shown = []; // rows that are drawn now

function drawPoints(rows) {
  const timed = rows.filter((i) => points.time_us[i] !== null && points.intensity[i] !== null);
  const chart = model("roofline");
  const { x_range: xs, y_range: ys } = chart;
  const visible = timed.filter((i) => inView(points.intensity[i], xs) && inView(speed(i), ys));
  shown = spread(visible, MOST_DRAWN);
  const each = (of) => shown.map(of);
  model("shown").data = {
    index: shown,
    x: each((i) => points.intensity[i]),
    y: each(speed),
    lo: each((i) => (points.time_hi_us[i] === null ? NaN : speedOf(i, points.time_hi_us[i]))),
    hi: each((i) => (points.time_lo_us[i] === null ? NaN : speedOf(i, points.time_lo_us[i]))),
    expected: each((i) => (points.predicted_us[i] ? speedOf(i, points.predicted_us[i]) : NaN)),
    measured: each((i) => points.time_us[i]),
    error: each((i) => 100 * (points.predicted_us[i] / points.time_us[i] - 1)),
    color: each((i) => color(word("dtype", i))),
    marker: each((i) => MARKERS[word("dtype", i)] ?? "cross"),
    shape: each(shapeOf),
    case: each(caseOf),
    time: each(timeOf),
    speed: each(speedText),
    predicted: each(predictedText),
    limit: each((i) => word("limit", i)),
    tile: each((i) => word("tile", i)),
    waves: each((i) => number(points.waves[i])),
    kernel: each((i) => word("kernel", i)),
    clock: each((i) => number(points.sm_mhz[i], " MHz")),
  };
  return { timed: visible.length, drawn: shown.length };
}

const speed = (i) => speedOf(i, points.time_us[i]);

// Charts are drawn on a canvas, where the page's colours do not reach.
function colour() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  for (const document_ of Bokeh.documents) {
    for (const each of document_.all_models ?? document_._all_models.values()) {
      for (const name of ["axis_label_text_color", "major_label_text_color", "axis_line_color"]) {
        if (name in each) each[name] = ink;
      }
      if ("major_tick_line_color" in each) each.major_tick_line_color = ink;
      if ("minor_tick_line_color" in each) each.minor_tick_line_color = line;
      if ("grid_line_color" in each) each.grid_line_color = line;
      if ("outline_line_color" in each) each.outline_line_color = line;
    }
  }
}

// ---- Neighbourhood --------------------------------------------------------------------------

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
  // The same case of several sweeps is one point of the line.
  return found.filter((j, k) => !k || points[along][j] !== points[along][found[k - 1]]);
}

const ceil = (a, b) => Math.ceil(a / b);

// Where one more of M or N begins another tile, and where another wave, between a line's ends.
function edgesOf(i, along, low, high) {
  const tile = word("tile", i).match(/^(\d+)x(\d+)/);
  if (!tile || along === "k" || word("op", i) !== "gemm") return { tiles: [], waves: [] };
  const [rows, columns] = [Number(tile[1]), Number(tile[2])];
  const [block, other] =
    along === "m" ? [rows, ceil(points.n[i], columns)] : [columns, ceil(points.m[i], rows)];
  const slots = machineOf(i).sms;
  const waves = (count) => ceil(count * other * points.batch[i], slots);
  const found = { tiles: [], waves: [] };
  for (let count = Math.max(1, ceil(low, block)); count * block < high; count++) {
    if (count * block < low) continue;
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
  const alone = line.length < 2;
  const title = i === null ? "" : `Along ${along.toUpperCase()}`;
  const heading = box.querySelector("h3");
  const [low, high] = endsAround(line.map((j) => points[along][j]), i === null ? 0 : points[along][i]);
  const inside = line.filter((j) => points[along][j] >= low && points[along][j] <= high);
  const tallest = (j) => Math.max(points.time_us[j], points.predicted_us[j] ?? 0);
  const top = Math.max(...inside.map(tallest));
  const edges = alone ? { tiles: [], waves: [] } : edgesOf(i, along, low, high);
  const marks = `; ${edges.tiles.length} edges of tiles, ${edges.waves.length} of waves`;
  heading.textContent = alone
    ? `${title}: no other size was measured`
    : `${title}: ${line.length} sizes${edges.tiles.length + edges.waves.length ? marks : ""}`;
  for (const kind of ["tiles", "waves"]) {
    const drawn = edges[kind].length > MOST_EDGES ? [] : edges[kind];
    model(`${name}-${kind}`).data = {
      x: drawn,
      low: drawn.map(() => 0),
      high: drawn.map(() => 1.1 * top),
    };
  }
  model(`${name}-here`).data =
    i === null ? { x: [], time: [] } : { x: [points[along][i]], time: [points.time_us[i]] };
  const chart = model(`chart-${name}`);
  chart.below[0].axis_label = along.toUpperCase();
  if (line.length) {
    const margin = alone ? 1 : 0.05 * (high - low);
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

function distance(i, sizes) {
  const names = sizesOf(i);
  return names.reduce((sum, name) => sum + Math.abs(Math.log2(points[name][i] / sizes[name])), 0);
}

// The row of a typed shape: the very one, else the nearest that was timed with its dtype.
function find(text) {
  const fields = text.trim().replaceAll("×", ",").split(/\s*,\s*/);
  const conv = fields.length > 6;
  const [sizes, dtype] = conv
    ? [{ batch: fields[0], c: fields[1], kout: fields[4] }, fields[11]]
    : [{ m: fields[0], n: fields[1], k: fields[2] }, fields[3]];
  if (!Object.values(sizes).every((size) => /^[1-9]\d{0,11}$/.test(size ?? ""))) return null;
  const numbers = Object.fromEntries(Object.entries(sizes).map(([n, v]) => [n, Number(v)]));
  const spec = fields.join(",");
  let best = null;
  for (let i = 0; i < points.length; i++) {
    if (points.time_us[i] === null || word("op", i) !== (conv ? "conv" : "gemm")) continue;
    if (dtype && word("dtype", i) !== dtype) continue;
    const exact = `${word("spec", i)},`.startsWith(`${spec},`) ? -1 : 0;
    // Where the same shape was timed in several ways, the plain one is meant.
    const plain = (word("config", i) ? 0.2 : 0) + (word("cache", i) === "cold" ? 0 : 0.1);
    const far = distance(i, numbers) + exact + plain;
    if (best === null || far < best.far) best = { i, far, exact: distance(i, numbers) === 0 };
  }
  return best;
}

function choose(i, asked = "") {
  const spec = word("spec", i);
  const nearest = asked ? `${asked} was not measured; the nearest is ` : "";
  const text = `${nearest}${shapeOf(i)} ${caseOf(i)}: ${timeOf(i)}, ${speedText(i)}; predicted ${predictedText(i)}.`;
  byId("chosen").textContent = text;
  const list = byId("chosen-advice");
  list.replaceChildren();
  for (const row of machineOf(i).advice.filter((each) => each.spec === spec)) {
    const change = row.verdict === "leave it" ? "" : `: ${row.change}, gains ${gain(row)}`;
    list.append(element("li", `To ${row.question}, ${row.verdict}${change} (${row.reason}).`));
  }
  for (const [place, along] of sizesOf(i).entries()) drawLine(place, i, along);
}

// ---- The page -------------------------------------------------------------------------------

const text = (title, of) => ({ title, text: of });
const figure = (title, of, value) => ({ title, text: of, value });
const lineTables = [0, 1, 2].map(
  (place) =>
    new Table(byId(`line-${place}`).querySelector(".line-table"), `line ${place + 1}`, [
      figure("size", ({ row, along }) => String(points[along][row]), ({ row, along }) => points[along][row]),
      figure("time", ({ row }) => timeOf(row), ({ row }) => points.time_us[row]),
      figure("predicted", ({ row }) => predictedText(row), ({ row }) => points.predicted_us[row]),
    ]),
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
  byId("shape").value = word("spec", i);
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
  const some = drawn < timed ? `; ${drawn.toLocaleString("en")} of ${timed.toLocaleString("en")} are drawn, zoom in to see all` : "";
  byId("count").textContent =
    `${rows.length.toLocaleString("en")} of ${points.length.toLocaleString("en")} cases${some}`;
  pointTable.set(rows);
}

function adviceTable() {
  const rows = runs.flatMap((run) =>
    run.advice.filter((row) => row.verdict !== "leave it").map((row) => ({ ...row, run: run.name })),
  );
  const several = runs.length > 1 ? [text("recording", (row) => row.run)] : [];
  const table = new Table(
    byId("advice-table"), "the recommendations",
    [
      ...several,
      text("shape", (row) => row.shape),
      text("verdict", (row) => row.verdict),
      text("question", (row) => row.question),
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
  if (!rows.length) return;
  const ratio = (row) => (row.effect === null ? "–" : `${row.effect.toFixed(2)}× (${row.lo.toFixed(2)} to ${row.hi.toFixed(2)})`);
  const table = new Table(
    byId("rules-table"), "the rules",
    [
      text("rule", (row) => row.statement),
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
    if (!points.predicted_us[i] || points.time_us[i] === null) continue;
    const key = `${power(points.m[i])} ${2 * Math.floor(power(points.n[i] * points.k[i]) / 2)}`;
    const sum = sums.get(key) ?? { error: 0, count: 0 };
    sum.error += Math.abs(points.predicted_us[i] / points.time_us[i] - 1);
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
    if (run > 1 || points.time_us[i] === null || !word("spec", i)) continue;
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
    { copies: true },
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
    const asked = byId("shape").value;
    const found = find(asked);
    if (found === null) {
      byId("chosen").textContent = `${asked || "Nothing"} is no shape that was measured here: give M,N,K,dtype, or a convolution as --conv takes it.`;
      byId("chosen-advice").replaceChildren();
    } else {
      choose(found.i, found.exact ? "" : asked);
    }
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
  dark.addEventListener("change", () => {
    colour();
    refresh();
    sideBySide();
  });
}

function bokehIsReady() {
  return new Promise((resolve) => {
    const look = () => (model("rules-chart") || model("shown") ? resolve() : setTimeout(look, 10));
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
