import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const task = JSON.parse(readFileSync(0, "utf8"));
const provider = createOpenAICompatible({
  name: "asyncrl",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  supportsStructuredOutputs: true,
});
const multiply = tool({
  description: "The product of two integers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a * b),
});

let answer = null;
try {
  const response = await generateText({
    model: provider(process.env.OPENAI_MODEL),
    prompt: task.text + ' Answer as JSON: {"value": 1}',
    tools: { multiply },
    stopWhen: stepCountIs(4),
    output: Output.object({ schema: z.object({ value: z.number() }) }),
  });
  answer = response.output;
} catch (error) {
  if (!error.name?.startsWith("AI_NoO")) throw error; // NoOutputGenerated, NoObjectGenerated
}
const right = String(answer?.value) === task.meta.value;
console.log(JSON.stringify({ reward: Number(right), parsed: Number(answer !== null) }));
