// Colours for code: comments, strings, numbers and the commonest words. Not a parser, only a help for the eye.

const MAX_LENGTH = 40_000;

const WORDS = {
  python: "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield True False None self",
  js: "as async await break case catch class const continue default delete do else enum export extends false finally for from function get if implements import in instanceof interface let new null of private public return set static super switch this throw true try type typeof undefined var void while yield",
  c: "auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false final float fn for func go goto if impl import inline int interface let long loop map match mod mut namespace new nil null nullptr override package private protected pub public return self short signed sizeof static string struct super switch template this throw trait true try type typedef typename uint union unsigned use using var virtual void volatile where while",
  shell: "case do done elif else esac export fi for function if in local return set then until while echo cd sudo",
  sql: "add all alter and as asc between by case create delete desc distinct drop else end exists foreign from full group having in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with",
  data: "true false null yes no on off",
};

const HASH = String.raw`#[^\n]*`;
const SLASH = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const QUOTES = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;

const FAMILIES = {
  python: { comment: HASH, string: String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|${QUOTES}` },
  js: { comment: SLASH, string: String.raw`${QUOTES}|\`(?:\\[\s\S]|[^\`\\])*(?:\`|$)` },
  c: { comment: SLASH, string: QUOTES },
  shell: { comment: String.raw`(?<![\w$])#[^\n]*`, string: QUOTES },
  sql: { comment: String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, string: QUOTES, isCaseless: true },
  data: { comment: HASH, string: QUOTES },
};

const LANGUAGES = {
  python: "python", py: "python", python3: "python", ruby: "python", rb: "python",
  js: "js", javascript: "js", jsx: "js", ts: "js", typescript: "js", tsx: "js", mjs: "js",
  c: "c", cpp: "c", "c++": "c", h: "c", hpp: "c", java: "c", kotlin: "c", cs: "c", csharp: "c", go: "c", rust: "c", rs: "c", swift: "c", php: "c", scala: "c", cuda: "c",
  sh: "shell", bash: "shell", zsh: "shell", shell: "shell", console: "shell",
  sql: "sql",
  json: "data", yaml: "data", yml: "data", toml: "data", ini: "data",
};

const compiled = new Map();

function compile(name) {
  const family = FAMILIES[name];
  const source = `(?<comment>${family.comment})|(?<string>${family.string})|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`;
  const words = new Set(WORDS[name].split(" "));
  return { pattern: new RegExp(source, "g"), words, isCaseless: family.isCaseless ?? false };
}

// Pieces of the text with a kind (or null) each; together they are the text.
export function highlight(text, language) {
  const name = LANGUAGES[language.toLowerCase()];
  if (!name || text.length > MAX_LENGTH) return [[null, text]];
  if (!compiled.has(name)) compiled.set(name, compile(name));
  const { pattern, words, isCaseless } = compiled.get(name);
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    const kind = kindOf(match.groups, words, isCaseless, text[match.index + match[0].length]);
    if (!kind) continue;
    if (match.index > at) pieces.push([null, text.slice(at, match.index)]);
    pieces.push([kind, match[0]]);
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push([null, text.slice(at)]);
  return pieces;
}

function kindOf(groups, words, isCaseless, after) {
  if (groups.comment !== undefined) return "comment";
  if (groups.string !== undefined) return "string";
  if (groups.number !== undefined) return "number";
  if (words.has(isCaseless ? groups.word.toLowerCase() : groups.word)) return "word";
  return after === "(" ? "call" : null;
}
