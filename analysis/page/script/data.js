// The page's script is one module, joined from seven files: data, tables, charts, formula (the time
// model), ask (answers from it), neighbours and page. Text from a recording is only shown as text,
// never as markup.
//
// This file unpacks the page's data, and formats points as text.

const byId = (id) => document.getElementById(id);

// The data of all recordings, from the compressed JSON in the page.
async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The points of all recordings in one set of columns. A column of numbers is an array. A column of
// strings has its distinct words, and for each point the code (position) of its word.
function joined(runs) {
  const points = { length: 0, run: { codes: [], words: runs.map((run) => run.name) } };
  for (const [position, run] of runs.entries()) {
    for (const [name, column] of Object.entries(run.points)) {
      if (Array.isArray(column)) {
        points[name] = (points[name] ?? []).concat(column);
      } else {
        points[name] ??= { codes: [], words: [] };
        appendWords(points[name], column);
      }
    }
    const count = run.points.m.length;
    for (let i = 0; i < count; i++) points.run.codes.push(position);
    points.length += count;
  }
  return points;
}

// Appends a recording's column of strings; the same word may have another code in each recording.
function appendWords({ codes, words }, column) {
  const codeOf = new Map(words.map((word, code) => [word, code]));
  const newCodes = column.words.map((word) => {
    if (!codeOf.has(word)) codeOf.set(word, words.push(word) - 1);
    return codeOf.get(word);
  });
  for (const code of column.codes) codes.push(newCodes[code]);
}

const runs = await unpacked();
const points = joined(runs);
// In all files, `i` is the row of a point in the columns of `points`.
const word = (name, i) => points[name].words[points[name].codes[i]];
const speedOf = (i, time) => points.flops[i] / time / 1e6; // TFLOP/s of a time in microseconds
const runOf = (i) => runs[points.run.codes[i]];

const round = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const rate = (tflops) =>
  tflops < 1 ? `${round(tflops * 1000)} GFLOP/s` : `${round(tflops)} TFLOP/s`;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
const gain = (row) => `${percent(row.gain)} (${percent(row.lo)} to ${percent(row.hi)})`;

// A point's sizes as text, or the name of an operation that is neither a GEMM nor a convolution.
function shapeOf(i) {
  if (!word("spec", i)) return word("op", i);
  const size = (name) => points[name][i];
  if (word("op", i) !== "conv") {
    const batch = size("batch") > 1 ? `${size("batch")} × ` : "";
    return `${batch}${size("m")}×${size("n")}×${size("k")}`;
  }
  return (
    `${size("batch")}×${size("c")}×${size("h")}×${size("w")} → ${size("kout")}, ` +
    `${size("r")}×${size("s")} ${word("pass", i)}`
  );
}

// Everything except its sizes that distinguishes a case. A status is only shown if it is not "ok".
const caseOf = (i) =>
  ["dtype", "layout", "implementation", "config", "cache", "mode", "sweep", "status"]
    .map((name) => word(name, i))
    .filter((text) => text && text !== "ok")
    .join(" ");

// All numbers share one formatter, because making one for each number would take most of the time
// that a filter takes.
const FOUR_DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

// A time with its interval as text, from microseconds, in the unit that suits it. A time without an
// interval has null for both ends.
function timeText(time, low, high) {
  const [unit, scale] = time < 1e4 ? ["µs", 1] : time < 1e7 ? ["ms", 1e-3] : ["s", 1e-6];
  const scaled = (value) => FOUR_DIGITS.format(value * scale);
  const interval = low === null ? "" : ` (${scaled(low)}–${scaled(high)} ${unit})`;
  return `${scaled(time)} ${unit}${interval}`;
}

// A point's measured time, or the reason why it has none.
function timeOf(i) {
  const time = points.time_us[i];
  if (time === null) return word("message", i) || word("status", i);
  return timeText(time, points.time_lo_us[i], points.time_hi_us[i]);
}

// The end of a sentence about a speed; empty if the peak of the dtype is not known.
function shareOfPeak(tflops, run, dtype) {
  const peak = run.peaks[dtype];
  return peak ? `, ${percent(tflops / peak, 0)} of the peak` : "";
}

// A point's measured speed, or a dash.
function speedText(i) {
  if (points.time_us[i] === null || points.flops[i] === null) return "–";
  const speed = speedOf(i, points.time_us[i]);
  return rate(speed) + shareOfPeak(speed, runOf(i), word("dtype", i));
}

// A point's predicted time with its 90% interval, or a dash.
function predictedText(i) {
  const time = points.predicted_us[i];
  if (time === null) return "–";
  return timeText(time, points.predicted_lo_us[i], points.predicted_hi_us[i]);
}

// The relative error of a point's prediction; null without a measured or a predicted time.
const errorOf = (i) =>
  points.predicted_us[i] === null || points.time_us[i] === null
    ? null
    : points.predicted_us[i] / points.time_us[i] - 1;

const number = (value, unit = "") => (value === null ? "–" : `${round(value, 4)}${unit}`);
