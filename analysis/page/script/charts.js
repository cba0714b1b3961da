// The filters, and the points that are drawn of those that they leave.

const MOST_DRAWN = 4000; // points at once: more look the same and take longer
const COLORS = { bf16: "#0072B2", fp16: "#009E73", tf32: "#E69F00", fp32: "#D55E00", fp8: "#CC79A7" };
const DARK_COLORS = { bf16: "#56B4E9", fp16: "#3ddba8", tf32: "#F0C24B", fp32: "#FF8A4C", fp8: "#F0A6CF" };
const MARKERS = { bf16: "circle", fp16: "square", tf32: "triangle", fp32: "diamond", fp8: "inverted_triangle" };
const dark = matchMedia("(prefers-color-scheme: dark)");

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

// One row of chips; a facet of many words opens on demand.
function makeFilters() {
  const form = byId("filters");
  for (const filter of filters) {
    const { name } = filter;
    const many = points[name].words.length > MANY;
    const set = element(many ? "details" : "fieldset", "", { class: "facet" });
    set.append(element(many ? "summary" : "legend", NAMES[name] ?? name));
    const box = element("div", "", { class: "chips" });
    for (const [code, text] of points[name].words.entries()) {
      const label = element("label", "", { class: "chip" });
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
    if (points[name].words.length > 2) box.append(others);
    set.append(box);
    form.append(set);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
}

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
  const seen = (i) => inView(points.intensity[i], xs) && inView(drawnSpeed(i, points.time_us[i]), ys);
  const visible = timed.length > MOST_DRAWN ? timed.filter(seen) : timed;
  shown = spread(visible, MOST_DRAWN);
  const each = (of) => shown.map(of);
  model("shown").selected.indices = [];
  model("shown").data = {
    index: shown,
    x: each((i) => points.intensity[i]),
    y: each((i) => drawnSpeed(i, points.time_us[i])),
    lo: each((i) => (points.time_hi_us[i] === null ? NaN : drawnSpeed(i, points.time_hi_us[i]))),
    hi: each((i) => (points.time_lo_us[i] === null ? NaN : drawnSpeed(i, points.time_lo_us[i]))),
    expected: each((i) => (points.predicted_us[i] ? drawnSpeed(i, points.predicted_us[i]) : NaN)),
    measured: each((i) => points.time_us[i]),
    error: each((i) => 100 * (errorOf(i) ?? NaN)),
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
// The roofline's axis has the unit that suits its machines.
const drawnSpeed = (i, time) => speedOf(i, time) * runs[0].scale;

// Charts are drawn on a canvas, where the page's colours do not reach.
function colour() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, faint] = ["--ink", "--line", "--faint"].map((name) => style.getPropertyValue(name).trim());
  for (const document_ of Bokeh.documents) {
    for (const each of document_.all_models ?? document_._all_models.values()) {
      for (const name of ["axis_label_text_color", "major_label_text_color", "axis_line_color"]) {
        if (name in each) each[name] = ink;
      }
      if ("major_tick_line_color" in each) each.major_tick_line_color = ink;
      if ("minor_tick_line_color" in each) each.minor_tick_line_color = line;
      if ("grid_line_color" in each) each.grid_line_color = line;
      if ("outline_line_color" in each) each.outline_line_color = line;
      const dtype = each.tags?.find((tag) => tag in COLORS);
      if (dtype && "text_color" in each) each.text_color = color(dtype);
      if (each.tags?.includes("neutral")) each.glyph.line_color = faint;
      const roof = each.glyph ?? each;
      if (dtype && "line_color" in roof && !("text_color" in each)) roof.line_color = color(dtype);
    }
  }
}
