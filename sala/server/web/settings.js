// What the user has chosen, for new conversations and for each one, and the panel to choose it in. The key is kept apart:
// for this tab, unless told to remember.

import { byId, make, setIcon } from "./dom.js";
import { formatCount } from "./format.js";

const PLACE = "sala.settings";
const KEY_PLACE = "sala.key";
const THEME_PLACE = "sala.theme";

const KEEP_PLACE = "sala.keep";
const PRESETS_PLACE = "sala.presets";

// Numbers that a request may have: the field of the request, the field of the page.
const NUMBERS = {
  temperature: { field: "temperature", id: "set-temperature" },
  topP: { field: "top_p", id: "set-top-p" },
  topK: { field: "top_k", id: "set-top-k" },
  minP: { field: "min_p", id: "set-min-p" },
  presence: { field: "presence_penalty", id: "set-presence" },
  frequency: { field: "frequency_penalty", id: "set-frequency" },
  repetition: { field: "repetition_penalty", id: "set-repetition" },
  maxTokens: { field: "max_tokens", id: "set-max-tokens" },
  seed: { field: "seed", id: "set-seed" },
  budget: { field: "thinking_budget", id: "set-budget" },
};
const NO_NUMBERS = Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, null]));
const DEFAULTS = { model: "", system: "", ...NO_NUMBERS, thinking: "", tools: true, sources: true };
const PRESETS = {
  Exact: { ...NO_NUMBERS, temperature: 0 },
  "Close to the text": { ...NO_NUMBERS, temperature: 0.3, topP: 0.9 },
  Inventive: { ...NO_NUMBERS, temperature: 1, minP: 0.05 },
};

function read(storage, place) {
  try {
    return storage().getItem(place);
  } catch {
    return null;
  }
}

function write(storage, place, value) {
  try {
    if (value === null || value === "") storage().removeItem(place);
    else storage().setItem(place, value);
  } catch {
    // storage is switched off or full: the choice holds until the page is left
  }
}

const local = () => localStorage;
const session = () => sessionStorage;

export class Settings {
  constructor() {
    this.defaults = { ...DEFAULTS, ...known(readJson(PLACE)) };
    this.own = null; // of the conversation that is shown
    this.presets = Object.fromEntries(Object.entries(readJson(PRESETS_PLACE)).map(([name, values]) => [name, known(values)]));
    this.keepsDocuments = read(local, KEEP_PLACE) === "yes";
    this.key = read(session, KEY_PLACE) ?? read(local, KEY_PLACE) ?? "";
    this.isRemembered = read(local, KEY_PLACE) !== null;
    this.models = [];
  }

  get values() {
    return this.own ?? this.defaults;
  }

  get model() {
    return this.models.find((model) => model.id === this.values.model) ?? this.models.find((model) => model.isLoaded) ?? this.models[0] ?? null;
  }

  save() {
    write(local, PLACE, JSON.stringify(this.defaults));
    write(local, PRESETS_PLACE, Object.keys(this.presets).length ? JSON.stringify(this.presets) : null);
  }

  // The settings that a conversation is given; what an older or imported one lacks is the default.
  forChat(chat) {
    return chat.settings ? { ...DEFAULTS, ...known(chat.settings) } : null;
  }

  keepDocuments(isKept) {
    this.keepsDocuments = isKept;
    write(local, KEEP_PLACE, isKept ? "yes" : null);
  }

  saveKey(key, isRemembered) {
    this.key = key;
    this.isRemembered = isRemembered;
    write(session, KEY_PLACE, key);
    write(local, KEY_PLACE, isRemembered ? key : null);
  }

  // The fields of a request; what is not set is left to the server.
  requestFields() {
    const { values } = this;
    const given = {};
    for (const [name, { field }] of Object.entries(NUMBERS)) if (values[name] !== null) given[field] = values[name];
    if (values.thinking) given.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
    if (this.modelId) given.model = this.modelId;
    return given;
  }

  // What to ask for: the chosen model, or the one that is shown as loaded; else the server takes its own.
  get modelId() {
    const { model } = this;
    if (!model) return this.values.model || undefined;
    return model.isLoaded || model.id === this.values.model ? model.id : undefined;
  }
}

function readJson(place) {
  try {
    return JSON.parse(read(local, place) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

// Of an object the settings that we know, if they are of the right kind.
function known(values) {
  const isRight = (name, value) => (name in NUMBERS ? value === null || Number.isFinite(value) : typeof value === typeof DEFAULTS[name]);
  return Object.fromEntries(Object.entries(values ?? {}).filter(([name, value]) => name in DEFAULTS && isRight(name, value)));
}

// Ties the panel to the settings; `onChange` hears of every change. While a conversation is shown, its own are changed.
export class SettingsPanel {
  constructor(settings, onChange) {
    this.settings = settings;
    this.onChange = onChange;
    this.dialog = byId("settings");
    this.scope = "new";
    byId("settings-form").addEventListener("input", (event) => this.#take(event.target));
    byId("set-key").addEventListener("change", () => this.onChange("key"));
    byId("reset-settings").addEventListener("click", () => this.#apply(DEFAULTS));
    byId("preset").addEventListener("change", (event) => this.#choosePreset(event.target.value));
    byId("preset-save").addEventListener("click", () => this.#savePreset());
    byId("preset-delete").addEventListener("click", () => this.#deletePreset());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside the panel
    });
    this.fill();
  }

  // `hasChat`: whether a conversation is shown, which then has settings of its own.
  open({ focusKey = false, hasChat = false } = {}) {
    byId("key-note").hidden = !focusKey;
    byId("scope").hidden = !hasChat;
    this.scope = hasChat ? "chat" : "new";
    this.fill();
    if (!this.dialog.open) this.dialog.showModal();
    if (focusKey) byId("set-key").focus();
  }

  get #values() {
    return this.scope === "chat" ? this.settings.values : this.settings.defaults;
  }

  fill() {
    const { key, isRemembered } = this.settings;
    const values = this.#values;
    for (const radio of document.querySelectorAll("input[name=scope]")) radio.checked = radio.value === this.scope;
    byId("set-system").value = values.system;
    for (const [name, { id }] of Object.entries(NUMBERS)) byId(id).value = values[name] ?? "";
    for (const radio of document.querySelectorAll("input[name=thinking]")) radio.checked = radio.value === values.thinking;
    byId("set-tools").checked = values.tools;
    byId("set-sources").checked = values.sources;
    byId("set-key").value = key;
    byId("set-remember").checked = isRemembered;
    this.fillModels();
    this.#fillPresets("");
  }

  showTools(tools) {
    byId("tools-field").hidden = tools.length === 0;
    byId("tools-note").textContent = tools.map((tool) => tool.function.name).join(", ");
  }

  fillModels() {
    const { models, model } = this.settings;
    const options = models.map((one) => make("option", { text: one.isLoaded ? `${one.id} — loaded` : one.id, attributes: { value: one.id } }));
    const select = byId("set-model");
    select.replaceChildren(...(options.length > 0 ? options : [make("option", { text: "No model yet", attributes: { value: "" } })]));
    select.value = model?.id ?? "";
    select.disabled = options.length === 0;
    byId("model-note").textContent = noteOf(model);
  }

  #take(field) {
    if (field.name === "scope") {
      this.scope = field.value;
      this.fill();
      return;
    }
    if (field.id.startsWith("preset")) return;
    if (field.id === "set-key" || field.id === "set-remember") this.settings.saveKey(byId("set-key").value.trim(), byId("set-remember").checked);
    else this.#change(field);
    this.#changed(field.id);
  }

  #change(field) {
    const values = this.#own();
    const number = Object.entries(NUMBERS).find(([, { id }]) => id === field.id);
    if (number) {
      if (field.validity.valid) values[number[0]] = field.value === "" ? null : Number(field.value);
    } else if (field.id === "set-model") values.model = field.value;
    else if (field.id === "set-system") values.system = field.value;
    else if (field.name === "thinking") values.thinking = field.value;
    else if (field.id === "set-tools") values.tools = field.checked;
    else if (field.id === "set-sources") values.sources = field.checked;
  }

  // What a change is made to: a conversation of an older version gets settings of its own first.
  #own() {
    if (this.scope === "chat") this.settings.own ??= { ...this.settings.defaults };
    return this.#values;
  }

  #changed(what) {
    this.settings.save();
    byId("model-note").textContent = noteOf(this.settings.model);
    this.onChange(what);
  }

  #apply(values) {
    Object.assign(this.#own(), values);
    this.fill();
    this.#changed("preset");
  }

  // ------------------------------------------------------------------------------------------------------ presets

  #fillPresets(chosen) {
    const option = (name) => make("option", { text: name, attributes: { value: name } });
    const group = (label, names) => make("optgroup", { attributes: { label } }, ...names.map(option));
    const own = Object.keys(this.settings.presets);
    byId("preset").replaceChildren(make("option", { text: "Choose a preset", attributes: { value: "" } }), group("Built in", Object.keys(PRESETS)), ...(own.length ? [group("Yours", own)] : []));
    byId("preset").value = chosen;
    byId("preset-delete").disabled = !own.includes(chosen);
  }

  #choosePreset(name) {
    const values = this.settings.presets[name] ?? PRESETS[name];
    if (values) this.#apply(values);
    this.#fillPresets(name);
  }

  #savePreset() {
    const name = byId("preset-name").value.trim();
    if (!name || Object.hasOwn(PRESETS, name)) {
      byId("preset-name").focus();
      return;
    }
    const { model, ...values } = this.#values;
    this.settings.presets = { ...this.settings.presets, [name]: values };
    this.settings.save();
    byId("preset-name").value = "";
    this.#fillPresets(name);
  }

  #deletePreset() {
    const { [byId("preset").value]: deleted, ...others } = this.settings.presets;
    this.settings.presets = others;
    this.settings.save();
    this.#fillPresets("");
  }
}

function noteOf(model) {
  if (!model) return "Models appear here when the server answers.";
  const trained = model.trained ? ` (trained on up to ${formatCount(model.trained)})` : "";
  const context = model.context ? `Reads up to ${formatCount(model.context)} tokens${trained}. ` : "";
  return model.isLoaded ? `${context}It is loaded.` : `${context}It is loaded when it is first asked.`;
}

const THEMES = { auto: "Theme: automatic", light: "Theme: light", dark: "Theme: dark" };
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

export function setUpTheme(button) {
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-label", THEMES[theme]);
    button.title = THEMES[theme];
    setIcon(button, THEME_ICONS[theme]);
  };
  let theme = read(local, THEME_PLACE) ?? "auto";
  if (!(theme in THEMES)) theme = "auto";
  show(theme);
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    write(local, THEME_PLACE, theme === "auto" ? null : theme);
    show(theme);
  });
}
