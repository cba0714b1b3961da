// The filters, and the drawing of the points that they leave.

const MOST_DRAWN = 4000; // maximum number of points drawn at once; more look the same and take longer
const COLORS = { bf16: "#0072B2", fp16: "#009E73", tf32: "#E69F00", fp32: "#D55E00", fp8: "#CC79A7" };
const DARK_COLORS = { bf16: "#56B4E9", fp16: "#3ddba8", tf32: "#F0C24B", fp32: "#FF8A4C", fp8: "#F0A6CF" };
const MARKERS = { bf16: "circle", fp16: "square", tf32: "triangle", fp32: "diamond", fp8: "inverted_triangle" };
const dark = matchMedia("(prefers-color-scheme: dark)");

const FACETS = ["run", "dtype", "op", "pass", "implementation", "sweep", "status"];
const NAMES = { op: "operation", run: "recording" };
const MANY = 8; // a facet with more words than this is folded

// The filter of each facet: the code of each point's word, and which words are selected, by code.
const filters = FACETS.filter((name) => points[name].words.length > 1).map((name) => ({
  name,
  codes: Uint32Array.from(points[name].codes),
  wanted: new Uint8Array(points[name].words.length).fill(1),
  counts: [],
}));

// The rows that no filter hides and, for each word of each facet, how many rows with this word
// would be left if its own facet hid none.
function filtered() {
  const rows = [];
  const counts = filters.map((filter) => new Uint32Array(filter.wanted.length));
  for (let i = 0; i < points.length; i++) {
    // A row that two facets hide counts nowhere, so the search stops at two.
    let hiding = 0;
    let hidingFacet = -1;
    for (let f = 0; f < filters.length && hiding < 2; f++) {
      if (!filters[f].wanted[filters[f].codes[i]]) {
        hiding++;
        hidingFacet = f;
      }
    }
    if (hiding === 0) {
      rows.push(i);
      for (let f = 0; f < filters.length; f++) counts[f][filters[f].codes[i]]++;
    } else if (hiding === 1) {
      counts[hidingFacet][filters[hidingFacet].codes[i]]++;
    }
  }
  return { rows, counts };
}

// Makes a row of chips for each facet: a box to tick for each word, with its number of rows, which
// `refresh` writes. A facet with many words is folded.
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
    const allOrNone = element("button", "All or none", { type: "button" });
    allOrNone.addEventListener("click", () => {
      const all = filter.wanted.every(Boolean);
      filter.wanted.fill(Number(!all));
      for (const input of box.querySelectorAll("input")) input.checked = !all;
      refresh();
    });
    if (points[name].words.length > 2) box.append(allOrNone);
    set.append(box);
    form.append(set);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
}

// A part of a chart (a Bokeh model) by the name that charts.py gave it.
const model = (name) =>
  Bokeh.documents.map((document_) => document_.get_model_by_name(name)).find(Boolean);
const color = (dtype) => (dark.matches ? DARK_COLORS : COLORS)[dtype] ?? "#888888";

// At most `most` of the rows, evenly spread over them and always the same.
function spread(rows, most) {
  if (rows.length <= most) return rows;
  return Array.from({ length: most }, (_, i) => rows[Math.floor((i * rows.length) / most)]);
}

// Charts of many points have fixed ranges, so that only the reader changes what is in view.
const inView = (value, range) => value >= range.start && value <= range.end;
let shown = []; // rows that are drawn now

// Draws the rows that have a time and an intensity. If there are too many of them, only an evenly
// spread part of those in the roofline's view is drawn. Returns how many rows could be drawn, and
// how many are drawn.
function drawPoints(rows) {
  const timed = rows.filter((i) => points.time_us[i] !== null && points.intensity[i] !== null);
  const { x_range: intensities, y_range: speeds } = model("roofline");
  const isInView = (i) =>
    inView(points.intensity[i], intensities) && inView(drawnSpeed(i, points.time_us[i]), speeds);
  const visible = timed.length > MOST_DRAWN ? timed.filter(isInView) : timed;
  shown = spread(visible, MOST_DRAWN);
  const column = (valueOf) => shown.map(valueOf);
  // The lowest speed (`lo`) belongs to the longest time. Bokeh draws nothing for NaN.
  const speedOrNaN = (i, time) => (time === null ? NaN : drawnSpeed(i, time));
  model("shown").selected.indices = [];
  model("shown").data = {
    index: shown,
    x: column((i) => points.intensity[i]),
    y: column((i) => drawnSpeed(i, points.time_us[i])),
    lo: column((i) => speedOrNaN(i, points.time_hi_us[i])),
    hi: column((i) => speedOrNaN(i, points.time_lo_us[i])),
    expected: column((i) => speedOrNaN(i, points.predicted_us[i])),
    measured: column((i) => points.time_us[i]),
    error: column((i) => 100 * (errorOf(i) ?? NaN)),
    color: column((i) => color(word("dtype", i))),
    marker: column((i) => MARKERS[word("dtype", i)] ?? "cross"),
    shape: column(shapeOf),
    case: column(caseOf),
    time: column(timeOf),
    speed: column(speedText),
    predicted: column(predictedText),
    limit: column((i) => word("limit", i)),
    tile: column((i) => word("tile", i)),
    waves: column((i) => number(points.waves[i])),
    kernel: column((i) => word("kernel", i)),
    clock: column((i) => number(points.sm_mhz[i], " MHz")),
  };
  return { drawable: visible.length, drawn: shown.length };
}

const speed = (i) => speedOf(i, points.time_us[i]);
// The roofline's axis has the unit that suits its machines.
const drawnSpeed = (i, time) => speedOf(i, time) * runs[0].scale;

const INK = [
  "axis_label_text_color", "major_label_text_color", "axis_line_color", "major_tick_line_color",
  "text_color",
];
const LINES = ["minor_tick_line_color", "grid_line_color", "outline_line_color"];

// Gives the page's colours to each part of the charts, because they are drawn on a canvas, which
// has no style sheet.
function colour() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, faint] = ["--ink", "--line", "--faint"].map((name) => style.getPropertyValue(name).trim());
  for (const document_ of Bokeh.documents) {
    for (const part of document_.all_models ?? document_._all_models.values()) {
      for (const name of INK) if (name in part) part[name] = ink;
      for (const name of LINES) if (name in part) part[name] = line;
      if (part.tags?.includes("neutral")) part.glyph.line_color = faint;
      // A roof has the colour of its dtype. Its label has the colour of the text, which is dark enough.
      const dtype = part.tags?.find((tag) => tag in COLORS);
      const roof = part.glyph ?? part;
      if (dtype && "line_color" in roof) roof.line_color = color(dtype);
    }
  }
}
