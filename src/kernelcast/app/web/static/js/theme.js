// Light or dark, before the first paint (a plain script, not a module: modules run late and would flash).
// The system's choice, until the reader makes one; that is kept in localStorage under "theme".
(() => {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage may be switched off
    }
  };
  const apply = () => {
    const theme = kept() ?? (system.matches ? "dark" : "light");
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.setAttribute("aria-pressed", String(theme === "dark"));
  };
  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      try {
        localStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark");
      } catch {
        // nothing keeps it
      }
      apply();
    });
  });
})();
