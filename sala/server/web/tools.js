// Tools of MCP servers: the server runs them; this page asks before each call and shows what came of it.

import { callTool, listTools } from "./api.js";
import { make } from "./dom.js";

const CANCELLED = "The user cancelled this call.";
const REFUSED = "The user did not permit this call.";
const LABELS = { asked: "Call this tool?", running: "Running…", done: "Done", failed: "Failed", refused: "Not permitted", cancelled: "Cancelled" };

export class Toolbox {
  constructor() {
    this.tools = [];
    this.permitted = new Set(); // until the page is left
    this.decisions = new Map(); // what waits for an answer of the user, by call
  }

  async load() {
    try {
      this.tools = await listTools();
    } catch {
      this.tools = []; // no right to use them, or a server that has none
    }
  }

  get definitions() {
    return this.tools.map(({ type, function: one }) => ({ type, function: one }));
  }

  serverOf(name) {
    return this.tools.find((tool) => tool.function.name === name)?.server ?? null;
  }

  // Runs the calls of an answer one after another; false if the user has stopped.
  async run(message, signal, show) {
    for (const call of message.calls) {
      await this.#run(call, signal, show);
      if (signal.aborted) break;
    }
    closeCalls(message);
    show();
    return !signal.aborted;
  }

  decide(call, word) {
    this.decisions.get(call.id)?.(word);
  }

  async #run(call, signal, show) {
    const change = (state, result) => {
      Object.assign(call, { state, result });
      show();
    };
    let given;
    try {
      given = JSON.parse(call.arguments || "{}");
    } catch {
      return change("failed", "Error: the arguments are not valid JSON.");
    }
    if (this.serverOf(call.name) !== null && !this.permitted.has(call.name)) {
      change("asked");
      const word = await this.#ask(call, signal);
      if (word === "always") this.permitted.add(call.name);
      if (word === "stop") return change("cancelled", CANCELLED);
      if (word === "no") return change("refused", REFUSED);
    }
    change("running");
    try {
      const answer = await callTool(call.name, given, signal);
      return change(answer.is_error ? "failed" : "done", answer.content);
    } catch (error) {
      if (signal.aborted) return change("cancelled", CANCELLED);
      return change("failed", `Error: ${error.title ?? error.message} ${error.detail ?? ""}`.trim());
    }
  }

  #ask(call, signal) {
    return new Promise((resolve) => {
      const settle = (word) => {
        this.decisions.delete(call.id);
        signal.removeEventListener("abort", stop);
        resolve(word);
      };
      const stop = () => settle("stop");
      if (signal.aborted) return resolve("stop");
      signal.addEventListener("abort", stop);
      return this.decisions.set(call.id, settle);
    });
  }
}

// Calls that were never made count as cancelled: every call in a conversation needs a result.
export function closeCalls(message) {
  for (const call of message.calls ?? []) if (call.result === undefined) Object.assign(call, { state: "cancelled", result: CANCELLED });
}

export const callsOf = (message) => message.calls?.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));

export const resultsOf = (message) => (message.calls ?? []).map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? CANCELLED }));

// Adds a piece of a streamed call to those of the message.
export function takeCall(message, piece) {
  message.calls ??= [];
  const at = piece.index ?? message.calls.length;
  const call = (message.calls[at] ??= { id: "", name: "", arguments: "" });
  call.id ||= piece.id ?? "";
  call.name ||= piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

// The calls of one answer, below its text. No button takes the focus: Enter, meant for a message, must not permit a call.
export class CallsView {
  constructor({ onDecide, serverOf }) {
    this.onDecide = onDecide;
    this.serverOf = serverOf;
    this.root = make("div", { className: "calls" });
    this.shown = "";
  }

  show(message) {
    const calls = message.state === "running" ? [] : (message.calls ?? []);
    const now = JSON.stringify(calls.map((call) => [call.id, call.state]));
    if (now === this.shown) return;
    this.shown = now;
    this.root.replaceChildren(...calls.map((call) => this.#card(call)));
  }

  #card(call) {
    const server = this.serverOf(call.name);
    const head = make("p", { className: "call-head" }, make("strong", { text: call.name }), make("span", { className: "call-state", text: LABELS[call.state] ?? "" }));
    if (server) head.title = `Tool of ${server}`;
    const card = make("div", { className: "call", attributes: { role: "group", "aria-label": `Call of ${call.name}`, "data-state": call.state ?? "" } }, head);
    card.append(make("pre", { className: "call-text", text: pretty(call.arguments) }));
    if (call.state === "asked") card.append(this.#buttons(call));
    if (call.state === "done" || call.state === "failed") card.append(make("details", {}, make("summary", { text: "Result" }), make("pre", { className: "call-text", text: call.result })));
    return card;
  }

  #buttons(call) {
    const button = (text, word, className) => make("button", { className, text, attributes: { type: "button" }, on: { click: () => this.onDecide(call, word) } });
    return make("div", { className: "call-buttons" }, button("Call", "yes", "solid-button"), button("Always for this tool", "always", "plain-button"), button("Don’t call", "no", "plain-button"));
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    return text;
  }
}
