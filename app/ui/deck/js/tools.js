// What every chart offers: enlarge it, and save it as a picture. The whole deck can be paused, to be read at leisure.

const MARGIN = 14, TITLE = 26; // of a saved picture, in CSS pixels

/** Add the buttons to every chart, and a switch that calls `paused(on)`. */
export function start(root, paused) {
  for (const chart of root.querySelectorAll("[data-chart]")) {
    const title = chart.dataset.chart;
    const larger = button("⤢", (node) => {
      const large = chart.classList.toggle("large");
      name(node, large ? "Make it smaller" : "Enlarge", title);
      chart.scrollIntoView({ block: "nearest" });
    });
    const save = button("↓", () => download(chart.querySelector("canvas"), root, title));
    for (const [node, what] of [[larger, "Enlarge"], [save, "Save as a picture"]]) name(node, what, title);
    const tools = document.createElement("span");
    tools.className = "tools";
    tools.append(larger, save);
    chart.append(tools);
  }
  const pause = root.querySelector('[data-k="pause"]');
  pause.addEventListener("click", () => {
    const on = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", on);
    pause.textContent = on ? "Go on" : "Pause";
    root.dataset.paused = on ? "1" : "0";
    paused(on);
  });
}

function button(face, act) {
  const node = Object.assign(document.createElement("button"), { type: "button", textContent: face });
  node.addEventListener("click", () => act(node));
  return node;
}

function name(node, what, chart) {
  node.title = what;
  node.setAttribute("aria-label", `${what}: ${chart}`);
}

/** The chart as it is now, under its title, on the card's background. */
function download(canvas, root, title) {
  const ratio = canvas.width / Math.max(1, canvas.clientWidth), style = getComputedStyle(root);
  const picture = Object.assign(document.createElement("canvas"), {
    width: canvas.width + 2 * MARGIN * ratio, height: canvas.height + (2 * MARGIN + TITLE) * ratio });
  const g = picture.getContext("2d");
  g.fillStyle = style.getPropertyValue("--card");
  g.fillRect(0, 0, picture.width, picture.height);
  g.drawImage(canvas, MARGIN * ratio, (MARGIN + TITLE) * ratio);
  g.scale(ratio, ratio);
  g.fillStyle = style.getPropertyValue("--text");
  g.font = "600 14px system-ui, sans-serif";
  g.fillText(`${title}, ${new Date().toLocaleString()}`, MARGIN, MARGIN + 12);
  const link = Object.assign(document.createElement("a"), { href: picture.toDataURL("image/png"),
    download: `moestro-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.png` });
  link.click();
}
