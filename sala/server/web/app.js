// The page as a whole: the conversation that is shown, the answers that run, keyboard shortcuts.

import { buildMessages, newAnswer, runAnswer } from "./answer.js";
import { listModels, useKey } from "./api.js";
import { Composer, suggestion } from "./composer.js";
import { announce, byId, fillIcons, toast } from "./dom.js";
import { estimateTokens } from "./files.js";
import { formatCompact, formatCount, titleOf } from "./format.js";
import { Settings, SettingsPanel, setUpTheme } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { filesOf, newId, openStore } from "./store.js";
import { AnswerView, UserView } from "./view.js";

const SUGGESTIONS = ["Explain how a rainbow forms", "Write a story about a lighthouse", "Plan three dinners for this week", "Summarise a long file"];
const RETRY_MS = 5000;
const NEAR_END = 80; // pixels from the end that still count as being there

class App {
  constructor(store) {
    this.store = store;
    this.settings = new Settings();
    useKey(() => this.settings.key);
    this.chat = newChat();
    this.views = [];
    this.live = new Map(); // running answers by conversation; they continue while another conversation is shown
    this.isAtEnd = true;
    this.panel = new SettingsPanel(this.settings, (what) => this.settingsChanged(what));
    this.sidebar = new Sidebar({
      onRename: (chat, title) => this.rename(chat, title),
      onDelete: (chat) => this.remove(chat),
      isLive: (id) => this.live.has(id),
    });
    this.composer = new Composer({
      onSend: (text, files) => this.send(text, files),
      onStop: () => this.stop(),
      onEditLast: () => this.editLast(),
      onChange: () => this.showContext(),
      getModel: () => this.settings.modelId,
    });
    this.news = typeof BroadcastChannel === "function" ? new BroadcastChannel("sala") : null;
  }

  async start() {
    fillIcons();
    setUpTheme(byId("theme"));
    this.nameKeys();
    this.listen();
    byId("suggestions").replaceChildren(...SUGGESTIONS.map((text) => suggestion(text, (picked) => this.pickSuggestion(picked))));
    if (!this.store.isKept) toast("This browser does not store data for this page: conversations are lost when you close it.");
    await this.openFromAddress();
    await this.loadModels();
  }

  // ------------------------------------------------------------------------------------------------ conversations

  async openFromAddress() {
    const id = location.hash.slice(1);
    const running = this.live.get(id)?.chat;
    const chat = running ?? (id ? await this.store.load(id) : null);
    if (id !== location.hash.slice(1)) return; // another conversation was opened in the meantime
    if (chat && !running) closeOpenAnswers(chat);
    this.chat = chat ?? newChat();
    if (id && !chat) history.replaceState(null, "", location.pathname);
    this.showChat();
    await this.showList();
  }

  async showList() {
    const chats = await this.store.list();
    this.sidebar.update(chats, this.chat.id);
  }

  showChat() {
    this.views = this.chat.messages.map((message) => this.viewOf(message));
    byId("thread").replaceChildren(...this.views.map((view) => view.root));
    this.isAtEnd = true;
    this.showFrame();
    this.scrollToEnd();
    this.closeSidebar();
    if (!matchMedia("(pointer: coarse)").matches) this.composer.focus();
  }

  showFrame() {
    const isEmpty = this.chat.messages.length === 0;
    byId("welcome").hidden = !isEmpty;
    byId("thread").hidden = isEmpty;
    byId("chat-title").textContent = isEmpty ? "New chat" : this.chat.title;
    document.title = isEmpty ? "sala" : `${this.chat.title} · sala`;
    this.composer.setRunning(this.live.has(this.chat.id));
  }

  viewOf(message) {
    if (message.role === "user") return new UserView(message, { onEdit: (edited, text) => this.resend(edited, text) });
    return new AnswerView(message, { onRegenerate: (answer) => this.regenerate(answer), onKey: () => this.panel.open({ focusKey: true }) });
  }

  openNew() {
    if (location.hash) location.hash = "";
    else {
      this.chat = newChat();
      this.showChat();
      this.showList();
    }
  }

  async rename(row, title) {
    const chat = await this.bring(row.id);
    if (!chat) return;
    Object.assign(chat, { title, isRenamed: true });
    await this.save(chat, { isTouched: false });
    if (chat.id === this.chat.id) this.showFrame();
  }

  async bring(id) {
    if (this.chat.id === id) return this.chat;
    return this.live.get(id)?.chat ?? this.store.load(id);
  }

  async remove(row) {
    const running = this.live.get(row.id);
    if (running) {
      running.isDropped = true; // its last update must not save the deleted conversation again
      running.controller.abort();
    }
    const bundle = await this.store.take(row.id);
    if (row.id === this.chat.id) this.openNew();
    await this.showList();
    this.tell();
    const undo = async () => {
      await this.store.putBack(bundle);
      await this.showList();
      this.tell();
      location.hash = row.id;
    };
    toast(`“${row.title}” is deleted.`, { label: "Undo", run: undo });
  }

  async save(chat, { isTouched = true } = {}) {
    if (isTouched) chat.updated = Date.now();
    await this.keep(chat);
    await this.showList();
    this.tell();
  }

  async keep(chat) {
    try {
      await this.store.save(chat);
    } catch {
      toast("The conversation could not be saved: the browser’s storage is full.");
    }
  }

  tell() {
    this.news?.postMessage("changed");
  }

  // ---------------------------------------------------------------------------------------------------- messages

  async send(text, attachments) {
    const chat = this.chat;
    const files = attachments.map(({ id, name, size, tokens, isExact }) => ({ id, name, size, tokens, isExact }));
    if (chat.messages.length === 0) chat.title = titleOf(text, files);
    this.append(chat, { role: "user", text, files, created: Date.now() });
    try {
      for (const file of attachments) await this.store.addFile({ id: file.id, text: file.text });
    } catch {
      toast("The file could not be saved: the browser’s storage is full.");
    }
    await this.answer(chat);
  }

  append(chat, message) {
    chat.messages.push(message);
    if (chat !== this.chat) return null;
    const view = this.viewOf(message);
    this.views.push(view);
    byId("thread").append(view.root);
    this.isAtEnd = true;
    this.showFrame();
    this.scrollToEnd();
    return view;
  }

  // Removes a message and everything after it.
  async cutBefore(chat, message, keptFiles = []) {
    const at = chat.messages.indexOf(message);
    const removed = chat.messages.splice(at);
    for (const view of this.views.splice(at)) view.root.remove();
    await this.store.dropFiles(filesOf(removed).filter((id) => !keptFiles.includes(id)));
  }

  async resend(message, text) {
    this.stop();
    const chat = this.chat;
    const isFirst = chat.messages[0] === message;
    await this.cutBefore(chat, message, filesOf([message]));
    if (isFirst && !chat.isRenamed) chat.title = titleOf(text, message.files);
    this.append(chat, { ...message, text, created: Date.now() });
    this.composer.focus();
    await this.answer(chat);
  }

  async regenerate(answer) {
    this.stop();
    const chat = this.chat;
    await this.cutBefore(chat, answer);
    await this.answer(chat);
  }

  editLast() {
    const view = this.views.findLast((one) => one instanceof UserView);
    view?.edit();
    return Boolean(view);
  }

  stop() {
    const running = this.live.get(this.chat.id);
    if (!running) return;
    this.live.delete(this.chat.id);
    running.controller.abort();
  }

  async answer(chat) {
    const controller = new AbortController();
    const message = newAnswer(this.settings.modelId);
    const run = { chat, controller, isDropped: false };
    this.live.set(chat.id, run);
    const body = { ...this.settings.requestFields(), messages: await buildMessages(chat, this.settings.values.system, this.store) };
    this.append(chat, message);
    if (chat.id === this.chat.id && !location.hash) history.replaceState(null, "", `#${chat.id}`);
    await this.save(chat);
    const keep = () => {
      if (!run.isDropped && chat.messages.includes(message)) this.keep(chat);
    };
    await runAnswer(message, body, controller.signal, () => this.paintSoon(message), keep);
    if (this.live.get(chat.id) === run) this.live.delete(chat.id);
    this.finished(chat, message);
  }

  finished(chat, message) {
    if (chat === this.chat) {
      this.showFrame();
      this.showContext();
    }
    this.showList();
    announce(message.error ? message.error.title : message.state === "stopped" ? "Stopped." : "The answer is complete.");
    if (message.error?.kind === "key" && chat === this.chat) this.panel.open({ focusKey: true });
    if (message.state === "done" && !this.settings.model?.isLoaded) this.loadModels();
  }

  paintSoon(message) {
    this.dirty ??= new Set();
    this.dirty.add(message);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const view of this.views) if (this.dirty.has(view.message)) view.show();
      this.dirty.clear();
      if (this.isAtEnd) this.scrollToEnd();
    });
  }

  // -------------------------------------------------------------------------------------------- models and context

  async loadModels() {
    const was = this.isReachable;
    try {
      this.settings.models = await listModels();
      this.isReachable = true;
    } catch (failure) {
      this.isReachable = false;
      if (failure.kind === "key") this.panel.open({ focusKey: true });
      else if (was !== false) toast(`${failure.title} ${failure.detail}`);
    }
    this.panel.fillModels();
    this.showModel();
    clearTimeout(this.timer);
    if (!this.settings.models.some((model) => model.isLoaded) || !this.isReachable) this.timer = setTimeout(() => this.lookAgain(), RETRY_MS);
  }

  // Finds a server that has been started or restarted, without a reload.
  lookAgain() {
    const waitsForKey = byId("settings").open && !byId("key-note").hidden;
    if (document.hidden || waitsForKey) this.timer = setTimeout(() => this.lookAgain(), RETRY_MS);
    else this.loadModels();
  }

  showModel() {
    const { model } = this.settings;
    byId("model-name").textContent = model?.id ?? (this.isReachable ? "no model" : "not connected");
    byId("model-chip").dataset.state = !this.isReachable ? "off" : model?.isLoaded ? "loaded" : "known";
    byId("model-chip").title = !this.isReachable ? "The server does not answer" : model?.isLoaded ? "Loaded" : "Will be loaded with the first request";
    this.showContext();
  }

  settingsChanged(what) {
    if (what === "key") this.loadModels();
    else this.showModel();
  }

  // How much of the context this conversation and the current draft fill.
  showContext() {
    const limit = this.settings.model?.context;
    const last = this.chat.messages.findLast((message) => message.usage);
    const used = last ? last.usage.prompt + last.usage.completion : 0;
    const after = this.chat.messages.slice(last ? this.chat.messages.indexOf(last) + 1 : 0);
    const added = after.reduce((sum, message) => sum + estimateTokens(message.text) + (message.files ?? []).reduce((all, file) => all + file.tokens, 0), 0);
    const total = used + added + (this.composer?.tokens ?? 0);
    byId("context").hidden = total === 0;
    const share = limit ? Math.min(1, total / limit) : 0;
    byId("context-fill").style.width = `${share * 100}%`;
    byId("context").classList.toggle("is-tight", share > 0.85);
    byId("context-text").textContent = limit ? `${formatCompact(total)} of ${formatCompact(limit)} tokens` : `${formatCompact(total)} tokens`;
    byId("context").title = limit ? `About ${formatCount(total)} of ${formatCount(limit)} tokens of context` : "";
  }

  // ---------------------------------------------------------------------------------------------------- the frame

  listen() {
    addEventListener("hashchange", () => this.openFromAddress());
    addEventListener("keydown", (event) => this.key(event));
    this.news?.addEventListener("message", () => this.showList());
    for (const id of ["new-chat", "new-chat-top"]) byId(id).addEventListener("click", () => this.openNew());
    for (const id of ["open-settings", "model-chip"]) byId(id).addEventListener("click", () => this.openSettings());
    byId("open-sidebar").addEventListener("click", () => this.openSidebar());
    byId("close-sidebar").addEventListener("click", () => this.closeSidebar());
    byId("veil").addEventListener("click", () => this.closeSidebar());
    byId("chat-list").addEventListener("click", (event) => {
      if (event.target.closest("a")) this.closeSidebar();
    });
    byId("scroller").addEventListener("scroll", () => this.scrolled(), { passive: true });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the URL names the conversation
      this.composer.focus();
    });
    new ResizeObserver(() => this.isAtEnd && this.scrollToEnd()).observe(byId("thread"));
  }

  key(event) {
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      byId("settings").close();
      this.openNew();
    } else if (event.key === "Escape" && !byId("settings").open) {
      if (document.body.classList.contains("has-drawer")) this.closeSidebar();
      else this.stopByKey();
    }
  }

  stopByKey() {
    if (!this.live.has(this.chat.id)) return;
    this.stop();
    this.composer.focus();
  }

  nameKeys() {
    if (!/Mac|iPhone|iPad/.test(navigator.platform)) return;
    byId("new-chat-key").textContent = "⌘ K";
    byId("keys-mod").textContent = "⌘";
  }

  openSettings() {
    this.closeSidebar();
    this.panel.open();
    this.loadModels();
  }

  openSidebar() {
    document.body.classList.add("has-drawer");
    byId("veil").hidden = false;
    document.querySelector("main").inert = true;
    byId("open-sidebar").setAttribute("aria-expanded", "true");
    byId("close-sidebar").focus();
  }

  closeSidebar() {
    if (!document.body.classList.contains("has-drawer")) return;
    document.body.classList.remove("has-drawer");
    byId("veil").hidden = true;
    document.querySelector("main").inert = false;
    byId("open-sidebar").setAttribute("aria-expanded", "false");
    byId("open-sidebar").focus();
  }

  pickSuggestion(text) {
    if (text === SUGGESTIONS.at(-1)) byId("file-input").click();
    this.composer.setText(text);
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = byId("scroller");
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    byId("to-end").hidden = this.isAtEnd;
  }

  scrollToEnd() {
    const scroller = byId("scroller");
    scroller.scrollTop = scroller.scrollHeight;
    byId("to-end").hidden = true;
    this.isAtEnd = true;
  }
}

function newChat() {
  return { id: newId(), title: "New chat", created: Date.now(), updated: Date.now(), isRenamed: false, messages: [] };
}

// An answer that was incomplete when the page was closed keeps the text that had arrived.
function closeOpenAnswers(chat) {
  for (const message of chat.messages) {
    if (message.state !== "running") continue;
    message.state = "failed";
    message.isThinking = false;
    delete message.progress;
    message.error = { kind: "lost", title: "The page was closed before this answer was complete.", detail: "The text that had arrived was kept." };
  }
}

new App(await openStore()).start();
