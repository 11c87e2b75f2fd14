// Copying a text, also where the page is not a secure context (another machine's address) and has no clipboard.

const TOLD_MS = 1500;

/** Copy, and say so on the button. */
export async function copy(text, button) {
  const told = (await write(text)) ? "Copied" : "Not copied", face = button.dataset.face ?? button.textContent;
  button.dataset.face = face;
  button.textContent = face.length > 1 ? told : told === "Copied" ? "✓" : "✗";
  document.getElementById("chat-said").textContent = told;
  clearTimeout(button.timer);
  button.timer = setTimeout(() => { button.textContent = face; }, TOLD_MS);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea"), before = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus?.({ preventScroll: true });
    return done;
  }
}
