// The address of the API, as this page reached it, with a button that copies it.

import { copy } from "/ui/chat/copy.js";

/** Fill in the address, once for each page. */
export function start() {
  const address = `${location.origin}/v1`;
  for (const place of document.querySelectorAll("[data-api]")) place.textContent = address.replace(/^https?:\/\//, "");
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy-api]");
    if (button) copy(address, button);
    const other = event.target.closest("[data-copy-of]"); // a text of the page
    if (other) copy(document.querySelector(other.dataset.copyOf).innerText, other);
  });
}
