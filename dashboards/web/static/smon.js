// Draws the figures of a page and keeps the page fresh: asks for it again every few seconds (job
// pages: two) and exchanges the sections with `data-live` and an id that have changed. Without this
// script the text says the same.
//
// Scripts of single pages use `SMon.draw(chart)`, `SMon.drawAs(chart, figure)` and
// `SMon.painted(value)`, listen on the document (sections come and go), and hear of
// `smon:exchanged` (detail: the new element) when one has been put in, and of `smon:drawn` when
// plotly.js has drawn a chart (target: the chart), which then has `on`.
"use strict";

(() => {
  const PERIOD_MS = 1000 * Number(document.getElementById("main").dataset.period);
  const MOST_MS = 60000;
  const liveState = document.getElementById("live-state");
  let tag = null;
  let pause = PERIOD_MS;
  let timer = null;
  let heard = Date.now();

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

  const drawAs = (chart, figure) => {
    if (!window.Plotly) return;
    const { data, layout } = painted(figure);
    const options = { displayModeBar: false, responsive: true };
    window.Plotly.react(chart, data, layout, options).then(() => {
      chart.dispatchEvent(new CustomEvent("smon:drawn", { bubbles: true }));
    });
  };

  const draw = (chart) => {
    const source = document.getElementById(chart.dataset.figure);
    if (source) drawAs(chart, JSON.parse(source.textContent));
  };

  // One after the other, so that the page answers between two.
  const drawAll = async () => {
    for (const chart of document.querySelectorAll("[data-figure]")) {
      draw(chart);
      await new Promise((next) => { setTimeout(next, 0); });
    }
  };

  window.SMon = Object.freeze({ draw, drawAs, painted });

  // ---------------------------------------------------------------------------------- ages
  const age = (seconds) => {
    const steps = [[60, 1, "s"], [3600, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, "d"]];
    const [, size, unit] = steps.find(([limit]) => seconds < limit);
    return `${Math.round(seconds / size)} ${unit} ago`;
  };

  const tell = () => {
    document.querySelectorAll("time[data-at]").forEach((each) => {
      const at = Number(each.dataset.at);
      const text = age(Math.max(Date.now() / 1000 - at, 0));
      // Only what differs: putting in the same text would undo a selection.
      if (each.textContent !== text) each.textContent = text;
      each.title = `${new Date(at * 1000).toLocaleString()} (${new Date(at * 1000).toISOString()})`;
    });
  };

  // --------------------------------------------------------------------------- copy buttons
  const copied = async (text) => {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      return;
    }
    // Browsers keep the clipboard from pages that come without TLS; the old way still works.
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "hidden";
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  };

  const addButtons = () => {
    document.querySelectorAll("pre.copy:not([data-ready])").forEach((each) => {
      const text = each.textContent;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await copied(text);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      each.dataset.ready = "";
      each.append(button);
    });
  };

  // ---------------------------------------------------- what a reader did to a section is kept
  const inOrder = (root, selector) => [...root.querySelectorAll(selector)];

  const named = (element) => {
    const words = element.querySelector("summary")?.textContent.replace(/[\d.,]+/g, "").trim();
    return element.id || words || "";
  };

  const keepOpen = (old, mine) => {
    const before = new Map(inOrder(old, "details").map((each) => [named(each), each.open]));
    inOrder(mine, "details").forEach((each) => {
      if (before.has(named(each))) each.open = before.get(named(each));
    });
  };

  const keepInputs = (old, mine) => {
    inOrder(old, "input[id], select[id], textarea[id]").forEach((each) => {
      const twin = mine.querySelector(`#${CSS.escape(each.id)}`);
      if (!twin) return;
      if (each.type === "checkbox" || each.type === "radio") {
        if (each.checked !== each.defaultChecked) twin.checked = each.checked;
      } else if (each.tagName === "SELECT") {
        twin.value = each.value;
      } else if (each.value !== each.defaultValue) {
        twin.value = each.value;
      }
    });
  };

  // A chart stays the element it was, so that plotly changes it and does not blink.
  const keepCharts = (old, mine) => {
    const charts = new Map(inOrder(old, ".chart[id]").map((each) => [each.id, each]));
    inOrder(mine, ".chart[id]").forEach((each) => {
      if (charts.has(each.id)) each.replaceWith(charts.get(each.id));
    });
  };

  const scrolls = (root) => inOrder(root, ".scroll").map((each) => [each.scrollLeft, each.scrollTop]);

  const scrollAgain = (root, places) => {
    inOrder(root, ".scroll").forEach((each, at) => {
      if (places[at]) [each.scrollLeft, each.scrollTop] = places[at];
    });
  };

  const FOCUSED = "a, button, input, select, textarea, summary, [tabindex]";

  // Where the focus is inside of `old`; null: elsewhere.
  const focusIn = (old) => {
    const at = document.activeElement;
    if (!at || !old.contains(at) || at === document.body) return null;
    return { id: at.id, index: inOrder(old, FOCUSED).indexOf(at) };
  };

  const focusAgain = (mine, focus) => {
    const byId = focus.id ? document.getElementById(focus.id) : null;
    (byId ?? inOrder(mine, FOCUSED)[focus.index])?.focus({ preventScroll: true });
  };

  const TYPED = "textarea, select, input:not([type=range], [type=checkbox], [type=radio])";

  // Whether somebody is in the middle of something there: typing, dragging, selecting text.
  const inUse = (old) => {
    const selection = document.getSelection();
    return (
      old.matches(":active") ||
      (old.contains(document.activeElement) && document.activeElement.matches(TYPED)) ||
      (selection && !selection.isCollapsed && selection.containsNode(old, true))
    );
  };

  // --------------------------------------------------------------------------------- freshness
  // What the server sent, before this script changed anything, by id of the section.
  const sent = new Map();
  const note = (root) => root.querySelectorAll("[data-live]").forEach((each) => {
    sent.set(each.id, each.outerHTML);
  });

  const putIn = (old, mine) => {
    const focus = focusIn(old);
    const places = scrolls(old);
    keepCharts(old, mine);
    keepOpen(old, mine);
    keepInputs(old, mine);
    old.replaceWith(mine);
    scrollAgain(mine, places);
    addButtons();
    if (focus) focusAgain(mine, focus);
    mine.querySelectorAll("[data-figure]").forEach(draw);
    document.dispatchEvent(new CustomEvent("smon:exchanged", { detail: mine }));
  };

  // True when nothing had to wait.
  const exchangeSections = (page) => {
    let all = true;
    page.querySelectorAll("[data-live]").forEach((fresh) => {
      const html = fresh.outerHTML;
      if (sent.get(fresh.id) === html) return;
      const old = document.getElementById(fresh.id);
      if (inUse(old)) {
        all = false;
        return;
      }
      sent.set(fresh.id, html);
      putIn(old, document.importNode(fresh, true));
    });
    return all;
  };

  // Sections have come or gone, as when the first report is there: all of the page is new.
  const exchangeAll = (page) => {
    const old = document.getElementById("main");
    if (inUse(old)) return false;
    sent.clear();
    note(page);
    putIn(old, document.importNode(page.getElementById("main"), true));
    return true;
  };

  const ids = (root) => inOrder(root, "[data-live]").map((each) => each.id).join(" ");

  const exchange = (page) => {
    document.title = page.title;
    return ids(page) === ids(document) ? exchangeSections(page) : exchangeAll(page);
  };

  const say = (fresh) => {
    const words = fresh ? "" : `Not fresh: no answer from the server since ${
      new Date(heard).toLocaleTimeString()}. It is asked again.`;
    if (liveState.textContent !== words) liveState.textContent = words;
    liveState.classList.toggle("problem", !fresh);
  };

  // The answer to a fresh question for this page; null: nothing has changed.
  const ask = async () => {
    const headers = tag ? { "If-None-Match": tag } : {};
    const limit = AbortSignal.timeout(MOST_MS);
    const answer = await fetch(location.href, { headers, cache: "no-store", signal: limit });
    if (answer.status === 304) return null;
    if (answer.redirected && new URL(answer.url).pathname === "/login") location.reload();
    if (answer.status !== 200) throw new Error(String(answer.status));
    return { tag: answer.headers.get("ETag"), text: await answer.text() };
  };

  const refresh = async () => {
    let answer = null;
    try {
      answer = await ask();
    } catch {
      pause = Math.min(pause * 2, MOST_MS);
      say(false);
      return;
    }
    heard = Date.now();
    pause = PERIOD_MS;
    say(true);
    if (answer) {
      const page = new DOMParser().parseFromString(answer.text, "text/html");
      // What had to wait is asked for again.
      tag = exchange(page) ? answer.tag : null;
    }
    tell();
  };

  const loop = async () => {
    timer = null;
    // A hidden page asks nothing; it is asked for when somebody looks again.
    if (document.hidden) return;
    await refresh();
    timer ??= setTimeout(loop, pause);
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden || !document.querySelector("[data-live]")) return;
    clearTimeout(timer);
    timer = setTimeout(loop, 0);
  });

  note(document);
  tell();
  addButtons();
  // plotly.js may still be on its way: it comes before `DOMContentLoaded`.
  if (document.readyState === "complete" || window.Plotly) drawAll();
  else document.addEventListener("DOMContentLoaded", drawAll);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  if (document.querySelector("[data-live]")) {
    setInterval(tell, 1000);
    timer = setTimeout(loop, PERIOD_MS);
  }
})();
