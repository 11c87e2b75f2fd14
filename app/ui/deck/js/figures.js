// The parts of the deck that are text and boxes: key figures, memory bar, legends. Writes only what changed.

import { bytes, short } from "./paint.js";
import { decoded, passOf, partsOf, timeOf } from "./limit.js";
import { PLACES } from "./maps.js";
import { tell } from "/ui/exactness.js";

const SWATCH = ["host", "flight", "resident", "hit", "disk", "part"], LEGEND = [4, 0, 1, 5, 2, 3]; // from the slowest place to the fastest

/** The unit that a rate is read in, and how many of it a GB/s is: the same for figures that stand side by side. */
const unitOf = (gbps) => (gbps >= 0.5 ? ["GB/s", 1] : ["MB/s", 1000]);
const rate = (gbps) => { const [unit, size] = unitOf(gbps); return `${short(gbps * size)} ${unit}`; };
const tokens = (n) => `${n} token${n === 1 ? "" : "s"}`;

/** What a comparison of tokens with prefetching and without it has found. */
const measured = (ahead, without, tokens, pays) => `Prefetching ${pays ? "pays" : "is paused"}: ${short(ahead)} ms a token with it, ${short(without)} without (${tokens} tokens each)`;

export class Figures {
  constructor(find) { this.find = find; this.legends = new Map(); }

  text(key, value) { const node = this.find(key); if (node.textContent !== value) node.textContent = value; }

  /** `pass`: the pass of the frame that the key figures are of; null: they are of the last tokens. */
  draw(frame, pass = null) {
    this.find("tok").closest(".deck").dataset.pass = pass === null ? "" : frame.step[pass];
    if (pass === null) this.kpis(frame);
    else this.one(frame, pass);
    for (const kind of ["demand", "prefetch", "wasted", "disk"]) this.text(`${kind}-bytes`, pass === null ? "" : bytes(frame[`${kind}_bytes`][pass]));
    this.memory(frame.memory);
    const { layers, experts, top_k } = frame.shape, count = [0, 0, 0, 0, 0, 0];
    for (const p of frame.place) count[p]++;
    this.text("res-text", `${layers} layers × ${experts} experts, ${top_k} a token`);
    this.disk(frame, count[4], count[5]);
    this.ahead(frame);
    this.legend("res-legend", LEGEND.map((i) => [SWATCH[i], PLACES[i], `${count[i]}`]));
    this.text("hit-text", `last ${tokens(frame.window)}`);
  }

  kpis(frame) {
    const known = frame.tpot_ms > 0;
    this.text("tok", known ? short(frame.tok_s) : "–");
    const now = frame.underway && { seconds: frame.underway[0], tokens: frame.underway[1], layers: frame.underway[2], moved: frame.underway[3] };
    const reading = now && `${now.tokens > 1 ? "prompt" : "token"}, layer ${now.layers}/${frame.shape.layers}`;
    const link = now ? now.moved / now.seconds / 1e9 : frame.link_gbps, peak = Math.max(link, frame.link_peak_gbps); // of a pass that takes long: of that so far
    const { gbps: disk, read, written } = this.read(frame), [unit, size] = unitOf(Math.max(link, disk));
    this.text("tok-sub", reading || (frame.busy ? "answering" : "idle"));
    this.text("hit", frame.hit === null || Number.isNaN(frame.hit) ? "–" : (100 * frame.hit).toFixed(1));
    this.text("hit-sub", frame.window ? `last ${tokens(frame.window)}` : "no tokens yet");
    this.text("tpot", known ? short(frame.tpot_ms) : "–");
    this.text("link", short(link * size));
    this.text("link-unit", unit);
    this.text("link-axis", unitOf(frame.link_peak_gbps)[0]);
    this.text("link-sub", peak > 0 ? `peak ${short(peak * size)} of ${short(frame.link_limit_gbps * size)}` : `of ${rate(frame.link_limit_gbps)}`);
    this.text("disk", written ? short(disk * size) : "–");
    this.text("disk-unit", unit);
    this.text("disk-sub", frame.underway ? `${bytes(read)} in this pass` : written ? `${bytes(read / written)}/token` : "no tokens yet");
    this.find("emulated").hidden = !frame.emulated;
    tell({ lossy: Boolean(frame.lossy), rate: frame.lossy?.rate ?? null, of: frame.lossy?.assignments ?? 0, window: frame.passes, before: !frame.exact, quality: frame.quality });
    this.share(frame);
  }

  /** The key figures of one pass. */
  one(frame, i) {
    const ms = timeOf(frame, i), parts = partsOf(frame, i), requests = frame.requests[i], copied = frame.demand_bytes[i] + frame.prefetch_bytes[i] + frame.wasted_bytes[i];
    const gbps = (size) => size / Math.max(frame.total_ms[i], 1e-3) / 1e6, [unit, size] = unitOf(gbps(Math.max(copied, frame.disk_bytes[i])));
    this.text("tok", ms > 0 ? short((1000 * frame.tokens[i]) / ms) : "–");
    this.text("tok-sub", `${passOf(frame, i)}${frame.tokens[i] === 1 ? "" : `, ${tokens(frame.tokens[i])}`}`);
    this.text("hit", requests ? ((100 * frame.hits[i]) / requests).toFixed(1) : "–");
    this.text("hit-sub", `${frame.hits[i]} of ${requests} requests`);
    this.text("tpot", short(ms));
    this.text("link", short(gbps(copied) * size));
    this.text("link-unit", unit);
    this.text("link-sub", `${bytes(copied)} copied`);
    this.text("disk", short(gbps(frame.disk_bytes[i]) * size));
    this.text("disk-unit", unit);
    this.text("disk-sub", `${bytes(frame.disk_bytes[i])} read`);
    this.parts(ms > 0 ? (parts.computing + parts.copies) / ms : null, ms, parts);
  }

  /** What was read from disk: for the last tokens, or so far for a pass that takes long. */
  read(frame) {
    if (frame.underway) return { gbps: frame.underway[4] / frame.underway[0] / 1e9, read: frame.underway[4], written: 1 };
    let [read, ms, written] = [0, 0, 0];
    for (const i of decoded(frame)) { read += frame.disk_bytes[i]; ms += frame.total_ms[i]; written += frame.tokens[i]; }
    return { gbps: read / (ms || 1) / 1e6, read, written };
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

  share({ limit: { share, total_ms, parts_ms } }) { this.parts(share, total_ms, parts_ms); }

  /** The bar of what a token took: the limit, copies beyond it, and all else. */
  parts(share, total_ms, parts_ms) {
    const known = share !== null;
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
    this.text("mem-text", `${bytes(used, full)} in use, budget ${bytes(m.budget, full)}`);
    const host = [m.host && `${bytes(m.host)} of experts${m.unpinned ? `, ${bytes(m.unpinned)} of them not pinned, which copies slower` : ""}`, m.kept && `${bytes(m.kept)} of chats`].filter(Boolean);
    this.text("mem-more", `peak ${bytes(m.peak, full)}, device free ${bytes(m.device_free)}${host.length ? `, in host memory ${host.join(", ")}` : ""}`);
    this.legend("mem-legend", [["dense", "dense", bytes(m.dense, full)], ["experts", "experts", bytes(m.experts, full)], ["kv", "KV", bytes(m.kv, full)],
      ["work", "workspace", bytes(m.workspace, full)], ["reserved", "reserved", bytes(reserved, full), !reserved], ["free", "free", bytes(free, full), !free]]);
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
    this.legends.get(key).forEach((node, i) => {
      const [, , text, none = false] = rows[i];
      if (node.textContent !== text) node.textContent = text;
      node.parentElement.hidden = none;
    });
  }
}
