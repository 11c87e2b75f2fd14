// The deck: asks for a frame every 250 ms, passes it to the panels, and handles mouse and keyboard.

import { fetchFrame } from "./wire.js";
import { palette } from "./paint.js";
import { Layers, Residency } from "./maps.js";
import { Pairs } from "./pairs.js";
import { LinkTraffic } from "./series.js";
import { TokenTime } from "./limit.js";
import { Figures } from "./figures.js";
import { Regret } from "./regret.js";
import { Changed, Entropy, Missing } from "./lossy.js";
import { Quality } from "./quality.js";
import { Tabs } from "./tabs.js";
import * as tools from "./tools.js";

const EVERY_MS = 250, RETRY_MS = 1500;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

class Deck {
  constructor(root, trigger) {
    this.root = root;
    this.find = (key) => root.querySelector(`[data-k="${key}"]`);
    const canvas = (name) => root.querySelector(`[data-c="${name}"]`), colours = () => this.colours;
    this.residency = new Residency(canvas("residency"), colours);
    const regret = new Regret(root, this.find, colours, (policy) => trigger("select", { policy }));
    this.entropy = new Entropy(canvas("entropy"), colours);
    this.timeline = [new TokenTime(canvas("tpot"), colours, this.find), new LinkTraffic(canvas("link"), colours)];
    this.panels = [this.residency, ...this.timeline, new Changed(canvas("changed"), colours), this.entropy, new Missing(canvas("missing"), colours), regret,
      new Pairs(canvas("pairs"), colours, this.find), new Layers(canvas("layers"), colours)];
    this.quality = new Quality(this.find);
    this.figures = new Figures(this.find);
    this.tabs = new Tabs(this.find("tabs"), () => this.paint());
    Object.assign(this, { frame: null, since: "", frames: 0, pass: null });
    this.panels.forEach((panel) => this.listen(panel));
    tools.start(root, (paused) => {
      Object.assign(this, { paused, since: "" });
      if (!paused) this.look(null);
    });
    this.find("layer").addEventListener("change", () => this.select(+this.find("layer").value));
    const redraw = () => { this.colours = palette(root); this.paint(); };
    new ResizeObserver(redraw).observe(root);
    new MutationObserver(redraw).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    redraw();
  }

  select(layer) {
    this.residency.layer = this.entropy.layer = layer;
    this.find("layer").value = layer;
    this.paint();
  }

  /** Fill the layer list when the model's shape changed. */
  shape({ layers }) {
    const list = this.find("layer");
    if (list.options.length === layers) return;
    this.residency.canvas.style.setProperty("--layers", layers);
    list.replaceChildren(...Array.from({ length: layers }, (_, i) => new Option(i, i)));
    this.select(Math.min(this.residency.layer, layers - 1));
  }

  paint() {
    if (!this.frame || !this.root.offsetParent) return;
    this.root.dataset.regret = this.frame.regret?.state ?? "off";
    this.tabs.offer({ policies: Boolean(this.frame.regret), lossy: Boolean(this.frame.lossy) });
    this.lossy(this.frame);
    this.figures.draw(this.frame, this.pass);
    for (const panel of this.panels) if (panel.canvas.offsetParent) panel.draw(this.frame);
    if (this.hovered && !this.hovered.panel.ready) this.point(this.hovered.panel, null);
    if (this.hovered) this.tip(this.hovered.panel, this.hovered.panel.cursor);
  }

  /** Some panels are there only while something lossy is on. */
  lossy({ lossy }) {
    this.root.dataset.lossy = lossy ? "1" : "0";
    if (!lossy) return;
    this.find("changed-text").textContent = `last ${this.frame.passes} passes`;
    this.find("entropy-text").textContent = `layer ${this.residency.layer}, last ${this.frame.passes} passes`;
    this.quality.draw(this.frame);
  }

  async tick() {
    const frame = await fetchFrame(this.residency.layer, this.since);
    if (frame && this.paused && frame.model === this.frame?.model) this.since = frame.version;
    else if (frame) this.show(frame);
    this.root.dataset.state = this.frame ? "live" : "empty";
  }

  show(frame) {
    this.since = frame.version;
    if (frame.model !== this.frame?.model && this.pass !== null) this.look(null);
    this.frame = frame.model === null ? null : frame;
    if (this.frame) {
      this.shape(frame.shape);
      this.root.dataset.busy = frame.busy ? "1" : "0";
      this.root.dataset.marks = frame.marks.length;
      this.paint();
    }
    this.root.dataset.frames = ++this.frames;
  }

  async run() {
    while (document.contains(this.root)) {
      const started = performance.now();
      try {
        if (!document.hidden && this.root.offsetParent) await this.tick();
      } catch {
        this.root.dataset.state = "offline";
        this.since = "";
        await sleep(RETRY_MS);
      }
      await sleep(Math.max(20, EVERY_MS - (performance.now() - started)));
    }
  }

  listen(panel) {
    const { canvas } = panel;
    canvas.addEventListener("mousemove", (e) => this.point(panel, panel.at(e.offsetX, e.offsetY)));
    canvas.addEventListener("mouseleave", () => this.point(panel, null));
    canvas.addEventListener("blur", () => this.point(panel, null));
    canvas.addEventListener("click", () => { if (panel === this.residency && panel.cursor) this.select(panel.cursor.row); });
    canvas.addEventListener("keydown", (e) => this.key(panel, e));
  }

  key(panel, event) {
    if (event.key === "Enter" && panel === this.residency && panel.cursor) return this.select(panel.cursor.row);
    if (event.key === "Escape" && ((panel.cursor ?? null) !== null || this.pass !== null)) {
      event.preventDefault(); // it would stop the answer
      this.point(panel, null);
      return this.look(null);
    }
    const step = MOVES[event.key];
    if (!step || !panel.ready) return;
    event.preventDefault();
    this.point(panel, panel.move(panel.cursor, ...step));
    this.find("say").textContent = panel.tell(panel.cursor);
  }

  point(panel, key) {
    panel.cursor = key;
    this.hovered = key === null ? null : { panel };
    if (this.frame) panel.draw(this.frame);
    this.tip(panel, key);
    if (this.paused && key !== null && this.timeline.includes(panel)) this.look(panel.first + key);
  }

  /** While the charts are paused, the key figures are those of one pass, until another one is pointed at. */
  look(pass) {
    this.pass = pass;
    for (const line of this.timeline) line.pass = pass;
    this.paint();
  }

  tip(panel, key) {
    const box = this.find("tip");
    box.hidden = key === null;
    if (key === null) return;
    box.textContent = panel.tell(key);
    const [x, y] = panel.where(key), [frame, area] = [this.root.getBoundingClientRect(), panel.canvas.getBoundingClientRect()];
    const left = area.left - frame.left + x + 12;
    box.style.left = `${Math.max(0, Math.min(left, frame.width - box.offsetWidth - 4))}px`;
    const under = area.top + y + 14, top = under + box.offsetHeight > innerHeight ? Math.max(0, under - box.offsetHeight - 28) : under;
    box.style.top = `${top - frame.top}px`;
  }
}

const sleep = (ms) => new Promise((done) => { setTimeout(done, ms); });

/** Start the deck inside `element`; `trigger` sends its events to Python. */
export function start(element, trigger) {
  const root = element.querySelector(".deck");
  if (root && !root.dataset.started) {
    root.dataset.started = "1";
    new Deck(root, trigger).run();
  }
}
