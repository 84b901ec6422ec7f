// Draws the charts of the page, follows light and dark mode, and filters dots. Nothing is loaded: Plotly is in the page.
(async () => {
  "use strict";
  const textOf = (id) => document.getElementById(id).textContent;
  const charts = JSON.parse(textOf("charts"));
  const places = [...document.querySelectorAll(".chart")];
  if (!("DecompressionStream" in window)) {
    places.forEach((place) => {
      place.style.height = "auto";
      place.textContent = "This browser is too old to draw the chart; tables have most of its numbers.";
    });
    document.documentElement.dataset.ready = "true";
    return;
  }
  const packed = Uint8Array.from(atob(textOf("plotly").trim()), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(plain).text();
  document.head.append(script);

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const narrow = () => window.innerWidth < 640;
  const merged = (axis) => ({ gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), ...axis });

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

  const settings = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  const shown = new Map(places.map((place) => [place.dataset.chart, charts[place.dataset.chart].data]));
  const draw = (place) =>
    Plotly.react(place, shown.get(place.dataset.chart), layoutOf(charts[place.dataset.chart]), settings);

  // Charts are drawn when they come near the window, so that the page is there at once.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "600px" });
  places.forEach((place) => seen.observe(place));
  const drawn = () => places.filter((place) => place.classList.contains("js-plotly-plot"));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn().forEach(draw));
  const printed = () => {
    document.documentElement.classList.add("paper"); // the charts take their colours from it
    places.forEach((place) => {
      seen.unobserve(place);
      draw(place);
      Plotly.relayout(place, { width: 680 });
    });
  };
  window.addEventListener("beforeprint", printed);
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("paper");
    places.forEach((place) => draw(place).then(() => Plotly.relayout(place, { width: null, autosize: true })));
  });

  for (const form of document.querySelectorAll(".filters")) {
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
      if (place.classList.contains("js-plotly-plot")) draw(place);
    };
    form.addEventListener("change", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(apply));
    apply();
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "selected";
      }
    });
  }
  document.documentElement.dataset.ready = "true";
})();
