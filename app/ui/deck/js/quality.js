// What lossy options cost in quality, over the last answers that were compared with the exact model, beside what they save.

import { short } from "./paint.js";
import { percent } from "/ui/exactness.js";

const SAID = { low: ", low", unclear: ", too few tokens to tell" };

export class Quality {
  constructor(find) { this.find = find; }

  draw({ lossy, quality: told }) {
    if (!lossy) return;
    const known = told && told.kl !== null;
    this.find("quality-none").hidden = Boolean(known);
    this.find("quality").hidden = !known;
    this.text("quality-none", told?.note || "Not checked yet. Answers are checked after they end, while the model is idle.");
    this.text("quality-text", known ? `${told.scored} of the last ${told.tokens} tokens checked` : "");
    if (!known) return;
    this.text("kl", short(told.kl));
    this.find("kl").title = `at most ${short(told.kl_most)} for one token`;
    this.text("agreement", percent(told.agreement));
    this.find("agreement").dataset.verdict = told.verdict;
    this.text("agreement-of", `${told.agreed} of ${told.scored}, 95 %: ${Math.round(100 * told.low)}–${Math.round(100 * told.high)} %${SAID[told.verdict] ?? ""}`);
    this.text("perplexity", short(told.perplexity));
    this.text("saved", told.saved_ms === null ? "–" : `~${short(told.saved_ms)}`);
    this.text("changed", percent(told.assignments ? told.changed / told.assignments : 0));
  }

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }
}
