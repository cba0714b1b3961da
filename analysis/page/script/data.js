// The script of the page, in seven files that are one: data, tables, charts, formula (the time
// model), ask (answers from it), neighbours, page.
// Whatever comes from a recording is set as text, never as markup.
//
// This one: the page's data, unpacked, and what they are as text.

const byId = (id) => document.getElementById(id);

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

const round = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const rate = (tflops) =>
  tflops >= 0.95 ? `${round(tflops)} TFLOP/s` : `${round(tflops * 1000)} GFLOP/s`;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
const gain = (row) => `${percent(row.gain)} (${percent(row.lo)} to ${percent(row.hi)})`;

function shapeOf(i) {
  if (!word("spec", i)) return word("op", i);
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

// A time with its interval, from microseconds, in the unit that suits it.
function timeText(time, low, high) {
  const [unit, scale] = time < 1e4 ? ["µs", 1] : time < 1e7 ? ["ms", 1e-3] : ["s", 1e-6];
  const digits = { maximumSignificantDigits: 4 };
  const scaled = (value) => (value * scale).toLocaleString("en", digits);
  const interval = low === null ? "" : ` (${scaled(low)}–${scaled(high)} ${unit})`;
  return `${scaled(time)} ${unit}${interval}`;
}

function timeOf(i) {
  const [time, low, high] = [points.time_us[i], points.time_lo_us[i], points.time_hi_us[i]];
  if (time === null) return word("message", i) || word("status", i);
  return timeText(time, low, high);
}

function shareOfPeak(tflops, run, dtype) {
  const peak = run.peaks[dtype];
  return peak ? `, ${percent(tflops / peak, 0)} of the peak` : "";
}

function speedText(i) {
  if (points.time_us[i] === null || points.flops[i] === null) return "–";
  const speed = speedOf(i, points.time_us[i]);
  return rate(speed) + shareOfPeak(speed, machineOf(i), word("dtype", i));
}

function predictedText(i) {
  const time = points.predicted_us[i];
  if (time === null) return "–";
  return timeText(time, points.predicted_lo_us[i], points.predicted_hi_us[i]);
}

const errorOf = (i) =>
  points.predicted_us[i] === null || points.time_us[i] === null
    ? null
    : points.predicted_us[i] / points.time_us[i] - 1;

const number = (value, unit = "") => (value === null ? "–" : `${round(value, 4)}${unit}`);
