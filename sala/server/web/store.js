// Conversations, stored in this browser only. Three tables, so that listing is cheap and a long file is written once:
// chats (title, times, settings, words to search), bodies (messages), files (their text).

import { adopt } from "./branches.js";

const NAME = "sala";
const TABLES = ["chats", "bodies", "files"];

export async function openStore() {
  try {
    const store = new Store(await openDatabase());
    await store.list();
    return store;
  } catch {
    return new Store(null); // storage is disabled: keep everything in memory until the tab is closed
  }
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      const database = request.result;
      for (const table of TABLES) database.createObjectStore(table, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

class Store {
  constructor(database) {
    this.database = database;
    this.memory = Object.fromEntries(TABLES.map((table) => [table, new Map()]));
    this.isKept = database !== null;
  }

  async list() {
    const chats = await this.#all("chats");
    return chats.sort((one, other) => other.updated - one.updated);
  }

  async load(id) {
    const [chat, body] = await Promise.all([this.#get("chats", id), this.#get("bodies", id)]);
    return chat && body ? adopt({ ...chat, nodes: body.nodes ?? body.messages, chosen: body.chosen }) : null;
  }

  async save(chat) {
    const { messages, nodes, chosen, ...head } = chat;
    const words = messages.map((message) => message.text).join(" ").slice(0, 20_000).toLowerCase();
    const body = structuredClone({ id: chat.id, nodes, chosen });
    await this.#write((put) => {
      put("chats", { ...head, words });
      put("bodies", body);
    });
  }

  async addFile(file) {
    await this.#write((put) => put("files", file));
  }

  // Stores the texts of attachments, with what is known of them.
  async addFiles(attachments) {
    for (const { id, name, text, documents, leftOut } of attachments) await this.addFile({ id, name, text, documents, leftOut });
  }

  async loadFile(id) {
    return (await this.#get("files", id)) ?? null;
  }

  // Removes a conversation and returns all of it, so that the removal can be undone.
  async take(id) {
    const [head, body] = await Promise.all([this.#get("chats", id), this.#get("bodies", id)]);
    const ids = filesOf(body?.nodes ?? body?.messages ?? []);
    const files = (await Promise.all(ids.map((file) => this.#get("files", file)))).filter(Boolean);
    await this.#write((_, drop) => {
      drop("chats", id);
      drop("bodies", id);
      ids.forEach((file) => drop("files", file));
    });
    return { head, body, files };
  }

  async putBack({ head, body, files }) {
    await this.#write((put) => {
      if (head) put("chats", head);
      if (body) put("bodies", body);
      files.forEach((file) => put("files", file));
    });
  }

  #get(table, key) {
    if (!this.database) return Promise.resolve(structuredClone(this.memory[table].get(key)));
    return done(this.database.transaction(table).objectStore(table).get(key));
  }

  #all(table) {
    if (!this.database) return Promise.resolve([...this.memory[table].values()]);
    return done(this.database.transaction(table).objectStore(table).getAll());
  }

  #write(change) {
    if (!this.database) {
      change((table, row) => this.memory[table].set(row.id, row), (table, key) => this.memory[table].delete(key));
      return Promise.resolve();
    }
    const transaction = this.database.transaction(TABLES, "readwrite");
    change((table, row) => transaction.objectStore(table).put(row), (table, key) => transaction.objectStore(table).delete(key));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export const filesOf = (messages) => messages.flatMap((message) => (message.files ?? []).map((file) => file.id));

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(36).padStart(2, "0")).join("");
}
