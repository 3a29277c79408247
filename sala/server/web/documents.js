// The documents of the conversation that is shown: the panel with their text, and the ways between an answer and it.

import { placeOf, Reader } from "./reader.js";

export class Documents {
  // `files` returns those of the conversation and of the draft, `viewOf` the view of a message.
  constructor({ store, files, viewOf }) {
    this.store = store;
    this.findFiles = files;
    this.viewOf = viewOf;
    this.answer = null; // whose passages are marked
    this.reader = new Reader({ load: (id) => this.load(id), onPassage: (passage) => this.#backTo(passage), onCurrent: (passage) => this.#show(passage) });
  }

  get #files() {
    return this.findFiles().filter((file) => !file.isReading);
  }

  get hasFocus() {
    return this.reader.root.contains(document.activeElement);
  }

  // The file with its text: of the draft, or as it was stored with a message.
  async load(id) {
    const file = this.#files.find((one) => one.id === id);
    return file?.text !== undefined ? file : this.store.loadFile(id);
  }

  open(file) {
    this.#show(null);
    this.answer = null;
    this.reader.open(this.#files, file.id);
  }

  close() {
    this.reader.close();
  }

  // Shows a passage or a quote of an answer, with the others of this answer.
  async openSource(answer, passage) {
    this.answer = answer;
    const { passages, quotes } = answer.sources;
    const all = passage.isQuote ? quotes.filter((quote) => quote.isFound) : passages;
    await this.reader.open(this.#files, passage.file, { passages: all.filter((one) => one.file !== null), current: passage });
  }

  async placeOf(passage) {
    const file = passage.file === null ? null : await this.load(passage.file);
    return file ? placeOf(file, passage) : null;
  }

  #show(passage) {
    if (this.answer) this.viewOf(this.answer)?.sources.mark(passage);
  }

  #backTo(passage) {
    const view = this.answer && this.viewOf(this.answer);
    if (!view || !passage) return;
    if (matchMedia("(max-width: 64rem)").matches) this.reader.close();
    view.focusSource(passage);
  }
}
