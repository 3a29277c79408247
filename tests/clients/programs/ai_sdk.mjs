// The AI SDK with its openai-compatible provider: whole, streamed, tools, objects. Arguments: the server's address, a model.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const sala = createOpenAICompatible({
  name: "sala", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
});
const options = {
  model: sala(name), prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 64, maxRetries: 0,
};
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };

const whole = await generateText(options);
assert(whole.text);
const stream = streamText(options);
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert((await stream.usage).outputTokens > 0);
const tools = { get_weather: tool({ description: "The weather of a city.", inputSchema: jsonSchema(city) }) };
const called = await generateText({ ...options, tools, toolChoice: "required" });
assert.deepEqual(Object.keys(called.toolCalls[0].input), ["city"]);
const { output } = await generateText({ ...options, output: Output.object({ schema: jsonSchema(city) }) });
assert.equal(typeof output.city, "string");
