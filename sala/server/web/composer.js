// The message field and its attached files.

import { announce, byId, make, setIcon, toast } from "./dom.js";
import { beginAttachment, estimateTokens, inOrder, readAttachment, Refused } from "./files.js";
import { fileChip, fit } from "./view.js";

const LONG_PASTE = 20_000; // characters; a longer paste becomes a file, which is easier to handle

export class Composer {
  constructor({ onSend, onStop, onEditLast, onChange, onOpen, getOptions }) {
    this.onSend = onSend;
    this.onStop = onStop;
    this.onEditLast = onEditLast;
    this.onChange = onChange;
    this.onOpen = onOpen;
    this.getOptions = getOptions;
    this.reading = Promise.resolve(); // the server reads one file of a key at a time
    this.attachments = [];
    this.isRunning = false;
    this.area = byId("composer-text");
    this.button = byId("send");
    this.#listen();
    this.#listenForDrops();
  }

  get tokens() {
    return estimateTokens(this.area.value) + this.attachments.reduce((sum, file) => sum + file.tokens, 0);
  }

  focus() {
    this.area.focus();
  }

  setText(text) {
    this.area.value = text;
    this.#changed();
    this.focus();
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    this.#changed();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.area.addEventListener("input", () => this.#changed());
    this.area.addEventListener("keydown", (event) => this.#key(event));
    this.area.addEventListener("paste", (event) => this.#paste(event));
    byId("attach").addEventListener("click", () => byId("file-input").click());
    byId("file-input").addEventListener("change", (event) => {
      this.attach([...event.target.files]);
      event.target.value = "";
    });
  }

  #listenForDrops() {
    const veil = byId("drop");
    const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      veil.hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) veil.hidden = true;
    });
    addEventListener("drop", (event) => {
      veil.hidden = true;
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  #key(event) {
    if (event.isComposing || event.keyCode === 229) return;
    const isTouch = matchMedia("(pointer: coarse)").matches; // touch keyboards have no Shift+Enter
    if (event.key === "Enter" && !event.shiftKey && !isTouch) {
      event.preventDefault();
      if (!this.isRunning) this.#submit();
    } else if (event.key === "ArrowUp" && this.area.value === "" && !this.isRunning) {
      if (this.onEditLast()) event.preventDefault();
    }
  }

  #paste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (files.length > 0 && text === "") {
      event.preventDefault();
      this.attach(files);
    } else if (text.length > LONG_PASTE) {
      event.preventDefault();
      this.attach([new File([text], "Pasted text.txt", { type: "text/plain" })], () => this.setText(this.area.value + text));
    }
  }

  // Adds files, which the server then reads one after another. `onFailure` is called for each that it could not read.
  async attach(files, onFailure = () => {}) {
    for (const file of files) {
      try {
        const attachment = beginAttachment(file.name, file);
        this.attachments.push(attachment);
        this.reading = this.reading.then(() => this.#read(attachment, file, onFailure));
      } catch (error) {
        toast(error instanceof Refused ? error.message : `“${file.name}” could not be read.`);
      }
    }
    this.#changed();
    this.focus();
    await this.reading;
  }

  // Adds a file whose text is known.
  add(attachment) {
    this.attachments.push(attachment);
    this.#changed();
    this.focus();
  }

  async #read(attachment, file, onFailure) {
    if (!this.attachments.includes(attachment)) return;
    try {
      await readAttachment(attachment, file, this.getOptions());
      announce(`${attachment.name}: ${attachment.parts}, ${attachment.tokens} tokens`);
      for (const { name, why } of attachment.leftOut.slice(0, 1)) toast(`${name}: left out, ${why}`);
    } catch (error) {
      const isWanted = this.attachments.includes(attachment);
      this.attachments = this.attachments.filter((other) => other !== attachment);
      if (isWanted) {
        toast([error.title ?? `“${file.name}” could not be read.`, error.detail].filter(Boolean).join(" "));
        onFailure();
      }
    }
    this.#changed();
  }

  get #isReading() {
    return this.attachments.some((file) => file.isReading);
  }

  #submit() {
    if (this.isRunning) {
      this.onStop();
      return;
    }
    const text = this.area.value.trim();
    if (text === "" && this.attachments.length === 0) return;
    if (this.#isReading) {
      announce("The files are still being read.");
      return;
    }
    const files = inOrder(this.attachments);
    this.attachments = [];
    this.area.value = "";
    this.#changed();
    this.onSend(text, files);
  }

  #changed() {
    fit(this.area, Math.min(innerHeight * 0.4, 320));
    const drop = (file) => {
      file.controller?.abort();
      this.attachments = this.attachments.filter((other) => other !== file);
      this.#changed();
      this.focus();
    };
    const chips = this.attachments.map((file) => fileChip(file, { onRemove: () => drop(file), onOpen: () => this.onOpen(file) }));
    byId("chips").replaceChildren(...chips);
    const isEmpty = this.area.value.trim() === "" && this.attachments.length === 0;
    this.button.disabled = (isEmpty || this.#isReading) && !this.isRunning;
    this.button.classList.toggle("is-stop", this.isRunning);
    this.button.setAttribute("aria-label", this.isRunning ? "Stop" : "Send");
    setIcon(this.button, this.isRunning ? "stop" : "up");
    this.onChange();
  }
}

export function suggestion(text, onPick) {
  return make("button", { className: "suggestion", text, attributes: { type: "button" }, on: { click: () => onPick(text) } });
}
