// Runs one answer: sends the conversation, extends the message with every chunk, and records how it ended.

import { Failure, streamAnswer } from "./api.js";
import { composeContent } from "./files.js";
import { takeSources } from "./sources.js";
import { callsOf, resultsOf, takeCall } from "./tools.js";

const SAVE_MS = 1000;

// Returns the messages of a request, and for each of them its text and the files in it.
export async function buildMessages(path, system, store) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  const layout = messages.map(() => null);
  for (const message of path) {
    if (message.role === "assistant") {
      const thought = message.reasoning ? { reasoning_content: message.reasoning } : {};
      const calls = message.calls?.length ? { tool_calls: callsOf(message) } : {};
      if (message.text || message.calls?.length) messages.push({ role: "assistant", content: message.text, ...thought, ...calls }, ...resultsOf(message));
    } else {
      const files = await Promise.all((message.files ?? []).map(async (file) => ({ text: "", ...(await store.loadFile(file.id)), ...file })));
      const { content, places, parts } = composeContent(message.text, files);
      layout[messages.length] = { content, places };
      messages.push({ role: "user", content: parts ?? content });
    }
  }
  return { messages, layout };
}

export function newAnswer(model) {
  return { role: "assistant", text: "", reasoning: "", state: "running", model, created: Date.now() };
}

// `paint` is called after every change, `save` about once a second; both at the end.
export async function runAnswer(message, body, layout, signal, paint, save) {
  const clock = new ThinkingClock(message);
  let lastSave = performance.now();
  const ticker = setInterval(() => clock.tick() && paint(), 100);
  try {
    for await (const chunk of streamAnswer({ ...body, stream: true, stream_options: { include_usage: true }, return_progress: true }, signal)) {
      take(message, chunk, clock);
      const { sources } = chunk.choices?.[0] ?? {};
      if (sources) message.sources = takeSources(sources, layout);
      paint();
      if (performance.now() - lastSave > SAVE_MS) {
        lastSave = performance.now();
        save();
      }
    }
    message.state = "done";
  } catch (error) {
    message.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) message.error = wordsOf(error);
  } finally {
    clearInterval(ticker);
    clock.stop();
    delete message.progress;
    paint();
    save();
  }
}

function wordsOf(error) {
  if (error instanceof Failure) return { kind: error.kind, title: error.title, detail: error.detail };
  return { kind: "server", title: "The page failed.", detail: String(error?.message ?? error) };
}

function take(message, chunk, clock) {
  if (chunk.prompt_progress) message.progress = chunk.prompt_progress;
  if (chunk.model) message.model = chunk.model;
  if (chunk.usage) message.usage = usageOf(chunk.usage);
  if (chunk.timings) message.timings = chunk.timings;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
  const text = choice.delta?.content ?? "";
  if (thought) {
    clock.start();
    message.reasoning += thought;
  }
  if (text) {
    clock.stop();
    message.text += message.text === "" ? text.trimStart() : text;
  }
  for (const piece of choice.delta?.tool_calls ?? []) takeCall(message, piece);
  if (choice.finish_reason) message.finish = choice.stop_reason === "repetition" ? "repetition" : choice.finish_reason;
}

function usageOf(usage) {
  return {
    prompt: usage.prompt_tokens ?? 0,
    completion: usage.completion_tokens ?? 0,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
  };
}

class ThinkingClock {
  constructor(message) {
    this.message = message;
    this.began = null;
  }

  start() {
    if (this.began !== null || this.message.isThinking === false) return;
    this.began = performance.now();
    this.message.isThinking = true;
  }

  tick() {
    if (this.began === null) return false;
    this.message.thoughtSeconds = (performance.now() - this.began) / 1000;
    return true;
  }

  stop() {
    if (!this.tick()) return;
    this.began = null;
    this.message.isThinking = false;
  }
}
