// Calls to the server's API, with failures in plain words.

const BASE = new URL("../", import.meta.url); // a proxy may serve the page below a path

let readKey = () => "";
export function useKey(read) {
  readKey = read;
}

// `kind` decides which remedy is offered: key, busy, offline, lost, request, server.
export class Failure extends Error {
  constructor(kind, title, detail = "", status = 0, param = null) {
    super(title);
    this.kind = kind;
    this.title = title;
    this.detail = detail;
    this.status = status;
    this.param = param;
  }
}

export async function listModels() {
  const response = await call("v1/models");
  const answer = await readJson(response);
  const models = (answer.data ?? []).filter((model) => (model.root ?? model.id) === model.id); // not their aliases
  return models.map((model) => ({ id: model.id, isLoaded: model.loaded === true, context: model.context_length ?? null, trained: model.trained_length ?? null }));
}

export async function listTools() {
  return (await readJson(await call("v1/mcp/tools"))).data ?? [];
}

export async function callTool(name, given, signal) {
  return readJson(await call("v1/mcp/call", { body: { name, arguments: given }, signal }));
}

// Reads a file on the server: text, pages, lines and tokens of the documents in it.
export async function readDocument(blob, name, { keep = false, model = "" } = {}, signal = undefined) {
  const form = new FormData();
  form.append("keep", String(keep));
  if (model) form.append("model", model);
  form.append("file", blob, name);
  return readJson(await call("v1/documents", { form, signal }));
}

export const listDocuments = async () => (await readJson(await call("v1/documents"))).data ?? [];
export const getDocument = async (id) => readJson(await call(`v1/documents/${encodeURIComponent(id)}`));
export const deleteDocument = async (id) => readJson(await call(`v1/documents/${encodeURIComponent(id)}`, { method: "DELETE" }));

// How many tokens of each of these kept documents the cache of the server holds, in a prompt that begins with them.
export async function documentStates(ids, model, system) {
  const body = { documents: ids, system: system.trim() ? system : "", ...(model ? { model } : {}) };
  return (await readJson(await call("v1/documents/state", { body }))).data;
}

// Yields the chunks of an answer. A server or engine that gathers no sources is asked again without them.
export async function* streamAnswer(body, signal) {
  try {
    yield* streamChat(body, signal);
  } catch (error) {
    if (!body.return_sources || error.param !== "return_sources") throw error;
    const { return_sources: refused, ...rest } = body;
    yield* streamChat(rest, signal);
  }
}

// Yields the chunks of an answer. Any end other than the server's [DONE] is a Failure.
async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", { body, signal });
  let isWhole = false;
  try {
    for await (const data of readEvents(response.body)) {
      isWhole ||= data === "[DONE]";
      if (isWhole) continue; // let the server close the connection: closing it first would look like a cancelled answer
      const chunk = JSON.parse(data);
      if (chunk.error) throw explain(Number(chunk.error.status) || 500, chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof Failure) throw error;
  }
  if (!isWhole) throw lostConnection();
}

const lostConnection = () => new Failure("lost", "The connection was lost.", "The text that had arrived was kept. Is the server still running?");

async function call(path, { body, form, method = body || form ? "POST" : "GET", signal } = {}) {
  const headers = {};
  const key = readKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), { method, headers, signal, body: form ?? (body && JSON.stringify(body)), cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("offline", "The server does not answer.", "Is it running? It has the same address as this page.");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

async function readJson(response) {
  try {
    return await response.json();
  } catch {
    throw new Failure("server", "The server’s answer could not be read.");
  }
}

async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON, perhaps from a proxy: use the status only
  }
  return explain(response.status, error, response.headers.get("Retry-After"));
}

const TITLES = {
  401: ["key", "The server requires an API key."],
  403: ["request", "The server does not permit this."],
  404: ["request", "The server does not have this."],
  413: ["request", "This is more than the server accepts at once."],
  429: ["busy", "The server is busy."],
  503: ["busy", "The server is not ready."],
};

function explain(status, error, retryAfter = null) {
  const code = typeof error === "object" ? error.code : null;
  const message = typeof error === "object" ? error.message : error;
  let [kind, title] = TITLES[status] ?? (status < 500 ? ["request", "The server refused the request."] : ["server", "Something went wrong on the server."]);
  if (code === "model_not_found") title = "The server does not have this model.";
  if (code === "context_length_exceeded") title = "This is longer than the model’s context.";
  const wait = retryAfter && /^\d+$/.test(retryAfter) ? ` Try again in ${retryAfter} s.` : "";
  return new Failure(kind, title, `${String(message ?? "")}${wait}`.trim(), status, error?.param ?? null);
}

// Yields the data of server-sent events. Comments are pings and are skipped.
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  let isOver = false;
  try {
    while (true) {
      const { value, done } = await reader.read();
      isOver = done;
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    if (!isOver) reader.cancel().catch(() => {}); // tells the server to stop
  }
}
