// Experts against experts of one layer: co-activation counts, or which expert substitutes for which.

import { begin, cells, note, pixel, ramp, short } from "./paint.js";
import { Grid } from "./maps.js";

export class Pairs extends Grid {
  constructor(canvas, colours, find) {
    super(canvas, colours, ["expert", "expert"]);
    Object.assign(this, { find, wanted: "together" });
    for (const button of find("views").children) button.addEventListener("click", () => this.choose(button.dataset.view));
  }

  choose(view) {
    this.wanted = view;
    if (this.frame) this.draw(this.frame);
  }

  /** Buddies can be looked at only while a substitute is on that has them. */
  draw(frame) {
    const n = frame.shape.experts, able = Boolean(frame.lossy?.buddies), buddies = able && this.wanted === "buddies";
    Object.assign(this, { ready: true, frame, rows: n, cols: n, buddies, names: buddies ? ["missing", "in its place"] : ["expert", "expert"] });
    this.say(frame, able, buddies);
    const surface = begin(this.canvas), box = this.frameBox(), c = this.colours();
    const tone = ramp([c.ramp0, c.ramp1, c.ramp2, c.ramp3]), left = pixel(c.sunken), values = buddies ? frame.lossy.buddies : frame.coactivation;
    cells(surface, box, n, n, (i) => (i % (n + 1) ? tone[values[i]] : left), pixel(c.card));
    this.axes(surface, box, n, n);
    if (!buddies && !frame.coactivation_max) note(surface, "No tokens yet", c.mute);
    if (this.cursor) this.outline(surface, box, this.cursor.row, this.cursor.col, n, n, c.text);
  }

  /** The words around the map. */
  say(frame, able, buddies) {
    this.find("views").hidden = !able;
    for (const button of this.find("views").children) button.setAttribute("aria-pressed", button.dataset.view === (buddies ? "buddies" : "together"));
    this.text("ramp-min", buddies ? "never" : "0");
    this.text("ramp-max", buddies ? share(frame.lossy.buddies_max) : `${frame.coactivation_max}`);
    this.text("ramp-unit", buddies ? "q" : "tokens, log scale");
  }

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }

  tell({ row, col }) {
    if (row === col) return `Expert ${row}: the diagonal is left out`;
    return this.buddies ? this.buddy(row, col) : this.together(row, col);
  }

  together(row, col) {
    const level = this.frame.coactivation[row * this.cols + col] / 255; // log scale; exact while counts are small
    const count = Math.round(Math.expm1(level * Math.log1p(this.frame.coactivation_max)));
    return `Experts ${row} and ${col}: together for ${count > 20 ? "about " : ""}${count} token${count === 1 ? "" : "s"}`;
  }

  buddy(row, col) {
    const { buddies, buddies_max: most } = this.frame.lossy, level = buddies[row * this.cols + col];
    return `Expert ${row} → ${col}: ${level ? `q ${share((level / 255) * most)}` : "never"}`;
  }
}

/** A share with two digits, as papers write it: ".31". */
function share(value) { return value < 0.995 ? short(value).replace(/^0/, "") : short(value); }
