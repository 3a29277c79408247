// Documents that the server keeps for this key: listed with what of them is still read, used again, deleted.

import { deleteDocument, documentState, getDocument, listDocuments } from "./api.js";
import { byId, iconButton, make, toast } from "./dom.js";
import { attachmentOf } from "./files.js";
import { formatCount, formatSize } from "./format.js";

export class Library {
  constructor(settings, { onUse }) {
    this.settings = settings;
    this.onUse = onUse;
    this.dialog = byId("library");
    this.list = byId("library-list");
    byId("open-library").addEventListener("click", () => this.open());
    byId("library-keep").addEventListener("change", (event) => settings.keepDocuments(event.target.checked));
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
  }

  async open() {
    byId("library-keep").checked = this.settings.keepsDocuments;
    if (!this.dialog.open) this.dialog.showModal();
    await this.show();
  }

  async show() {
    let documents;
    try {
      documents = await listDocuments();
    } catch (failure) {
      const text = failure.status === 404 ? "This server keeps no documents." : `${failure.title} ${failure.detail}`;
      this.list.replaceChildren(make("p", { className: "list-empty", text }));
      return;
    }
    if (documents.length === 0) {
      this.list.replaceChildren(make("p", { className: "list-empty", text: "No documents are kept yet. Tick the box above, then attach a file." }));
      return;
    }
    const rows = documents.map((one) => this.#row(one));
    this.list.replaceChildren(...rows.map(({ root }) => root));
    for (const { document, state } of rows) {
      if (!this.dialog.open) return;
      await this.#showState(document, state);
    }
  }

  #row(document) {
    const state = make("span", { className: "read-state", text: "…" });
    const days = Math.max(0, Math.round((document.expires_at * 1000 - Date.now()) / 86_400_000));
    const info = `${formatCount(document.tokens)} tokens · ${formatSize(document.bytes)} · for ${days} more days`;
    const words = make("span", { className: "chip-text" }, make("span", { className: "chip-name", text: document.filename }), make("span", { className: "chip-info", text: info }));
    const use = make("button", { className: "library-use", icon: "file", attributes: { type: "button", title: `Attach ${document.filename}` }, on: { click: () => this.#use(document) } }, words, state);
    const remove = iconButton("trash", `Delete ${document.filename} from the server`, () => this.#remove(document), "small");
    return { document, state, root: make("div", { className: "library-row", attributes: { role: "listitem" } }, use, remove) };
  }

  async #showState(document, state) {
    try {
      const { tokens, cached_tokens: cached } = await documentState(document.id, this.settings.modelId, this.settings.values.system);
      const share = tokens ? cached / tokens : 0;
      state.textContent = share >= 0.9 ? "read" : share > 0 ? `${Math.floor(share * 100)}% read` : "not read yet";
      state.title = `The cache holds ${formatCount(cached)} of ${formatCount(tokens)} tokens`;
      state.classList.toggle("is-read", share > 0);
    } catch {
      state.textContent = "";
    }
  }

  async #use(document) {
    try {
      this.onUse(attachmentOf(await getDocument(document.id)));
      this.dialog.close();
    } catch (failure) {
      toast(`${failure.title} ${failure.detail}`);
    }
  }

  async #remove(document) {
    try {
      await deleteDocument(document.id);
    } catch (failure) {
      toast(`${failure.title} ${failure.detail}`);
    }
    await this.show();
  }
}
