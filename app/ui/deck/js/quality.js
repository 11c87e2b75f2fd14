// What lossy options cost in quality, over the last answers that were compared with the exact model, and what they save.

import { short } from "./paint.js";
import { percent } from "/ui/exactness.js";

const VERDICTS = { low: ", low", unclear: ", too few tokens to tell" };

export class Quality {
  constructor(find) { this.find = find; }

  draw({ lossy, quality }) {
    if (!lossy) return;
    const known = quality && quality.kl !== null;
    this.find("quality-none").hidden = Boolean(known);
    this.find("quality").hidden = !known;
    this.text("quality-none", quality?.note || "Not checked yet. Answers are checked after they end, while the model is idle.");
    this.text("quality-text", known ? `${quality.scored} of the last ${quality.tokens} tokens checked` : "");
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

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }
}
