// Asks the server what the sliders say: closed forms at once, and behind them the report, searched and played out.
"use strict";
(async () => {
  const REST_MS = 500, POLL_MS = 300; // until sliders that rest are searched and played out; between two looks at that
  const at = (id) => document.getElementById(id);
  const first = await (await fetch("first")).json();
  let workload = first.start.workload, job = first.job;
  let gpus = first.start.gpus, memoryGb = first.start.memory_gb, chosen = { ...first.start.degrees }, anchor = {};
  for (const name of Object.keys(chosen)) if (chosen[name] === null) delete chosen[name];
  let isCoarse = false; // whether a coarse search said what is held
  let asking = false, askAgain = false, resting = 0, followed = 0, sliders = new Map();

  async function ask(path, body) {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  }

  function say(message) {
    at("error").hidden = !message;
    at("error").textContent = message || "";
  }

  function slider(place, name, words) {
    const label = document.createElement("label"), value = document.createElement("output"), input = document.createElement("input");
    input.type = "range";
    input.min = 0;
    input.id = "slider-" + name;
    input.setAttribute("aria-label", words);
    label.append(words + ": ", value, input);
    place.append(label);
    sliders.set(name, { label, input, value });
    return input;
  }

  // Numbers of GPUs: 1, 2, 4 ... in one node, then twice the nodes each time, and the one that is asked about.
  function gpuNumbers() {
    const numbers = new Set([gpus]), node = first.gpus_per_node;
    for (let n = 1; n < node; n *= 2) numbers.add(n);
    for (let n = node; n <= 32768; n *= 2) numbers.add(n);
    return [...numbers].sort((a, b) => a - b);
  }

  function showGpus() {
    const numbers = gpuNumbers(), { input, value } = sliders.get("gpus");
    input.max = numbers.length - 1;
    input.value = numbers.indexOf(gpus);
    value.textContent = gpus.toLocaleString("en");
    at("gpus-number").value = gpus;
  }

  function showMemory() {
    const { input, value } = sliders.get("memory");
    const most = Math.floor(first.capacity_gb);
    input.min = 1;
    input.max = most + 1; // the last place leaves the GPU its own
    input.value = memoryGb === null ? most + 1 : Math.round(memoryGb);
    value.textContent = memoryGb === null ? "all " + first.capacity_gb.toFixed(1) + " GB" : memoryGb + " GB";
  }

  // A degree's values, the first place of which lets it be searched; a value that is not among them stays to be refused.
  function valuesOf(name, choices) {
    const values = new Set(choices[name]);
    if (name in chosen) values.add(chosen[name]);
    return [null, ...[...values].sort((a, b) => a - b)];
  }

  let choices = Object.fromEntries(first.degrees.map((name) => [name, []])), plan = null;
  function showDegrees() {
    for (const name of first.degrees) {
      const { label, input, value } = sliders.get(name);
      const values = valuesOf(name, choices);
      input.max = values.length - 1;
      input.value = name in chosen ? values.indexOf(chosen[name]) : 0;
      const now = plan && name in plan ? " (" + plan[name] + ")" : "";
      value.textContent = name in chosen ? String(chosen[name]) : "search" + now;
      label.hidden = (name === "ep" || name === "etp") && !job.has_experts;
    }
  }

  function showJob() {
    at("made").textContent = "mofa " + first.version + ", on this machine alone";
    document.title = at("title").textContent = job.name + " on " + gpus.toLocaleString("en") + " x " + first.gpu;
    at("config-seq-len").value = at("config-seq-len").value || job.seq_len;
    at("config-global-batch").value = at("config-global-batch").value || job.global_batch;
  }

  const question = () => ({ workload, gpus, memory_gb: memoryGb, degrees: chosen, anchor });

  // One question at a time: what changes while one is answered is asked after it.
  async function changed() {
    showJob();
    showGpus();
    showMemory();
    showDegrees();
    followed += 1; // what is made for another question is not followed any more
    at("replayed").classList.add("old");
    at("whole").classList.add("old");
    clearTimeout(resting);
    if (asking) {
      askAgain = true;
      return;
    }
    asking = true;
    delete document.documentElement.dataset.answered;
    do {
      askAgain = false;
      at("at-once").textContent = Object.keys(anchor).length ? "asking" : "searching some strategies, by closed forms";
      try {
        showAnswer(await ask("answer", question()));
      } catch (error) {
        at("at-once").textContent = "";
        at("answer").replaceChildren();
        drawing.show({});
        say(error.message);
      }
    } while (askAgain);
    asking = false;
    document.documentElement.dataset.answered = "true";
    resting = setTimeout(searchBehind, REST_MS);
  }

  // Ask again with the degrees of the best of all strategies, which are there before that is played out.
  async function askWithBest(degrees) {
    if (asking) return;
    isCoarse = false;
    asking = true;
    delete document.documentElement.dataset.answered;
    anchor = Object.fromEntries(first.anchored.filter((name) => !(name in chosen)).map((name) => [name, degrees[name]]));
    const asked = followed;
    try {
      const answer = await ask("answer", question());
      if (asked === followed) showAnswer(answer);
    } catch (error) {
      say(error.message);
    }
    asking = false;
    if (askAgain) return changed();
    document.documentElement.dataset.answered = "true";
  }

  function showAnswer(answer) {
    say(answer.refused);
    choices = answer.choices;
    plan = answer.degrees || plan;
    anchor = Object.fromEntries(Object.entries(answer.anchor).filter(([name]) => !(name in chosen)));
    at("answer").innerHTML = answer.html; // of the report's own template, which escapes names
    const title = at("answer").querySelector("h2");
    if (title) title.textContent = "At once, by closed forms";
    drawing.show(answer.charts);
    const shown = Object.entries(anchor).filter(([name]) =>
      (name !== "ep" || job.has_experts) && (name !== "cp_kind" || (chosen.cp || anchor.cp) > 1));
    const kept = shown.map(([name, value]) => name + "=" + value).join(" ");
    isCoarse = isCoarse || answer.is_coarse;
    const coarse = isCoarse ? ", as a coarse search says; all strategies follow" : "";
    at("at-once").textContent = "Closed forms, in " + answer.elapsed_s.toFixed(2) + " s" + (kept ? "; held: " + kept + coarse : "") + ".";
    at("command").textContent = answer.command;
    showDegrees();
  }

  async function searchBehind() {
    followed += 1;
    const number = followed;
    try {
      const begun = await ask("report", question());
      while (number === followed) {
        const response = await fetch("report/" + begun.number);
        const state = await response.json();
        if (number !== followed) return;
        if (!response.ok) throw new Error(state.error);
        if (showState(begun.number, state)) return;
        await new Promise((done) => setTimeout(done, POLL_MS));
      }
    } catch (error) {
      if (number === followed) at("behind").textContent = error.message;
    }
  }

  // Say how far the report is; true once nothing more comes.
  function showState(number, state) {
    const passed = state.elapsed_s.toFixed(0) + " s";
    const far = state.total ? " " + state.done.toLocaleString("en") + " of " + state.total.toLocaleString("en") : "";
    const best = state.best ? "; " + state.best : "";
    if (state.phase === "finished") {
      at("behind").textContent = "Searched over all that is not chosen, and played out, in " + state.elapsed_s.toFixed(1) + " s.";
      at("replayed").innerHTML = state.summary.html; // of the report's own template, which escapes names
      for (const section of at("replayed").querySelectorAll("[id]")) section.removeAttribute("id");
      at("replayed").querySelector("h2").textContent = "Played out";
      at("replayed").hidden = at("whole").hidden = false;
      at("replayed").classList.remove("old");
      at("whole").classList.remove("old");
      at("alone").href = at("report").src = "report/" + number + "/report.html";
      plan = state.summary.degrees;
      anchor = Object.fromEntries(first.anchored.filter((name) => !(name in chosen)).map((name) => [name, plan[name]]));
      showDegrees();
      if (isCoarse) askWithBest(plan);
      document.documentElement.dataset.replayed = String(number);
      return true;
    }
    if (["refused", "failed", "stopped"].includes(state.phase)) {
      at("behind").textContent = "Behind it: " + (state.message || state.phase);
      return true;
    }
    at("behind").textContent = "Behind it: " + state.phase + far + best + ", " + passed;
    if (isCoarse && state.best_degrees) askWithBest(state.best_degrees);
    return false;
  }

  slider(at("machines"), "gpus", "GPUs").addEventListener("input", (event) => {
    gpus = gpuNumbers()[Number(event.target.value)];
    changed();
  });
  const exact = document.createElement("input");
  exact.type = "number";
  exact.id = "gpus-number";
  exact.min = 1;
  exact.setAttribute("aria-label", "GPUs, as a number");
  exact.addEventListener("change", () => {
    if (exact.value !== "") gpus = Number(exact.value);
    changed();
  });
  sliders.get("gpus").label.append(exact);
  slider(at("machines"), "memory", "memory of a GPU for a plan").addEventListener("input", (event) => {
    const value = Number(event.target.value);
    memoryGb = value > Math.floor(first.capacity_gb) ? null : value;
    changed();
  });
  for (const name of first.degrees) {
    slider(at("degrees"), name, name).addEventListener("input", (event) => {
      const value = valuesOf(name, choices)[Number(event.target.value)];
      if (value === null) {
        delete chosen[name];
        if (plan && first.anchored.includes(name)) anchor[name] = plan[name];
      } else {
        chosen[name] = value;
        delete anchor[name];
      }
      changed();
    });
  }
  at("search-all").addEventListener("click", () => {
    chosen = {};
    anchor = plan ? Object.fromEntries(first.anchored.map((name) => [name, plan[name]])) : {};
    changed();
  });
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("config-send").addEventListener("click", async () => {
    const file = at("config-file").files[0];
    if (!file) return say("config: choose a file first");
    try {
      job = await ask("config", {
        name: file.name, text: await file.text(), seq_len: Number(at("config-seq-len").value),
        global_batch: Number(at("config-global-batch").value),
      });
    } catch (error) {
      return say(error.message);
    }
    workload = job.workload;
    anchor = {};
    isCoarse = false;
    plan = null;
    return changed();
  });
  document.documentElement.dataset.ready = "true";
  changed();
})();
