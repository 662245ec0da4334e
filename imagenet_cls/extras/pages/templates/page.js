"use strict";
// Tables that are sorted and filtered, and the table of runs as the legend of the curves.
const runRows = [...document.querySelectorAll("tr[data-run]")];

const curvesOf = (row) => document.querySelectorAll(`.run-${row.dataset.run}`);

// Show the curves of the rows that are pressed and not filtered out.
function showRuns() {
  for (const row of runRows) {
    const isOff = row.hidden || row.classList.contains("off");
    for (const curve of curvesOf(row)) curve.classList.toggle("off", isOff);
  }
}

function press(row, isOn) {
  row.classList.toggle("off", !isOn);
  row.querySelector("button").setAttribute("aria-pressed", isOn);
}

function connectRuns() {
  for (const row of runRows) {
    row.addEventListener("click", () => {
      press(row, row.classList.contains("off"));
      showRuns();
    });
    row.addEventListener("dblclick", () => {
      for (const other of runRows) press(other, other === row);
      showRuns();
    });
    row.addEventListener("mouseenter", () => {
      for (const curve of curvesOf(row)) curve.classList.add("strong");
    });
    row.addEventListener("mouseleave", () => {
      for (const curve of curvesOf(row)) curve.classList.remove("strong");
    });
  }
  document.getElementById("show-all")?.addEventListener("click", () => {
    for (const row of runRows) press(row, true);
    showRuns();
  });
}

// A number where the text is one; dashes are last in both directions.
function sortKey(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.sort ?? cell.textContent.trim();
  if (text === "–") return null;
  const number = Number(text.replaceAll(",", ""));
  return Number.isNaN(number) ? text : number;
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

function sortBy(table, heading) {
  const isNumber = heading.classList.contains("right");
  const first = isNumber ? "descending" : "ascending";
  const second = isNumber ? "ascending" : "descending";
  const order = heading.ariaSort === first ? second : first;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [sortKey(row, heading.cellIndex), row]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * compareKeys(a, b);
  });
  body.append(...keyed.map(([, row]) => row));
}

function connectTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const heading of table.tHead.rows[0].cells) {
      heading.addEventListener("click", () => sortBy(table, heading));
    }
  }
  for (const input of document.querySelectorAll(".filter")) {
    const table = input.closest(".card").querySelector("table");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      showRuns();
    });
  }
}

connectTables();
connectRuns();
