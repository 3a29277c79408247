// Runs before the first paint, so that a chosen theme never flashes.
"use strict";
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("sala.theme");
  } catch {
    // storage is switched off: follow the system
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
