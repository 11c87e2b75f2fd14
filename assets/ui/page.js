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
  if (innerWidth < 900) document.querySelector(".sidebar .toggle-button")?.click();
  const mode = localStorage.moestroMode === "Advanced" ? "Advanced" : "Simple";
  window.moestroMode(mode);
  return mode;
}
