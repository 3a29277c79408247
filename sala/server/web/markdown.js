// Markdown of models to DOM nodes, block by block, with the vendored libraries: marked parses, DOMPurify sanitizes,
// KaTeX sets formulas, highlight.js colours code. HTML in the text stays text. Links are http and https only. Images
// become links: nothing is fetched from other hosts. Work is bounded, because a model may write anything.

import { copyButton, iconButton, make } from "./dom.js";

const { marked, DOMPurify, katex, hljs } = globalThis;

const MAX_DEPTH = 12; // nested quotes and lists
const MAX_EMPHASIS = 20; // nested emphasis and links
const MAX_INLINE = 8_000; // a longer paragraph is shown as plain text
const MAX_CELLS = 5_000; // a larger table is shown as plain text
const MAX_CODE = 40_000; // longer code is not coloured
const MAX_MATH = 4_000; // longer formulas are shown as source
const MAX_LINK = 1_000;

const escape = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

// ---------------------------------------------------------------------------------------------------------- parsing

// One dollar opens math only if it touches a formula: "$5 and $6" is money.
const INLINE_MATH = /^(?:\$\$([^$]+?)\$\$|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\]|\$(?![\s\d$])((?:[^$\n\\]|\\.){1,300}?)(?<!\s)\$(?!\d))/;
const BLOCK_MATH = /^ {0,3}(?:\$\$([^$]+?)\$\$|\\\[((?:(?!\\\[)[\s\S])+?)\\\]) *(?:\n|$)/m;

function mathToken(match, type) {
  const [raw, dollars, first, second, fourth] = match;
  const isDisplay = type === "mathBlock" || dollars !== undefined || second !== undefined;
  return { type, raw, text: (dollars ?? first ?? second ?? fourth).trim(), isDisplay };
}

const mathBlock = {
  name: "mathBlock",
  level: "block",
  start: (source) => BLOCK_MATH.exec(source.slice(0, MAX_MATH))?.index,
  tokenizer(source) {
    const match = /^ {0,3}(?:\$\$|\\\[)/.test(source) ? BLOCK_MATH.exec(source.slice(0, MAX_MATH)) : null;
    return match?.index === 0 ? mathToken([match[0], match[1] ?? match[2]], "mathBlock") : undefined;
  },
  renderer: (token) => mathHtml(token),
};

const mathInline = {
  name: "mathInline",
  level: "inline",
  start: (source) => /[$\\]/.exec(source.slice(0, MAX_MATH))?.index,
  tokenizer(source) {
    const match = "$\\".includes(source[0]) ? INLINE_MATH.exec(source.slice(0, MAX_MATH)) : null;
    return match ? mathToken(match, "mathInline") : undefined;
  },
  renderer: (token) => mathHtml(token),
};

// Footnotes: [^1] in the text, and "[^1]: words" at the beginning of a line, with further lines indented.
const NOTE_REF = /^\[\^([^\]\s^]{1,40})\](?!:)/;
const NOTE = /^ {0,3}\[\^([^\]\s^]{1,40})\]: *([^\n]*(?:\n(?: {2,}|\t)[^\n]+)*)(?:\n|$)/;

const footnoteRef = {
  name: "footnoteRef",
  level: "inline",
  start: (source) => source.indexOf("[^"),
  tokenizer(source) {
    const match = NOTE_REF.exec(source.slice(0, 60));
    return match ? { type: "footnoteRef", raw: match[0], text: match[1] } : undefined;
  },
  renderer: ({ text }) => `<span class="footnote-ref" data-note="${escape(text)}">${escape(text)}</span>`,
};

const footnote = {
  name: "footnote",
  level: "block",
  start(source) {
    const match = /\n {0,3}\[\^[^\]\s^]{1,40}\]:/.exec(source.slice(0, MAX_INLINE));
    return match ? match.index + 1 : undefined;
  },
  tokenizer(source) {
    const match = NOTE.exec(source.slice(0, MAX_INLINE));
    if (!match) return undefined;
    return { type: "footnote", raw: match[0], text: match[1], tokens: this.lexer.inlineTokens(match[2].replace(/\n\s+/g, "\n")) };
  },
  renderer({ text, tokens }) {
    const label = `<span class="footnote-label">${escape(text)}</span>`;
    return `<div class="footnote" data-note="${escape(text)}">${label}<span class="footnote-text">${this.parser.parseInline(tokens)}</span></div>`;
  },
};

const mathHtml = ({ type, text, raw, isDisplay }) => {
  const tag = type === "mathBlock" ? "p" : "span";
  const kind = isDisplay ? "math math-display" : "math";
  return `<${tag} class="${kind}" data-tex="${escape(text)}">${escape(raw.trim())}</${tag}>`;
};

const html = {
  heading({ tokens, depth }) {
    return `<h${Math.min(6, depth + 2)} class="level-${depth}">${this.parser.parseInline(tokens)}</h${Math.min(6, depth + 2)}>`;
  },
  code({ text, lang }) {
    return `<pre data-language="${escape((lang ?? "").split(/\s/)[0])}"><code>${escape(text)}</code></pre>`;
  },
  link({ href, tokens, text }) {
    const label = tokens ? this.parser.parseInline(tokens) : escape(text);
    const address = safeAddress(href);
    return address ? `<a href="${escape(address)}">${label}</a>` : `<span>${label}</span>`;
  },
  image({ href, text }) {
    const address = safeAddress(href);
    return address ? `<a href="${escape(address)}">${escape(text || href)}</a>` : `<span>${escape(text)}</span>`;
  },
  checkbox({ checked }) {
    return `<input type="checkbox" disabled${checked ? " checked" : ""}> `;
  },
  listitem(item) {
    return `<li${item.task ? ' class="task"' : ""}>${this.parser.parse(item.tokens, item.loose)}</li>`;
  },
  table({ header, rows }) {
    const row = (cells) => `<tr>${cells.map((cell) => this.tablecell(cell)).join("")}</tr>`;
    return `<div class="table"><table><thead>${row(header)}</thead><tbody>${rows.map(row).join("")}</tbody></table></div>`;
  },
  tablecell({ tokens, header, align }) {
    const tag = header ? "th" : "td";
    return `<${tag}${align ? ` class="align-${align}"` : ""}>${this.parser.parseInline(tokens)}</${tag}>`;
  },
};

export function safeAddress(address) {
  if (address.length > MAX_LINK || !/^https?:\/\//i.test(address)) return null;
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

const engine = new marked.Marked({ gfm: true, breaks: true, renderer: html, extensions: [mathBlock, mathInline, footnote, footnoteRef] });

// Beside Chinese text, "**重要：**内容" is emphasis: only ASCII punctuation counts as punctuation around delimiters.
const asciiRules = (rules) =>
  Object.fromEntries(
    ["emStrongLDelim", "emStrongRDelimAst", "emStrongRDelimUnd", "delLDelim", "delRDelim", "punctuation"].map((name) => {
      const { source, flags } = rules[name];
      return [name, new RegExp(source.replaceAll(String.raw`\p{P}\p{S}`, "!-\\/:-@\\[-`{-~"), flags)];
    }),
  );

// HTML is text, except for line breaks, which are common in cells of tables.
class Tokenizer extends marked.Tokenizer {
  html() {}

  tag(source) {
    const raw = /^<br\s*\/?>/i.exec(source)?.[0];
    return raw ? { type: "br", raw } : undefined;
  }
}

// marked's lexer with bounds: what is too long or too deeply nested stays text.
class BoundedLexer extends marked.Lexer {
  constructor(links) {
    super({ ...engine.defaults, tokenizer: new Tokenizer() });
    const { rules } = this.tokenizer;
    this.tokenizer.rules = { ...rules, inline: { ...rules.inline, ...asciiRules(rules.inline) } };
    Object.assign(this.tokens.links, links);
    this.depth = 0;
    this.emphasis = 0;
  }

  blockTokens(source, tokens = [], isClipped = false) {
    if (this.depth >= MAX_DEPTH) {
      tokens.push({ type: "text", raw: source, text: source, tokens: [plain(source)] });
      return tokens;
    }
    this.depth += 1;
    try {
      return super.blockTokens(source, tokens, isClipped);
    } finally {
      this.depth -= 1;
    }
  }

  inlineTokens(source, tokens = []) {
    if (source.length > MAX_INLINE || this.emphasis >= MAX_EMPHASIS) {
      tokens.push(plain(source));
      return tokens;
    }
    this.emphasis += 1;
    try {
      return super.inlineTokens(source, tokens);
    } finally {
      this.emphasis -= 1;
    }
  }
}

const plain = (source) => ({ type: "text", raw: source, text: source, escaped: false });

// Models indent the children of "1. " by two spaces where three are due: indent them as CommonMark wants.
function indentChildren(text) {
  let fence = null; // the mark that opened a fenced block
  let width = 0; // of the marker of the current ordered item; 0: outside of one
  let shift = 0; // spaces that its children lack; null until the first of them
  return text
    .split("\n")
    .map((line) => {
      const [, { length: indent }, rest] = /^( *)(.*)$/.exec(line);
      const mark = /^(?:`{3,}|~{3,})/.exec(rest)?.[0];
      const isInside = fence !== null;
      if (mark && !isInside) fence = mark;
      else if (mark?.startsWith(fence)) fence = null;
      if (rest === "") return line;
      if (!isInside) {
        const item = /^\d{1,9}[.)] /.exec(line);
        if (item) [width, shift] = [item[0].length, null];
        if (item) return line;
        if (indent < 2) [width, shift] = [0, 0];
        shift ??= indent < width && /^(?:[-*+]|\d{1,9}[.)]) /.test(rest) ? width - indent : 0;
      }
      return indent >= 2 ? " ".repeat(shift ?? 0) + line : line;
    })
    .join("\n");
}

export const prepare = (text) => indentChildren(text.replace(/\r\n?/g, "\n"));

export function parse(source, links = {}) {
  const lexer = new BoundedLexer(links);
  return lexer.lex(source);
}

export function toHtml(token) {
  const isHuge = token.type === "table" && (token.rows.length + 1) * token.header.length > MAX_CELLS;
  return isHuge ? `<p>${escape(token.raw)}</p>` : engine.parser([token]);
}

// ------------------------------------------------------------------------------------------------------------- DOM

const TEXT_ATTRIBUTES = ["checked", "class", "data-language", "data-note", "data-tex", "disabled", "start", "type"];
const POLICY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", ...TEXT_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: TEXT_ATTRIBUTES,
  ALLOWED_URI_REGEXP: /^https?:\/\//i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function blockNodes(token) {
  const fragment = DOMPurify.sanitize(toHtml(token), POLICY);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "open");
  for (const table of fragment.querySelectorAll(".table")) makeRegion(table, "Table");
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeNode(pre.textContent, pre.dataset.language));
  for (const math of fragment.querySelectorAll(".math")) setFormula(math);
  for (const note of fragment.querySelectorAll(".footnote-ref")) note.replaceWith(noteButton(note.dataset.note ?? ""));
  for (const note of fragment.querySelectorAll("div.footnote")) note.append(iconButton("up", `Back to where note ${note.dataset.note} stands`, (event) => goToNote(event, ".footnote-ref"), "small"));
  return [...fragment.childNodes].filter((node) => node.nodeType === Node.ELEMENT_NODE || node.textContent.trim() !== "");
}

function noteButton(label) {
  const attributes = { type: "button", "data-note": label, "aria-label": `Note ${label}` };
  return make("button", { className: "footnote-ref", text: label, attributes, on: { click: (event) => goToNote(event, ".footnote") } });
}

// From the mark of a note to its text in the same answer, or back.
function goToNote({ currentTarget }, selector) {
  const { note } = currentTarget.closest("[data-note]").dataset;
  const target = [...currentTarget.closest(".prose").querySelectorAll(selector)].find((one) => one.dataset.note === note);
  const focused = target?.matches("button") ? target : target?.querySelector("button");
  target?.scrollIntoView({ block: "center" });
  focused?.focus({ preventScroll: true });
}

function makeRegion(element, label) {
  for (const [name, value] of Object.entries({ tabindex: "0", role: "region", "aria-label": label })) element.setAttribute(name, value);
}

function codeNode(text, language) {
  const code = make("code");
  const isKnown = language && text.length <= MAX_CODE && hljs.getLanguage(language);
  if (isKnown) code.append(DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, CODE_POLICY));
  else code.textContent = text;
  const head = make("figcaption", {}, make("span", { text: language || "text" }), copyButton(() => text));
  const pre = make("pre", {}, code);
  makeRegion(pre, `Code, ${language || "plain text"}`);
  return make("figure", { className: "code" }, head, pre);
}

const CODE_POLICY = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

// KaTeX builds nodes and sets styles through the DOM, so that the content security policy needs no exception.
function setFormula(node) {
  const { tex } = node.dataset;
  const source = node.textContent;
  try {
    if (tex === undefined || tex.length > MAX_MATH) throw new RangeError("removed by the sanitizer, or too long");
    katex.render(tex, node, {
      displayMode: node.classList.contains("math-display"),
      output: "html", // the MathML of some formulas carries style attributes, which the policy blocks
      strict: "ignore",
      trust: false,
      maxSize: 20,
      maxExpand: 300,
    });
    node.setAttribute("role", "math");
    node.setAttribute("aria-label", tex);
  } catch {
    node.replaceChildren(source);
    node.classList.add("is-source");
  }
}

// Shows a text that grows: the last two blocks are parsed anew, and blocks that did not change keep their nodes.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = null;
    this.blocks = []; // {raw, nodes}
    this.links = {};
  }

  update(text) {
    if (text === this.text) return;
    this.text = text;
    const source = prepare(text);
    const kept = this.#keep(source);
    const start = kept.reduce((sum, block) => sum + block.raw.length, 0);
    const tokens = parse(source.slice(start), start ? this.links : {});
    this.links = { ...tokens.links };
    const old = this.blocks.slice(kept.length);
    let same = 0;
    while (same < tokens.length && same < old.length && tokens[same].raw === old[same].raw) same += 1;
    for (const block of old.slice(same)) for (const node of block.nodes) node.remove();
    const fresh = tokens.slice(same).map((token) => ({ raw: token.raw, isBlank: token.type === "space", nodes: blockNodes(token) }));
    this.root.append(...fresh.flatMap((block) => block.nodes));
    this.blocks = [...kept, ...old.slice(0, same), ...fresh];
  }

  // The blocks that more text cannot change.
  #keep(source) {
    let count = this.blocks.length;
    for (let left = 2; count > 0 && left > 0; count -= 1) left -= this.blocks[count - 1].isBlank ? 0 : 1;
    const kept = this.blocks.slice(0, count);
    return source.startsWith(kept.map((block) => block.raw).join("")) ? kept : [];
  }
}
