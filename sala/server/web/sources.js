// Where an answer comes from: the passages that the model looked at while it wrote, and its quotes, checked.

import { make } from "./dom.js";
import { unitsOf } from "./files.js";

const SHOWN = 4;
const SNIPPET = 180;

// The server's places are characters of the messages that were sent; what is kept are places in our files. `layout` has
// for every message its text and the files in it: {content, places: [{id, start, end}]}.
export function takeSources({ passages = [], quotes = [] }, layout) {
  const units = new Map();
  const resolve = ({ text = "", message, start, end, place, file: name }) => {
    const sent = layout[message];
    const named = { text, file: null, start: 0, end: 0, place: [name, place].filter(Boolean).join(", ") };
    if (!sent || !Number.isInteger(start) || !Number.isInteger(end)) return named;
    if (!units.has(message)) units.set(message, unitsOf(sent.content));
    const [from, to] = [units.get(message)(start), units.get(message)(end)];
    const holder = sent.places.find((one) => one.start <= from && from < one.end);
    return holder ? { ...named, file: holder.id, start: from - holder.start, end: Math.min(to, holder.end) - holder.start } : named;
  };
  return {
    passages: passages.map((one, at) => ({ ...resolve(one), weight: one.weight ?? 0, number: at + 1 })),
    quotes: quotes.map((one) => ({ ...resolve(one), isQuote: true, isFound: one.found === true })),
  };
}

// The list of passages below an answer. `placeOf` returns where a passage is, or null for one in no document.
export class SourcesView {
  constructor({ onOpen }) {
    this.onOpen = onOpen;
    this.root = make("section", { className: "sources", attributes: { "aria-label": "Sources", hidden: "" } });
    this.isWhole = false;
  }

  async show(message, placeOf) {
    const passages = message.sources?.passages ?? [];
    const lost = (message.sources?.quotes ?? []).filter((quote) => !quote.isFound).length;
    this.root.hidden = passages.length === 0 && lost === 0;
    if (this.root.hidden) return;
    const most = Math.max(...passages.map((one) => one.weight), 1e-9);
    const places = await Promise.all(passages.map((one) => placeOf(one)));
    const rows = passages.map((one, at) => this.#row(message, one, places[at], one.weight / most)).slice(0, this.isWhole ? undefined : SHOWN);
    const parts = [];
    if (passages.length) parts.push(make("h3", { text: "Sources" }), make("ol", {}, ...rows));
    if (passages.length > rows.length) parts.push(this.#more(message, placeOf, passages.length));
    if (lost) parts.push(make("p", { className: "sources-warning", icon: "alert", text: lost === 1 ? "One quote in this answer is not in the documents." : `${lost} quotes in this answer are not in the documents.` }));
    this.root.replaceChildren(...parts);
  }

  #row(message, passage, place, share) {
    const text = passage.text.replace(/\s+/g, " ").trim();
    const number = make("span", { className: "source-number", text: String(passage.number) });
    const words = make("span", { className: "source-words" }, make("span", { className: "source-place", text: place ?? (passage.place || "In the conversation") }), make("span", { className: "source-text", text: text.length > SNIPPET ? `${text.slice(0, SNIPPET)}…` : text }));
    const fill = make("span");
    fill.style.width = `${Math.max(4, share * 100)}%`;
    const meter = make("span", { className: "source-weight", attributes: { title: `Weight ${passage.weight.toFixed(2)}` } }, fill);
    const button = make("button", { className: "source", attributes: { type: "button", "data-source": String(passage.number) } }, number, words, meter);
    if (passage.file === null) button.disabled = true;
    else button.addEventListener("click", () => this.onOpen(message, passage));
    return make("li", {}, button);
  }

  #more(message, placeOf, count) {
    const more = make("button", { className: "link-button", text: `Show all ${count}`, attributes: { type: "button" } });
    more.addEventListener("click", () => {
      this.isWhole = true;
      this.show(message, placeOf);
    });
    return more;
  }

  // Marks the entry of the passage that is shown beside the conversation.
  mark(passage) {
    for (const button of this.root.querySelectorAll("[data-source]")) {
      if (passage && !passage.isQuote && button.dataset.source === String(passage.number)) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  // Goes back from a passage to its entry here.
  focus(passage) {
    const button = this.root.querySelector(`[data-source="${passage.number}"]`) ?? this.root.querySelector("button");
    button?.scrollIntoView({ block: "center" });
    button?.focus();
  }
}

// Marks the quotes in an answer that has been shown. A quote may span several nodes: each of them is marked.
export function markQuotes(root, quotes, onOpen) {
  for (const quote of quotes) {
    const wanted = quote.text.replace(/\s+/g, " ").trim();
    if (wanted.length < 4) continue;
    const range = findText(root, wanted);
    for (const node of range) {
      const mark = make("span", { className: quote.isFound ? "quote" : "quote is-lost", attributes: { title: quote.isFound ? "Show this quote in the document" : "This quote is not in the documents" } });
      node.replaceWith(mark);
      mark.append(node);
      mark.quote = quote;
      if (!quote.isFound || quote.file === null) continue;
      if (node === range[0]) for (const [name, value] of Object.entries({ role: "link", tabindex: "0" })) mark.setAttribute(name, value);
      mark.addEventListener("click", () => onOpen(quote));
      mark.addEventListener("keydown", (event) => event.key === "Enter" && onOpen(quote));
    }
  }
}

// The text nodes that hold a text, cut where it begins and ends; white space counts as one space.
function findText(root, wanted) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, (node) => (node.parentElement.closest(".katex, .quote, button, figcaption") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT));
  let flat = "";
  const origins = []; // of every character of `flat`: [node, offset]
  while (walker.nextNode()) {
    const { data } = walker.currentNode;
    for (let at = 0; at < data.length; at += 1) {
      const isSpace = /\s/.test(data[at]);
      if (isSpace && (flat === "" || flat.endsWith(" "))) continue;
      flat += isSpace ? " " : data[at];
      origins.push([walker.currentNode, at]);
    }
  }
  const found = flat.indexOf(wanted);
  if (found < 0) return [];
  const spans = new Map();
  for (const [node, at] of origins.slice(found, found + wanted.length)) spans.set(node, [spans.get(node)?.[0] ?? at, at + 1]);
  return [...spans].map(([node, [start, end]]) => {
    if (end < node.data.length) node.splitText(end);
    return start > 0 ? node.splitText(start) : node;
  });
}
