// Tables, and the table of runs as the legend of the figures.

// The curves of all runs have the same steps, so zooming one zooms all.
function zoomTogether() {
  for (const plot of plots) {
    plot.on("plotly_relayout", (change) => {
      const range = change["xaxis.range[0]"] === undefined
        ? change["xaxis.range"]
        : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (!range && !change["xaxis.autorange"]) return;
      const update = range ? { "xaxis.range": range } : { "xaxis.autorange": true };
      for (const other of plots) {
        const current = other.layout.xaxis;
        const isSame = range
          ? range.every((end, i) => end === current.range[i])
          : current.autorange === true;
        if (!isSame) Plotly.relayout(other, update);
      }
    });
  }
}

// Show the curves of the rows that are pressed and not filtered out.
function showRuns() {
  const shown = new Set();
  for (const row of runRows) {
    if (!row.hidden && !row.classList.contains("off")) shown.add(row.dataset.run);
  }
  for (const plot of plots) {
    const visible = plot.data.map((trace) => shown.has(String(trace.meta)));
    const shapes = plot.shapes.filter((shape) => shown.has(shape.name));
    Plotly.update(plot, { visible }, { shapes });
  }
}

function press(row, isOn) {
  row.classList.toggle("off", !isOn);
  row.querySelector("button").setAttribute("aria-pressed", isOn);
}

// Make the curves of other runs pale; null for none.
function emphasize(run) {
  for (const plot of plots) {
    const opacity = plot.data.map((trace) => (run === null || trace.meta === run ? 1 : 0.15));
    if (opacity.length) Plotly.restyle(plot, { opacity });
  }
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
    if (runRows.length > 1 && !isTouch) {
      row.addEventListener("mouseenter", () => emphasize(Number(row.dataset.run)));
      row.addEventListener("mouseleave", () => emphasize(null));
    }
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
      if (runRows.length) showRuns();
    });
  }
}

connectTables();
for (const row of runRows) row.style.setProperty("--run", runColor(Number(row.dataset.run)));
Promise.all(plots.map(drawFigure)).then(() => {
  if (runRows.length) {
    connectRuns();
    zoomTogether();
  }
  document.body.dataset.ready = "";  // for tests
});
