// The table of models: a click, or Enter on a row, chooses it; a column's head sorts. Python draws the table anew, also
// between press and release, which the browser then takes for no click.

import { answered } from "/ui/pulse.js";

const NARROW = 900;

/** Listen on the component, whose content is replaced at every redraw. */
export function start(element, props, trigger, watch) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  let chosen = "", sorted = "", fresh = false, pressed = "";
  const row = (path) => [...element.querySelectorAll("[data-path]")].find((one) => one.dataset.path === path);
  const meant = (target) => target.closest("[data-sort], [data-path]")?.dataset ?? {};
  const key = ({ sort = "", path = "" }) => sort || path;
  const act = ({ sort, path }) => {
    if (sort) {
      sorted = sort;
      trigger("select", { sort });
    } else if (path) {
      [chosen, fresh] = [path, true];
      for (const one of element.querySelectorAll("[data-path]")) one.ariaSelected = String(one.dataset.path === path);
      // not while a redraw is on its way: it would take the card away again, from under the pointer
      // ... and chosen once more it is only drawn again: what was asked about it meanwhile stays
      answered().then(() => { if (chosen === path) trigger("select", { entry: path, again: props.value.chosen === path }); });
    }
  };
  watch("value", () => {
    if (sorted && props.value.sort !== sorted) return trigger("select", { sort: sorted }); // drawn before the head was pressed
    if (!row(chosen)) return; // deleted, or listed before it was there: then a later list has it
    if (props.value.chosen !== chosen) return trigger("select", { entry: chosen, again: true }); // drawn for an older choice
    if (fresh && innerWidth < NARROW) { // it is described below the list there
      document.getElementById("model-card")?.scrollIntoView({ behavior: "smooth", block: "nearest" });
    }
    if (fresh) row(chosen)?.focus({ preventScroll: true });
    fresh = false;
  });
  element.addEventListener("pointerdown", ({ button, target }) => { pressed = button ? "" : key(meant(target)); });
  element.addEventListener("pointerup", ({ target }) => { if (pressed && key(meant(target)) === pressed) act(meant(target)); });
  element.addEventListener("click", ({ detail, target }) => { if (!detail) act(meant(target)); }); // of no pointer
  element.addEventListener("keydown", (event) => {
    const here = event.target.closest("[data-path]");
    if (!here) return;
    const next = { ArrowDown: here.nextElementSibling, ArrowUp: here.previousElementSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") act(here.dataset);
    else if (!next) return;
    next?.focus();
    event.preventDefault();
  });
}
