// Panels made of cells: residency (layers x experts), hit rate (layers).
// Each panel: draw(frame) paints it, at(x, y) -> key of the cell there, tell(key) -> text, where(key) -> point.

import { begin, cells, label, note, pixel, ticks } from "./paint.js";

export const PLACES = ["host", "in flight", "resident", "hit now", "disk", "in part"]; // as core.types.Residence numbers them
const LEFT = 38, BOTTOM = 30, CORNER = 17, TOP = 2; // below: two lines, or one where the name fits beside its numbers

/** A grid of rows x cols with numbered axes; the base of all of them. */
export class Grid {
  constructor(canvas, colours, names) { Object.assign(this, { canvas, colours, names }); this.cursor = null; }

  frameBox() { return { x: LEFT, y: TOP, w: this.canvas.clientWidth - LEFT - 2, h: this.canvas.clientHeight - TOP - (this.inCorner ? CORNER : BOTTOM) }; }

  /** Whether the name of the lower axis stands left of its numbers. */
  get inCorner() { return this.names[1] === "expert"; }

  axes(surface, box, rows, cols) {
    const { g } = surface, c = this.colours();
    for (const i of ticks(rows, box.h, 15)) label(g, i, LEFT - 6, Math.max(box.y + 5, box.y + ((i + 0.5) * box.h) / rows), c.mute, "right");
    for (const i of ticks(cols, box.w, 26)) label(g, i, box.x + ((i + 0.5) * box.w) / cols, box.y + box.h + 9, c.mute, "center");
    this.titles(surface, box);
  }

  titles({ g }, box) {
    const c = this.colours();
    if (this.inCorner) label(g, this.names[1], 0, box.y + box.h + 9, c.mute);
    else label(g, this.names[1], box.x + box.w / 2, box.y + box.h + 23, c.mute, "center");
    g.save(); g.translate(8, box.y + box.h / 2); g.rotate(-Math.PI / 2); label(g, this.names[0], 0, 0, c.mute, "center"); g.restore();
  }

  outline({ g }, box, row, col, rows, cols, colour) {
    g.strokeStyle = colour; g.lineWidth = 2;
    g.strokeRect(box.x + (col * box.w) / cols, box.y + (row * box.h) / rows, box.w / cols, box.h / rows);
  }

  at(x, y) {
    const box = this.frameBox();
    const col = Math.floor(((x - box.x) / box.w) * this.cols), row = Math.floor(((y - box.y) / box.h) * this.rows);
    return this.ready && col >= 0 && row >= 0 && col < this.cols && row < this.rows ? { row, col } : null;
  }

  where({ row, col }) {
    const box = this.frameBox();
    return [box.x + ((col + 0.5) * box.w) / this.cols, box.y + ((row + 0.5) * box.h) / this.rows];
  }

  move(key, dx, dy) {
    const at = key ?? { row: 0, col: -1 };
    return { row: Math.min(this.rows - 1, Math.max(0, at.row + dy)), col: Math.min(this.cols - 1, Math.max(0, at.col + dx)) };
  }
}

export class Residency extends Grid {
  constructor(canvas, colours) { super(canvas, colours, ["layer", "expert"]); this.layer = 0; }

  draw(frame) {
    Object.assign(this, { ready: true, frame, rows: frame.shape.layers, cols: frame.shape.experts });
    const surface = begin(this.canvas), box = this.frameBox(), c = this.colours();
    const tone = [c.host, c.flight, c.resident, c.hit, c.disk, c.part].map(pixel);
    cells(surface, box, this.rows, this.cols, (i) => tone[frame.place[i]], pixel(c.card));
    this.pins(surface, box, c.text);
    this.axes(surface, box, this.rows, this.cols);
    const y = box.y + (this.layer * box.h) / this.rows, h = box.h / this.rows;
    surface.g.fillStyle = c.mark;
    surface.g.fillRect(box.x - 4, y, 2.5, Math.max(2, h));
    if (this.cursor) this.outline(surface, box, this.cursor.row, this.cursor.col, this.rows, this.cols, c.text);
  }

  /** A dot on every pinned expert. */
  pins({ g }, box, colour) {
    const w = box.w / this.cols, h = box.h / this.rows, size = Math.max(1, Math.min(w, h, 12) / 3);
    g.fillStyle = colour;
    for (const eid of this.frame.pinned ?? []) {
      g.fillRect(box.x + ((eid % this.cols) + 0.5) * w - size / 2, box.y + (Math.floor(eid / this.cols) + 0.5) * h - size / 2, size, size);
    }
  }

  tell({ row, col }) {
    const eid = row * this.cols + col, pinned = this.frame.pinned?.includes(eid) ? ", pinned" : "";
    return `Layer ${row}, expert ${col}: ${PLACES[this.frame.place[eid]]}${pinned}`;
  }
}

export class Layers extends Grid {
  constructor(canvas, colours) { super(canvas, colours, ["layer", "hit rate"]); }

  draw(frame) {
    Object.assign(this, { ready: true, frame, rows: frame.shape.layers, cols: 1 });
    const surface = begin(this.canvas), { g } = surface, box = this.frameBox(), c = this.colours(), step = box.h / this.rows;
    for (const i of ticks(this.rows, box.h, 15)) label(g, i, LEFT - 6, Math.max(box.y + 5, box.y + (i + 0.5) * step), c.mute, "right");
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const x = Math.round(box.x + part * box.w) - (part === 1 ? 0.5 : -0.5);
      g.fillStyle = c.grid; g.fillRect(x, box.y, 1, box.h);
      label(g, `${part * 100}%`, x, box.y + box.h + 9, c.mute, part === 1 ? "right" : part ? "center" : "left");
    }
    const gap = step > 5 ? Math.min(6, step * 0.25) : 0;
    frame.hit_rate.forEach((rate, i) => {
      const y = box.y + i * step + gap / 2, known = !Number.isNaN(rate);
      g.fillStyle = this.cursor?.row === i ? c.text : c.resident;
      if (known) g.fillRect(box.x, y, Math.max(1, rate * box.w), step - gap);
      if (known && step >= 18) label(g, `${(100 * rate).toFixed(0)}%`, box.x + Math.max(34, rate * box.w) - 6, y + (step - gap) / 2, rate > 0.12 ? "#fff" : c.text, "right");
    });
    this.titles(surface, box);
    if (frame.hit_rate.every(Number.isNaN)) note(surface, "No tokens yet", c.mute);
  }

  tell({ row }) {
    const rate = this.frame.hit_rate[row];
    return `Layer ${row}: ${Number.isNaN(rate) ? "no requests yet" : `${(100 * rate).toFixed(1)} % of requests hit`}`;
  }
}
