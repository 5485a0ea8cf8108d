// Package @anthropic-ai/sdk of npm: prints what it reads of a gateway, as JSON. Argument: the gateway's address.

import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "What is a NeuronCore?" }];
const ask = { model: "claude-demo", max_tokens: 100, messages };
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", input_schema }];
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const callOf = (message) => {
  const [block] = message.content.filter((block) => block.type === "tool_use");
  return [block.name, block.input];
};
const usageOf = (message) => [message.usage.input_tokens, message.usage.output_tokens];

const whole = await client.messages.create(ask);
let text = "";
const stream = client.messages.stream(ask).on("text", (delta) => (text += delta));
const joined = await stream.finalMessage();
const calling = { ...ask, model: "caller", tools };
const called = await client.messages.create(calling);
const result = { type: "tool_result", tool_use_id: called.content.at(-1).id, content: "rain" };
const turns = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
await client.messages.create({ ...calling, messages: turns });
const models = [];
for await (const model of client.models.list({ limit: 1 })) models.push(model.id);

const read = {
  whole: textOf(whole),
  streamed: text,
  usage: usageOf(whole),
  streamed_usage: usageOf(joined),
  call: callOf(called),
  streamed_call: callOf(await client.messages.stream(calling).finalMessage()),
  models,
};
try {
  await client.messages.create({ ...ask, model: "unknown" });
} catch (error) {
  read.unknown_model = [error.constructor.name];
}
console.log(JSON.stringify(read));
