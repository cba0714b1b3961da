// The time model: the formula, its trees and its intervals, for one GEMM or convolution at a time.
//
// This file computes what analysis/model and kernels/timemodel compute for `predict`; a test
// compares the two on random shapes. Names and steps are those of the Python code, which explains
// them. Sizes are in elements, times in seconds. `s` is a row of sizes and traffic (`shapeRow`),
// and `c` are the constants of its group.

const ELEMENT_BYTES = { fp32: 4, tf32: 4, fp16: 2, bf16: 2, fp8: 1 };
const WIDE_BYTES = 16;
const LIMITS = ["launch", "compute", "feed", "latency", "memory"];
const SPLITS = [1, 2, 4, 8, 16];
const WINOGRAD_TILES = [2, 4];
const STEP_BYTES = 128;
const MIN_STEPS = 2;
const SLOW_SECONDS = 2e-3;
const RESIDENT_SHARE = 0.8;
const PADDING_BYTES = 12; // bytes whose traffic takes as long as padding one element
const USUAL_TILES = [[64, 64], [128, 64], [64, 128], [128, 128], [256, 128], [128, 256]];

const ceilDiv = (a, b) => Math.ceil(a / b);
// (a⁴ + b⁴ + …)^¼, which is little more than the largest term.
const norm4 = (...terms) => Math.sqrt(Math.sqrt(terms.reduce((sum, term) => sum + term ** 4, 0)));
// The largest power of two, at most 16, that divides a number of bytes.
const powerOfTwoIn = (bytes) => {
  let power = 1;
  while (power < WIDE_BYTES && bytes % (2 * power) === 0) power *= 2;
  return power;
};
// The largest power of two, at most 16, that divides the bytes of a row of each of the sizes.
const alignmentOf = (sizes, dtype) =>
  Math.min(...sizes.map((size) => powerOfTwoIn(size * ELEMENT_BYTES[dtype])));

// --- Arithmetic of a problem: as in kernels/problem.py.

const outputSize = (size, taps, stride, padding, dilation) =>
  Math.floor((size + 2 * padding - (dilation * (taps - 1) + 1)) / stride) + 1;
// Height and width of a convolution's output. Stride, padding and dilation are pairs: vertical,
// horizontal.
function outputOf({ h, w, r, s, stride, padding, dilation }) {
  return [
    outputSize(h, r, stride[0], padding[0], dilation[0]),
    outputSize(w, s, stride[1], padding[1], dilation[1]),
  ];
}

function flopsOf(problem) {
  if (problem.op === "gemm") return 2 * problem.batch * problem.m * problem.n * problem.k;
  const [p, q] = outputOf(problem);
  const { n, c, kout, r, s, groups } = problem;
  return 2 * n * p * q * kout * (c / groups) * r * s;
}

// Elements of both operands and the result. For a convolution, these are image, filters and output.
function operandElements(problem) {
  if (problem.op === "gemm") {
    const { m, n, k } = problem;
    return [m * k, k * n, m * n];
  }
  const { n, c, h, w, kout, r, s, groups } = problem;
  const [p, q] = outputOf(problem);
  return [n * c * h * w, kout * (c / groups) * r * s, n * kout * p * q];
}

// Rows (or columns) of an image that a filter reads. A stride larger than the filter skips some.
const rowsRead = (size, positions, taps, stride) =>
  stride > taps ? Math.min(size, positions * taps) : size;

// The minimum traffic: bytes of both operands and the result, each moved once.
function bytesOf(problem) {
  let [a, b, result] = operandElements(problem);
  const element = ELEMENT_BYTES[problem.dtype];
  if (problem.op === "gemm") {
    const resultBytes = problem.dtype === "fp8" ? 2 : element;
    return problem.batch * ((a + b) * element + result * resultBytes);
  }
  if (problem.pass !== "dgrad") {
    const { n, c, h, w, r, s, stride } = problem;
    const [p, q] = outputOf(problem);
    a = n * c * rowsRead(h, p, r, stride[0]) * rowsRead(w, q, s, stride[1]);
  }
  return (a + b + result) * element;
}

// The GEMM that computes a convolution without a special algorithm, with one batch entry per group.
function impliedGemm(problem) {
  if (problem.op === "gemm") return problem;
  const { n, h, w, r, s, groups, dtype } = problem;
  const c = problem.c / groups;
  const kout = problem.kout / groups;
  const [p, q] = outputOf(problem);
  const pixels = n * p * q;
  const taps = r * s;
  const sizes = {
    fprop: { m: pixels, n: kout, k: c * taps },
    dgrad: { m: n * h * w, n: c, k: kout * taps },
    wgrad: { m: kout, n: c * taps, k: pixels },
  }[problem.pass];
  return { op: "gemm", ...sizes, dtype, layout: "nt", batch: groups };
}

// The GEMMs of Winograd's algorithm with tiles of `tile` × `tile` outputs; null if it is not
// applicable.
function winogradGemm(conv, tile) {
  const plain = [...conv.stride, ...conv.dilation, conv.groups].every((value) => value === 1);
  if (conv.r !== 3 || conv.s !== 3 || !plain || conv.pass === "wgrad") return null;
  const forward = conv.pass === "fprop";
  const [height, width] = forward ? outputOf(conv) : [conv.h, conv.w];
  const [into, out] = forward ? [conv.c, conv.kout] : [conv.kout, conv.c];
  const m = conv.n * ceilDiv(height, tile) * ceilDiv(width, tile);
  return { m, n: out, k: into, batch: (tile + 2) ** 2 };
}

// The largest power of two, at most 16, that divides the bytes of the rows whose misalignment costs
// time. A matrix-vector multiplication costs the same whether the rows of its output are aligned or
// not.
function pricedAlignment(problem) {
  if (problem.op !== "gemm") {
    return alignmentOf([problem.c / problem.groups, problem.kout / problem.groups], problem.dtype);
  }
  const { m, k, layout, dtype } = problem;
  const isVector = Math.min(m, problem.n) === 1 && layout[1] === "t";
  const n = isVector ? WIDE_BYTES : problem.n;
  return alignmentOf([layout[0] === "n" ? k : m, layout[1] === "n" ? n : k, n], dtype);
}

// --- The formula: as in kernels/timemodel/estimate.py.

// Sizes, traffic and helper kernels of a problem, as a GEMM. If `winogradTile` is not 0, Winograd's
// algorithm with this tile computes a convolution to which it is applicable. All other convolutions
// are computed as their implied GEMMs.
function shapeRow(problem, winogradTile) {
  const element = ELEMENT_BYTES[problem.dtype];
  const row = {
    element, bytes: bytesOf(problem), first: 0, density: 1, alignment: pricedAlignment(problem),
    helperKernels: 0, helperBytes: 0,
  };
  if (problem.op === "gemm") {
    const [a] = operandElements(problem);
    row.first = a * element;
    if (problem.dtype === "fp8") {
      Object.assign(row, { helperKernels: 1, helperBytes: problem.batch * a * 3 });
    }
    return { ...problem, ...row };
  }
  const transformed = winogradTile ? winogradGemm(problem, winogradTile) : null;
  if (transformed) {
    return { ...row, ...transformed, ...winogradTraffic(problem, transformed, winogradTile) };
  }
  // Tensor Core kernels need channels last. In another layout, one kernel transposes the input
  // before and one the output after. Each of them reads and writes its tensor once.
  const gemm = impliedGemm(problem);
  if (problem.layout === "nchw" && problem.dtype !== "fp32") {
    const [x, , y] = operandElements(problem);
    Object.assign(row, { helperKernels: 2, helperBytes: 2 * (x + y) * element });
  }
  return { ...row, ...gemm, density: flopsOf(problem) / flopsOf(gemm) };
}

// `shapeRow` for a GPU's library. For GEMMs, it runs kernels for 4 bytes where rows are aligned to 8.
// It pads misaligned channels of Tensor Core convolutions in NHWC: a helper kernel copies the
// activations that the pass reads.
function gpuLibraryRow(problem, winogradTile) {
  const element = ELEMENT_BYTES[problem.dtype];
  if (problem.op === "gemm") {
    const row = shapeRow(problem, winogradTile);
    return { ...row, alignment: row.alignment === 8 ? 4 : row.alignment };
  }
  const pads = problem.dtype !== "fp32" && problem.layout === "nhwc" && problem.groups === 1;
  if (!pads) return shapeRow(problem, winogradTile);
  const [c, kout] = [problem.c, problem.kout].map(
    (size) => (ceilDiv(size * element, WIDE_BYTES) * WIDE_BYTES) / element,
  );
  if (c === problem.c && kout === problem.kout) return shapeRow(problem, winogradTile);
  const padded = { ...problem, c, kout };
  const row = shapeRow(padded, winogradTile);
  const copied = problem.pass === "dgrad" ? 2 : 0;
  const elements = operandElements(problem)[copied] + operandElements(padded)[copied];
  return {
    ...row,
    helperKernels: row.helperKernels + 1,
    helperBytes: row.helperBytes + PADDING_BYTES * elements,
  };
}

// The traffic of Winograd's algorithm. F(2 × 2) is one kernel, which transforms input and result
// inside, after a kernel that transforms the filters. F(4 × 4) is four kernels, and the transformed
// tensors go through memory.
function winogradTraffic(conv, gemm, tile) {
  const [x, filters, y] = operandElements(conv);
  const element = ELEMENT_BYTES[conv.dtype];
  const weights = gemm.batch * gemm.k * gemm.n;
  if (tile === 2) {
    const bytes = (x + weights + y) * element;
    return { bytes, helperKernels: 1, helperBytes: (filters + weights) * element };
  }
  const traffic = gemm.batch * gemm.m * (gemm.k + gemm.n) + weights;
  const helperBytes = (traffic + x + filters + y) * element;
  return { bytes: traffic * element, helperKernels: 3, helperBytes };
}

const tileCount = (s, bm, bn, split = 1) => s.batch * ceilDiv(s.m, bm) * ceilDiv(s.n, bn) * split;
const tailEfficiency = (tiles, slots) => tiles / (ceilDiv(tiles, slots) * slots);
const partialBytes = (s, split) => (split > 1 ? s.batch * s.m * s.n * 8 * split : 0);

// The work of the SMs with one tile: the seconds of each part of a step along K, and in total.
function work(s, [bm, bn], split, machine, group) {
  const c = group.constants;
  const count = tileCount(s, bm, bn, split);
  const rounds = count / machine.sms;
  const waves = c.tail * Math.ceil(rounds) + (1 - c.tail) * Math.max(rounds, 1);
  const depth = STEP_BYTES / s.element;
  const steps = ceilDiv(s.k, depth * split);
  const misaligned = (WIDE_BYTES / s.alignment) ** c.misalignment;
  const rate = (group.peak / machine.sms) * c.compute;
  const compute = (bm * bn * 2 * depth * s.density * misaligned) / rate;
  const fallback = s.alignment < WIDE_BYTES ? 1 + c.fallback : 1;
  const feed = ((bm + bn) * STEP_BYTES * Math.max(misaligned, fallback)) / c.feed;
  const latency = c.step * fallback;
  const epilogue = c.epilogue + (bm * bn * s.element) / c.store;
  const total = waves * (steps * norm4(compute, feed, latency) + epilogue);
  const intake = (count * (bm + bn) * s.k * s.element) / (c.l2 * split);
  return { count, waves, steps, compute, feed, latency, epilogue, total, intake };
}

// The seconds for which the memory is busy. `count` is the number of tiles.
function memorySeconds(s, split, count, machine, c) {
  const ratio = (s.first / Math.max(RESIDENT_SHARE * machine.l2_bytes, 1)) ** 4;
  const hits = (s.first * c.resident) / (1 + ratio);
  const repacked = s.m > 1 ? c.repack * s.batch * s.k * s.n * s.element : 0;
  const traffic = s.bytes - hits + repacked + c.partials * partialBytes(s, split);
  const bandwidth = machine.bandwidth * c.dram * (s.cached ? c.cached : 1);
  return (traffic / bandwidth) * (1 + c.ramp / Math.min(count, machine.sms));
}

// The time with one tile and split of K, the seconds of each limit, and the figures that explain
// it.
function estimate(s, tile, split, machine, group) {
  const c = group.constants;
  const done = work(s, tile, split, machine, group);
  const memory = memorySeconds(s, split, done.count, machine, c);
  const launch = c.launch + c.split * (Number(split > 1) + s.helperKernels);
  const helpers = s.helperBytes / (machine.bandwidth * c.dram);
  const busy = norm4(done.total, done.intake, memory);
  const slowdown = 1 + c.slow * Math.log1p(busy / SLOW_SECONDS);
  const [bm, bn] = tile;
  return {
    time: launch + helpers + busy * slowdown,
    launch,
    compute: done.waves * (done.steps * done.compute + done.epilogue) * slowdown,
    feed: Math.max(done.waves * done.steps * done.feed, done.intake) * slowdown,
    latency: done.waves * done.steps * done.latency * slowdown,
    memory: memory * slowdown + helpers,
    bm, bn, split,
    tiles: done.count,
    waves: ceilDiv(done.count, machine.sms),
    tileEfficiency: (s.m * s.n) / (ceilDiv(s.m, bm) * bm * ceilDiv(s.n, bn) * bn),
    tailEfficiency: tailEfficiency(done.count, machine.sms),
    bytes: s.bytes + s.helperBytes + partialBytes(s, split),
    winograd: 0,
  };
}

// The estimate with the fastest of the library's tiles, each with its best split of K.
function fastest(s, machine, group) {
  const c = group.constants;
  const seconds = (tile, split) => {
    const done = work(s, tile, split, machine, group);
    return norm4(done.total, done.intake, memorySeconds(s, split, done.count, machine, c));
  };
  // Splitting K pays only for shapes with few tiles, and kernels for misaligned rows may lack it.
  const area = ([bm, bn]) => bm * bn;
  const largest = group.tiles.reduce((a, b) => (area(b) > area(a) ? b : a));
  const hasFewTiles = machine.kind === "gpu" && tileCount(s, ...largest) <= machine.sms;
  const maySplit = s.alignment >= WIDE_BYTES || c.fallback_split >= 0.5;
  const splits = hasFewTiles && maySplit ? SPLITS.slice(1) : [];
  let best = { time: Infinity };
  for (const tile of group.tiles) {
    const candidate = { tile, split: 1, time: seconds(tile, 1) };
    for (const split of splits) {
      if (s.k * s.element < STEP_BYTES * MIN_STEPS * split) continue;
      const time = c.split + seconds(tile, split);
      if (time < candidate.time) Object.assign(candidate, { split, time });
    }
    if (candidate.time < best.time) best = candidate;
  }
  return estimate(s, best.tile, best.split, machine, group);
}

// --- The trees' correction: as in analysis/model/features.py and forest.py.

// How often a size can be halved, at most 8 times.
const factorsOfTwo = (size) => {
  let factors = 0;
  while (factors < 8 && size % 2 ** (factors + 1) === 0) factors++;
  return factors;
};

// The features of a problem, in the order in which the trees number them. `shapes` are the results
// of `shapeRow`: for the implied GEMM and, if Winograd's algorithm may be used, for each of its
// tiles. `guess` is the formula's estimate.
function featuresOf(problem, shapes, guess, machine, group) {
  // 1. Sizes and the formula's estimate, for every problem.
  const [s] = shapes;
  const flops = 2 * s.batch * s.m * s.n * s.k * s.density;
  const sizes = [s.m, s.n, s.k].map(Math.log2);
  const ridge = group.peak / machine.bandwidth;
  const features = [...sizes, Math.log(guess.time), Math.log(flops / s.bytes / ridge)];
  for (const [a, b] of [[0, 1], [0, 2], [1, 2]]) {
    features.push(sizes[a] + sizes[b], sizes[a] - sizes[b]);
  }
  features.push(...LIMITS.map((name) => guess[name] / guess.time));
  features.push(...[guess.bm, guess.bn, guess.split, guess.tiles, guess.waves].map(Math.log2));
  features.push(guess.tileEfficiency, guess.tailEfficiency);
  for (const [bm, bn] of USUAL_TILES) {
    features.push(tailEfficiency(tileCount(s, bm, bn), machine.sms));
  }
  features.push(...[s.m, s.n, s.k].map(factorsOfTwo));
  if (problem.op === "gemm") return features;
  // 2. Properties of a convolution, and how the algorithms that it may use compare.
  const [p, q] = outputOf(problem);
  const { n, r, s: width, stride } = problem;
  const details = [n, p * q, r * width, stride[0] * stride[1], pricedAlignment(problem)];
  features.push(...details.map(Math.log2));
  for (const shape of shapes) {
    features.push(Math.log(fastest(shape, machine, group).time / guess.time));
  }
  for (const tile of WINOGRAD_TILES.slice(0, shapes.length - 1)) {
    features.push(Math.log((ceilDiv(p, tile) * ceilDiv(q, tile) * tile ** 2) / (p * q)));
  }
  return features;
}

// Trees in preorder; the left child of a node is the next node. `feature` is the number of the
// feature that a node tests, negative in a leaf. `number` is the cut above which a row goes right
// or, in a leaf, the value. Both are arrays of bytes, as base64.
class Forest {
  constructor({ feature, number }) {
    const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    this.feature = new Int8Array(bytes(feature).buffer);
    this.number = new Float32Array(bytes(number).buffer);
    this.right = new Int32Array(this.feature.length);
    this.roots = [0];
    const open = []; // inner nodes whose right subtree has not begun
    for (let node = 0; node < this.feature.length; node++) {
      // After a leaf, the right subtree of the last open node begins, or else the next tree.
      if (this.feature[node] >= 0) {
        open.push(node);
      } else if (open.length) {
        this.right[open.pop()] = node + 1;
      } else if (node + 1 < this.feature.length) {
        this.roots.push(node + 1);
      }
    }
  }

  // The mean and the standard deviation of the trees' values.
  predict(features) {
    const row = Float32Array.from(features);
    const values = this.roots.map((root) => {
      let node = root;
      while (this.feature[node] >= 0) {
        node = row[this.feature[node]] > this.number[node] ? this.right[node] : node + 1;
      }
      return this.number[node];
    });
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length;
    return { mean, deviation: Math.sqrt(variance) };
  }
}

// --- The interval: as in analysis/model/predict.py, fit.py and groups.py.

// The group of shapes whose errors are alike, by alignment, N and M.
function shapeGroup(problem) {
  const { m, n } = impliedGemm(problem);
  const aligned = pricedAlignment(problem) >= WIDE_BYTES;
  const kind = !aligned ? "misaligned" : n < 32 ? "narrow" : n >= 32768 ? "vocabulary" : "aligned";
  return m < 16 ? `${kind}, few M` : kind;
}

// Whether the model was calibrated on problems of this alignment, layout and batch.
function hasLike(problem, group) {
  if (group.aligned_only && pricedAlignment(problem) < WIDE_BYTES) return false;
  const single = problem.op === "gemm" && problem.batch === 1;
  return !group.layout || (single && problem.layout === group.layout);
}

// Seconds corrected by a log ratio, which is linear in the log of the seconds between knots and
// constant beyond them. Without knots, the seconds are returned unchanged.
function shifted(seconds, { log_seconds: knots, log_ratios: ratios }) {
  if (!knots.length) return seconds;
  const x = Math.log(seconds);
  if (x <= knots[0]) return seconds * Math.exp(ratios[0]);
  const after = knots.findIndex((knot) => knot > x);
  if (after < 0) return seconds * Math.exp(ratios.at(-1));
  const before = after - 1;
  const share = (x - knots[before]) / (knots[after] - knots[before]);
  return seconds * Math.exp(ratios[before] + share * (ratios[after] - ratios[before]));
}

const groupName = (problem) => `${problem.pass ?? problem.op} ${problem.dtype}`;

// The predicted time with its 90% interval, and the formula's estimate; null if the model lacks the
// problem's group.
function predict(problem, timeModel) {
  const group = timeModel.groups[groupName(problem)];
  if (!group) return null;
  // 1. The formula: the implied GEMM, or Winograd's algorithm where it is faster.
  const { machine } = timeModel;
  const winograd = group.winograd ? WINOGRAD_TILES : [];
  const cached = group.warm && bytesOf(problem) <= machine.l2_bytes;
  const rowOf = machine.kind === "gpu" ? gpuLibraryRow : shapeRow;
  const shapes = [0, ...winograd].map((tile) => ({ ...rowOf(problem, tile), cached }));
  let guess = fastest(shapes[0], machine, group);
  for (const [place, tile] of winograd.entries()) {
    const other = fastest(shapes[place + 1], machine, group);
    if (other.time < guess.time) guess = { ...other, winograd: tile };
  }
  // 2. The correction by the trees, if the group has any. They are unpacked once.
  let spread = 1;
  let time = guess.time;
  if (group.trees !== null) {
    const trees = timeModel.trees[group.trees];
    trees.timeForest ??= new Forest(trees.time);
    const features = featuresOf(problem, shapes, guess, machine, group);
    const { mean, deviation } = trees.timeForest.predict(features);
    time *= Math.exp(mean);
    // Smaller trees come with a second forest for the spread. The disagreement of the original
    // trees is their spread.
    if (trees.spread) {
      trees.spreadForest ??= new Forest(trees.spread);
      spread = Math.exp(trees.spreadForest.predict(features).mean);
    } else {
      spread = Math.hypot(deviation, trees.seen) / trees.unseen;
    }
  }
  // 3. The interval, which is wide for problems unlike those that were measured.
  time = shifted(time, group.shift);
  spread = Math.hypot(spread * group.scale, group.beside);
  const [below, above] = group.groups[shapeGroup(problem)] ?? [1, 1];
  let [low, high] = [group.low * spread * below, group.high * spread * above];
  if (!hasLike(problem, group)) {
    low = Math.min(low, timeModel.uncalibrated[0]);
    high = Math.max(high, timeModel.uncalibrated[1]);
  }
  const limit = LIMITS.reduce((a, b) => (guess[b] > guess[a] ? b : a));
  return { ...guess, time, lo: time * Math.exp(low), hi: time * Math.exp(high), limit };
}
