// Runs before the first paint, so that the page never flashes in the wrong theme.
"use strict";
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("sala.theme");
  } catch {
    // storage is disabled: follow the system
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
