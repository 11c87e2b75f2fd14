// The questions that an empty chat offers: a click asks one.

/** Listen, once for each element. */
export function start(element, props, trigger) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  element.addEventListener("click", (event) => {
    const asked = event.target.closest("[data-ask]");
    if (asked) trigger("select", { do: "ask", text: asked.dataset.ask });
  });
}
