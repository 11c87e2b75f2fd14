// The keyboard's focus is never lost: where what has it is drawn again, hidden or disabled, its successor in the same
// place gets it, or what comes next there.

const STOPS = "a[href], button, input, select, textarea, [tabindex]";
let last, places = []; // what has the focus; the ids around it, nearest first, each with its number among their stops

const stops = (within) => [...within.querySelectorAll(STOPS)];
const usable = (one) => one.isConnected && !one.disabled && one.tabIndex >= 0 && one.checkVisibility();

/** Look after the focus, once for each page. */
export function start() {
  document.addEventListener("focusin", ({ target }) => {
    last = target;
    places = [];
    for (let around = target; (around = around.parentElement?.closest("[id]"));) places.push([around.id, stops(around).indexOf(target)]);
  });
  document.addEventListener("focusout", ({ target }) => setTimeout(() => { // left on purpose, or about to go
    if (target === last && usable(target)) last = undefined;
    else restore();
  }));
  new MutationObserver(restore).observe(document.body, { childList: true, subtree: true, attributeFilter: ["disabled", "class", "style"] });
}

function restore() {
  if (document.activeElement !== document.body || !last || usable(last)) return;
  for (const [id, number] of places) {
    const within = document.getElementById(id);
    const there = within ? stops(within) : [], at = Math.max(number, 0);
    const next = [...there.slice(at), ...there.slice(0, at).reverse()].find(usable);
    if (next) return next.focus({ preventScroll: true });
  }
}
