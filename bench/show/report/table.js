// Tables that sort by any column; the order is part of the address. Cells without a value stay last either way.
//
// A column: { key, label, value: row => what sorts, text: row => what shows, number, note, meter: row => share of one }

function sortable(id, columns, rows, label) {
  const head = el("tr", {});
  const body = el("tbody", {});
  const name = `sort-${id}`;
  const draw = () => {
    const order = fragment().get(name) || "";
    const key = order.replace(/^-/, "");
    const column = columns.find((c) => c.key === key);
    const lines = column ? sorted(rows, column, order.startsWith("-")) : rows;
    body.replaceChildren(...lines.map((row) => el("tr", {}, columns.map((c) => cell(c, row)))));
    for (const th of head.children) {
      const direction = th.dataset.key !== key ? "none" : order.startsWith("-") ? "descending" : "ascending";
      th.setAttribute("aria-sort", direction);
    }
  };
  const turn = (key) => {
    const order = fragment().get(name);
    // Up, down, and back to the order of the climb.
    change({ [name]: order === key ? `-${key}` : order === `-${key}` ? null : key });
    draw();
  };
  head.append(
    ...columns.map((c) =>
      el(
        "th",
        { scope: "col", class: c.number && "number", "data-key": c.key },
        el("button", { type: "button", onclick: () => turn(c.key) }, c.label),
      ),
    ),
  );
  draw();
  return scrolling(label, el("thead", {}, head), body);
}

const scrolling = (label, ...parts) =>
  el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, el("table", {}, ...parts));

function sorted(rows, column, descending) {
  const missing = (value) => value === null || value === undefined || value === "";
  return [...rows].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return descending ? -order : order;
  });
}

function cell(column, row) {
  const value = column.text ? column.text(row) : column.value(row);
  const kind = [column.number && "number", column.note && "note", column.mark?.(row)].filter(Boolean).join(" ");
  const td = el("td", { class: kind || null }, value === null || value === undefined ? "" : value);
  const share = column.meter?.(row);
  if (share != null) {
    const meter = el("span", { class: share > 1 ? "meter over" : "meter" });
    meter.style.width = `${Math.min(100, 100 * share)}%`;
    td.append(meter);
  }
  return td;
}
