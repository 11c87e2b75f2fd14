// The messages of a chat, drawn from what Python says of them: text, statistics, branches, and what can be done with each.

import { folded, parts } from "/ui/chat/attach.js";
import { AnswerView, split } from "/ui/chat/answer.js";
import { copy } from "/ui/chat/copy.js";

const BUTTON = "button";

/** Draw the messages into the component, once for each element. */
export function start(element, props, trigger, watch) {
  if (element.dataset.started) return;
  element.dataset.started = "1";
  const view = new View(element, trigger);
  const draw = () => view.show(props.value?.messages ?? []);
  watch("value", draw);
  draw();
}

class View {
  constructor(element, trigger) {
    Object.assign(this, { element, trigger, rows: new Map() });
    this.list = element.querySelector(".messages");
    element.addEventListener("click", (event) => this.click(event));
    element.addEventListener("keydown", (event) => this.key(event));
  }

  /** Rows that are as they were stay, with what the user has selected or unfolded in them. */
  show(messages) {
    const before = this.rows, focused = document.activeElement?.closest?.("[data-message]")?.dataset.message;
    const act = document.activeElement?.dataset?.act;
    this.rows = new Map();
    for (const message of messages) {
      const state = JSON.stringify(message), old = before.get(message.id);
      this.rows.set(message.id, old?.state === state ? old : { state, message, node: row(message) });
    }
    this.place([...this.rows.values()].map((one) => one.node));
    document.body.dataset.empty = messages.length ? "0" : "1";
    if (focused && act && document.activeElement === document.body) this.refocus(focused, act, messages);
  }

  /** What stands where it did is not touched: it would lose the focus. */
  place(nodes) {
    const stays = new Set(nodes);
    for (const node of [...this.list.children]) if (!stays.has(node)) node.remove();
    nodes.forEach((node, i) => {
      if (this.list.children[i] !== node) this.list.insertBefore(node, this.list.children[i] ?? null);
    });
  }

  /** The button that was pressed is drawn anew: the focus goes on to the one in its place. */
  refocus(id, act, messages) {
    const there = messages.find((one) => `${one.id}` === id) ?? messages.find((one) => one.branches.includes(+id));
    const node = there && this.rows.get(there.id).node;
    const found = node?.querySelector(`[data-act="${act}"]:not(:disabled)`) ?? node?.querySelector("[data-act]:not(:disabled)");
    found?.focus({ preventScroll: true });
  }

  click(event) {
    const button = event.target.closest("[data-act], [data-copy]"), node = button?.closest("[data-message]");
    if (!node) return;
    const { message } = this.rows.get(+node.dataset.message) ?? {};
    if (button.dataset.copy) copy(button.closest(".code").querySelector("pre").textContent, button);
    else if (message) this.act(button, message, node);
  }

  act(button, message, node) {
    const branches = message.branches, here = branches.indexOf(message.id);
    switch (button.dataset.act) {
      case "copy": return copy(message.role === "user" ? message.text : split(message.text, message.opened, true).said.trim(), button);
      case "regenerate": case "continue": return this.trigger("select", { do: button.dataset.act, id: message.id });
      case "earlier": return this.trigger("select", { do: "show", id: branches[here - 1] });
      case "later": return this.trigger("select", { do: "show", id: branches[here + 1] });
      case "edit": return edit(node, message);
      case "cancel": return shut(node);
      case "submit": return this.submit(node, message);
      default: return undefined;
    }
  }

  submit(node, message) {
    const text = node.querySelector("textarea").value;
    shut(node);
    this.trigger("select", { do: message.role === "user" ? "edit" : "rewrite", id: message.id, text });
  }

  key(event) {
    const node = event.target.closest("[data-message]");
    if (!node || event.target.tagName !== "TEXTAREA" || event.isComposing) return;
    if (event.key === "Escape") shut(node);
    else if (event.key === "Enter" && !event.shiftKey) this.submit(node, this.rows.get(+node.dataset.message).message);
    else return;
    event.preventDefault();
    event.stopPropagation(); // Escape would stop the answer
  }
}

const made = (tag, attributes, ...inner) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inner);
  return node;
};
const button = (act, label, face) => made(BUTTON, { type: BUTTON, "data-act": act, "aria-label": label, title: label }, face);

function row(message) {
  const { id, role, text, line, opened, cut, branches } = message, mine = role === "user";
  const box = made("div", { class: mine ? "message user" : "message bot", "data-testid": mine ? "user" : "bot" });
  if (mine) {
    box.append(...parts(text).map((one) => (one.name ? folded(one) : one.text)));
  } else {
    const said = made("div", { class: "answer" });
    new AnswerView(said).show(text.trim() ? text : "(no text)", opened, true);
    box.append(said, made("p", { class: "line" }, line));
  }
  const acts = made("div", { class: "acts" }, ...arrows(branches, id), button("copy", "Copy", ""),
    ...(mine ? [] : [button("regenerate", "Regenerate", "↻")]), button("edit", "Edit", "✎"), ...(cut ? [button("continue", "Continue", "Continue")] : []));
  return made("div", { class: mine ? "user-row" : "bot-row", "data-message": id }, box, acts);
}

/** Back and forth between the branches at a message's place. */
function arrows(branches, id) {
  if (branches.length < 2) return [];
  const here = branches.indexOf(id), earlier = button("earlier", "Earlier branch", "‹"), later = button("later", "Later branch", "›");
  earlier.disabled = here === 0;
  later.disabled = here === branches.length - 1;
  const at = made("span", { class: "at" }, `${here + 1} / ${branches.length}`);
  at.setAttribute("aria-label", `Branch ${here + 1} of ${branches.length}`);
  return [earlier, at, later];
}

function edit(node, message) {
  if (node.querySelector("textarea")) return;
  const field = made("textarea", { "aria-label": message.role === "user" ? "Edit message" : "Edit answer", rows: Math.min(12, message.text.split("\n").length + 1) });
  field.value = message.text;
  const form = made("div", { class: "editing" }, field, made("div", {}, made(BUTTON, { type: BUTTON, "data-act": "submit" }, message.role === "user" ? "Send" : "Save"),
    made(BUTTON, { type: BUTTON, "data-act": "cancel" }, "Cancel")));
  node.classList.add("edited");
  node.append(form);
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function shut(node) {
  node.classList.remove("edited");
  node.querySelector(".editing")?.remove();
  node.querySelector('[data-act="edit"]')?.focus();
}
