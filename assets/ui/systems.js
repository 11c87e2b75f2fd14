// The lists of published systems in the sidebar. Python draws them anew when another one is in force: what was open stays open.

/** Listen on the component; `trigger` tells Python which preset was pressed. */
export function start(element, trigger, watch) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  const open = new Set();
  let focused = "";
  element.addEventListener("toggle", ({ target }) => open[target.open ? "add" : "delete"](target.dataset.list), true);
  element.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-preset]");
    if (!button) return;
    focused = button.dataset.preset;
    trigger("select", { preset: focused });
  });
  watch("value", () => {
    for (const list of element.querySelectorAll("details")) list.open = open.has(list.dataset.list);
    if (document.activeElement === document.body) element.querySelector(`[data-preset="${focused}"]`)?.focus({ preventScroll: true });
  });
}

/** Show the published systems, also in Simple: the last choice of the preset menu leads here. */
export function show() {
  document.body.classList.add("show-systems");
  const list = document.querySelector("#systems details");
  if (!list) return;
  list.open = true;
  list.scrollIntoView({ block: "nearest" });
}
