// The roofline: least intensity against rate, both logarithmic, under what the machine was measured to allow.

const ASIDE = 9; // pixels between the levels of one operation, whose lines would lie on each other

function drawRoofline(view, width) {
  const rows = view.rows.filter((row) => row.us != null && row.intensity && row.tflops && row.shape === view.shapeOf(row.op));
  if (!rows.length) return [nothing("Nothing has a time here.")];
  const roofs = DATA.roofs.filter((roof) => roof.gpu === view.gpu && roof.dtype === view.dtype);
  const wide = width > NARROW;
  const box = { left: 52, right: width - 10, top: 26, bottom: 440 };
  const { x, y, range } = rooflineScales(rows, roofs, box, wide);
  const title = view.ops.map((op) => `${op} ${view.shapeOf(op)}`).join(" · ");
  const chart = newChart(width, 490, `Roofline of ${title}`);
  yAxis(chart, y, logTicks(...range.y), box.left, box.right, "TFLOP/s of the least operations");
  for (const tick of logTicks(...range.x)) {
    chart.append(line(x(tick), box.top, x(tick), box.bottom, "grid"));
    chart.append(text(x(tick), box.bottom + 16, three(tick), { "text-anchor": "middle", class: "soft" }));
  }
  chart.append(text((box.left + box.right) / 2, box.bottom + 36, "least operations per least byte", { "text-anchor": "middle", class: "soft" }));
  drawRoofs(chart, roofs, x, y, range, box);
  const points = view.ops.flatMap((op) => drawClimbs(chart, rows.filter((row) => row.op === op), x, y));
  const named = view.ops.length === 1 ? points : view.ops.map((op) => fastestPoint(points, op)).filter(Boolean);
  if (wide) namePoints(chart, named, view.ops.length > 1, box);
  const keys = view.ops.length > 1 ? levelsLegend(rows) : wide ? [] : legend(rows, looks(rows));
  return [figure(`${title}, ${view.pass}, ${view.dtype}`, chart, keys)];
}

const rateUnder = (roof, intensity) => (roof.tflops ?? (roof.gbs * intensity) / 1e3);

function rooflineScales(rows, roofs, box, wide) {
  const xs = rows.map((row) => row.intensity);
  const flats = roofs.filter((roof) => roof.tflops).map((roof) => roof.tflops);
  const slopes = roofs.filter((roof) => roof.gbs);
  const ridges = flats.length ? slopes.map((roof) => (Math.max(...flats) * 1e3) / roof.gbs) : [];
  const rates = rows.map((row) => row.tflops);
  const range = {
    // Names stand to the right of their points.
    x: [Math.min(1, ...xs, ...ridges) / 3, Math.max(...xs.map((v) => v * (wide ? 40 : 4)), ...ridges.map((v) => v * 6))],
    y: [Math.min(...rates, ...slopes.map((roof) => rateUnder(roof, Math.min(...xs)))) / 3, Math.max(...rates, ...flats) * 2],
  };
  return { range, x: logarithmic(...range.x, box.left, box.right), y: logarithmic(...range.y, box.bottom, box.top) };
}

function drawRoofs(chart, roofs, x, y, range, box) {
  const slopes = roofs.filter((roof) => roof.gbs).sort((a, b) => a.gbs - b.gbs);
  const flats = roofs.filter((roof) => roof.tflops).sort((a, b) => b.tflops - a.tflops);
  const highest = flats.length ? flats[0].tflops : null;
  slopes.forEach((roof, i) => {
    const start = Math.max(range.x[0], (range.y[0] * 1e3) / roof.gbs);
    const end = highest ? (highest * 1e3) / roof.gbs : range.x[1];
    const ends = [x(start), y(rateUnder(roof, start)), x(end), y(rateUnder(roof, end))];
    chart.append(line(...ends, i ? "roof dashed" : "roof"));
    nameSlope(chart, roof, ends, i === 0);
  });
  const steepest = slopes.length ? slopes[slopes.length - 1].gbs : null;
  flats.forEach((roof, i) => {
    const start = steepest ? (roof.tflops * 1e3) / steepest : range.x[0];
    chart.append(line(x(start), y(roof.tflops), box.right, y(roof.tflops), i ? "roof dashed" : "roof"));
    // Above its line, at the right edge: the names of points stop before it.
    const name = `${roof.name}: ${three(roof.tflops)} TFLOP/s`;
    chart.append(text(box.right, y(roof.tflops) - 5, name, { "text-anchor": "end", class: "halo" }));
  });
}

// Along its line: the lowest under it, beyond the points that it bounds, the others above theirs.
function nameSlope(chart, roof, [x1, y1, x2, y2], lowest) {
  const share = lowest ? 0.72 : 0.5;
  const [px, py] = [x1 + (x2 - x1) * share, y1 + (y2 - y1) * share];
  const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  const transform = `translate(${px},${py}) rotate(${angle})`;
  const name = `${roof.name}: ${three(roof.gbs)} GB/s`;
  chart.append(text(0, lowest ? 15 : -6, name, { "text-anchor": "middle", transform, class: "halo" }));
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

function namePoints(chart, points, withOp, box) {
  for (const pile of groupBy(points, (point) => point.row.bytes_bound).values()) {
    pile.sort((a, b) => b.y - a.y);
    const x = Math.max(...pile.map((point) => point.x)) + 34;
    // From the highest point downward, so that no name comes to stand on the roof.
    const highest = Math.min(...pile.map((point) => point.y)) + 6;
    const heights = apart(pile.map((point) => -point.y), 15, -box.bottom, -highest);
    pile.forEach((point, i) => {
      const name = withOp ? `${point.row.op} ${named(point.row)}` : named(point.row);
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
