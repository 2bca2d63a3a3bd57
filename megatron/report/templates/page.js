"use strict";
// Draws the figures. Colours in their JSON are names ("var(--ink)") of the theme's palette.
(function () {
  const payload = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const hidden = {};
  let theme = dark.matches ? "dark" : "light";
  let printWidth = null; // px; in print the width of a figure's box is not available, so it is fixed

  function resolveColours(part) {
    if (typeof part === "string") {
      const name = /^var\(--([\w-]+)\)$/.exec(part);
      return name ? payload.palette[theme][name[1]] ?? part : part;
    }
    if (Array.isArray(part)) return typeof part[0] === "number" ? part : part.map(resolveColours);
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, resolveColours(value)]));
  }

  function layout(figure) {
    const template = resolveColours(payload.template);
    template.layout.font.family = getComputedStyle(document.body).fontFamily;
    return {
      ...resolveColours(figure.layout), template,
      height: figure.layout.height * (printWidth ? 0.72 : 1), // two figures to a sheet of paper
      autosize: printWidth === null, width: printWidth ?? undefined,
      uirevision: "keep the zoom", dragmode: coarse ? false : "zoom",
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
