"use strict";

// Numbers as people read them: three digits, with a unit that suits.

const three = (x) => {
  const rounded = Number(x.toPrecision(3));
  if (rounded && Math.abs(rounded) < 1e-3) return rounded.toExponential();
  return Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en-US") : String(rounded);
};

function microseconds(us) {
  if (us < 1e3) return `${three(us)} µs`;
  return us < 1e6 ? `${three(us / 1e3)} ms` : `${three(us / 1e6)} s`;
}

const times = (x) => `${x >= 100 ? Math.round(x).toLocaleString("en-US") : x.toPrecision(x < 1 ? 2 : 3)}×`;

// A rate is of bytes where moving the least bytes takes longest, else of operations.
function rate(row) {
  const value = row.bytes_bound ? row.gbs : row.tflops;
  return value == null ? null : `${three(value)} ${row.bytes_bound ? "GB/s" : "TFLOP/s"}`;
}

const between = (low, high, show) => (low == null || high == null ? null : `${show(low)} – ${show(high)}`);

const date = (when) => when.slice(0, 16).replace("T", " ");

// What the speed-ups of some operations are over, by its name where it is the same for all of them.
function baselineOf(ops) {
  const found = unique(ops.map((op) => DATA.baselines[op]));
  return found.length === 1 ? found[0] : "baseline";
}

function notes(row) {
  return [
    row.wrong && `wrong: ${row.wrong}`,
    row.unsupported,
    row.us != null && row.interpreted && "interpreted: no measure of speed",
    row.graph === false && "launch gaps included",
    row.clocks_moved && "clocks moved",
  ].filter(Boolean);
}

// Every field of a row with its name and its form; what a row lacks is left out.
const FIELDS = [
  ["shape", (r) => r.shape],
  ["pass, dtype", (r) => `${r.pass}, ${r.dtype}`],
  ["options", (r) => Object.entries(r.options || {}).map(([k, v]) => `${k}=${v}`).join(", ") || null],
  ["input shapes", (r) => (r.shapes || []).map((s) => (s ? s.join("×") || "scalar" : "absent")).join(", ") || null],
  ["time (median)", (r) => r.us != null && microseconds(r.us)],
  ["95 % interval", (r) => between(r.us_low, r.us_high, microseconds)],
  ["quartiles", (r) => between(r.us_q1, r.us_q3, microseconds)],
  ["rounds", (r) => r.rounds],
  ["in a CUDA graph", (r) => (r.graph == null ? null : r.graph ? "yes" : "no: launch gaps included")],
  ["of the ceiling", (r) => r.of_ceiling != null && r.of_ceiling.toFixed(3)],
  ["speed-up", (r) => r.speedup != null && `${times(r.speedup)} ${baselineOf([r.op])}`],
  ["its 95 % interval", (r) => between(r.speedup_low, r.speedup_high, times)],
  ["step before", (r) => r.gain != null && `${times(r.gain)} ${r.step_before}`],
  ["its 95 % interval", (r) => between(r.gain_low, r.gain_high, times)],
  ["bandwidth", (r) => r.gbs != null && `${three(r.gbs)} GB/s`],
  ["arithmetic", (r) => r.tflops != null && `${three(r.tflops)} TFLOP/s`],
  ["least bytes", (r) => r.bytes != null && r.bytes.toLocaleString("en-US")],
  ["least operations", (r) => r.flops != null && r.flops.toLocaleString("en-US")],
  ["least intensity", (r) => r.intensity != null && `${three(r.intensity)} per byte`],
  ["copy ceiling", (r) => r.ceiling_gbs != null && `${three(r.ceiling_gbs)} GB/s`],
  ["arithmetic ceiling", (r) => r.ceiling_tflops != null && `${three(r.ceiling_tflops)} TFLOP/s`],
  ["host cost by name", (r) => r.host_us != null && microseconds(r.host_us)],
  ["host cost, direct", (r) => r.host_direct_us != null && microseconds(r.host_direct_us)],
  ["first call", (r) => r.compile_s != null && microseconds(r.compile_s * 1e6)],
  ["error / bound", (r) => r.error != null && r.bound != null && `${three(r.error)} / ${three(r.bound)}`],
  ["peak memory", (r) => r.peak_mib != null && `${three(r.peak_mib)} MiB`],
  ["clock", (r) => r.clock_mhz != null && `${r.clock_mhz.toFixed(0)} MHz`],
  ["power", (r) => r.power_w != null && `${three(r.power_w)} W`],
  ["temperature", (r) => r.temperature_c != null && `${three(r.temperature_c)} °C`],
  ["note", (r) => notes(r).join("; ") || null],
  ["machine", (r) => r.gpu],
  ["software", (r) => software(r)],
  ["source", (r) => source(r)],
  ["when", (r) => r.when && `${date(r.when)} UTC`],
];

// What a chart shows on hover: the time with its interval, the rate, and what both are compared with.
function hoverText(row) {
  const [kind, low, high] =
    row.us_low != null && row.us_high != null
      ? ["95 % interval", row.us_low, row.us_high]
      : ["quartiles", row.us_q1, row.us_q3];
  const spread = between(low, high, microseconds);
  return [
    row.backend,
    `${row.op} ${row.shape}`,
    `${microseconds(row.us)}${spread ? ` (${kind} ${spread})` : ""}`,
    [rate(row), row.of_ceiling == null ? null : `${row.of_ceiling.toFixed(2)} of the ceiling`].filter(Boolean).join(", "),
    row.gain == null ? null : `${times(row.gain)} ${row.step_before}`,
    row.speedup == null ? null : `${times(row.speedup)} ${baselineOf([row.op])}`,
    notes(row).join("; "),
  ].filter(Boolean).join("\n");
}

function software(row) {
  const versions = { driver: row.driver, CUDA: row.cuda, PyTorch: row.torch, Triton: row.triton };
  return Object.entries(versions).filter(([, v]) => v).map(([name, v]) => `${name} ${v}`).join(", ");
}

const source = (row) => (row.commit ? row.commit.slice(0, 12) + (row.dirty ? ", with changes" : "") : null);
