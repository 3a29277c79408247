// The npm package @anthropic-ai/sdk: whole, streamed, two turns with a tool. Arguments: the server's address, a model.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { model, messages, temperature: 0, max_tokens: 96 };
const input_schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather of a city.", input_schema }];

const whole = await client.messages.create(options);
assert(whole.content[0].text);
let text = "";
const stream = client.messages.stream(options).on("text", (piece) => (text += piece));
assert.equal((await stream.finalMessage()).stop_reason, whole.stop_reason);
assert.equal(text, whole.content[0].text);
const asked = [
  ...messages, { role: "assistant", content: whole.content }, { role: "user", content: "How is the weather there?" },
];
const tool_choice = { type: "tool", name: "get_weather" };
const called = await client.messages.stream({ ...options, messages: asked, tools, tool_choice }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
const calls = called.content.filter((block) => block.type === "tool_use");
assert.match(calls[0].input.city, /^(Paris|Rome)$/);
const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "sunny" }));
const history = [...asked, { role: "assistant", content: called.content }, { role: "user", content: results }];
assert((await client.messages.create({ ...options, messages: history, tools })).stop_reason);
await assert.rejects(client.messages.create({ ...options, max_tokens: -1 }), { status: 400 });
