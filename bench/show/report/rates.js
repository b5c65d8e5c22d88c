// Rate against size: a line for each variant, the measured ceiling dashed.

function drawRates(view, width) {
  if (!view.ops.length) return [nothing("No rows.")];
  return view.ops.flatMap((op) => {
    const rows = view.rows.filter((row) => row.op === op && row.us != null);
    const title = `${op} ${view.pass}, ${view.dtype}`;
    if (!rows.length) return [figure(title, nothing("Nothing has a time."))];
    const kinds = kindsOf(rows).filter(({ mine }) => mine.length);
    if (!kinds.length) return [figure(title, nothing("Nothing has a rate."))];
    return kinds.map(({ note, mine, bytesBound }) =>
      figure(title + note, ...ratesOf(mine, view, width, title + note, bytesBound)),
    );
  });
}

// Where operations bind most shapes, those that memory holds to a small part of the others' rate have a chart of their
// own, in bytes a second: they would lie on the axis. (As bench/pictures.py has it.)
function kindsOf(rows) {
  const of = (bytesBound) => rows.filter((row) => hasRate(row, bytesBound));
  if (2 * rows.filter((row) => row.bytes_bound).length >= rows.length) {
    return [{ note: "", mine: of(true), bytesBound: true }];
  }
  const peak = Math.max(...rows.map((row) => ceilingRate(row, false) || 0));
  const farBelow = (row) => row.bytes_bound && ceilingRate(row, false) && ceilingRate(row, false) < peak / 10;
  return [
    { note: "", mine: of(false).filter((row) => !farBelow(row)), bytesBound: false },
    { note: ", bound by memory", mine: of(true).filter(farBelow), bytesBound: true },
  ];
}

function ratesOf(rows, view, width, title, bytesBound) {
  const wide = width > NARROW;
  const places = placesOf(rows);
  const names = shapeNames(places);
  const box = { left: Math.max(52, names.across - 30), right: width - (wide ? 175 : 10), top: 24, bottom: 330 };
  const chart = newChart(width, box.bottom + 24 + names.down, `${title}: rate against size`);
  const last = Math.max(...places.values());
  const x = linear(-0.4, last + 0.4, box.left, box.right);
  const y = rateScale(chart, rows, view, box, bytesBound);
  for (const [shape, place] of places) {
    const transform = `rotate(${-names.angle} ${x(place)} ${box.bottom + 14})`;
    const name = shortened(shape);
    chart.append(text(x(place) + 4, box.bottom + 14, name, { "text-anchor": "end", transform, class: "soft" }));
  }
  drawCeiling(chart, rows, places, x, y, bytesBound);
  const look = looks(rows);
  const ends = [...groupBy(rows, (row) => row.backend)].map(([backend, mine]) =>
    drawSeries(chart, mine, places, x, y, look.get(backend), bytesBound),
  );
  if (wide) nameEnds(chart, ends, box);
  return [chart, wide ? null : legend(rows, look)].filter(Boolean);
}

const LONGEST = 32; // characters of a shape's name; the details have all of it
const CHARACTER = 6.4; // pixels

const shortened = (shape) => (shape.length > LONGEST ? `${shape.slice(0, LONGEST - 1)}…` : shape);

// How steep names of shapes stand, and what room the longest takes.
function shapeNames(places) {
  const longest = CHARACTER * Math.max(...[...places.keys()].map((shape) => shortened(shape).length));
  const angle = longest > 120 ? 55 : 38;
  const radians = (angle * Math.PI) / 180;
  return { angle, across: longest * Math.cos(radians), down: longest * Math.sin(radians) };
}

// The options, save one that repeats the sizes of the first tensor, as normalized_shape does.
function withoutSizes(row) {
  const first = row.shapes?.[0] || [];
  const repeats = (value) => Array.isArray(value) && `${value}` === `${first.slice(-value.length)}`;
  return Object.entries(row.options || {}).filter(([, value]) => !repeats(value));
}

// Shapes in the order of the rows, with a gap where the options change.
function placesOf(rows) {
  const options = new Map();
  for (const row of rows) if (!options.has(row.shape)) options.set(row.shape, JSON.stringify(withoutSizes(row)));
  const places = new Map();
  let place = 0;
  for (const kind of unique(options.values())) {
    for (const [shape, own] of options) if (own === kind) places.set(shape, place++);
    place += 0.6;
  }
  return places;
}

// From zero is the honest scale; only interpreted kernels, thousands of times slower, ask for another.
function rateScale(chart, rows, view, box, bytesBound) {
  const values = rows.map((row) => rateOf(row, bytesBound));
  const roofs = rows.map((row) => ceilingRate(row, bytesBound)).filter(Boolean);
  const high = Math.max(...values, ...roofs) * 1.06;
  const log = view.scale === "log" || (view.scale === "as suits" && rows.some((row) => row.interpreted));
  const low = log ? Math.min(...values) / 1.5 : 0;
  const scale = (log ? logarithmic : linear)(low, high, box.bottom, box.top);
  const label = `${unitOf(bytesBound)} of the least ${bytesBound ? "bytes" : "operations"}`;
  yAxis(chart, scale, log ? logTicks(low, high) : linearTicks(high, 6), box.left, box.right, label);
  chart.append(line(box.left, box.bottom, box.right, box.bottom, "axis"));
  return scale;
}

function drawCeiling(chart, rows, places, x, y, bytesBound) {
  const half = (x(1) - x(0)) * 0.4;
  for (const [shape, place] of places) {
    const roof = rows.filter((row) => row.shape === shape).map((row) => ceilingRate(row, bytesBound)).find(Boolean);
    if (roof) chart.append(line(x(place) - half, y(roof), x(place) + half, y(roof), "roof dashed"));
  }
}

function drawSeries(chart, rows, places, x, y, look, bytesBound) {
  const series = wear(svg("g", { class: "series" }), look);
  const at = (row) => [x(places.get(row.shape)), y(rateOf(row, bytesBound))];
  const sorted = [...rows].sort((a, b) => places.get(a.shape) - places.get(b.shape));
  let path = "";
  sorted.forEach((row, i) => {
    // No line across a shape without a time, nor to another set of options.
    const joined = i && places.get(row.shape) - places.get(sorted[i - 1].shape) === 1;
    path += `${joined ? "L" : "M"}${at(row).join(",")}`;
  });
  series.append(svg("path", { class: "line", d: path }));
  chart.append(series);
  for (const row of sorted) {
    const [px, py] = at(row);
    const ends = spreadOf(row)?.map((us) => y(rateAt(row, us, bytesBound)));
    const whisker = ends && svg("path", { class: "whisker", d: `M${px - 4},${ends[0]}h8m-4,0V${ends[1]}m-4,0h8` });
    addPoint(chart, series, { x: px, y: py, row }, svg("g", {}, whisker, marker(look, px, py)));
  }
  const end = sorted[sorted.length - 1];
  return { name: named(end), at: at(end), look, series };
}

function nameEnds(chart, ends, box) {
  ends.sort((a, b) => a.at[1] - b.at[1]);
  const heights = apart(ends.map((end) => end.at[1]), 16, box.top, box.bottom);
  ends.forEach((end, i) => {
    const [x, y] = end.at;
    const middle = box.right + 8;
    end.series.append(
      svg("path", { class: "leader", d: `M${x + 6},${y}L${middle},${heights[i]}h8` }),
      marker(end.look, middle + 14, heights[i]),
      text(middle + 23, heights[i] + 4, end.name),
    );
  });
}
