// Text files as attachments of a message.

import { countTokens } from "./api.js";
import { formatCompact, formatSize } from "./format.js";
import { newId } from "./store.js";

export const MAX_BYTES = 60_000_000; // by default the server accepts bodies of up to 64 MiB
const MAX_COUNTED = 24_000_000; // longer texts are estimated, because counting would take too long
const CHARACTERS_PER_TOKEN = 4;

export class Refused extends Error {}

export async function readTextFile(file) {
  if (file.size > MAX_BYTES) throw new Refused(`“${file.name}” has ${formatSize(file.size)}; at most ${formatSize(MAX_BYTES)} can be sent.`);
  if (file.size === 0) throw new Refused(`“${file.name}” is empty.`);
  return makeAttachment(file.name, decode(file.name, new Uint8Array(await file.arrayBuffer())), file.size);
}

export function makeAttachment(name, text, size = new Blob([text]).size) {
  return { id: newId(), name, size, text, tokens: estimateTokens(text), isExact: false };
}

function decode(name, bytes) {
  const isWide = (bytes[0] === 0xff && bytes[1] === 0xfe) || (bytes[0] === 0xfe && bytes[1] === 0xff);
  if (isWide) throw new Refused(`“${name}” is UTF-16 text. Save it as UTF-8 and try again.`);
  if (bytes.subarray(0, 65_536).includes(0)) throw new Refused(`“${name}” does not look like text. Only text files can be read here.`);
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Refused(`“${name}” is not UTF-8 text. Save it as UTF-8 and try again.`);
  }
}

// A CJK character is about one token, any other a quarter; a sample gives their proportion.
export function estimateTokens(text) {
  const sample = text.length > 20_000 ? text.slice(0, 10_000) + text.slice(-10_000) : text;
  const wide = sample.match(/[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]/g)?.length ?? 0;
  const share = sample.length === 0 ? 0 : wide / sample.length;
  return Math.ceil(text.length * (share * 0.7 + (1 - share) / CHARACTERS_PER_TOKEN));
}

// Replaces the estimate by the server's count, if there is one.
export async function countAttachment(attachment, model) {
  if (attachment.text.length > MAX_COUNTED) return;
  try {
    const tokens = await countTokens(attachment.text, model);
    if (tokens !== null) Object.assign(attachment, { tokens, isExact: true });
  } catch {
    // keep the estimate
  }
}

export const describe = (file) => `${formatSize(file.size)} · ${file.isExact ? "" : "~"}${formatCompact(file.tokens)} tokens`;

// Files first, the question last: the long part stays a cached prefix from turn to turn.
export function composeContent(text, files) {
  const parts = files.map((file) => `[File: ${file.name}]\n${file.text}\n[End of ${file.name}]`);
  return [...parts, text].filter((part) => part !== "").join("\n\n");
}
