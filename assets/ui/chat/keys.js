// The keyboard, and the panels of the chat's head: the list of shortcuts and the system prompt.

const FIELDS = "input:not([type=range], [type=checkbox], [type=radio]), textarea, select, [contenteditable=true]";
const last = (selector) => [...document.querySelectorAll(selector)].at(-1);
const press = (selector) => () => last(selector)?.click();
// By the place of the key, as Alt writes other characters on some keyboards.
const WITH_ALT = {
  KeyN: press("#new-chat"),
  KeyK: () => window.moestroChats?.(),
  KeyR: press('#chat [data-act="regenerate"]'),
  KeyG: press('#chat [data-act="continue"]'),
  KeyE: press('#chat .user-row [data-act="edit"]'),
  KeyC: press('#chat .bot-row [data-act="copy"]'),
  KeyS: () => system(),
  Comma: press('#chat [data-act="earlier"]:not(:disabled)'),
  Period: press('#chat [data-act="later"]:not(:disabled)'),
};

let listening = false;

/** Listen, once for each page. */
export function start() {
  if (listening) return;
  listening = true;
  document.addEventListener("keydown", pressed);
  document.addEventListener("focusout", ({ target, relatedTarget }) => { // a menu that is left closes
    const menu = target.closest?.("details.menu[open]");
    if (menu && relatedTarget && !menu.contains(relatedTarget)) menu.open = false;
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("button[data-keys]")) help();
    if (event.target.closest("button[data-system]")) system();
    const menu = document.querySelector("details.menu[open]");
    if (menu && !menu.querySelector("summary").contains(event.target)) menu.open = false;
    if (event.target.matches?.("dialog")) event.target.close(); // beside it
    if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
  });
}

function pressed(event) {
  const writing = event.target.closest?.(FIELDS), onChat = document.getElementById("chat-live")?.offsetParent;
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]") || !onChat) return;
  const { altKey, ctrlKey, metaKey, key, code } = event;
  if (altKey && !ctrlKey && !metaKey && WITH_ALT[code]) WITH_ALT[code]();
  else if (key === "Escape" && !ctrlKey && !altKey) return void escape(event);
  else if (writing || altKey || ctrlKey || metaKey) return;
  else if (key === "?") help();
  else if (key === "/") document.querySelector("#message textarea")?.focus();
  else return;
  event.preventDefault();
}

/** Escape closes what is open, and else stops the answer; in a field of the sidebar it is that field's. */
function escape(event) {
  const menu = document.querySelector("details.menu[open]");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  } else if (document.body.dataset.system === "open") {
    system();
  } else if (document.body.dataset.answering === "1" && !event.target.closest?.("#sidebar")) {
    document.getElementById("stop")?.click();
  }
}

function help() { document.getElementById("shortcuts")?.showModal(); }

function system() {
  const open = document.body.dataset.system !== "open", button = document.querySelector("button[data-system]");
  document.body.dataset.system = open ? "open" : "closed";
  button?.setAttribute("aria-expanded", open);
  if (open) document.querySelector("#system textarea")?.focus();
  else button?.focus();
}
