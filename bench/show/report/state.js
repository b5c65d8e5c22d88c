// What is shown, kept in the address's fragment, so that a view can be shared by its address.

const DATA = {}; // filled by main.js
const ALL = "all";

const fragment = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");

function change(changes) {
  const parameters = fragment();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) parameters.delete(name);
    else parameters.set(name, value);
  }
  history.replaceState(null, "", `#${parameters}`);
}

// The choices that the rows leave, each narrowed by those before it; the first of each list is the default.
function choices(wanted) {
  const found = {};
  const pick = (name, values) => {
    found[name] = { values, value: values.includes(wanted.get(name)) ? wanted.get(name) : values[0] };
    return found[name].value;
  };
  const gpu = pick("gpu", unique(DATA.rows.map((row) => row.gpu)));
  const here = DATA.rows.filter((row) => row.gpu === gpu);
  const ops = unique(here.map((row) => row.op));
  const op = pick("op", ops.length > 1 ? [ALL, ...ops] : ops);
  const ofOp = here.filter((row) => op === ALL || row.op === op);
  const order = ["bfloat16", "float16", "float32"];
  const place = (dtype) => (order.includes(dtype) ? order.indexOf(dtype) : order.length);
  const dtype = pick("dtype", unique(ofOp.map((row) => row.dtype)).sort((a, b) => place(a) - place(b)));
  const pass = pick("pass", unique(ofOp.filter((row) => row.dtype === dtype).map((row) => row.pass)));
  const rows = ofOp.filter((row) => row.dtype === dtype && row.pass === pass);
  const headline = DATA.headlines.find(
    (h) => h.gpu === gpu && h.op === op && h.dtype === dtype && h.pass === pass,
  );
  const shapes = headline ? unique([headline.shape, ...rows.map((row) => row.shape)]) : [];
  pick("shape", shapes);
  pick("scale", ["as suits", "linear", "log"]);
  return { found, rows };
}

// One view: rows under the chosen machine, operation, dtype and pass, and the shape that stands for each operation.
function currentView() {
  const { found, rows } = choices(fragment());
  const value = Object.fromEntries(Object.entries(found).map(([name, choice]) => [name, choice.value]));
  const shapeOf = (op) =>
    op === value.op
      ? value.shape
      : DATA.headlines.find(
          (h) => h.gpu === value.gpu && h.op === op && h.dtype === value.dtype && h.pass === value.pass,
        ).shape;
  const ops = unique(rows.map((row) => row.op));
  return { ...value, rows, ops, shapeOf, choices: found };
}
