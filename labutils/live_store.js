// What a view of a trace holds: rows of spans and samples of memory, in the browser.
// live.py puts this file before live.js, so that the widget is one module that fetches nothing.

const SPAN = 32, SAMPLE = 20; // bytes per record, in the layout of packing.py
const MAX_LEVELS = 4;         // spans nested deeper are not drawn
const LANES = ["compute", "copy", "communication", "main"];

class Store {
  constructor(config) {
    this.config = config;
    this.texts = [];
    this.rows = [];            // {device, lane, spans: [{start, end, bytes, kind, name, detail, level}]}
    this.samples = new Map();  // device -> {time: [], held: [], peak}
    this.next = { spans: 0, samples: 0 };
    this.total = 0;
    this.forgotten = config.left_out || 0;
    this.now = 0;
    this.listeners = new Set();
  }

  // Frees the data of a run that has ended.
  clear() {
    this.rows = [];
    this.samples.clear();
    this.listeners.clear();
  }

  counts() {
    return { ...this.next, texts: this.texts.length, rows: this.rows.length };
  }

  // Returns false if something before this message has been missed (and can be asked for).
  add(message, [spans, samples]) {
    const [firstText, texts] = message.texts, [firstRow, rows] = message.rows;
    if (firstText > this.texts.length || firstRow > this.rows.length) return this.askOnce();
    this.texts.push(...texts.slice(this.texts.length - firstText));
    for (const [device, lane] of rows.slice(this.rows.length - firstRow)) {
      this.rows.push({ device, lane, spans: [], longest: 0, levels: 1, sorted: true });
    }
    this.addSpans(asView(spans), message.spans);
    this.addSamples(asView(samples), message.samples);
    this.now = Math.max(this.now, message.now);
    for (const listener of this.listeners) listener();
    return true;
  }

  askOnce() {
    const now = performance.now();
    if (now - (this.asked || -1e9) < 2000) return true;
    this.asked = now;
    return false;
  }

  addSpans(data, first) {
    for (let i = Math.max(0, this.next.spans - first); i < data.byteLength / SPAN; i++) {
      const at = i * SPAN, start = data.getFloat64(at, true);
      const span = {
        start, end: data.getFloat64(at + 8, true), bytes: data.getFloat32(at + 16, true),
        kind: data.getUint8(at + 22), name: this.texts[data.getUint32(at + 24, true)],
        detail: this.texts[data.getUint32(at + 28, true)], level: 0,
      };
      const row = this.rows[data.getUint16(at + 20, true)];
      row.spans.push(span);
      row.longest = Math.max(row.longest, span.end - span.start);
      row.sorted = false;
      this.now = Math.max(this.now, span.end);
      this.total++;
    }
    this.next.spans = Math.max(this.next.spans, first + data.byteLength / SPAN);
    if (this.total > this.config.keep * 1.1) this.forget();
  }

  addSamples(data, first) {
    for (let i = Math.max(0, this.next.samples - first); i < data.byteLength / SAMPLE; i++) {
      const at = i * SAMPLE, device = this.rows[data.getUint16(at + 16, true)].device;
      if (!this.samples.has(device)) this.samples.set(device, { time: [], held: [], peak: 0 });
      const memory = this.samples.get(device), held = data.getFloat64(at + 8, true);
      memory.time.push(data.getFloat64(at, true));
      memory.held.push(held);
      memory.peak = Math.max(memory.peak, held);
      const excess = memory.time.length - this.config.keep;
      if (excess > this.config.keep / 10) {
        memory.time.splice(0, excess);
        memory.held.splice(0, excess);
      }
    }
    this.next.samples = Math.max(this.next.samples, first + data.byteLength / SAMPLE);
  }

  // Drops the oldest spans, so that a long run does not fill the browser's memory.
  forget() {
    const starts = Float64Array.from(this.rows.flatMap((row) => row.spans.map((s) => s.start))).sort();
    const cut = starts[this.total - this.config.keep];
    let kept = 0;
    for (const row of this.rows) {
      row.spans = row.spans.filter((span) => span.start >= cut);
      kept += row.spans.length;
    }
    this.forgotten += this.total - kept;
    this.total = kept;
  }

  devices() {
    const names = [...new Set(this.rows.map((row) => row.device))];
    return names.sort((a, b) => (a === "host") - (b === "host") || natural(a, b));
  }

  lanes(device) {
    const rank = (row) => (LANES.includes(row.lane) ? LANES.indexOf(row.lane) : LANES.length);
    return this.rows.filter((row) => row.device === device && row.lane)
      .sort((a, b) => rank(a) - rank(b) || natural(a.lane, b.lane));
  }
}

const asView = (b) => (b instanceof DataView ? b : new DataView(b.buffer || b, b.byteOffset || 0, b.byteLength));
const natural = (a, b) => a.localeCompare(b, "en", { numeric: true });

// The first index whose value is at least x.
function lowerBound(length, value, x) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (value(middle) < x) low = middle + 1; else high = middle;
  }
  return low;
}

// Sorts a lane's spans by start and gives each the first level that is free when it starts.
function arrange(row) {
  if (row.sorted) return;
  row.spans.sort((a, b) => a.start - b.start || b.end - a.end);
  const ends = [];
  for (const span of row.spans) {
    const free = ends.findIndex((end) => end < span.start + 1e-9);
    span.level = free < 0 ? ends.length : free;
    ends[span.level] = span.end;
  }
  row.levels = Math.min(Math.max(ends.length, 1), MAX_LEVELS);
  row.sorted = true;
}

