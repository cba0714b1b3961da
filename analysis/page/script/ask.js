// Answers about a typed shape: its time, and nearby sizes that are better.
//
// This file does what analysis/advice does for `predict` and `recommend`; a test compares the two.
// The names are those of the Python code, which explains the steps. Two sizes are compared by their
// measured times if a public table has both, else by the model.

const QUESTIONS = {
  pad: { allowance: 0.125, choose: false, words: "At least this size, in less time (pad)" },
  choose: { allowance: 0.15, choose: true, words: "A size within ±15% that computes more per second (choose)" },
};
const ROUNDED = 1e-9;
const WINDOW_SIZES = 6;
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
const OUTSIDE = { measured: 0.05, predicted: 0.1 };
const TO_95 = 1.96 / 1.645;
const SOFTWARE_ERROR = 0.05;
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

const FORM =
  "Type M,N,K,dtype[,layout[,batch]], such as 4096,4104,4096,bf16, or a convolution as " +
  "N,C,H,W,KOUT,R,S,stride,padding,dilation,groups,dtype[,layout[,pass]].";

// Parses a string in the form that --gemm or --conv takes. Returns the `problem`, or a `fault`: a
// sentence that says what is wrong with the string.
function parseShape(text) {
  const typed = text.trim().toLowerCase().replaceAll("×", ",").split(/\s*,\s*/);
  const op = typed.length > FIELDS.gemm.length ? "conv" : "gemm";
  if (typed.length < NEEDED[op] || typed.length > FIELDS[op].length) return { fault: FORM };
  const problem = { op };
  for (const [place, name] of FIELDS[op].entries()) {
    const typedValue = typed[place] || DEFAULTS[op][name] || "";
    const { value, fault } =
      name in WORD_FIELDS ? parseWord(name, typedValue, op) : parseNumbers(name, typedValue);
    if (fault) return { fault };
    problem[name] = value;
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

// Parses a field that is one of a few words. Returns its `value`, or a `fault`.
function parseWord(name, typed, op) {
  let words = WORD_FIELDS[name];
  // Layouts of GEMMs have two letters, those of convolutions four.
  if (name === "layout") words = words.filter((word) => (word.length === 2) === (op === "gemm"));
  if (words.includes(typed)) return { value: typed };
  return { fault: `${name} must be one of ${words.join(", ")}, not '${typed}'.` };
}

// Parses a field that is a number. Stride, padding and dilation may also be two numbers such as
// 2x1, one for each direction; a single number stands for both. Returns the `value`, or a `fault`.
function parseNumbers(name, typed) {
  const isPair = ["stride", "padding", "dilation"].includes(name);
  const digits = name === "padding" ? /^\d{1,6}$/ : /^[1-9]\d{0,11}$/; // only padding may be 0
  const numbers = isPair ? typed.split("x") : [typed];
  if (numbers.length > 2 || !numbers.every((number) => digits.test(number))) {
    const form = isPair ? "one number such as 2, or two such as 2x1" : "a whole number of at least 1";
    return { fault: `${name} must be ${form}, not '${typed}'. ${FORM}` };
  }
  return { value: isPair ? [Number(numbers[0]), Number(numbers.at(-1))] : Number(typed) };
}

// Two numbers, one for each direction, in the form that the command line takes: 2x1, or 2 if both
// are equal.
const pairText = ([height, width]) => (height === width ? String(height) : `${height}x${width}`);
// A problem in the form that --gemm or --conv takes.
const specOf = (problem) =>
  FIELDS[problem.op]
    .map((name) => (Array.isArray(problem[name]) ? pairText(problem[name]) : problem[name]))
    .join(",");

const dimensions = (problem) => (problem.op === "gemm" ? ["m", "n", "k"] : ["c", "kout"]);
// The dimensions in groups that change together: the two that are the sequence length of
// self-attention form a group.
function groupsOf(problem) {
  const length = problem.layout === "nt" ? ["m", "n"] : ["m", "k"];
  const [first, second] = length;
  const isSequence =
    problem.op === "gemm" && problem.batch > 1 && problem[first] === problem[second];
  if (!isSequence) return dimensions(problem).map((name) => [name]);
  return [length, ...dimensions(problem).filter((name) => !length.includes(name)).map((n) => [n])];
}

// The problem with one size for all dimensions of a group.
const withSize = (problem, group, size) => ({
  ...problem,
  ...Object.fromEntries(group.map((name) => [name, size])),
});

const fits = (size) => size % (size < 2 * MULTIPLES[0] ? OF_SMALL : MULTIPLES[0]) === 0;
const lastOfLayout = { nt: "n", tn: "m" }; // the dimension that counts output features

// The current size of a dimension and the sizes near it that may be recommended, in ascending
// order. `tileSizes` are heights and widths of tiles, whose multiples are tried, too.
function sizesNear(problem, name, { allowance, choose }, tileSizes) {
  const size = problem[name];
  const least = choose ? Math.ceil(size * (1 - allowance)) : size;
  const most = Math.floor(size * (1 + allowance));
  // 1. Collect the numbers that the sizes may be multiples of.
  const steps = new Set([...MULTIPLES, ...tileSizes]);
  if (size < 2 * MULTIPLES[0]) steps.add(OF_SMALL);
  const countsOutputs = problem.batch === 1 && lastOfLayout[problem.layout] === name;
  const isVocabulary = countsOutputs && size >= MIN_VOCABULARY;
  if (isVocabulary) for (const step of OF_VOCABULARY) steps.add(step);
  // 2. Collect the multiples next to the size. If the size itself is a multiple of a large step,
  // the next multiple of this step is tried, too.
  const sizes = new Set();
  for (const step of steps) {
    sizes.add(ceilDiv(size, step) * step);
    if (LARGE_STEPS.includes(step)) sizes.add((Math.floor(size / step) + 1) * step);
    if (choose) sizes.add(Math.floor(size / step) * step);
  }
  if (choose) for (const value of across(least, most)) sizes.add(value);
  const isAllowed = (value) => value >= least && value <= most && value > 0 && fits(value);
  const allowed = [...sizes].filter(isAllowed);
  return [...new Set([size, ...allowed])].sort((a, b) => a - b);
}

// Sizes across a window: the multiples of the smallest step of which the window has at most about
// six.
function across(least, most) {
  const largest = MULTIPLES.at(-1);
  const coarseStep = largest * ceilDiv(most - least, WINDOW_SIZES * largest);
  const step = MULTIPLES.find((multiple) => most - least <= WINDOW_SIZES * multiple) ?? coarseStep;
  const sizes = [];
  for (let size = ceilDiv(least, step) * step; size <= most; size += step) sizes.push(size);
  return sizes;
}

// The variants of a problem with all combinations of the sizes of its groups of dimensions. `sizes`
// is a map from groups to sizes.
function combined(problem, sizes) {
  let options = [problem];
  for (const [group, values] of sizes) {
    options = options.flatMap((option) => values.map((value) => withSize(option, group, value)));
  }
  return options;
}

// The factor on the ratio of two times: for `choose`, the ratio of FLOPs, so that speeds are
// compared; for `pad`, 1.
const workOf = (problem, option, { choose }) =>
  choose ? flopsOf(option) / flopsOf(problem) : 1;

// The problem itself, then its variants with other sizes that a query allows.
function optionsOf(problem, question, timeModel) {
  // 1. Find the sizes of each group of dimensions. Multiples of powers of two are tried in any case,
  // so only the other tile sizes are passed on.
  const { allowance } = question;
  const isPowerOfTwo = (size) => (size & (size - 1)) === 0;
  const tiles = timeModel.groups[groupName(problem)].tiles;
  const tileSizes = tiles.flat().filter((size) => !isPowerOfTwo(size));
  const sizes = new Map();
  for (const group of groupsOf(problem)) {
    sizes.set(group, sizesNear(problem, group[0], question, tileSizes));
  }
  // 2. Combine the sizes. Keep the combinations that compute neither much more nor much less.
  const isPossible = (option) =>
    option.op === "gemm" || (option.c % option.groups === 0 && option.kout % option.groups === 0);
  const extraFlops = (option) => flopsOf(option) / flopsOf(problem) - 1;
  const isAllowed = (option) =>
    isPossible(option) && Math.abs(extraFlops(option)) <= allowance + ROUNDED;
  const count = [...sizes.values()].reduce((product, values) => product * values.length, 1);
  let options = [];
  if (count <= MAX_COMBINATIONS) {
    options = combined(problem, sizes).filter(isAllowed);
  } else {
    // There are too many combinations, so only the best sizes of each group are combined.
    const best = new Map();
    for (const [group, values] of sizes) {
      const [name] = group;
      const singles = values.map((value) => withSize(problem, group, value)).filter(isAllowed);
      options.push(...singles);
      const cost = (option) => predict(option, timeModel).time / workOf(problem, option, question);
      const times = new Map(singles.map((option) => [option[name], cost(option)]));
      const order = [...times.keys()].sort((a, b) => times.get(a) - times.get(b));
      best.set(group, [...new Set([problem[name], ...order.slice(0, BEST_SIZES)])]);
    }
    options.push(...combined(problem, best).filter(isAllowed));
  }
  // 3. Remove duplicates, and put the problem itself first.
  const unique = new Map(options.map((option) => [specOf(option), option]));
  unique.delete(specOf(problem));
  return [problem, ...unique.values()];
}

// The 90% range of the error of log(problem's time / option's time).
function pairError(problem, option, spreads, group, timeModel) {
  const inPairs = (spread) => [group.pair_low * spread, group.pair_high * spread];
  const sizeRatios = dimensions(problem).map((name) => option[name] / problem[name]);
  const least = Math.min(...sizeRatios);
  const most = Math.max(...sizeRatios);
  // The range for pairs was measured on pairs of a shape and a slightly padded one. An option that
  // differs more from the problem gets the range for any two shapes.
  if (most > 1 + timeModel.near || least < 1 / (1 + timeModel.near)) {
    const half = ((group.high - group.low) * Math.hypot(...spreads)) / Math.SQRT2;
    return [-half, half];
  }
  let [low, high] = inPairs(Math.hypot(...spreads));
  if (!hasLike(problem, group) || !hasLike(option, group)) {
    const fitted = inPairs(Math.SQRT2 * Math.hypot(group.scale, group.beside));
    low = Math.min(timeModel.uncalibrated_pair[0], fitted[0]);
    high = Math.max(timeModel.uncalibrated_pair[1], fitted[1]);
  }
  // If any size of the option is smaller, both sides of the range are as wide as the wider one.
  return least < 1 ? [Math.min(low, -high), Math.max(high, -low)] : [low, high];
}

// The predicted time of a problem over that of an option, and the 90% range of the error of its
// logarithm.
function predictedRatio(problem, option, before, after, timeModel) {
  const group = timeModel.groups[groupName(problem)];
  const spreads = [before, after].map(({ lo, hi }) => Math.log(hi / lo) / (group.high - group.low));
  const ratio = before.time / after.time;
  let [low, high] = pairError(problem, option, spreads, group, timeModel);
  if (group.aligned_only && alignmentIn(option) > alignmentIn(problem)) {
    // No misaligned shape was measured, so the time of the problem may differ by a factor of two, but
    // the true price of misalignment is not below zero. For all other errors, the problem counts as
    // equally well known as the option.
    const spread = Math.SQRT2 * spreads[1];
    const price = Math.min(Math.max(Math.log(ratio), 0), timeModel.uncalibrated[1]);
    low = -Math.hypot(group.pair_low * spread, price);
    high = Math.hypot(group.pair_high * spread, price);
  }
  return [ratio, low, high];
}

// The measured time of a problem over that of an option, with the 95% range of the differences that
// another framework or version may make.
function measuredRatio(problem, option, seconds, timeModel) {
  const group = timeModel.groups[groupName(problem)];
  const spreads = Array(2).fill(Math.max(group.beside, SOFTWARE_ERROR));
  const [low, high] = pairError(problem, option, spreads, group, timeModel);
  return [seconds[0] / seconds[1], TO_95 * low, TO_95 * high];
}

// The gain of an option according to the best evidence, with its interval, probability and rank.
function weigh(problem, option, before, question, run) {
  const after = predict(option, run.model);
  // 1. Compute the ratio of times, from measured times if the table has both.
  const seconds = [secondsInTable(problem, run), secondsInTable(option, run)];
  const evidence = seconds.includes(null) ? "predicted" : "measured";
  const [ratio, low, high] =
    evidence === "measured"
      ? measuredRatio(problem, option, seconds, run.model)
      : predictedRatio(problem, option, before, after, run.model);
  const work = workOf(problem, option, question);
  const [gain, lo, hi] = [0, low, high].map((error) => ratio * work * Math.exp(error) - 1);
  // 2. Compute the probability of a gain, if errors of its logarithm follow a Laplace distribution.
  // Its scale follows from the end of the interval on the side of zero gain.
  const end = gain > 0 ? lo : hi;
  const scale = Math.abs(Math.log1p(end) - Math.log1p(gain)) / -Math.log(OUTSIDE[evidence]);
  const tail = scale ? 0.5 * Math.exp(-Math.abs(Math.log1p(gain)) / scale) : 0;
  const opposite = Math.max(tail, 1 - SUREST);
  const probability = gain > 0 ? 1 - opposite : opposite;
  // 3. Decide on the verdict and the rank by the gain minus a price for additional FLOPs.
  const flops = flopsOf(option) / flopsOf(problem) - 1;
  const net = (value) => value - PRICE * Math.max(0, flops);
  const isLikely = net(gain) >= MIN_GAIN && probability >= LEAST_PROBABILITY;
  const rank = net((gain + lo) / 2);
  const time = evidence === "measured" ? { time: seconds[1] } : after;
  return { option, ...time, gain, gainLo: lo, gainHi: hi, flops, probability, isLikely, rank, evidence };
}

// The largest power of two, at most 16, that divides the bytes of every contiguous row.
const alignmentIn = (problem) => {
  if (problem.op !== "gemm") return pricedAlignment(problem);
  const { m, n, k, layout, dtype } = problem;
  return alignmentOf([layout[0] === "n" ? k : m, layout[1] === "n" ? n : k, n], dtype);
};

// The other sizes of a problem that a query allows, the best first.
function neighboursOf(problem, question, run) {
  const [, ...options] = optionsOf(problem, question, run.model);
  let before = predict(problem, run.model);
  const seconds = secondsInTable(problem, run);
  const { trees, shift } = run.model.groups[groupName(problem)];
  if (seconds !== null && run.model.trees[trees]?.differs) {
    // The full model reproduces the times that it grew from more closely than its smaller copy does.
    // The measured time therefore stands for the full model's prediction.
    before = { ...before, time: shifted(seconds, shift) };
  }
  const weighed = options.map((option) => weigh(problem, option, before, question, run));
  return weighed.sort((a, b) => b.isLikely - a.isLikely || b.rank - a.rank);
}

// The sentences that explain a predicted time by its limit, tiles and waves.
function explained(problem, answer, { machine }) {
  const counted = (count, noun) => (count === 1 ? `1 ${noun}` : `${count.toLocaleString("en")} ${noun}s`);
  const split = answer.split > 1 ? `, K split into ${answer.split} parts` : "";
  const onGpu = machine.kind === "gpu";
  const waves = onGpu ? `${split ? "," : ""} in ${counted(answer.waves, "wave")}` : "";
  const slots = onGpu ? `${percent(answer.tailEfficiency, 0)} of the waves' slots are used, and ` : "";
  const winograd = answer.winograd ? "Winograd, " : "";
  const memory = bytesOf(problem) > machine.memory_bytes ? " It does not fit into the memory." : "";
  // In fp32, the same kernels run at any alignment.
  const onTensorCores = machine.kind === "gpu" && problem.dtype !== "fp32";
  const alignment = problem.op === "gemm" && onTensorCores ? pricedAlignment(problem) : WIDE_BYTES;
  const rows = alignment < WIDE_BYTES
    ? ` Rows begin at multiples of ${counted(alignment, "byte")}, but the fastest kernels need multiples of ${WIDE_BYTES}.`
    : "";
  return (
    `Limited by ${LIMIT_WORDS[answer.limit]}: ${winograd}${counted(answer.tiles, "tile")} of ` +
    `${answer.bm}x${answer.bn}${split}${waves}. ${slots}` +
    `${percent(answer.tileEfficiency, 0)} of the tiles' area is useful.${rows}${memory}`
  );
}

// A problem as human-readable text. `shapeOf` returns the text of a point.
function shapeText(problem) {
  if (problem.op === "gemm") {
    const { m, n, k, dtype, layout, batch } = problem;
    return `${batch > 1 ? `${batch} × ` : ""}${m}×${n}×${k} ${dtype} ${layout}`;
  }
  const { n, c, h, w, kout, r, s, pass, dtype, layout } = problem;
  return `${n}×${c}×${h}×${w} → ${kout}, ${r}×${s} ${pass} ${dtype} ${layout}`;
}

// What an option changes, such as `N 50257 → 50264`.
const changeText = (problem, option) =>
  dimensions(problem)
    .filter((name) => problem[name] !== option[name])
    .map((name) => `${name.toUpperCase()} ${problem[name]} → ${option[name]}`)
    .join(", ");

// The elements of the page's answer about a problem on one machine: its time, then better sizes.
function answerElements(problem, run) {
  // 1. Report the measured time or, without one, the predicted time. The model is null if the run
  // is unusable.
  const prefix = runs.length > 1 ? `${run.name}: ` : "";
  const row = exactRow(problem, run);
  const prediction = run.model && predict(problem, run.model);
  if (row === undefined && !prediction) {
    const reason = run.model ? `no ${groupName(problem)} was measured on this machine` : "the run is unusable";
    return [element("p", `${prefix}${shapeText(problem)} is not predicted, because ${reason}.`)];
  }
  const seconds = row === undefined ? prediction.time : points.time_us[row] * 1e-6;
  const time = row === undefined ? `predicted ${secondsText(prediction)}` : `measured ${timeOf(row)}`;
  const tflops = flopsOf(problem) / seconds / 1e12;
  const speed = `${rate(tflops)}${shareOfPeak(tflops, run, problem.dtype)}`;
  const elements = [
    element("p", `${prefix}${shapeText(problem)}: ${time}, ${speed}.`, { class: "finding" }),
  ];
  if (prediction) elements.push(element("p", explained(problem, prediction, run.model)));
  // 2. Report better sizes: the recommendations in the page's data, which rest on more than the
  // script knows. If there are none for this problem, report those of the model.
  const recorded = run.advice.filter((advice) => advice.spec === specOf(problem));
  for (const advice of recorded) {
    const change = advice.verdict === "leave it" ? "" : `, ${advice.change}, gains ${gain(advice)}`;
    const { words } = QUESTIONS[advice.question];
    elements.push(element("p", `${words}: ${advice.verdict_text}${change} (${advice.reason}).`));
  }
  if (prediction && !recorded.length) {
    for (const question of Object.values(QUESTIONS)) {
      elements.push(...betterSizes(problem, question, run));
    }
  }
  // 3. Name the source of the predictions.
  if (prediction) elements.push(element("p", sourceText(problem, run.model), { class: "faint" }));
  return elements;
}

// The elements that answer a query: a sentence, and a table of the best three sizes.
function betterSizes(problem, question, run) {
  const neighbours = neighboursOf(problem, question, run);
  const [best] = neighbours;
  const verdict = best?.isLikely
    ? `likely (${percent(best.probability, 0)}), ${changeText(problem, best.option)}.`
    : "leave it, because no gain is clear.";
  const sentence = element("p", `${question.words}: ${verdict}`);
  const faster = neighbours.filter((size) => size.gain > 0).slice(0, 3);
  if (!faster.length) return [sentence];
  const gainText = ({ gain: value, gainLo, gainHi }) => gain({ gain: value, lo: gainLo, hi: gainHi });
  const columns = [
    text("change", (size) => changeText(problem, size.option)),
    text("verdict", (size) => (size.isLikely ? `likely (${percent(size.probability, 0)})` : "leave it")),
    figure("time", optionTime, (size) => size.time),
    figure("gain", gainText, (size) => size.gain),
    figure("more FLOPs", (size) => percent(size.flops), (size) => size.flops),
    text("evidence", (size) => size.evidence),
  ];
  const place = element("div");
  const name = question.choose ? "sizes to choose" : "sizes to pad to";
  new Table(place, `${name} on ${run.name}`, columns, { tools: false }).set(faster);
  return [sentence, place];
}

// A time in seconds with its interval.
const secondsText = ({ time, lo, hi }) => timeText(time * 1e6, lo * 1e6, hi * 1e6);

// The time of an option. A measured time comes from a public table, whose times have no interval.
const optionTime = (option) =>
  option.evidence === "measured" ? timeText(option.time * 1e6, null, null) : secondsText(option);

// The sentences that name the source of predictions of a problem, and how far it can be trusted.
function sourceText(problem, timeModel) {
  const group = timeModel.groups[groupName(problem)];
  const unlike =
    hasLike(problem, group) || group.uncalibrated
      ? ""
      : ". The shape's alignment, layout or batching was not measured, so the interval is at least a factor of two either way";
  const differs = group.trees === null ? undefined : timeModel.trees[group.trees].differs;
  const smaller = differs
    ? ` A smaller copy of the model predicts here; nine in ten of its times are within ${percent(differs)} of those of the full model.`
    : "";
  return `Source of predictions: ${group.source}${unlike}.${smaller}`;
}
