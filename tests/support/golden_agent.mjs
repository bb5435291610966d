// golden_agents.py once more, as a program of agent.command in Node.
import { readFileSync } from 'node:fs';

const task = JSON.parse(readFileSync(0));
const headers = {
  authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
  'content-type': 'application/json',
};
let text = task.text;
let drawn = 0;
for (let turn = 0; turn < 3; turn += 1) {
  const body = JSON.stringify({ model: process.env.ASYNCRL_MODEL, prompt: text });
  const url = `${process.env.OPENAI_BASE_URL}/completions`;
  const answer = await fetch(url, { method: 'POST', headers, body });
  const said = (await answer.json()).choices[0].text;
  drawn += said.length;
  text += `${said}${said.length}=`;
}
console.log(drawn);
