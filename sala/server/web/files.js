// Files as attachments of a message: the server reads them, whatever their format, and counts their tokens.

import { readDocument } from "./api.js";
import { formatCount, formatSize } from "./format.js";
import { newId } from "./store.js";

export const MAX_BYTES = 64_000_000; // by default the server accepts bodies of up to 64 MiB
const CHARACTERS_PER_TOKEN = 4;
const COUNTED = { page: "page", slide: "slide", sheet: "sheet", chapter: "chapter", message: "message" };

export class Refused extends Error {}

// An attachment that is still to be read.
export function beginAttachment(name, blob) {
  if (blob.size > MAX_BYTES) throw new Refused(`“${name}” has ${formatSize(blob.size)}; at most ${formatSize(MAX_BYTES)} can be sent.`);
  if (blob.size === 0) throw new Refused(`“${name}” is empty.`);
  return { id: newId(), name, size: blob.size, tokens: Math.ceil(blob.size / CHARACTERS_PER_TOKEN), isExact: false, isReading: true, controller: new AbortController() };
}

export async function readAttachment(attachment, blob, options) {
  const answer = await readDocument(blob, attachment.name, options, attachment.controller.signal);
  Object.assign(attachment, takeDocument(answer), { isReading: false });
}

// An attachment from a document that the server keeps.
export function attachmentOf(answer) {
  return { id: newId(), name: answer.filename, isReading: false, ...takeDocument(answer) };
}

// What the page needs of the server's answer. Places become UTF-16 units of the whole text.
function takeDocument(answer) {
  let text = "";
  const documents = answer.documents.map(({ name, tokens, notes, text: own, sections }) => {
    const start = text.length;
    const toUnits = unitsOf(own);
    text += own;
    const placed = sections.map((one) => ({ label: one.label, unit: one.unit, numbers: one.numbers, tokens: one.tokens, start: start + toUnits(one.start), end: start + toUnits(one.end) }));
    return { name, tokens, notes, start, end: text.length, sections: placed };
  });
  return { text, documents, leftOut: answer.left_out, tokens: answer.tokens, size: answer.bytes, isExact: true, parts: describeParts(text, documents), keptId: answer.id ?? null };
}

// Returns a function from code points, in which the server counts, to the units in which strings count here.
export function unitsOf(text) {
  if (!/[\ud800-\udbff]/.test(text)) return (place) => place;
  const wide = []; // code points that take two units
  let at = 0;
  for (const char of text) {
    if (char.length === 2) wide.push(at);
    at += 1;
  }
  return (place) => {
    let low = 0;
    let high = wide.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (wide[middle] < place) low = middle + 1;
      else high = middle;
    }
    return place + low;
  };
}

function describeParts(text, documents) {
  if (documents.length > 1) return `${formatCount(documents.length)} documents`;
  const { sections } = documents[0];
  const word = COUNTED[/^[a-z]+/.exec(sections[0]?.label ?? "")?.[0]];
  if (word) return plural(Math.max(sections.length, Number(/\d+/.exec(sections.at(-1).label)?.[0] ?? 0)), word);
  const lines = sections.reduce((sum, { start, end }) => sum + text.slice(start, end).split("\n").length - 1, 0);
  return plural(lines, "line");
}

const plural = (count, word) => `${formatCount(count)} ${word}${count === 1 ? "" : "s"}`;

// A CJK character is about one token, any other a quarter; a sample gives their proportion.
export function estimateTokens(text) {
  const sample = text.length > 20_000 ? text.slice(0, 10_000) + text.slice(-10_000) : text;
  const wide = sample.match(/[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]/g)?.length ?? 0;
  const share = sample.length === 0 ? 0 : wide / sample.length;
  return Math.ceil(text.length * (share * 0.7 + (1 - share) / CHARACTERS_PER_TOKEN));
}

export function describe(file) {
  if (file.isReading) return `${formatSize(file.size)} · reading…`;
  return `${file.parts ?? formatSize(file.size)} · ${file.isExact ? "" : "~"}${formatCount(file.tokens)} tokens`;
}

// What a message remembers of its files; their text is stored apart.
export const remember = ({ id, name, size, tokens, isExact, parts, keptId }) => ({ id, name, size, tokens, isExact, parts, keptId });

const NATURAL = new Intl.Collator("en", { numeric: true });
export const inOrder = (files) => [...files].sort((one, other) => NATURAL.compare(one.name, other.name));

// Documents first, the question last: the long part stays a cached prefix from turn to turn. Texts of documents are
// packed by the server, as `sala ask` does it; what older versions of this page stored is not.
export function composeContent(text, files) {
  let content = "";
  const places = [];
  for (const file of files) {
    const whole = file.documents ? file.text : `[File: ${file.name}]\n${file.text}\n[End of ${file.name}]\n\n`;
    places.push({ id: file.id, start: content.length, end: content.length + whole.length });
    content += whole;
  }
  if (text === "") return { content: content.trimEnd(), places };
  return { content: content + text, places, parts: content.endsWith("\n") ? partsOf(content, text) : null };
}

// Documents and question as parts, which the server joins with a line end. The mark keeps the documents in its cache.
const partsOf = (documents, question) => [
  { type: "text", text: documents.slice(0, -1), cache_control: { type: "ephemeral" } },
  { type: "text", text: question },
];
