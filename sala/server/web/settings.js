// What the user has chosen, and the panel to choose it in. The key is kept apart: for this tab, unless told to remember.

import { byId, make, setIcon } from "./dom.js";
import { formatCount } from "./format.js";

const PLACE = "sala.settings";
const KEY_PLACE = "sala.key";
const THEME_PLACE = "sala.theme";

const DEFAULTS = { model: "", system: "", temperature: null, topP: null, maxTokens: null, seed: null, thinking: "", budget: null };

const NUMBERS = {
  temperature: { id: "set-temperature", isWhole: false },
  topP: { id: "set-top-p", isWhole: false },
  maxTokens: { id: "set-max-tokens", isWhole: true },
  seed: { id: "set-seed", isWhole: true },
  budget: { id: "set-budget", isWhole: true },
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
    this.values = { ...DEFAULTS, ...readSaved() };
    this.key = read(session, KEY_PLACE) ?? read(local, KEY_PLACE) ?? "";
    this.isRemembered = read(local, KEY_PLACE) !== null;
    this.models = [];
  }

  get model() {
    return this.models.find((model) => model.id === this.values.model) ?? this.models.find((model) => model.isLoaded) ?? this.models[0] ?? null;
  }

  save() {
    write(local, PLACE, JSON.stringify(this.values));
  }

  saveKey(key, isRemembered) {
    this.key = key;
    this.isRemembered = isRemembered;
    write(session, KEY_PLACE, key);
    write(local, KEY_PLACE, isRemembered ? key : null);
  }

  // The fields of a request; what is not set is left to the server.
  requestFields() {
    const { temperature, topP, maxTokens, seed, thinking, budget } = this.values;
    const fields = { temperature, top_p: topP, max_tokens: maxTokens, seed, thinking_budget: budget };
    const given = Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null));
    if (thinking) given.chat_template_kwargs = { enable_thinking: thinking === "on" };
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

function readSaved() {
  try {
    const saved = JSON.parse(read(local, PLACE) ?? "{}");
    return Object.fromEntries(Object.entries(saved).filter(([name]) => name in DEFAULTS));
  } catch {
    return {};
  }
}

// Ties the panel to the settings; `onChange` hears of every change.
export class SettingsPanel {
  constructor(settings, onChange) {
    this.settings = settings;
    this.onChange = onChange;
    this.dialog = byId("settings");
    byId("settings-form").addEventListener("input", (event) => this.#take(event.target));
    byId("set-key").addEventListener("change", () => this.onChange("key"));
    byId("reset-settings").addEventListener("click", () => this.#reset());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside the panel
    });
    this.fill();
  }

  open({ focusKey = false } = {}) {
    byId("key-note").hidden = !focusKey;
    if (!this.dialog.open) this.dialog.showModal();
    if (focusKey) byId("set-key").focus();
  }

  fill() {
    const { values, key, isRemembered } = this.settings;
    byId("set-system").value = values.system;
    for (const [name, { id }] of Object.entries(NUMBERS)) byId(id).value = values[name] ?? "";
    for (const radio of document.querySelectorAll("input[name=thinking]")) radio.checked = radio.value === values.thinking;
    byId("set-key").value = key;
    byId("set-remember").checked = isRemembered;
    this.fillModels();
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
    const { values } = this.settings;
    const number = Object.entries(NUMBERS).find(([, { id }]) => id === field.id);
    if (number) {
      if (field.validity.valid) values[number[0]] = field.value === "" ? null : Number(field.value);
    } else if (field.id === "set-model") values.model = field.value;
    else if (field.id === "set-system") values.system = field.value;
    else if (field.name === "thinking") values.thinking = field.value;
    else this.settings.saveKey(byId("set-key").value.trim(), byId("set-remember").checked);
    this.settings.save();
    byId("model-note").textContent = noteOf(this.settings.model);
    this.onChange(field.id);
  }

  #reset() {
    this.settings.values = { ...DEFAULTS };
    this.settings.save();
    this.fill();
    this.onChange("reset");
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
