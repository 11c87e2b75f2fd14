// The chats beside the chat: open one, search titles and texts, rename. The server says when the list has changed.

import { answerTo, answered } from "/ui/pulse.js";

const SURE_MS = 4000; // within which a deletion is confirmed
const SEARCH_MS = 200, WIDE = "(min-width: 1500px)"; // from this width on it stands beside the chat, else over it

/** Draw the list, once for each element. */
export function start(element, props, trigger) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  new List(element, trigger);
}

class List {
  constructor(element, trigger) {
    Object.assign(this, { element, trigger, version: null, chat: null, wide: matchMedia(WIDE), loads: 0 });
    this.saving = new Map(); // chat -> its new name, until the server has it
    this.find = element.querySelector("input");
    this.lines = element.querySelector("ul");
    this.said = element.querySelector("[data-said]");
    this.find.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.load(), SEARCH_MS);
    });
    element.addEventListener("click", (event) => this.click(event));
    element.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("click", (event) => {
      if (event.target.closest("button[data-chats]")) this.toggle();
    });
    document.addEventListener("moestro:state", ({ detail }) => this.state(detail));
    this.wide.addEventListener("change", () => this.draw());
    window.moestroChats = (how) => this.open(how);
    this.draw();
  }

  /** Open as the user last had it where it stands beside the chat; over the chat only while it is used. */
  get shown() { return this.wide.matches ? localStorage.moestroChats !== "closed" : Boolean(this.over); }

  draw() {
    document.body.dataset.chats = this.shown ? "open" : "closed";
    for (const one of document.querySelectorAll("button[data-chats]")) one.setAttribute("aria-expanded", this.shown);
    if (this.shown && this.version === null) this.load();
  }

  toggle(shown = !this.shown) {
    if (this.wide.matches) localStorage.moestroChats = shown ? "open" : "closed";
    else this.over = shown;
    this.draw();
    if (shown) this.find.focus();
    else if (this.element.contains(document.activeElement)) document.querySelector("button[data-chats]")?.focus();
  }

  open() {
    this.toggle(true);
    this.find.select();
  }

  state({ chats, host }) {
    const { chat = "" } = document.body.dataset;
    if (chat !== this.chat) {
      this.chat = chat;
      this.mark();
    }
    const version = `${chats} ${host.stamp}`;
    if (!this.shown || version === this.version) return;
    this.version = version;
    this.load();
  }

  async load() {
    const asked = this.find.value, load = this.loads += 1;
    const reply = await fetch(`/live/chats?${new URLSearchParams({ find: asked })}`, { cache: "no-store" }).catch(() => null);
    if (!reply?.ok || load !== this.loads) return;
    const { chats, more } = await reply.json();
    if (load !== this.loads || this.lines.querySelector("input")) return; // a name is being written
    const focused = this.lines.contains(document.activeElement) && document.activeElement.closest("li").dataset.id;
    this.lines.replaceChildren(...chats.map((one) => line({ ...one, title: this.saving.get(one.id) ?? one.title })));
    this.said.textContent = chats.length ? (more ? "Older chats: search, or see the tab Sessions." : "") : asked.trim() ? "Nothing found." : "No chats yet.";
    this.mark();
    if (focused) this.lines.querySelector(`[data-id="${focused}"] button`)?.focus({ preventScroll: true });
  }

  mark() {
    for (const one of this.lines.children) {
      const open = one.querySelector(".open");
      if (one.dataset.id === this.chat) open?.setAttribute("aria-current", "true");
      else open?.removeAttribute("aria-current");
    }
  }

  click(event) {
    const node = event.target.closest("li"), act = event.target.closest("button")?.className;
    if (!node || !act) return;
    if (act === "rename") return this.rename(node);
    if (act === "pin") return this.tell(node, "pin");
    if (act === "delete") return ask(event.target);
    if (act === "delete sure") return this.tell(node, "delete");
    answered().then(() => this.trigger("select", { do: "open", id: +node.dataset.id })); // a name is saved before
    if (!this.wide.matches) this.toggle(false);
  }

  rename(node) {
    const name = document.createElement("input"), open = node.querySelector(".open");
    Object.assign(name, { value: open.querySelector("b").textContent, maxLength: 200 });
    name.setAttribute("aria-label", "Name of the chat");
    let ended = false; // taking the field away is a blur, too
    const end = (save) => {
      if (ended) return;
      ended = true;
      const title = name.value.trim();
      name.replaceWith(open);
      if (save && title && title !== open.querySelector("b").textContent) {
        open.querySelector("b").textContent = title;
        this.save(+node.dataset.id, title);
      }
    };
    name.addEventListener("blur", () => end(true));
    name.addEventListener("keydown", (pressed) => {
      if (pressed.isComposing || !["Enter", "Escape"].includes(pressed.key)) return;
      pressed.preventDefault();
      pressed.stopPropagation();
      end(pressed.key === "Enter");
      node.querySelector(".rename").focus();
    });
    open.replaceWith(name);
    name.select();
  }

  /** Have the server do something with a chat; the list is drawn anew as it has been done. */
  tell(node, what) { answered().then(() => this.trigger("select", { do: what, id: +node.dataset.id })); }

  async save(id, title) {
    const event = { do: "rename", id, text: title };
    this.saving.set(id, title);
    const saved = answerTo(event);
    this.trigger("select", event);
    await saved;
    if (this.saving.get(id) === title) this.saving.delete(id);
    this.load(); // the old name, if the new one was refused
  }

  key(event) {
    if (event.key === "Escape") {
      event.stopPropagation(); // it would stop the answer
      if (this.find.value) {
        this.find.value = "";
        this.load();
      } else {
        this.toggle(false);
      }
      return;
    }
    if (event.target.tagName === "INPUT" && event.target !== this.find) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const all = [this.find, ...this.lines.querySelectorAll(".open")];
    const here = all.indexOf(event.target.closest("li")?.querySelector(".open") ?? event.target);
    all[Math.min(all.length - 1, Math.max(0, here + step))].focus();
    event.preventDefault();
  }
}

/** The button asks once more, for a while. */
function ask(button) {
  button.className = "delete sure";
  button.textContent = "Delete?";
  setTimeout(() => Object.assign(button, { className: "delete", textContent: "✕" }), SURE_MS);
}

function line({ id, title, excerpt, pinned }) {
  const node = document.createElement("li"), open = document.createElement("button"), acts = document.createElement("span");
  const name = document.createElement("b"), where = document.createElement("span");
  node.dataset.id = id;
  Object.assign(open, { type: "button", className: "open", title });
  acts.className = "list-acts";
  for (const [className, textContent, does] of [["pin", pinned ? "★" : "☆", pinned ? "Unpin" : "Pin"], ["rename", "✎", "Rename"], ["delete", "✕", "Delete"]]) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className, textContent, title: does });
    button.setAttribute("aria-label", `${does} ${title}`);
    acts.append(button);
  }
  if (pinned) node.className = "pinned";
  name.textContent = title;
  where.textContent = excerpt;
  open.append(name, ...(excerpt ? [where] : []));
  node.append(open, acts);
  return node;
}
