// The roofline: least intensity against rate, both logarithmic, under what the machine was measured to allow.

const ASIDE = 9; // pixels between the levels of one operation, whose lines would lie on each other

function drawRoofline(view, width) {
  const rows = view.rows.filter(
    (row) => row.us != null && row.intensity && row.tflops && row.shape === view.shapeOf(row.op),
  );
  if (!rows.length) return [nothing("Nothing has a time here.")];
  const roofs = DATA.roofs.filter((roof) => roof.gpu === view.gpu && roof.dtype === view.dtype);
  const wide = width > NARROW;
  const single = view.ops.length === 1;
  const title = view.ops.map((op) => `${op} ${view.shapeOf(op)}`).join(" · ");
  const chart = rooflineChart(rows, roofs, view, width, wide, single, `Roofline of ${title}`);
  const keys = single ? (wide ? [] : legend(rows, looks(rows))) : levelsLegend(rows);
  const names = wide ? null : el("p", { class: "roofs" }, `Roofs: ${roofs.map(roofName).join("; ")}.`);
  return [figure(`${title}, ${view.pass}, ${view.dtype}`, chart, names, keys)];
}

function rooflineChart(rows, roofs, view, width, wide, single, label) {
  const box = { left: 52, right: width - 10, top: 26, bottom: 440 };
  const { x, y, range } = rooflineScales(rows, roofs, box, wide);
  const chart = newChart(width, 490, label);
  yAxis(chart, y, logTicks(...range.y), box.left, box.right, "TFLOP/s of the least operations");
  intensityAxis(chart, x, logTicks(...range.x), box);
  drawRoofs(chart, roofs, x, y, range, box, wide);
  const points = view.ops.flatMap((op) => drawClimbs(chart, rows.filter((row) => row.op === op), x, y));
  if (wide) namePoints(points, single, box);
  return chart;
}

function intensityAxis(chart, x, ticks, box) {
  const centred = { "text-anchor": "middle", class: "soft" };
  for (const tick of ticks) {
    chart.append(line(x(tick), box.top, x(tick), box.bottom, "grid"));
    chart.append(text(x(tick), box.bottom + 16, three(tick), centred));
  }
  chart.append(text((box.left + box.right) / 2, box.bottom + 36, "least operations per least byte", centred));
}

const roofName = (roof) => `${roof.name}: ${roof.gbs ? `${three(roof.gbs)} GB/s` : `${three(roof.tflops)} TFLOP/s`}`;

const rateUnder = (roof, intensity) => (roof.tflops ?? (roof.gbs * intensity) / 1e3);

function rooflineScales(rows, roofs, box, wide) {
  const xs = rows.map((row) => row.intensity);
  const flats = roofs.filter((roof) => roof.tflops).map((roof) => roof.tflops);
  const slopes = roofs.filter((roof) => roof.gbs);
  const ridges = flats.length ? slopes.map((roof) => (Math.max(...flats) * 1e3) / roof.gbs) : [];
  const rates = rows.map((row) => row.tflops);
  const lowest = slopes.map((roof) => rateUnder(roof, Math.min(...xs)));
  const room = wide ? 40 : 4; // for names, which stand to the right of their points
  const range = {
    x: [Math.min(1, ...xs, ...ridges) / 3, Math.max(room * Math.max(...xs), ...ridges.map((v) => 6 * v))],
    y: [Math.min(...rates, ...lowest) / 3, Math.max(...rates, ...flats) * 2],
  };
  return { range, x: logarithmic(...range.x, box.left, box.right), y: logarithmic(...range.y, box.bottom, box.top) };
}

function drawRoofs(chart, roofs, x, y, range, box, wide) {
  const slopes = roofs.filter((roof) => roof.gbs).sort((a, b) => a.gbs - b.gbs);
  const flats = roofs.filter((roof) => roof.tflops).sort((a, b) => b.tflops - a.tflops);
  const highest = flats.length ? flats[0].tflops : null;
  slopes.forEach((roof, i) => {
    const start = Math.max(range.x[0], (range.y[0] * 1e3) / roof.gbs);
    const end = highest ? (highest * 1e3) / roof.gbs : range.x[1];
    const ends = [x(start), y(rateUnder(roof, start)), x(end), y(rateUnder(roof, end))];
    chart.append(line(...ends, i ? "roof dashed" : "roof"));
    if (wide) nameSlope(chart, roof, ends, i === 0);
  });
  const steepest = slopes.length ? slopes[slopes.length - 1].gbs : null;
  flats.forEach((roof, i) => {
    const start = steepest ? (roof.tflops * 1e3) / steepest : range.x[0];
    chart.append(line(x(start), y(roof.tflops), box.right, y(roof.tflops), i ? "roof dashed" : "roof"));
    // Above its line, at the right edge: the names of points stop before it.
    const at = { "text-anchor": "end", class: "halo" };
    if (wide) chart.append(text(box.right, y(roof.tflops) - 5, roofName(roof), at));
  });
}

// Along its line: the lowest under it, beyond the points that it bounds, the others above theirs.
function nameSlope(chart, roof, [x1, y1, x2, y2], lowest) {
  const share = lowest ? 0.72 : 0.5;
  const [px, py] = [x1 + (x2 - x1) * share, y1 + (y2 - y1) * share];
  const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  const transform = `translate(${px},${py}) rotate(${angle})`;
  chart.append(text(0, lowest ? 15 : -6, roofName(roof), { "text-anchor": "middle", transform, class: "halo" }));
}

// The climb of each level of one operation, in the order of the table. Peers are no steps of each other.
function drawClimbs(chart, rows, x, y) {
  const look = looks(rows);
  const levels = [...groupBy(rows, (row) => row.level)];
  return levels.flatMap(([level, climb], i) => {
    const px = x(climb[0].intensity) + ASIDE * (i - (levels.length - 1) / 2);
    const series = wear(svg("g", { class: "series" }), { ...look.get(climb[climb.length - 1].backend), strength: 100 });
    if (level !== "peer") {
      series.append(svg("polyline", { class: "line", points: climb.map((row) => `${px},${y(row.tflops)}`).join(" ") }));
    }
    chart.append(series);
    return climb.map((row) => {
      const point = { x: px, y: y(row.tflops), row, look: look.get(row.backend) };
      addPoint(chart, series, point, wear(marker(point.look, point.x, point.y), point.look));
      return point;
    });
  });
}

function fastestPoint(points, op) {
  return points.filter((point) => point.row.op === op).sort((a, b) => a.row.us - b.row.us)[0];
}

// Every point of one operation; of several, the fastest of each.
function namePoints(points, single, box) {
  for (const near of groupBy(points, (point) => point.row.bytes_bound).values()) {
    const x = Math.max(...near.map((point) => point.x)) + 34;
    const pile = single ? near : unique(near.map((point) => point.row.op)).map((op) => fastestPoint(near, op));
    pile.sort((a, b) => b.y - a.y);
    // From the highest point downward, so that no name comes to stand on the roof.
    const highest = Math.min(...pile.map((point) => point.y)) + 6;
    const heights = apart(pile.map((point) => -point.y), 15, -box.bottom, -highest);
    pile.forEach((point, i) => {
      const name = single ? named(point.row) : `${point.row.op} ${named(point.row)}`;
      point.series.append(
        wear(svg("path", { class: "leader", d: `M${point.x + 6},${point.y}L${x - 4},${-heights[i]}` }), point.look),
        text(x, -heights[i] + 4, name, { class: "halo" }),
      );
    });
  }
}

// A marker means another step in each operation: here the hue and dash of the level speak, and the details name it.
function levelsLegend(rows) {
  const levels = unique(rows.map((row) => row.level)).map((level) => ({ level, backend: level }));
  return legend(levels, looks(levels));
}
