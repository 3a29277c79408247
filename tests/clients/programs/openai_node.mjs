// The npm package openai: whole, streamed, tools, two turns. Arguments: the server's address, a model.
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { model, messages, temperature: 0, max_tokens: 32 };

assert((await client.models.list()).data.some((one) => one.id === model));
const whole = await client.chat.completions.create(options);
assert(whole.choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ ...options, tools, tool_choice: "required", max_tokens: 96 });
assert.match(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, /^(Paris|Rome)$/);
const asked = [...messages, whole.choices[0].message, { role: "user", content: "How is the weather there?" }];
const call = (await client.chat.completions.create({ ...options, messages: asked, tools, tool_choice: "required", max_tokens: 96 })).choices[0];
assert.equal(call.finish_reason, "tool_calls");
const results = call.message.tool_calls.map((one) => ({ role: "tool", tool_call_id: one.id, content: "sunny" }));
const last = await client.chat.completions.create({ ...options, messages: [...asked, call.message, ...results], tools });
assert(last.choices[0].message.content ?? last.choices[0].message.tool_calls);
await assert.rejects(client.chat.completions.create({ ...options, temperature: -1 }), { status: 400, param: "temperature" });
