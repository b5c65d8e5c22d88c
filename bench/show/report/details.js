// The whole row behind a point, after a click, a tap or Enter, until Escape, its button or a press elsewhere.

const details = byId("details");

function showDetails(row) {
  const entries = FIELDS.map(([name, show]) => [name, show(row)]).filter(
    ([, value]) => value !== null && value !== undefined && value !== false && value !== "",
  );
  details.replaceChildren(
    el("h3", {}, `${row.op} ${row.backend}`),
    el("button", { type: "button", "aria-label": "Close", onclick: closeDetails }, "×"),
    el("dl", {}, entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])),
  );
  details.hidden = false;
}

function closeDetails() {
  details.hidden = true;
}

function startDetails() {
  document.addEventListener("keydown", (event) => event.key === "Escape" && closeDetails());
  document.addEventListener("pointerdown", (event) => {
    if (!details.contains(event.target) && !event.target.closest(".chart")) closeDetails();
  });
}
