// Time per token in parts that add up, and the speed limit as a line (core/metrics/limit.py).

import { short } from "./paint.js";
import { Timeline } from "./series.js";

const NAMES = {
  computing: ["computing", "Computing: in the limit"],
  copies: ["fewest copies", "Waits for the fewest copies that any cache policy could do with: in the limit. Of prompts, all waits for copies"],
  regret: ["policy", "Waits for copies that the best possible cache policy would have spared"],
  link: ["link idle", "Other waits for copies: the link was idle when they could have begun"],
  prefetch: ["prefetches", "Prefetches that came late or were of no use, and what choosing them took"],
  host: ["host", "Waits for missing experts that the processor computed"],
  dispatch: ["dispatch", "Everything else: what lies between the parts"],
  sampling: ["sampling", "Choosing the next token"],
  delivery: ["delivery", "Between two tokens: text, what ends an answer, and whatever takes the token"],
};

/** A pass of the frame: what it is called, its milliseconds by part, and their sum. */
export const passOf = ({ step, decode }, i) => `pass ${step[i]}, ${decode[i] ? "decode" : "prefill"}`;
export const partsOf = ({ limit, step }, i) => Object.fromEntries(limit.names.map((name, row) => [name, limit.by_pass[row * step.length + i]]));
export const timeOf = (frame, i) => Object.values(partsOf(frame, i)).reduce((sum, ms) => sum + ms, 0);

const WINDOW = 64; // decode passes that the key figures are over

/** Their places in the timelines. */
export function decoded({ step, decode }) {
  const found = [];
  for (let i = step.length - 1; i >= 0 && found.length < WINDOW; i--) if (decode[i]) found.push(i);
  return found;
}

const FIRST = 5; // parts in the legend while no token was computed

export class TokenTime extends Timeline {
  constructor(canvas, colours, find) { super(canvas, colours); this.find = find; }

  draw(frame) {
    super.draw(frame);
    if (this.pass === null) this.words(frame);
    else this.text(`${passOf(frame, this.pass)}: ${short(timeOf(frame, this.pass))} ms`);
    this.legend(frame.limit, this.pass === null ? frame.limit.parts_ms : partsOf(frame, this.pass));
  }

  parts({ limit, step }) {
    const n = step.length;
    return limit.names.map((name, row) => [limit.by_pass.subarray(row * n, (row + 1) * n), `t-${name}`]);
  }

  extra(surface, box, top) {
    const { limit_ms, policies_compared } = this.frame.limit;
    this.level(surface, box, top, limit_ms, `limit ${short(limit_ms)}${policies_compared ? "" : ", policies not compared yet"}`, "text");
  }

  words({ limit: { share, tokens, emulated_link }, ...frame }) {
    const passes = decoded(frame), written = passes.reduce((sum, i) => sum + frame.tokens[i], 0) / passes.length;
    const several = written > 1 ? `, ${short(written)} tokens a pass` : "";
    this.text(share === null ? "ms" : `${Math.round(100 * share)} % of the speed limit, last ${tokens}${several}${emulated_link ? ", emulated link" : ""}`);
  }

  text(value) { const node = this.find("tpot-text"); if (node.textContent !== value) node.textContent = value; }

  /** Every part that took time, with its mean, or its time in the pass that is looked at. */
  legend({ names, parts_ms: means }, parts_ms) {
    const shown = names.filter((name, i) => (!means && i < FIRST) || means?.[name] >= 5e-4 || parts_ms?.[name] >= 5e-4 || name === "computing"), list = this.find("tpot-legend");
    if (this.listed !== shown.join()) {
      this.listed = shown.join();
      list.querySelectorAll("[data-part]").forEach((item) => item.remove());
      list.prepend(...shown.map((name) => {
        const item = document.createElement("li"), box = document.createElement("i");
        Object.assign(item, { title: NAMES[name][1] }).dataset.part = name;
        box.className = `sw t-${name}`;
        item.append(box, `${NAMES[name][0]} `, document.createElement("b"));
        return item;
      }));
    }
    for (const item of list.querySelectorAll("[data-part]")) {
      const text = parts_ms ? short(parts_ms[item.dataset.part]) : "";
      if (item.lastChild.textContent !== text) item.lastChild.textContent = text;
    }
  }

  lines(i) {
    const { hits, requests, labelled, ...frame } = this.frame, parts = Object.entries(partsOf(this.frame, i));
    return [`${timeOf(this.frame, i).toFixed(2)} ms = ${parts.filter(([, ms]) => ms >= 0.005).map(([name, ms]) => `${NAMES[name][0]} ${ms.toFixed(2)}`).join(" + ")}`,
      `${hits[i]} of ${requests[i]} requests hit`,
      ...(labelled ?? []).map(({ name, label, unit }) => `${label} ${short(frame[name][i])} ${unit}`)];
  }
}
