// The regret meter: the chosen cache policy, the best other one and the best possible, on the same last tokens.

import { begin, label, note } from "./paint.js";

const RIGHT = 52, TOP = 1, AXIS = 15, GAP = 5;
const percent = (rate, digits = 0) => `${(100 * rate).toFixed(digits)} %`;

export class Regret {
  /** `use(policy)` is called when the user wants the best other policy. */
  constructor(root, find, colours, use) {
    Object.assign(this, { root, find, colours, canvas: root.querySelector('[data-c="regret"]'), cursor: null, ready: false });
    this.button = find("regret-use");
    this.button.addEventListener("click", () => { this.button.disabled = true; use(this.comparison.best); });
  }

  draw(frame) {
    const comparison = frame.regret, ready = comparison?.state === "ready";
    Object.assign(this, { comparison, ready, lossy: Boolean(frame.lossy), cursor: ready ? this.cursor : null });
    if (!comparison) return;
    this.text("regret-text", ready ? summary(comparison) : comparison.title);
    this.text("regret-note", ready ? remark(comparison, this.lossy) : "");
    this.offer(ready && comparison.better ? comparison : null);
    const surface = begin(this.canvas);
    if (ready) this.bars(surface, comparison);
    else note(surface, waiting(comparison), this.colours().mute);
  }

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }

  /** The button names what it would choose; pressed, it waits for the next figures. */
  offer(comparison) {
    const key = comparison ? `${comparison.policy} ${comparison.best} ${comparison.tokens}` : "";
    if (this.offered !== key) this.button.disabled = false;
    this.offered = key;
    this.button.hidden = !comparison;
    if (!comparison) return;
    if (this.button.textContent !== `Use ${comparison.best_title}`) this.button.textContent = `Use ${comparison.best_title}`;
    this.button.title = `Choose ${comparison.best_title} as cache policy from the next token on`;
  }

  /** Where the bars are; names have their own column, as wide as the longest. */
  box() {
    const g = this.canvas.getContext("2d"), names = rows(this.comparison).map(([name]) => g.measureText(name).width);
    const left = Math.min(Math.ceil(Math.max(...names)) + 10, this.canvas.clientWidth * 0.45);
    return { x: left, y: TOP, w: this.canvas.clientWidth - left - RIGHT, h: this.canvas.clientHeight - TOP - AXIS };
  }

  bars({ g }, comparison) {
    const c = this.colours(), box = this.box(), step = box.h / 3;
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const x = Math.round(box.x + part * box.w) - (part === 1 ? 0.5 : -0.5);
      g.fillStyle = c.grid; g.fillRect(x, box.y, 1, box.h);
      if (box.w > 240 || part % 0.5 === 0) label(g, `${part * 100}%`, x, box.y + box.h + 8, c.mute, part === 1 ? "right" : part ? "center" : "left");
    }
    rows(comparison).forEach(([name, rate, colour], i) => {
      const y = box.y + i * step + GAP / 2, tall = step - GAP;
      label(g, name, box.x - 6, y + tall / 2, this.cursor === i ? c.text : c.mute, "right");
      g.fillStyle = c[colour]; g.globalAlpha = this.cursor === null || this.cursor === i ? 1 : 0.6;
      g.fillRect(box.x, y, Math.max(1, rate * box.w), tall);
      g.globalAlpha = 1;
      label(g, percent(rate, 1), box.x + box.w + RIGHT - 2, y + tall / 2, c.text, "right");
    });
    if (comparison.prefetch) this.alone(g, comparison, box, step, c);
  }

  /** Prefetching lifts the engine's own figure: a line across its bar says where it would be without. */
  alone(g, comparison, box, step, c) {
    const x = box.x + comparison.alone * box.w;
    g.fillStyle = c.text; g.fillRect(x - 1, box.y + 1, 2, step - 2);
  }

  at(x, y) {
    if (!this.ready) return null;
    const box = this.box(), row = Math.floor(((y - box.y) / box.h) * 3);
    return row >= 0 && row < 3 ? row : null;
  }

  where(row) { const box = this.box(); return [box.x + box.w / 3, box.y + ((row + 0.5) * box.h) / 3]; }

  move(row, _, dy) { return Math.min(2, Math.max(0, (row ?? -1) + (dy || (row === null ? 1 : 0)))); }

  tell(row) {
    const { comparison } = this;
    if (!comparison || comparison.state !== "ready") return "";
    if (row === 0) {
      return [`${comparison.title}, chosen: ${percent(comparison.own, 1)} of requests hit, as the engine counted`,
        ...(comparison.prefetch ? [`without prefetching ${percent(comparison.alone, 1)}, marked`] : [])].join("\n");
    }
    if (row === 1) return ["Every policy on these tokens, without prefetching", ...comparison.rates.map(([name, rate]) => `${percent(rate, 1)} ${name}`)].join("\n");
    return `${comparison.bound}: no cache of that kind and this size can hit more than ${percent(comparison.belady, 1)} here without prefetching. It knows the future, and starts with the best contents.`;
  }
}

function rows(comparison) {
  return [[comparison.title, comparison.own, "resident"], [comparison.best_title, comparison.best_rate, "work"], [comparison.bound, comparison.belady, "idle"]];
}

function summary(comparison) {
  const own = `${comparison.title} ${percent(comparison.own)}${comparison.prefetch ? ` (${percent(comparison.alone)} without prefetching)` : ""}`;
  return `${own} · highest other: ${comparison.best_title} ${percent(comparison.best_rate)} · ${comparison.bound} ${percent(comparison.belady)} · last ${comparison.tokens} tokens`;
}

function remark(comparison, lossy) {
  const left = comparison.left_out ? `${comparison.left_out} passes were left out: this machine is too busy to follow.` : "";
  const fetched = lossy ? "Compared as if every miss were fetched, though some are substituted, dropped or predicted." : "";
  return [comparison.better ? "" : comparison.gain > 0 ? `${comparison.best_title} would hit ${(100 * comparison.gain).toFixed(1)} points more${comparison.error === null ? "" : ` ± ${(100 * comparison.error).toFixed(1)}`}: not distinguishable yet.` : "No other policy would hit more.", fetched, left].filter(Boolean).join(" ");
}

function waiting(comparison) {
  return {
    waiting: "Ask something: every policy is tried on its tokens",
    warming: `Needs ${comparison.enough - comparison.tokens} more token${comparison.enough - comparison.tokens === 1 ? "" : "s"}. Ask something.`,
    "in blocks": "Experts are in blocks: the other caches would be of whole ones",
    "text to text": "Not compared: an encoder and a decoder take turns in this cache",
    untold: "Telemetry is off: there is nothing to compare",
    failed: "The comparison failed; details are in the log",
  }[comparison.state] ?? "";
}
