// Draws a trace on a canvas: per device a strip of memory above its lanes, one shared time axis.
// The data are in live_store.js; see live.py for what is sent when.

const LEFT = 118, RIGHT = 66, BOTTOM = 34, TOP = 6; // margins in CSS pixels
const MAX_LABELS = 150;

export default () => {
  // One store per widget, not per view: a view that appears late finds everything in it.
  let store;
  return {
    initialize({ model }) {
      store = new Store(model.get("config"));
      const hello = () => model.send({ type: "hello", ...store.counts() });
      const onMessage = (message, buffers) => {
        if (message.type === "increment" && !store.add(message, buffers)) hello();
      };
      model.on("msg:custom", onMessage);
      const tables = model.get("tables");
      if (tables.rows) {
        store.add(
          { now: store.config.duration, spans: 0, samples: 0, texts: [0, tables.texts], rows: [0, tables.rows] },
          [model.get("spans"), model.get("samples")],
        );
      } else hello();
      model.on("change:picture", () => store.clear());
      return () => model.off("msg:custom", onMessage);
    },
    render({ model, el }) {
      const view = new View(store, el, () => model.send({ type: "stop" }));
      const freeze = () => {
        if (!model.get("picture").byteLength) return;
        view.dispose();
        el.replaceChildren(picture(asView(model.get("picture")), store.config.title));
      };
      model.on("change:picture", freeze);
      freeze();
      return () => { model.off("change:picture", freeze); view.dispose(); };
    },
  };
};

// -- view -----------------------------------------------------------------------------------------

class View {
  constructor(store, el, stop) {
    this.store = store;
    this.el = el;
    this.stopRun = stop;
    this.paused = false;
    this.fitted = true;
    this.x0 = 0;
    this.x1 = store.config.live ? 0.01 : store.config.duration || 1;
    this.allThreads = false;
    this.build();
    this.listen();
    this.schedule();
  }

  build() {
    const { config } = this.store;
    this.el.replaceChildren();
    const root = (this.root = make("div", "lab-live", { role: "group", "aria-label": `timeline of ${config.title}` }));
    root.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the keys ("0 0" restarts)
    const head = make("div", "lab-head");
    this.threads = this.button("host threads", "show every host thread", () => (this.allThreads = !this.allThreads));
    this.threads.setAttribute("aria-pressed", "false");
    this.pause = this.button("pause", "stop redrawing; the run goes on", () => (this.paused = !this.paused));
    this.pause.hidden = !config.live;
    const stop = this.button("stop", "end the run", () => { this.stopRun(); stop.disabled = true; });
    stop.hidden = !config.stoppable;
    const fit = this.button("fit", "show the whole run", () => this.fit());
    head.append(text("strong", config.title), text("i", [config.source, config.hardware].filter(Boolean).join(" · ")),
      this.threads, this.pause, stop, fit);
    this.canvas = make("canvas", "", { tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-keyshortcuts": "ArrowLeft ArrowRight + - 0 Space" });
    this.tip = make("div", "lab-tip", { hidden: "" });
    this.legend = make("div", "lab-legend");
    this.status = make("div", "lab-status");
    this.table = make("div", "lab-hidden");
    this.said = make("div", "lab-hidden", { role: "status" });
    const style = document.createElement("style");
    style.textContent = STYLE;
    root.append(style, head, this.canvas, this.legend, this.status, this.tip, this.table, this.said);
    this.el.append(root);
  }

  button(label, title, action) {
    const button = make("button", "", { type: "button", title });
    button.textContent = label;
    button.addEventListener("click", () => { action(); this.schedule(); });
    return button;
  }

  listen() {
    const { canvas } = this;
    this.onData = () => {
      if (!this.paused) this.schedule();
      this.describe();
    };
    this.store.listeners.add(this.onData);
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.root);
    // a theme's style sheet arrives some time after the attribute has changed
    this.themed = new MutationObserver(() => [0, 200, 1000].forEach((ms) => setTimeout(() => this.schedule(), ms)));
    this.themed.observe(document.body, { attributes: true });
    canvas.addEventListener("wheel", (e) => this.onWheel(e), { passive: false });
    canvas.addEventListener("keydown", (e) => this.onKey(e));
    canvas.addEventListener("pointerdown", (e) => { this.drag = { x: e.clientX, x0: this.x0, x1: this.x1 }; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointerup", () => (this.drag = null));
    canvas.addEventListener("pointermove", (e) => this.onMove(e));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", () => { this.fit(); this.schedule(); });
  }

  dispose() {
    this.store.listeners.delete(this.onData);
    this.resized.disconnect();
    this.themed.disconnect();
    cancelAnimationFrame(this.frame);
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.draw(); });
  }

  // -- what is visible

  fit() {
    this.fitted = true;
    this.x0 = 0;
    this.x1 = this.store.config.live ? niceEnd(this.store.now) : this.store.now || 1;
  }

  zoom(factor, at = (this.x0 + this.x1) / 2) {
    const width = Math.min(Math.max((this.x1 - this.x0) * factor, 1e-8), 4 * (this.store.now || 1));
    const share = (at - this.x0) / (this.x1 - this.x0);
    this.show(at - share * width, at + (1 - share) * width);
  }

  show(x0, x1) {
    this.fitted = false;
    const width = x1 - x0, limit = this.store.now || 1;
    this.x0 = Math.min(Math.max(x0, -0.5 * width), limit - 0.1 * width);
    this.x1 = this.x0 + width;
    this.schedule();
  }

  onWheel(e) {
    // a plain wheel scrolls the page, unless the timeline has been clicked into
    if (!e.ctrlKey && !e.shiftKey && document.activeElement !== this.canvas) return;
    e.preventDefault();
    this.zoom(Math.exp(Math.sign(e.deltaY || e.deltaX) * 0.2), this.time(e.offsetX));
  }

  onKey(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const step = (this.x1 - this.x0) * 0.15;
    const actions = {
      ArrowLeft: () => this.show(this.x0 - step, this.x1 - step),
      ArrowRight: () => this.show(this.x0 + step, this.x1 + step),
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5),
      0: () => this.fit(), " ": () => (this.paused = !this.paused && this.store.config.live),
    };
    if (!actions[e.key]) return;
    e.preventDefault();
    e.stopPropagation();
    actions[e.key]();
    this.schedule();
    const [factor, unit] = timeUnit(this.x1);
    this.said.textContent = `${(this.x0 * factor).toPrecision(3)} to ${(this.x1 * factor).toPrecision(3)} ${unit}${this.paused ? ", paused" : ""}`;
  }

  onMove(e) {
    if (this.drag) {
      const moved = ((this.drag.x - e.clientX) / this.plot) * (this.drag.x1 - this.drag.x0);
      if (moved) this.show(this.drag.x0 + moved, this.drag.x1 + moved);
      return;
    }
    const lines = this.hovered(e.offsetX, e.offsetY);
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.textContent = lines.join("\n");
    const right = e.offsetX > this.width * 0.6;
    this.tip.style.left = right ? "" : `${e.offsetX + 14}px`;
    this.tip.style.right = right ? `${this.width - e.offsetX + 14}px` : "";
    this.tip.style.top = `${e.offsetY + this.canvas.offsetTop + 14}px`;
  }

  hovered(x, y) {
    const band = (this.bands || []).find((b) => y >= b.top && y < b.top + b.height);
    const t = this.time(x);
    if (!band || x < LEFT || x > LEFT + this.plot) return null;
    if (!band.row) {
      const memory = this.store.samples.get(band.device);
      const i = lowerBound(memory.time.length, (k) => memory.time[k], t + 1e-15) - 1;
      return i < 0 ? null : [`${band.device} · ${bytes(memory.held[i])} allocated`, `at ${duration(t)} · peak ${bytes(memory.peak)}`];
    }
    const { row } = band, slack = (2 / this.plot) * (this.x1 - this.x0);
    const level = Math.floor(((y - band.top) / band.height) * row.levels);
    let best = null, distance = slack;
    for (let i = lowerBound(row.spans.length, (k) => row.spans[k].start, t + slack) - 1; i >= 0; i--) {
      const span = row.spans[i];
      if (span.start < t - slack - row.longest) break;
      const off = Math.max(span.start - t, t - span.end, 0);
      if (span.level === level && off < distance) { best = span; distance = off; if (!off) break; }
    }
    if (!best) return null;
    const kind = this.store.config.kinds[best.kind].label;
    return [`${best.name} · ${kind}`, `${row.device} · ${row.lane}`,
      `${duration(best.end - best.start)}, from ${duration(best.start)}`,
      best.bytes ? bytes(best.bytes) : "", best.detail].filter(Boolean);
  }

  time(x) { return this.x0 + ((x - LEFT) / this.plot) * (this.x1 - this.x0); }
  px(t) { return LEFT + ((t - this.x0) / (this.x1 - this.x0)) * this.plot; }

  // -- drawing

  draw() {
    const { store, canvas } = this;
    this.width = this.root.clientWidth;
    if (!this.width) return;
    this.plot = Math.max(this.width - LEFT - RIGHT, 50);
    if (this.fitted && !this.paused && store.config.live && store.now > this.x1 * 0.995) this.fit();
    this.colours();
    const height = this.layOut();
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = (this.g = canvas.getContext("2d"));
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = this.ink.background;
    g.fillRect(0, 0, this.width, height);
    this.drawAxis(height);
    this.labels = MAX_LABELS;
    const shown = new Set();
    for (const band of this.bands) band.row ? this.drawLane(band, shown) : this.drawMemory(band);
    this.drawNames();
    this.drawNow(height);
    this.drawLegend(shown);
    this.tell();
    this.describe();
  }

  colours() {
    const style = getComputedStyle(this.root), get = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    const background = get("--jp-layout-color0", "#ffffff");
    const dark = brightness(background) < 128;
    this.ink = {
      background, dark, text: get("--jp-ui-font-color1", "#24292f"), faint: get("--jp-ui-font-color2", "#6e7781"),
      grid: dark ? "rgba(255,255,255,.10)" : "rgba(0,0,0,.08)", band: dark ? "rgba(255,255,255,.06)" : "rgba(0,0,0,.045)",
      memory: this.store.config.memory[+dark], limit: this.store.config.limit[+dark],
    };
  }

  layOut() {
    const devices = this.store.devices();
    const scale = Math.max(0.42, Math.min(1, 5.5 / devices.filter((d) => d !== "host").length));
    let y = TOP;
    this.bands = [];
    this.heads = [];
    this.hasThreads = false;
    for (const device of devices) {
      const top = y;
      if (this.store.samples.has(device)) {
        this.bands.push({ device, top: y, height: Math.round(46 * scale) });
        y += Math.round(46 * scale) + 4;
      }
      for (const row of this.store.lanes(device)) {
        const host = device === "host";
        if (host && row.lane !== "main") this.hasThreads = true;
        if (host && row.lane !== "main" && !this.allThreads) continue;
        arrange(row);
        const thin = host || row.lane === "copy" || row.lane === "communication";
        const height = Math.round(Math.max((thin ? 14 : 20) * scale, thin ? 8 : 10) * (1 + 0.7 * (row.levels - 1)));
        this.bands.push({ device, row, top: y, height });
        y += height + 3;
      }
      if (y === top) y += 24;
      this.heads.push({ device, middle: (top + y - 3) / 2 });
      y += Math.round(12 * Math.max(scale, 0.6));
    }
    this.bottom = Math.max(y - 8, 40);
    return this.bottom + BOTTOM;
  }

  drawAxis() {
    const { g, ink, x0, x1 } = this;
    const [factor, unit] = timeUnit(x1);
    const step = niceStep(((x1 - x0) * factor * 90) / this.plot);
    g.font = "11px system-ui, sans-serif";
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    g.lineWidth = 1;
    for (let k = Math.ceil((Math.max(x0, 0) * factor) / step - 1e-9); k * step <= x1 * factor * (1 + 1e-9); k++) {
      const x = Math.round(this.px((k * step) / factor)) + 0.5;
      g.fillStyle = ink.grid;
      g.fillRect(x - 0.5, TOP, 1, this.bottom - TOP + 4);
      g.fillStyle = ink.text;
      g.fillText(+(k * step).toPrecision(12), x, this.bottom + 16);
    }
    g.fillStyle = ink.faint;
    g.fillRect(LEFT, this.bottom + 2, this.plot, 1);
    g.fillText(`time [${unit}]`, LEFT + this.plot / 2, this.bottom + 30);
  }

  drawNames() {
    const { g, ink } = this;
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.font = "600 12px system-ui, sans-serif";
    g.fillStyle = ink.text;
    for (const { device, middle } of this.heads) g.fillText(device, 2, middle, 56);
    g.textAlign = "right";
    g.font = "10px system-ui, sans-serif";
    g.fillStyle = ink.faint;
    for (const { row, top, height } of this.bands) {
      if (height < 9) continue;
      g.fillText(row ? this.store.config.labels[row.lane] || row.lane : "memory", LEFT - 7, top + height / 2 + 0.5, LEFT - 66);
    }
  }

  drawNow(height) {
    const { store, g, ink } = this, x = this.px(store.now);
    if (!store.config.live || x < LEFT || x > LEFT + this.plot) return;
    g.fillStyle = ink.faint;
    g.fillRect(Math.round(x), TOP, 1, height - BOTTOM - TOP);
  }

  drawLane({ row, top, height }, shown) {
    const { g, ink, x0, x1, plot } = this, { kinds } = this.store.config;
    g.fillStyle = ink.band;
    g.fillRect(LEFT, top, plot, height);
    const scale = plot / (x1 - x0), each = height / row.levels, narrow = new Map();
    const last = lowerBound(row.spans.length, (k) => row.spans[k].start, x1);
    for (let i = lowerBound(row.spans.length, (k) => row.spans[k].start, x0 - row.longest); i < last; i++) {
      const span = row.spans[i];
      if (span.end < x0 || span.level >= MAX_LEVELS) continue;
      shown.add(span.kind);
      const wide = (span.end - span.start) * scale;
      if (wide < 1) { cover(narrow, span, (span.start - x0) * scale, wide, plot); continue; }
      const a = Math.max(this.px(span.start), LEFT), b = Math.min(this.px(span.end), LEFT + plot);
      if (b <= a) continue;
      const y = top + span.level * each;
      g.fillStyle = this.fill(span.kind);
      g.fillRect(a, y, b - a, each);
      if (b - a > 3) { g.fillStyle = ink.background; g.fillRect(b - 0.75, y, 0.75, each); }
      this.label(span, kinds[span.kind], a, b, y, each);
    }
    // spans narrower than a pixel are added up, so a lane that is seldom busy looks pale
    for (const [key, columns] of narrow) {
      g.fillStyle = this.fill(key >> 3);
      columns.forEach((busy, x) => {
        if (!busy) return;
        g.globalAlpha = Math.min(1, Math.max(0.25, busy));
        g.fillRect(LEFT + x, top + (key & 7) * each, 1, each);
      });
      g.globalAlpha = 1;
    }
  }

  label(span, kind, a, b, y, height) {
    const { g } = this;
    if (height < 10 || !this.labels || b - a < 5.6 * span.name.length + 8) return;
    this.labels--;
    g.font = "10px system-ui, sans-serif";
    g.textAlign = "center";
    g.textBaseline = "middle";
    if (kind.hatch) {
      const wide = g.measureText(span.name).width + 6;
      g.fillStyle = kind.colour;
      g.fillRect((a + b - wide) / 2, y, wide, height);
    }
    g.fillStyle = brightness(kind.colour) < 140 ? "#fff" : "#24292f";
    g.fillText(span.name, (a + b) / 2, y + height / 2 + 0.5);
  }

  fill(number) {
    const { colour, hatch } = this.store.config.kinds[number];
    if (!hatch) return colour;
    this.patterns ??= new Map();
    if (!this.patterns.has(number)) {
      const tile = document.createElement("canvas"), n = (tile.width = tile.height = 7), q = tile.getContext("2d");
      q.fillStyle = colour;
      q.fillRect(0, 0, n, n);
      q.strokeStyle = "#777";
      q.beginPath();
      for (const d of [-n, 0, n]) {
        q.moveTo(d - 1, hatch[0] === "/" ? n + 1 : -1);
        q.lineTo(d + n + 1, hatch[0] === "/" ? -1 : n + 1);
      }
      q.stroke();
      this.patterns.set(number, this.g.createPattern(tile, "repeat"));
    }
    return this.patterns.get(number);
  }

  drawMemory({ device, top, height }) {
    const { g, ink, plot, store } = this, { time, held, peak } = store.samples.get(device);
    const [full, capacity] = this.memoryScale(device), bottom = top + height;
    const y = (amount) => bottom - (amount / full) * height;
    g.fillStyle = ink.band;
    g.fillRect(LEFT, top, plot, height);
    const steps = this.steps(time, held);
    g.save();
    g.beginPath();
    g.rect(LEFT, top - 1, plot, height + 2);
    g.clip();
    g.beginPath();
    steps.forEach(([x, amount], i) => {
      if (i) g.lineTo(x, y(steps[i - 1][1])); else g.moveTo(x, bottom);
      g.lineTo(x, y(amount));
    });
    g.strokeStyle = ink.memory;
    g.lineWidth = 1.25;
    g.stroke();
    if (steps.length) g.lineTo(steps.at(-1)[0], bottom);
    g.globalAlpha = 0.28;
    g.fillStyle = ink.memory;
    g.fill();
    g.restore();
    this.drawLimit(capacity, full, top, bottom, y, peak);
  }

  drawLimit(capacity, full, top, bottom, y, peak) {
    const { g, ink, plot } = this, x = LEFT + plot + 6, within = capacity && capacity <= full;
    g.font = "10px system-ui, sans-serif";
    g.textAlign = "left";
    g.textBaseline = "middle";
    if (within) {
      g.strokeStyle = g.fillStyle = ink.limit;
      g.setLineDash([6, 4]);
      g.lineWidth = 1;
      g.beginPath();
      g.moveTo(LEFT, y(capacity));
      g.lineTo(LEFT + plot, y(capacity));
      g.stroke();
      g.setLineDash([]);
      g.fillText(bytes(capacity), x, y(capacity) + 2, RIGHT - 8);
    }
    g.fillStyle = ink.text;
    g.fillText(`▲ ${bytes(peak)}`, x, within ? (top + bottom) / 2 + 3 : top + 5, RIGHT - 8);
    g.fillStyle = ink.faint;
    if (bottom - top > 40) g.fillText(within ? "0" : capacity ? `of ${bytes(capacity)}` : "0", x, bottom - 4, RIGHT - 8);
  }

  memoryScale(device) {
    const { samples, config } = this.store;
    const peak = Math.max(...[...samples.values()].map((memory) => memory.peak), 1);
    const largest = Math.max(...Object.values(config.capacity), 0);
    const full = peak >= largest / 4 && largest >= peak ? largest : peak;
    return [full * 1.08, config.capacity[device] || 0];
  }

  // Pixels and bytes of the visible part: per pixel the peak, then the value that stays.
  steps(time, held) {
    const first = Math.max(0, lowerBound(time.length, (k) => time[k], this.x0) - 1), steps = [];
    let pixel = null;
    for (let i = first; i < time.length && time[i] <= this.x1; i++) {
      const x = Math.round(Math.max(this.px(time[i]), LEFT) * 2) / 2;
      if (x === pixel && steps.length > 1) {
        const [peak, last] = steps.slice(-2);
        if (held[i] > peak[1]) peak[1] = held[i];
        last[1] = held[i];
      } else steps.push([x, held[i]], [x, held[i]]);
      pixel = x;
    }
    if (steps.length) steps.push([Math.min(this.px(this.store.now), LEFT + this.plot), steps.at(-1)[1]]);
    return steps;
  }

  // -- beside the canvas

  drawLegend(shown) {
    const { kinds } = this.store.config, key = [...shown].sort().join();
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...kinds.map((kind, number) => {
      if (!shown.has(number)) return "";
      const item = text("span", kind.label), swatch = make("span", "lab-swatch");
      const angle = kind.hatch[0] === "/" ? 135 : 45;
      swatch.style.background = kind.hatch ? `repeating-linear-gradient(${angle}deg, ${kind.colour} 0 3px, #777 3px 4px)` : kind.colour;
      item.prepend(swatch);
      return item;
    }));
  }

  tell() {
    const { store } = this;
    this.threads.hidden = !this.hasThreads;
    this.threads.setAttribute("aria-pressed", String(this.allThreads));
    this.pause.textContent = this.paused ? "resume" : "pause";
    this.pause.setAttribute("aria-pressed", String(this.paused));
    const forgotten = store.forgotten ? ` · the oldest ${store.forgotten.toLocaleString("en")} spans are no longer shown` : "";
    this.status.textContent = `drag to pan · ctrl or shift + wheel to zoom · keys: ← → + − 0 space${forgotten}`;
  }

  // In words, for those who do not see the canvas; also while drawing is paused.
  describe() {
    const { store } = this, now = performance.now();
    if (now - (this.told || -1e9) < 2000) return; // a screen reader needs no more
    this.told = now;
    this.canvas.setAttribute("aria-label", `${store.config.title}: ${store.devices().join(", ")} over ${duration(store.now)}`);
    this.table.replaceChildren(summary(store));
  }
}

// What stays of a run that has ended, where only the widget is known.
function picture(bytes, title) {
  const image = make("img", "", { alt: `timeline of ${title}`, style: "width: 960px; max-width: 100%" });
  image.src = URL.createObjectURL(new Blob([bytes], { type: "image/png" }));
  image.addEventListener("load", () => URL.revokeObjectURL(image.src));
  return image;
}

// -- small things ---------------------------------------------------------------------------------

function cover(narrow, span, x, wide, plot) {
  const key = (span.kind << 3) | span.level, column = Math.floor(x);
  if (column < 0 || column >= plot) return;
  if (!narrow.has(key)) narrow.set(key, new Float32Array(Math.ceil(plot)));
  narrow.get(key)[column] += wide;
}

// The text alternative: what the picture says, as a table.
function summary(store) {
  const table = document.createElement("table");
  table.append(text("caption", `${store.config.title}, ${duration(store.now)} so far`));
  const line = (tag, cells) => { const row = document.createElement("tr"); row.append(...cells.map((cell) => text(tag, cell))); table.append(row); };
  line("th", ["device", "lane", "spans", "working", "memory now", "peak memory"]);
  for (const device of store.devices()) {
    const memory = store.samples.get(device);
    for (const row of store.lanes(device)) {
      const work = row.spans.reduce((sum, span) => sum + (store.config.kinds[span.kind].hatch ? 0 : span.end - span.start), 0);
      line("td", [device, row.lane, row.spans.length, duration(work), memory ? bytes(memory.held.at(-1)) : "", memory ? bytes(memory.peak) : ""]);
    }
  }
  return table;
}

function make(tag, className, attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function text(tag, content) {
  const element = document.createElement(tag);
  element.textContent = content;
  return element;
}

function brightness(colour) {
  const numbers = colour.startsWith("#")
    ? [1, 3, 5].map((i) => parseInt(colour.length < 7 ? colour[(i + 1) / 2].repeat(2) : colour.slice(i, i + 2), 16))
    : (colour.match(/[\d.]+/g) || [255, 255, 255]).map(Number);
  return 0.299 * numbers[0] + 0.587 * numbers[1] + 0.114 * numbers[2];
}

const timeUnit = (seconds) => (seconds < 2e-3 ? [1e6, "µs"] : seconds < 2 ? [1e3, "ms"] : [1, "s"]);
const duration = (seconds) => { const [factor, unit] = timeUnit(Math.abs(seconds)); return `${+(seconds * factor).toPrecision(4)} ${unit}`; };

function bytes(amount) {
  const power = Math.min(Math.floor(Math.log2(Math.max(amount, 1)) / 10), 3);
  return `${+(amount / 2 ** (10 * power)).toPrecision(3)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((m) => m * power >= least) * power;
}

// While a run goes on the axis grows in steps, so that bars do not creep.
const niceEnd = (now) => { const step = niceStep(Math.max(now, 1e-3) / 8); return Math.ceil((now * 1.04) / step) * step; };

const STYLE = `
.lab-live { position: relative; color: var(--jp-ui-font-color1, #24292f); background: var(--jp-layout-color0, #fff);
  font: 12px system-ui, sans-serif; padding: 2px 0; }
.lab-live canvas { display: block; width: 100%; touch-action: pan-y; cursor: grab; }
.lab-live canvas:active { cursor: grabbing; }
.lab-live canvas:focus-visible, .lab-live button:focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: -2px; }
.lab-head { display: flex; align-items: center; gap: 8px; margin-bottom: 4px; }
.lab-head strong { font-size: 13px; }
.lab-head i { flex: 1; color: var(--jp-ui-font-color2, #6e7781); }
.lab-live button { font: inherit; color: inherit; background: transparent; cursor: pointer; padding: 1px 9px;
  border: 1px solid var(--jp-border-color1, #bdbdbd); border-radius: 3px; }
.lab-live button:disabled { opacity: 0.5; cursor: default; }
.lab-live button:hover, .lab-live button[aria-pressed=true] { background: var(--jp-layout-color2, #eee); }
.lab-legend { display: flex; flex-wrap: wrap; gap: 4px 18px; justify-content: center; margin-top: 2px; }
.lab-legend span { display: inline-flex; align-items: center; gap: 6px; }
.lab-legend .lab-swatch { width: 20px; height: 10px; }
.lab-status { color: var(--jp-ui-font-color2, #6e7781); font-size: 11px; text-align: center; margin-top: 4px; }
.lab-tip { position: absolute; z-index: 10; pointer-events: none; white-space: pre; padding: 4px 8px; border-radius: 4px;
  font-size: 11px; line-height: 1.45; background: var(--jp-inverse-layout-color1, #222); color: var(--jp-ui-inverse-font-color0, #fff);
  box-shadow: 0 1px 5px rgba(0,0,0,.35); }
.lab-live [hidden] { display: none; }
.lab-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
`;
