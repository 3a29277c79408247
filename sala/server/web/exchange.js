// Conversations as files: JSON holds all of them with every version and document, Markdown what is shown, for people.
// An imported file may come from anywhere: of each part only what is expected is taken, and ids are new.

import { adopt } from "./branches.js";
import { formatCount } from "./format.js";
import { newId } from "./store.js";

const FORMAT = "sala-conversations";
const MAX_BYTES = 500_000_000;
const MAX_NODES = 20_000;
const MAX_TEXT = 64_000_000;
const HEADINGS = { system: "System", user: "User", assistant: "Assistant" };
const HEADING = /^## (System|User|Assistant)$/;

export class NotReadable extends Error {}

// --------------------------------------------------------------------------------------------------------- export

export async function toJson(chats, store) {
  const conversations = [];
  for (const { title, created, updated, settings, nodes, chosen } of chats) {
    const ids = new Set(nodes.flatMap((message) => (message.files ?? []).map((file) => file.id)));
    const files = (await Promise.all([...ids].map((id) => store.loadFile(id)))).filter(Boolean);
    conversations.push({ title, created, updated, settings: settings ?? null, nodes, chosen, files });
  }
  return JSON.stringify({ format: FORMAT, version: 1, conversations });
}

export function toMarkdown(chat, system) {
  const parts = [`# ${chat.title}`];
  if (system.trim()) parts.push(section("system", system));
  for (const message of chat.messages) {
    const files = (message.files ?? []).map((file) => `> Document: ${file.name} (${formatCount(file.tokens)} tokens)`);
    parts.push(section(message.role, [files.join("\n"), message.text].filter(Boolean).join("\n\n")));
  }
  return `${parts.join("\n\n")}\n`;
}

// A line of the text that looks like one of our headings gets a backslash.
const section = (role, text) => `## ${HEADINGS[role]}\n\n${text.replace(/^(\\*## (?:System|User|Assistant))$/gm, "\\$1")}`;

export function offer(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const fileName = (title, suffix) => `${title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation"}.${suffix}`;

// --------------------------------------------------------------------------------------------------------- import

// Returns conversations with their files: [{chat, files}].
export async function readConversations(file) {
  if (file.size > MAX_BYTES) throw new NotReadable(`“${file.name}” is too large to be imported.`);
  const text = await file.text();
  const start = text.trimStart()[0];
  if (start !== "{" && start !== "[") return [fromMarkdown(text, file.name)];
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new NotReadable(`“${file.name}” is damaged: it is not valid JSON.`);
  }
  const found = data?.format === FORMAT && Array.isArray(data.conversations) ? data.conversations.map(takeConversation) : [fromMessages(data)];
  const good = found.filter(Boolean);
  if (good.length === 0) throw new NotReadable(`“${file.name}” holds no conversation that this page understands.`);
  return good;
}

function fromMarkdown(text, name) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const title = /^# (.+)$/.exec(lines[0])?.[1] ?? name;
  const found = [];
  for (const line of lines) {
    const heading = HEADING.exec(line)?.[1];
    if (heading) found.push({ role: heading.toLowerCase(), lines: [] });
    else found.at(-1)?.lines.push(line.replace(/^\\(\\*## (?:System|User|Assistant))$/, "$1"));
  }
  if (found.length === 0) throw new NotReadable(`“${name}” holds no conversation: there is no line “## User”.`);
  return assemble(title, found.map(({ role, lines: own }) => ({ role, text: own.join("\n").trim() })));
}

// A list of messages in the form of OpenAI's API.
function fromMessages(data) {
  const list = Array.isArray(data) ? data : data?.messages;
  if (!Array.isArray(list) || list.length > MAX_NODES) return null;
  const messages = list.map((one) => ({ role: one?.role, text: contentOf(one?.content), reasoning: asText(one?.reasoning_content) }));
  return assemble(asText(data?.title) || "Imported conversation", messages);
}

const contentOf = (content) => (Array.isArray(content) ? content.map((part) => asText(part?.text)).join("\n") : asText(content));

function assemble(title, messages) {
  const system = messages.filter(({ role }) => role === "system").map(({ text }) => text).join("\n\n");
  const nodes = messages.filter(({ role }) => role === "user" || role === "assistant").map((one) => takeMessage({ ...one, state: "done" }, new Map()));
  if (nodes.length === 0) return null;
  return { chat: adopt({ ...newHead(title), settings: system ? { system } : null, nodes }), files: [] };
}

const newHead = (title) => ({ id: newId(), title: title.slice(0, 120), created: Date.now(), updated: Date.now(), isRenamed: true });

function takeConversation(raw) {
  if (!Array.isArray(raw?.nodes) || raw.nodes.length > MAX_NODES) return null;
  const fileIds = new Map(); // by their ids in the file that is imported
  const files = (Array.isArray(raw.files) ? raw.files : []).map((one) => takeFile(one, fileIds)).filter(Boolean);
  const ids = new Map();
  const nodes = [];
  for (const one of raw.nodes) {
    const message = takeMessage(one, fileIds);
    if (!message || typeof one.id !== "string" || ids.has(one.id) || (one.parent !== null && !ids.has(one.parent))) continue;
    ids.set(one.id, Object.assign(message, { id: newId(), parent: ids.get(one.parent)?.id ?? null }));
    nodes.push(message);
  }
  if (nodes.length === 0) return null;
  const chosen = {};
  for (const [from, to] of Object.entries(raw.chosen ?? {})) {
    if (ids.has(to) && (from === "first" || ids.has(from))) chosen[ids.get(from)?.id ?? "first"] = ids.get(to).id;
  }
  const times = { created: asNumber(raw.created) ?? Date.now(), updated: asNumber(raw.updated) ?? Date.now() };
  return { chat: adopt({ ...newHead(asText(raw.title) || "Imported conversation"), ...times, settings: asPlain(raw.settings), nodes, chosen }), files };
}

function takeFile(raw, ids) {
  if (typeof raw?.id !== "string" || typeof raw.text !== "string" || raw.text.length > MAX_TEXT || ids.has(raw.id)) return null;
  const id = newId();
  ids.set(raw.id, id);
  const within = (value) => Number.isInteger(value) && value >= 0 && value <= raw.text.length;
  const places = (list) => (Array.isArray(list) ? list.filter((one) => within(one?.start) && within(one?.end) && one.start <= one.end) : []);
  const documents = places(raw.documents).map(({ name, tokens, notes, start, end, sections }) => ({
    name: asText(name), tokens: asNumber(tokens) ?? 0, notes: asList(notes).map(asText), start, end,
    sections: places(sections).map((one) => ({ label: asText(one.label), unit: asText(one.unit), start: one.start, end: one.end, tokens: asNumber(one.tokens) ?? 0, numbers: Array.isArray(one.numbers) ? one.numbers.map((number) => asNumber(number) ?? 0) : null })),
  }));
  const leftOut = asList(raw.leftOut).map((one) => ({ name: asText(one?.name), why: asText(one?.why) }));
  return { id, name: asText(raw.name), text: raw.text, ...(documents.length ? { documents, leftOut } : {}) };
}

function takeMessage(raw, fileIds) {
  if ((raw?.role !== "user" && raw?.role !== "assistant") || typeof raw.text !== "string") return null;
  const message = { role: raw.role, text: raw.text, created: asNumber(raw.created) ?? Date.now() };
  if (raw.role === "user") {
    const known = asList(raw.files).filter((file) => fileIds.has(file?.id));
    const files = known.map((file) => ({ id: fileIds.get(file.id), name: asText(file.name), size: asNumber(file.size) ?? 0, tokens: asNumber(file.tokens) ?? 0, isExact: file.isExact === true, ...(file.parts ? { parts: asText(file.parts) } : {}) }));
    return { ...message, files };
  }
  const more = { reasoning: asText(raw.reasoning), state: ["done", "stopped", "failed"].includes(raw.state) ? raw.state : "stopped", model: asText(raw.model) };
  for (const name of ["thoughtSeconds"]) if (asNumber(raw[name]) !== null) more[name] = raw[name];
  for (const name of ["usage", "timings"]) if (asPlain(raw[name])) more[name] = numbersOf(raw[name]);
  if (typeof raw.finish === "string") more.finish = raw.finish;
  if (asPlain(raw.error)) more.error = { kind: asText(raw.error.kind), title: asText(raw.error.title), detail: asText(raw.error.detail) };
  const calls = asList(raw.calls).filter(asPlain).map((call) => ({ id: asText(call?.id), name: asText(call?.name), arguments: asText(call?.arguments), state: asText(call?.state), result: asText(call?.result) }));
  if (calls.length) more.calls = calls;
  if (asPlain(raw.sources)) more.sources = takeSources(raw.sources, fileIds);
  return { ...message, ...more };
}

function takeSources(raw, fileIds) {
  const place = (one) => ({ text: asText(one?.text), start: asNumber(one?.start) ?? 0, end: asNumber(one?.end) ?? 0, place: asText(one?.place), file: fileIds.get(one?.file) ?? null });
  const passages = asList(raw.passages).map((one, at) => ({ ...place(one), number: at + 1, weight: asNumber(one?.weight) ?? 0 }));
  const quotes = asList(raw.quotes).map((one) => ({ ...place(one), isQuote: true, isFound: one?.isFound === true }));
  return { passages, quotes };
}

const asText = (value) => (typeof value === "string" ? value : "");
const asNumber = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const asList = (value) => (Array.isArray(value) ? value : []);
const asPlain = (value) => (typeof value === "object" && value !== null && !Array.isArray(value) ? value : null);
const numbersOf = (value) => Object.fromEntries(Object.entries(value).filter(([, one]) => asNumber(one) !== null));
