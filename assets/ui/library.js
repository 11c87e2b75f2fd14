// The table of models: a click, or Enter on a row, chooses it; a column's head sorts. Python draws the table anew.

const NARROW = 900;

/** Listen on the component, whose content is replaced at every redraw. */
export function start(element, trigger, watch) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  let chosen = false;
  const act = (target) => {
    const sort = target.closest("[data-sort]"), row = target.closest("[data-path]");
    if (sort) trigger("select", { sort: sort.dataset.sort });
    else if (row) { chosen = true; trigger("select", { entry: row.dataset.path }); }
  };
  watch("value", () => { // on a small screen the chosen model is described below the list
    if (chosen && innerWidth < NARROW) document.getElementById("model-card")?.scrollIntoView({ behavior: "smooth", block: "nearest" });
    chosen = false;
  });
  element.addEventListener("click", (event) => act(event.target));
  element.addEventListener("keydown", (event) => {
    const row = event.target.closest("[data-path]");
    if (!row) return;
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") act(row);
    else if (!next) return;
    next?.focus();
    event.preventDefault();
  });
}
