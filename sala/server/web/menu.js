// The menu of a conversation: export and import.

import { byId, toast } from "./dom.js";
import { fileName, NotReadable, offer, readConversations, toJson, toMarkdown } from "./exchange.js";

export class Menu {
  // `current` returns the conversation that is shown, `system` its system prompt; `onImport` gets conversations.
  constructor({ store, current, system, onImport }) {
    this.store = store;
    this.current = current;
    this.system = system;
    this.onImport = onImport;
    const menu = byId("menu");
    const choose = (id, act) =>
      byId(id).addEventListener("click", () => {
        menu.hidePopover();
        act();
      });
    choose("export-markdown", () => this.#exportMarkdown());
    choose("export-json", () => this.#exportJson([this.current()], fileName(this.current().title, "json")));
    choose("export-all", () => this.#exportAll());
    choose("import", () => byId("import-input").click());
    byId("import-input").addEventListener("change", (event) => {
      this.#import([...event.target.files]);
      event.target.value = "";
    });
    menu.addEventListener("beforetoggle", (event) => event.newState === "open" && this.#opening());
    menu.addEventListener("keydown", (event) => this.#key(event));
  }

  #opening() {
    const isEmpty = this.current().messages.length === 0;
    for (const id of ["export-markdown", "export-json"]) byId(id).disabled = isEmpty;
    requestAnimationFrame(() => byId("menu").querySelector("button:enabled")?.focus());
  }

  #key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const buttons = [...byId("menu").querySelectorAll("button:enabled")];
    buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length].focus();
  }

  #exportMarkdown() {
    offer(fileName(this.current().title, "md"), toMarkdown(this.current(), this.system()), "text/markdown");
  }

  async #exportJson(chats, name) {
    offer(name, await toJson(chats, this.store), "application/json");
  }

  async #exportAll() {
    const rows = await this.store.list();
    const chats = (await Promise.all(rows.map((row) => this.store.load(row.id)))).filter(Boolean);
    if (chats.length === 0) toast("There are no conversations yet.");
    else await this.#exportJson(chats, `conversations-${new Date().toISOString().slice(0, 10)}.json`);
  }

  async #import(files) {
    for (const file of files) {
      try {
        await this.onImport(await readConversations(file));
      } catch (error) {
        toast(error instanceof NotReadable ? error.message : `“${file.name}” could not be imported.`);
      }
    }
  }
}
