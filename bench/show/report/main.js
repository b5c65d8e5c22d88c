// Switches, sections and the moments at which they are drawn.

const SWITCHES = { gpu: "machine", op: "operation", dtype: "dtype", pass: "pass", shape: "shape", scale: "scale" };
const PRINT_WIDTH = 1000;

const SECTIONS = {
  rates: chartsOf("rates"),
  roofline: chartsOf("roofline"),
  climb: chartsOf("climb"),
  peers: drawPeers,
  costs: drawCosts,
  unmeasured: drawUnmeasured,
  rows: drawRows,
  environment: drawEnvironment,
};

function render(width = byId("main").clientWidth) {
  const view = currentView();
  closeDetails();
  palette.clear();
  drawSwitches(view);
  const op = view.op === ALL ? "all operations" : view.op;
  byId("view").textContent = [op, view.pass, view.dtype, view.gpu].join(" · ");
  for (const [id, draw] of Object.entries(SECTIONS)) {
    byId(id).querySelector(".body").replaceChildren(...draw(view, width));
  }
  drawCharts(document.querySelectorAll("#main .chart"));
}

// Updated in place: a switch keeps the focus while it is used.
function drawSwitches(view) {
  for (const [name, label] of Object.entries(SWITCHES)) {
    const { values, value } = view.choices[name];
    let select = byId(`switch-${name}`);
    if (!select) {
      select = el("select", { id: `switch-${name}`, onchange: () => turn(name, select.value) });
      byId("switches").append(el("label", {}, label, select));
    }
    const options = values.map((v) => el("option", { value: v }, v === ALL && name === "op" ? "all operations" : v));
    select.replaceChildren(...options);
    select.value = value ?? "";
    select.parentElement.hidden = values.length < 2;
  }
}

function turn(name, value) {
  change({ [name]: value, ...(name === "op" ? { shape: null } : {}) });
  render();
}

function startTheme() {
  const button = byId("theme");
  const themes = [["as the system", "light dark"], ["light", "light"], ["dark", "dark"]];
  let at = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    at = (at + 1) % themes.length;
    document.documentElement.style.colorScheme = themes[at][1];
    button.textContent = `theme: ${themes[at][0]}`;
    if (DATA.rows.length) render();
  });
}

// The fragment holds the view, so links to sections scroll without touching it.
function startSections() {
  for (const section of document.querySelectorAll("main section")) {
    const jump = (event) => {
      event.preventDefault();
      section.scrollIntoView();
    };
    const title = section.querySelector("h2").textContent;
    byId("sections").append(el("a", { href: `#${section.id}`, onclick: jump }, title));
  }
}

function followWidth() {
  let drawn = byId("main").clientWidth;
  addEventListener("resize", () => {
    if (byId("main").clientWidth === drawn) return;
    drawn = byId("main").clientWidth;
    render();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render());
  // Charts hold the colours of the moment: paper is light.
  const root = document.documentElement.style;
  let theme = "";
  addEventListener("beforeprint", () => {
    theme = root.colorScheme;
    root.colorScheme = "light";
    render(PRINT_WIDTH);
    document.querySelectorAll("#main .chart").forEach(drawChart);
  });
  addEventListener("afterprint", () => {
    root.colorScheme = theme;
    render();
  });
}

function start() {
  byId("caption").textContent = DATA.caption;
  const machines = unique(DATA.rows.map((row) => row.gpu));
  byId("summary").textContent = DATA.rows.length
    ? `${DATA.rows.length} rows from ${machines.join(", ")}. A point shows its interval on hover and its whole row on a click; arrow keys move from point to point.`
    : "There are no rows yet: python -m bench measures and writes them.";
  startTheme();
  if (!DATA.rows.length) {
    byId("main").hidden = true;
    return;
  }
  byId("switches").hidden = false;
  startDetails();
  startSections();
  followWidth();
  addEventListener("hashchange", () => render());
  render();
}

// The library and the data are compressed: together they are four times as large.
async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("packed").textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

unpacked()
  .then(({ library, data }) => {
    document.head.append(el("script", {}, library)); // the page's policy lists its hash
    Object.assign(DATA, data);
    start();
    document.documentElement.dataset.ready = "";
  })
  .catch((error) => {
    byId("summary").textContent = `This browser cannot show the report: ${error}`;
    throw error;
  });
