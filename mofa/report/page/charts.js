// How charts of a report are drawn, in the reader's light or dark mode, and how their dots are filtered.
"use strict";
const drawing = (() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const narrow = () => window.innerWidth < 640;
  const merged = (axis) => ({ gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), ...axis });
  const settings = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  let charts = {}, places = [], shown = new Map();

  function layoutOf(chart) {
    const layout = { ...chart.layout };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: colour("--ink"), family: getComputedStyle(document.body).fontFamily, size: narrow() ? 11 : 12.5 };
    layout.margin = { l: 8, r: 16, t: 12, b: 40 };
    layout.xaxis = merged(layout.xaxis);
    layout.yaxis = merged(layout.yaxis);
    layout.hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") }, align: "left" };
    if (layout.showlegend !== false) {
      layout.legend = { orientation: "h", yanchor: "bottom", y: 1.02, xanchor: "left", x: 0, traceorder: "normal" };
    }
    if (layout.annotations) {
      layout.annotations = layout.annotations.map((note) => ({ arrowcolor: colour("--ink"), bgcolor: colour("--back"), ...note }));
    }
    return layout;
  }

  const draw = (place) =>
    Plotly.react(place, shown.get(place.dataset.chart), layoutOf(charts[place.dataset.chart]), settings);
  const isDrawn = (place) => place.classList.contains("js-plotly-plot");

  // Charts are drawn when they come near the window, so that the page is there at once.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "600px" });

  function filter(form) {
    const name = form.dataset.chart;
    const place = document.getElementById("chart-" + name);
    const all = charts[name].data;
    const count = (traces) => traces.reduce((sum, trace) => sum + trace.x.length, 0);
    const apply = () => {
      const wanted = [...form.querySelectorAll("select")].filter((choice) => choice.value !== "");
      const fits = (row) => wanted.every((choice) => row[Number(choice.dataset.column)] === choice.value);
      const filtered = all.map((trace) => {
        const rows = trace.customdata.flatMap((row, i) => (fits(row) ? [i] : []));
        const chosen = (values) => (Array.isArray(values) ? rows.map((i) => values[i]) : values);
        const marker = { ...trace.marker, size: chosen(trace.marker.size), symbol: chosen(trace.marker.symbol) };
        return { ...trace, marker, ...Object.fromEntries(["x", "y", "text", "customdata"].map((key) => [key, chosen(trace[key])])) };
      });
      shown.set(name, filtered);
      form.querySelector("output").textContent = count(filtered) + " of " + count(all) + " dots";
      if (isDrawn(place)) draw(place);
    };
    form.addEventListener("change", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(apply));
    apply();
  }

  // Draw the charts whose places stand in the page now, in place of those that stood there before.
  function show(newCharts) {
    places.forEach((place) => {
      seen.unobserve(place);
      if (isDrawn(place)) Plotly.purge(place);
    });
    charts = newCharts;
    places = [...document.querySelectorAll(".chart")];
    shown = new Map(places.map((place) => [place.dataset.chart, charts[place.dataset.chart].data]));
    places.forEach((place) => seen.observe(place));
    document.querySelectorAll(".filters").forEach(filter);
  }

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => places.filter(isDrawn).forEach(draw));
  window.addEventListener("beforeprint", () => {
    document.documentElement.classList.add("paper"); // the charts take their colours from it
    places.forEach((place) => {
      seen.unobserve(place);
      draw(place);
      Plotly.relayout(place, { width: 680 });
    });
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("paper");
    places.forEach((place) => draw(place).then(() => Plotly.relayout(place, { width: null, autosize: true })));
  });
  return { show };
})();
