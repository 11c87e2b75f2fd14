// Formulas, drawn by KaTeX as Gradio brings it (its address is in the page's head); loaded when the first one is seen.
// Without it, or where it cannot read a formula, the source is shown as it was written.

const [SCRIPT = "", STYLE = ""] = (document.querySelector("meta[name=katex]")?.content ?? "").split(" ");
// Nothing that leads elsewhere (`trust`), no sizes and no macros without end.
const HOW = { throwOnError: true, trust: false, strict: false, maxSize: 20, maxExpand: 500 };
const MOST = 5_000; // characters: longer ones would hold up the page

let katex = null, loading = null;

/** A formula; `whole` = its source with the marks around it. */
export function formula(source, display, whole) {
  const made = document.createElement("span");
  made.className = display ? "formula display" : "formula";
  made.textContent = whole;
  if (katex) draw(made, source, display);
  else if (SCRIPT) load().then(() => draw(made, source, display), () => {});
  return made;
}

function load() {
  if (loading) return loading;
  const sheet = document.createElement("link");
  Object.assign(sheet, { rel: "stylesheet", href: STYLE });
  document.head.append(sheet);
  loading = import(SCRIPT).then((module) => { katex = module.default; });
  return loading;
}

function draw(box, source, display) {
  if (source.length > MOST) return;
  const drawn = document.createElement("span");
  try {
    katex.render(source, drawn, { ...HOW, displayMode: display });
  } catch {
    return; // the source stays
  }
  box.replaceChildren(...drawn.childNodes);
}
