"use strict";
// Traces and layouts of Plotly for the data of the figures.
const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const runRows = [...document.querySelectorAll("tr[data-run]")];
const isTouch = matchMedia("(pointer: coarse)").matches;  // there, dragging scrolls the page

const runColors = [
  "#2f7fd0", "#e0822b", "#2a9d63", "#d1495b", "#8a63c9",
  "#1aa6b7", "#c75fae", "#9a7b2f", "#6d7b8a", "#7aa32c",
];
const blue = (alpha) => `rgba(47,127,208,${alpha})`;
const orange = (alpha) => `rgba(224,130,43,${alpha})`;
const maxNumbers = 20;  // classes, up to which the cells of the confusion matrix show numbers

// Any number of runs has different colors.
function runColor(run) {
  if (run < runColors.length) return runColors[run];
  const hue = Math.round((run * 137.508) % 360);
  return `hsl(${hue}, 60%, ${[42, 62, 52][run % 3]}%)`;
}

// Plotly takes <b> or <a href> in a text for markup.
function plainText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function shorten(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}

function curveTrace(curve, format) {
  const name = runRows[curve.run].cells[0].textContent.trim();
  const shown = plainText(name.length > 40 ? `…${name.slice(-40)}` : name);
  const label = { "": "training", raw: "raw weights", ema: "EMA weights" }[curve.weights];
  const trace = {
    type: "scatter",
    mode: "lines",
    meta: curve.run,
    name: `${shown}, ${label}`,
    x: curve.x,
    y: curve.y,
    hovertemplate: `<b>%{y:${format}}</b><br>step %{x:,}`,
    line: { color: runColor(curve.run), width: 1.2 },
  };
  if (curve.size > 1) trace.hovertemplate += `<br>mean of ${curve.size} values up to this step`;
  if (curve.waiting) {
    trace.customdata = curve.waiting;
    trace.hovertemplate += "<br>waiting for data %{customdata:.1f} %";
  }
  if (curve.epochs) {
    trace.customdata = curve.epochs.map((epoch) => (epoch === null ? "–" : epoch + 1));
    trace.hovertemplate += "<br>epoch %{customdata}";
    trace.mode = "lines+markers";
    trace.marker = { size: 4 };
    trace.line.width = 1.8;
    trace.line.dash = curve.weights === "ema" ? "dash" : "solid";
  }
  return trace;
}

function curveFigure({ curves, format, steps, resumed }) {
  const margin = Math.max(0.02 * (steps[1] - steps[0]), 0.5);
  const shapes = resumed.map(([run, step]) => ({
    type: "line", name: String(run), x0: step, x1: step, y0: 0, y1: 1, yref: "paper",
    line: { color: runColor(run), width: 1.5, dash: "dot" },
  }));
  const xaxis = { title: { text: "step" }, range: [steps[0] - margin, steps[1] + margin] };
  return { data: curves.map((curve) => curveTrace(curve, format)), layout: { xaxis, shapes } };
}

// A heatmap of the cells with counts for which isShown(row, column) is true.
function heatmap(names, counts, isShown, colorOf, highest, color, unit) {
  const map = (value, empty) => counts.map((row, i) => row.map((count, j) => (
    count && isShown(i, j) ? value(count, i) : empty)));
  return {
    type: "heatmap",
    x: names,
    y: names,
    z: map(colorOf, null),
    text: map(String, ""),
    texttemplate: names.length <= maxNumbers ? "%{text}" : "",
    colorscale: [[0, color(0.12)], [1, color(0.85)]],
    zmin: 0,
    zmax: highest || 1,
    showscale: false,
    hoverongaps: false,
    xgap: 1,
    ygap: 1,
    hovertemplate: `true: %{y}<br>predicted: %{x}<br><b>%{text}</b> ${unit}<extra></extra>`,
  };
}

function matrixFigure({ labels, counts }) {
  const names = labels.map(plainText);
  const totals = counts.map((row) => row.reduce((sum, count) => sum + count, 0));
  const share = (count, i) => count / totals[i];
  const mistakes = counts.flatMap((row, i) => (
    row.filter((_, j) => i !== j).map((count) => share(count, i) || 0)));
  const unit = "images, %{z:.1%} of the true class";
  const data = [
    heatmap(names, counts, (i, j) => i === j, share, 1, blue, unit),
    heatmap(names, counts, (i, j) => i !== j, share, Math.max(...mistakes), orange, unit),
  ];
  const axis = {
    type: "category",
    tickvals: names,
    ticktext: labels.map((label) => plainText(shorten(label, 16))),
    tickfont: { size: names.length <= maxNumbers ? 11 : 9 },
    showgrid: false,
  };
  const isLong = labels.some((label) => label.length > 2);
  const xaxis = { ...axis, tickangle: isLong ? -90 : 0 };
  const yaxis = { ...axis, autorange: "reversed" };
  return { data, layout: { xaxis, yaxis } };
}

function bars(bins, name, values, color, format) {
  return {
    type: "bar",
    name,
    x: bins.map((bin) => (bin.low + bin.high) / 2),
    y: values,
    width: bins.map((bin) => 0.94 * (bin.high - bin.low)),
    marker: { color: color(0.75) },
    customdata: bins.map((bin) => `${bin.low.toFixed(3)} to ${bin.high.toFixed(3)}`),
    hovertemplate: `confidence %{customdata}<br><b>%{y:${format}}</b>`,
  };
}

const confidenceAxis = { title: { text: "confidence" }, range: [0, 1] };

function reliabilityFigure({ bins }) {
  const means = {
    type: "scatter",
    name: "mean of a bin",
    mode: "markers",
    x: bins.map((bin) => bin.confidence),
    y: bins.map((bin) => bin.accuracy_pct),
    customdata: bins.map((bin) => bin.images),
    marker: { color: orange(1), size: 8 },
    cliponaxis: false,
    hovertemplate: "confidence %{x:.4f}<br><b>accuracy %{y:.2f} %</b><br>%{customdata:,} images",
  };
  const diagonal = {
    type: "line", x0: 0, y0: 0, x1: 1, y1: 100, line: { color: "gray", width: 1.5, dash: "dash" },
  };
  const yaxis = { title: { text: "accuracy, %" }, range: [0, 100] };
  const accuracies = bins.map((bin) => bin.accuracy_pct);
  return {
    data: [bars(bins, "accuracy, %", accuracies, blue, ".2f"), means],
    layout: { xaxis: confidenceAxis, yaxis, shapes: [diagonal] },
  };
}

function histogramFigure({ bins }) {
  const correct = bins.map((bin) => Math.round((bin.images * bin.accuracy_pct) / 100));
  const wrong = bins.map((bin, i) => bin.images - correct[i]);
  return {
    data: [
      bars(bins, "correct", correct, blue, ","),
      bars(bins, "wrong", wrong, orange, ","),
    ],
    layout: { xaxis: confidenceAxis, yaxis: { title: { text: "images" } }, barmode: "stack" },
  };
}

const baseAxis = {
  automargin: true,
  zeroline: false,
  fixedrange: isTouch,
  ticks: "outside",
  ticklen: 4,
  tickcolor: "rgba(0,0,0,0)",
};
const baseLayout = {
  autosize: true,
  margin: { l: 10, r: 14, t: 12, b: 10 },
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, sans-serif", size: 12 },
  showlegend: false,
  hovermode: "closest",
  hoverlabel: { namelength: -1, align: "left" },
  dragmode: isTouch ? false : "zoom",
};
const kinds = {
  curves: curveFigure,
  matrix: matrixFigure,
  reliability: reliabilityFigure,
  histogram: histogramFigure,
};

function drawFigure(plot) {
  const { data, layout } = kinds[plot.dataset.kind](figures[plot.dataset.figure]);
  const whole = {
    ...baseLayout,
    ...layout,
    xaxis: { ...baseAxis, ...layout.xaxis },
    yaxis: { ...baseAxis, ...layout.yaxis },
  };
  plot.shapes = layout.shapes;
  return Plotly.newPlot(plot, data, whole, { responsive: true, displayModeBar: false });
}

// Figures do not follow the width of paper, which is about 700 px.
addEventListener("beforeprint", () => {
  for (const plot of plots) {
    const [width, height] = plot.dataset.kind === "matrix" ? [660, 560] : [320, 220];
    Plotly.relayout(plot, { autosize: false, width, height });
  }
});
addEventListener("afterprint", () => {
  for (const plot of plots) Plotly.relayout(plot, { autosize: true, width: null, height: null });
});
