// Unpacks Plotly, which is in the page, and draws its charts. Nothing is loaded.
(async () => {
  const textOf = (id) => document.getElementById(id).textContent;
  if (!("DecompressionStream" in window)) {
    document.querySelectorAll(".chart").forEach((place) => {
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
  drawing.show(JSON.parse(textOf("charts")));

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
