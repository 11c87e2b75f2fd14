// The badge EXACT (perhaps UP TO ROUNDING, or in the fast arithmetic) or LOSSY, wherever it stands ([data-exactness]). Model and settings say which
// of them holds from now on; the deck's frames say how much was changed.

const WINDOW = 64; // passes that the rate is over, where no frame has said
const now = { lossy: null, closeness: 0, weights: "", arithmetic: "reference", fallback: "", distance: null, rate: null, of: 0, window: WINDOW, before: false, quality: null };

/** News: `lossy` (null = no model is loaded), how far exact logits may be from transformers' own (`closeness`, a share of
 *  the largest; 0 = no bit differs), the format that `weights` were rounded to ("" = none), the `arithmetic` that
 *  computes, why that is not the fast one, or of experts alone, where it was not chosen (`fallback`), and the `distance` of the fast one from it,
 *  `rate` of the `of` assignments of the last `window` passes that was changed, whether the last pass `before` was changed, and the `quality` of the answers that were scored. */
export function tell(news) {
  Object.assign(now, news);
  const { lossy, closeness, weights, rate, distance } = now, fast = now.arithmetic.startsWith("fast");
  const how = fast ? `, fast arithmetic${now.arithmetic === "fast_experts" ? " of experts" : ""}${distance ? `, KL ${figure(distance.kl)}` : ""}` : "";
  const exact = (closeness && !fast ? "EXACT UP TO ROUNDING" : "EXACT") + (weights ? ` for ${weights} weights` : "") + how;
  const words = lossy === null ? "" : lossy ? `LOSSY${rate === null ? "" : ` ${percent(rate)} lately`}` : exact;
  for (const badge of document.querySelectorAll("[data-exactness]")) {
    const shown = badge.dataset.exactness === "short" ? words.replace("EXACT UP", "UP").replace(/, fast.*/, ", fast") : words; // where there is little room
    if (badge.textContent !== shown) badge.textContent = shown;
    const title = words && explain();
    if (badge.title !== title) badge.title = title;
    badge.classList.toggle("warn", Boolean(lossy));
    badge.classList.toggle("bad", Boolean(lossy) && now.quality?.verdict === "low");
  }
}

function explain() {
  const { lossy, closeness, weights, rate, of, window, before, quality } = now;
  const last = (before ? " The last answer was not." : "") + (weights ? ` The model is that of the ${weights} weights; the original ones may answer otherwise.` : "");
  if (!lossy && now.arithmetic === "fast") return `Nothing is substituted, dropped or predicted: every answer has the bits that it has with everything resident, however it is computed.${last} ${distant(now.distance)}`;
  if (!lossy && now.arithmetic === "fast_experts") return `Nothing is substituted, dropped or predicted: whatever is resident, an answer has the same bits. All but the experts is computed by transformers' own code: ${now.fallback}.${last} ${distant(now.distance)}`;
  if (!lossy && closeness) return `Nothing is substituted, dropped or predicted.${last} Logits may differ from transformers' own in the last bits: by no more than ${closeness.toExponential(0)} of the largest in fp32, as found with a tiny random model of this type.`;
  if (!lossy) return `Nothing is substituted, dropped or predicted: every token is the model's own.${last}${now.fallback ? ` The reference arithmetic computes: ${now.fallback}.` : ""}`;
  const share = rate === null ? "" : ` Of the experts that the router chose for the last ${window} passes, ${percent(rate)}${of ? ` of ${of}` : ""} were substituted, dropped or predicted.`;
  return `A lossy option is on: answers may differ from those of the model itself.${share}${agreement(quality)}`;
}

/** How far the fast arithmetic is from transformers' own. */
function distant(distance) {
  if (!distance) return "How far its logits are from transformers' own was not measured: the command bench distance does that.";
  const { kl, kl_high: most, tokens, agreed, agreement_low: low, agreement_high: high } = distance;
  return `From transformers' own it differs by a KL of ${figure(kl)} nats a token (95 %: up to ${figure(most)}); the likeliest token is the same for ${agreed} of ${tokens} (95 %: ${(100 * low).toFixed(1)}–${(100 * high).toFixed(1)} %).`;
}

const figure = (value) => String(+value.toPrecision(2));

/** How often the answers that were checked agree with the exact model, as far as can be told. */
function agreement(quality) {
  if (!quality?.verdict) return " No answer was checked against the exact model yet.";
  const { agreed, scored, low, high, verdict } = quality, between = `95 %: ${Math.round(100 * low)}–${Math.round(100 * high)} %`;
  return ` The likeliest token was the exact model's for ${agreed} of ${scored} tokens checked (${between})${verdict === "unclear" ? ", too few to tell" : ""}.`;
}

/** A share as a percentage; small ones keep their first two digits. */
export function percent(share) {
  const value = 100 * share, size = Math.abs(value);
  return `${value === 0 || value === 100 ? value : size >= 1 ? value.toFixed(1) : +value.toPrecision(2)} %`;
}
