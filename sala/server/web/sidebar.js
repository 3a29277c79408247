// The list of conversations.

import { byId, iconButton, make } from "./dom.js";
import { dayGroup } from "./format.js";

export class Sidebar {
  constructor({ onRename, onDelete, isLive }) {
    this.onRename = onRename;
    this.onDelete = onDelete;
    this.isLive = isLive;
    this.root = byId("chat-list");
    this.chats = [];
    this.current = null;
    byId("search").addEventListener("input", () => this.show());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.target.value === "") return;
      event.target.value = "";
      event.stopPropagation();
      this.show();
    });
  }

  update(chats, current) {
    this.chats = chats;
    this.current = current;
    this.show();
  }

  show() {
    if (this.root.querySelector("input")) return; // a title is being edited
    const wanted = byId("search").value.trim().toLowerCase();
    const found = wanted ? this.chats.filter((chat) => chat.title.toLowerCase().includes(wanted) || chat.words?.includes(wanted)) : this.chats;
    if (found.length === 0) {
      const text = wanted ? "Nothing found." : "Your conversations will appear here. They are stored in this browser only.";
      this.root.replaceChildren(make("p", { className: "list-empty", text }));
      return;
    }
    const groups = new Map();
    for (const chat of found) {
      const name = dayGroup(chat.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(this.#row(chat));
    }
    this.root.replaceChildren(...[...groups].flatMap(([name, rows]) => [make("h2", { text: name }), make("ul", {}, ...rows)]));
  }

  #row(chat) {
    const link = make("a", { text: chat.title, attributes: { href: `#${chat.id}`, title: chat.title } });
    const row = make("li", { className: "chat-row" }, link);
    if (chat.id === this.current) {
      row.classList.add("is-current");
      link.setAttribute("aria-current", "page");
    }
    if (this.isLive(chat.id)) row.classList.add("is-live");
    const rename = iconButton("pencil", `Rename “${chat.title}”`, () => this.#rename(row, chat), "small");
    const remove = iconButton("trash", `Delete “${chat.title}”`, () => this.onDelete(chat), "small");
    row.append(make("span", { className: "row-actions" }, rename, remove));
    return row;
  }

  #rename(row, chat) {
    const input = make("input", { attributes: { type: "text", "aria-label": "Title", maxlength: "120" } });
    input.value = chat.title;
    let isOver = false;
    const finish = (isKept) => {
      if (isOver) return;
      isOver = true;
      input.remove();
      const title = input.value.trim();
      if (isKept && title && title !== chat.title) this.onRename(chat, title);
      else this.show();
    };
    input.addEventListener("blur", () => finish(true));
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      event.stopPropagation();
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") finish(false);
    });
    row.replaceChildren(input);
    input.focus();
    input.select();
  }
}
