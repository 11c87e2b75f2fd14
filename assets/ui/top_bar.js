// The top bar: the verdict of the sidebar's card in few words, and the way to the card.

const AGAIN_MS = 50; // until the bar is drawn

/** Show the chip of the card's value, now and whenever it changes. */
export function follow(props, watch) {
  const show = () => {
    const place = document.querySelector("[data-fit-chip]"), { chip = "" } = props.value ?? {};
    if (!place) setTimeout(show, AGAIN_MS);
    else if (place.dataset.shown !== chip) {
      place.innerHTML = chip; // made by Python, as the card itself
      place.dataset.shown = chip;
    }
  };
  watch("value", show);
  show();
}

/** The chip leads to the card, also where the sidebar is closed. Once for each page. */
export function start() {
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-show-fit]")) return;
    document.querySelector(".sidebar:not(.open) .toggle-button")?.click();
    const card = document.querySelector("#fit .fit");
    if (!card) return;
    card.tabIndex = -1;
    card.scrollIntoView({ block: "nearest" });
    card.focus({ preventScroll: true });
  });
}
