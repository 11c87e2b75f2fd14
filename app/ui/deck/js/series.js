// Timelines over forward passes: stacked bars, prefill shaded apart from decode, moved settings as dashed lines.

import { begin, label, niceStep, note, short } from "./paint.js";

const LEFT = 36, TOP = 8, BOTTOM = 16, BARE = 5; // below: what the axis is, or nothing where another chart says it
export const SHOWN = 120;

export class Timeline {
  constructor(canvas, colours) { Object.assign(this, { canvas, colours, shown: SHOWN, cursor: null, pass: null }); } // pass: the one that is looked at, of the frame's

  box() { return { x: LEFT, y: TOP, w: this.canvas.clientWidth - LEFT - 4, h: this.canvas.clientHeight - TOP - (this.bare ? BARE : BOTTOM) }; }

  /** Whether the chart below has the axis of both. */
  get bare() { return this.canvas.dataset.axis === "below" && !this.canvas.closest(".large"); }

  draw(frame) {
    const surface = begin(this.canvas), { g } = surface, c = this.colours(), box = this.box(), n = frame.step.length;
    Object.assign(this, { frame, first: Math.max(0, n - SHOWN), count: Math.min(SHOWN, n), ready: n > 0 });
    const parts = this.parts(frame), top = this.ceiling(parts, frame);
    if (!n) return note(surface, "No tokens yet", c.mute);
    this.grid(surface, box, top);
    const width = box.w / SHOWN, bar = Math.max(1, width - (width > 3 ? 1 : 0.25));
    for (let k = 0; k < this.count; k++) {
      const i = this.first + k, x = box.x + k * width;
      if (!frame.decode[i]) { g.fillStyle = c.shade; g.fillRect(x, box.y, width, box.h); }
      let y = box.y + box.h, left = box.h;
      g.globalAlpha = frame.decode[i] ? 1 : 0.55;
      for (const [values, colour] of parts) {
        const tall = Math.min(left, (box.h * values[i]) / top);
        g.fillStyle = c[colour]; g.fillRect(x, y - tall, bar, tall);
        y -= tall; left -= tall;
      }
      g.globalAlpha = 1;
      if (left <= 0) { g.fillStyle = c.text; g.fillRect(x, box.y - 3, bar, 2); }
    }
    this.extra(surface, box, top);
    this.marks(surface, box, width);
    for (const at of new Set([this.cursor, this.pass === null ? null : this.pass - this.first])) {
      if (at === null) continue;
      g.fillStyle = c.text; g.globalAlpha = 0.18; g.fillRect(box.x + at * width, box.y, width, box.h); g.globalAlpha = 1;
    }
    if (this.pass !== null) { g.fillStyle = c.mark; g.fillRect(box.x + (this.pass - this.first + 0.5) * width - 0.75, box.y, 1.5, box.h); }
  }

  /** The top of the axis: what decode needs, without letting a rare spike flatten the rest. */
  ceiling(parts, frame) {
    const sums = [];
    for (let i = this.first; i < frame.step.length; i++) if (frame.decode[i]) sums.push(parts.reduce((s, [v]) => s + v[i], 0));
    sums.sort((a, b) => a - b);
    const most = sums.length ? Math.min(sums[sums.length - 1], 2.5 * sums[Math.floor(sums.length * 0.9)] || Infinity) : 0;
    const step = niceStep((most || 1) * 1.08, 4);
    return Math.ceil(((most || 1) * 1.08) / step) * step;
  }

  grid({ g }, box, top) {
    const c = this.colours(), step = niceStep(top, 3);
    for (let v = 0; v <= top * 1.001; v += step) {
      const y = Math.round(box.y + box.h - (v / top) * box.h) + 0.5;
      g.fillStyle = c.grid; g.fillRect(box.x, y, box.w, 1);
      label(g, short(v).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""), LEFT - 6, y, c.mute, "right");
    }
    if (this.bare) return;
    label(g, `last ${SHOWN} passes`, box.x, box.y + box.h + 10, c.mute);
    label(g, "now", box.x + box.w, box.y + box.h + 10, c.mute, "right");
  }

  marks({ g }, box, width) {
    const c = this.colours(), start = this.frame.step[this.first];
    g.strokeStyle = c.mark; g.lineWidth = 1.5; g.setLineDash([4, 3]);
    this.markAt = new Map();
    this.frame.marks.forEach(([index], i) => {
      const k = Math.min(index - start, this.count);
      if (k >= 0) this.markAt.set(k, [...(this.markAt.get(k) ?? []), this.frame.mark_texts[i]]);
    });
    for (const k of this.markAt.keys()) {
      const x = box.x + k * width;
      g.beginPath(); g.moveTo(x, box.y); g.lineTo(x, box.y + box.h); g.stroke();
    }
    g.setLineDash([]);
    const last = Math.max(...this.markAt.keys());
    if (this.markAt.size) this.flag(g, this.markAt.get(last).at(-1), box.x + last * width, box, c);
  }

  flag(g, text, x, box, c) {
    const most = box.w - 12; // the tooltip has all of it
    if (g.measureText(text).width > most) [text] = text.split(": ");
    if (g.measureText(text).width > most) {
      while (text.length > 4 && g.measureText(`${text}…`).width > most) text = text.slice(0, -1);
      text += "…";
    }
    const room = g.measureText(text).width + 8, left = Math.max(box.x, x + room > box.x + box.w ? x - room - 2 : x + 2);
    g.fillStyle = c.card; g.globalAlpha = 0.88; g.fillRect(left, box.y, room, 15); g.globalAlpha = 1;
    label(g, text, left + 4, box.y + 8, c.mark);
  }

  at(x) {
    const box = this.box(), k = Math.floor(((x - box.x) / box.w) * SHOWN);
    return this.ready && k >= 0 && k < this.count ? k : null;
  }

  where(k) { const box = this.box(); return [box.x + ((k + 0.5) * box.w) / SHOWN, box.y + box.h / 2]; }

  move(k, dx) { return Math.min(this.count - 1, Math.max(0, (k ?? (this.pass === null ? this.count : this.pass - this.first)) + dx)); }

  tell(k) {
    const i = this.first + k, f = this.frame, notes = [...(this.markAt.get(k) ?? []), ...((k === this.count - 1 && this.markAt.get(k + 1)) || [])];
    return [`Pass ${f.step[i]}, ${f.decode[i] ? "decode" : "prefill"}`, ...this.lines(i), ...notes].join("\n");
  }

  extra() {}

  /** A dashed line across the bars at a value that is on the axis. */
  level({ g }, box, top, value, name, colour) {
    if (!(value > 0) || value > top) return;
    const c = this.colours(), y = box.y + box.h - (value / top) * box.h;
    g.strokeStyle = c[colour]; g.lineWidth = 1; g.setLineDash([2, 3]);
    g.beginPath(); g.moveTo(box.x, y); g.lineTo(box.x + box.w, y); g.stroke(); g.setLineDash([]);
    const room = g.measureText(name).width + 4;
    g.fillStyle = c.card; g.globalAlpha = 0.8; g.fillRect(box.x + box.w - room, y - 12, room, 11); g.globalAlpha = 1;
    label(g, name, box.x + box.w - 2, y - 6, c[colour], "right");
  }
}

export class LinkTraffic extends Timeline {
  /** Megabytes per second stay readable where little was copied. */
  unit(frame) { return frame.link_peak_gbps >= 0.5 ? ["GB/s", 1e6] : ["MB/s", 1e3]; }

  parts(frame) {
    if (this.seen !== frame) {
      const [, size] = this.unit(frame), rate = (b) => b.map((v, i) => v / Math.max(frame.total_ms[i], 1e-3) / size);
      this.rates = [[rate(frame.demand_bytes), "demand"], [rate(frame.prefetch_bytes), "prefetch"], [rate(frame.wasted_bytes), "wasted"]];
      this.seen = frame;
    }
    return this.rates;
  }

  /** What was moved is said by the chart above, as long as both stand close. */
  flag(...how) { if (this.canvas.closest(".large")) super.flag(...how); }

  extra(surface, box, top) {
    this.peak(surface, box, top);
    this.disk(surface, box, top);
  }

  /** What came from disk, as a line over the bars: it is a part of them. */
  disk({ g }, box, top) {
    const f = this.frame, [, size] = this.unit(f), width = box.w / SHOWN;
    if (!f.disk_bytes.some((b) => b > 0)) return;
    g.strokeStyle = this.colours().text; g.lineWidth = 1.25;
    g.beginPath();
    for (let k = 0; k < this.count; k++) {
      const i = this.first + k, rate = f.disk_bytes[i] / Math.max(f.total_ms[i], 1e-3) / size;
      const y = box.y + box.h * (1 - Math.min(1, rate / top)), x = box.x + k * width;
      g.lineTo(x, y); g.lineTo(x + width, y);
    }
    g.stroke();
  }

  peak(surface, box, top) {
    this.level(surface, box, top, this.frame.link_limit_gbps * (1e6 / this.unit(this.frame)[1]), "peak", "mute");
  }

  lines(i) {
    const f = this.frame, mb = (v) => (v / 1e6).toFixed(2), [unit] = this.unit(f);
    const rate = this.rates.reduce((s, [v]) => s + v[i], 0);
    return [`${short(rate)} ${unit} over ${f.total_ms[i].toFixed(1)} ms`,
      `demand ${mb(f.demand_bytes[i])} + prefetch ${mb(f.prefetch_bytes[i])} + wasted ${mb(f.wasted_bytes[i])} MB`,
      ...(f.disk_bytes[i] ? [`of it ${mb(f.disk_bytes[i])} MB read from disk`] : [])];
  }
}
