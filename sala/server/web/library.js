// Documents that the server keeps for this key: listed with what of them is still read, used again, deleted.

import { deleteDocument, documentStates, getDocument, listDocuments } from "./api.js";
import { byId, iconButton, make, toast } from "./dom.js";
import { attachmentOf } from "./files.js";
import { formatCount, formatSize } from "./format.js";

const LEFT = 4; // tokens at the end of a document that are read again with what follows

export class Library {
  // `findAttached` returns the files that the conversation begins with, in order.
  constructor(settings, { findAttached, onUse }) {
    this.settings = settings;
    this.findAttached = findAttached;
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
    await this.#showStates(new Map(rows.map(({ document, state }) => [document.id, state])));
  }

  // Documents that are attached are read in their order; of any other it matters whether a conversation may begin with it.
  async #showStates(states) {
    const attached = this.findAttached();
    const known = attached.findIndex((file) => !states.has(file.keptId));
    const first = attached.slice(0, known < 0 ? undefined : known).map((file) => file.keptId);
    const later = new Set(attached.slice(first.length).map((file) => file.keptId));
    const others = [...states.keys()].filter((id) => !first.includes(id) && !later.has(id));
    for (const id of later) states.get(id)?.replaceChildren(); // what stands before it is not on the server
    for (const ids of [first, ...others.map((id) => [id])]) {
      if (ids.length && this.dialog.open) await this.#showState(ids, states);
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

  async #showState(ids, states) {
    try {
      for (const one of await documentStates(ids, this.settings.modelId, this.settings.values.system)) {
        const { id, tokens, cached_tokens: cached } = one;
        const state = states.get(id);
        const isRead = tokens - cached <= Math.max(LEFT, tokens / 10);
        state.textContent = isRead ? "read" : cached > 0 ? `${Math.floor((100 * cached) / tokens)}% read` : "not read yet";
        state.title = `The cache holds ${formatCount(cached)} of ${formatCount(tokens)} tokens${ids.length > 1 ? ", in the order in which the documents are attached" : " if a conversation begins with this document"}`;
        state.classList.toggle("is-read", cached > 0);
      }
    } catch {
      for (const id of ids) states.get(id).textContent = "";
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
