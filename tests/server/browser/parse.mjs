// Prints the HTML that the page's own module makes of the Markdown texts in stdin (a JSON list), before it is sanitized.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const directory = process.argv[2];
globalThis.marked = createRequire(import.meta.url)(path.join(directory, "vendor/marked.umd.js"));
const { parse, prepare, toHtml } = await import(pathToFileURL(path.join(directory, "markdown.js")));
const show = (text) => parse(prepare(text)).map(toHtml).join("").replaceAll("\n", "⏎");
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf-8")).map(show)));
