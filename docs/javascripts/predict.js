// Asks for the reader's own number before a prediction's fold opens. Without this script it is an ordinary <details>.
(() => {
  const off = (a, b) => {
    const factor = Math.max(a / b, b / a);
    return `${factor < 100 ? factor.toPrecision(3) : Math.round(factor)}×`;
  };

  function ask(fold, place) {
    const { unit, formula, measured } = fold.querySelector(".prediction").dataset;
    const summary = fold.querySelector("summary");
    const form = document.createElement("form");
    const id = `prediction-${place}`;
    form.className = "predict-form";
    form.innerHTML = `<label for="${id}"></label>
      <span class="predict-row"><input id="${id}" type="number" step="any" min="0" required autocomplete="off">
      <span>${unit}</span> <button class="md-button" type="submit">Compare</button></span>
      <output for="${id}"></output>`;
    form.querySelector("label").append(...summary.childNodes);
    summary.textContent = "The answer";
    fold.before(form);

    const input = form.querySelector("input");
    input.addEventListener("input", () => input.setCustomValidity(""));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const guess = input.valueAsNumber;
      if (!(guess > 0)) {
        input.setCustomValidity("Type a number above 0.");
        input.reportValidity();
        return;
      }
      form.querySelector("output").textContent =
        `You are off by ${off(guess, measured)} from the measurement, by ${off(guess, formula)} from the formula.`;
      fold.open = true;
    });
  }

  function askAll() {
    document.querySelectorAll("details.predict:not([data-asked])").forEach((fold, place) => {
      if (!fold.querySelector(".prediction")) return;
      fold.dataset.asked = "";
      ask(fold, place);
    });
  }

  // Material for MkDocs replaces pages without a load event, and tells of each here.
  if (window.document$) document$.subscribe(askAll);
  else document.addEventListener("DOMContentLoaded", askAll);
})();
