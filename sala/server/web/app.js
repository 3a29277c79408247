// The page as a whole: the conversation that is shown, the answers that run, keyboard shortcuts.

import { buildMessages, newAnswer, runAnswer } from "./answer.js";
import { listModels, useKey } from "./api.js";
import { add, pathTo, turn, versionsOf } from "./branches.js";
import { Composer, suggestion } from "./composer.js";
import { announce, byId, fillIcons, toast } from "./dom.js";
import { Documents } from "./documents.js";
import { inOrder, remember } from "./files.js";
import { titleOf } from "./format.js";
import { Frame } from "./frame.js";
import { Library } from "./library.js";
import { Menu } from "./menu.js";
import { Settings, SettingsPanel, setUpTheme } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { newId, openStore } from "./store.js";
import { closeCalls, Toolbox } from "./tools.js";
import { AnswerView, UserView } from "./view.js";

const SUGGESTIONS = ["Explain how a rainbow forms", "Write a story about a lighthouse", "Plan three dinners for this week", "Summarise a long file"];
const RETRY_MS = 5000;
const MAX_ROUNDS = 32; // answers to one question that call tools
const SAVE_MS = 600; // after the last change of settings

class App {
  constructor(store) {
    this.store = store;
    this.settings = new Settings();
    useKey(() => this.settings.key);
    this.toolbox = new Toolbox();
    this.chat = newChat();
    this.views = [];
    this.live = new Map(); // running answers by conversation; they continue while another conversation is shown
    this.viewsByMessage = new WeakMap();
    this.frame = new Frame({ focusComposer: () => this.composer.focus() });
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
      onOpen: (file) => this.documents.open(file),
      getOptions: () => ({ model: this.settings.modelId, keep: this.settings.keepsDocuments }),
    });
    this.documents = new Documents({
      store,
      files: () => [...this.chat.messages.flatMap((message) => message.files ?? []), ...this.composer.attachments],
      viewOf: (message) => this.views.find((view) => view.message === message),
    });
    this.library = new Library(this.settings, {
      findAttached: () => this.chat.messages[0]?.files ?? inOrder(this.composer.attachments),
      onUse: (attachment) => this.composer.add(attachment),
    });
    this.menu = new Menu({
      store,
      current: () => this.chat,
      system: () => this.settings.values.system,
      onImport: (found) => this.import(found),
    });
    this.news = typeof BroadcastChannel === "function" ? new BroadcastChannel("sala") : null;
  }

  async start() {
    fillIcons();
    setUpTheme(byId("theme"));
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
    this.settings.own = this.settings.forChat(this.chat);
    this.documents.close();
    this.showPath();
    this.frame.scrollToEnd();
    this.frame.closeSidebar();
    this.showModel();
    if (!matchMedia("(pointer: coarse)").matches) this.composer.focus();
  }

  // Shows the messages of the path that is chosen; those that were shown before keep their views.
  showPath() {
    this.views = this.chat.messages.map((message) => this.viewOf(message));
    byId("thread").replaceChildren(...this.views.map((view) => view.root));
    for (const view of this.views) view.refresh();
    this.showFrame();
    this.showContext();
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
    const known = this.viewsByMessage.get(message);
    if (known) return known;
    const { chat } = this;
    const hooks = {
      onEdit: (edited, text) => this.resend(edited, text),
      onRegenerate: (answer) => this.regenerate(answer),
      onKey: () => this.panel.open({ focusKey: true }),
      onDecide: (call, word) => this.toolbox.decide(call, word),
      serverOf: (name) => this.toolbox.serverOf(name),
      versionsOf: (one) => {
        const versions = versionsOf(chat, one);
        return { at: versions.indexOf(one), count: versions.length };
      },
      onTurn: (one, by) => this.turn(one, by),
      onOpenFile: (file) => this.documents.open(file),
      onSource: (answer, passage) => this.documents.openSource(answer, passage),
      placeOf: (passage) => this.documents.placeOf(passage),
    };
    const view = message.role === "user" ? new UserView(message, hooks) : new AnswerView(message, hooks);
    this.viewsByMessage.set(message, view);
    return view;
  }

  // Shows another version of a message.
  turn(message, by) {
    const next = turn(this.chat, message, by);
    if (!next) return;
    this.showPath();
    const { root } = this.viewOf(next);
    root.scrollIntoView({ block: "nearest" });
    const arrow = root.querySelector(`.versions [aria-label^="${by < 0 ? "Previous" : "Next"}"]:enabled`) ?? root.querySelector(".versions button:enabled");
    arrow?.focus();
    this.save(this.chat, { isTouched: false });
  }

  openNew() {
    if (location.hash) location.hash = "";
    else {
      this.chat = newChat();
      this.showChat();
      this.showList();
    }
  }

  async import(found) {
    for (const { chat, files } of found) {
      for (const file of files) await this.store.addFile(file);
      await this.store.save(chat);
    }
    this.tell();
    toast(found.length === 1 ? `“${found[0].chat.title}” is imported.` : `${found.length} conversations are imported.`);
    if (location.hash === `#${found[0].chat.id}`) return;
    location.hash = found[0].chat.id;
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
    const { chat } = this;
    const files = attachments.map(remember);
    if (chat.messages.length === 0) {
      chat.title = titleOf(text, files);
      chat.settings = this.settings.own = { ...this.settings.defaults };
    }
    this.append(chat, { role: "user", text, files, created: Date.now() }, chat.messages.at(-1));
    await this.answer(chat, chat.messages, this.store.addFiles(attachments));
  }

  // Adds a message after another one. If that is the last one shown, it is shown below.
  append(chat, message, parent) {
    const isNext = chat.messages.at(-1) === parent;
    add(chat, message, parent);
    if (chat !== this.chat) return;
    if (isNext) {
      const view = this.viewOf(message);
      this.views.push(view);
      byId("thread").append(view.root);
    } else this.showPath();
    this.showFrame();
    this.frame.scrollToEnd();
  }

  // Sends an edited message; the old one and what followed it stay as another version.
  async resend(message, text) {
    this.stop();
    const { chat } = this;
    const parent = pathTo(chat, message).at(-2);
    if (!parent && !chat.isRenamed) chat.title = titleOf(text, message.files);
    this.append(chat, { role: "user", text, files: message.files, created: Date.now() }, parent);
    this.viewOf(message).show();
    this.composer.focus();
    await this.answer(chat);
  }

  // Answers anew; the old answer and what followed it stay as another version.
  async regenerate(answer) {
    this.stop();
    await this.answer(this.chat, pathTo(this.chat, answer).slice(0, -1));
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

  // Answers the last message of a path, calling tools as long as the model asks for them and the user permits it.
  // Before, what is being stored must be.
  async answer(chat, path = chat.messages, storing = null) {
    const given = { values: { ...this.settings.values }, fields: this.settings.requestFields() }; // whatever is shown meanwhile
    const run = { chat, path: [...path], ...given, controller: new AbortController(), isDropped: false };
    this.live.set(chat.id, run);
    this.composer.setRunning(this.live.has(this.chat.id));
    try {
      await storing;
    } catch {
      toast("The file could not be saved: the browser’s storage is full.");
    }
    let message;
    for (let round = 0; round < MAX_ROUNDS; round += 1) {
      message = await this.answerOnce(run);
      if (message.state !== "done" || !message.calls?.length || !(await this.runCalls(run, message))) break;
    }
    closeCalls(message);
    if (this.live.get(chat.id) === run) this.live.delete(chat.id);
    this.paintSoon(message);
    this.finished(chat, message);
  }

  async answerOnce(run) {
    const { chat, controller, path, values, fields } = run;
    const message = newAnswer(fields.model);
    const { messages, layout } = await buildMessages(path, values.system, this.store);
    const body = { ...fields, messages };
    const tools = values.tools ? this.toolbox.definitions : [];
    if (tools.length) body.tools = tools;
    if (values.sources && path.some((one) => one.files?.length)) body.return_sources = true;
    this.append(chat, message, path.at(-1));
    path.push(message);
    if (chat.id === this.chat.id && !location.hash) history.replaceState(null, "", `#${chat.id}`);
    await this.save(chat);
    await runAnswer(message, body, layout, controller.signal, () => this.paintSoon(message), () => this.keepRun(run, message));
    return message;
  }

  async runCalls(run, message) {
    const show = () => {
      this.paintSoon(message);
      const asked = message.calls.find((call) => call.state === "asked");
      if (asked && run.chat === this.chat) announce(`Call the tool ${asked.name}?`);
    };
    const goesOn = await this.toolbox.run(message, run.controller.signal, show);
    this.keepRun(run, message);
    return goesOn;
  }

  keepRun(run, message) {
    if (!run.isDropped) this.keep(run.chat);
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
    this.painting ??= requestAnimationFrame(() => {
      this.painting = null;
      for (const view of this.views) if (this.dirty.has(view.message)) view.show();
      this.dirty.clear();
      if (this.frame.isAtEnd) this.frame.scrollToEnd();
    });
  }

  // -------------------------------------------------------------------------------------------- models and context

  async loadModels() {
    const was = this.isReachable;
    try {
      this.settings.models = await listModels();
      this.isReachable = true;
      await this.toolbox.load();
      this.panel.showTools(this.toolbox.tools);
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
    if (!this.settings.own || this.chat.messages.length === 0) return;
    this.chat.settings = this.settings.own;
    const { chat } = this;
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.save(chat, { isTouched: false }), SAVE_MS);
  }

  showContext() {
    this.frame.showContext(this.chat.messages, this.composer?.tokens ?? 0, this.settings.model?.context);
  }

  // ---------------------------------------------------------------------------------------------------- the frame

  listen() {
    addEventListener("hashchange", () => this.openFromAddress());
    addEventListener("keydown", (event) => this.key(event));
    this.news?.addEventListener("message", () => this.showList());
    for (const id of ["new-chat", "new-chat-top"]) byId(id).addEventListener("click", () => this.openNew());
    for (const id of ["open-settings", "model-chip"]) byId(id).addEventListener("click", () => this.openSettings());
  }

  key(event) {
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
      this.openNew();
    } else if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) {
      if (this.frame.hasDrawer) this.frame.closeSidebar();
      else if (this.documents.hasFocus) this.documents.close();
      else this.stopByKey();
    }
  }

  stopByKey() {
    if (!this.live.has(this.chat.id)) return;
    this.stop();
    this.composer.focus();
  }

  openSettings() {
    this.frame.closeSidebar();
    this.panel.open({ hasChat: this.chat.messages.length > 0 });
    this.loadModels();
  }

  pickSuggestion(text) {
    if (text === SUGGESTIONS.at(-1)) byId("file-input").click();
    this.composer.setText(text);
  }
}

function newChat() {
  return { id: newId(), title: "New chat", created: Date.now(), updated: Date.now(), isRenamed: false, messages: [], nodes: [], chosen: {} };
}

// An answer that was incomplete when the page was closed keeps the text that had arrived.
function closeOpenAnswers(chat) {
  for (const message of chat.nodes) {
    closeCalls(message);
    if (message.state !== "running") continue;
    message.state = "failed";
    message.isThinking = false;
    delete message.progress;
    message.error = { kind: "lost", title: "The page was closed before this answer was complete.", detail: "The text that had arrived was kept." };
  }
}

new App(await openStore()).start();
