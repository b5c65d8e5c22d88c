// The whole row behind a point: while the pointer or the focus is on it; a click, tap or Enter pins it.

const details = byId("details");
const NARROW = 640;

function showDetails(row, at) {
  const entries = FIELDS.map(([name, show]) => [name, show(row)]).filter(
    ([, value]) => value !== null && value !== undefined && value !== false && value !== "",
  );
  details.replaceChildren(
    el("h3", {}, `${row.op} ${row.backend}`),
    el("dl", {}, entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])),
  );
  details.hidden = false;
  placeDetails(at.getBoundingClientRect());
}

// Beside the point, on the side that has room, within the window.
function placeDetails(point) {
  const { width, height } = details.getBoundingClientRect();
  const right = point.right + 14;
  const left = right + width > innerWidth ? point.left - 14 - width : right;
  details.style.left = `${Math.max(8, left)}px`;
  details.style.top = `${Math.min(Math.max(8, point.top - height / 2), Math.max(8, innerHeight - height - 8))}px`;
}

function pinDetails() {
  if (details.classList.contains("pinned")) return;
  details.classList.add("pinned");
  details.append(el("button", { type: "button", "aria-label": "Close", onclick: closeDetails }, "×"));
}

function closeDetails() {
  details.classList.remove("pinned");
  details.hidden = true;
}

function leaveDetails() {
  if (!details.classList.contains("pinned")) details.hidden = true;
}

function startDetails() {
  document.addEventListener("keydown", (event) => event.key === "Escape" && closeDetails());
  document.addEventListener("pointerdown", (event) => {
    if (!details.contains(event.target) && !event.target.closest(".point")) closeDetails();
  });
}
