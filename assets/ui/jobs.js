// Follows a long job (an analysis, a calibration, an evaluation, a batch): its progress bar, and a redraw of its tab when there is news.
// data-analysis, data-calibration, data-evaluation, data-batch of <body> = none | running | done | error | cancelled.

const AGAIN_MS = 3000, REFIT_MS = 150;

/** Listen for one tab; `element` is in it, `name` is the job's in the server's state. */
export function start(element, props, trigger, name) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  let asked = null, at = 0;
  const panel = element.closest("[role=tabpanel]");
  refit(panel);
  document.addEventListener("moestro:state", ({ detail: { jobs } }) => {
    const job = jobs?.[name];
    if (!job || !document.contains(element)) return;
    document.body.dataset[name] = job.state;
    const bar = document.querySelector(`#${name}-progress [role=progressbar]`);
    if (bar && job.state === "running") fill(bar, job);
    const dark = document.body.classList.contains("dark"), stamp = `${job.stamp} ${dark}`;
    if (stamp === props.value.stamp || panel?.offsetParent === null) return;
    if (asked === stamp && performance.now() - at < AGAIN_MS) return;
    [asked, at] = [stamp, performance.now()];
    trigger("tick", { stamp, dark });
  });
}

/** Plotly fits its figures when the window changes; here also when the sidebar opens or closes. */
function refit(panel) {
  let width = 0, soon = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === width) return;
    width = contentRect.width;
    clearTimeout(soon);
    soon = setTimeout(() => window.dispatchEvent(new Event("resize")), REFIT_MS);
  }).observe(panel);
}

function fill(bar, { text, share, left }) {
  const percent = Math.round(100 * share);
  bar.setAttribute("aria-valuenow", percent);
  bar.firstElementChild.style.width = `${100 * share}%`;
  bar.nextElementSibling.textContent = [text, `${percent} %`, left === null ? "" : `${time(left)} left`].filter(Boolean).join(" · ");
}

/** Seconds in words that do not jump. */
function time(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** A table whose heads sort it; redrawn tables keep their order. */
export function sortable(element, watch) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  let column = -1, up = false;
  const sort = () => {
    const body = element.querySelector("tbody"), heads = [...element.querySelectorAll("thead th")];
    if (column < 0 || !body) return;
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? (up ? "ascending" : "descending") : "none"));
    const value = (row) => row.cells[column].dataset.v, text = [...body.rows].some((row) => value(row) && isNaN(value(row)));
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (!x || !y) return !x - !y;
      return (up ? 1 : -1) * (text ? x.localeCompare(y) : x - y);
    };
    body.append(...[...body.rows].sort(order));
  };
  element.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const at = head.cellIndex;
    up = at === column ? !up : !head.matches(".hit");
    column = at;
    sort();
  });
  watch("value", sort);
}
