"use strict";
const dialog = document.getElementById("explanation");
const body = document.getElementById("explanation-body");
const buttons = [...document.querySelectorAll("[data-cell]")];

// The pieces of all explanations, gzipped: every piece is kept once, and a cell names those that it is made of.
let unpacked;
function pieces() {
  unpacked ??= (async () => {
    const text = document.getElementById("pieces").textContent;
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  })();
  return unpacked;
}

async function open(button) {
  const { cells, parts } = await pieces();
  document.getElementById("explanation-title").textContent = button.dataset.cell;
  body.innerHTML = cells[button.dataset.cell].map((index) => parts[index]).join("");
  dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", "#cell=" + encodeURIComponent(button.dataset.cell));
}

dialog.addEventListener("close", () => {
  body.replaceChildren();
  history.replaceState(null, "", location.pathname + location.search);
});
for (const button of buttons) button.addEventListener("click", () => open(button));
const linked = decodeURIComponent(location.hash.replace(/^#cell=/, ""));
const first = buttons.find((button) => button.dataset.cell === linked);
if (first) open(first);

const [byModel, byGpu, byBackend] = ["model", "gpu", "backend"].map((name) => document.getElementById("filter-" + name));
function filter() {
  const [model, gpu, backend] = [byModel, byGpu, byBackend].map((field) => field.value.trim().toLowerCase());
  for (const cell of document.querySelectorAll(".matrix [data-gpu]")) cell.hidden = !cell.dataset.gpu.toLowerCase().includes(gpu);
  let shown = 0;
  for (const row of document.querySelectorAll(".matrix tbody tr")) {
    row.hidden = !row.dataset.model.toLowerCase().includes(model);
    let found = false;
    for (const button of row.querySelectorAll("[data-cell]")) {
      const visible = !button.parentElement.hidden && (!backend || button.dataset.backends.toLowerCase().split(" ").includes(backend));
      button.hidden = !visible;
      found ||= visible;
      if (visible && !row.hidden) shown += 1;
    }
    if (backend && !found) row.hidden = true;
  }
  document.getElementById("shown").textContent = `${shown} of ${buttons.length} cells`;
}
for (const field of [byModel, byGpu, byBackend]) field.addEventListener("input", filter);
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
filter();
