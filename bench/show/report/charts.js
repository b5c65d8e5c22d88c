// Charts: Plotly draws the figures that figures.py made. Here they get the page's width, theme, hover, clicks and keys.

const NARROW = 640; // CSS pixels; a narrower page has legends below the charts and names above the bars
const LEGEND_LINE = 19; // CSS pixels

// Colours of the style sheet under the current theme, as [r, g, b]; `render` empties it.
const palette = new Map();

function channels(name) {
  if (palette.has(name)) return palette.get(name);
  const probe = el("span", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  palette.set(name, found);
  return found;
}

// "cuda 0.7" is that colour mixed with the page's.
function colour(token) {
  const [name, strength = 1] = token.split(" ");
  const page = channels("page");
  return `rgb(${channels(name).map((c, i) => Math.round(strength * c + (1 - strength) * page[i])).join(",")})`;
}

// Plotly reads a few tags and entities in text: those of a row must stay characters.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const TEXTS = ["name", "text", "hovertext", "ticktext"];
const each = (value, change) => (Array.isArray(value) ? value.map((v) => each(v, change)) : value && change(value));

// A copy of a figure with colours resolved and text made safe: Plotly changes what it is given.
function copied(figure) {
  return JSON.parse(JSON.stringify(figure), (key, value) => {
    if (key === "color") return each(value, colour);
    return TEXTS.includes(key) && (typeof value === "string" || Array.isArray(value)) ? each(value, plain) : value;
  });
}

function chart(figure, view, width) {
  if (figure.empty) return el("div", { class: "figure" }, el("h3", {}, figure.title), nothing(figure.empty));
  const { title, data, layout, scale } = copied(figure);
  for (const trace of data) {
    trace.hoverinfo = "text";
    if (!trace.customdata) continue;
    trace.customdata = trace.customdata.map((i) => (i === null ? null : DATA.rows[i]));
    trace.hovertext = trace.customdata.map((row) => (row ? plain(hoverText(row)).replaceAll("\n", "<br>") : ""));
  }
  if (scale) Object.assign(layout[scale.axis], scale[view.scale] ?? scale[scale.suits]);
  dress(layout, width);
  if (width <= NARROW) makeNarrow(figure.section, data, layout);
  const node = el("div", { class: "chart", role: "img", tabindex: 0, "aria-label": `${title}: ${figure.section}` });
  node.style.height = `${layout.height}px`;
  node.drawing = { data, layout, drawn: false };
  return el("div", { class: "figure" }, el("h3", {}, figure.title), node);
}

function dress(layout, width) {
  const [page, panel, ink, soft, rule] = ["page", "panel", "ink", "soft", "rule"].map(colour);
  Object.assign(layout, {
    width,
    paper_bgcolor: page,
    plot_bgcolor: page,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    hoverlabel: { bgcolor: panel, bordercolor: rule, font: { color: ink, size: 12 }, align: "left", namelength: 0 },
    hovermode: "closest",
    showlegend: layout.shapes === undefined,
    margin: layout.margin || { l: 64, r: 10, t: 12, b: 50 },
  });
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { gridcolor: rule, linecolor: soft, zeroline: false });
    axis.tickfont = { color: soft, ...axis.tickfont };
    if (axis.title) Object.assign(axis.title, { font: { size: 12, color: soft }, standoff: 8 });
  }
}

function makeNarrow(section, data, layout) {
  layout.dragmode = false; // a finger scrolls the page
  if (section === "climb") {
    layout.margin = { l: 8, r: 8, t: 40, b: 10 };
    layout.height = 50 + 48 * layout.annotations.length;
    layout.yaxis.showticklabels = false;
    data[0].width = 0.36;
    layout.annotations.forEach((words, i) => {
      words.text = `${layout.yaxis.ticktext[i]} ${words.text.split(" · ").slice(0, 2).join(" · ")}`;
      Object.assign(words, { x: 0, xshift: 0, yshift: words.xshift ? NAME_ABOVE : 0 });
    });
    return;
  }
  const keys = LEGEND_LINE * data.filter((trace) => trace.name).length + 20;
  layout.margin = { l: 52, r: 8, t: 30, b: 110 + keys, autoexpand: false };
  layout.height = 390 + keys;
  layout.legend = { x: 0, y: 0, xanchor: "left", xref: "container", yref: "container", yanchor: "bottom" };
  layout.title = { ...layout.yaxis.title, x: 0.02, y: 0.99, yanchor: "top" }; // the unit, above the chart
  layout.yaxis.title = { text: "" };
  layout.annotations = [];
}

const NAME_ABOVE = 16; // CSS pixels

function drawChart(node) {
  if (node.drawing.drawn) return;
  node.drawing.drawn = true;
  const { data, layout } = node.drawing;
  Plotly.newPlot(node, data, layout, { displayModeBar: false, doubleClick: "reset", showTips: false });
  node.on("plotly_click", ({ points: [point] }) => point.customdata && showDetails(point.customdata));
  node.addEventListener("keydown", (event) => onKey(node, event));
}

// A chart takes Plotly a tenth of a second, and all operations have thirty: each is drawn when it is nearly in view.
const nearView = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => drawChart(entry.target)),
  { rootMargin: "600px" },
);

function drawCharts(nodes) {
  nearView.disconnect();
  for (const node of nodes) nearView.observe(node);
}

// Left and right go along a series, up and down from one to the next, Enter shows the whole row.
function onKey(node, event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (event.key === "Enter" && node.at) showDetails(node.at.row);
  if (!step) return;
  event.preventDefault();
  const series = node.drawing.data
    .map(({ customdata = [] }, curve) => customdata.map((row, point) => ({ row, curve, point })).filter((p) => p.row))
    .filter((points) => points.length);
  const clamp = (value, list) => list[Math.min(Math.max(value, 0), list.length - 1)];
  const here = series.findIndex((points) => points[0].curve === node.at?.curve);
  const place = here < 0 ? 0 : series[here].findIndex(({ point }) => point === node.at.point) + step[1];
  node.at = clamp(place, clamp(here < 0 ? 0 : here + step[0], series));
  Plotly.Fx.hover(node, [{ curveNumber: node.at.curve, pointNumber: node.at.point }]);
}

const nothing = (sentence) => el("p", { class: "empty" }, sentence);

// The figures of a section for the view: of each operation its own, or at the shape that stands for it.
function chartsOf(section) {
  return (view, width) => {
    const all = section === "roofline" && view.ops.length > 1;
    const fits = (figure, op) =>
      figure.section === section &&
      figure.op === op &&
      ["gpu", "dtype", "pass"].every((name) => figure[name] === view[name]) &&
      (all || figure.shape === undefined || figure.shape === view.shapeOf(op));
    const found = (all ? [ALL] : view.ops).flatMap((op) => DATA.figures.filter((figure) => fits(figure, op)));
    return found.length ? found.map((figure) => chart(figure, view, width)) : [nothing("No rows.")];
  };
}
