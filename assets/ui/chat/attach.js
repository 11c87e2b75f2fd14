// Text files that go with a message: chosen, dropped on the chat or pasted. Each stands in the message as a block with its
// name, so that it can be read and changed before it is sent; a message that is shown has it folded.

const MOST = 1 << 20; // bytes of a file
const BLOCK = /(?:^|\n)File ([^\n]+):\n(`{3,})\n([\s\S]*?)\n\2(?=\n|$)/g;
const COLUMN = "#chat-column";

/** Listen, once for each page. */
export function start() {
  const chosen = Object.assign(document.createElement("input"), { type: "file", multiple: true, hidden: true, id: "attached" });
  chosen.addEventListener("change", () => add([...chosen.files]).finally(() => { chosen.value = ""; }));
  document.body.append(chosen);
  document.addEventListener("click", (event) => { if (event.target.closest?.("[data-attach]")) chosen.click(); });
  document.addEventListener("paste", (event) => { if (event.target.matches?.("#message textarea")) take(event, event.clipboardData); });
  for (const [event, where] of [["input", "#message textarea"], ["click", "#send"], ["keydown", "#message textarea"]]) {
    document.addEventListener(event, ({ target, isTrusted }) => { if (isTrusted && target.closest?.(where)) say(""); });
  }
  document.addEventListener("dragover", (event) => {
    if (event.target.closest?.(COLUMN) && event.dataTransfer.types.includes("Files")) event.preventDefault(); // else no drop follows
  });
  document.addEventListener("drop", (event) => { if (event.target.closest?.(COLUMN)) take(event, event.dataTransfer); });
}

/** The text of a message in order: plain parts as `{ text }`, files as `{ name, text }`. */
export function parts(message) {
  const found = [];
  let end = 0;
  const plain = (to) => { if (message.slice(end, to).trim()) found.push({ text: message.slice(end, to).replace(/^\n+|\n+$/g, "") }); };
  for (const { 0: block, 1: name, 3: text, index } of message.matchAll(BLOCK)) {
    plain(index);
    found.push({ name, text });
    end = index + block.length;
  }
  plain(message.length);
  return found;
}

/** A file of a message, folded. */
export function folded({ name, text }) {
  const fold = document.createElement("details"), head = document.createElement("summary"), body = document.createElement("pre");
  const lines = text.split("\n").length;
  head.textContent = `${name}, ${lines} ${lines === 1 ? "line" : "lines"}`;
  body.textContent = text;
  fold.className = "attached";
  fold.append(head, body);
  return fold;
}

function take(event, data) {
  if (!data?.files.length) return;
  event.preventDefault(); // the browser would open it
  add([...data.files]);
}

async function add(files) {
  const said = [];
  for (const file of files) {
    try {
      insert(file.name.replace(/\s+/g, " "), await read(file));
    } catch (error) {
      said.push(error instanceof Refused ? error.message : `${file.name} cannot be read: ${error.message}`);
    }
  }
  say(said.join(" "));
  document.querySelector("#message textarea")?.focus();
}

/** Below the composer. */
function say(text) {
  const line = document.getElementById("attach-said") ?? Object.assign(document.createElement("p"), { id: "attach-said", role: "status" });
  document.getElementById("composer")?.after(line);
  line.textContent = text;
}

class Refused extends Error {}

async function read(file) {
  if (file.size > MOST) throw new Refused(`${file.name} is larger than 1 MB. Attach the part that matters.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const wide = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(wide, { fatal: true }).decode(bytes).replace(/\r\n?/g, "\n").replace(/\n+$/, "");
    if (!text.includes("\0")) return text;
  } catch { /* in no encoding that is known here */ }
  throw new Refused(`${file.name} is not a text file. Only texts can be attached.`);
}

/** Behind what is written already, for whoever sends it. */
function insert(name, text) {
  const box = document.querySelector("#message textarea"), longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1), before = box.value.replace(/\s+$/, "");
  box.value = `${before}${before ? "\n\n" : ""}File ${name}:\n${fence}\n${text}\n${fence}\n\n`;
  box.dispatchEvent(new Event("input", { bubbles: true })); // Gradio and the draft take note
  box.setSelectionRange(box.value.length, box.value.length);
}
