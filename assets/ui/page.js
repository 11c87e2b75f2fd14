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
  document.addEventListener("click", (event) => { // "Calibrate now" opens its tab, and on a phone the sidebar makes way
    const opener = event.target.closest("[data-open]");
    if (!opener) return;
    document.getElementById(`${opener.dataset.open}-button`)?.click();
    if (innerWidth < 900) document.querySelector(".sidebar.open .toggle-button")?.click();
  });
  if (innerWidth < 900) document.querySelector(".sidebar .toggle-button")?.click();
  import("/ui/sidebar.js").then((m) => m.start(document.getElementById("sidebar")));
  const mode = localStorage.moestroMode === "Advanced" ? "Advanced" : "Simple";
  window.moestroMode(mode);
  return mode;
}
