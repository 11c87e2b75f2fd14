// What the controls of sidebar and top bar do beyond Gradio's: help that the keyboard reaches, a search, and sliders over decades.

const PLACES = 1000, LEAP = 20; // positions of a logarithmic slider; how many of them an arrow key moves

/** Look after the controls in one of them, also those that Gradio draws later. */
export function start(sidebar) {
  const look = () => {
    for (const help of sidebar.querySelectorAll(".has-info + .info-text:not([tabindex])")) help.tabIndex = 0;
    for (const range of sidebar.querySelectorAll(".wide-range input[type=range]:not([data-log], .log)")) logarithmic(range);
  };
  new MutationObserver(look).observe(sidebar, { childList: true, subtree: true });
  look();
  sidebar.addEventListener("input", ({ target }) => { if (target.id === "find-setting") find(sidebar, target.value); });
  sidebar.addEventListener("click", (event) => { // help stands inside a label, which would pass the click to its control
    const help = event.target.closest(".has-info + .info-text");
    if (!help) return;
    event.preventDefault();
    help.focus();
  });
  sidebar.addEventListener("keydown", ({ key, target }) => { if (key === "Escape" && target.matches(".info-text")) target.blur(); });
}

/** Show the settings of Advanced whose names and help have all of the `words`, and the groups that they are in. */
function find(sidebar, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const controls = [...sidebar.querySelectorAll("[id^=set-]")];
  for (const control of controls) {
    const text = control.textContent.toLowerCase();
    control.toggleAttribute("data-not-found", !wanted.every((word) => text.includes(word)));
  }
  for (const group of sidebar.querySelectorAll(".group")) {
    const has = group.querySelector("[id^=set-]:not([data-not-found])");
    group.toggleAttribute("data-not-found", !has);
    if (has && wanted.length) group.querySelector(".label-wrap:not(.open)")?.click();
  }
  sidebar.querySelector("#find-none").hidden = controls.some((control) => !control.hasAttribute("data-not-found"));
}

/** Put a logarithmic slider in front of Gradio's, which keeps the value and its events. */
function logarithmic(range) {
  const shown = document.createElement("input");
  Object.assign(shown, { type: "range", min: 0, max: PLACES, step: 1, className: `${range.className} log` });
  shown.setAttribute("aria-label", range.getAttribute("aria-label"));
  range.dataset.log = "1";
  range.tabIndex = -1;
  range.setAttribute("aria-hidden", "true");
  range.after(shown);
  const take = (value) => {
    range.value = value;
    range.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const show = () => {
    if (!shown.matches(":active")) shown.value = place(range, +range.value);
    shown.disabled = range.disabled;
    shown.style.setProperty("--range_progress", `${(100 * shown.value) / PLACES}%`);
    shown.setAttribute("aria-valuetext", range.value);
  };
  shown.addEventListener("input", () => take(valueAt(range, +shown.value)));
  shown.addEventListener("change", () => { range.dispatchEvent(new PointerEvent("pointerup", { bubbles: true })); show(); });
  shown.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const now = +range.value, step = +range.step || 1, leap = valueAt(range, place(range, now) + way * LEAP);
    take(way > 0 ? Math.max(leap, now + step) : Math.min(leap, now - step)); // never stands still between two steps
  });
  new MutationObserver(show).observe(range, { attributes: true }); // Gradio notes every value in its style
  show();
}

/** Where the decades begin (a range from 0 has a place of its own for it), and how far apart its ends are. */
function decades({ min, max, step }) {
  const low = +min > 0 ? +min : +step || 1;
  return { low, zero: +min > 0 ? 0 : 1, span: Math.log(+max / low) };
}

/** The place of a value. */
export function place(range, value) {
  const { low, zero, span } = decades(range);
  return value < low ? 0 : Math.round(zero + ((PLACES - zero) * Math.log(value / low)) / span);
}

/** The value at a place, with two digits that count. */
export function valueAt(range, at) {
  const { low, zero, span } = decades(range);
  if (at < zero || at <= 0) return +range.min;
  if (at >= PLACES) return +range.max;
  return +(low * Math.exp((span * (at - zero)) / (PLACES - zero))).toPrecision(2);
}
