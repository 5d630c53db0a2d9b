// Draws one step of some workers on a canvas: recorded above ideal, compute above communication.
// Zooming asks the server for the range, so that there are never more marks than a screen shows.
// While a worker still draws, waits for it and then takes over the page that the server makes.
"use strict";

(() => {
  const AXIS = 26;
  const NAMES = ["forward", "backward", "weights", "other", "send-forward", "send-backward", "gather", "reduce"];
  const COMPUTE = 4;
  const LEAST_S = 2e-6;
  // Height and place of [recorded, ideal] × [compute, communication] in a row.
  const BANDS = {
    both: { row: 46, bands: [[[5, 13], [19, 7]], [[30, 7], [38, 4]]] },
    one: { row: 38, bands: [[[6, 16], [23, 9]], [[6, 16], [23, 9]]] },
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const digits = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));
  const words = (seconds) => {
    const size = Math.abs(seconds);
    if (size >= 0.9995) return `${digits(seconds)} s`;
    if (size >= 0.9995e-3) return `${digits(seconds * 1e3)} ms`;
    return size === 0 ? "0 ms" : `${digits(seconds * 1e6)} µs`;
  };

  // ------------------------------------------------------------------------------- the chart
  class Chart {
    constructor(section, figure) {
      this.source = section.dataset.marks;
      this.view = section.querySelector("#timeline-view");
      this.canvas = this.view.querySelector("canvas");
      this.tip = this.view.querySelector(".tl-tip");
      this.said = section.querySelector("#timeline-drawn");
      this.base = figure;
      this.data = figure;
      this.length = Math.max(figure.length_s, figure.recorded_s, figure.ideal_s);
      const layout = figure.kinds.length === 2 ? BANDS.both : BANDS.one;
      this.row = layout.row;
      this.bands = layout.bands;
      const whole = figure.end_s - figure.begin_s >= 0.999 * figure.length_s;
      this.from = whole ? 0 : figure.begin_s;
      this.to = whole ? this.length * 1.01 : figure.end_s;
      this.brush = null;
      this.asking = null;
      this.index();
      this.listen(section);
      section.querySelector("#timeline-tools").hidden = false;
      new ResizeObserver(() => this.draw()).observe(this.view);
      this.draw();
    }

    // Marks of each row, so that a pointer looks at one row only.
    index() {
      this.rows = this.data.rows ? this.data.rows.map(() => []) : this.base.rows.map(() => []);
      this.data.marks.row.forEach((row, at) => this.rows[row].push(at));
    }

    band(at) {
      const { marks } = this.data;
      const group = this.base.classes[marks.type[at]];
      const [top, height] = this.bands[marks.kind[at]][group < COMPUTE ? 0 : 1];
      return { group, top: AXIS + marks.row[at] * this.row + top, height };
    }

    x(seconds) { return ((seconds - this.from) / (this.to - this.from)) * this.width; }

    // ---------------------------------------------------------------------------- drawing
    draw() {
      const ratio = window.devicePixelRatio || 1;
      this.width = this.view.clientWidth;
      this.height = AXIS + this.base.rows.length * this.row;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
      const pen = this.canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, this.width, this.height);
      this.ink = {
        line: colour("--line"), text: colour("--ink-2"), wait: colour("--tl-wait"), band: colour("--tl-band"),
        mark: colour("--tl-mark"), link: colour("--link"), card: colour("--card"),
        classes: NAMES.map((name) => colour(`--tl-${name}`)),
      };
      this.ends = this.endsOf(pen);
      this.drawGround(pen);
      this.drawMarks(pen, true);
      this.drawMarks(pen, false);
      this.drawEnds(pen);
      if (this.brush) {
        const [left, right] = this.brush;
        pen.globalAlpha = 0.18;
        pen.fillStyle = this.ink.link;
        pen.fillRect(Math.min(left, right), 0, Math.abs(right - left), this.height);
        pen.globalAlpha = 1;
      }
    }

    drawGround(pen) {
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const span = this.to - this.from;
      const rough = span / Math.max(this.width / 110, 2);
      const power = 10 ** Math.floor(Math.log10(rough));
      const tick = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
      for (let at = Math.ceil(this.from / tick) * tick; at <= this.to; at += tick) {
        const x = Math.round(this.x(at)) + 0.5;
        pen.strokeStyle = this.ink.line;
        pen.beginPath();
        pen.moveTo(x, AXIS - 5);
        pen.lineTo(x, this.height);
        pen.stroke();
        const text = this.tickWords(at, tick);
        const room = pen.measureText(text).width;
        const left = Math.min(Math.max(x - room / 2, 2), this.width - room - 2);
        if (this.ends.some((end) => left < end.left + end.room + 6 && left + room > end.left - 6)) continue;
        pen.fillStyle = this.ink.text;
        pen.fillText(text, left, AXIS / 2 - 1);
      }
      this.base.rows.forEach((_, row) => {
        const y = AXIS + row * this.row;
        pen.strokeStyle = this.ink.line;
        pen.beginPath();
        pen.moveTo(0, y + 0.5);
        pen.lineTo(this.width, y + 0.5);
        pen.stroke();
        this.base.kinds.forEach((kind) => this.bands[kind].forEach(([top, height]) => {
          pen.fillStyle = this.ink.band;
          pen.fillRect(0, y + top, this.width, height);
        }));
      });
    }

    // As many digits as tell one tick from the next.
    tickWords(at, tick) {
      const [unit, name] = this.to >= 1 && tick >= 1e-3 ? [1, "s"] : this.to >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
      const places = Math.max(0, -Math.floor(Math.log10(tick / unit) + 1e-9));
      return `${(at / unit).toFixed(places)} ${name}`;
    }

    // Waits first, pale, so that nothing that is done hides behind them.
    drawMarks(pen, waits) {
      const { marks } = this.data;
      for (let at = 0; at < marks.row.length; at += 1) {
        const begin = marks.start_s[at];
        const end = begin + marks.duration_s[at];
        if (end < this.from || begin > this.to) continue;
        const { group, top, height } = this.band(at);
        const works = begin + marks.wait_s[at];
        const [left, right] = waits ? [begin, works] : [works, end];
        if (waits && works <= begin) continue;
        const x = Math.max(this.x(left), -2);
        const wide = Math.max(Math.min(this.x(right), this.width + 2) - x, waits ? 0 : 0.8);
        pen.fillStyle = waits ? this.ink.wait : this.ink.classes[group];
        pen.globalAlpha = marks.count[at] > 1 || marks.filled[at] ? 0.55 : 1;
        pen.fillRect(x, top, wide > 4 && !waits ? wide - 0.6 : wide, height);
        pen.globalAlpha = 1;
      }
    }

    // Where the two runs end, and where that is written; the later one gives way.
    endsOf(pen) {
      pen.font = "12px system-ui, sans-serif";
      const ends = [["recorded", this.base.recorded_s, []], ["ideal", this.base.ideal_s, [4, 3]]]
        .map(([name, seconds, dash]) => {
          const x = Math.round(this.x(seconds)) + 0.5;
          const text = `${name} ${words(seconds)}`;
          const room = pen.measureText(text).width + 6;
          return { x, text, room, dash, left: Math.max(Math.min(x - room / 2, this.width - room), 0) };
        })
        .filter(({ x }) => x >= 0 && x <= this.width);
      if (ends.length === 2 && Math.abs(ends[0].left - ends[1].left) < (ends[0].room + ends[1].room) / 2 + 8) {
        const [later, earlier] = ends[0].x >= ends[1].x ? ends : [ends[1], ends[0]];
        earlier.left = Math.max(Math.min(earlier.left, later.left - earlier.room - 8), 0);
        later.left = Math.max(later.left, earlier.left + earlier.room + 8);
      }
      return ends;
    }

    drawEnds(pen) {
      this.ends.forEach(({ x, text, left, dash }) => {
        pen.strokeStyle = this.ink.mark;
        pen.setLineDash(dash);
        pen.beginPath();
        pen.moveTo(x, AXIS - 6);
        pen.lineTo(x, this.height);
        pen.stroke();
        pen.setLineDash([]);
        pen.fillStyle = this.ink.mark;
        pen.fillText(text, left + 3, AXIS / 2 - 1);
      });
    }

    // ----------------------------------------------------------------------------- moving
    show(from, to) {
      const least = Math.max(LEAST_S, this.length * 1e-6);
      const span = Math.min(Math.max(to - from, least), this.length * 1.01);
      this.from = Math.min(Math.max(from, 0), this.length * 1.01 - span);
      this.to = this.from + span;
      this.hide();
      this.draw();
      clearTimeout(this.later);
      this.later = setTimeout(() => this.fetch(), 150);
    }

    zoom(factor, at = (this.from + this.to) / 2) {
      this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
    }

    pan(share) {
      const step = (this.to - this.from) * share;
      this.show(this.from + step, this.to + step);
    }

    reset() { this.show(0, this.length * 1.01); }

    async fetch() {
      const whole = this.to - this.from >= this.length;
      this.remember(whole);
      if (this.base.alone === this.base.ops && this.base.end_s - this.base.begin_s >= 0.999 * this.base.length_s) {
        this.tell(this.base);
        return;
      }
      if (this.asking) this.asking.abort();
      this.asking = new AbortController();
      const range = whole ? "" : `&begin_s=${this.from.toFixed(9)}&end_s=${Math.max(this.to, 0).toFixed(9)}`;
      try {
        const answer = await fetch(this.source + range, { signal: this.asking.signal });
        if (!answer.ok) throw new Error(String(answer.status));
        this.data = await answer.json();
        this.index();
        this.draw();
        this.tell(this.data);
      } catch (error) {
        if (error.name !== "AbortError") this.said.textContent = "This range cannot be read now; what you see is coarse.";
      }
    }

    tell(data) {
      const count = (number) => number.toLocaleString("en");
      const range = `${words(this.from)} to ${words(Math.min(this.to, this.length))}: `;
      this.said.textContent = data.alone === data.ops
        ? `${range}all ops are drawn.`
        : `${range}${count(data.alone)} of ${count(data.ops)} ops are drawn one by one, the others as groups of short neighbours: zoom in to see all.`;
    }

    // The address keeps the range, so that it can be passed on.
    remember(whole) {
      const address = new URL(location.href);
      ["begin_s", "end_s"].forEach((name) => address.searchParams.delete(name));
      if (!whole) {
        address.searchParams.set("begin_s", this.from.toPrecision(9));
        address.searchParams.set("end_s", this.to.toPrecision(9));
      }
      history.replaceState(null, "", address);
    }

    // ---------------------------------------------------------------------------- looking
    hide() { this.tip.hidden = true; }

    found(x, y) {
      const row = Math.floor((y - AXIS) / this.row);
      if (y < AXIS || row >= this.rows.length) return -1;
      const seconds = this.from + (x / this.width) * (this.to - this.from);
      const slack = (1.5 / this.width) * (this.to - this.from);
      const { marks } = this.data;
      let best = -1;
      this.rows[row].forEach((at) => {
        const { top, height } = this.band(at);
        if (y < top - 1 || y > top + height + 1) return;
        const begin = marks.start_s[at];
        const end = begin + marks.duration_s[at];
        if (seconds < begin - slack || seconds > end + slack) return;
        // What is done goes before what waits, the shorter before the longer.
        const waits = seconds < begin + marks.wait_s[at];
        const rank = (waits ? 1e6 : 0) + marks.duration_s[at];
        if (best < 0 || rank < this.rank) { best = at; this.rank = rank; }
      });
      return best;
    }

    point(x, y) {
      const at = this.found(x, y);
      if (at < 0) { this.hide(); return; }
      const { marks } = this.data;
      const lines = [this.base.types[marks.type[at]] + (marks.microbatch[at] === null ? "" : `, microbatch ${marks.microbatch[at]}`)];
      if (marks.count[at] > 1) lines[0] = `${marks.count[at].toLocaleString("en")} ops, the longest ${lines[0]}`;
      lines.push(`${this.base.rows[marks.row[at]].label}, ${marks.kind[at] ? "ideal" : "recorded"}`);
      lines.push(`from ${words(marks.start_s[at])}, takes ${words(marks.duration_s[at])}`);
      if (marks.wait_s[at] > 0) lines.push(`of this, ${words(marks.wait_s[at])} waiting for a peer`);
      if (marks.filled[at]) lines.push("not recorded: filled in from peers");
      this.tip.textContent = lines.join("\n");
      this.tip.hidden = false;
      const left = Math.min(Math.max(x + 14, 4), this.width - this.tip.offsetWidth - 4);
      const below = y + 18 + this.tip.offsetHeight <= this.height;
      this.tip.style.left = `${Math.max(left, 4)}px`;
      this.tip.style.top = `${below ? y + 18 : Math.max(y - this.tip.offsetHeight - 8, 0)}px`;
    }

    // --------------------------------------------------------------------------- listening
    listen(section) {
      const { view } = this;
      const place = (event) => {
        const box = view.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      view.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        const [x] = place(event);
        this.brush = [x, x];
        view.setPointerCapture(event.pointerId);
      });
      view.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        if (!this.brush) { this.point(x, y); return; }
        this.brush[1] = x;
        this.hide();
        this.draw();
      });
      view.addEventListener("pointerup", (event) => {
        if (!this.brush) return;
        const [left, right] = [...this.brush].sort((one, other) => one - other);
        this.brush = null;
        if (right - left > 5) {
          const second = (x) => this.from + (x / this.width) * (this.to - this.from);
          this.show(second(left), second(right));
        } else {
          this.draw();
          this.point(...place(event));
        }
      });
      view.addEventListener("pointercancel", () => { this.brush = null; this.draw(); });
      view.addEventListener("pointerleave", () => { if (!this.brush) this.hide(); });
      view.addEventListener("dblclick", () => this.reset());
      view.addEventListener("wheel", (event) => {
        const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
        const mine = event.ctrlKey || event.metaKey || document.activeElement === view;
        if (!sideways && !mine) return;
        event.preventDefault();
        if (sideways) { this.pan(event.deltaX / this.width); return; }
        const [x] = place(event);
        this.zoom(1.0015 ** event.deltaY, this.from + (x / this.width) * (this.to - this.from));
      }, { passive: false });
      const keys = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6),
        "-": () => this.zoom(1 / 0.6), 0: () => this.reset(), Home: () => this.show(0, this.to - this.from), Escape: () => this.hide(),
      };
      view.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
        event.preventDefault();
        keys[event.key]();
      });
      const does = { in: keys["+"], out: keys["-"], left: keys.ArrowLeft, right: keys.ArrowRight, reset: keys[0] };
      section.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", does[button.dataset.do]));
      window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
      new MutationObserver(() => this.draw()).observe(document.documentElement, { attributes: true });
    }
  }

  // ------------------------------------------------------------------------------- the page
  const start = () => {
    const section = document.getElementById("timeline");
    const source = document.getElementById("figure-timeline");
    if (source) section.chart = new Chart(section, JSON.parse(source.textContent));
  };

  // The page as the server makes it now, in place of what waits.
  const takeOver = async () => {
    const answer = await fetch(location.href, { cache: "no-store" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const old = document.getElementById("timeline");
    const fresh = page.getElementById("timeline");
    if (!answer.ok || !fresh || fresh.dataset.state === "drawing") return false;
    const after = [...page.querySelectorAll("#timeline ~ *")];
    const mine = document.importNode(fresh, true);
    old.replaceWith(mine);
    mine.after(...after.map((each) => document.importNode(each, true)));
    start();
    return true;
  };

  const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

  const wait = async () => {
    const begun = Date.now();
    for (;;) {
      const slow = document.getElementById("timeline-slow");
      if (slow && Date.now() - begun > 8000) slow.hidden = false;
      try {
        // The server holds this until the worker is done, or 20 s.
        const answer = await fetch(`${document.getElementById("timeline").dataset.marks}&most=100`, { cache: "no-store" });
        if (answer.status !== 503 && await takeOver()) return;
      } catch { /* the server is away: asked again */ }
      await pause(2000);
    }
  };

  if (document.getElementById("timeline").dataset.state === "drawing") {
    setTimeout(() => { const slow = document.getElementById("timeline-slow"); if (slow) slow.hidden = false; }, 8000);
    wait();
  } else {
    start();
  }
})();
