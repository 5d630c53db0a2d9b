// The page of a job: the step slider and the switches of the heat map, groups that open, and the
// range of steps that is drawn with the mouse. All of it is in the address, so that it can be sent
// to somebody, and survives when a section is exchanged. Without this script forms do the same.
"use strict";

(() => {
  const SOON_MS = 60;
  const LOOK_MS = 250;
  const MOST_LOOKS = 120;
  const byId = (id) => document.getElementById(id);
  document.documentElement.classList.add("scripted");

  // ------------------------------------------------------------------------------- heat map
  let soon = null;
  let asked = null;

  const chosen = () => {
    const slider = byId("heat-step");
    const steps = slider ? slider.dataset.steps.split(",") : [];
    const place = slider ? Number(slider.value) : 0;
    return {
      show: byId("heat-show").value,
      group: byId("heat-group")?.value ?? "",
      step: place > 0 ? steps[place - 1] : "",
    };
  };

  const keep = (values) => {
    const address = new URL(location.href);
    Object.entries(values).forEach(([name, value]) => {
      if (value === "" || (name === "show" && value === "exact")) address.searchParams.delete(name);
      else address.searchParams.set(name, value);
    });
    history.replaceState(null, "", address);
  };

  const tellStep = (step) => {
    const words = step === "" ? "all steps" : `step ${step}`;
    const slider = byId("heat-step");
    if (!slider) return;
    slider.setAttribute("aria-valuetext", words);
    byId("heat-step-words").textContent = words;
    byId("heat-step-number").value = step;
  };

  const cell = (row, text, number) => {
    const made = document.createElement("td");
    if (number) made.className = "n";
    made.textContent = text;
    row.append(made);
    return made;
  };

  const table = (lines) => {
    const body = byId("heat-lines");
    body.replaceChildren(...lines.map((line) => {
      const row = document.createElement("tr");
      row.dataset.value = line.value;
      const head = document.createElement("th");
      head.scope = "row";
      const link = document.createElement("a");
      link.href = body.dataset.ranks + line.rank;
      const code = document.createElement("code");
      code.textContent = line.rank;
      link.append(code);
      head.append(link);
      row.append(head);
      cell(row, line.dp, true);
      cell(row, line.stage, true);
      const host = document.createElement("code");
      host.textContent = line.host ?? "–";
      cell(row, "").append(host);
      cell(row, line.text, true);
      return row;
    }));
    byId("heat-count").textContent = lines.length;
  };

  const show = async () => {
    const form = byId("heat-form");
    const values = chosen();
    const wanted = new URLSearchParams({ window: form.dataset.window });
    Object.entries(values).forEach(([name, value]) => { if (value !== "") wanted.set(name, value); });
    const chart = byId("chart-heat");
    asked?.abort();
    asked = new AbortController();
    chart.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(`${form.dataset.heat}?${wanted}`, { signal: asked.signal });
      const body = await answer.json();
      if (!answer.ok) throw new Error(body.detail ?? String(answer.status));
      byId("figure-heat").textContent = JSON.stringify(body.figure);
      window.SMon.drawAs(chart, body.figure);
      byId("where-words").textContent = body.words;
      byId("heat-title").textContent = body.title;
      table(body.lines);
      const at = values.step === "" ? "" : `&step=${values.step}`;
      byId("heat-csv").href = `${form.dataset.csv}?window=${form.dataset.window}${at}`;
    } catch (error) {
      if (error.name === "AbortError") return;
      byId("where-words").textContent = `Not to be had: ${error.message}.`;
    }
    chart.removeAttribute("aria-busy");
  };

  const changed = () => {
    const values = chosen();
    tellStep(values.step);
    keep(values);
    clearTimeout(soon);
    soon = setTimeout(show, SOON_MS);
  };

  document.addEventListener("input", (event) => {
    if (["heat-step", "heat-show", "heat-group"].includes(event.target.id)) changed();
  });

  // ----------------------------------------------------------------------- figures that answer
  const answering = new WeakSet();

  const openGroup = (event) => {
    const group = byId("heat-group");
    if (!group || group.value !== "") return;
    group.value = String(event.points[0].x);
    changed();
  };

  const chooseRange = (change) => {
    const [first, last] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (first === undefined || last === undefined) return;
    const address = new URL(location.href);
    address.searchParams.set("from", String(Math.max(Math.ceil(first), 0)));
    address.searchParams.set("to", String(Math.max(Math.floor(last), Math.ceil(first), 0)));
    address.searchParams.delete("step");
    location.assign(address);
  };

  const answer = (id, event, handler) => {
    const chart = byId(id);
    if (!chart || !chart.on || answering.has(chart)) return;
    answering.add(chart);
    chart.on(event, handler);
  };

  // Charts are drawn when plotly.js has come, and stay the elements that they are.
  let looks = 0;
  const hook = () => {
    answer("chart-heat", "plotly_click", openGroup);
    answer("chart-steps", "plotly_relayout", chooseRange);
    looks += 1;
    if (looks < MOST_LOOKS) setTimeout(hook, LOOK_MS);
  };
  hook();
  document.addEventListener("smon:exchanged", () => { looks = 0; hook(); });
})();
