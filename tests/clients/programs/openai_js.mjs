// Package openai of npm: prints what it reads of a gateway, as JSON. Argument: the gateway's address.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "x", maxRetries: 0 });
const question = "What is a NeuronCore?";
const messages = [{ role: "user", content: question }];
const ask = { model: "assistant", temperature: 0, messages };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const callOf = (message) => {
  const [call] = message.tool_calls;
  return [call.function.name, JSON.parse(call.function.arguments)];
};
const usageOf = (usage) => [usage.prompt_tokens, usage.completion_tokens];
const streamed = async (fields) => {
  const stream = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true }, ...fields });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const completion = await stream.finalChatCompletion();
  return { text, completion, message: completion.choices[0].message };
};

const whole = await client.chat.completions.create(ask);
const joined = await streamed({});
const calling = { ...ask, model: "caller", tools };
const called = (await client.chat.completions.create(calling)).choices[0].message;
const result = { role: "tool", tool_call_id: called.tool_calls[0].id, content: "rain" };
await client.chat.completions.create({ ...calling, messages: [...messages, called, result] });

const response = await client.responses.create({ model: "assistant", temperature: 0, input: question });
let text = "";
const stream = client.responses.stream({ model: "assistant", temperature: 0, input: question });
stream.on("response.output_text.delta", (event) => (text += event.delta));
const final = await stream.finalResponse();
const cut = await client.responses
  .stream({ model: "assistant", temperature: 0, input: question, max_output_tokens: 5 })
  .finalResponse();

const read = {
  whole: whole.choices[0].message.content,
  streamed: joined.text,
  usage: usageOf(whole.usage),
  streamed_usage: usageOf(joined.completion.usage),
  call: callOf(called),
  streamed_call: callOf((await streamed({ model: "caller", tools })).message),
  responses: [response.output_text, text, final.output_text],
  cut: [cut.status, cut.incomplete_details.reason],
};
try {
  await client.chat.completions.create({ ...ask, model: "unknown" });
} catch (error) {
  read.unknown_model = [error.constructor.name, error.code];
}
console.log(JSON.stringify(read));
