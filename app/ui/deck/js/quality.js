// What lossy options cost in quality, over the last answers that were compared with the exact model, and what they save.

import { short } from "./paint.js";
import { percent } from "/ui/exactness.js";

const VERDICTS = { low: ", low", unclear: ", too few tokens to tell" };

/** How many answers are yet to be checked, and how far the first one is. */
export function waiting({ busy, unscored: [count, share] = [0, 0] }) {
  if (!count) return "";
  const answers = count === 1 ? "1 answer" : `${count} answers`;
  return busy ? `${answers} to be checked once the model is idle` : `Checking ${answers}${count === 1 ? "" : ", the first"}: ${Math.round(100 * share)} %`;
}

export class Quality {
  constructor(find) {
    Object.assign(this, { find, due: "" });
    document.addEventListener("moestro:state", ({ detail: { host } }) => { this.due = waiting(host); this.say(); });
  }

  draw({ lossy, quality }) {
    if (!lossy) return;
    this.quality = quality;
    const known = quality && quality.kl !== null;
    this.find("quality-none").hidden = Boolean(known);
    this.find("quality").hidden = !known;
    this.say();
    if (!known) return;
    this.text("kl", short(quality.kl));
    this.find("kl").title = `at most ${short(quality.kl_most)} for one token`;
    this.text("agreement", percent(quality.agreement));
    this.find("agreement").dataset.verdict = quality.verdict;
    this.text("agreement-of", `${quality.agreed} of ${quality.scored}, 95 %: ${Math.round(100 * quality.low)}–${Math.round(100 * quality.high)} %${VERDICTS[quality.verdict] ?? ""}`);
    this.text("perplexity", short(quality.perplexity));
    this.text("saved", quality.saved_ms === null ? "–" : `~${short(quality.saved_ms)}`);
    this.text("changed", percent(quality.assignments ? quality.changed / quality.assignments : 0));
  }

  /** What was checked, and what is yet to be. */
  say() {
    const { quality } = this, known = quality && quality.kl !== null;
    this.text("quality-none", quality?.note || this.due || "Not checked yet. Answers are checked after they end, while the model is idle.");
    this.text("quality-text", known ? [`${quality.scored} of the last ${quality.tokens} tokens checked`, this.due].filter(Boolean).join(". ") : "");
  }

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }
}
