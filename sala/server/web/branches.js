// A conversation as a tree: every message names the one before it, and `chosen` the continuation that is shown.
// `messages` is the path that is shown. Nothing is removed when a message is edited or an answer regenerated.

import { newId } from "./store.js";

const FIRST = "first"; // key of the continuations of nothing

// Completes a conversation that was stored, perhaps as the mere list that older versions of this page kept.
export function adopt(chat) {
  let last = null;
  for (const message of chat.nodes) {
    if (message.id === undefined) Object.assign(message, { id: newId(), parent: last?.id ?? null });
    last = message;
  }
  chat.chosen ??= {};
  chat.messages = pathOf(chat);
  return chat;
}

function pathOf(chat) {
  const children = new Map();
  for (const message of chat.nodes) {
    const key = message.parent ?? FIRST;
    children.set(key, [...(children.get(key) ?? []), message]);
  }
  const path = [];
  for (let key = FIRST; children.has(key); key = path.at(-1).id) {
    const next = children.get(key);
    path.push(next.find((message) => message.id === chat.chosen[key]) ?? next.at(-1));
  }
  return path;
}

// Adds a message after another, as the continuation that is shown.
export function add(chat, message, parent = null) {
  Object.assign(message, { id: message.id ?? newId(), parent: parent?.id ?? null });
  chat.nodes.push(message);
  chat.chosen[message.parent ?? FIRST] = message.id;
  chat.messages = pathOf(chat);
}

export const versionsOf = (chat, message) => chat.nodes.filter((other) => other.parent === message.parent);

// Shows another version of a message, and what followed it.
export function turn(chat, message, by) {
  const versions = versionsOf(chat, message);
  const next = versions[versions.indexOf(message) + by];
  if (!next) return null;
  chat.chosen[next.parent ?? FIRST] = next.id;
  chat.messages = pathOf(chat);
  return next;
}

// The path up to and with a message, whether it is shown or not.
export function pathTo(chat, message) {
  const byId = new Map(chat.nodes.map((one) => [one.id, one]));
  const path = [];
  for (let one = message; one; one = byId.get(one.parent)) path.unshift(one);
  return path;
}
