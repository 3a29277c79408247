// The AI SDK with its providers for chats and for responses: whole, streamed, tools, objects, two turns.
// Arguments: the server's address, a model.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const fields = { type: "object", required: ["city"], additionalProperties: false };
const city = jsonSchema({ ...fields, properties: { city: { type: "string", enum: ["Paris", "Rome"] } } });
const anyCity = jsonSchema({ ...fields, properties: { city: { type: "string" } } });
const description = "The weather of a city.";

async function check(model) {
  const options = { model, prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 96, maxRetries: 0 };
  const whole = await generateText(options);
  assert(whole.text);
  const stream = streamText(options);
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text);
  assert((await stream.usage).outputTokens > 0);
  const tools = { get_weather: tool({ description, inputSchema: city }) };
  const called = await generateText({ ...options, tools, toolChoice: "required" });
  assert.match(called.toolCalls[0].input.city, /^(Paris|Rome)$/);
  const { output } = await generateText({ ...options, output: Output.object({ schema: city }) });
  assert.match(output.city, /^(Paris|Rome)$/);

  const asked = [
    { role: "user", content: options.prompt }, ...whole.response.messages, { role: "user", content: "How is the weather there?" },
  ];
  const cities = [];
  const execute = async (input) => {
    cities.push(input.city);
    return "sunny";
  };
  const { prompt, ...more } = options;
  const run = await generateText({
    ...more, messages: asked, tools: { get_weather: tool({ inputSchema: city, execute }) }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  });
  assert.equal(run.steps.length, 2);
  assert(cities.length > 0);
  assert.equal(run.steps[0].finishReason, "tool-calls");

  // A call that is cut goes back as the package keeps it: arguments that it could not read become a JSON string.
  const free = { get_weather: tool({ description, inputSchema: anyCity }) };
  const cut = await generateText({ ...options, tools: free, toolChoice: "required", maxOutputTokens: 14 });
  assert.equal(cut.finishReason, "length");
  assert(cut.toolCalls.every((call) => call.invalid));
  const after = [...asked, ...cut.response.messages, { role: "user", content: "And now?" }];
  assert((await generateText({ ...more, messages: after, tools: free })).finishReason);
  return cut.toolCalls.length;
}

const baseURL = `${url}/v1`;
const compatible = createOpenAICompatible({ name: "sala", baseURL, includeUsage: true, supportsStructuredOutputs: true });
assert.equal(await check(compatible(name)), 1);
await check(createOpenAI({ baseURL, apiKey: "none" }).responses(name));
