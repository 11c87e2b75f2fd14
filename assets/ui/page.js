() => {
  window.moestroMode = (mode) => {
    localStorage.moestroMode = mode;
    document.body.classList.toggle("show-advanced", mode === "Advanced");
  };
  if (localStorage.moestroTheme) document.body.classList.toggle("dark", localStorage.moestroTheme === "dark");
  document.querySelector("[data-theme-toggle]")?.addEventListener("click", () => {
    const dark = document.body.classList.toggle("dark");
    localStorage.moestroTheme = dark ? "dark" : "light";
  });
  document.addEventListener("keydown", ({ key }) => { // a menu's list can be scrolled: Tab would stop there, and be lost as it closes
    if (key === "Tab") for (const list of document.querySelectorAll("[role=listbox]")) list.tabIndex = -1;
  }, true);
  document.addEventListener("input", ({ target }) => { if (target.matches?.("[role=combobox]")) target.dataset.typed = "1"; });
  document.addEventListener("focusout", ({ target }) => { // Gradio leaves a menu open whose focus has gone
    if (!target.matches?.("[role=combobox]")) return;
    const key = target.dataset.typed ? "Enter" : "Escape"; // what was typed is taken
    delete target.dataset.typed;
    setTimeout(() => {
      if (target.ariaExpanded === "true" && document.activeElement !== target) target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }, 100);
  });
  document.querySelector("[data-skip]")?.addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("tab-chat-button")?.click();
    document.querySelector("#message textarea")?.focus();
  });
  document.addEventListener("click", (event) => { // "Calibrate now" opens its tab, and on a phone the sidebar makes way
    const opener = event.target.closest("[data-open]");
    if (!opener) return;
    document.getElementById(`${opener.dataset.open}-button`)?.click();
    if (innerWidth < 900) document.querySelector(".sidebar.open .toggle-button")?.click();
    if (opener.dataset.importSource) fill("#import-source :is(input, textarea)", opener.dataset.importSource);
  });
  const fill = (selector, text, tries = 50) => { // a tab draws its parts when it is opened
    const field = document.querySelector(selector);
    if (!field?.offsetParent) return void (tries && setTimeout(() => fill(selector, text, tries - 1), 100));
    field.focus();
    field.value = text;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    field.blur(); // which asks for the forecast
    document.getElementById("import-start")?.focus();
  };
  for (const part of ["api", "focus", "top_bar", "tour", "chat/attach"]) import(`/ui/${part}.js`).then((m) => m.start());
  if (innerWidth < 900) document.querySelector(".sidebar .toggle-button")?.click();
  import("/ui/sidebar.js").then((m) => ["sidebar", "top-bar"].forEach((id) => m.start(document.getElementById(id))));
  const mode = localStorage.moestroMode === "Advanced" ? "Advanced" : "Simple";
  window.moestroMode(mode);
  return mode;
}
