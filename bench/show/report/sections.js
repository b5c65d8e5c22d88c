// The tables of the page, section by section.

const COMMON = {
  op: { key: "op", label: "operation", value: (r) => r.op },
  shape: { key: "shape", label: "shape", value: (r) => r.shape },
  backend: { key: "backend", label: "backend", value: (r) => r.backend, text: (r) => el("code", {}, r.backend) },
};

// A number of a row: sorts by it, and is empty where the row has none.
function numeric(key, label, show, extra = {}) {
  const text = (r) => (r[key] == null ? "" : show(r[key], r));
  return { key, label, number: true, value: (r) => r[key], text, ...extra };
}

const noteColumn = {
  key: "note",
  label: "note",
  note: true,
  value: (r) => notes(r).join("; "),
  mark: (r) => r.wrong && "wrong",
};

const seconds = (s) => microseconds(s * 1e6);

// The operation has a column only where there is more than one.
const leading = (view, ...columns) => (view.ops.length > 1 ? [COMMON.op, ...columns] : columns);

function rowColumns(view) {
  return [
    ...leading(view, COMMON.shape),
    COMMON.backend,
    numeric("us", "time", microseconds),
    numeric("us_q1", "quartiles", (low, r) => between(low, r.us_q3, microseconds)),
    numeric("us_low", "95 % interval", (low, r) => between(low, r.us_high, microseconds)),
    numeric("gbs", "GB/s", three),
    numeric("tflops", "TFLOP/s", three),
    numeric("of_ceiling", "of ceiling", (x) => x.toFixed(2)),
    numeric("speedup", `× ${baselineOf(view.ops)}`, (x) => x.toFixed(2)),
    numeric("speedup_low", "its interval", (low, r) => between(low, r.speedup_high, (x) => x.toFixed(2))),
    numeric("rounds", "rounds", String),
    numeric("clock_mhz", "MHz", (x) => x.toFixed(0)),
    numeric("power_w", "W", (x) => x.toFixed(0)),
    numeric("temperature_c", "°C", (x) => x.toFixed(0)),
    noteColumn,
  ];
}

function drawRows(view) {
  if (!view.rows.length) return [nothing("No rows.")];
  const columns = rowColumns(view);
  const used = columns.filter((c) => view.rows.some((row) => ![null, undefined, ""].includes(c.value(row))));
  return [sortable("rows", used, view.rows, "Every row")];
}

function drawCosts(view) {
  const rows = view.rows.filter((row) => row.us != null && row.shape === view.shapeOf(row.op));
  if (!rows.length) return [nothing("Nothing has a time here.")];
  const most = (key) => Math.max(...rows.map((row) => row[key] || 0)) || 1;
  const bar = (key) => ({ meter: (row) => (row[key] == null ? null : row[key] / most(key)) });
  const share = (r) => (r.error == null || !r.bound ? null : r.error / r.bound);
  const shownShare = (r) => share(r)?.toFixed(2) ?? "";
  const columns = [
    ...leading(view, COMMON.backend),
    numeric("host_us", "host, by name", microseconds, bar("host_us")),
    numeric("host_direct_us", "host, direct", microseconds, bar("host_direct_us")),
    numeric("compile_s", "first call", seconds, bar("compile_s")),
    numeric("error", "error", (x) => x.toExponential(1)),
    numeric("bound", "bound", (x) => x.toExponential(1)),
    { key: "share", label: "error / bound", number: true, value: share, text: shownShare, meter: share },
    numeric("peak_mib", "peak memory", (x) => `${three(x)} MiB`, bar("peak_mib")),
  ];
  return [sortable("costs", columns, rows, "What else a call costs")];
}

// A line for each shape; a column for each level, by its fastest variant, and for each peer.
function drawPeers(view) {
  const peers = unique(view.rows.filter((row) => row.level === "peer").map((row) => row.backend));
  if (!view.rows.length) return [nothing("No rows.")];
  const levels = unique(view.rows.map((row) => row.level)).filter((level) => level !== "peer");
  const lines = [...groupBy(view.rows, (row) => JSON.stringify([row.op, row.shape]))].map(([, members]) =>
    peerLine(members, levels, peers),
  );
  const named = [...levels, ...peers].map((name) => peerColumn(name, baselineOf(view.ops)));
  const columns = [...leading(view, COMMON.shape), ...named];
  const absent = peers.length ? [] : [nothing("No peer was measured here; python -m bench --peers does it.")];
  return [...absent, sortable("peers", columns, lines, "The fastest of each level beside the peers")];
}

function peerLine(members, levels, peers) {
  const fastest = (rows) => rows.filter((row) => row.us != null).sort((a, b) => b.speed - a.speed)[0] || rows[0];
  const found = { op: members[0].op, shape: members[0].shape, cells: {} };
  for (const level of levels) found.cells[level] = fastest(members.filter((row) => row.level === level));
  for (const peer of peers) found.cells[peer] = fastest(members.filter((row) => row.backend === peer));
  return found;
}

function peerColumn(name, baseline) {
  const of = (line) => line.cells[name];
  const best = (line) => of(line)?.fastest;
  const show = (line) => {
    const row = of(line);
    if (!row) return "";
    if (row.us == null) return el("span", { title: notes(row).join("; ") }, row.wrong ? "wrong" : "—");
    const which = row.backend === name ? "" : `${row.backend.slice(name.length + 1)} `;
    const speedup = row.speedup == null ? "" : ` (${row.speedup.toFixed(2)})`;
    return `${which}${microseconds(row.us)}${speedup}${best(line) ? " ◀" : ""}`;
  };
  const label = `${name} (× ${baseline})`;
  const mark = (line) => best(line) && "best";
  return { key: name, label, number: true, value: (line) => of(line)?.us, text: show, mark };
}

// One line for each reason, however many shapes it holds for; what is wrong first.
function drawUnmeasured(view) {
  const rows = view.rows.filter((row) => row.us == null);
  if (!rows.length) return [nothing("Everything chosen here has a time.")];
  const groups = groupBy(rows, (row) => JSON.stringify([row.op, row.backend, row.wrong, row.unsupported]));
  const lines = [...groups.values()].map((members) => ({ ...members[0], shapes: members.map((row) => row.shape) }));
  lines.sort((a, b) => Boolean(b.wrong) - Boolean(a.wrong));
  const columns = [
    ...leading(view, COMMON.backend),
    { key: "kind", label: "", value: (r) => (r.wrong ? "✗ wrong" : "unsupported"), mark: (r) => r.wrong && "wrong" },
    { key: "reason", label: "reason", note: true, value: (r) => r.wrong || r.unsupported || "" },
    { key: "shapes", label: "shapes", note: true, value: (r) => r.shapes.join(", ") },
  ];
  return [sortable("unmeasured", columns, lines, "What was not measured, and why")];
}

function drawEnvironment(view) {
  const machines = [...groupBy([...DATA.rows, ...DATA.ceilings], (row) => row.gpu).values()].map(machine);
  const column = (key, label, number = false) => ({ key, label, number, value: (m) => m[key] });
  const columns = [
    column("gpu", "machine"),
    column("software", "software"),
    column("source", "source"),
    column("when", "measured (UTC)"),
    column("rows", "rows", true),
    column("clock", "clock, MHz", true),
    column("power", "power, W", true),
    column("temperature", "temperature, °C", true),
    column("moved", "clocks moved in", true),
    column("gaps", "launch gaps in", true),
    column("interpreted", "interpreted", true),
  ];
  const ceilings = DATA.ceilings.filter((row) => row.gpu === view.gpu);
  return [sortable("environment", columns, machines, "Machines"), ...drawCeilings(ceilings, view.gpu)];
}

function machine(rows) {
  const range = (key) => {
    const values = rows.map((row) => row[key]).filter((value) => value != null);
    if (!values.length) return "";
    const [low, high] = [Math.min(...values), Math.max(...values)].map((v) => v.toFixed(0));
    return low === high ? low : `${low} – ${high}`;
  };
  const whens = rows.map((row) => row.when).filter(Boolean).sort();
  const count = (test) => rows.filter(test).length;
  return {
    gpu: rows[0].gpu,
    software: unique(rows.map(software)).join("; "),
    source: unique(rows.map(source).filter(Boolean)).join("; "),
    when: whens.length ? between(date(whens[0]), date(whens[whens.length - 1]), (x) => x) : "",
    rows: rows.length,
    clock: range("clock_mhz"),
    power: range("power_w"),
    temperature: range("temperature_c"),
    moved: count((row) => row.clocks_moved),
    gaps: count((row) => row.graph === false),
    interpreted: count((row) => row.interpreted),
  };
}

function drawCeilings(rows, gpu) {
  if (!rows.length) return [];
  const columns = [
    { key: "what", label: "ceiling", value: (r) => r.backend.replace(/^ceiling\./, "").replaceAll("_", " ") },
    { key: "dtype", label: "dtype", value: (r) => r.dtype },
    COMMON.shape,
    numeric("gbs", "GB/s", three),
    numeric("tflops", "TFLOP/s", three),
    numeric("us", "time", microseconds),
  ];
  return [el("h3", {}, `Ceilings of ${gpu}`), sortable("ceilings", columns, rows, "Measured ceilings")];
}
