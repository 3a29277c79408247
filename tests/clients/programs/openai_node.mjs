// The npm package openai: whole, streamed, tools. Arguments: the server's address, a model.
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
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ ...options, tools, tool_choice: "required" });
assert.deepEqual(Object.keys(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments)), ["city"]);
await assert.rejects(client.chat.completions.create({ ...options, temperature: -1 }), { status: 400, param: "temperature" });
