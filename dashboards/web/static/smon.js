// Draws the figures of a page and keeps the page fresh: asks for it again every few seconds (job
// pages: two) and exchanges what has changed. Without this script the text says the same.
"use strict";

(() => {
  const PERIOD_MS = 1000 * Number(document.getElementById("main").dataset.period);
  const MOST_MS = 60000;
  let tag = null;
  let pause = PERIOD_MS;

  // ------------------------------------------------------------------------------- figures
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "var(--x)" anywhere in a figure becomes the colour that it has now.
  const painted = (value) => {
    if (typeof value === "string") {
      return value.startsWith("var(") ? colour(value.slice(4, -1)) : value;
    }
    if (Array.isArray(value)) return value.map(painted);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, painted(each)]));
    }
    return value;
  };

  const draw = (chart) => {
    const source = document.getElementById(chart.dataset.figure);
    if (!source || !window.Plotly) return;
    const figure = painted(JSON.parse(source.textContent));
    window.Plotly.react(chart, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  };

  const drawAll = () => document.querySelectorAll("[data-figure]").forEach(draw);

  // ---------------------------------------------------------------------------------- ages
  const age = (seconds) => {
    const steps = [[60, 1, "s"], [3600, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, "d"]];
    const [, size, unit] = steps.find(([limit]) => seconds < limit);
    return `${Math.round(seconds / size)} ${unit} ago`;
  };

  const tell = () => {
    document.querySelectorAll("time[data-at]").forEach((each) => {
      const at = Number(each.dataset.at);
      each.textContent = age(Math.max(Date.now() / 1000 - at, 0));
      each.title = `${new Date(at * 1000).toLocaleString()} (${new Date(at * 1000).toISOString()})`;
    });
  };

  // --------------------------------------------------------------------------- copy buttons
  const addButtons = () => {
    document.querySelectorAll("pre.copy:not([data-ready])").forEach((each) => {
      const text = each.textContent;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      each.dataset.ready = "";
      each.append(button);
    });
  };

  // --------------------------------------------------------------------------------- freshness
  // What the server sent, before this script changed anything, by id of the section.
  const sent = new Map();
  document.querySelectorAll("[data-live]").forEach((each) => sent.set(each.id, each.outerHTML));

  const exchange = (page) => {
    page.querySelectorAll("[data-live]").forEach((fresh) => {
      const old = document.getElementById(fresh.id);
      const html = fresh.outerHTML;
      if (!old || sent.get(fresh.id) === html) return;
      if (old.contains(document.activeElement) && document.activeElement !== document.body) return;
      sent.set(fresh.id, html);
      const charts = new Map([...old.querySelectorAll(".chart")].map((each) => [each.id, each]));
      const open = old.querySelector("details")?.open;
      const mine = document.importNode(fresh, true);
      // A chart stays the element it was, so that plotly changes it and does not blink.
      mine.querySelectorAll(".chart").forEach((each) => {
        if (charts.has(each.id)) each.replaceWith(charts.get(each.id));
      });
      if (open) mine.querySelectorAll("details").forEach((each) => { each.open = true; });
      old.replaceWith(mine);
      mine.querySelectorAll("[data-figure]").forEach(draw);
    });
    document.title = page.title;
  };

  const refresh = async () => {
    const state = document.getElementById("live-state");
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const answer = await fetch(location.href, { headers, cache: "no-store" });
      if (answer.redirected && new URL(answer.url).pathname === "/login") {
        location.reload();
        return;
      }
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
      } else if (answer.status !== 304) {
        throw new Error(String(answer.status));
      }
      state.textContent = "";
      pause = PERIOD_MS;
    } catch {
      pause = Math.min(pause * 2, MOST_MS);
      state.textContent = "The server does not answer; what you see is not fresh.";
    }
    tell();
    addButtons();
  };

  const loop = async () => {
    if (!document.hidden) await refresh();
    setTimeout(loop, pause);
  };

  drawAll();
  tell();
  addButtons();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  if (document.querySelector("[data-live]")) {
    setInterval(tell, 1000);
    setTimeout(loop, PERIOD_MS);
  }
})();
