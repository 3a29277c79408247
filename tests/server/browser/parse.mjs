// Parses the Markdown texts of stdin (a JSON list) with the page's own module, and prints their trees.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { parse } = await import(pathToFileURL(process.argv[2]));
const trees = JSON.parse(readFileSync(0, "utf-8")).map(parse);
const withoutRaw = (key, value) => (["raw", "end", "depth"].includes(key) ? undefined : value);
console.log(JSON.stringify(trees, withoutRaw));
