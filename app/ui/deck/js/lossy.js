// What lossy options do: assignments changed in each layer, entropies against their threshold, missing experts against
// the layer gate. These panels are there only while something lossy is on.

import { begin, label, niceStep, note, short, ticks } from "./paint.js";
import { Grid } from "./maps.js";
import { Timeline } from "./series.js";

export const KINDS = [["substituted", "subst"], ["dropped", "drop"], ["predicted", "guess"]]; // as LossyLook.per_layer has them
const LEFT = 34;
const percent = (part, digits = 1) => `${(100 * part).toFixed(digits)} %`;

/** One bar a layer, stacked; the axis ends a little above the longest. */
export class Changed extends Grid {
  constructor(canvas, colours) { super(canvas, colours, ["layer", "of its assignments"]); }

  draw(frame) {
    Object.assign(this, { ready: Boolean(frame.lossy), frame, rows: frame.shape.layers, cols: 1 });
    if (!this.ready) return;
    const surface = begin(this.canvas), { g } = surface, box = this.frameBox(), c = this.colours(), step = box.h / this.rows;
    for (const i of ticks(this.rows, box.h, 15)) label(g, i, LEFT - 6, Math.max(box.y + 5, box.y + (i + 0.5) * step), c.mute, "right");
    const most = Math.max(...Array.from({ length: this.rows }, (_, i) => this.sum(i))), unit = niceStep(Math.max(most, 0.04) * 1.02, 4);
    const top = Math.min(1, Math.ceil((Math.max(most, 0.04) * 1.02) / unit) * unit);
    this.axis(g, box, top, unit, c);
    const gap = step > 5 ? Math.min(6, step * 0.25) : 0;
    for (let i = 0; i < this.rows; i++) {
      const y = box.y + i * step + gap / 2;
      let x = box.x;
      KINDS.forEach(([, colour], k) => {
        const wide = (this.part(i, k) / top) * box.w;
        g.fillStyle = c[colour]; g.globalAlpha = this.cursor && this.cursor.row !== i ? 0.55 : 1;
        g.fillRect(x, y, wide, step - gap); x += wide;
      });
      g.globalAlpha = 1;
    }
    this.titles(surface, box);
    if (!frame.step.length) note(surface, "No tokens yet", c.mute);
    else if (!most) note(surface, "Nothing was changed", c.mute);
  }

  axis(g, box, top, unit, c) {
    for (let v = 0; v <= top * 1.001; v += unit) {
      const x = Math.round(box.x + (v / top) * box.w), end = v + unit > top * 1.001;
      g.fillStyle = c.grid; g.fillRect(x - (end ? 1 : 0), box.y, 1, box.h);
      label(g, `${+(100 * v).toFixed(1)}%`, x, box.y + box.h + 9, c.mute, end ? "right" : v ? "center" : "left");
    }
  }

  part(layer, kind) { return this.frame.lossy.per_layer[layer * KINDS.length + kind]; }

  sum(layer) { return KINDS.reduce((all, _, k) => all + this.part(layer, k), 0); }

  tell({ row }) {
    const parts = KINDS.map(([name], k) => [name, this.part(row, k)]).filter(([, part]) => part > 0).map(([name, part]) => `${percent(part)} ${name}`);
    return `Layer ${row}: ${parts.length ? parts.join(", ") : "nothing changed"}`;
  }
}

/** How the tokens' gate weights are spread in one layer, and the threshold at or below which nothing is replaced. */
export class Entropy {
  constructor(canvas, colours) { Object.assign(this, { canvas, colours, cursor: null, ready: false, layer: 0 }); }

  box() { return { x: LEFT, y: 12, w: this.canvas.clientWidth - LEFT - 4, h: this.canvas.clientHeight - 42 }; }

  draw(frame) {
    const { lossy } = frame;
    this.ready = Boolean(lossy);
    if (!lossy) return;
    const bins = lossy.tae.length / frame.shape.layers, surface = begin(this.canvas), { g } = surface, c = this.colours(), box = this.box();
    this.counts = lossy.tae.subarray(this.layer * bins, (this.layer + 1) * bins);
    this.threshold = lossy.threshold[this.layer];
    const most = Math.max(...this.counts), wide = box.w / bins;
    for (const v of [0, 0.25, 0.5, 0.75, 1]) label(g, v, box.x + v * box.w, box.y + box.h + 9, c.mute, v === 1 ? "right" : v ? "center" : "left");
    label(g, "entropy of the gate weights (TAE)", box.x + box.w / 2, box.y + box.h + 23, c.mute, "center");
    g.fillStyle = c.grid; g.fillRect(box.x, box.y + box.h, box.w, 1);
    if (!most) return note(surface, "No tokens yet", c.mute);
    label(g, most, LEFT - 6, box.y + 5, c.mute, "right");
    this.counts.forEach((count, i) => {
      const tall = (count / most) * box.h, kept = (i + 0.5) / bins <= this.threshold;
      g.fillStyle = kept ? c.idle : c.subst; g.globalAlpha = this.cursor !== null && this.cursor !== i ? 0.6 : 1;
      g.fillRect(box.x + i * wide, box.y + box.h - tall, Math.max(1, wide - 1), tall);
    });
    g.globalAlpha = 1;
    if (!Number.isNaN(this.threshold)) this.line(g, box, c);
  }

  line(g, box, c) {
    const x = box.x + Math.min(1, this.threshold) * box.w, text = `threshold ${short(this.threshold)}`, room = g.measureText(text).width;
    g.strokeStyle = c.mark; g.lineWidth = 1.5; g.setLineDash([4, 3]);
    g.beginPath(); g.moveTo(x, box.y); g.lineTo(x, box.y + box.h); g.stroke(); g.setLineDash([]);
    label(g, text, x + (x + room > box.x + box.w ? -4 : 4), 6, c.mark, x + room > box.x + box.w ? "right" : "left");
  }

  at(x) {
    const box = this.box(), i = Math.floor(((x - box.x) / box.w) * (this.counts?.length ?? 0));
    return this.ready && i >= 0 && i < this.counts.length ? i : null;
  }

  where(i) { const box = this.box(); return [box.x + ((i + 0.5) * box.w) / this.counts.length, box.y + box.h / 2]; }

  move(i, dx) { return Math.min(this.counts.length - 1, Math.max(0, (i ?? -1) + dx)); }

  tell(i) {
    const bins = this.counts.length, kept = (i + 0.5) / bins <= this.threshold;
    return `Entropy ${short(i / bins)} to ${short((i + 1) / bins)}: ${this.counts[i]} token${this.counts[i] === 1 ? "" : "s"}${kept ? ", left alone" : ""}`;
  }
}

/** The share of requested experts that were missing, as bars, and the layer gate they were held against, as a line. */
export class Missing extends Timeline {
  draw(frame) {
    this.ready = false;
    if (frame.lossy) super.draw(frame);
  }

  parts(frame) {
    if (this.seen !== frame) {
      this.missing = frame.lossy.delta.map((v) => (Number.isNaN(v) ? 0 : v));
      this.seen = frame;
    }
    return [[this.missing, "subst"]];
  }

  limit() { return 1.001; } // a layer that misses everything must not be clipped as a spike

  extra({ g }, box) {
    const { beta } = this.frame.lossy, width = box.w / this.shown;
    g.strokeStyle = this.colours().text; g.lineWidth = 1.5;
    g.beginPath();
    for (let k = 0, going = false; k < this.count; k++) {
      const value = beta[this.first + k], x = box.x + k * width, y = box.y + box.h * (1 - Math.min(1, value));
      if (Number.isNaN(value)) { going = false; continue; }
      if (going) g.lineTo(x, y); else g.moveTo(x, y);
      g.lineTo(x + width, y); going = true;
    }
    g.stroke();
  }

  lines(i) {
    const { delta, beta } = this.frame.lossy;
    return [Number.isNaN(delta[i]) ? "nothing lossy was on" : `${percent(delta[i])} of the requested experts were missing`,
      ...(Number.isNaN(beta[i]) ? [] : [`from ${percent(beta[i])} of a layer on, all of its experts are waited for`])];
  }
}
