// Answers about a typed shape: its predicted time, and the larger sizes that are worth padding to.
//
// It does what analysis/advice does for `recommend` where nothing was measured; a test compares the
// two. Names are those of the Python code, which explains the steps.

const ALLOWANCE = 0.125;
const ROUNDED = 1e-9;
const MULTIPLES = [8, 16, 32, 64, 128, 256];
const LARGE_STEPS = [64, 128];
const OF_SMALL = 4;
const OF_VOCABULARY = [512, 1024];
const MIN_VOCABULARY = 30_000;
const MAX_COMBINATIONS = 256;
const BEST_SIZES = 3;
const MIN_GAIN = 0.01;
const LEAST_PROBABILITY = 0.8;
const SUREST = 0.95;
const PRICE = 0.1;
const OUTSIDE = 0.1;
const LIMIT_WORDS = {
  launch: "launching, which takes longer than computing",
  compute: "arithmetic",
  feed: "how fast operands can be loaded",
  latency: "the latency of each step along K",
  memory: "memory bandwidth",
};

const FIELDS = {
  gemm: ["m", "n", "k", "dtype", "layout", "batch"],
  conv: ["n", "c", "h", "w", "kout", "r", "s", "stride", "padding", "dilation", "groups", "dtype",
    "layout", "pass"],
};
const NEEDED = { gemm: 4, conv: 12 }; // fields that have no default
const DEFAULTS = { gemm: { layout: "nt", batch: "1" }, conv: { layout: "nhwc", pass: "fprop" } };
const WORD_FIELDS = {
  dtype: Object.keys(ELEMENT_BYTES),
  layout: ["nn", "nt", "tn", "tt", "nhwc", "nchw"],
  pass: ["fprop", "dgrad", "wgrad"],
};

// The problem of a text as --gemm or --conv takes it, or a sentence that says what is wrong with it.
function parseShape(text) {
  const form = "Type M,N,K,dtype, such as 4096,4104,4096,bf16, or a convolution as --conv takes it.";
  const typed = text.trim().toLowerCase().replaceAll("×", ",").split(/\s*,\s*/);
  const op = typed.length > FIELDS.gemm.length ? "conv" : "gemm";
  if (typed.length < NEEDED[op] || typed.length > FIELDS[op].length) return { fault: form };
  const problem = { op };
  for (const [place, name] of FIELDS[op].entries()) {
    const value = typed[place] || DEFAULTS[op][name] || "";
    if (name in WORD_FIELDS) {
      const words = WORD_FIELDS[name].filter((each) => name !== "layout" || (each.length === 2) === (op === "gemm"));
      if (!words.includes(value)) return { fault: `${name} is one of ${words.join(", ")}, not '${value}'.` };
      problem[name] = value;
      continue;
    }
    const isPair = ["stride", "padding", "dilation"].includes(name);
    const digits = name === "padding" ? /^\d{1,6}$/ : /^[1-9]\d{0,11}$/;
    const numbers = isPair ? value.split("x") : [value];
    if (numbers.length > 2 || !numbers.every((each) => digits.test(each))) {
      const number = isPair ? "one number such as 2, or two such as 2x1" : "a whole number of at least 1";
      return { fault: `${name} is ${number}, not '${value}'. ${form}` };
    }
    problem[name] = isPair ? [Number(numbers[0]), Number(numbers.at(-1))] : Number(value);
  }
  if (op === "conv") {
    if (problem.c % problem.groups || problem.kout % problem.groups) {
      return { fault: "groups must divide the input channels and the output channels." };
    }
    if (Math.min(...outputOf(problem)) < 1) {
      return { fault: "The filter does not fit into the image with this padding and dilation." };
    }
  }
  return { problem };
}

const pairText = ([a, b]) => (a === b ? String(a) : `${a}x${b}`);
const specOf = (problem) =>
  FIELDS[problem.op]
    .map((name) => (Array.isArray(problem[name]) ? pairText(problem[name]) : problem[name]))
    .join(",");

const dimensions = (problem) => (problem.op === "gemm" ? ["m", "n", "k"] : ["c", "kout"]);
const fits = (size) => size % (size < 2 * MULTIPLES[0] ? OF_SMALL : MULTIPLES[0]) === 0;
const lastOfLayout = { nt: "n", tn: "m" }; // the dimension that counts output features

function sizesNear(problem, name, edges) {
  const size = problem[name];
  const most = Math.floor(size * (1 + ALLOWANCE));
  const steps = new Set([...MULTIPLES, ...edges]);
  if (size < 2 * MULTIPLES[0]) steps.add(OF_SMALL);
  const isVocabulary = problem.batch === 1 && lastOfLayout[problem.layout] === name && size >= MIN_VOCABULARY;
  if (isVocabulary) for (const step of OF_VOCABULARY) steps.add(step);
  const sizes = new Set();
  for (const step of steps) {
    sizes.add(ceilDiv(size, step) * step);
    if (LARGE_STEPS.includes(step)) sizes.add((Math.floor(size / step) + 1) * step);
  }
  const allowed = [...sizes].filter((value) => value >= size && value <= most && fits(value));
  return [...new Set([size, ...allowed])].sort((a, b) => a - b);
}

function combined(problem, sizes) {
  let options = [problem];
  for (const [name, values] of Object.entries(sizes)) {
    options = options.flatMap((option) => values.map((value) => ({ ...option, [name]: value })));
  }
  return options;
}

// The problem first, then the larger sizes of it that a pad query allows.
function optionsOf(problem, timeModel) {
  const edges = timeModel.groups[groupName(problem)].tiles.flat().filter((edge) => edge & (edge - 1));
  const sizes = {};
  for (const name of dimensions(problem)) sizes[name] = sizesNear(problem, name, edges);
  const isPossible = (option) =>
    option.op === "gemm" || (option.c % option.groups === 0 && option.kout % option.groups === 0);
  const more = (option) => flopsOf(option) / flopsOf(problem) - 1;
  const isAllowed = (option) => isPossible(option) && more(option) <= ALLOWANCE + ROUNDED;
  const count = Object.values(sizes).reduce((product, values) => product * values.length, 1);
  let options = [];
  if (count <= MAX_COMBINATIONS) {
    options = combined(problem, sizes).filter(isAllowed);
  } else {
    // Of many combinations, only those of the best sizes of each dimension are tried.
    const best = {};
    for (const [name, values] of Object.entries(sizes)) {
      const singles = values.map((value) => ({ ...problem, [name]: value })).filter(isPossible);
      options.push(...singles);
      const times = new Map(singles.map((option) => [option[name], predict(option, timeModel).time]));
      const order = [...times.keys()].sort((a, b) => times.get(a) - times.get(b));
      best[name] = [...new Set([problem[name], ...order.slice(0, BEST_SIZES)])];
    }
    options.push(...combined(problem, best).filter(isAllowed));
  }
  const unique = new Map(options.map((option) => [specOf(option), option]));
  unique.delete(specOf(problem));
  return [problem, ...unique.values()];
}

// The 90% range of the error of the log of the problem's time over the option's.
function pairError(problem, option, spreads, group, timeModel) {
  const inPairs = (spread) => [group.pair_low * spread, group.pair_high * spread];
  const growth = Math.max(...dimensions(problem).map((name) => option[name] / problem[name]));
  if (growth > 1 + timeModel.near) {
    const half = ((group.high - group.low) * Math.hypot(...spreads)) / Math.SQRT2;
    return [-half, half];
  }
  if (hasLike(problem, group) && hasLike(option, group)) return inPairs(Math.hypot(...spreads));
  const fitted = inPairs(Math.SQRT2 * Math.hypot(group.scale, group.beside));
  const [low, high] = timeModel.uncalibrated_pair;
  return [Math.min(low, fitted[0]), Math.max(high, fitted[1])];
}

// The gain of an option over the problem, with its 90% interval, probability and verdict.
function weigh(problem, option, before, after, timeModel) {
  const group = timeModel.groups[groupName(problem)];
  const spreads = [before, after].map(({ lo, hi }) => Math.log(hi / lo) / (group.high - group.low));
  const ratio = before.time / after.time;
  let [low, high] = pairError(problem, option, spreads, group, timeModel);
  const alignments = [problem, option].map((each) => alignmentIn(each));
  if (group.aligned_only && alignments[1] > alignments[0]) {
    // The true price of misalignment may be zero or twice the assumed one.
    const both = Math.SQRT2 * spreads[1];
    const price = Math.max(Math.log(ratio), 0);
    low = -Math.hypot(group.pair_low * both, price);
    high = Math.hypot(group.pair_high * both, price);
  }
  const [gain, lo, hi] = [0, low, high].map((error) => ratio * Math.exp(error) - 1);
  const flops = flopsOf(option) / flopsOf(problem) - 1;
  const scale = Math.abs(Math.log1p(gain > 0 ? lo : hi) - Math.log1p(gain)) / -Math.log(OUTSIDE);
  const opposite = Math.max(scale ? 0.5 * Math.exp(-Math.abs(Math.log1p(gain)) / scale) : 0, 1 - SUREST);
  const probability = gain > 0 ? 1 - opposite : opposite;
  const net = (value) => value - PRICE * Math.max(0, flops);
  const isLikely = net(gain) >= MIN_GAIN && probability >= LEAST_PROBABILITY;
  const rank = net((gain + lo) / 2);
  return { option, ...after, gain, gainLo: lo, gainHi: hi, flops, probability, isLikely, rank };
}

const alignmentIn = (problem) => {
  if (problem.op !== "gemm") return pricedAlignment(problem);
  const { m, n, k, layout, dtype } = problem;
  return alignmentOf([layout[0] === "n" ? k : m, layout[1] === "n" ? n : k, n], dtype);
};

// The other sizes of a problem, the best to pad to first.
function neighboursOf(problem, timeModel) {
  const [, ...options] = optionsOf(problem, timeModel);
  const before = predict(problem, timeModel);
  const weighed = options.map((option) =>
    weigh(problem, option, before, predict(option, timeModel), timeModel),
  );
  return weighed.sort((a, b) => b.isLikely - a.isLikely || b.rank - a.rank);
}

// What the time rests on: its limit, tiles and waves.
function explained(problem, answer, { machine }) {
  const counted = (count, what) => (count === 1 ? `1 ${what}` : `${count.toLocaleString("en")} ${what}s`);
  const split = answer.split > 1 ? `, K split in ${answer.split}` : "";
  const waves = machine.kind === "gpu"
    ? ` in ${counted(answer.waves, "wave")}, ${percent(answer.tailEfficiency, 0)} of the waves' slots used`
    : "";
  const winograd = answer.winograd ? "Winograd, " : "";
  const memory = bytesOf(problem) > machine.memory_bytes ? " It does not fit into the memory." : "";
  return (
    `Limited by ${LIMIT_WORDS[answer.limit]}: ${winograd}${counted(answer.tiles, "tile")} of ` +
    `${answer.bm}x${answer.bn}${split}${waves}, ${percent(answer.tileEfficiency, 0)} of the tiles' area useful.${memory}`
  );
}

function shapeText(problem) {
  if (problem.op === "gemm") {
    const { m, n, k, dtype, layout, batch } = problem;
    return `${batch > 1 ? `${batch} × ` : ""}${m}×${n}×${k} ${dtype} ${layout}`;
  }
  const { n, c, h, w, kout, r, s, pass, dtype, layout } = problem;
  return `${n}×${c}×${h}×${w} → ${kout}, ${r}×${s} ${pass} ${dtype} ${layout}`;
}

const changeText = (problem, option) =>
  dimensions(problem)
    .filter((name) => problem[name] !== option[name])
    .map((name) => `${name.toUpperCase()} ${problem[name]} → ${option[name]}`)
    .join(", ");

// What the model answers about a problem on one machine.
function answerElements(problem, run) {
  const { model: timeModel } = run;
  const answer = predict(problem, timeModel);
  const where = runs.length > 1 ? `${run.name}: ` : "";
  if (answer === null) {
    return [element("p", `${where}no ${groupName(problem)} was measured on this machine, so none is predicted.`)];
  }
  const tflops = flopsOf(problem) / answer.time / 1e12;
  const times = [answer.time, answer.lo, answer.hi].map((seconds) => seconds * 1e6);
  const title =
    `${where}${shapeText(problem)}: predicted ${microseconds(...times)}, ` +
    `${rate(tflops)}${shareOfPeak(tflops, run, problem.dtype)}.`;
  const group = timeModel.groups[groupName(problem)];
  const parts = [
    element("p", title, { class: "finding" }),
    element("p", explained(problem, answer, timeModel)),
  ];
  const neighbours = neighboursOf(problem, timeModel);
  const [best] = neighbours;
  const advice = best?.isLikely
    ? `To pad, likely (${percent(best.probability, 0)}): ${changeText(problem, best.option)}.`
    : `To pad, leave it: no size up to ${percent(ALLOWANCE)} larger is likely to take less time.`;
  parts.push(element("p", advice, { class: "finding" }));
  const faster = neighbours.filter((each) => each.gain > 0).slice(0, 3);
  const columns = [
    text("pad to", (row) => changeText(problem, row.option)),
    text("verdict", (row) => (row.isLikely ? `likely (${percent(row.probability, 0)})` : "leave it")),
    figure("predicted", (row) => microseconds(...[row.time, row.lo, row.hi].map((s) => s * 1e6)), (row) => row.time),
    figure("gain", (row) => gain({ gain: row.gain, lo: row.gainLo, hi: row.gainHi }), (row) => row.gain),
    figure("more FLOPs", (row) => percent(row.flops), (row) => row.flops),
  ];
  if (faster.length) {
    const place = element("div");
    new Table(place, `sizes to pad to on ${run.name}`, columns, { tools: false }).set(faster);
    parts.push(place);
  }
  parts.push(element("p", restsOn(problem, group, timeModel), { class: "faint" }));
  return parts;
}

// What a prediction rests on, and how far it can be trusted.
function restsOn(problem, group, timeModel) {
  const unlike = hasLike(problem, group) || problem.dtype === "tf32"
    ? ""
    : "; no such alignment or layout was measured, so a factor of two either way";
  const differs = group.trees === null ? undefined : timeModel.trees[group.trees].differs;
  const smaller = differs
    ? ` The page has a smaller model than the command predict: nine in ten times differ by less than ${percent(differs)}.`
    : "";
  return `Rests on: ${group.source}${unlike}.${smaller}`;
}
