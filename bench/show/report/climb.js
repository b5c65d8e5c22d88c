// The climb: a bar for each step at one shape, with how many times as fast it is as the step before.

function drawClimb(view, width) {
  if (!view.ops.length) return [nothing("No rows.")];
  return view.ops.map((op) => {
    const rows = view.rows.filter((row) => row.op === op && row.shape === view.shapeOf(op));
    const title = `${op} ${view.shapeOf(op)}, ${view.pass}, ${view.dtype}`;
    const timed = rows.filter((row) => row.us != null);
    if (!timed.length) return figure(title, nothing("Nothing has a time."));
    const bytesBound = 2 * timed.filter((row) => row.bytes_bound).length >= timed.length;
    if (!timed.some((row) => hasRate(row, bytesBound))) return figure(title, nothing("Nothing has a rate."));
    return figure(title, climbOf(rows, view, width, title, bytesBound));
  });
}

function climbOf(rows, view, width, title, bytesBound) {
  const timed = rows.filter((row) => hasRate(row, bytesBound));
  const wide = width > NARROW;
  const step = wide ? 26 : 46;
  const box = { left: wide ? 170 : 8, right: width - (wide ? 350 : 12), top: 36 };
  box.bottom = box.top + step * rows.length;
  const chart = newChart(width, box.bottom + 14, `${title}: the climb`);
  const { x, low } = climbScale(chart, timed, view, box, bytesBound);
  const roof = timed.map((row) => ceilingRate(row, bytesBound)).find(Boolean);
  if (roof) chart.append(line(x(roof), box.top, x(roof), box.bottom, "roof dashed"));
  const look = looks(rows);
  rows.forEach((row, i) => {
    const top = box.top + step * i;
    const y = top + step / 2 + (wide ? 0 : 10);
    const above = wide ? y + 4 : y - 12; // where there is no room beside a bar, words stand above it
    if (i && row.level !== rows[i - 1].level) chart.append(line(0, top, width, top, "grid"));
    nameStep(chart, row, wide ? box.left - 8 : box.left, above, wide);
    if (!hasRate(row, bytesBound)) {
      chart.append(reason(row, box.left + 6, y + 4, width));
    } else {
      drawBar(chart, row, look.get(row.backend), x, x(low), y, bytesBound);
      chart.append(factors(row, wide ? box.right + 10 : box.right, above, wide, bytesBound));
    }
  });
  return chart;
}

// A climb of fifty times and more hides its first steps on a linear scale.
function climbScale(chart, rows, view, box, bytesBound) {
  const values = rows.map((row) => rateOf(row, bytesBound));
  const roofs = rows.map((row) => ceilingRate(row, bytesBound)).filter(Boolean);
  const high = Math.max(...values, ...roofs) * 1.04;
  const log = view.scale === "log" || (view.scale === "as suits" && high / Math.min(...values) > 50);
  const low = log ? 10 ** Math.floor(Math.log10(Math.min(...values) * 0.8)) : 0;
  const x = (log ? logarithmic : linear)(low, high, box.left, box.right);
  const ticks = log ? logTicks(low, high) : linearTicks(high, 5);
  for (const tick of ticks) {
    chart.append(line(x(tick), box.top, x(tick), box.bottom, "grid"));
    chart.append(text(x(tick), box.top - 6, three(tick), { "text-anchor": "middle", class: "soft" }));
  }
  const scale = log ? `${unitOf(bytesBound)}, logarithmic` : unitOf(bytesBound);
  chart.append(text(box.left, 12, scale, { class: "soft" }));
  return { x, low };
}

function nameStep(chart, row, x, y, wide) {
  chart.append(text(x, y, named(row), { "text-anchor": wide ? "end" : "start" }));
}

function reason(row, x, y, width) {
  const all = row.wrong ? `wrong: ${row.wrong}` : row.unsupported || (row.us == null ? "no time" : microseconds(row.us));
  const room = Math.floor((width - x) / 6.6) - 2; // characters
  const short = all.length > room ? `${all.slice(0, room - 1)}…` : all;
  return text(x, y, `— ${short}`, { class: row.wrong ? "wrong" : "soft" });
}

function drawBar(chart, row, look, x, start, y, bytesBound) {
  const series = wear(svg("g", { class: "series" }), look);
  const end = x(rateOf(row, bytesBound));
  const ends = spreadOf(row)?.map((us) => x(rateAt(row, us, bytesBound)));
  const mark = svg(
    "g",
    {},
    svg("rect", { class: "bar", x: start, y: y - 8, width: Math.max(1, end - start), height: 16 }),
    ends && svg("path", { class: "whisker", d: `M${ends[0]},${y - 4}v8m0,-4H${ends[1]}m0,-4v8` }),
  );
  const hit = svg("rect", { class: "hit", x: start, y: y - 10, width: Math.max(24, end - start), height: 20 });
  chart.append(series);
  addPoint(chart, series, { x: start, y, row }, mark, hit);
}

function factors(row, x, y, wide, bytesBound) {
  const parts = [rate(row, bytesBound)];
  if (row.gain != null) parts.push(`${times(row.gain)} step before`);
  if (row.speedup != null && wide) parts.push(`${times(row.speedup)} ${baselineOf([row.op])}`);
  return text(x, y, parts.join(" · "), { "text-anchor": wide ? "start" : "end", class: "halo" });
}
