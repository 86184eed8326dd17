// Light, dark, or as the system has it. Runs before the page is painted, asks nobody.
"use strict";
(() => {
  const KEY = "shoal-theme";
  const NEXT = { system: "light", light: "dark", dark: "system" };
  const root = document.documentElement;

  function stored() {
    try {
      const value = localStorage.getItem(KEY);
      return value === "light" || value === "dark" ? value : "system";
    } catch {
      return "system"; // storage is switched off: the page follows the system
    }
  }

  function apply(theme) {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  function keep(theme) {
    try {
      if (theme === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, theme);
    } catch {
      // without storage the choice lasts as long as the page
    }
  }

  let theme = stored();
  apply(theme);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.querySelector("[data-theme-toggle]");
    if (!button) return;
    const label = button.querySelector("span");
    label.textContent = theme;
    button.hidden = false;
    button.addEventListener("click", () => {
      theme = NEXT[theme];
      apply(theme);
      keep(theme);
      label.textContent = theme;
    });
  });
})();
