// Shows /openapi.json: operations by tag, their parameters and responses, and a curl command for each.
// Everything is inserted as text (textContent): nothing of the schema is parsed as HTML.
"use strict";

const METHODS = ["get", "post", "put", "patch", "delete"];
const MAX_DEPTH = 6;
const find = (id) => document.getElementById(id);
let schema = {};
let hasKey = false;

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Text with `code` spans and blank lines between paragraphs.
function prose(text) {
  return (text || "").split(/\n\s*\n/).filter(Boolean).map((paragraph) =>
    make("p", {}, ...paragraph.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part))));
}

function resolve(node) {
  for (let steps = 0; node && node.$ref && steps < 20; steps++) {
    const target = node.$ref.replace(/^#\//, "").split("/").reduce((at, key) => at && at[key.replace(/~1/g, "/").replace(/~0/g, "~")], schema);
    const { $ref, ...rest } = node;
    node = { ...target, ...rest };
  }
  return node || {};
}

function variants(node) {
  return (node.anyOf || node.oneOf || []).map(resolve);
}

function typeName(node) {
  node = resolve(node);
  const several = variants(node);
  if (several.length) return [...new Set(several.map(typeName))].join(" | ");
  if (node.allOf && node.allOf.length === 1) return typeName(node.allOf[0]);
  if (node.const !== undefined) return JSON.stringify(node.const);
  if (node.enum) return node.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (node.type === "array") return `[${node.items ? typeName(node.items) : "any"}]`;
  if (node.type === "object" || node.properties) return node.title && node.properties ? node.title : "object";
  return Array.isArray(node.type) ? node.type.join(" | ") : node.type || "any";
}

function bounds(node) {
  const signs = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "length ≥", maxLength: "length ≤", minItems: "items ≥", maxItems: "items ≤" };
  return [node, ...variants(node)].flatMap((one) => Object.entries(signs).filter(([key]) => one[key] !== undefined).map(([key, sign]) => `${sign} ${one[key]}`));
}

// The objects in a type, including those in lists and alternatives.
function objectsIn(node, depth = 0) {
  node = resolve(node);
  if (depth > MAX_DEPTH) return [];
  if (node.properties) return [node];
  return [...variants(node), ...(node.allOf || []), ...(node.items ? [node.items] : [])].flatMap((one) => objectsIn(one, depth + 1));
}

function describeField(name, node, isNeeded, depth) {
  node = resolve(node);
  const head = make("dt", {}, name, " ", make("span", { class: "type" }, typeName(node)), isNeeded ? make("span", { class: "needed" }, " required") : "");
  const facts = bounds(node);
  if (node.default !== undefined && node.default !== null) facts.push(`default ${JSON.stringify(node.default)}`);
  const body = make("dd", {}, ...prose(node.description), facts.length ? make("p", {}, facts.join(", ")) : "");
  if (depth < MAX_DEPTH) {
    for (const inner of objectsIn(node)) body.append(make("details", {}, make("summary", {}, inner.title || "fields"), listFields(inner, depth + 1)));
  }
  return [head, body];
}

function listFields(node, depth = 0) {
  const needed = new Set(node.required || []);
  return make("dl", {}, ...Object.entries(node.properties || {}).flatMap(([name, child]) => describeField(name, child, needed.has(name), depth)));
}

// A minimal valid value: required fields, with examples and defaults where there are any.
function example(node, depth = 0) {
  node = resolve(node);
  if (node.example !== undefined) return node.example;
  if (node.examples && node.examples.length) return node.examples[0];
  if (node.default !== undefined && node.default !== null) return node.default;
  if (node.const !== undefined) return node.const;
  if (node.enum) return node.enum[0];
  const several = [...variants(node), ...(node.allOf || []).map(resolve)];
  if (several.length) return example(several[0], depth + 1);
  if (node.properties && depth < MAX_DEPTH) {
    return Object.fromEntries((node.required || []).filter((name) => node.properties[name]).map((name) => [name, example(node.properties[name], depth + 1)]));
  }
  if (node.type === "array") return node.items && depth < MAX_DEPTH ? [example(node.items, depth + 1)] : [];
  return { string: "…", integer: 1, number: 1, boolean: false, object: {} }[node.type] ?? null;
}

function curl(method, path, operation) {
  const lines = [`curl ${location.origin}${path}`];
  if (method !== "get") lines[0] += ` -X ${method.toUpperCase()}`;
  if (hasKey && !path.startsWith("/health")) lines.push(`-H "Authorization: Bearer $SALA_API_KEY"`);
  const body = bodySchema(operation);
  if (body) {
    lines.push(`-H "Content-Type: application/json"`);
    lines.push(`-d '${JSON.stringify(example(body), null, 2).replace(/'/g, "'\\''")}'`);
  }
  return lines.join(" \\\n  ");
}

function bodySchema(operation) {
  const content = resolve(operation.requestBody || {}).content || {};
  return content["application/json"] && content["application/json"].schema;
}

function codeBlock(text) {
  const button = make("button", { class: "copy", type: "button" }, "copy");
  button.addEventListener("click", () => navigator.clipboard && navigator.clipboard.writeText(text).then(() => { button.textContent = "copied"; }));
  return make("pre", {}, button, make("code", {}, text));
}

function showParameters(operation) {
  const parameters = (operation.parameters || []).map(resolve);
  if (!parameters.length) return [];
  const rows = parameters.flatMap((one) => describeField(`${one.name} (${one.in})`, { ...resolve(one.schema || {}), description: one.description }, one.required, 0));
  return [make("h3", {}, "Parameters"), make("dl", {}, ...rows)];
}

function showBody(operation) {
  const body = bodySchema(operation);
  if (!body) return [];
  return [make("h3", {}, `Body: ${typeName(body)}`), ...prose(resolve(body).description), ...objectsIn(body).map((node) => listFields(node))];
}

function showResponses(operation) {
  const rows = Object.entries(operation.responses || {}).flatMap(([status, response]) => {
    response = resolve(response);
    const content = Object.entries(response.content || {});
    const kinds = content.map(([kind, one]) => `${kind}${one.schema ? ` ${typeName(one.schema)}` : ""}`).join(", ");
    const body = make("dd", {}, ...prose(response.description));
    if (status.startsWith("2")) {
      for (const inner of content.flatMap(([, one]) => objectsIn(one.schema || {}))) body.append(make("details", {}, make("summary", {}, inner.title || "fields"), listFields(inner, 1)));
    }
    return [make("dt", {}, status, " ", make("span", { class: "type" }, kinds)), body];
  });
  return [make("h3", {}, "Responses"), make("dl", {}, ...rows)];
}

function showOperation(method, path, operation) {
  const summary = make("summary", {}, make("span", { class: `method ${method}` }, method.toUpperCase()), make("span", { class: "path" }, path), make("span", { class: "soft" }, operation.summary || ""));
  const box = make("details", { class: "operation", id: `${method}${path}` }, summary);
  box.dataset.words = `${method} ${path} ${operation.summary || ""} ${operation.description || ""}`.toLowerCase();
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    box.append(make("div", {}, ...prose(operation.description), make("h3", {}, "Example"), codeBlock(curl(method, path, operation)),
      ...showParameters(operation), ...showBody(operation), ...showResponses(operation)));
  });
  return box;
}

function showAll() {
  const groups = new Map();
  for (const [path, item] of Object.entries(schema.paths || {})) {
    for (const method of METHODS.filter((name) => item[name])) {
      const tag = (item[method].tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(showOperation(method, path, item[method]));
    }
  }
  const info = schema.info || {};
  find("title").textContent = `${info.title || "sala"} ${info.version || ""}`;
  find("about").replaceChildren(...prose(info.description).flatMap((paragraph) => [...paragraph.childNodes]));
  find("operations").replaceChildren(...[...groups].map(([tag, boxes]) => make("section", {}, make("h2", {}, tag), ...boxes)));
  find("search").hidden = false;
  openLinked();
}

// The fragment of the URL names the operation to show.
function openLinked() {
  const box = find(decodeURIComponent(location.hash.slice(1)));
  if (!box || !box.classList.contains("operation")) return;
  box.open = true;
  box.scrollIntoView();
}

function search() {
  const words = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of find("operations").children) {
    const boxes = [...section.querySelectorAll("details.operation")];
    for (const box of boxes) box.hidden = !words.every((word) => box.dataset.words.includes(word));
    section.hidden = boxes.every((box) => box.hidden);
  }
}

async function load(key) {
  const message = find("message");
  try {
    const answer = await fetch("/openapi.json", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
    hasKey = hasKey || answer.status === 401;
    find("ask").hidden = answer.status !== 401;
    message.textContent = answer.ok ? "" : answer.status === 401 ? (key ? "That key is wrong." : "") : `The server answered ${answer.status}.`;
    if (!answer.ok) return;
    schema = await answer.json();
    showAll();
  } catch (error) {
    message.textContent = "The server cannot be reached.";
  }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  load(find("key").value);
});
window.addEventListener("hashchange", openLinked);
find("search").addEventListener("input", search);
load("");
