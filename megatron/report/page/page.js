"use strict";
// Draws the figures. Colours in their JSON are names ("@ink", "@size0/0.2") of the theme's palette.
(function () {
  const payload = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const hidden = {};
  let theme = dark.matches ? "dark" : "light";
  let printWidth = null; // px; in print the width of a figure's box is not available, so it is fixed

  function colour(name) {
    const [key, alpha] = name.slice(1).split("/");
    const hex = payload.palette[theme][key];
    if (!alpha) return hex;
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  function resolveColours(part) {
    if (typeof part === "string") return part[0] === "@" ? colour(part) : part;
    if (Array.isArray(part)) return typeof part[0] === "number" ? part : part.map(resolveColours);
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, resolveColours(value)]));
  }

  function axis(given) {
    return {
      gridcolor: colour("@grid"), linecolor: colour("@muted"), tickcolor: colour("@muted"), zeroline: false,
      showline: true, ticks: "outside", ticklen: 4, automargin: true, exponentformat: "B", ...given,
      title: { standoff: 8, ...given.title },
    };
  }

  function layout(figure) {
    const given = resolveColours(figure.layout);
    const axes = Object.keys(given).filter((key) => /^[xy]axis/.test(key));
    return {
      ...given, ...Object.fromEntries(axes.map((key) => [key, axis(given[key])])),
      height: figure.height_px * (printWidth ? 0.72 : 1), // two figures to a sheet of paper
      autosize: printWidth === null, width: printWidth ?? undefined, showlegend: false,
      hovermode: "closest", uirevision: "keep the zoom", dragmode: coarse ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("@muted"), activecolor: colour("@ink") },
      margin: { l: 8, r: 16, t: 26, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("@ink") },
      hoverlabel: { bgcolor: colour("@paper"), bordercolor: colour("@muted"), align: "left",
        font: { color: colour("@ink") } },
    };
  }

  function draw(figure) {
    const off = hidden[figure.key];
    const data = figure.data.map((trace) => ({
      ...resolveColours(trace), visible: !(trace.meta || []).some((key) => off.has(key)),
    }));
    const settings = {
      responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover",
      modeBarButtons: [["toImage", "resetScale2d"]],
    };
    return Plotly.react(`plot-${figure.key}`, data, layout(figure), settings);
  }

  // Explicit ticks cover the whole figure. A zoomed range may contain none, so plotly then chooses ticks.
  function updateTicksOnZoom(figure) {
    const box = document.getElementById(`plot-${figure.key}`);
    box.on("plotly_relayout", (change) => {
      const update = {};
      for (const [key, given] of Object.entries(figure.layout)) {
        if (!/^[xy]axis/.test(key) || !given.tickvals) continue;
        if (`${key}.range[0]` in change) update[`${key}.tickmode`] = "auto";
        if (`${key}.autorange` in change || `${key}.range` in change) update[`${key}.tickmode`] = "array";
      }
      if (Object.keys(update).length) Plotly.relayout(box, update);
    });
  }

  function connectChips(figure) {
    for (const chip of document.querySelectorAll(`#figure-${figure.key} .chips button`)) {
      chip.addEventListener("click", () => {
        const off = hidden[figure.key];
        const shown = off.delete(chip.dataset.key) || !off.add(chip.dataset.key);
        chip.setAttribute("aria-pressed", String(shown));
        draw(figure);
      });
    }
  }

  function drawAll(as, width = null) {
    theme = as;
    printWidth = width;
    return Promise.all(payload.figures.map(draw));
  }

  for (const figure of payload.figures) hidden[figure.key] = new Set();
  drawAll(theme).then(() => {
    payload.figures.forEach(updateTicksOnZoom);
    payload.figures.forEach(connectChips);
    document.documentElement.dataset.drawn = payload.figures.length;
  });
  dark.addEventListener("change", () => drawAll(dark.matches ? "dark" : "light"));
  window.addEventListener("beforeprint", () => drawAll("light", 640));
  window.addEventListener("afterprint", () => drawAll(dark.matches ? "dark" : "light"));
})();
