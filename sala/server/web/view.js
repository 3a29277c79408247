// One message on the page. `show` updates it after its message has changed.

import { copyButton, iconButton, make } from "./dom.js";
import { describe } from "./files.js";
import { formatCompact, formatCount, formatRate, formatSeconds, formatWait } from "./format.js";
import { MarkdownView } from "./markdown.js";
import { markQuotes, SourcesView } from "./sources.js";
import { CallsView } from "./tools.js";

const LONG_TEXT = 1600;
const REMARKS = {
  length: "The answer reached the token limit. Raise “Maximum tokens” in the settings for longer answers.",
  repetition: "The answer was stopped because it kept repeating itself.",
};

export function fileChip(file, { onRemove = null, onOpen = null } = {}) {
  const label = make("span", { className: "chip-text" }, make("span", { className: "chip-name", text: file.name }), make("span", { className: "chip-info", text: describe(file) }));
  const isOpen = onOpen && !file.isReading;
  const face = isOpen ? make("button", { className: "chip-face", icon: "file", attributes: { type: "button", title: `Read ${file.name}` }, on: { click: () => onOpen(file) } }, label) : make("span", { className: "chip-face", icon: "file" }, label);
  const chip = make("div", { className: file.isReading ? "chip is-reading" : "chip", attributes: { role: "listitem", title: file.name } }, face);
  if (onRemove) chip.append(iconButton("close", `Remove ${file.name}`, onRemove, "small"));
  return chip;
}

// Arrows to the other versions of a message; nothing if it is the only one.
function versionButtons(message, { versionsOf, onTurn }) {
  const { at, count } = versionsOf(message);
  if (count < 2) return [];
  const button = (icon, label, by) => {
    const one = iconButton(icon, label, () => onTurn(message, by), "small");
    one.disabled = at + by < 0 || at + by >= count;
    return one;
  };
  const label = make("span", { text: `${at + 1}/${count}`, attributes: { "aria-label": `Version ${at + 1} of ${count}` } });
  return [make("span", { className: "versions", attributes: { role: "group", "aria-label": "Versions" } }, button("left", "Previous version", -1), label, button("right", "Next version", 1))];
}

export class UserView {
  constructor(message, hooks) {
    this.message = message;
    this.hooks = hooks;
    this.root = make("article", { className: "message user", attributes: { "aria-label": "You" } });
    this.show();
  }

  show() {
    const { text, files } = this.message;
    const parts = [];
    if (files?.length) parts.push(make("div", { className: "chips", attributes: { role: "list" } }, ...files.map((file) => fileChip(file, { onOpen: () => this.hooks.onOpenFile(file) }))));
    if (text) parts.push(make("div", { className: "bubble" }, ...this.#textParts(text)));
    const actions = make("div", { className: "actions" }, copyButton(() => text), iconButton("pencil", "Edit and send again", () => this.edit()), ...versionButtons(this.message, this.hooks));
    this.root.replaceChildren(...parts, actions);
  }

  refresh() {
    if (!this.root.querySelector(".editor")) this.show();
  }

  #textParts(text) {
    const body = make("div", { className: "bubble-text", text });
    if (text.length < LONG_TEXT && text.split("\n").length < 24) return [body];
    body.classList.add("folded");
    const more = make("button", { className: "link-button", text: "Show all", attributes: { type: "button", "aria-expanded": "false" } });
    more.addEventListener("click", () => {
      const isFolded = body.classList.toggle("folded");
      more.textContent = isFolded ? "Show all" : "Show less";
      more.setAttribute("aria-expanded", String(!isFolded));
    });
    return [body, more];
  }

  edit() {
    const area = make("textarea", { attributes: { "aria-label": "Edit the message", rows: "1" } });
    area.value = this.message.text;
    const send = () => {
      const text = area.value.trim();
      if (text || this.message.files?.length) this.hooks.onEdit(this.message, text);
    };
    const cancel = make("button", { className: "plain-button", text: "Cancel", attributes: { type: "button" }, on: { click: () => this.show() } });
    const save = make("button", { className: "solid-button", text: "Send", attributes: { type: "button" }, on: { click: send } });
    const note = make("span", { className: "hint", text: "What follows now is kept as another version." });
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        this.show();
        document.getElementById("composer-text").focus();
      } else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      }
    });
    const chips = this.root.querySelector(".chips");
    this.root.replaceChildren(...(chips ? [chips] : []), make("div", { className: "editor" }, area, make("div", { className: "editor-row" }, note, cancel, save)));
    fit(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

export function fit(area, most = 360) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, most)}px`;
}

export class AnswerView {
  constructor(message, hooks) {
    this.message = message;
    this.hooks = hooks;
    this.thinking = make("details", { className: "thinking", attributes: { hidden: "" } });
    this.thinkingLabel = make("span");
    this.thinkingText = make("div", { className: "thinking-text" });
    this.thinking.append(make("summary", { icon: "chevron" }, this.thinkingLabel), this.thinkingText);
    this.prefill = new PrefillBar();
    this.body = make("div", { className: "prose" });
    this.markdown = new MarkdownView(this.body);
    this.calls = new CallsView(hooks);
    this.sources = new SourcesView({ onOpen: (answer, passage) => hooks.onSource(answer, passage) });
    this.foot = make("div", { className: "answer-foot" });
    this.root = make("article", { className: "message assistant", attributes: { "aria-label": "Answer" } });
    this.root.append(this.thinking, this.prefill.root, this.body, this.calls.root, this.sources.root, this.foot);
    this.shownState = null;
    this.show();
  }

  show() {
    const { message } = this;
    this.#showThinking();
    this.prefill.show(message);
    this.markdown.update(message.text);
    this.body.hidden = message.text === "";
    this.calls.show(message);
    this.root.classList.toggle("is-writing", message.state === "running" && message.text !== "");
    if (this.shownState === message.state) return;
    this.shownState = message.state;
    this.root.setAttribute("aria-busy", String(message.state === "running"));
    this.foot.replaceChildren(...(message.state === "running" ? [] : this.#footParts()));
    if (message.state !== "running" && message.sources) this.#showSources();
  }

  // Shows everything anew: the number of versions may have changed.
  refresh() {
    this.shownState = null;
    this.show();
  }

  #showSources() {
    const { message, hooks } = this;
    this.sources.show(message, hooks.placeOf);
    if (!this.body.querySelector(".quote")) markQuotes(this.body, message.sources.quotes, (quote) => hooks.onSource(message, quote));
  }

  // Goes to the entry of a passage, or to a quote in the text.
  focusSource(passage) {
    const quote = passage.isQuote && [...this.body.querySelectorAll(".quote")].find((one) => one.quote === passage);
    if (quote) {
      quote.scrollIntoView({ block: "center" });
      quote.focus();
    } else this.sources.focus(passage);
  }

  #showThinking() {
    const { reasoning, thoughtSeconds, isThinking } = this.message;
    this.thinking.hidden = !reasoning;
    if (!reasoning) return;
    this.thinking.classList.toggle("is-live", Boolean(isThinking));
    const seconds = formatSeconds(thoughtSeconds ?? 0);
    this.thinkingLabel.textContent = isThinking ? `Thinking… ${seconds}` : `Thought for ${seconds}`;
    if (this.thinkingText.textContent.length !== reasoning.length) this.thinkingText.textContent = reasoning;
  }

  #footParts() {
    const { message } = this;
    const parts = [];
    if (message.error) parts.push(this.#errorBox(message.error));
    const remark = message.state === "stopped" ? "Stopped." : REMARKS[message.finish];
    if (remark) parts.push(make("p", { className: "remark", text: remark }));
    const row = make("div", { className: "actions" });
    if (message.text) row.append(copyButton(() => message.text));
    row.append(iconButton("redo", "Regenerate", () => this.hooks.onRegenerate(message)), ...versionButtons(message, this.hooks));
    row.append(make("span", { className: "stats", text: statsOf(message), attributes: { title: detailsOf(message) } }));
    if (message.text || message.reasoning || !message.error) parts.push(row);
    return parts;
  }

  #errorBox(error) {
    const words = make("div", {}, make("strong", { text: error.title }), error.detail ? make("p", { text: error.detail }) : null);
    const retry = make("button", { className: "plain-button", text: "Try again", attributes: { type: "button" }, on: { click: () => this.hooks.onRegenerate(this.message) } });
    const buttons = [retry];
    if (error.kind === "key") buttons.unshift(make("button", { className: "solid-button", text: "Enter the key", attributes: { type: "button" }, on: { click: () => this.hooks.onKey() } }));
    return make("div", { className: "error-box", icon: "alert", attributes: { role: "alert" } }, words, make("div", { className: "error-buttons" }, ...buttons));
  }
}

function statsOf({ usage, timings }) {
  if (!usage) return "";
  const rate = timings?.predicted_per_second ? ` · ${formatRate(timings.predicted_per_second)} tok/s` : "";
  const cached = usage.cached ? ` (${formatCompact(usage.cached)} cached)` : "";
  return `${formatCompact(usage.completion)} tokens${rate} · prompt ${formatCompact(usage.prompt)}${cached}`;
}

function detailsOf({ usage, timings, model }) {
  if (!usage) return "";
  const lines = [
    `Prompt: ${formatCount(usage.prompt)} tokens, ${formatCount(usage.cached)} of them cached`,
    `Answer: ${formatCount(usage.completion)} tokens`,
  ];
  if (timings?.prompt_per_second) lines.push(`Prefill: ${formatRate(timings.prompt_per_second)} tokens per second`);
  if (timings?.predicted_per_second) lines.push(`Decoding: ${formatRate(timings.predicted_per_second)} tokens per second`);
  if (model) lines.push(`Model: ${model}`);
  return lines.join("\n");
}

const FEW_TOKENS = 512; // shorter prompts are processed before a bar would be noticed

// Prefill progress: cached tokens count as processed at once.
class PrefillBar {
  constructor() {
    this.fill = make("span", { className: "bar-fill" });
    this.cached = make("span", { className: "bar-cached" });
    this.bar = make("div", { className: "bar", attributes: { role: "progressbar", "aria-label": "Reading the prompt", "aria-valuemin": "0" } }, this.cached, this.fill);
    this.label = make("span", { className: "prefill-label" });
    this.info = make("span", { className: "prefill-info" });
    this.waiting = make("div", { className: "waiting", attributes: { "aria-label": "Waiting for the answer" } }, make("span"), make("span"), make("span"));
    this.panel = make("div", { className: "prefill-panel" }, make("div", { className: "prefill-words" }, this.label, this.info), this.bar);
    this.root = make("div", { className: "prefill" }, this.waiting, this.panel);
  }

  show(message) {
    const { progress, state, text, reasoning } = message;
    const isWaiting = state === "running" && !text && !reasoning;
    const hasBar = Boolean(progress && progress.total >= FEW_TOKENS);
    this.root.hidden = !isWaiting;
    this.waiting.hidden = hasBar;
    this.panel.hidden = !hasBar;
    if (isWaiting && hasBar) this.#paint(progress);
  }

  #paint({ total, cache, processed, time_ms: time }) {
    const done = Math.min(total, Math.max(processed, cache));
    const fresh = done - cache;
    const rate = fresh >= FEW_TOKENS / 2 && time > 0 ? (fresh * 1000) / time : 0; // the first tokens include the time in the queue
    this.fill.style.width = `${(done / total) * 100}%`;
    this.cached.style.width = `${(cache / total) * 100}%`;
    this.bar.setAttribute("aria-valuemax", String(total));
    this.bar.setAttribute("aria-valuenow", String(done));
    this.label.textContent = `Reading ${formatCount(done)} of ${formatCount(total)} tokens`;
    const parts = [];
    if (cache > 0) parts.push(`${formatCompact(cache)} cached`);
    if (rate > 0) parts.push(`${formatRate(rate)} tok/s`);
    if (rate > 0 && done < total) parts.push(`${formatWait((total - done) / rate)} left`);
    this.info.textContent = parts.join(" · ");
  }
}
