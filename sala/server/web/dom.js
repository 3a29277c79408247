// Builds elements without markup strings: text passed in here can never become HTML.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h10",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16.2 16.2L20 20",
  sliders: "M4 7h9M19 7h1M16 4.5v5M4 17h1M11 17h9M8 14.5v5",
  up: "M12 19V5M6 11l6-6 6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11.5l-8.2 8.2a5 5 0 0 1-7.1-7.1l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7l-8.4 8.4a1.6 1.6 0 0 1-2.3-2.3l7.6-7.6",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  check: "M5 12.5l4.5 4.5L19 7.5",
  redo: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4.5h-4.5",
  pencil: "M4 20l1-4.5L16.5 4 20 7.5 8.5 19zM14 6.5l3.5 3.5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  file: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  chevron: "M9 6l6 6-6 6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  auto: "M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17zM12 3.5v17M12 8h5.5M12 12h8.4M12 16h6.5",
  alert: "M12 4L2.8 20h18.4zM12 10v4.5M12 17.2v.3",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  book: "M4 5.5c3-1.2 5.5-1 8 .8 2.5-1.8 5-2 8-.8V19c-3-1.2-5.5-1-8 .8-2.5-1.8-5-2-8-.8zM12 6.5V19.5",
  shelf: "M5 4v16M9 4v16M13.2 4.6l3.6 15M4 20h16",
  save: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  open: "M12 16V4.5M7 9.5l5-5 5 5M5 20h14",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  back: "M10 6l-6 6 6 6M4 12h16",
  bulb: "M9 18h6M10 21h4M12 3a6 6 0 0 0-3.5 10.9c.6.5 1 1.3 1 2.1h5c0-.8.4-1.6 1-2.1A6 6 0 0 0 12 3z",
};

export const byId = (id) => document.getElementById(id);

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  const { className, text, attributes = {}, on = {}, icon: iconName } = options;
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  if (iconName) element.prepend(icon(iconName));
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function setIcon(element, name) {
  const old = element.querySelector(":scope > svg.icon");
  if (old) old.replaceWith(icon(name));
  else element.prepend(icon(name));
}

// Icons of the static page are named in its markup by data-icon.
export function fillIcons() {
  for (const element of document.querySelectorAll("[data-icon]")) setIcon(element, element.dataset.icon);
}

export function iconButton(name, label, onClick, className = "") {
  const attributes = { type: "button", "aria-label": label, title: label };
  return make("button", { className: `icon-button ${className}`, icon: name, attributes, on: { click: onClick } });
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

// The clipboard API needs HTTPS or localhost, which a plain address in the local network is not.
function copyBySelection(text) {
  const area = make("textarea", { className: "visually-hidden" });
  area.value = text;
  const holder = document.querySelector("dialog[open]") ?? document.body;
  const focused = document.activeElement;
  holder.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

export function copyButton(getText, className = "") {
  const button = iconButton("copy", "Copy", async () => {
    const done = await copyText(getText());
    setIcon(button, done ? "check" : "alert");
    button.setAttribute("aria-label", done ? "Copied" : "Could not copy");
    setTimeout(() => {
      setIcon(button, "copy");
      button.setAttribute("aria-label", "Copy");
    }, 1600);
  }, className);
  return button;
}

export function announce(text) {
  byId("announce").textContent = text;
}

export function toast(text, action = null) {
  const box = make("div", { className: "toast" }, make("span", { text }));
  const timer = setTimeout(() => box.remove(), action ? 8000 : 5000);
  if (action) {
    const undo = () => {
      clearTimeout(timer);
      box.remove();
      action.run();
    };
    box.append(make("button", { className: "toast-action", text: action.label, attributes: { type: "button" }, on: { click: undo } }));
  }
  byId("toasts").replaceChildren(box);
}
