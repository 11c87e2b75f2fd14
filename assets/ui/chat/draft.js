// What is written and not sent is kept in the browser, for each chat and for a new one, over reloads and other chats.

const KEY = "moestroDraft:", MOST = 50; // chats with a draft

const field = () => document.querySelector("#message textarea");
const key = (chat) => `${KEY}${chat ?? "new"}`;

/** The draft of the chat that is shown; `look` is called now and then. */
export class Draft {
  constructor() {
    Object.assign(this, { chat: undefined, value: "" });
    document.addEventListener("input", (event) => {
      if (this.chat !== undefined && event.target === field()) this.keep(this.chat, event.target.value);
    });
  }

  /** `sent`: the chat is shown because a message was sent. */
  look(chat, sent) {
    const box = field();
    if (!box) return;
    if (chat !== this.chat) this.go(box, chat, sent);
    else if (box.value !== this.value) this.keep(chat, box.value); // Python has emptied it, or given back what failed
  }

  go(box, chat, sent) {
    const given = box.value !== this.value;
    if (sent && this.chat !== undefined) localStorage.removeItem(key(this.chat));
    this.chat = chat;
    if (sent || given) {
      this.keep(chat, box.value);
      return;
    }
    this.value = localStorage[key(chat)] ?? "";
    if (box.value !== this.value) fill(box, this.value);
  }

  keep(chat, text) {
    this.value = text;
    if (!text) {
      localStorage.removeItem(key(chat));
      return;
    }
    const others = Object.keys(localStorage).filter((name) => name.startsWith(KEY) && name !== key(chat));
    if (others.length >= MOST) localStorage.removeItem(others[0]);
    try {
      localStorage[key(chat)] = text;
    } catch { /* no room: the draft is in the field alone */ }
  }
}

function fill(box, text) {
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true })); // Gradio takes note
}
