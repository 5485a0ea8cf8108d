// Package ai of npm with one of its providers: prints what it reads of a gateway, as JSON.
// Arguments: the gateway's address, and `openai-compatible` or `anthropic`.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [url, provider] = process.argv.slice(2);
const models =
  provider === "anthropic"
    ? createAnthropic({ baseURL: `${url}/v1`, apiKey: "x" })
    : createOpenAICompatible({ name: "corewright", baseURL: `${url}/v1`, apiKey: "x", includeUsage: true });
const ask = (model, fields = {}) => ({
  model: models(model),
  maxRetries: 0,
  maxOutputTokens: 100,
  messages: [{ role: "user", content: "What is a NeuronCore?" }],
  ...fields,
});
const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] });
const tools = { get_weather: tool({ description: "The weather of a city.", inputSchema }) };
const callOf = ([call]) => [call.toolName, call.input];
const usageOf = (usage) => [usage.inputTokens, usage.outputTokens];

const whole = await generateText(ask("claude-demo"));
const stream = streamText(ask("claude-demo"));
let text = "";
for await (const piece of stream.textStream) text += piece;
const called = await generateText(ask("caller", { tools }));
const [call] = called.toolCalls;
const output = { type: "text", value: "rain" };
const result = { type: "tool-result", toolCallId: call.toolCallId, toolName: call.toolName, output };
const first = ask("caller").messages;
const turns = [...first, ...called.response.messages, { role: "tool", content: [result] }];
await generateText(ask("caller", { tools, messages: turns }));
const streamedCall = streamText(ask("caller", { tools }));
await streamedCall.consumeStream();

const read = {
  whole: whole.text,
  streamed: text,
  usage: usageOf(whole.usage),
  streamed_usage: usageOf(await stream.usage),
  call: callOf(called.toolCalls),
  streamed_call: callOf(await streamedCall.toolCalls),
};
try {
  await generateText(ask("unknown"));
} catch (error) {
  read.unknown_model = [error.name, error.statusCode];
}
console.log(JSON.stringify(read));
