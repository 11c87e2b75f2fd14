// Follows the server: the answer being written (the tail under the chat), the load's progress, what changed elsewhere.
// The page's state shows as attributes of <body>: data-host = empty | loading | ready, data-answering = 0 | 1.

import { AnswerView } from "/ui/chat/answer.js";
import { Draft } from "/ui/chat/draft.js";
import { start as listen } from "/ui/chat/keys.js";
import { tell } from "/ui/exactness.js";

// HANDS_OFF_MS: the controls are not redrawn under a hand that is turning one
const FAST_MS = 100, SLOW_MS = 400, RETRY_MS = 1500, AGAIN_MS = 3000, HANDS_OFF_MS = 700, SPEED_MS = 3000, WAIT_MS = 20;
const sleep = (ms) => new Promise((done) => { setTimeout(done, ms); });

let known = null; // the component that holds the host's stamps as this page shows them
let events = 0; // of this page that the server has not answered yet: what they change, a redraw may not have
let latest = null; // the event sent last, while it is unanswered
const awaited = new Map(); // words -> who waits for the answer to the event that has them

const { fetch: ask } = window;
/** Gradio's menus tell of a choice twice, the second time as they are left. It has the first one's answer: an answer of
 *  its own could come after that of the next choice, and take back what it says. */
window.fetch = async (what, ...how) => {
  if (!String(what).includes("/gradio_api/run/")) return ask(what, ...how);
  const body = how[0]?.body;
  if (body && latest?.body === body) return (await latest.reply).clone();
  const sent = latest = { body, reply: ask(what, ...how) };
  events += 1;
  try {
    return (await sent.reply).clone();
  } finally {
    events -= 1;
    if (latest === sent) latest = null;
    for (const [words, done] of awaited) if (String(body).includes(words) && awaited.delete(words)) done();
  }
};

/** When the server has answered all events of this page: an answer to what comes then is not overtaken by theirs. */
export async function answered() { while (events) await sleep(WAIT_MS); }

/** When the server has answered the event that will tell it of `data`, well or not. */
export function answerTo(data) { return new Promise((done) => { awaited.set(JSON.stringify(data).slice(1, -1), done); }); }

class Pulse {
  constructor(element, props, trigger) {
    Object.assign(this, { element, props, trigger, id: null, text: "", speed: [], read: null, fired: {}, seen: {}, now: props.value, past: new Set() });
    this.part = (name) => element.querySelector(`[data-t="${name}"]`);
    this.draft = new Draft();
    listen();
    this.stick(element.closest("#talk"));
    const touch = () => { this.touched = performance.now(); };
    window.moestroSettle = (redrawn) => this.settle(redrawn);
    for (const part of ["sidebar", "top-bar"]) {
      for (const event of ["input", "pointerdown", "pointermove", "keydown"]) document.getElementById(part)?.addEventListener(event, touch);
    }
  }

  get shown() { return this.props.value ?? {}; }

  /** Keep the end of the talk in view as it grows, unless the reader has scrolled up. */
  stick(talk) {
    let follow = true;
    talk.addEventListener("scroll", () => { follow = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60; });
    const watch = new ResizeObserver(() => { if (follow) talk.scrollTop = talk.scrollHeight; });
    for (const part of talk.children) watch.observe(part);
  }

  /** Ask Python to redraw something, again only if the redraw does not come. */
  fire(trigger, event, stamp) {
    const now = performance.now(), last = this.fired[event];
    if (last && last.stamp === stamp && now - last.at < AGAIN_MS) return;
    this.fired[event] = { stamp, at: now };
    trigger(event);
  }

  async tick() {
    const { chat = null } = this.shown;
    const query = new URLSearchParams({ since: this.text.length });
    if (chat !== null) query.set("chat", chat);
    if (this.id !== null) query.set("answer", this.id);
    const reply = await fetch(`/live/state?${query}`, { cache: "no-store" });
    if (!reply.ok) throw new Error(`state: ${reply.status}`);
    const state = await reply.json();
    if ((this.shown.chat ?? null) !== chat) return false;
    this.host(state.host);
    importing(state.import);
    busy(state.machine);
    document.dispatchEvent(new CustomEvent("moestro:state", { detail: state })); // for the tabs, see jobs.js
    if (!this.shown.open) return true;
    this.go();
    this.over = this.id !== null && !state.answer;
    if (state.answer) this.follow(state.answer);
    else if (this.over && state.stamp === this.shown.stamp) this.clear();
    if (state.stamp !== (this.shown.stamp ?? "")) this.fire(this.trigger, "end", state.stamp);
    document.body.dataset.answering = state.answer ? "1" : "0";
    return Boolean(state.answer) || state.host.state === "loading";
  }

  host({ state, busy, lossy, closeness, weights, arithmetic, fallback, distance, text, share, stamp, settings, answers, library }) {
    Object.assign(document.body.dataset, { host: state, busy: busy ? "1" : "0", lossy: lossy ? "1" : "0" });
    tell({ lossy: state === "ready" ? lossy : null, closeness, weights, arithmetic, fallback, distance });
    const bar = document.querySelector("#load-progress [role=progressbar]");
    if (bar && state === "loading") fill(bar, share, `${text} · ${Math.round(100 * share)} %`);
    if (!busy) for (const said of document.querySelectorAll("[data-while-busy].notice")) over(said);
    if (!this.shown.open || !known) return;
    const { trigger, props } = known, idle = !events && !(performance.now() - this.touched < HANDS_OFF_MS);
    if (stamp !== props.value.stamp) this.fire(trigger, "tick", stamp);
    else if (settings !== props.value.settings && idle) this.fire(trigger, "apply", settings);
    else if (library !== props.value.library && !events) this.fire(trigger, "edit", library);
    else if (answers !== props.value.answers && idle && !busy) this.fire(trigger, "submit", answers);
  }

  /** The controls' values as a redraw has them; none if a hand has turned one since it was asked for: it would turn that
   *  one back. The redraw is then asked for again. */
  settle({ values }) {
    if (!events && !(this.touched >= this.fired.apply?.at)) return values;
    delete this.fired.apply;
    return [];
  }

  /** The address and the draft are those of the chat that is shown. */
  go() {
    const { chat = null, sent } = this.shown;
    this.address(chat);
    this.draft.look(chat, Boolean(sent));
  }

  /** The chat's number lives in the address, so a reload comes back to it. */
  address(chat) {
    if (this.seen.chat === chat) return;
    this.seen.chat = chat;
    document.body.dataset.chat = chat ?? "";
    const url = new URL(location.href);
    if (chat === null) url.searchParams.delete("chat");
    else url.searchParams.set("chat", chat);
    history.replaceState(history.state, "", url);
  }

  follow(answer) {
    if (answer.id !== this.id) { this.clear(); this.id = answer.id; }
    if (answer.from !== this.text.length) return;
    this.text += answer.text;
    this.view ??= new AnswerView(this.part("text"));
    this.view.show(this.text, answer.opened, false);
    this.element.firstElementChild.dataset.state = answer.state;
    this.line(answer);
  }

  line({ state, before: ahead, done, total, cached, tokens, ttft_ms: ttft, unsaved }) {
    const now = performance.now(), bar = this.part("prefill");
    this.speed = [...this.speed.filter(([at]) => now - at < SPEED_MS), [now, tokens]];
    const [[from, before]] = this.speed, rate = now - from > 500 ? (1000 * (tokens - before)) / (now - from) : 0;
    bar.hidden = state !== "prefill";
    bar.firstElementChild.style.width = `${total ? (100 * done) / total : 0}%`;
    this.part("line").textContent = {
      queued: `Queued: another chat is being answered; ${ahead ? `${ahead} more ${ahead === 1 ? "waits" : "wait"} before yours` : "yours is next"}.`,
      prefill: ["Reading the prompt", ...(total ? this.reading(done, total, cached, now) : [])].join(" · "),
      streaming: `${rate ? `${rate.toFixed(1)} tok/s in the last ${SPEED_MS / 1000} s · ` : ""}${tokens} token${tokens === 1 ? "" : "s"} · TTFT ${ttft} ms`,
    }[state] ?? "";
    if (unsaved) this.part("line").textContent += ` · Not saved yet: ${unsaved}`;
    if (total) this.gauge(total + tokens);
  }

  /** How far the prompt is read, by layers of the model; speed and time left are those since this page looks. */
  reading(done, total, cached, now) {
    const [from, before] = this.read ??= [now, done], rate = now - from > 500 ? (1000 * (done - before)) / (now - from) : 0;
    return [
      ...(cached ? [`reused ${cached}, reading ${total - cached}`] : []),
      `${Math.floor((100 * done) / total)} %, ${done} of ${total} tokens`,
      ...(rate ? [`${Math.round(rate)} tok/s`, `${Math.ceil((total - done) / rate)} s left`] : []),
    ];
  }

  gauge(used) {
    const box = document.querySelector("#context [role=meter]");
    if (!box) return;
    const full = +box.getAttribute("aria-valuemax");
    box.setAttribute("aria-valuenow", used);
    box.firstElementChild.style.width = `${Math.min(100, (100 * used) / full)}%`;
    box.nextElementSibling.textContent = `${used} of ${full} tokens`;
  }

  /** Python has redrawn the chat: what is over stands there now, and leaves the tail in the same moment.
   *  A redraw that was asked for before the user went on to something else is redrawn. */
  renewed() {
    const { turn } = this.shown;
    if (this.past.has(turn)) {
      this.props.value = this.now;
      this.trigger("end");
      return;
    }
    if (this.now.turn !== turn) this.past.add(this.now.turn);
    this.now = this.shown;
    if (this.over) this.clear();
    if (this.shown.open) this.go(); // at once: what is typed from now on is of this chat
  }

  clear() {
    this.over = false;
    Object.assign(this, { id: null, text: "", speed: [], read: null, view: null });
    this.part("text").replaceChildren();
    this.part("line").textContent = "";
    this.part("prefill").hidden = true;
    this.element.firstElementChild.dataset.state = "none";
  }

  async run() {
    while (document.contains(this.element)) {
      let fast = false;
      try {
        if (!document.hidden) fast = await this.tick();
      } catch {
        await sleep(RETRY_MS);
      }
      await sleep(fast ? FAST_MS : SLOW_MS);
    }
  }
}

/** A notice that holds no longer. */
function over(notice) { notice.hidden = true; notice.classList.remove("notice"); }

/** A progress bar and the words under it. */
function fill(bar, share, words) {
  bar.setAttribute("aria-valuenow", Math.round(100 * share));
  bar.firstElementChild.style.width = `${100 * share}%`;
  bar.nextElementSibling.textContent = words;
}

/** Show the import that runs, in its tab and, in one line, in the sidebar. */
function importing(job) {
  const now = job?.state ?? "none", line = document.querySelector("[data-import=line]");
  Object.assign(document.body.dataset, { import: now, resume: job?.resume ? "1" : "0" });
  if (line) line.hidden = now !== "running";
  if (now !== "running") return;
  const percent = Math.round(100 * job.share), bar = document.querySelector("#import-progress [role=progressbar]");
  if (line) line.textContent = `Importing ${job.name} · ${percent} %`;
  const parts = [job.text, `${percent} %`, job.total ? `${size(job.done)} of ${size(job.total)}` : "",
    job.speed ? `${size(job.speed)}/s` : "", job.left !== null ? `${time(job.left)} left` : ""];
  if (bar) fill(bar, job.share, parts.filter(Boolean).join(" · "));
}

/** How busy and warm the machine is, in the deck. */
function busy({ cpu_percent: percent, cpu_celsius: celsius, gpus }) {
  const place = document.querySelector("[data-k=load]"), warm = (degrees) => (degrees === null ? [] : [`${Math.round(degrees)}°`]);
  const parts = [["CPU", percent, celsius], ...gpus.map((one, i) => [gpus.length > 1 ? `GPU ${i}` : "GPU", one.percent, one.celsius])];
  const words = parts.map(([name, share, degrees]) => `${name} ${[...(share === null ? [] : [`${Math.round(share)} %`]), ...warm(degrees)].join(" ") || "–"}`);
  if (place && place.textContent !== words.join(" · ")) place.textContent = words.join(" · ");
}

/** Bytes in decimal units, as the rest of the page writes them. */
function size(bytes) {
  const [unit, one] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, s]) => bytes >= s) ?? ["B", 1];
  return `${bytes / one >= 100 ? (bytes / one).toFixed(0) : +(bytes / one).toPrecision(3)} ${unit}`;
}

/** Seconds in words that do not jump: "12 s", "4 min", "1 h 20 min". */
function time(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Take note of the component that knows the host's stamps; its events redraw the controls. */
export function know(element, props, trigger) { known = { props, trigger }; }

/** Start following, once for each element. */
export function start(element, props, trigger, watch) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  const pulse = new Pulse(element, props, trigger);
  watch("value", () => pulse.renewed());
  pulse.run();
}
