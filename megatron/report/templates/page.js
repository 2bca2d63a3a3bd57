"use strict";
// Decompresses plotly.js, then draws the figures. Text and grid have the colours of the page's theme.
(async function () {
  const read = (id) => document.getElementById(id).textContent;
  const payload = JSON.parse(read("figures"));
  const coarse = window.matchMedia("(pointer: coarse), (max-width: 600px)").matches;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const packed = Uint8Array.from(atob(read("plotly")), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const template = structuredClone(payload.template);
    template.layout.font.color = colour("ink");
    template.layout.font.family = getComputedStyle(document.body).fontFamily;
    template.layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("ink") };
    template.layout.hoverlabel = { bgcolor: colour("paper"), font: { color: colour("ink") } };
    for (const axis of ["xaxis", "yaxis"]) template.layout[axis].gridcolor = colour("grid");
    return { ...layout, template, autosize: true, dragmode: coarse ? false : "zoom", uirevision: "keep" };
  }

  function draw(figure) {
    const buttons = [["toImage", "resetScale2d"]];
    const settings = { responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover" };
    const id = `plot-${figure.key}`;
    return Plotly.react(id, figure.data, themed(figure.layout), { ...settings, modeBarButtons: buttons });
  }

  // Explicit ticks cover the whole figure. A zoomed range may contain none, so plotly then chooses ticks.
  function watchZoom(figure) {
    const box = document.getElementById(`plot-${figure.key}`);
    box.on("plotly_relayout", (change) => {
      const update = {};
      for (const [axis, given] of Object.entries(figure.layout)) {
        if (!/^[xy]axis/.test(axis) || !given.tickvals) continue;
        if (`${axis}.range[0]` in change) update[`${axis}.tickmode`] = "auto";
        if (`${axis}.autorange` in change || `${axis}.range` in change) update[`${axis}.tickmode`] = "array";
      }
      if (Object.keys(update).length) Plotly.relayout(box, update);
    });
  }

  const drawAll = () => Promise.all(payload.figures.map(draw));
  await drawAll();
  payload.figures.forEach(watchZoom);
  document.documentElement.dataset.drawn = payload.figures.length;
  dark.addEventListener("change", drawAll);
  // a figure in closed details has no width
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", drawAll);
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
    drawAll();
  });
})();
