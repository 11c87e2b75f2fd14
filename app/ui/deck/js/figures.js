// The parts of the deck that are text and boxes: key figures, memory bar, legends. Writes only what changed.

import { bytes, short } from "./paint.js";
import { PLACES } from "./maps.js";
import { tell } from "/ui/exactness.js";

const SWATCH = ["host", "flight", "resident", "hit", "disk", "part"], LEGEND = [4, 0, 1, 5, 2, 3]; // from the slowest place to the fastest

/** The unit that a rate is read in, and how many of it a GB/s is: the same for figures that stand side by side. */
const unitOf = (gbps) => (gbps >= 0.5 ? ["GB/s", 1] : ["MB/s", 1000]);
const rate = (gbps) => { const [unit, size] = unitOf(gbps); return `${short(gbps * size)} ${unit}`; };
const tokens = (n) => `${n} token${n === 1 ? "" : "s"}`;

/** The timelines' places of the last tokens that the key figures are over. */
function decoded({ step, decode, window }) {
  const found = [];
  for (let i = step.length - 1; i >= 0 && found.length < window; i--) if (decode[i]) found.push(i);
  return found;
}

/** What a comparison of tokens with prefetching and without it has found. */
const measured = (ahead, without, tokens, pays) => `Prefetching ${pays ? "pays" : "is paused"}: ${short(ahead)} ms a token with it, ${short(without)} without (${tokens} tokens each)`;

export class Figures {
  constructor(find) { this.find = find; this.legends = new Map(); }

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }

  draw(frame) {
    this.kpis(frame);
    this.memory(frame.memory);
    const { layers, experts, top_k } = frame.shape, count = [0, 0, 0, 0, 0, 0];
    for (const p of frame.place) count[p]++;
    this.text("res-text", `${layers} layers × ${experts} experts, ${top_k} a token`);
    this.disk(frame, count[4], count[5]);
    this.ahead(frame);
    this.legend("res-legend", LEGEND.map((i) => [SWATCH[i], PLACES[i], `${count[i]}`]));
    this.text("hit-text", `last ${frame.window} tokens`);
  }

  kpis(frame) {
    const known = frame.tpot_ms > 0;
    this.text("tok", known ? short(frame.tok_s) : "–");
    const now = frame.underway && { seconds: frame.underway[0], tokens: frame.underway[1], layers: frame.underway[2], moved: frame.underway[3] };
    const reading = now && `${now.tokens > 1 ? "prompt" : "token"}, layer ${now.layers}/${frame.shape.layers}`;
    const link = now ? now.moved / now.seconds / 1e9 : frame.link_gbps, peak = Math.max(link, frame.link_peak_gbps); // of a pass that takes long: of that so far
    const { gbps: disk, read, passes } = this.read(frame), [unit, size] = unitOf(Math.max(link, disk));
    this.text("tok-sub", reading || (frame.busy ? "answering" : "idle"));
    this.text("hit", frame.hit === null || Number.isNaN(frame.hit) ? "–" : (100 * frame.hit).toFixed(1));
    this.text("hit-sub", frame.window ? `last ${tokens(frame.window)}` : "no tokens yet");
    this.text("tpot", known ? short(frame.tpot_ms) : "–");
    this.text("link", short(link * size));
    this.text("link-unit", unit);
    this.text("link-axis", frame.link_limit_gbps >= 0.5 ? "GB/s" : "MB/s");
    this.text("link-sub", peak > 0 ? `of ${rate(frame.link_limit_gbps)}, peak ${rate(peak)}` : `of ${rate(frame.link_limit_gbps)}`);
    this.text("disk", passes ? short(disk * size) : "–");
    this.text("disk-unit", unit);
    this.text("disk-sub", frame.underway ? `${bytes(read)} in this pass` : passes ? `${bytes(read / passes)}/token` : "no tokens yet");
    this.find("emulated").hidden = !frame.emulated;
    tell({ lossy: Boolean(frame.lossy), rate: frame.lossy?.rate ?? null, of: frame.lossy?.assignments ?? 0, window: frame.passes, before: !frame.exact, quality: frame.quality });
    this.share(frame);
  }

  /** What was read from disk: for the last tokens, or so far for a pass that takes long. */
  read(frame) {
    if (frame.underway) return { gbps: frame.underway[4] / frame.underway[0] / 1e9, read: frame.underway[4], passes: 1 };
    let [read, ms, passes] = [0, 0, 0];
    for (const i of decoded(frame)) { read += frame.disk_bytes[i]; ms += frame.total_ms[i]; passes++; }
    return { gbps: read / (ms || 1) / 1e6, read, passes };
  }

  /** The deck shows the disk's figure only where there is a disk to read from. */
  disk(frame, there, inPart) {
    const root = this.find("disk").closest(".deck");
    root.dataset.disk = there || frame.disk_bytes.some((b) => b > 0) ? "1" : "0";
    if (inPart) root.dataset.part = "1";
  }

  /** The benefit of the prefetcher: measured where tokens with it and without it took turns, else an upper bound. Empty while nothing is prefetched. */
  ahead({ prefetched: [used, late, wasted, evicted], net_ms, compared }) {
    const some = used || late || wasted, early = evicted ? ` (${evicted} evicted unused)` : "";
    this.find("ahead").hidden = !(some || compared);
    const worth = compared ? measured(...compared) : `${net_ms < 0 ? "makes each token" : "saves at most"} ${short(Math.abs(net_ms))} ms ${net_ms < 0 ? "slower" : "a token"}`;
    this.text("ahead", `${some ? `Prefetched: ${used} in time, ${late} late, ${wasted} wasted${early} · ` : ""}${worth}`);
  }

  share(frame) {
    const { share, total_ms, parts_ms } = frame.limit, known = share !== null;
    const waits = known ? (parts_ms.regret + parts_ms.link + parts_ms.prefetch) / total_ms : 0, box = this.find("split");
    const percent = (known ? [share, waits, 1 - share - waits] : [0, 0, 0]).map((part) => 100 * part);
    [...box.children].forEach((part, i) => { part.style.width = `${percent[i].toFixed(1)}%`; });
    box.parentElement.title = known ? `speed limit ${percent[0].toFixed(0)} %, copies beyond it ${percent[1].toFixed(0)} %, other ${percent[2].toFixed(0)} %` : "";
    box.setAttribute("aria-label", box.parentElement.title);
  }

  memory(m) {
    const used = m.dense + m.experts + m.kv + m.workspace, reserved = Math.max(0, m.kv_reserved - m.kv);
    const full = Math.max(m.budget, used + reserved) * 1.04, bar = this.find("bar"), free = Math.max(0, m.budget - used - reserved);
    const parts = [m.dense, m.experts, m.kv, m.workspace, reserved];
    parts.forEach((v, i) => { bar.children[i].style.width = `${((100 * v) / full).toFixed(2)}%`; });
    this.find("limit").style.left = `${((100 * m.budget) / full).toFixed(2)}%`;
    bar.setAttribute("aria-valuemax", m.budget);
    bar.setAttribute("aria-valuenow", used);
    this.text("mem-text", `${bytes(used, full)} in use, most since loading ${bytes(m.peak, full)}, budget ${bytes(m.budget, full)}, device free ${bytes(m.device_free)}${m.host ? `, experts in host memory ${bytes(m.host)}` : ""}${m.unpinned ? `, of which ${bytes(m.unpinned)} could not be pinned and take longer to copy` : ""}${m.kept ? `, earlier chats in host memory ${bytes(m.kept)}` : ""}`);
    this.legend("mem-legend", [["dense", "dense", bytes(m.dense, full)], ["experts", "experts", bytes(m.experts, full)], ["kv", "KV", bytes(m.kv, full)],
      ["work", "workspace", bytes(m.workspace, full)], ["reserved", "reserved", bytes(reserved, full)], ["free", "free", bytes(free, full)]]);
  }

  legend(key, rows) {
    if (!this.legends.has(key)) {
      this.find(key).replaceChildren(...rows.map(([swatch, name]) => {
        const item = document.createElement("li"), box = document.createElement("i");
        box.className = `sw ${swatch}`;
        item.append(box, `${name} `, document.createElement("b"));
        return item;
      }));
      this.legends.set(key, [...this.find(key).querySelectorAll("b")]);
    }
    this.legends.get(key).forEach((node, i) => { if (node.textContent !== rows[i][2]) node.textContent = rows[i][2]; });
  }
}
