// What every chart is made of: scales, ticks, marks, and points that pointer, finger and keyboard reach.

const PALEST = 45; // percent; earlier steps are paler, so that the end of each climb stands out

const LEVELS = ["torch", "compile", "triton", "cuda", "xla", "peer"];
const levelClass = (level) => (LEVELS.includes(level) ? level : "other");

// One path for each step of a climb, about the origin.
const MARKERS = [
  "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
  "M-4,-4h8v8h-8z",
  "M0,-5.5L5.5,0L0,5.5L-5.5,0z",
  "M0,-5.5L5,4H-5z",
  "M0,5.5L5,-4H-5z",
  "M-1.7,-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
  "M0,-6L1.6,-1.9H6L2.4,0.8L3.7,5L0,2.5L-3.7,5L-2.4,0.8L-6,-1.9H-1.6z",
  "M-2.3,-5h4.6L5,0L2.3,5h-4.6L-5,0z",
];

// How each backend of a chart looks: the hue of its level, the strength and the marker of its step.
function looks(rows) {
  const found = new Map();
  for (const [level, members] of groupBy(rows, (row) => row.level)) {
    const climb = unique(members.map((row) => row.backend));
    climb.forEach((backend, step) => {
      const strength = climb.length === 1 ? 100 : PALEST + ((100 - PALEST) * step) / (climb.length - 1);
      found.set(backend, { level: levelClass(level), strength, marker: MARKERS[step % MARKERS.length] });
    });
  }
  return found;
}

function wear(node, look) {
  node.classList.add("look", look.level);
  node.style.setProperty("--strength", `${look.strength}%`);
  return node;
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);
const logarithmic = (low, high, from, to) => {
  const scale = linear(Math.log(low), Math.log(high), from, to);
  return (value) => scale(Math.log(value));
};

function linearTicks(high, most) {
  const rough = high / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
}

// Powers of ten; where fewer than two of them show, halves of the way too.
function logTicks(low, high) {
  const between = (factors) => {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of factors) ticks.push(factor * 10 ** power);
    }
    return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  };
  return between([1]).length > 1 ? between([1]) : between([1, 2, 5]);
}

// Positions in order, moved apart until no two are nearer than `gap`, and within [low, high] where they fit.
function apart(positions, gap, low, high) {
  const at = [];
  for (const position of positions) at.push(Math.max(position, at.length ? at[at.length - 1] + gap : low));
  let limit = Math.max(high, low + gap * (at.length - 1));
  for (let i = at.length - 1; i >= 0; i--) {
    at[i] = Math.min(at[i], limit);
    limit = at[i] - gap;
  }
  return at;
}

const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });
const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);

function yAxis(chart, scale, ticks, left, right, label) {
  for (const tick of ticks) {
    chart.append(line(left, scale(tick), right, scale(tick), "grid"));
    chart.append(text(left - 7, scale(tick) + 4, three(tick), { "text-anchor": "end", class: "soft" }));
  }
  chart.append(text(left - 45, 12, label, { class: "soft" }));
}

const newChart = (width, height, label) =>
  svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });

// A point or bar with its whole row behind it. `x` and `y` say where it is; `mark` is what is seen of it.
function addPoint(chart, parent, point, mark, hit) {
  const node = svg(
    "g",
    { class: point.row.clocks_moved ? "point moved" : "point", role: "img", "aria-label": summary(point.row) },
    mark,
    hit || svg("circle", { class: "hit", cx: point.x, cy: point.y, r: 10 }),
  );
  point.node = node;
  point.series = parent;
  chart.points ??= [];
  // One stop of the Tab key a chart; the arrow keys go from point to point.
  node.setAttribute("tabindex", chart.points.length ? -1 : 0);
  chart.points.push(point);
  listen(chart, point);
  parent.append(node);
}

function listen(chart, point) {
  const enter = () => {
    if (details.classList.contains("pinned")) return;
    light(chart, point.series);
    showDetails(point.row, point.node);
  };
  const leave = () => {
    light(chart, null);
    leaveDetails();
  };
  const pin = () => {
    details.classList.remove("pinned");
    enter();
    pinDetails();
  };
  for (const name of ["pointerenter", "focus"]) point.node.addEventListener(name, enter);
  for (const name of ["pointerleave", "blur"]) point.node.addEventListener(name, leave);
  point.node.addEventListener("click", pin);
  point.node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") pin();
    const next = neighbour(chart.points, point, event.key);
    if (next) go(point, next);
    if (next || event.key === " ") event.preventDefault();
  });
}

function light(chart, series) {
  chart.classList.toggle("lit", series !== null);
  for (const node of chart.querySelectorAll(".series")) node.classList.toggle("on", node === series);
}

function go(from, to) {
  closeDetails();
  from.node.setAttribute("tabindex", -1);
  to.node.setAttribute("tabindex", 0);
  to.node.focus();
}

// The next point in the direction of an arrow key: along the line first, else the nearest.
function neighbour(points, from, key) {
  const direction = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  if (!direction) return null;
  const [dx, dy] = direction;
  const ahead = (p) => (p.x - from.x) * dx + (p.y - from.y) * dy;
  const aside = (p) => Math.abs((p.x - from.x) * dy) + Math.abs((p.y - from.y) * dx);
  const candidates = points.filter((p) => ahead(p) > 0.01);
  const along = dx ? candidates.filter((p) => p.series === from.series) : [];
  const cost = (p) => ahead(p) + (along.length ? 0 : 4 * aside(p));
  return (along.length ? along : candidates).sort((a, b) => cost(a) - cost(b))[0] || null;
}

function summary(row) {
  const ceiling = row.of_ceiling == null ? "" : `, ${row.of_ceiling.toFixed(2)} of the ceiling`;
  const moved = row.clocks_moved ? ", clocks moved" : "";
  const measured = [microseconds(row.us), rate(row)].filter(Boolean).join(", ");
  return `${row.op} ${row.backend}, ${row.shape}: ${measured}${ceiling}${moved}`;
}

const marker = (look, x, y) => svg("path", { class: "marker", d: look.marker, transform: `translate(${x},${y})` });

const named = (row) => (row.interpreted ? `${row.backend} (interpreted)` : row.backend);

function legend(rows, look) {
  const one = groupBy(rows, (row) => row.backend);
  const key = (backend) =>
    wear(svg("svg", { class: "chart", viewBox: "0 0 34 14", "aria-hidden": "true" }), look.get(backend));
  return el(
    "ul",
    { class: "legend" },
    [...one].map(([backend, [row]]) => {
      const picture = key(backend);
      picture.append(line(0, 7, 34, 7, "line"), marker(look.get(backend), 17, 7));
      return el("li", {}, picture, named(row));
    }),
  );
}

const figure = (title, ...children) => el("div", { class: "figure" }, el("h3", {}, title), ...children);
const nothing = (sentence) => el("p", { class: "empty" }, sentence);
