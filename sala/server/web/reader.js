// The panel beside the conversation: the text of a document with its pages and lines, the passages of an answer marked.
// A long text is laid out in blocks that are filled when they come near the view.

import { announce, byId, make } from "./dom.js";
import { formatCount } from "./format.js";

const BLOCK_LINES = 120;
const BLOCK_CHARACTERS = 9_000;
const LINE_PIXELS = 22; // about, to reserve height for blocks that are not filled
const NEAR = "1200px";

export class Reader {
  // `load` returns a file with its text by id; `onPassage` gets a passage from which the user goes back to the answer,
  // `onCurrent` the one that is shown, or null.
  constructor({ load, onPassage, onCurrent }) {
    this.load = load;
    this.onPassage = onPassage;
    this.onCurrent = onCurrent;
    this.root = byId("reader");
    this.body = byId("reader-text");
    this.files = [];
    this.file = null;
    this.passages = [];
    this.current = null;
    this.blocks = [];
    byId("reader-close").addEventListener("click", () => this.close());
    byId("reader-file").addEventListener("change", (event) => this.show(event.target.value));
    byId("reader-previous").addEventListener("click", () => this.#step(-1));
    byId("reader-next").addEventListener("click", () => this.#step(1));
    byId("reader-back").addEventListener("click", () => this.onPassage(this.current ?? this.passages[0]));
    this.body.addEventListener("click", (event) => this.#clicked(event.target));
    this.watch = new IntersectionObserver((entries) => this.#seen(entries), { root: this.body, rootMargin: NEAR });
  }

  get isOpen() {
    return !this.root.hidden;
  }

  // Opens a document. `passages` are those of one answer: {number, file, start, end}; `current` is shown first.
  async open(files, id, { passages = [], current = null } = {}) {
    this.files = files;
    this.passages = passages;
    this.current = current;
    if (!this.isOpen) this.opener = document.activeElement;
    this.root.hidden = false;
    document.body.classList.add("has-reader");
    await this.show(id);
  }

  async show(id) {
    if (this.file?.id !== id) {
      const file = await this.load(id);
      if (!file) return this.#fail(id);
      this.file = file;
      this.#build();
    } else for (const block of this.blocks) if (block.isFilled) this.#fill(block);
    this.#head();
    const first = this.passages.find((one) => one.file === id);
    if (this.current?.file !== id) this.current = first ?? null;
    this.#goTo(this.current);
  }

  close() {
    if (!this.isOpen) return;
    this.root.hidden = true;
    document.body.classList.remove("has-reader");
    this.watch.disconnect();
    this.body.replaceChildren();
    this.file = null;
    this.blocks = [];
    this.onCurrent(null);
    this.opener?.focus?.();
  }

  #fail(id) {
    this.watch.disconnect();
    this.file = null;
    this.blocks = [];
    const name = this.files.find((file) => file.id === id)?.name ?? "This document";
    this.body.replaceChildren(make("p", { className: "reader-note", text: `${name} is no longer stored in this browser.` }));
    this.#head();
  }

  #head() {
    const options = this.files.map((file) => make("option", { text: file.name, attributes: { value: file.id } }));
    byId("reader-file").replaceChildren(...options);
    byId("reader-file").value = this.file?.id ?? "";
    const { parts, tokens, isExact } = this.files.find((file) => file.id === this.file?.id) ?? {};
    byId("reader-info").textContent = tokens === undefined ? "" : [parts, `${isExact ? "" : "~"}${formatCount(tokens)} tokens`].filter(Boolean).join(" · ");
    byId("reader-passages").hidden = this.passages.length === 0;
    this.#countPassages();
  }

  #countPassages() {
    this.onCurrent(this.current);
    const at = this.passages.indexOf(this.current);
    byId("reader-count").textContent = at < 0 ? `${this.passages.length} passages` : `Passage ${at + 1} of ${this.passages.length}`;
  }

  // ------------------------------------------------------------------------------------------------------- layout

  #build() {
    this.watch.disconnect();
    this.blocks = [];
    this.body.scrollTop = 0;
    const { text, documents, leftOut } = this.file;
    const parts = [];
    const several = (documents?.length ?? 0) > 1;
    for (const one of documents ?? [{ name: this.file.name, notes: [], sections: [{ label: "", start: 0, end: text.length }] }]) {
      if (several) parts.push(make("h3", { className: "reader-name", text: one.name }));
      for (const note of one.notes) parts.push(make("p", { className: "reader-note", text: note }));
      let label = "";
      for (const section of one.sections) {
        if (section.label && section.label !== label) parts.push(make("h4", { className: "reader-label", text: section.label }));
        label = section.label;
        parts.push(...this.#blocksOf(section));
      }
    }
    for (const { name, why } of leftOut ?? []) parts.push(make("p", { className: "reader-note", text: `${name}: left out, ${why}` }));
    this.body.replaceChildren(...parts);
    for (const block of this.blocks) this.watch.observe(block.root);
  }

  #blocksOf(section) {
    const { text } = this.file;
    const roots = [];
    let line = 0;
    let start = section.start;
    while (start < section.end) {
      let end = start;
      const first = line;
      while (end < section.end && line - first < BLOCK_LINES && (end === start || end - start < BLOCK_CHARACTERS)) {
        const next = text.indexOf("\n", end);
        end = next < 0 || next >= section.end ? section.end : next + 1;
        line += 1;
      }
      const root = make("div", { className: "reader-block" });
      root.style.minHeight = `${Math.max(line - first, Math.ceil((end - start) / 70)) * LINE_PIXELS}px`;
      const block = { root, section, start, end, first, isFilled: false };
      root.block = block;
      this.blocks.push(block);
      roots.push(root);
      start = end;
    }
    return roots;
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) if (isIntersecting && !target.block.isFilled) this.#fill(target.block);
  }

  #fill(block) {
    const { section, start, end, first, root } = block;
    const text = this.file.text.slice(start, end).replace(/\n$/, "");
    const marks = this.passages.filter((one) => one.file === this.file.id && one.start < end && one.end > start);
    let at = start;
    const lines = text.split("\n").map((line, index) => {
      const number = section.numbers ? section.numbers[first + index] : first + index + 1;
      const row = make("div", { className: "line", attributes: { "data-number": String(number ?? "") } }, ...this.#pieces(line, at, marks));
      at += line.length + 1;
      return row;
    });
    root.style.minHeight = "";
    root.replaceChildren(...lines);
    block.isFilled = true;
  }

  // The pieces of a line, those of passages marked; where passages overlap, the first one wins.
  #pieces(line, at, marks) {
    const pieces = [];
    let done = 0;
    for (const one of [...marks].sort((a, b) => a.start - b.start)) {
      const from = Math.max(done, one.start - at);
      const to = Math.min(line.length, one.end - at);
      if (from >= to) continue;
      if (from > done) pieces.push(line.slice(done, from));
      const mark = make("mark", { className: one.isQuote ? "passage quoted" : "passage", text: line.slice(from, to) });
      mark.passage = one;
      if (one === this.current) mark.classList.add("is-current");
      pieces.push(mark);
      done = to;
    }
    return [...pieces, line.slice(done)];
  }

  // --------------------------------------------------------------------------------------------------- going places

  #step(by) {
    const { passages } = this;
    const at = passages.indexOf(this.current);
    const next = passages[(at + by + passages.length) % passages.length];
    this.current = next;
    if (next.file === this.file?.id) this.#goTo(next);
    else this.show(next.file);
  }

  #goTo(passage) {
    this.#countPassages();
    for (const mark of this.body.querySelectorAll("mark.is-current")) mark.classList.remove("is-current");
    if (!passage) return;
    const block = this.blocks.find((one) => one.start <= passage.start && passage.start < one.end);
    if (!block) return;
    if (!block.isFilled) this.#fill(block);
    const marks = [...this.body.querySelectorAll("mark")].filter((mark) => mark.passage === passage);
    for (const mark of marks) mark.classList.add("is-current");
    const target = marks[0] ?? block.root;
    target.scrollIntoView({ block: "center", behavior: "instant" });
    requestAnimationFrame(() => target.scrollIntoView({ block: "center", behavior: "instant" })); // blocks above have been filled
    if (marks[0]) {
      marks[0].tabIndex = -1;
      marks[0].focus({ preventScroll: true });
      announce(`${this.#placeOf(passage)}: ${this.file.text.slice(passage.start, passage.end).trim().slice(0, 200)}`);
    }
  }

  #placeOf(passage) {
    return placeOf(this.file, passage);
  }

  #clicked(target) {
    const { passage } = target.closest?.("mark") ?? {};
    if (!passage) return;
    this.current = passage;
    for (const mark of this.body.querySelectorAll("mark")) mark.classList.toggle("is-current", mark.passage === passage);
    this.#countPassages();
    this.onPassage(passage);
  }
}

// Where a passage is, for people: "contract.pdf, page 3, lines 12–14".
export function placeOf(file, { start, end }) {
  const one = file.documents?.find((document) => document.start <= start && start < document.end);
  const section = one?.sections.find((part) => start < part.end && end > part.start);
  if (!section) return file.name;
  const before = file.text.slice(section.start, Math.max(section.start, start));
  const inside = file.text.slice(Math.max(section.start, start), Math.min(section.end, end)).trimEnd();
  const first = before.split("\n").length - 1;
  const last = first + inside.split("\n").length - 1;
  const number = (index) => section.numbers?.[index] ?? index + 1;
  const lines = first === last ? `${section.unit} ${formatCount(number(first))}` : `${section.unit}s ${formatCount(number(first))}–${formatCount(number(last))}`;
  return [one.name, section.label, lines].filter(Boolean).join(", ");
}

