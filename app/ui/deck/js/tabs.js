// The panels below the timeline: one is shown at a time, chosen with the mouse or the arrow keys, and remembered.

const KEPT = "moestroDeckPanel", KEYS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class Tabs {
  /** `shown()` is called when another panel was chosen. */
  constructor(list, shown) {
    Object.assign(this, { list, shown, tabs: [...list.querySelectorAll("[role=tab]")] });
    this.wanted = localStorage[KEPT] ?? this.tabs[0].dataset.panel;
    for (const tab of this.tabs) tab.addEventListener("click", () => this.choose(tab));
    list.addEventListener("keydown", (event) => this.key(event));
    this.offer({});
  }

  /** Show the tabs that have something to show: all but those that `able` says no of. */
  offer(able) {
    for (const tab of this.tabs) tab.hidden = able[tab.dataset.panel] === false;
    const offered = this.tabs.filter((tab) => !tab.hidden), now = offered.find((tab) => tab.dataset.panel === this.wanted) ?? offered[0];
    for (const tab of this.tabs) {
      const on = tab === now, panel = document.getElementById(tab.getAttribute("aria-controls"));
      if (tab.getAttribute("aria-selected") !== `${on}`) tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
      if (panel) panel.hidden = !on;
    }
  }

  choose(tab) {
    this.wanted = localStorage[KEPT] = tab.dataset.panel;
    this.shown();
    document.getElementById(tab.getAttribute("aria-controls")).scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const offered = this.tabs.filter((tab) => !tab.hidden), at = offered.indexOf(event.target), last = offered.length - 1;
    const to = event.key === "Home" ? 0 : event.key === "End" ? last : KEYS[event.key] ? (at + KEYS[event.key] + offered.length) % offered.length : -1;
    if (at < 0 || to < 0) return;
    event.preventDefault();
    this.choose(offered[to]);
    offered[to].focus();
  }
}
