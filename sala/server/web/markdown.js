// Markdown of models, safe by construction: text becomes a tree of plain objects, the tree becomes DOM nodes by
// textContent alone. HTML in the text is text. Links are http and https. Images become links: nothing is fetched.
// Every step is linear in the text or bounded, because a model may write anything.

import { copyButton, make } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_DEPTH = 12; // quotes and lists inside each other
const MAX_EMPHASIS = 20;
const MAX_INLINE = 20_000; // a longer paragraph is shown as it is
const MAX_MATH_LINES = 60;
const MAX_LINK = 1000;

// ---------------------------------------------------------------------------------------------------------- blocks

export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n").map(expandTabs);
  return parseLines(lines, 0);
}

const expandTabs = (line) => (line.includes("\t") ? line.replace(/^[ \t]+/, (blank) => blank.replaceAll("\t", "    ")) : line);

function parseLines(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at, depth);
    block.raw = lines.slice(at, block.end).join("\n");
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  for (const read of READERS) {
    const block = read(lines, at, depth);
    if (block) return block;
  }
  return readParagraph(lines, at);
}

const READERS = [readFence, readMath, readHeading, readRule, readQuote, readList, readTable];

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;
const unindent = (line, width) => line.slice(Math.min(indentOf(line), width));

function fenceOf(line) {
  const match = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
  if (!match || (match[1][0] === "`" && match[2].includes("`"))) return null;
  return { mark: match[1], info: match[2].trim(), indent: indentOf(line) };
}

function readFence(lines, at) {
  const fence = fenceOf(lines[at]);
  if (!fence) return null;
  const body = [];
  for (let next = at + 1; next < lines.length; next += 1) {
    if (closesFence(lines[next], fence.mark)) return code(fence, body, next + 1, true);
    body.push(unindent(lines[next], fence.indent));
  }
  return code(fence, body, lines.length, false);
}

function closesFence(line, mark) {
  const text = line.trim();
  return indentOf(line) < 4 && text.length >= mark.length && text === mark[0].repeat(text.length);
}

function code(fence, body, end, isClosed) {
  return { type: "code", language: fence.info.split(/\s/)[0], text: body.join("\n"), isClosed, end };
}

const MATH_ENDS = { "$$": "$$", "\\[": "\\]" };

function readMath(lines, at) {
  const first = lines[at].trim();
  const end = MATH_ENDS[first.slice(0, 2)];
  if (!end) return null;
  for (let next = at; next < Math.min(lines.length, at + MAX_MATH_LINES); next += 1) {
    const line = lines[next].trim();
    if (line.endsWith(end) && (next > at || line.length >= 4)) {
      return { type: "math", text: lines.slice(at, next + 1).join("\n").trim(), end: next + 1 };
    }
  }
  return null;
}

function readHeading(lines, at) {
  const match = /^ {0,3}(#{1,6})(?: |$)/.exec(lines[at]);
  if (!match) return null;
  const text = lines[at].slice(match[0].length).trim();
  const cut = text.length - /#*$/.exec(text)[0].length;
  const isClosed = cut < text.length && (cut === 0 || text[cut - 1] === " ");
  return { type: "heading", level: match[1].length, children: inline(isClosed ? text.slice(0, cut).trimEnd() : text), end: at + 1 };
}

function readRule(lines, at) {
  const text = lines[at].replaceAll(" ", "");
  const isRule = text.length >= 3 && indentOf(lines[at]) < 4 && "-*_".includes(text[0]) && text === text[0].repeat(text.length);
  return isRule ? { type: "rule", end: at + 1 } : null;
}

const isQuote = (line) => /^ {0,3}>/.test(line);

function readQuote(lines, at, depth) {
  if (!isQuote(lines[at]) || depth >= MAX_DEPTH) return null;
  const body = [];
  let next = at;
  for (; next < lines.length && (isQuote(lines[next]) || isLazy(lines, next)); next += 1) {
    body.push(lines[next].replace(/^ {0,3}> ?/, ""));
  }
  return { type: "quote", blocks: parseLines(body, depth + 1), end: next };
}

// A line that merely goes on with the paragraph before it.
const isLazy = (lines, at) => !isBlank(lines[at]) && !isBlank(lines[at - 1].replace(/^[ >]+/, "")) && !startsBlock(lines, at);

function markerOf(line) {
  const match = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/.exec(line);
  if (!match || (readRule([line], 0) && "-*".includes(match[2]))) return null;
  const space = match[3].length > 4 ? 1 : Math.max(1, match[3].length);
  return { kind: match[2].slice(-1), number: Number.parseInt(match[2], 10), indent: match[1].length, width: match[1].length + match[2].length + space };
}

function readList(lines, at, depth) {
  const first = markerOf(lines[at]);
  if (!first || depth >= MAX_DEPTH) return null;
  const items = [];
  let isLoose = false;
  let next = at;
  while (next < lines.length) {
    const marker = markerOf(lines[next]);
    if (!marker || marker.kind !== first.kind) break;
    const item = readItem(lines, next, marker);
    items.push({ ...taskOf(item.body), depth });
    next = item.end;
    const follows = next < lines.length && markerOf(lines[next])?.kind === first.kind;
    if (item.hasBlankInside || (item.hasBlankAfter && follows)) isLoose = true;
  }
  const parsed = items.map(({ body, task }) => ({ task, blocks: parseLines(body, depth + 1) }));
  return { type: "list", start: Number.isNaN(first.number) ? null : first.number, isLoose, items: parsed, end: next };
}

// The lines of one item. Models indent by two where three are due, so two are enough to belong to an item.
function readItem(lines, at, marker) {
  const body = [lines[at].slice(marker.width)];
  const enough = Math.min(marker.width, marker.indent + 2);
  let blanks = 0;
  let hasBlankInside = false;
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) {
      blanks += 1;
      continue;
    }
    const belongs = indentOf(line) >= enough || (blanks === 0 && !startsBlock(lines, next) && !markerOf(line));
    if (!belongs) break;
    if (blanks > 0) hasBlankInside ||= !markerOf(unindent(line, marker.width));
    body.push(...Array(blanks).fill(""), unindent(line, marker.width));
    blanks = 0;
  }
  return { body, end: next, hasBlankInside, hasBlankAfter: blanks > 0 };
}

function taskOf(body) {
  const match = /^\[([ xX])\] /.exec(body[0]);
  if (!match) return { body, task: null };
  return { body: [body[0].slice(4), ...body.slice(1)], task: match[1] === " " ? "open" : "done" };
}

function cellsOf(line) {
  const text = line.trim();
  const cells = [];
  let cell = "";
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else {
      cell += text[at];
    }
  }
  if (cell.trim() !== "") cells.push(cell.trim());
  return cells;
}

const ALIGNMENTS = { "::": "center", ":-": "left", "-:": "right", "--": null };

function startsTable(lines, at) {
  if (!lines[at].includes("|") || !(lines[at + 1] ?? "").includes("-")) return null;
  const rule = cellsOf(lines[at + 1]);
  const isRule = rule.length > 0 && rule.every((cell) => /^:?-+:?$/.test(cell));
  const head = isRule ? cellsOf(lines[at]) : [];
  if (!isRule || head.length !== rule.length) return null;
  return { head, alignments: rule.map((cell) => ALIGNMENTS[cell[0] + cell.at(-1)]) };
}

function readTable(lines, at) {
  const start = startsTable(lines, at);
  if (!start) return null;
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].includes("|"); next += 1) {
    const cells = cellsOf(lines[next]);
    rows.push(start.head.map((_, column) => inline(cells[column] ?? "")));
  }
  return { type: "table", head: start.head.map(inline), alignments: start.alignments, rows, end: next };
}

function startsBlock(lines, at) {
  const line = lines[at];
  if (fenceOf(line) || readHeading([line], 0) || readRule([line], 0) || isQuote(line) || startsTable(lines, at)) return true;
  const marker = markerOf(line);
  const isEmpty = marker && isBlank(line.slice(marker.width));
  return Boolean(marker && !isEmpty && (Number.isNaN(marker.number) || marker.number === 1)) || Boolean(readMath(lines, at));
}

function readParagraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !startsBlock(lines, next)) next += 1;
  const text = lines.slice(at, next).map((line) => line.trimStart()).join("\n");
  return { type: "paragraph", children: inline(text), end: next };
}

// ---------------------------------------------------------------------------------------------------------- inline

const PLAIN = /[^\\`*_~[\]!<&$\nh]+/y;
const ADDRESS = /https?:\/\/[\x21\x23-\x3b\x3d\x3f-\x5f\x61-\x7e]+/iy;
const PUNCTUATION = /[!-/:-@[-`{-~]/; // of ASCII only: beside Chinese text, emphasis ends where its author meant
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", apos: "'", nbsp: "\u00a0" };

export function inline(text) {
  if (text.length > MAX_INLINE) return [{ type: "text", text }];
  return new Inline(text.trimEnd()).run();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = [];
    this.brackets = []; // where links may have begun
    this.runs = backtickRuns(text);
    this.missing = new Set(); // ends that were looked for in vain
  }

  run() {
    while (this.at < this.text.length) this.step();
    return emphasize(this.nodes);
  }

  step() {
    PLAIN.lastIndex = this.at;
    const plain = PLAIN.exec(this.text);
    if (plain) {
      this.say(plain[0], plain[0].length);
      return;
    }
    const char = this.text[this.at];
    if (!STEPS[char]?.(this)) this.say(char, 1);
  }

  say(text, length) {
    const last = this.nodes.at(-1);
    if (last?.type === "text") last.text += text;
    else this.nodes.push({ type: "text", text });
    this.at += length;
    return true;
  }

  push(node, length) {
    this.nodes.push(node);
    this.at += length;
    return true;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      if (this.math(2, next === "(" ? "\\)" : "\\]")) return true;
    }
    if (next === "\n") return this.push({ type: "break" }, 2);
    return next !== undefined && PUNCTUATION.test(next) && this.say(next, 2);
  }

  math(width, end) {
    if (this.missing.has(end)) return false;
    const close = this.text.indexOf(end, this.at + width);
    if (close < 0) {
      this.missing.add(end);
      return false;
    }
    const length = close + end.length - this.at;
    return close > this.at + width && this.push({ type: "math", text: this.text.slice(this.at, this.at + length) }, length);
  }

  // One dollar opens math only if it hugs a formula: "$5 and $6" is money.
  dollar() {
    if (this.text[this.at + 1] === "$") return this.math(2, "$$");
    if (/[\s\d]/.test(this.text[this.at + 1] ?? " ")) return false;
    const close = this.text.indexOf("$", this.at + 1);
    const inside = close > 0 && close - this.at < 300 ? this.text.slice(this.at + 1, close) : "";
    if (inside === "" || inside.includes("\n") || /\s$/.test(inside) || /\d/.test(this.text[close + 1] ?? "")) return false;
    return this.push({ type: "math", text: `$${inside}$` }, inside.length + 2);
  }

  codeSpan() {
    const run = this.runs.get(this.at);
    const close = run?.close;
    if (!run) return false;
    if (close === undefined) return this.say("`".repeat(run.length), run.length);
    const inner = this.text.slice(this.at + run.length, close).replaceAll("\n", " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    return this.push({ type: "code-span", text: isPadded ? inner.slice(1, -1) : inner }, close + run.length - this.at);
  }

  delimiter() {
    const char = this.text[this.at];
    let end = this.at;
    while (this.text[end] === char) end += 1;
    const count = end - this.at;
    if (char === "~" && count !== 2) return this.say(char.repeat(count), count);
    return this.push({ type: "delimiter", char, count, ...flanking(char, this.text[this.at - 1] ?? " ", this.text[end] ?? " ") }, count);
  }

  lineBreak() {
    const last = this.nodes.at(-1);
    if (last?.type === "text") last.text = last.text.trimEnd();
    return this.push({ type: "break" }, 1);
  }

  openBracket(width) {
    this.brackets.push(this.nodes.length);
    return this.push({ type: "bracket", text: this.text.slice(this.at, this.at + width) }, width);
  }

  closeBracket() {
    const open = this.brackets.pop();
    if (open === undefined) return false;
    const target = targetOf(this.text, this.at + 1);
    if (!target) return this.push({ type: "text", text: "]" }, 1);
    const [bracket, ...inside] = this.nodes.splice(open);
    const children = emphasize(inside);
    const isInner = bracket.text === "![" && this.brackets.length > 0; // an image within a link leaves its words
    const href = isInner ? null : safeAddress(target.address);
    if (!isInner) this.brackets = [];
    const label = children.length > 0 ? children : [{ type: "text", text: target.address }];
    this.nodes.push(href ? { type: "link", href, children: label } : { type: "span", children: label });
    this.at = target.end;
    return true;
  }

  angle() {
    if (this.missing.has(">")) return false;
    const close = this.text.indexOf(">", this.at);
    if (close < 0) this.missing.add(">");
    if (close < 0 || close - this.at > MAX_LINK) return false;
    const inside = this.text.slice(this.at + 1, close);
    if (/^br\s*\/?$/i.test(inside)) return this.push({ type: "break" }, inside.length + 2); // common in cells of tables
    const href = /^https?:\/\/\S+$/i.test(inside) ? safeAddress(inside) : null;
    return href !== null && this.push({ type: "link", href, children: [{ type: "text", text: inside }] }, inside.length + 2);
  }

  entity() {
    const match = /&(amp|lt|gt|quot|#39|apos|nbsp);/y;
    match.lastIndex = this.at;
    const found = match.exec(this.text);
    return found !== null && this.say(ENTITIES[found[1]], found[0].length);
  }

  bareAddress() {
    ADDRESS.lastIndex = this.at;
    const found = /[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? " ") ? null : ADDRESS.exec(this.text);
    if (!found || found[0].length > MAX_LINK) return false;
    const address = trimAddress(found[0]);
    const href = safeAddress(address);
    return href !== null && this.push({ type: "link", href, children: [{ type: "text", text: address }] }, address.length);
  }
}

const STEPS = {
  "\\": (inline) => inline.escape(),
  "`": (inline) => inline.codeSpan(),
  "*": (inline) => inline.delimiter(),
  _: (inline) => inline.delimiter(),
  "~": (inline) => inline.delimiter(),
  "\n": (inline) => inline.lineBreak(),
  "[": (inline) => inline.openBracket(1),
  "!": (inline) => inline.text[inline.at + 1] === "[" && inline.openBracket(2),
  "]": (inline) => inline.closeBracket(),
  "<": (inline) => inline.angle(),
  "&": (inline) => inline.entity(),
  $: (inline) => inline.dollar(),
  h: (inline) => inline.bareAddress(),
};

// Each run of backticks and where the next run of the same length is: found in one pass from the end.
function backtickRuns(text) {
  const runs = new Map();
  const all = [...text.matchAll(/`+/g)].reverse();
  const nextOf = new Map();
  for (const { index, 0: ticks } of all) {
    runs.set(index, { length: ticks.length, close: nextOf.get(ticks.length) });
    nextOf.set(ticks.length, index);
  }
  return runs;
}

function flanking(char, before, after) {
  const [blankBefore, blankAfter] = [/\s/.test(before), /\s/.test(after)];
  const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !blankAfter && (!markAfter || blankBefore || markBefore);
  const right = !blankBefore && (!markBefore || blankAfter || markAfter);
  if (char !== "_") return { opens: left, closes: right };
  return { opens: left && (!right || markBefore), closes: right && (!left || markAfter) };
}

const EMPHASIS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

// Pairs the delimiters, innermost first; `floor` remembers where looking back is known to be in vain.
function emphasize(nodes) {
  const out = [];
  const openers = [];
  const floor = {};
  for (const node of nodes) {
    if (node.type !== "delimiter") {
      out.push(node);
      continue;
    }
    let left = node.count;
    while (node.closes && left > 0) {
      const found = findOpener(out, openers, node, left, floor);
      if (found < 0) break;
      left -= wrap(out, openers, found, node.char, left, floor);
    }
    if (left > 0 && node.opens) {
      openers.push(out.length);
      out.push({ ...node, count: left });
    } else if (left > 0) {
      out.push({ type: "text", text: node.char.repeat(left) });
    }
  }
  return out.map(asText);
}

function asText(node) {
  if (node.type === "bracket") return { type: "text", text: node.text };
  return node.type === "delimiter" ? { type: "text", text: node.char.repeat(node.count) } : node;
}

function findOpener(out, openers, closer, left, floor) {
  const key = closer.char + (closer.opens ? 1 : 0) + (left % 3);
  for (let index = openers.length - 1; index >= (floor[key] ?? 0); index -= 1) {
    const opener = out[openers[index]];
    if (opener.char !== closer.char) continue;
    const isOdd = (opener.closes || closer.opens) && (opener.count + left) % 3 === 0 && !(opener.count % 3 === 0 && left % 3 === 0);
    if (!isOdd || closer.char === "~") return index;
  }
  floor[key] = openers.length;
  return -1;
}

function wrap(out, openers, index, char, left, floor) {
  const at = openers[index];
  const opener = out[at];
  const used = opener.count >= 2 && left >= 2 ? 2 : 1;
  const children = out.splice(at + 1).map(asText);
  openers.length = index + 1;
  opener.count -= used;
  if (opener.count === 0) {
    out.pop();
    openers.pop();
  }
  for (const key of Object.keys(floor)) floor[key] = Math.min(floor[key], openers.length);
  const depth = 1 + children.reduce((most, child) => Math.max(most, child.depth ?? 0), 0);
  if (depth > MAX_EMPHASIS) out.push(...children);
  else out.push({ type: EMPHASIS[char][used - 1], children, depth });
  return used;
}

// "(address)" or "(address "title")" at `at`.
function targetOf(text, at) {
  if (text[at] !== "(") return null;
  let depth = 0;
  let end = at + 1;
  const limit = Math.min(text.length, at + MAX_LINK);
  for (; end < limit && !/\s/.test(text[end]); end += 1) {
    if (text[end] === "(") depth += 1;
    else if (text[end] === ")" && depth-- === 0) break;
  }
  const address = text.slice(at + 1, end).replace(/^<|>$/g, "");
  const title = /^(?:\s+(?:"[^"]{0,500}"|'[^']{0,500}'))?\s{0,5}\)/.exec(text.slice(end, end + 600));
  return title ? { address, end: end + title[0].length } : null;
}

function trimAddress(address) {
  let end = address.length;
  for (; end > 0; end -= 1) {
    const char = address[end - 1];
    if (char === ")" && count(address, "(", end) >= count(address, ")", end)) break;
    if (!".,;:!?)]}*_'\"|".includes(char)) break;
  }
  return address.slice(0, end);
}

function count(text, char, end) {
  let found = 0;
  for (let at = 0; at < end; at += 1) found += text[at] === char ? 1 : 0;
  return found;
}

export function safeAddress(address) {
  if (!/^https?:\/\//i.test(address)) return null;
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

// ------------------------------------------------------------------------------------------------------------- DOM

const TAGS = { strong: "strong", em: "em", del: "del", span: "span" };

function inlineNode(node) {
  if (node.type === "text") return document.createTextNode(node.text);
  if (node.type === "break") return make("br");
  if (node.type === "code-span") return make("code", { text: node.text });
  if (node.type === "math") return make("span", { className: "math", text: node.text });
  const children = node.children.map(inlineNode);
  if (node.type !== "link") return make(TAGS[node.type], {}, ...children);
  return make("a", { attributes: { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" } }, ...children);
}

const BLOCKS = {
  paragraph: (block) => make("p", {}, ...block.children.map(inlineNode)),
  heading: (block) => make(`h${Math.min(6, block.level + 2)}`, { className: `level-${block.level}` }, ...block.children.map(inlineNode)),
  rule: () => make("hr"),
  math: (block) => make("p", { className: "math", text: block.text }),
  quote: (block) => make("blockquote", {}, ...block.blocks.map(blockNode)),
  code: codeNode,
  list: listNode,
  table: tableNode,
};

const blockNode = (block) => BLOCKS[block.type](block);

function codeNode(block) {
  const pieces = highlight(block.text, block.language).map(([kind, text]) =>
    kind ? make("span", { className: `hl-${kind}`, text }) : document.createTextNode(text),
  );
  const head = make("figcaption", {}, make("span", { text: block.language || "text" }), copyButton(() => block.text));
  const attributes = { tabindex: "0", role: "region", "aria-label": `Code, ${block.language || "plain text"}` };
  return make("figure", { className: "code" }, head, make("pre", { attributes }, make("code", {}, ...pieces)));
}

function listNode(block) {
  const items = block.items.map((item) => itemNode(item, block.isLoose));
  const list = make(block.start === null ? "ul" : "ol", {}, ...items);
  if (block.start !== null && block.start !== 1) list.setAttribute("start", String(block.start));
  return list;
}

function itemNode(item, isLoose) {
  const children = item.blocks.flatMap((block) =>
    block.type === "paragraph" && !isLoose ? block.children.map(inlineNode) : [blockNode(block)],
  );
  if (item.task === null) return make("li", {}, ...children);
  const box = make("input", { attributes: { type: "checkbox", disabled: "", "aria-label": item.task } });
  box.checked = item.task === "done";
  return make("li", { className: "task" }, box, ...children);
}

function tableNode(block) {
  const row = (cells, tag) =>
    make("tr", {}, ...cells.map((cell, column) => {
      const align = block.alignments[column];
      return make(tag, { className: align ? `align-${align}` : "" }, ...cell.map(inlineNode));
    }));
  const head = make("thead", {}, row(block.head, "th"));
  const body = make("tbody", {}, ...block.rows.map((cells) => row(cells, "td")));
  const attributes = { tabindex: "0", role: "region", "aria-label": "Table" };
  return make("div", { className: "table", attributes }, make("table", {}, head, body));
}

// Shows a text that grows: blocks that have not changed keep their nodes.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.raws = [];
    this.text = null;
  }

  update(text) {
    if (text === this.text) return;
    this.text = text;
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && same < this.raws.length && blocks[same].raw === this.raws[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map(blockNode));
    this.raws = blocks.map((block) => block.raw);
  }
}
